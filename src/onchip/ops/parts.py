"""Parts of tensors, and tensors joined: slices, splits, concatenation, padding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from onchip.errors import InputError, OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Expr, Number, Tensor, call, cast, lift, tensor, where
from onchip.ir.index import simplify
from onchip.ops.promotion import common_dtype, compare, normalize_dim, rounded
from onchip.ops.registry import op
from onchip.ops.views import viewed

# ---- parts -------------------------------------------------------------------------------------


def slice_bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """A Python slice's first and last position in a dimension of `size`."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


@op("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(
    x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    d = normalize_dim(dim, x.rank)
    first, last = slice_bounds(x.shape[d], start, end)
    count = -((first - last) // step)
    shape = (*x.shape[:d], count, *x.shape[d + 1 :])
    return viewed(x, shape, lambda *i: (*i[:d], i[d] * step + first, *i[d + 1 :]), "slice")


@op("aten.narrow.default", "aten.narrow_copy.default")
def narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    d = normalize_dim(dim, x.rank)
    first = start + x.shape[d] if start < 0 else start
    if not 0 <= first <= first + length <= x.shape[d]:
        raise InputError(f"narrow({dim}, {start}, {length}) leaves {x}")
    return slice_(x, d, first, first + length)


@op("aten.select.int", "aten.select_copy.int")
def select(x: Tensor, dim: int, index: int) -> Tensor:
    d = normalize_dim(dim, x.rank)
    if x.rank == 0 or not -x.shape[d] <= index < x.shape[d]:
        raise InputError(f"index {index} is outside dimension {dim} of {x}")
    at = index % x.shape[d]
    return viewed(x, (*x.shape[:d], *x.shape[d + 1 :]), lambda *i: (*i[:d], at, *i[d:]), "select")


@op("aten.unbind.int", "aten.unbind_copy.int")
def unbind(x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    d = normalize_dim(dim, x.rank)
    return tuple(select(x, d, k) for k in range(x.shape[d]))


@op(
    "aten.split_with_sizes.default",
    "aten.split.sizes",
    "aten.split_with_sizes_copy.default",
    "aten.unsafe_split_with_sizes.default",
)
def split_with_sizes(x: Tensor, split_sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    d = normalize_dim(dim, x.rank)
    if sum(split_sizes) != x.shape[d]:
        raise InputError(f"sizes {list(split_sizes)} do not add up to dimension {dim} of {x}")
    parts, first = [], 0
    for n in split_sizes:
        parts.append(slice_(x, d, first, first + n))
        first += n
    return tuple(parts)


@op("aten.split.Tensor", "aten.unsafe_split.Tensor", "aten.split_copy.Tensor")
def split(x: Tensor, split_size: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Parts of `split_size` along `dim`, the last one smaller if it does not divide."""
    n = x.shape[normalize_dim(dim, x.rank)]
    if split_size == 0:
        return (slice_(x, dim),)
    sizes = [min(split_size, n - k) for k in range(0, n, split_size)] or [0]
    return split_with_sizes(x, sizes, dim)


@op("aten.chunk.default", "aten.unsafe_chunk.default")
def chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    n = x.shape[normalize_dim(dim, x.rank)]
    each = -(-n // chunks)
    if each == 0:
        return split_with_sizes(x, [0] * chunks, dim)
    return split(x, each, dim)


@op("aten.tensor_split.sections")
def tensor_split(x: Tensor, sections: int, dim: int = 0) -> tuple[Tensor, ...]:
    n = x.shape[normalize_dim(dim, x.rank)]
    small, larger = divmod(n, sections)
    return split_with_sizes(x, [small + (k < larger) for k in range(sections)], dim)


@op("aten.tensor_split.indices")
def tensor_split_at(x: Tensor, indices: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    d = normalize_dim(dim, x.rank)
    edges = [0, *indices, x.shape[d]]
    return tuple(slice_(x, d, a, b) for a, b in itertools.pairwise(edges))


@op("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Elements (k, k + offset) of the plane (dim1, dim2), as a last dimension."""
    a, b = normalize_dim(dim1, x.rank), normalize_dim(dim2, x.rank)
    if a == b:
        raise InputError(f"diagonal needs two dimensions, both are {dim1}")
    down, right = max(-offset, 0), max(offset, 0)
    length = max(min(x.shape[a] - down, x.shape[b] - right), 0)
    rest = [d for d in range(x.rank) if d not in (a, b)]

    def source(*i: Expr) -> list[Expr]:
        at = dict(zip(rest, i, strict=False)) | {a: i[-1] + down, b: i[-1] + right}
        return [at[d] for d in range(x.rank)]

    return viewed(x, (*(x.shape[d] for d in rest), length), source, "diagonal")


@op("aten.unfold.default", "aten.unfold_copy.default")
def unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows of `size` every `step` along the dimension, their elements in a last dimension."""
    if x.rank == 0:
        return viewed(x, (size,), lambda _: (), "unfold")
    d = normalize_dim(dimension, x.rank)
    if size > x.shape[d]:
        raise InputError(f"windows of {size} do not fit in dimension {dimension} of {x}")
    count = (x.shape[d] - size) // step + 1
    shape = (*x.shape[:d], count, *x.shape[d + 1 :], size)
    return viewed(x, shape, lambda *i: (*i[:d], i[d] * step + i[-1], *i[d + 1 : -1]), "unfold")


@op("aten.diff.default")
def diff(
    x: Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: Tensor | None = None,
    append: Tensor | None = None,
) -> Tensor:
    """Differences of neighbours along `dim`, taken n times; of bools, whether they differ."""
    d = normalize_dim(dim, x.rank)
    ends = [t for t in (prepend, x, append) if t is not None]
    out = x if len(ends) == 1 else cat(ends, d)
    for _ in range(n):
        out = _difference(out, d)
    return out if out is not x else slice_(x, d)


def _difference(x: Tensor, d: int) -> Tensor:
    shape = (*x.shape[:d], max(x.shape[d] - 1, 0), *x.shape[d + 1 :])
    fn = "logical_xor" if x.dtype is DType.BOOL else "sub"
    return tensor(
        shape, x.dtype, lambda *i: call(fn, x[(*i[:d], i[d] + 1, *i[d + 1 :])], x[i]), "diff"
    )


# ---- joining -----------------------------------------------------------------------------------


@op("aten.cat.default", "aten.concat.default", "aten.concatenate.default")
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors end to end along `dim`; a tensor of shape [0] joins anything."""
    dtype = common_dtype(*tensors)
    parts = [t for t in tensors if t.shape != (0,)] or [tensors[0]]
    d = normalize_dim(dim, parts[0].rank)
    outer = [(*t.shape[:d], *t.shape[d + 1 :]) for t in parts]
    if any(o != outer[0] for o in outer):
        raise InputError(f"{list(parts)} differ in a dimension other than {dim}")
    parts = [t for t in parts if t.shape[d]] or parts[:1]
    total = sum(t.shape[d] for t in parts)
    shape = (*parts[0].shape[:d], total, *parts[0].shape[d + 1 :])

    def body(*i: Expr) -> Expr:
        first = total
        out: Expr | None = None
        for t in reversed(parts):
            first -= t.shape[d]
            at = (*i[:d], i[d] - first, *i[d + 1 :])
            value = cast(t.padded(0)[at] if len(parts) > 1 else t[at], dtype.compute)
            end = first + t.shape[d]
            out = value if out is None else where(compare("lt", i[d], end), value, out)
        assert out is not None
        return out

    return tensor(shape, dtype, body, "cat")


@op("aten.stack.default")
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape side by side along a new dimension."""
    dtype = common_dtype(*tensors)
    d = normalize_dim(dim, tensors[0].rank + 1)
    if any(t.shape != tensors[0].shape for t in tensors):
        raise InputError(f"{list(tensors)} differ in shape, so they cannot be stacked")
    shape = (*tensors[0].shape[:d], len(tensors), *tensors[0].shape[d:])

    def body(*i: Expr) -> Expr:
        at = (*i[:d], *i[d + 1 :])
        out = cast(tensors[-1][at], dtype.compute)
        for k in range(len(tensors) - 2, -1, -1):
            out = where(compare("eq", i[d], k), cast(tensors[k][at], dtype.compute), out)
        return out

    return tensor(shape, dtype, body, "stack")


@op("aten.hstack.default")
def hstack(tensors: Sequence[Tensor]) -> Tensor:
    parts = [viewed(t, (1,), lambda _: (), "row") if t.rank == 0 else t for t in tensors]
    return cat(parts, 0 if parts[0].rank == 1 else 1)


@op("aten.select_scatter.default")
def select_scatter(x: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """x with `src` in place of x.select(dim, index)."""
    d = normalize_dim(dim, x.rank)
    at = index % x.shape[d]
    return tensor(
        x.shape,
        x.dtype,
        lambda *i: where(
            compare("eq", i[d], at),
            cast(src[(*i[:d], *i[d + 1 :])], x.dtype.compute),
            x[i],
        ),
        "select_scatter",
    )


@op("aten.slice_scatter.default")
def slice_scatter(
    x: Tensor,
    src: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    """x with `src` in place of x[start:end:step] along `dim`."""
    d = normalize_dim(dim, x.rank)
    first, last = slice_bounds(x.shape[d], start, end)

    def body(*i: Expr) -> Expr:
        offset = i[d] - first
        inside = call("logical_and", compare("ge", i[d], first), compare("lt", i[d], last))
        if step > 1:
            inside = call("logical_and", inside, compare("eq", offset % step, 0))
        at = (*i[:d], simplify(offset // step), *i[d + 1 :])
        return where(inside, cast(src.padded(0)[at], x.dtype.compute), x[i])

    return tensor(x.shape, x.dtype, body, "slice_scatter")


# ---- padding -----------------------------------------------------------------------------------


def _padding(x: Tensor, pad: Sequence[int]) -> tuple[tuple[int, ...], dict[int, int]]:
    """The padded shape and what each dimension gets in front. `pad` runs from the last dimension:
    (left, right, top, bottom, ...)."""
    if len(pad) % 2 or len(pad) > 2 * x.rank:
        raise InputError(f"padding {list(pad)} does not fit the {x.rank} dimensions of {x}")
    shape, front = list(x.shape), {}
    for k in range(len(pad) // 2):
        d = x.rank - 1 - k
        front[d] = pad[2 * k]
        shape[d] += pad[2 * k] + pad[2 * k + 1]
        if shape[d] < 0:
            raise InputError(f"padding {list(pad)} leaves a negative size of {x}")
    return tuple(shape), front


@op("aten.constant_pad_nd.default")
def constant_pad(x: Tensor, pad: Sequence[int], value: Number = 0) -> Tensor:
    """x with `value` around it; negative amounts crop."""
    shape, front = _padding(x, pad)
    number = rounded(value, x.dtype)
    return tensor(
        shape,
        x.dtype,
        lambda *i: x.padded(number)[tuple(a - front.get(d, 0) for d, a in enumerate(i))],
        "pad",
    )


def _mapped_pad(
    x: Tensor, pad: Sequence[int], name: str, place: Callable[[Expr, int], Expr]
) -> Tensor:
    shape, front = _padding(x, pad)
    return viewed(
        x,
        shape,
        lambda *i: [place(a - front[d], x.shape[d]) if d in front else a for d, a in enumerate(i)],
        name,
    )


@op(*(f"aten.reflection_pad{n}d.default" for n in (1, 2, 3)))
def reflection_pad(x: Tensor, padding: Sequence[int]) -> Tensor:
    """Mirrored at the edge elements, which are not repeated."""
    for k, amount in enumerate(padding):
        if amount >= x.shape[x.rank - 1 - k // 2]:
            raise InputError(f"reflection padding {list(padding)} must be smaller than {x}")

    def place(a: Expr, n: int) -> Expr:
        return n - 1 - call("abs", n - 1 - call("abs", a))

    return _mapped_pad(x, padding, "reflection_pad", place)


@op(*(f"aten.replication_pad{n}d.default" for n in (1, 2, 3)))
def replication_pad(x: Tensor, padding: Sequence[int]) -> Tensor:
    """The edge elements repeated."""
    return _mapped_pad(
        x,
        padding,
        "replication_pad",
        lambda a, n: call("minimum", call("maximum", a, lift(0)), lift(n - 1)),
    )


@op("aten._pad_circular.default")
def circular_pad(x: Tensor, pad: Sequence[int]) -> Tensor:
    """The tensor continued periodically."""
    for k, amount in enumerate(pad):
        if amount > x.shape[x.rank - 1 - k // 2]:
            raise InputError(f"circular padding {list(pad)} wraps around {x} more than once")
    return _mapped_pad(x, pad, "circular_pad", lambda a, n: a % max(n, 1))


@op("aten.pad.default")
def pad(
    x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    match mode:
        case "constant":
            return constant_pad(x, pad, 0 if value is None else value)
        case "reflect":
            return reflection_pad(x, pad)
        case "replicate":
            return replication_pad(x, pad)
        case "circular":
            return circular_pad(x, pad)
    raise OpaqueOperator(f"padding mode {mode!r} has no expression")
