"""Matrix products: sums of products of exactly two loads, so that they are recognised as such."""

from __future__ import annotations

from onchip.errors import OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Const, Expr, Number, Tensor, fold, tensor
from onchip.ops.geometry import broadcast, declare_opaque, require_float, require_same_type
from onchip.ops.promotion import broadcast_shape
from onchip.ops.registry import op


@op("aten.mm.default", "aten.bmm.default", "aten.matmul.default", "aten.mv.default")
@op("aten.dot.default", "aten.vdot.default")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product over the last axis of `a` and the last but one of `b`; a vector counts as
    a row on the left, as a column on the right, and leading axes broadcast."""
    _check("matrix product", a, b)
    if a.rank == 0 or b.rank == 0 or a.shape[-1] != b.shape[-2 if b.rank > 1 else 0]:
        raise OpaqueOperator(f"matrix product of {list(a.shape)} and {list(b.shape)}")
    return tensor(_product_shape(a, b), a.dtype, lambda *i: _product(a, b, i), "matmul")


@op("aten.linear.default")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times the transpose of weight [out, in] (or [in]), plus bias [out]."""
    _check("linear", x, weight, bias)
    rows = weight.rank - 1
    shape = x.shape[:-1] + weight.shape[:-1]
    if bias is not None and broadcast_shape(shape, bias.shape) != shape:
        raise OpaqueOperator(f"linear with a bias of shape {list(bias.shape)}")

    def element(*i: Expr) -> Expr:
        at, out = i[: len(i) - rows], i[len(i) - rows :]
        total = fold("sum", x.shape[-1:], lambda k: x[(*at, k)] * weight[(*out, k)])
        return total if bias is None else total + broadcast(bias, i)

    return tensor(shape, x.dtype, element, "linear")


@op("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default")
def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """beta * c + alpha * (a @ b); c broadcasts, and is not read when beta is 0."""
    _check("matrix product", a, b, c)
    return tensor(
        _product_shape(a, b), a.dtype, lambda *i: _scaled(c, _product(a, b, i), i, beta, alpha)
    )


@op("aten.addbmm.default")
def addbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """beta * c + alpha * (sum over the batch of a[n] @ b[n])."""
    _check("matrix product", a, b, c)

    def element(i: Expr, j: Expr) -> Expr:
        total = fold("sum", (a.shape[0], a.shape[2]), lambda n, k: a[n, i, k] * b[n, k, j])
        return _scaled(c, total, (i, j), beta, alpha)

    return tensor((a.shape[1], b.shape[2]), a.dtype, element)


@op("aten.addr.default")
def addr(c: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """beta * c + alpha * (a outer b)."""
    _check("outer product", a, b, c)
    return tensor(
        a.shape + b.shape, a.dtype, lambda i, j: _scaled(c, a[i] * b[j], (i, j), beta, alpha)
    )


@op("aten.outer.default", "aten.ger.default")
def outer(a: Tensor, b: Tensor) -> Tensor:
    """a [n] times b [m]: [n, m]."""
    _check("outer product", a, b)
    return tensor(a.shape + b.shape, a.dtype, lambda i, j: a[i] * b[j])


@op("aten.inner.default")
def inner(a: Tensor, b: Tensor) -> Tensor:
    """Sum of products over the last axis of both; the other axes side by side."""
    _check("inner product", a, b)
    if a.rank == 0 or b.rank == 0:
        return tensor(
            a.shape + b.shape, a.dtype, lambda *i: a[i[: a.rank]] * b[i[a.rank :]], "inner"
        )
    rows = a.rank - 1

    def element(*i: Expr) -> Expr:
        return fold("sum", a.shape[-1:], lambda k: a[(*i[:rows], k)] * b[(*i[rows:], k)])

    return tensor(a.shape[:-1] + b.shape[:-1], a.dtype, element)


@op("aten.tensordot.default")
def tensordot(a: Tensor, b: Tensor, dims_self: list[int], dims_other: list[int]) -> Tensor:
    """Sum of products over paired axes; the remaining axes of `a`, then of `b`."""
    _check("tensordot", a, b)
    over_a = [d % a.rank for d in dims_self]
    over_b = [d % b.rank for d in dims_other]
    if any(a.shape[p] != b.shape[q] for p, q in zip(over_a, over_b, strict=True)):
        raise OpaqueOperator("tensordot that broadcasts a contracted axis")
    keep_a = [d for d in range(a.rank) if d not in over_a]
    keep_b = [d for d in range(b.rank) if d not in over_b]

    def at(keep: list[int], over: list[int], i: tuple[Expr, ...], k: tuple[Expr, ...]) -> tuple:
        where = dict(zip(keep, i, strict=True)) | dict(zip(over, k, strict=True))
        return tuple(where[d] for d in range(len(where)))

    def element(*i: Expr) -> Expr:
        left, right = i[: len(keep_a)], i[len(keep_a) :]
        if not over_a:
            return a[at(keep_a, [], left, ())] * b[at(keep_b, [], right, ())]
        return fold(
            "sum",
            [a.shape[d] for d in over_a],
            lambda *k: a[at(keep_a, over_a, left, k)] * b[at(keep_b, over_b, right, k)],
        )

    shape = [a.shape[d] for d in keep_a] + [b.shape[d] for d in keep_b]
    return tensor(shape, a.dtype, element)


declare_opaque("einsum reads its indices from a string", "aten.einsum.default")
declare_opaque("bilinear contracts three tensors at once", "aten.bilinear.default")


def _check(what: str, *tensors: Tensor | None) -> None:
    for t in tensors:
        if t is not None:
            require_float(t, what)
    require_same_type(what, *tensors)


def _product_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    batch = broadcast_shape(a.shape[:-2], b.shape[:-2])
    rows = a.shape[-2:-1] if a.rank > 1 else ()
    return batch + rows + (b.shape[-1:] if b.rank > 1 else ())


def _product(a: Tensor, b: Tensor, i: tuple[Expr, ...]) -> Expr:
    """One element of a @ b at output index `i` (batch axes, row axis, column axis)."""
    at = list(i)
    column = [at.pop()] if b.rank > 1 else []
    row = [at.pop()] if a.rank > 1 else []
    batch_a, batch_b = _batch(a, at), _batch(b, at)
    return fold("sum", a.shape[-1:], lambda k: a[(*batch_a, *row, k)] * b[(*batch_b, k, *column)])


def _batch(x: Tensor, at: list[Expr]) -> list[Expr]:
    """Index of the leading axes of `x` at batch position `at`; sizes 1 stay at 0."""
    lead = x.shape[:-2]
    own = at[len(at) - len(lead) :]
    return [Const(0, DType.I64) if n == 1 else i for i, n in zip(own, lead, strict=True)]


def _scaled(c: Tensor, total: Expr, i: tuple[Expr, ...], beta: Number, alpha: Number) -> Expr:
    scaled = total if alpha == 1 else total * float(alpha)
    if beta == 0:
        return scaled
    start = broadcast(c, i)
    return (start if beta == 1 else start * float(beta)) + scaled
