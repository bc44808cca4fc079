"""Rebuilding a graph after some tensors were replaced by others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from onchip.ir.expr import Expr, Load, Tensor, rewrite
from onchip.ir.graph import Graph, LibraryCall, Mutation, Node, defined_by

Mapping = dict[Tensor, Tensor]


def substitute(
    graph: Graph,
    nodes: Iterable[Node],
    mapping: Mapping,
    own: dict[Node, Mapping] | None = None,
) -> Graph:
    """The graph with `nodes`, every use of a key of `mapping` turned into its value; `own`: what a
    node of its own reads otherwise. Nodes that do not depend on a key stay the same objects."""
    mapping, new = dict(mapping), []
    for n in nodes:
        mine = (own or {}).get(n, {})
        local = {**mapping, **mine}
        new.append(_node(n, local))
        mapping |= {t: x for t, x in local.items() if t not in mine}
    outputs = tuple(_replace(o, mapping) for o in graph.outputs)
    mutations = tuple(Mutation(m.target, _replace(m.value, mapping)) for m in graph.mutations)
    return graph.with_nodes(new, outputs=outputs, mutations=mutations)


def _node(n: Node, mapping: Mapping) -> Node:
    inputs = n.inputs
    if not any(t in mapping for t in inputs):
        return n
    call = LibraryCall(
        n.call.target, _replace(n.call.args, mapping), _replace(n.call.kwargs, mapping)
    )
    memo: dict[Expr, Expr] = {}
    for t in (*n.tensors, *(t for t in n.results if t not in n.tensors)):
        body = None if t.body is None else _body(t.body, mapping, memo)
        mapping[t] = replace(t, body=body, tag=dict(t.tag))
    outputs = tuple(None if t is None else mapping[t] for t in n.outputs)
    return replace(n, call=call, tensors=tuple(mapping[t] for t in n.tensors), outputs=outputs)


def _body(e: Expr, mapping: Mapping, memo: dict[Expr, Expr]) -> Expr:
    def leaf(x: Expr) -> Expr | None:
        if isinstance(x, Load) and x.src in mapping:
            index = tuple(rewrite(i, leaf, memo) for i in x.index)
            return Load(resolve(x.src, mapping), index, x.pad)
        return None

    return rewrite(e, leaf, memo)


def resolve(t: Tensor, mapping: Mapping) -> Tensor:
    while t in mapping:
        t = mapping[t]
    return t


def _replace(x: Any, mapping: Mapping) -> Any:
    match x:
        case Tensor():
            return resolve(x, mapping)
        case tuple() | list():
            return type(x)(_replace(y, mapping) for y in x)
        case dict():
            return {k: _replace(v, mapping) for k, v in x.items()}
    return x


def without_unread(n: Node, read: set[Tensor]) -> Node:
    """The node with the results that nobody reads turned into None."""
    if all(t is None or t in read for t in n.outputs):
        return n
    outputs = tuple(t if t in read else None for t in n.outputs)
    kept = defined_by([t for t in outputs if t is not None], n.inputs) if not n.opaque else ()
    return replace(n, outputs=outputs, tensors=kept)
