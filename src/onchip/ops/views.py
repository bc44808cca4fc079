"""Views: the same elements under other indices. Every index is brought to its simplest form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from onchip.errors import InputError, OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Const, Expr, Operand, Tensor, index_arithmetic, lift, tensor
from onchip.ir.index import simplify
from onchip.ops.promotion import broadcast_shape, normalize_dim, normalize_dims
from onchip.ops.registry import op

Index = Sequence[Expr]

ZERO = Const(0, DType.I64)


def viewed(
    x: Tensor, shape: Sequence[int], source: Callable[..., Sequence[Operand]], name: str
) -> Tensor:
    """A tensor of `shape` whose element at i is x at `source(*i)`."""

    def body(*i: Expr) -> Expr:
        return x[tuple(simplify(lift(s, DType.I64)) for s in source(*i))]

    return tensor(shape, x.dtype, body, name)


# ---- reshape -----------------------------------------------------------------------------------


def resolve_shape(numel: int, shape: Sequence[int]) -> tuple[int, ...]:
    """A requested shape with its -1 replaced; raises InputError if the sizes do not fit."""
    known = math.prod(n for n in shape if n != -1)
    out = tuple(numel // known if n == -1 and known else n for n in shape)
    if -1 in out or math.prod(out) != numel:
        raise InputError(f"{numel} elements cannot be viewed in shape {list(shape)}")
    return out


def reshape_index(old: Sequence[int], new: Sequence[int], index: Index) -> list[Expr]:
    """The index into `old` of the element at `index` of `new`, both in row-major order."""
    if math.prod(new) == 0:
        return [ZERO for _ in old]
    out: list[Expr] = []
    for olds, news in _matching_groups(old, new):
        flat: Expr = ZERO
        for d in news:
            flat = index_arithmetic("add", flat * new[d], ZERO if new[d] == 1 else index[d])
        flat = simplify(flat)
        inner = math.prod(old[d] for d in olds)
        for k, d in enumerate(olds):
            inner //= old[d]
            part = flat // inner if inner > 1 else flat
            out.append(simplify(part % old[d] if k else part))
    return out


def _matching_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Shortest runs of dimensions with equal products: [2, 3, 4] as [6, 4] is 0,1|0 and 2|1."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        olds, news, a, b = [], [], 1, 1
        while not (olds or news) or a != b:
            if (a <= b and i < len(old)) or j == len(new):
                a *= old[i]
                olds.append(i)
                i += 1
            else:
                b *= new[j]
                news.append(j)
                j += 1
        groups.append((olds, news))
    return groups


@op(
    "aten.view.default",
    "aten.reshape.default",
    "aten._unsafe_view.default",
    "aten.view_copy.default",
    "aten._reshape_copy.default",
    "aten._reshape_alias.default",
)
def reshape(x: Tensor, shape: Sequence[int], *strides: Any) -> Tensor:
    new = resolve_shape(x.numel, shape)
    return viewed(x, new, lambda *i: reshape_index(x.shape, new, i), "reshape")


@op("aten.view_as.default", "aten.reshape_as.default")
def reshape_as(x: Tensor, other: Tensor) -> Tensor:
    return reshape(x, other.shape)


@op("aten.flatten.using_ints")
def flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    if x.rank == 0:
        return reshape(x, (1,))
    first, last = normalize_dim(start_dim, x.rank), normalize_dim(end_dim, x.rank)
    merged = math.prod(x.shape[first : last + 1])
    return reshape(x, (*x.shape[:first], merged, *x.shape[last + 1 :]))


@op("aten.ravel.default")
def ravel(x: Tensor) -> Tensor:
    return reshape(x, (x.numel,))


@op("aten.unflatten.int")
def unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    d = normalize_dim(dim, x.rank)
    return reshape(x, (*x.shape[:d], *resolve_shape(x.shape[d], sizes), *x.shape[d + 1 :]))


@op("aten.squeeze.default", "aten.squeeze_copy.default")
def squeeze(x: Tensor) -> Tensor:
    return squeeze_dims(x, tuple(range(x.rank)))


@op("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze_copy.dim", "aten.squeeze_copy.dims")
def squeeze_dims(x: Tensor, dim: int | Sequence[int]) -> Tensor:
    """Without those of the dimensions `dim` that have size 1."""
    listed = [dim] if isinstance(dim, int) else list(dim)
    asked = {normalize_dim(d, x.rank) for d in listed}
    kept = [d for d in range(x.rank) if d not in asked or x.shape[d] != 1]

    def source(*i: Expr) -> list[Expr]:
        position = dict(zip(kept, i, strict=True))
        return [position.get(d, ZERO) for d in range(x.rank)]

    return viewed(x, [x.shape[d] for d in kept], source, "squeeze")


@op("aten.unsqueeze.default", "aten.unsqueeze_copy.default")
def unsqueeze(x: Tensor, dim: int) -> Tensor:
    d = normalize_dim(dim, x.rank + 1)
    return viewed(x, (*x.shape[:d], 1, *x.shape[d:]), lambda *i: (*i[:d], *i[d + 1 :]), "unsqueeze")


# ---- order of dimensions -----------------------------------------------------------------------


@op("aten.permute.default", "aten.permute_copy.default")
def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Dimension d of the result is dimension dims[d] of x."""
    order = [normalize_dim(d, x.rank) for d in dims]
    if sorted(order) != list(range(x.rank)):
        raise InputError(f"{list(dims)} is not a permutation of the dimensions of {x}")
    return viewed(
        x, [x.shape[d] for d in order], lambda *i: [i[order.index(d)] for d in range(x.rank)],
        "permute",
    )  # fmt: skip


@op(
    "aten.transpose.int",
    "aten.transpose_copy.int",
    "aten.swapaxes.default",
    "aten.swapdims.default",
)
def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    a, b = normalize_dim(dim0, x.rank), normalize_dim(dim1, x.rank)
    order = list(range(x.rank))
    if x.rank:
        order[a], order[b] = b, a
    return permute(x, order)


@op("aten.t.default", "aten.t_copy.default")
def transpose_matrix(x: Tensor) -> Tensor:
    if x.rank > 2:
        raise InputError(f"t() needs at most two dimensions, {x} has {x.rank}")
    return permute(x, tuple(reversed(range(x.rank))))


@op("aten.numpy_T.default")
def reverse_dims(x: Tensor) -> Tensor:
    return permute(x, tuple(reversed(range(x.rank))))


@op("aten.mT.default", "aten.adjoint.default", "aten.mH.default")
def transpose_last(x: Tensor) -> Tensor:
    return transpose(x, -2, -1)


@op("aten.movedim.int", "aten.movedim.intlist", "aten.moveaxis.int", "aten.moveaxis.intlist")
def movedim(x: Tensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    moved = normalize_dims(source, x.rank)
    places = normalize_dims(destination, x.rank)
    taken = dict(zip(places, moved, strict=True))
    rest = iter(d for d in range(x.rank) if d not in moved)
    return permute(x, [taken[d] if d in taken else next(rest) for d in range(x.rank)])


# ---- broadcast and repetition ------------------------------------------------------------------


@op("aten.expand.default", "aten.expand_copy.default", "aten.broadcast_to.default")
def expand(x: Tensor, size: Sequence[int], *, implicit: bool = False) -> Tensor:
    """x broadcast to `size`; -1 keeps the dimension's size."""
    added = len(size) - x.rank
    own = (*(1 for _ in range(added)), *x.shape)
    shape = tuple(n if s == -1 else s for s, n in zip(size, own, strict=True))
    if any(n not in (1, s) for s, n in zip(shape, own, strict=True)):
        raise InputError(f"{x} cannot be expanded to {list(size)}")

    def source(*i: Expr) -> list[Expr]:
        return [
            ZERO if n == 1 and shape[added + d] != 1 else i[added + d]
            for d, n in enumerate(x.shape)
        ]

    return viewed(x, shape, source, "expand")


@op("aten.expand_as.default")
def expand_as(x: Tensor, other: Tensor) -> Tensor:
    return expand(x, other.shape)


@op("aten.broadcast_tensors.default")
def broadcast_tensors(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    shape = broadcast_shape(*(t.shape for t in tensors))
    return tuple(expand(t, shape) for t in tensors)


@op("aten.meshgrid.default", "aten.meshgrid.indexing")
def meshgrid(tensors: Sequence[Tensor], *, indexing: str = "ij") -> tuple[Tensor, ...]:
    """The coordinates of a grid; "xy" exchanges the first two dimensions."""
    order = list(range(len(tensors)))
    if indexing == "xy" and len(order) > 1:
        order[0], order[1] = 1, 0
    shape = [0] * len(tensors)
    for t, d in zip(tensors, order, strict=True):
        shape[d] = t.numel
    return tuple(
        viewed(t, shape, lambda *i, t=t, d=d: [i[d]] if t.rank else [], "meshgrid")
        for t, d in zip(tensors, order, strict=True)
    )


@op("aten.repeat.default", "aten.tile.default")
def repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    """x laid side by side repeats[d] times along d; missing dimensions are prepended."""
    rank = max(len(repeats), x.rank)
    times = (*(1 for _ in range(rank - len(repeats))), *repeats)
    added = rank - x.rank
    own = (*(1 for _ in range(added)), *x.shape)
    shape = [n * k for n, k in zip(own, times, strict=True)]

    def source(*i: Expr) -> list[Expr]:
        return [i[added + d] % max(n, 1) for d, n in enumerate(x.shape)]

    return viewed(x, shape, source, "repeat")


@op("aten.repeat_interleave.self_int")
def repeat_interleave(
    x: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """Every element `repeats` times in a row along `dim` (of x flattened if None)."""
    if dim is None:
        return repeat_interleave(ravel(x), repeats, 0)
    d = normalize_dim(dim, x.rank)
    shape = (*x.shape[:d], x.shape[d] * repeats, *x.shape[d + 1 :])
    return viewed(
        x, shape, lambda *i: (*i[:d], i[d] // max(repeats, 1), *i[d + 1 :]), "repeat_interleave"
    )


# ---- order of elements -------------------------------------------------------------------------


@op("aten.flip.default")
def flip(x: Tensor, dims: Sequence[int]) -> Tensor:
    turned = normalize_dims(dims, x.rank) if dims else ()
    return viewed(
        x, x.shape, lambda *i: [x.shape[d] - 1 - a if d in turned else a for d, a in enumerate(i)],
        "flip",
    )  # fmt: skip


@op("aten.fliplr.default")
def fliplr(x: Tensor) -> Tensor:
    return flip(x, (1,))


@op("aten.flipud.default")
def flipud(x: Tensor) -> Tensor:
    return flip(x, (0,))


@op("aten.rot90.default")
def rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Turned k quarter turns from dims[0] towards dims[1]."""
    a, b = normalize_dims(dims, x.rank)
    match k % 4:
        case 1:
            return transpose(flip(x, (b,)), a, b)
        case 2:
            return flip(x, (a, b))
        case 3:
            return flip(transpose(x, a, b), (b,))
    return viewed(x, x.shape, lambda *i: i, "rot90")


@op("aten.roll.default")
def roll(x: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> Tensor:
    """Elements moved by `shifts` along `dims`, re-entering at the other end."""
    amounts = [shifts] if isinstance(shifts, int) else list(shifts)
    listed = [dims] if isinstance(dims, int) else list(dims)
    if not listed:
        return reshape(roll(ravel(x), amounts, (0,)), x.shape)
    total: dict[int, int] = {}
    for amount, dim in zip(amounts, listed, strict=True):
        d = normalize_dim(dim, x.rank)
        total[d] = total.get(d, 0) + amount

    def source(*i: Expr) -> list[Expr]:
        return [
            (a - total[d] % max(x.shape[d], 1)) % max(x.shape[d], 1) if total.get(d) else a
            for d, a in enumerate(i)
        ]

    return viewed(x, x.shape, source, "roll")


@op("aten.pixel_shuffle.default")
def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    """(..., C r r, H, W) to (..., C, H r, W r)."""
    r = upscale_factor
    *lead, c, h, w = x.shape
    return viewed(
        x,
        (*lead, c // (r * r), h * r, w * r),
        lambda *i: (
            *i[:-3], i[-3] * (r * r) + i[-2] % r * r + i[-1] % r, i[-2] // r, i[-1] // r
        ),
        "pixel_shuffle",
    )  # fmt: skip


@op("aten.pixel_unshuffle.default")
def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    """(..., C, H r, W r) to (..., C r r, H, W)."""
    r = downscale_factor
    *lead, c, h, w = x.shape

    def source(*i: Expr) -> tuple[Expr, ...]:
        phase = i[-3] % (r * r)
        return (*i[:-3], i[-3] // (r * r), i[-2] * r + phase // r, i[-1] * r + phase % r)

    return viewed(x, (*lead, c * r * r, h // r, w // r), source, "pixel_unshuffle")


@op("aten.channel_shuffle.default", "aten.native_channel_shuffle.default")
def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """Channels (dimension 1) of `groups` groups interleaved."""
    each = x.shape[1] // groups
    return viewed(
        x, x.shape, lambda *i: (i[0], i[1] % groups * each + i[1] // groups, *i[2:]),
        "channel_shuffle",
    )  # fmt: skip


@op("aten.as_strided.default", "aten.as_strided_copy.default")
def as_strided(x: Tensor, *arguments: Any, **more: Any) -> Tensor:
    raise OpaqueOperator("as_strided addresses memory, not elements")


@op("aten.view.dtype", "aten.view_as_real.default", "aten.view_as_complex.default")
def reinterpret(x: Tensor, *arguments: Any) -> Tensor:
    raise OpaqueOperator("bits read as another element type are not a function of the values")
