"""Pooling: folds over windows. Padding counts as minus infinity for the maximum, zero for means."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onchip.errors import OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Const, Expr, Operand, Tensor, call, cast, fold, tensor, where
from onchip.ops.geometry import (
    NEGATIVE_INFINITY,
    all_of,
    both,
    guarded,
    per_dimension,
    require_float,
)
from onchip.ops.promotion import compare
from onchip.ops.registry import op

Ints = int | Sequence[int]


def pooled_size(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool
) -> int:
    """Number of windows along one dimension; with `ceil`, a last window may hang over the end,
    unless it would start in the padding."""
    free = size + 2 * padding - dilation * (kernel - 1) - 1
    out = (free + (stride - 1 if ceil else 0)) // stride + 1
    return out - 1 if ceil and (out - 1) * stride >= size + padding else out


class Window:
    """Positions that the windows of a pooling read. `spatial` dimensions are the last ones."""

    def __init__(
        self, x: Tensor, spatial: int, kernel: Ints, stride: Ints | None, padding: Ints,
        dilation: Ints, ceil_mode: bool,
    ) -> None:  # fmt: skip
        self.x, self.spatial = x, spatial
        self.kernel = per_dimension(kernel, spatial)
        self.stride = per_dimension(stride, spatial) if stride else self.kernel
        self.padding, self.dilation = (
            per_dimension(padding, spatial),
            per_dimension(dilation, spatial),
        )
        self.space = x.shape[x.rank - spatial :]
        self.lead = x.shape[: x.rank - spatial]
        self.out = tuple(
            pooled_size(*a, ceil_mode)
            for a in zip(
                self.space, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lead, *self.out)

    def split(self, i: Sequence[Expr]) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
        """An output index as (leading axes, window positions)."""
        return tuple(i[: len(self.lead)]), tuple(i[len(self.lead) :])

    def source(self, at: Sequence[Expr], tap: Sequence[Expr]) -> list[Expr]:
        return [
            y * s + k * d - p
            for y, s, k, d, p in zip(at, self.stride, tap, self.dilation, self.padding, strict=True)
        ]

    def fold(self, monoid: str, pad: float, i: Sequence[Expr]) -> Expr:
        n, at = self.split(i)
        return fold(monoid, self.kernel, lambda *k: guarded(self.x, (*n, *self.source(at, k)), pad))


# ---- maximum -----------------------------------------------------------------------------------


def _max(
    spatial: int, x: Tensor, kernel: Ints, stride: Ints | None, padding: Ints, dilation: Ints,
    ceil_mode: bool,
) -> tuple[Window, Tensor]:  # fmt: skip
    require_float(x, "max pooling")
    w = Window(x, spatial, kernel, stride, padding, dilation, ceil_mode)
    return w, tensor(w.shape, x.dtype, lambda *i: w.fold("max", NEGATIVE_INFINITY, i), "max_pool")


def _declare_max(spatial: int) -> None:
    name = f"aten.max_pool{spatial}d"

    @op(f"{name}.default")
    def max_pool(
        x: Tensor, kernel: Ints, stride: Ints | None = None, padding: Ints = 0,
        dilation: Ints = 1, ceil_mode: bool = False,
    ) -> Tensor:  # fmt: skip
        """Largest value in each window; padding counts as minus infinity, NaN wins."""
        return _max(spatial, x, kernel, stride, padding, dilation, ceil_mode)[1]

    @op(f"{name}_with_indices.default")
    def max_pool_with_indices(
        x: Tensor, kernel: Ints, stride: Ints | None = None, padding: Ints = 0,
        dilation: Ints = 1, ceil_mode: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The largest values, and where they are: flat positions in the plane of `x`."""
        w, top = _max(spatial, x, kernel, stride, padding, dilation, ceil_mode)
        return top, _positions(w.space, w.kernel, top, lambda i, k: _tap(w, i, k))


def _tap(w: Window, i: Sequence[Expr], k: Sequence[Expr]) -> tuple[Expr, list[Expr], Expr | None]:
    n, at = w.split(i)
    source = w.source(at, k)
    return guarded(w.x, (*n, *source), NEGATIVE_INFINITY), source, _inside(source, w.space)


def _inside(source: Sequence[Expr], space: Sequence[int]) -> Expr | None:
    return all_of(
        [
            c
            for z, n in zip(source, space, strict=True)
            for c in (compare("ge", z, 0), compare("lt", z, n))
        ]
    )


def _positions(space, kernel, top: Tensor, tap) -> Tensor:
    """Flat position of the maximum `top` of each window: of the last NaN if there is one, else
    of the first element that equals the maximum (ATen's choice). `tap(i, k)` gives the value at
    tap k of window i, its position, and whether that lies in the plane."""
    size, nowhere = math.prod(space), -1

    def element(*i: Expr) -> Expr:
        def flat(k: Sequence[Expr]) -> tuple[Expr, Expr, Expr | None]:
            value, source, inside = tap(i, k)
            position: Expr = Const(0, DType.I64)
            for z, n in zip(source, space, strict=True):
                position = position * n + z
            return value, position, inside

        def last_nan(*k: Expr) -> Expr:
            value, position, _ = flat(k)
            return where(call("isnan", value, dtype=DType.BOOL), position, nowhere)

        def first_equal(*k: Expr) -> Expr:
            value, position, inside = flat(k)
            equal = compare("eq", value, top[i])
            found = equal if inside is None else both(equal, inside)
            return where(found, position, size)

        nan = fold("max", kernel, last_nan)
        return where(compare("ge", nan, 0), nan, fold("min", kernel, first_equal))

    return tensor(top.shape, DType.I64, element, "max_positions")


# ---- mean --------------------------------------------------------------------------------------


def _declare_mean(spatial: int) -> None:
    @op(f"aten.avg_pool{spatial}d.default")
    def avg_pool(
        x: Tensor, kernel: Ints, stride: Ints | None = None, padding: Ints = 0,
        ceil_mode: bool = False, count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Mean of each window. Padding is zero and is counted if `count_include_pad`; what hangs
        over the padded end (ceil_mode) is not. `divisor_override` replaces the count."""
        require_float(x, "average pooling")
        w = Window(x, spatial, kernel, stride, padding, 1, ceil_mode)

        def element(*i: Expr) -> Expr:
            total = w.fold("sum", 0.0, i)
            if divisor_override:
                return total / float(divisor_override)
            return total / _divisor(w, w.split(i)[1], count_include_pad)

        return tensor(w.shape, x.dtype, element, "avg_pool")


def _divisor(w: Window, at: Sequence[Expr], include_pad: bool) -> Operand:
    """Elements that a window counts: a number where every window counts as many."""
    constant, varying = 1, []
    for dim, y in enumerate(at):
        k, s, p, size = w.kernel[dim], w.stride[dim], w.padding[dim], w.space[dim]
        low, high = (-p, size + p) if include_pad else (0, size)
        ends = [(max(o * s - p, low), min(o * s - p + k, high)) for o in range(w.out[dim])]
        counts = {b - a for a, b in ends}
        if len(counts) <= 1:
            constant *= counts.pop() if counts else 1
            continue
        start = y * s - p
        varying.append(call("minimum", start + k, high) - call("maximum", start, low))
    if not varying:
        return float(constant)
    total = Const(constant, DType.I64)
    for v in varying:
        total = total * v
    return cast(total, w.x.dtype.compute)


# ---- adaptive ----------------------------------------------------------------------------------


class AdaptiveWindow:
    """Window o of `out` spans floor(o * size / out) up to ceil((o + 1) * size / out)."""

    def __init__(self, x: Tensor, spatial: int, output_size: Ints) -> None:
        self.x = x
        self.space, self.lead = x.shape[x.rank - spatial :], x.shape[: x.rank - spatial]
        self.out = per_dimension(output_size, spatial)
        if len(self.out) != spatial or 0 in self.space:
            raise OpaqueOperator(f"adaptive pooling of {list(x.shape)} to {list(self.out)}")
        spans = [
            [-((o + 1) * n // -m) - o * n // m for o in range(m)]
            for n, m in zip(self.space, self.out, strict=True)
        ]
        self.kernel = tuple(max(s, default=1) for s in spans)
        self.even = tuple(
            n % m == 0 if m else True for n, m in zip(self.space, self.out, strict=True)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lead, *self.out)

    def bounds(self, dim: int, o: Expr) -> tuple[Expr, Expr]:
        """First position of window `o`, and the one after its last."""
        n, m, k = self.space[dim], self.out[dim], self.kernel[dim]
        if self.even[dim]:
            return o * k, (o + 1) * k
        return (o * n) // m, ((o + 1) * n + (m - 1)) // m

    def tap(
        self, i: Sequence[Expr], k: Sequence[Expr], pad: float
    ) -> tuple[Expr, list, Expr | None]:
        """The value at tap k of window i (`pad` beyond its end), its position, and whether it
        belongs to the window (None: always)."""
        n, at = tuple(i[: len(self.lead)]), i[len(self.lead) :]
        source, inside = [], []
        for dim, (o, t) in enumerate(zip(at, k, strict=True)):
            start, end = self.bounds(dim, o)
            source.append(start + t)
            if not self.even[dim]:
                inside.append(compare("lt", source[-1], end))
        value: Expr = guarded(self.x, (*n, *source), pad)
        belongs = all_of(inside)
        return (value if belongs is None else where(belongs, value, pad)), source, belongs

    def fold(self, monoid: str, pad: float, i: Sequence[Expr]) -> Expr:
        return fold(monoid, self.kernel, lambda *k: self.tap(i, k, pad)[0])

    def count(self, at: Sequence[Expr]) -> Operand:
        constant, total = 1, Const(1, DType.I64)
        for dim, o in enumerate(at):
            if self.even[dim]:
                constant *= self.kernel[dim]
            else:
                start, end = self.bounds(dim, o)
                total = total * (end - start)
        if isinstance(total, Const):
            return float(constant)
        return cast(total * constant, self.x.dtype.compute)


def _declare_adaptive(spatial: int) -> None:
    extra = (f"aten._adaptive_avg_pool{spatial}d.default",) if spatial > 1 else ()

    @op(f"aten.adaptive_avg_pool{spatial}d.default", *extra)
    def adaptive_avg_pool(x: Tensor, output_size: Ints) -> Tensor:
        """Mean of each of `output_size` windows that together cover the input."""
        require_float(x, "adaptive average pooling")
        w = AdaptiveWindow(x, spatial, output_size)
        return tensor(
            w.shape,
            x.dtype,
            lambda *i: w.fold("sum", 0.0, i) / w.count(i[len(w.lead) :]),
            "adaptive_avg_pool",
        )

    @op(f"aten.adaptive_max_pool{spatial}d.default")
    def adaptive_max_pool(x: Tensor, output_size: Ints) -> tuple[Tensor, Tensor]:
        """Largest value of each of `output_size` windows that together cover the input, and its
        flat position in the plane."""
        require_float(x, "adaptive max pooling")
        w = AdaptiveWindow(x, spatial, output_size)
        top = tensor(
            w.shape, x.dtype, lambda *i: w.fold("max", NEGATIVE_INFINITY, i), "adaptive_max_pool"
        )
        where_top = _positions(w.space, w.kernel, top, lambda i, k: w.tap(i, k, NEGATIVE_INFINITY))
        return top, where_top


for _spatial in (1, 2, 3):
    _declare_max(_spatial)
    _declare_mean(_spatial)
    _declare_adaptive(_spatial)
