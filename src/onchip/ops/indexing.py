"""Reads at positions that are data: embedding, gather, advanced indexing, one-hot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onchip.errors import InputError, OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Expr, Tensor, cast, tensor, where
from onchip.ops.promotion import broadcast_shape, compare, element, normalize_dim
from onchip.ops.registry import op
from onchip.ops.views import ravel


def _position(index: Expr) -> Expr:
    return cast(index, DType.I64)


@op("aten.embedding.default")
def embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of `weight` (rows, columns) at `indices`; padding_idx concerns gradients only."""
    if weight.rank != 2:
        raise InputError(f"embedding needs a matrix, {weight} has {weight.rank} dimensions")
    return tensor(
        (*indices.shape, weight.shape[1]),
        weight.dtype,
        lambda *i: weight[_position(indices[i[:-1]]), i[-1]],
        "embedding",
    )


@op("aten.index_select.default")
def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Slices of x along `dim` at the positions `index` (0-d or 1-d)."""
    if x.rank == 0:
        return tensor((), x.dtype, lambda: x[()], "index_select")
    d = normalize_dim(dim, x.rank)
    shape = (*x.shape[:d], index.numel, *x.shape[d + 1 :])

    def body(*i: Expr) -> Expr:
        at = index[i[d]] if index.rank else index[()]
        return x[(*i[:d], _position(at), *i[d + 1 :])]

    return tensor(shape, x.dtype, body, "index_select")


@op("aten.gather.default")
def gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """x at each position of `index`, its coordinate along `dim` replaced by the index's value."""
    if x.rank == 0 or index.rank == 0:
        raise OpaqueOperator("gather of 0-d tensors is left to ATen")
    d = normalize_dim(dim, x.rank)
    return tensor(
        index.shape,
        x.dtype,
        lambda *i: x[(*i[:d], _position(index[i]), *i[d + 1 :])],
        "gather",
    )


@op("aten.take_along_dim.default")
def take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """As gather, x and the index broadcast against each other outside `dim`."""
    if dim is None:
        flat = ravel(x)
        return gather(flat, 0, ravel(indices))
    d = normalize_dim(dim, x.rank)
    if indices.rank != x.rank:
        raise InputError(f"{indices} must have as many dimensions as {x}")
    around = broadcast_shape(
        (*x.shape[:d], 1, *x.shape[d + 1 :]), (*indices.shape[:d], 1, *indices.shape[d + 1 :])
    )
    shape = (*around[:d], indices.shape[d], *around[d + 1 :])

    def body(*i: Expr) -> Expr:
        at = _position(element(indices, i, shape))
        own = [0 if n == 1 and m != 1 else a for a, n, m in zip(i, x.shape, shape, strict=True)]
        own[d] = at
        return x[tuple(own)]

    return tensor(shape, x.dtype, body, "take_along_dim")


@op("aten.take.default")
def take(x: Tensor, index: Tensor) -> Tensor:
    """x, flattened, at the positions `index`; negative ones count from the end."""
    flat = ravel(x)
    return index_tensors(flat, [index])


@op("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index_tensors(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """x[indices]: index tensors are broadcast together and None keeps a dimension whole. The
    broadcast dimensions stand where the index tensors stood, or first if None comes between."""
    given = {d: t for d, t in enumerate(indices) if t is not None}
    for t in given.values():
        if not t.dtype.is_int or t.dtype is DType.U8:
            raise OpaqueOperator(f"the size of a result indexed by a {t.dtype.label} mask is data")
    if not given:
        return tensor(x.shape, x.dtype, lambda *i: x[i], "index")
    common = broadcast_shape(*(t.shape for t in given.values()))
    adjacent = max(given) - min(given) + 1 == len(given)
    place = min(given) if adjacent else 0
    kept = [d for d in range(x.rank) if d not in given]
    sizes = [x.shape[d] for d in kept]
    shape = (*sizes[:place], *common, *sizes[place:])

    def body(*i: Expr) -> Expr:
        shared = i[place : place + len(common)]
        own = dict(zip(kept, (*i[:place], *i[place + len(common) :]), strict=True))
        for d, t in given.items():
            own[d] = _wrapped(_position(element(t, shared, common)), x.shape[d])
        return x[tuple(own[d] for d in range(x.rank))]

    return tensor(shape, x.dtype, body, "index")


def _wrapped(at: Expr, size: int) -> Expr:
    """A negative position counts from the end."""
    return where(compare("lt", at, 0), at + size, at)


@op("aten.one_hot.default")
def one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """1 at each element's class along a new last dimension, else 0."""
    if num_classes == -1:
        raise OpaqueOperator("one_hot without num_classes: the size of the result is data")
    return tensor(
        (*x.shape, num_classes),
        DType.I64,
        lambda *i: cast(compare("eq", cast(x[i[:-1]], DType.I64), i[-1]), DType.I64),
        "one_hot",
    )


@op(
    "aten.index_put.default",
    "aten._unsafe_index_put.default",
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.scatter.reduce",
    "aten.scatter.value_reduce",
    "aten.scatter_add.default",
    "aten.scatter_reduce.two",
    "aten.index_add.default",
    "aten.index_copy.default",
    "aten.index_fill.int_Scalar",
    "aten.index_fill.int_Tensor",
    "aten.masked_scatter.default",
)
def scatter(*arguments: Any, **more: Any) -> Tensor:
    raise OpaqueOperator("it writes at positions that are data")


@op("aten.masked_select.default", "aten.nonzero.default", "aten.nonzero_numpy.default")
def data_dependent_size(*arguments: Any, **more: Any) -> Tensor:
    raise OpaqueOperator("the size of its result is data")
