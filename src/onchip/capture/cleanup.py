"""Clean-up: a flat list of named passes, each a pure function from graph to graph.

None changes a value. Aliasing between results may be lost here (a removed clone, a merged
expression): the runtime compares with eager's aliasing and copies where it must.
"""

from __future__ import annotations

from typing import Any

from onchip.capture import schema
from onchip.capture.captured import Captured, LedgerEntry, Prepare
from onchip.capture.rewriting import resolve, substitute, without_unread
from onchip.ir.expr import Const, Tensor
from onchip.ir.graph import Graph, LibraryCall, Node, reads

COMPUTED_ONCE = "computed_once"  # the rule's name
_IDENTITIES = frozenset(
    [
        "aten.alias.default",
        "aten.detach.default",
        "aten.lift_fresh_copy.default",
        "aten.lift_fresh.default",
        "aten.clone.default",
        "aten.copy.default",
        "aten.contiguous.default",
        "aten._to_copy.default",
        "aten.to.dtype",
        "aten.view.default",
        "aten.reshape.default",
        "aten.expand.default",
        "aten.permute.default",
        "aten.dropout.default",
        "aten.slice.Tensor",
        "aten.positive.default",
    ]
)


def remove_identities(graph: Graph) -> Graph:
    """Drop operators whose result has their argument's elements, dtype and strides."""
    mapping: dict[Tensor, Tensor] = {}
    kept = []
    for n in graph.nodes:
        if _is_identity(n):
            mapping[n.results[0]] = resolve(_source(n), mapping)
        else:
            kept.append(n)
    return substitute(graph, kept, mapping) if mapping else graph


def _source(n: Node) -> Any:
    """The argument whose elements an identity gives: a copy's second."""
    return n.call.args[1 if n.op == "copy" else 0]


def _is_identity(n: Node) -> bool:
    if n.call.target not in _IDENTITIES or len(n.results) != 1:
        return False
    source, result = _source(n), n.results[0]
    if not isinstance(source, Tensor) or n.call.kwargs.get("device") is not None:
        return False
    if n.op == "permute" and list(n.call.args[1]) != list(range(source.rank)):
        return False
    if n.op == "dropout" and n.call.args[2] and n.call.args[1]:
        return False
    same_type = source.shape == result.shape and source.dtype is result.dtype
    return same_type and source.tag.get("strides") == result.tag.get("strides")


def merge_common(graph: Graph) -> tuple[Graph, tuple[LedgerEntry, ...]]:
    """Common sub-expressions: the same operator on the same arguments is computed once. Says so
    in one entry of the ledger."""
    seen: dict[Any, Node] = {}
    mapping: dict[Tensor, Tensor] = {}
    kept = []
    for n in graph.nodes:
        target = n.call.target
        if schema.is_random(target) or schema.has_effect(target):
            kept.append(n)
            continue
        first = seen.setdefault((target, _key(n.call, mapping)), n)
        if first is n:
            kept.append(n)
        else:
            pairs = zip(n.outputs, first.outputs, strict=True)
            mapping.update({b: a for b, a in pairs if a is not None and b is not None})
    if not mapping:
        return graph, ()
    spared = [n.name for n in graph.nodes if any(t in mapping for t in n.results)]
    text = f"computed once, though written twice, without a change of rounding: {_listed(spared)}"
    entry = LedgerEntry(COMPUTED_ONCE, text, (spared[0],))
    return substitute(graph, kept, mapping), (entry,)


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _key(x: Any, mapping: dict[Tensor, Tensor]) -> Any:
    match x:
        case LibraryCall():
            return (_key(x.args, mapping), _key(x.kwargs, mapping))
        case Tensor():
            return ("tensor", id(resolve(x, mapping)))
        case tuple() | list():
            return tuple(_key(y, mapping) for y in x)
        case dict():
            return tuple(sorted((k, _key(v, mapping)) for k, v in x.items()))
    return (type(x).__name__, repr(x))


def remove_dead(graph: Graph) -> Graph:
    """Drop operators that nobody reads (those with effects stay), and unread results."""
    read = set(graph.output_tensors)
    kept: list[Node] = []
    for n in reversed(graph.nodes):
        if any(t in read for t in n.results) or schema.has_effect(n.call.target):
            kept.append(without_unread(n, read))
            read.update(n.inputs)
    constants = {t: name for t, name in graph.constants.items() if t in read}
    constants |= {m.target: graph.constants[m.target] for m in graph.mutations
                  if m.target in graph.constants}  # fmt: skip
    return graph.with_nodes(reversed(kept), constants=constants)


def clean_up(graph: Graph, merge: bool = True) -> tuple[Graph, tuple[LedgerEntry, ...]]:
    """Without dead operators, identities and (if `merge`) duplicates; what the ledger says."""
    graph = remove_identities(remove_dead(graph))
    graph, ledger = merge_common(graph) if merge else (graph, ())
    return remove_dead(graph), ledger


# ---- constants ---------------------------------------------------------------------------------


def fixed_constants(graph: Graph) -> set[Tensor]:
    """Constants that no call of the program changes."""
    return set(graph.constants) - {m.target for m in graph.mutations}


def constant_tensors(graph: Graph) -> set[Tensor]:
    """Tensors whose value depends on fixed constants only: those constants themselves, and
    tensors inside nodes (batch norm's per-channel scale). The planner may compute them once."""
    known = fixed_constants(graph)
    for n in graph.nodes:
        for t in n.tensors:
            sources = reads(t)
            if sources and all(s in known for s in sources) and t not in n.results:
                known.add(t)
    return known


def prepare_constants(captured: Captured) -> Captured:
    """Move operators that depend on constants alone out of the program.

    Results that the program returns (themselves or as a view) stay: each call must return fresh
    memory, as eager does. Fills (`zeros`, `full`) stay too where the program reads them: a number
    inside a kernel is cheaper than memory.
    """
    graph = captured.graph
    known, moved, returned = fixed_constants(graph), [], _returned(graph)
    for n in graph.nodes:
        target = n.call.target
        settled = not (schema.is_random(target) or schema.has_effect(target))
        if settled and not returned & set(n.results) and all(t in known for t in n.inputs):
            moved.append(n)
            known.update(n.results)
    fills = {n for n in moved if _is_fill(n)}
    main = [n for n in graph.nodes if n not in moved or n in fills]
    needed = {t for n in moved if n not in fills for t in n.inputs}
    done = [n for n in moved if n not in fills or needed & set(n.results)]
    new = {t: t.name for n in done if n not in fills for t in n.results}
    graph = remove_dead(graph.with_nodes(main, constants={**graph.constants, **new}))
    prepare = tuple(_prepare_node(n) for n in done)
    return captured.with_graph(graph, prepare=captured.prepare + prepare)


def _is_fill(n: Node) -> bool:
    return not n.inputs and bool(n.results) and all(isinstance(t.body, Const) for t in n.results)


def _returned(graph: Graph) -> set[Tensor]:
    """Output tensors, and what they may be views of."""
    found = set(graph.output_tensors)
    for n in reversed(graph.nodes):
        if schema.aliases(n.call.target) and found & set(n.results):
            found.update(n.inputs)
    return found


def _prepare_node(n: Node) -> Prepare:
    sources, call, outputs = n.inputs, n.call, n.outputs

    def compute(values: list[Any]) -> list[Any]:
        got = schema.call(call, dict(zip(sources, values, strict=True)))
        return [x for t, x in zip(outputs, got, strict=True) if t is not None]

    return Prepare(n.name, sources, n.results, compute)
