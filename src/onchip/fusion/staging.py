"""From a region to stages: which tensors are stored on the way, which live inside others.

Placement of an intermediate:
  inline    evaluated where it is read (a view, a cheap or once-read pointwise expression)
  register  a reduction read exactly once per element: it stays in its consumer's registers
  scratch   a tile kept on chip and read back
  global    an output of the region
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from onchip.fusion.contraction import Contraction, as_contraction, find_contraction
from onchip.fusion.inline import inline, substitute_simplified, without_unit_axes
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.region import Region
from onchip.ir.expr import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Stream,
    Tensor,
    axis,
    children,
    loads,
    mentioned,
    reduces,
    rewrite,
    substitute,
    walk,
)
from onchip.ir.functions import FUNCTIONS, TRANSCENDENTAL
from onchip.ir.index import linear, simplify

# Evaluating an intermediate again costs arithmetic, keeping it costs a store and a load per
# element in L1 (about 4 cheap operations' time): recompute while the sum stays below this.
RECOMPUTE_LIMIT = 12.0
TRANSCENDENTAL_COST = 10.0
# A tile holds what one of its elements folds, whole: a longer row of an intermediate would leave no
# room in the second-level cache, so that evaluating it again is cheaper than fetching it.
ROW_LIMIT = 256 * 1024
# An expression nested deeper than this is stored on the way: every pass over expressions, the
# compiler's included, recurses into them.
DEPTH_LIMIT = 100


@dataclass(frozen=True, eq=False)
class Staged:
    """One stored tensor: its expression reads only region inputs and earlier staged tensors.

    The loops run over `loops`; `store` is the element (one index a dimension) that they write.
    They are the tensor's own axes, unless one had to be split to keep indices affine.
    """

    tensor: Tensor
    body: Expr
    is_output: bool
    loops: tuple[Axis, ...]
    store: tuple[Expr, ...]
    layout: tuple[int, ...] | None = None  # order of a scratch copy in memory, as strides
    shared: bool = False  # stored for later phases of the kernel, and for nobody else

    # found once: a nest is built for dozens of tiles of the same stages

    @cached_property
    def product(self) -> Contraction | None:
        """The matrix product that the body is, over the loops."""
        return find_contraction(self.body, self.loops)

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """What the body reads."""
        return tuple(loads(self.body))


@dataclass(frozen=True, eq=False, slots=True)
class _Read:
    consumer: Tensor
    load: Load
    in_reduce: bool


def stage(region: Region) -> tuple[Staged, ...] | Refusal:
    """Decide each tensor's placement and return the stored ones, in dependency order."""
    outputs = set(region.outputs)
    reads = _reads(region)
    inlined: dict[Tensor, Expr] = {}
    staged: list[Staged] = []
    cost: dict[Tensor, float] = {}
    depth: dict[Tensor, int] = {}
    memo: dict[Expr, Expr] = {}
    operators = {t: n.op for n in region.nodes for t in n.results}
    holds_product: dict[Tensor, bool] = {}
    for t in region.tensors:
        assert t.body is not None
        reason = unsupported(t)
        if reason:
            return Refusal(Rule.UNSUPPORTED_EXPRESSION, t.name, reason)
        body = split_reduction_axes(without_unit_axes(inline(t.body, inlined, memo)))
        body = labelled(body, operators.get(t, "") or t.name.rpartition("_")[0])
        inside = {ld.src for ld in walk(t.body) if isinstance(ld, Load) and ld.src in inlined}
        cost[t] = operations(t.body) + sum(cost[s] for s in inside)
        depth[t] = _depth(t.body) + max((depth[s] for s in inside), default=0)
        product = any(as_contraction(r, t.axes) is not None for r in reduces(body))
        keep = t in outputs or depth[t] > DEPTH_LIMIT
        keep = keep or not _may_inline(t, body, reads.get(t, []), cost[t])
        if not keep and product:
            keep = not _claim(t, reads[t][0].consumer, holds_product)
        if keep:
            staged.append(split_own_axes(Staged(t, body, t in outputs, t.axes, t.axes)))
        else:
            inlined[t] = body
    return tuple(staged)


def labelled(e: Expr, operator: str) -> Expr:
    """The same value, named after the operator whose result it is."""
    return replace(e, label=operator) if isinstance(e, Call) and operator else e


def unsupported(t: Tensor) -> str:
    """What keeps a tensor's expression out of generated kernels; "" if nothing does."""
    if not t.dtype.is_computable:
        return f"no generated code for {t.dtype}"
    for e in walk(t.body):  # type: ignore[arg-type]
        if isinstance(e, Stream):
            return "streams have no C++ lowering yet"
        if isinstance(e, Load) and not e.src.dtype.is_computable:
            return f"no generated code for {e.src.dtype}"
        if isinstance(e, Call) and e.fn not in FUNCTIONS:
            return f"no C++ spelling of the function {e.fn}"
    return ""


def _depth(e: Expr) -> int:
    """Levels of an expression, indices not counted."""
    if isinstance(e, Load):
        return 1
    return 1 + max((_depth(x) for x in children(e)), default=0)


def _claim(t: Tensor, consumer: Tensor, holds: dict[Tensor, bool]) -> bool:
    """At most one matrix product lives in one stage."""
    own = any(as_contraction(r, consumer.axes) is not None for r in reduces(consumer.body))  # type: ignore[arg-type]
    if own or holds.get(consumer):
        return False
    holds[consumer] = True
    return True


def _reads(region: Region) -> dict[Tensor, list[_Read]]:
    out: dict[Tensor, list[_Read]] = {}

    def visit(consumer: Tensor, e: Expr, in_reduce: bool, seen: set) -> None:
        if (e, in_reduce) in seen:
            return
        seen.add((e, in_reduce))
        if isinstance(e, Load):
            out.setdefault(e.src, []).append(_Read(consumer, e, in_reduce))
        for c in children(e):
            visit(consumer, c, in_reduce or isinstance(e, Reduce), seen)

    for t in region.tensors:
        visit(t, t.body, False, set())  # type: ignore[arg-type]
    return out


def _may_inline(t: Tensor, body: Expr, reads: list[_Read], cost: float) -> bool:
    if not reads:
        return False
    if reduces(body):
        return len(reads) == 1 and _once_per_element(t, reads[0])
    times = sum(_multiplicity(t, r.load) for r in reads)
    return times <= 1.001 or cost * times <= RECOMPUTE_LIMIT or _row_bytes(t, reads) > ROW_LIMIT


def _once_per_element(t: Tensor, read: _Read) -> bool:
    """The consumer reads each element exactly once, outside any reduction of its own."""
    if read.in_reduce or read.load.pad is not None or read.consumer.numel != t.numel:
        return False
    index = [simplify(i) for i in read.load.index]
    axes = [i for i in index if isinstance(i, Axis)]
    constants = [i for i in index if isinstance(i, Const)]
    return (
        len(axes) + len(constants) == len(index)
        and len(set(axes)) == len(axes)
        and (
            not reduces(read.consumer.body)  # type: ignore[arg-type]
        )
    )


def _multiplicity(t: Tensor, load: Load) -> float:
    """How often each element is evaluated: over exactly the axes the index mentions."""
    axes: set[Axis] = set().union(*(mentioned(i) for i in load.index)) if load.index else set()
    return prod(a.extent for a in axes) / max(t.numel, 1)


def _row_bytes(t: Tensor, reads: list[_Read]) -> int:
    """Bytes of `t` that one element of a consumer reads."""
    most = 0
    for r in reads:
        axes: set[Axis] = set().union(*(mentioned(i) for i in r.load.index))
        most = max(most, prod(a.extent for a in axes - set(r.consumer.axes)))
    return most * t.dtype.size


def operations(e: Expr) -> float:
    """Rough operations per element, a transcendental function counted as ten; index arithmetic and
    reductions are not counted."""
    total = 0.0
    for x in _value_nodes(e):
        if isinstance(x, Call) and not x.fn.startswith("cast_"):
            total += TRANSCENDENTAL_COST if x.fn in TRANSCENDENTAL else 1.0
    return total


def _value_nodes(e: Expr) -> list[Expr]:
    out, stack = [], [e]
    while stack:
        x = stack.pop()
        out.append(x)
        if not isinstance(x, Load):
            stack.extend(children(x))
    return out


def split_reduction_axes(body: Expr) -> Expr:
    """A reduction axis that is only read through `// c` and `% c` becomes two axes, so that
    indices stay affine (a linear layer after a flatten)."""
    for r in reduces(body):
        if r.monoid in ("argmax", "argmin"):
            continue  # their one axis is the position that they give
        for a in r.axes:
            c = splitting_factor(r.body, a)
            if c is None:
                continue
            hi, lo = axis(a.extent // c, "r"), axis(c, "r")
            whole = hi * c + lo
            axes = tuple(x for old in r.axes for x in ((hi, lo) if old is a else (old,)))
            new = Reduce(r.monoid, axes, substitute_simplified(r.body, {a: whole}))
            return split_reduction_axes(
                rewrite(body, lambda x, r=r, new=new: new if x is r else None)
            )
    return body


def split_own_axes(s: Staged) -> Staged:
    """The same for the axes of the tensor itself (pixel shuffle, a flattened result)."""
    for a in s.loops:
        c = splitting_factor(s.body, a)
        if c is None:
            continue
        hi, lo = axis(a.extent // c), axis(c)
        mapping: dict[Axis, Expr] = {a: hi * c + lo}
        return split_own_axes(
            Staged(
                s.tensor,
                substitute_simplified(s.body, mapping),
                s.is_output,
                tuple(x for old in s.loops for x in ((hi, lo) if old is a else (old,))),
                tuple(simplify(substitute(i, mapping)) for i in s.store),
            )
        )
    return s


def with_own_axes(s: Staged) -> Staged:
    """The stage over its tensor's own axes, also where they have been split."""
    if s.store == s.loops:
        return s
    digits: dict[Axis, Expr] = {}
    for i, a in zip(s.store, s.tensor.axes, strict=True):
        terms = sorted(linear(i).terms, key=lambda term: -term[1])
        for n, (loop, step) in enumerate(terms):
            assert isinstance(loop, Axis)
            digits[loop] = a // step % loop.extent if n else a // step
    body = substitute_simplified(s.body, digits)
    return replace(s, body=body, loops=s.tensor.axes, store=s.tensor.axes)


def splitting_factor(e: Expr, a: Axis) -> int | None:
    """The smallest c dividing the extent for which `e` contains a // c or a % c of axis `a`."""
    factors = {
        int(x.args[1].value)
        for x in walk(e)
        if isinstance(x, Call)
        and x.fn in ("floordiv", "mod")
        and x.args[0] is a
        and isinstance(x.args[1], Const)
    }
    good = sorted(c for c in factors if 1 < c < a.extent and a.extent % c == 0)
    return good[0] if good else None
