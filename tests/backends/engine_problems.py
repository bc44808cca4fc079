"""Contractions built by hand, with values of small integers and their exact results."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from onchip.backends.cuda.problem import ACC, Line, Problem, Read, Result
from onchip.ir.dtype import DType
from onchip.ir.expr import Expr, Load, axis, call, given

TYPES = {"bf16": DType.BF16, "fp16": DType.F16, "tf32": DType.F32, "tf32x3": DType.F32}
NOTHING = (1, 1, 0)  # window, hop, lead


@dataclass(frozen=True)
class Shape:
    """A convolution or, of one tap, a product. Per-line values are innermost first; pads: before
    and after; pool: (window, hop, lead) for each line; n: of pictures (one line more; 0: none);
    batch: groups; tile: the copy engine stores results; residual: added to them."""

    n: int
    channels: int
    sizes: tuple[int, ...]
    features: int
    taps: tuple[int, ...]
    strides: tuple[int, ...] = ()
    pads: tuple[tuple[int, int], ...] = ()
    dilations: tuple[int, ...] = ()
    pool: tuple[tuple[int, int, int], ...] = ()
    fold: str = "max"
    kind: str = "bf16"
    batch: int = 1
    tile: bool = True
    residual: bool = False
    constant: bool = True


def contraction(s: Shape) -> Problem:
    """The problem of a shape, channels-last; weights lie [batch, features, taps, channels]."""
    dtype, count = TYPES[s.kind], len(s.sizes)
    ones = (1,) * count
    strides, dilations = s.strides or ones, s.dilations or ones
    pads, pool = s.pads or ((0, 0),) * count, s.pool or (NOTHING,) * count
    lines, step = [], s.channels * s.batch
    for size, taps, stride, pad, dilation, (window, hop, lead) in zip(
        s.sizes, s.taps, strides, pads, dilations, pool, strict=True
    ):
        positions = (size + sum(pad) - dilation * (taps - 1) - 1) // stride + 1
        cells = (positions + 2 * lead - window) // hop + 1
        lines.append(
            Line(size, step, positions, stride, taps, dilation, pad[0], cells, window, hop, lead)
        )
        step *= size
    if s.n:
        lines.append(Line(s.n, step, s.n, cells=s.n))
    f, b = axis(s.features, "f"), axis(s.batch, "b")
    positions = tuple(axis(x.positions, "p") for x in lines)
    cells = tuple(axis(x.cells, "q") for x in lines)
    axes = cells if s.pool else positions
    outer = tuple(a.extent for a in reversed(axes))
    x = given((*(x.size for x in reversed(lines)), s.batch * s.channels), dtype, "x")
    taps = tuple(axis(x.taps, "t") for x in lines)
    channel = axis(s.channels, "c")
    w = given((s.batch, s.features, *(x.taps for x in reversed(lines)), s.channels), dtype, "w")
    y = given((s.batch, *outer, s.features), dtype, "y")
    index: tuple[Expr, ...] = (b, *reversed(axes), f)
    reads, value = (), ACC
    if s.residual:
        residual = given(y.shape, dtype, "residual")
        reads = (Read(residual, index, None, "tile"),)
        value = call("add", ACC, Load(residual, index))
    result = Result(y, index, value, bool(s.pool), s.tile)
    step_of_w = () if s.constant else (s.channels, s.channels * s.features)
    return Problem(
        s.kind, x, w, s.channels, tuple(lines), s.features, s.batch, 0, s.channels, s.constant,
        *(step_of_w or (0, 0)), f, b, positions, cells, ACC, s.fold if s.pool else "",
        (result,), reads, Load(w, (b, f, *reversed(taps), channel)), taps, channel,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Values:
    """x: as it lies in memory; w: [batch, features, tap, channels]; residual: [batch, cells or
    positions, outermost first, features]."""

    x: np.ndarray
    w: np.ndarray
    residual: np.ndarray


def values_of(p: Problem, seed: int = 0) -> Values:
    random = np.random.default_rng(seed)
    x = random.integers(-3, 4, prod(p.x.shape)).astype(np.float64)
    w = random.integers(-3, 4, (p.batch, p.features, p.taps, p.channels)).astype(np.float64)
    residual = random.integers(-9, 10, p.results[0].tensor.shape).astype(np.float64)
    return Values(x, w, residual)


def elements(p: Problem, indices: list[np.ndarray]) -> np.ndarray:
    """Where elements of x lie: [batch, lines outermost first, channels]; indices: of each line."""
    at = p.x_offset + np.arange(p.channels)
    for index, line in zip(indices, p.lines, strict=True):
        at = at + (index * line.step).reshape(-1, *(1,) * at.ndim)
    return at + (np.arange(p.batch) * p.x_batch).reshape(-1, *(1,) * at.ndim)


def expected(p: Problem, v: Values) -> np.ndarray:
    """The results, directly: a sum over taps, then a fold over the positions that exist."""
    total: np.ndarray | float = 0.0
    for number, tap in enumerate(np.ndindex(*(x.taps for x in reversed(p.lines)))):
        indices, there = [], np.ones((1,) * (len(p.lines) + 2))
        for n, (line, t) in enumerate(zip(p.lines, tap[::-1], strict=True)):
            index = line.stride * np.arange(line.positions) + line.dilation * t - line.pad
            inside = (index >= 0) & (index < line.size)
            there = there * inside.reshape(-1, *(1,) * (n + 1))
            indices.append(np.clip(index, 0, line.size - 1))
        x = v.x[elements(p, indices)] * there
        total = total + np.einsum("b...c,bfc->b...f", x, v.w[:, :, number])
    got = np.asarray(total)
    if p.pools:
        fold = {"max": np.maximum, "min": np.minimum, "sum": np.add}[p.fold]
        for n, line in enumerate(p.lines):
            at = got.ndim - 2 - n
            cells = []
            for q in range(line.cells):
                first = line.hop * q - line.lead
                places = range(max(first, 0), min(first + line.window, line.positions))
                cells.append(fold.reduce(np.take(got, list(places), at), at))
            got = np.stack(cells, at)
    return got + v.residual if p.reads else got
