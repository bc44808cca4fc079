"""Reductions that are one fold: sums, products, extremes, truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from onchip.errors import InputError, OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Expr, Operand, Tensor, call, cast, fold, lift, tensor, where
from onchip.ops.promotion import normalize_dims, real_dtype
from onchip.ops.registry import op
from onchip.ops.views import reshape_index

Dims = int | Sequence[int] | None
Element = Callable[[Expr, Callable[[Tensor], Expr]], Operand]


def reduced_shape(x: Tensor, dims: Sequence[int], keepdim: bool) -> tuple[int, ...]:
    if keepdim:
        return tuple(1 if d in dims else n for d, n in enumerate(x.shape))
    return tuple(n for d, n in enumerate(x.shape) if d not in dims)


def reduction(
    name: str,
    x: Tensor,
    dims: Sequence[int],
    keepdim: bool,
    dtype: DType,
    monoid: str,
    element: Element,
    finish: Callable[[Expr, Callable[[Tensor], Expr]], Operand] = lambda total, _: total,
) -> Tensor:
    """`monoid` over `dims` of `element(x's element, kept)`, then `finish(fold, kept)`.

    `kept(t)` is the element of a tensor `t` that has x's shape with size 1 in `dims`: a statistic
    taken before, such as the mean.
    """
    kept_dims = [d for d in range(x.rank) if d not in dims]

    def body(*out: Axis) -> Operand:
        own = dict(zip(kept_dims, (out[d] for d in kept_dims) if keepdim else out, strict=True))

        def kept(t: Tensor) -> Expr:
            return t[tuple(own.get(d, 0) for d in range(x.rank))]

        def inner(*over: Axis) -> Operand:
            at = own | dict(zip(dims, over, strict=True))
            return element(x[tuple(at[d] for d in range(x.rank))], kept)

        # a 0-d tensor has no axis to fold: its element is the whole
        total = fold(monoid, [x.shape[d] for d in dims], inner) if dims else lift(inner())
        return finish(total, kept)

    return tensor(reduced_shape(x, dims, keepdim), dtype, body, name)


def element_count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


def floating(x: Tensor, dtype: DType | None, name: str) -> DType:
    chosen = real_dtype(dtype or x.dtype)
    if not chosen.is_float:
        raise InputError(f"{name} needs floating-point elements, {x} has none; give a dtype")
    return chosen


# ---- sums and products -------------------------------------------------------------------------


def _accumulated(x: Tensor, dtype: DType | None) -> DType:
    """Integers and bools are summed in int64 unless another type is asked for."""
    return real_dtype(dtype or (x.dtype if x.dtype.is_float else DType.I64))


@op("aten.sum.default")
def sum_all(x: Tensor, *, dtype: DType | None = None) -> Tensor:
    return sum_dims(x, None, dtype=dtype)


@op("aten.sum.dim_IntList")
def sum_dims(x: Tensor, dim: Dims, keepdim: bool = False, *, dtype: DType | None = None) -> Tensor:
    kind = _accumulated(x, dtype)
    dims = normalize_dims(dim, x.rank)
    return reduction("sum", x, dims, keepdim, kind, "sum", lambda a, _: cast(a, kind.compute))


@op("aten.nansum.default")
def nansum(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: DType | None = None
) -> Tensor:
    """The sum, each NaN counted as 0."""
    if not x.dtype.is_float:
        return sum_dims(x, dim, keepdim, dtype=dtype)
    kind = _accumulated(x, dtype)

    def element(a: Expr, _: object) -> Expr:
        return cast(where(call("isnan", a, dtype=DType.BOOL), 0.0, a), kind.compute)

    return reduction("nansum", x, normalize_dims(dim, x.rank), keepdim, kind, "sum", element)


@op("aten.mean.default")
def mean_all(x: Tensor, *, dtype: DType | None = None) -> Tensor:
    return mean_dims(x, None, dtype=dtype)


@op("aten.mean.dim")
def mean_dims(x: Tensor, dim: Dims, keepdim: bool = False, *, dtype: DType | None = None) -> Tensor:
    kind = floating(x, dtype, "mean")
    dims = normalize_dims(dim, x.rank)
    n = float(element_count(x, dims))
    return reduction(
        "mean", x, dims, keepdim, kind, "sum", lambda a, _: cast(a, kind.compute),
        lambda total, _: total / n,
    )  # fmt: skip


@op("aten.prod.default")
def prod_all(x: Tensor, *, dtype: DType | None = None) -> Tensor:
    kind = _accumulated(x, dtype)
    dims = tuple(range(x.rank))
    return reduction("prod", x, dims, False, kind, "prod", lambda a, _: cast(a, kind.compute))


@op("aten.prod.dim_int")
def prod_dim(x: Tensor, dim: int, keepdim: bool = False, *, dtype: DType | None = None) -> Tensor:
    kind = _accumulated(x, dtype)
    dims = normalize_dims(dim, x.rank)
    return reduction("prod", x, dims, keepdim, kind, "prod", lambda a, _: cast(a, kind.compute))


@op("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def count_nonzero(x: Tensor, dim: Dims = None) -> Tensor:
    return reduction(
        "count_nonzero", x, normalize_dims(dim, x.rank), False, DType.I64, "sum",
        lambda a, _: cast(cast(a, DType.BOOL), DType.I64),
    )  # fmt: skip


# ---- extremes ----------------------------------------------------------------------------------


def _nonempty(x: Tensor, dims: Sequence[int], name: str) -> None:
    if any(x.shape[d] == 0 for d in dims):
        raise InputError(f"{name} of {x} over a dimension of size 0 has no value")


def _extreme(x: Tensor, dim: Dims, keepdim: bool, monoid: str) -> Tensor:
    dims = normalize_dims(dim, x.rank)
    _nonempty(x, dims, f"a{monoid}")
    return reduction(monoid, x, dims, keepdim, x.dtype, monoid, lambda a, _: a)


@op("aten.amax.default")
def amax(x: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    return _extreme(x, dim, keepdim, "max")


@op("aten.amin.default")
def amin(x: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    return _extreme(x, dim, keepdim, "min")


@op("aten.aminmax.default")
def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _extreme(x, dim, keepdim, "min"), _extreme(x, dim, keepdim, "max")


@op("aten.max.default")
def max_all(x: Tensor) -> Tensor:
    return _extreme(x, None, False, "max")


@op("aten.min.default")
def min_all(x: Tensor) -> Tensor:
    return _extreme(x, None, False, "min")


def _position(x: Tensor, dim: int, keepdim: bool, monoid: str) -> Tensor:
    dims = normalize_dims(dim, x.rank)
    _nonempty(x, dims, monoid)
    if x.rank == 0:
        return tensor((), DType.I64, lambda: 0, monoid)
    return reduction(monoid, x, dims, keepdim, DType.I64, monoid, lambda a, _: a)


@op("aten.max.dim")
def max_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The largest values along `dim` and the positions of the first of them."""
    return _extreme(x, dim, keepdim, "max"), _position(x, dim, keepdim, "argmax")


@op("aten.min.dim")
def min_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _extreme(x, dim, keepdim, "min"), _position(x, dim, keepdim, "argmin")


def _argument(x: Tensor, dim: int | None, keepdim: bool, monoid: str) -> Tensor:
    if dim is not None:
        return _position(x, dim, keepdim, monoid)
    _nonempty(x, range(x.rank), monoid)
    shape = (1,) * x.rank if keepdim else ()
    flat = (x.numel,)
    return tensor(
        shape,
        DType.I64,
        lambda *_: fold(monoid, flat, lambda r: x[tuple(reshape_index(x.shape, flat, (r,)))]),
        monoid,
    )


@op("aten.argmax.default")
def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The position of the first largest element, in the flattened tensor if dim is None."""
    return _argument(x, dim, keepdim, "argmax")


@op("aten.argmin.default")
def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return _argument(x, dim, keepdim, "argmin")


# ---- truth -------------------------------------------------------------------------------------


def _truth(x: Tensor, dim: Dims, keepdim: bool, monoid: str) -> Tensor:
    # ATen keeps uint8 here, for the sake of the time before bool tensors
    dtype = DType.U8 if x.dtype is DType.U8 else DType.BOOL
    return reduction(
        monoid, x, normalize_dims(dim, x.rank), keepdim, dtype, monoid,
        lambda a, _: cast(a, DType.BOOL),
    )  # fmt: skip


@op("aten.any.default", "aten.any.dim", "aten.any.dims")
def any_(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _truth(x, dim, keepdim, "any")


@op("aten.all.default", "aten.all.dim", "aten.all.dims")
def all_(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _truth(x, dim, keepdim, "all")


# ---- not folds ---------------------------------------------------------------------------------


@op(*(f"aten.{n}.default" for n in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")))
def scan(x: Tensor, *arguments: Any, **more: Any) -> Tensor:
    raise OpaqueOperator("a scan needs every earlier element in order")
