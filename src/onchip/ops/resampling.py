"""Resampling: nearest and linear interpolation at positions that are integer index arithmetic.

ATen finds the source of an output position in floating point. Here the positions are computed
ahead, for every output, with ATen's own roundings, and expressed as floor((a * y + b) / c): so
that every index is affine or a floor of one, and bounds are known.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeGuard

import numpy as np

from onchip.errors import OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Expr, Tensor, call, cast, tensor
from onchip.ops.geometry import declare_opaque
from onchip.ops.registry import op

Factors = Sequence[float | None]


def floor_line(table: np.ndarray, slopes: Sequence[Fraction]) -> tuple[int, int, int] | None:
    """(a, b, c) with table[y] == (a * y + b) // c for every y; a / c is one of `slopes`."""
    y = range(len(table))
    for slope in slopes:
        a, c = slope.numerator, slope.denominator
        low = max((int(t) * c - a * i for i, t in zip(y, table, strict=True)), default=0)
        high = min((int(t) * c + c - 1 - a * i for i, t in zip(y, table, strict=True)), default=0)
        if low <= high:
            # 0 keeps the index short; else the smallest offset that works
            return a, (0 if low <= 0 <= high else low), c
    return None


def _along(table: np.ndarray, slopes: Sequence[Fraction]) -> Callable[[Expr], Expr]:
    """The entry of a table of source positions at an output position, as index arithmetic."""
    line = floor_line(table, slopes)
    if line is None:
        raise OpaqueOperator("resampling at positions that no straight line gives")
    a, b, c = line
    return lambda y: (y * a + b) // c


# ---- arguments ---------------------------------------------------------------------------------


def _size_and_factors(
    x: Tensor, spatial: int, output_size: Sequence[int] | None, factors: Factors | None
) -> tuple[tuple[int, ...], tuple[float | None, ...]]:
    """Output size, and for each dimension the factor the user gave (None: from the sizes)."""
    if output_size is not None:
        return tuple(output_size), (None,) * spatial
    assert factors is not None
    space = x.shape[x.rank - spatial :]
    size = tuple(int(n * f) for n, f in zip(space, factors, strict=True) if f is not None)
    return size, tuple(factors)


def _given(f: float | None) -> TypeGuard[float]:
    """Whether the user gave a factor (ATen takes one that isn't positive for none)."""
    return f is not None and f > 0


# ---- nearest -----------------------------------------------------------------------------------


def _nearest_table(size: int, out: int, factor: float | None, exact: bool) -> np.ndarray:
    """Source of each output, with float32 arithmetic as ATen's."""
    scale = np.float32(1.0 / factor) if _given(factor) else np.float32(size) / out
    y = np.arange(out, dtype=np.float32)
    position = (y + np.float32(0.5)) * np.float32(scale) if exact else y * np.float32(scale)
    return np.minimum(np.floor(position).astype(np.int64), size - 1)


def _nearest(
    x: Tensor, size: Sequence[int], factors: Sequence[float | None], exact: bool
) -> Tensor:
    spatial = len(size)
    space, k = x.shape[x.rank - spatial :], x.rank - spatial
    if 0 in space or 0 in size:
        raise OpaqueOperator(f"resampling of {list(x.shape)} to {list(size)}")
    sources = []
    for n, m, f in zip(space, size, factors, strict=True):
        slopes = [Fraction(n, m)]
        if _given(f):
            slopes.append(Fraction(float(np.float32(1.0 / f))))
        sources.append(_along(_nearest_table(n, m, f, exact), slopes))

    def element(*i: Expr) -> Expr:
        return x[(*i[:k], *(s(y) for s, y in zip(sources, i[k:], strict=True)))]

    return tensor((*x.shape[:k], *size), x.dtype, element, "upsample_nearest")


def _declare_nearest(spatial: int, exact: bool) -> None:
    name = f"aten.{'_upsample_nearest_exact' if exact else 'upsample_nearest'}{spatial}d"

    @op(f"{name}.default")
    def nearest(x: Tensor, output_size: Sequence[int], *factors: float | None, **named) -> Tensor:
        """The input element nearest to each output position."""
        given = _named(spatial, factors, named)
        return _nearest(x, tuple(output_size), given, exact)

    @op(f"{name}.vec")
    def nearest_vec(
        x: Tensor, output_size: Sequence[int] | None, scale_factors: Factors | None
    ) -> Tensor:
        """The input element nearest to each output position."""
        return _nearest(x, *_size_and_factors(x, spatial, output_size, scale_factors), exact)


def _named(spatial: int, factors: Factors, named: dict[str, float | None]) -> tuple:
    """The scale factors of a non-vector overload, by position or by name."""
    names = ("scales",) if spatial == 1 else ("scales_d", "scales_h", "scales_w")[-spatial:]
    found = list(factors) + [named.get(n) for n in names[len(factors) :]]
    return tuple(found)


# ---- linear ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """Linear interpolation along one dimension of `size` elements: output y lies at
    max(scale * (y + half) - half, 0), where half is 1/2, or 0 with aligned corners."""

    size: int
    out: int
    scale: Fraction
    half: Fraction

    def positions(self) -> list[Fraction]:
        return [max(self.scale * (y + self.half) - self.half, Fraction(0)) for y in range(self.out)]

    def corners(self, y: Expr, dtype: DType) -> list[tuple[Expr, Expr | None]]:
        """(source, weight) of the one or two elements that output y mixes."""
        table = np.asarray([min(int(p), self.size - 1) for p in self.positions()], dtype=np.int64)
        low = self._low(table)(y)
        if self.size == 1 or all(p.denominator == 1 for p in self.positions()):
            return [(low, None)]
        high = call("minimum", low + 1, self.size - 1)
        at = (cast(y, dtype) + float(self.half)) * float(self.scale) - float(self.half)
        upper = call("maximum", at, 0.0) - cast(low, dtype)
        return [(low, 1.0 - upper), (high, upper)]

    def _low(self, table: np.ndarray) -> Callable[[Expr], Expr]:
        line = floor_line(table, [self.scale])
        if line is not None:
            a, b, c = line
            return lambda y: (y * a + b) // c
        # the clamp at 0 bends the line: an unclamped line, clamped
        a, c = self.scale.numerator, self.scale.denominator
        b = self.half * (a - c)
        double = b.denominator
        line_of = (a * double, int(b * double), c * double)
        return lambda y: call(
            "minimum",
            call("maximum", (y * line_of[0] + line_of[1]) // line_of[2], 0),
            self.size - 1,
        )


def _line(size: int, out: int, align_corners: bool, factor: float | None) -> Line:
    if align_corners:
        scale = Fraction(size - 1, out - 1) if out > 1 else Fraction(0)
        return Line(size, out, scale, Fraction(0))
    if _given(factor):
        return Line(size, out, 1 / Fraction(factor).limit_denominator(2**20), Fraction(1, 2))
    return Line(size, out, Fraction(size, out), Fraction(1, 2))


def _linear(
    x: Tensor, size: Sequence[int], factors: Sequence[float | None], align_corners: bool
) -> Tensor:
    if not x.dtype.is_float:
        raise OpaqueOperator(f"linear interpolation of {x.dtype.label} is left to the library")
    spatial = len(size)
    space, k = x.shape[x.rank - spatial :], x.rank - spatial
    if 0 in space or 0 in size:
        raise OpaqueOperator(f"resampling of {list(x.shape)} to {list(size)}")
    lines = [_line(n, m, align_corners, f) for n, m, f in zip(space, size, factors, strict=True)]

    def mix(lead: tuple[Expr, ...], at: tuple[Expr, ...], corners: list) -> Expr:
        if not corners:
            return x[(*lead, *at)]
        total: Expr | None = None
        for source, weight in corners[0]:
            part = mix(lead, (*at, source), corners[1:])
            part = part if weight is None else weight * part
            total = part if total is None else total + part
        assert total is not None
        return total

    def element(*i: Expr) -> Expr:
        corners = [line.corners(y, x.dtype.compute) for line, y in zip(lines, i[k:], strict=True)]
        return mix(i[:k], (), corners)

    return tensor((*x.shape[:k], *size), x.dtype, element, "upsample_linear")


def _declare_linear(spatial: int, name: str) -> None:
    @op(f"aten.{name}.default")
    def linear(
        x: Tensor, output_size: Sequence[int], align_corners: bool, *factors: float | None, **named
    ) -> Tensor:
        """Linear interpolation in every spatial dimension."""
        return _linear(x, tuple(output_size), _named(spatial, factors, named), align_corners)

    @op(f"aten.{name}.vec")
    def linear_vec(
        x: Tensor, output_size: Sequence[int] | None, align_corners: bool,
        scale_factors: Factors | None,
    ) -> Tensor:  # fmt: skip
        """Linear interpolation in every spatial dimension."""
        size, factors = _size_and_factors(x, spatial, output_size, scale_factors)
        return _linear(x, size, factors, align_corners)


for _spatial, _exact in itertools.product((1, 2, 3), (False, True)):
    _declare_nearest(_spatial, _exact)
for _spatial, _name in enumerate(
    ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
):
    _declare_linear(_spatial + 1, _name)

_BICUBIC = "bicubic interpolation is left to the library"
declare_opaque(_BICUBIC, "aten.upsample_bicubic2d.default", "aten.upsample_bicubic2d.vec")
declare_opaque(
    "antialiased interpolation has windows that depend on the position",
    "aten._upsample_bilinear2d_aa.default", "aten._upsample_bilinear2d_aa.vec",
    "aten._upsample_bicubic2d_aa.default", "aten._upsample_bicubic2d_aa.vec",
)  # fmt: skip
declare_opaque(
    "grid sampling reads at positions that are data",
    "aten.grid_sampler.default", "aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default",
)  # fmt: skip
