"""A rule's matches, replaced in a graph all at once; and the operators and constants it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from onchip.analysis.traffic import VIEWS
from onchip.analysis.work import node_flops
from onchip.capture import schema
from onchip.capture.build import with_dtypes
from onchip.capture.captured import Captured, LedgerEntry, Prepare
from onchip.capture.cleanup import fixed_constants, remove_dead
from onchip.capture.rewriting import substitute
from onchip.errors import OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor
from onchip.ir.graph import Graph, LibraryCall, Node, defined_by
from onchip.ops.registry import OPERATORS


class Facts:
    """Who makes and who reads a graph's tensors."""

    def __init__(self, graph: Graph) -> None:
        self.producer, self.users = graph.producer(), graph.users()
        self.kept = set(graph.output_tensors)
        self.fixed = fixed_constants(graph)

    def source(self, t: Any, reader: Node) -> Node | None:
        """The operator that makes `t` for `reader` and for nobody else, and has one result."""
        n = self.producer.get(t) if isinstance(t, Tensor) else None
        if n is None or n.opaque or len(n.results) != 1 or t in self.kept:
            return None
        return n if self.users.get(t) == [reader] else None


@dataclass(frozen=True, eq=False, slots=True)
class Rewrite:
    """One match: `old` nodes, in order, give way to `new` ones in the last one's place, where
    `result` stands for `old_result`; `prepare` computes the constants that this takes."""

    old: tuple[Node, ...]
    new: tuple[Node, ...]
    old_result: Tensor
    result: Tensor
    ledger: tuple[LedgerEntry, ...]
    prepare: tuple[Prepare, ...] = ()


def rewrite(captured: Captured, find: Callable[[Facts, Node], Rewrite | None]) -> Captured:
    """Replace what `find` gives for the nodes of the graph, in order; matches that share a node
    with an earlier one wait for the next application of the rule."""
    graph, facts = captured.graph, Facts(captured.graph)
    found: dict[Node, Rewrite] = {}  # by the node in whose place the new ones stand
    gone: set[Node] = set()
    for n in graph.nodes:
        r = None if n in gone else find(facts, n)
        if r is not None and gone.isdisjoint(r.old) and _lies_alike(r, facts):
            found[r.old[-1]] = r
            gone.update(r.old)
    if not found:
        return captured
    nodes: list[Node] = []
    for n in graph.nodes:
        nodes += found[n].new if n in found else [] if n in gone else [n]
    prepare = tuple(p for r in found.values() for p in r.prepare)
    constants = {**graph.constants, **{t: t.name for p in prepare for t in p.outputs}}
    mapping = {r.old_result: r.result for r in found.values()}
    graph = substitute(replace(graph, constants=constants), nodes, mapping)
    return captured.with_graph(
        remove_dead(graph),
        prepare=captured.prepare + prepare,
        ledger=captured.ledger + tuple(e for r in found.values() for e in r.ledger),
    )


def _lies_alike(r: Rewrite, facts: Facts) -> bool:
    """Whether the result lies in memory as the old one, on which later views of it may rely. (What
    the program returns, the runtime lays out as eager does.)"""
    if r.new and r.old_result in facts.kept:
        r.result.tag["strides"] = r.old_result.tag.get("strides")
        return True
    places: list[Any] = [t.tag.get("strides") for t in (r.result, r.old_result)]
    if None in places:
        return places[0] is places[1]
    return all(a == b for a, b, n in zip(*places, r.result.shape, strict=True) if n != 1)


# ---- making operators --------------------------------------------------------------------------


def made(like: Node, name: str, target: str, *args: Any, **kwargs: Any) -> Node:
    """The operator `target` on these arguments, of which the first result is read, from the
    place in the user's program that `like` comes from. Raises OpaqueOperator if this use has no
    expression."""
    plain, named = with_dtypes(args), with_dtypes(kwargs)
    out = OPERATORS[target](*plain, **named)
    results = list(out) if isinstance(out, tuple) else [out]
    first = results[0]
    call = LibraryCall(target, args, kwargs)
    if first in call.tensors():
        raise OpaqueOperator(f"{target} gives its argument back")
    first.name = name
    first.tag["strides"] = _strides(call)
    outputs = (first, *[None] * (len(results) - 1))
    return Node(name, call, defined_by([first], call.tensors()), outputs, like.origin)


def again(n: Node, *args: Any) -> Node:
    """The operator `n` on other arguments."""
    return made(n, n.name, n.call.target, *args, **n.call.kwargs)


def _strides(call: LibraryCall) -> tuple[int, ...]:
    """What PyTorch makes of the arguments' strides."""
    values = {}
    for t in call.tensors():
        dense = torch.empty(t.shape, dtype=torch_type(t.dtype), device="meta")
        strides = cast(tuple[int, ...], t.tag.get("strides") or dense.stride())
        values[t] = torch.empty_strided(t.shape, strides, dtype=dense.dtype, device="meta")
    return tuple(schema.call(call, values)[0].stride())


def torch_type(dtype: DType) -> torch.dtype:
    return getattr(torch, dtype.label)


# ---- constants ---------------------------------------------------------------------------------


Values = dict[Tensor, torch.Tensor]
Compute = Callable[[Values], torch.Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Exact:
    """A derived constant in float64, from constants that are not derived (the tag "exact")."""

    sources: tuple[Tensor, ...]
    compute: Compute


def derived(
    name: str,
    shape: Sequence[int],
    dtype: DType,
    sources: Iterable[Tensor],
    compute: Compute,
    like: Tensor | None = None,
    rounded: Compute | None = None,
) -> tuple[Tensor, Prepare]:
    """A constant and how it is computed: `compute` takes the values of `sources` (any type) and
    gives float64, which is rounded once to `dtype`: what is derived from it starts from float64
    again. The constant lies densely, its axes in the order of `like`'s in memory (a tensor of
    this shape; None: contiguous). `rounded` gives the same values in `dtype` with less memory."""
    out, order = Tensor(name, tuple(shape), dtype), tuple(dict.fromkeys(sources))
    inner: dict[Tensor, Exact] = {s: s.tag["exact"] for s in order if "exact" in s.tag}  # type: ignore[misc]
    given = tuple(dict.fromkeys(b for s in order for b in _givens(s, inner)))

    def whole(values: Values) -> torch.Tensor:
        known = values | {s: e.compute(values) for s, e in inner.items()}
        return compute(known).reshape(out.shape)

    out.tag["strides"] = strides = _dense(out.shape, like)
    out.tag["exact"] = Exact(given, whole)
    quick = rounded if rounded is not None and not inner else whole

    def run(values: list[torch.Tensor]) -> list[torch.Tensor]:
        found = quick(dict(zip(given, values, strict=True))).to(torch_type(dtype))
        placed = torch.empty_strided(out.shape, strides, dtype=found.dtype, device=found.device)
        return [found if found.stride() == strides else placed.copy_(found)]

    return out, Prepare(name, given, (out,), run)


def _givens(s: Tensor, inner: dict[Tensor, Exact]) -> tuple[Tensor, ...]:
    return inner[s].sources if s in inner else (s,)


def _dense(shape: tuple[int, ...], like: Tensor | None) -> tuple[int, ...]:
    if like is None or like.tag.get("strides") is None:
        return torch.empty(shape, device="meta").stride()
    strides = cast(tuple[int, ...], like.tag["strides"])
    given = torch.empty_strided(shape, strides, device="meta")
    return torch.empty_like(given, memory_format=torch.preserve_format).stride()


def without_unread(captured: Captured) -> Captured:
    """Without computations of constants whose results nobody reads."""
    read, kept = set(captured.graph.constants), []
    for p in reversed(captured.prepare):
        if not read.isdisjoint(p.outputs):
            kept.append(p)
            read.update(p.sources)
    return captured.with_graph(captured.graph, prepare=tuple(reversed(kept)))


# ---- whether it pays ---------------------------------------------------------------------------


# Data sheet of the fastest device that there are kernels for (H200 SXM: dense bfloat16, memory);
# what one more kernel costs there as a node of a CUDA graph (measured: 1 to 2 µs).
MOST_FLOPS, MOST_BYTES, START_S = 989e12, 4.8e12, 2e-6


def pays(old: Iterable[Node], new: Iterable[Node], share: float = 1.0) -> bool:
    """Whether the new operators take less than this share of the FLOPs, and move no more bytes,
    each a kernel alone, and save what it takes to start the kernels that they add.

    By the cost model (analysis/cost.py) a kernel takes its start, the longer of moving its bytes
    and computing, and a part of the shorter. So with no more starts the new ones take no longer on
    any device. With more, the most that they can take (both times one after the other) is compared
    with the least that the old ones can (the longer of their sums), at the highest rates that there
    are: a slower device starts kernels up to 5 times as slowly, and computes and moves 5 times as
    slowly or more. What this does not see is the old operators as one kernel, which starts once: at
    worst the new ones lose a start for each kernel beyond the first."""
    before, after = list(old), list(new)
    flops = [sum(node_flops(n) or 0 for n in nodes) for nodes in (before, after)]
    nbytes = [_bytes(before), _bytes(after)]
    if flops[1] >= share * flops[0] or nbytes[1] > nbytes[0]:
        return False
    added = _launches(after) - _launches(before)
    least_s = max(flops[0] / MOST_FLOPS, nbytes[0] / MOST_BYTES)
    most_s = flops[1] / MOST_FLOPS + nbytes[1] / MOST_BYTES + START_S * added
    return added <= 0 or most_s <= least_s


def _launches(nodes: Iterable[Node]) -> int:
    return sum(n.op not in VIEWS for n in nodes)


def _bytes(nodes: Iterable[Node]) -> int:
    moved = (t for n in nodes if n.op not in VIEWS for t in (*n.inputs, *n.results))
    return sum(t.numel * t.dtype.size for t in moved)
