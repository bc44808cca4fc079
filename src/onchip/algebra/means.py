"""Constants past a mean, sum or average pool: mean(x * c + d) = mean(x) * c + mean(d)."""

from __future__ import annotations

from onchip.algebra.layers import Affine, Fold, Pool, affine, fold_of, pool_of
from onchip.algebra.rewriting import Facts, Rewrite, again, derived, made, pays, rewrite
from onchip.capture.captured import Captured, LedgerEntry, Prepare
from onchip.errors import OpaqueOperator
from onchip.ir.expr import Number, Tensor
from onchip.ir.graph import Node


def mean_before_affine(captured: Captured, _: frozenset[str]) -> Captured:
    """Scale and shift by constants behind a mean, sum or average pool, not in front of it."""
    return rewrite(captured, _match_affine)


def _match_affine(facts: Facts, n: Node) -> Rewrite | None:
    r = fold_of(n) or pool_of(n)
    e = affine(facts.source(r.x, n), facts) if r else None
    if r is None or e is None or (e.scales and e.varies & set(r.dims)):
        return None
    if isinstance(r, Pool) and not e.scales and (e.varies & set(r.dims) or not r.whole):
        return None
    c, prepare = _past(e, r)
    try:
        first = again(n, e.x, *n.call.args[1:])
        arguments = e.on(first.results[0], c)
        then = made(e.node, e.node.name, e.node.call.target, *arguments, **e.node.call.kwargs)
    except OpaqueOperator:
        return None
    result, new = n.results[0], then.results[0]
    same = new.shape == result.shape and new.dtype is result.dtype
    if not same or not pays((e.node, n), (first, then)):
        return None
    text = f"{e.node.name} is done to what {n.name} gives, not to each element before it"
    entry = LedgerEntry("mean_before_affine", text, (n.name,))
    return Rewrite((e.node, n), (first, then), result, new, (entry,), prepare)


def _past(e: Affine, r: Fold | Pool) -> tuple[Tensor | Number, tuple[Prepare, ...]]:
    """The constant as it stands behind the mean or sum."""
    sums = isinstance(r, Fold) and r.kind == "sum" and not e.scales
    times = r.count if sums and isinstance(r, Fold) else 1
    if not isinstance(e.c, Tensor):
        return e.c * times, ()
    c, dims = e.c, r.dims
    keeps = isinstance(r, Pool) or r.keepdim or c.rank == 0
    if keeps and times == 1 and not e.varies & set(dims):
        return c, ()
    aligned = (*[1] * (e.x.rank - c.rank), *c.shape)
    kept = [1 if d in dims else n for d, n in enumerate(aligned)]
    keepdim = not isinstance(r, Fold) or r.keepdim
    shape = kept if keepdim else [n for d, n in enumerate(kept) if d not in dims]
    out, step = derived(
        f"{c.name}*{r.node.name}", shape if c.rank else (), c.dtype, (c,),
        lambda values: values[c].double().reshape(aligned).mean(dims) * times,
    )  # fmt: skip
    return out, (step,)
