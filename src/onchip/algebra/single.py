"""A fold over axes of one element gives that element."""

from __future__ import annotations

from onchip.algebra.rewriting import Facts, Rewrite, made, rewrite
from onchip.capture.captured import Captured, LedgerEntry
from onchip.ir.expr import Tensor
from onchip.ir.graph import Node
from onchip.ops.promotion import normalize_dims

# Of one element x, NaN and infinities included: log(exp(x - x)) + x = x.
_FOLDS = {
    "aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default", "aten.amin.default",
    "aten.max.dim", "aten.min.dim", "aten.prod.dim_int", "aten.logsumexp.default",
}  # fmt: skip


def single_element(captured: Captured, _: frozenset[str]) -> Captured:
    """Sums, means, products, extremes and logsumexp of one element become views of it, and an
    adaptive pool to as many windows as elements. (Not a softmax, which is 1 there, but for NaN and
    infinities.)"""
    return rewrite(captured, _match)


def _match(facts: Facts, n: Node) -> Rewrite | None:
    x = n.call.args[0] if n.call.args else None
    if not isinstance(x, Tensor) or n.opaque or n.call.kwargs or n.outputs[:1] != n.results:
        return None
    result = n.results[0]
    if result.dtype is not x.dtype or not x.dtype.is_float or _must_be_new(x, result, facts):
        return None
    dims: tuple[int, ...] = ()
    if n.call.target in _FOLDS:
        dims = normalize_dims(n.call.args[1] if len(n.call.args) > 1 else None, x.rank)
        if not dims or any(x.shape[d] != 1 for d in dims):
            return None
    elif not (n.op.startswith("adaptive_") and result.shape == x.shape):
        return None
    text = f"{n.name} folds one element each: it is a view of them; no rounding changes"
    entry = LedgerEntry("single_element", text, (n.name,))
    if result.shape == x.shape:
        return Rewrite((n,), (), result, x, (entry,))
    new = made(n, n.name, "aten.squeeze.dims", x, list(dims))
    return Rewrite((n,), (new,), result, new.results[0], (entry,))


def _must_be_new(x: Tensor, result: Tensor, facts: Facts) -> bool:
    """Whether the result must be memory of its own: the program returns it, and its source is
    the user's or returned too."""
    return result in facts.kept and (x in facts.kept or x not in facts.producer)
