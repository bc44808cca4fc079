"""Statistics and norms: the centre is taken first, then a fold about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from onchip.ir.dtype import DType
from onchip.ir.expr import Expr, Number, Tensor, call, cast, where
from onchip.ops.promotion import DEFAULT_FLOAT, compare, normalize_dims
from onchip.ops.reductions import Dims, element_count, floating, mean_all, mean_dims, reduction
from onchip.ops.registry import op


def centre(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The mean over `dims`, kept with size 1, in the compute type."""
    n = float(element_count(x, dims))
    return reduction(
        "mean", x, dims, True, x.dtype.compute, "sum", lambda a, _: a, lambda total, _: total / n
    )


def _variance(x: Tensor, dim: Dims, correction: Number | None, keepdim: bool, root: bool) -> Tensor:
    kind = floating(x, None, "var")
    dims = normalize_dims(dim, x.rank)
    mean = centre(x, dims)
    divisor = float(max(element_count(x, dims) - (1 if correction is None else correction), 0))

    def element(a: Expr, kept: Callable[[Tensor], Expr]) -> Expr:
        distance = a - kept(mean)
        return distance * distance

    def finish(total: Expr, _: object) -> Expr:
        return call("sqrt", total / divisor) if root else total / divisor

    return reduction("std" if root else "var", x, dims, keepdim, kind, "sum", element, finish)


@op("aten.var.correction")
def var(
    x: Tensor, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> Tensor:
    return _variance(x, dim, correction, keepdim, root=False)


@op("aten.std.correction")
def std(
    x: Tensor, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> Tensor:
    return _variance(x, dim, correction, keepdim, root=True)


@op("aten.var.default")
def var_all(x: Tensor, unbiased: bool = True) -> Tensor:
    return _variance(x, None, int(unbiased), False, root=False)


@op("aten.std.default")
def std_all(x: Tensor, unbiased: bool = True) -> Tensor:
    return _variance(x, None, int(unbiased), False, root=True)


@op("aten.var.dim")
def var_dim(x: Tensor, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    return _variance(x, dim, int(unbiased), keepdim, root=False)


@op("aten.std.dim")
def std_dim(x: Tensor, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    return _variance(x, dim, int(unbiased), keepdim, root=True)


@op("aten.var_mean.correction")
def var_mean(
    x: Tensor, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return var(x, dim, correction=correction, keepdim=keepdim), mean_dims(x, dim, keepdim)


@op("aten.std_mean.correction")
def std_mean(
    x: Tensor, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return std(x, dim, correction=correction, keepdim=keepdim), mean_dims(x, dim, keepdim)


@op("aten.var_mean.default")
def var_mean_all(x: Tensor, unbiased: bool = True) -> tuple[Tensor, Tensor]:
    return var_all(x, unbiased), mean_all(x)


@op("aten.std_mean.default")
def std_mean_all(x: Tensor, unbiased: bool = True) -> tuple[Tensor, Tensor]:
    return std_all(x, unbiased), mean_all(x)


@op("aten.var_mean.dim")
def var_mean_dim(
    x: Tensor, dim: Dims, unbiased: bool = True, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return var_dim(x, dim, unbiased, keepdim), mean_dims(x, dim, keepdim)


@op("aten.std_mean.dim")
def std_mean_dim(
    x: Tensor, dim: Dims, unbiased: bool = True, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return std_dim(x, dim, unbiased, keepdim), mean_dims(x, dim, keepdim)


@op("aten.logsumexp.default", "aten.special_logsumexp.default")
def logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """log of the sum of exponentials, the largest element taken out first."""
    kind = x.dtype if x.dtype.is_float else DEFAULT_FLOAT
    dims = normalize_dims(dim, x.rank)
    top = reduction("max", x, dims, True, kind.compute, "max", lambda a, _: cast(a, kind.compute))

    def shift(kept: Callable[[Tensor], Expr]) -> Expr:
        # an infinite maximum (also that of nothing, -inf) would give inf - inf
        value = kept(top)
        return where(compare("eq", call("abs", value), math.inf), 0.0, value)

    return reduction(
        "logsumexp", x, dims, keepdim, kind, "sum",
        lambda a, kept: call("exp", cast(a, kind.compute) - shift(kept)),
        lambda total, kept: call("log", total) + shift(kept),
    )  # fmt: skip


# ---- norms -------------------------------------------------------------------------------------


@op("aten.linalg_vector_norm.default")
def vector_norm(
    x: Tensor,
    ord: Number = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: DType | None = None,
) -> Tensor:
    """(sum |x|^ord)^(1/ord); ord 0 counts nonzeros, inf and -inf are the extremes of |x|."""
    kind = floating(x, dtype, "norm")
    dims = normalize_dims(dim, x.rank)

    def over(
        monoid: str, of: Callable[[Expr], Expr], root: Callable[[Expr], Expr] = lambda t: t
    ) -> Tensor:
        return reduction(
            "norm", x, dims, keepdim, kind, monoid, lambda a, _: of(cast(a, kind.compute)),
            lambda total, _: root(total),
        )  # fmt: skip

    match float(ord):
        case 2.0:
            return over("sum", lambda a: a * a, lambda t: call("sqrt", t))
        case 1.0:
            return over("sum", lambda a: call("abs", a))
        case 0.0:
            return over("sum", lambda a: cast(cast(a, DType.BOOL), kind.compute))
        case math.inf:
            return over("max", lambda a: call("abs", a), lambda t: call("maximum", t, 0.0))
        case p if p == -math.inf:
            return over("min", lambda a: call("abs", a))
        case p:
            return over(
                "sum", lambda a: call("pow", call("abs", a), p), lambda t: call("pow", t, 1 / p)
            )


@op("aten.norm.ScalarOpt_dim", "aten.norm.Scalar", "aten.norm.ScalarOpt_dim_dtype")
def norm(
    x: Tensor,
    p: Number | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: DType | None = None,
) -> Tensor:
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@op("aten.frobenius_norm.dim")
def frobenius_norm(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    return vector_norm(x, 2, dim, keepdim)
