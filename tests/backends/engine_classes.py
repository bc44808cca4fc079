"""Transposed convolutions with a stride, built by hand as problems of the engine, and what they
are by definition: each input adds its product with each element of the filter to a result."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from tests.backends.engine_problems import TYPES, Values

from onchip.backends.cuda.problem import ACC, Line, Problem, Read, Result
from onchip.ir.expr import Expr, Load, axis, call, given


@dataclass(frozen=True)
class Up:
    """Per-line values are innermost first. The result is as long as the stride times the input, if
    `longer` is 0, else by so many strides more; where there is a stride, `less` are left
    out at its end. n: of pictures; kernel: elements of the filter."""

    n: int
    channels: int
    sizes: tuple[int, ...]
    features: int
    kernel: tuple[int, ...]
    steps: tuple[int, ...]
    pads: tuple[int, ...]
    longer: int = 0
    less: int = 0
    kind: str = "bf16"
    tile: bool = True
    residual: bool = False


def offsets(kernel: int, step: int, pad: int, c: int) -> list[tuple[int, int]]:
    """Of a class: (where in the input it reads, from its position on; element of the filter)."""
    return sorted(((c + pad - k) // step, k) for k in range(kernel) if (c + pad - k) % step == 0)


def line_of(
    size: int, step_of_x: int, kernel: int, step: int, pad: int, longer: int, less: int
) -> Line:
    most, less = size + longer, less * (step > 1)
    each = [offsets(kernel, step, pad, c) for c in range(step)]
    taps, last = max(map(len, each)), [o[-1][0] for o in each]
    return Line(
        size, step_of_x, most, taps=taps, pad=taps - 1 - min(last), cells=most,
        shifts=tuple(n - min(last) for n in last) if step > 1 else (),
        skips=tuple(taps - len(o) for o in each) if step > 1 else (),
        lengths=tuple(len(range(c, step * most - less, step)) for c in range(step)) if less else (),
    )  # fmt: skip


def transposed(s: Up) -> Problem:
    """Channels-last; weights lie [class, features, taps, channels]."""
    dtype, lines, step = TYPES[s.kind], [], s.channels
    for size, kernel, stride, pad in zip(s.sizes, s.kernel, s.steps, s.pads, strict=True):
        lines.append(line_of(size, step, kernel, stride, pad, s.longer, s.less))
        step *= size
    if s.n:
        lines.append(Line(s.n, step, s.n, cells=s.n))
    classes = prod(x.classes for x in lines)
    f, b, channel = axis(s.features, "f"), axis(classes, "b"), axis(s.channels, "c")
    positions = tuple(axis(x.positions, "p") for x in lines)
    taps = tuple(axis(x.taps, "t") for x in lines)
    x = given((*(x.size for x in reversed(lines)), s.channels), dtype, "x")
    w = given((classes, s.features, *(x.taps for x in reversed(lines)), s.channels), dtype, "w")
    outer = tuple(sum(x.lengths) or x.positions * x.classes for x in reversed(lines))
    y = given((1, *outer, s.features), dtype, "y")
    places, width = [], 1
    for a, line in zip(positions, lines, strict=True):
        places.append(a * line.classes + b // width % line.classes)
        width *= line.classes
    index: tuple[Expr, ...] = (b * 0, *reversed(places), f)
    reads, value = (), ACC
    if s.residual:
        residual = given(y.shape, dtype, "residual")
        reads = (Read(residual, index, None, "tile" if s.tile else "direct"),)
        value = call("add", ACC, Load(residual, index))
    return Problem(
        s.kind, x, w, s.channels, tuple(lines), s.features, classes, 0, 0, True, 0, 0, f, b,
        positions, positions, ACC, "", (Result(y, index, value, False, s.tile),), reads,
        Load(w, (b, f, *reversed(taps), channel)), taps, channel,
    )  # fmt: skip


def values_and_result(s: Up, p: Problem) -> tuple[Values, np.ndarray]:
    """Small integers. Weights of taps that a class does not have are NaN."""
    random, d = np.random.default_rng(0), len(s.sizes)
    n = max(s.n, 1)
    x = random.integers(-3, 4, (n, *reversed(s.sizes), s.channels)).astype(float)
    filters = random.integers(-3, 4, (*reversed(s.kernel), s.features, s.channels)).astype(float)
    residual = random.integers(-9, 10, p.results[0].tensor.shape).astype(float)
    w = np.full((p.batch, p.features, *(m.taps for m in reversed(p.lines)), p.channels), np.nan)
    for b in range(p.batch):
        own = p.class_of(b)[:d]
        has = [
            [(line.taps - len(found) + i, k) for i, (_, k) in enumerate(found)]
            for line, found in zip(
                p.lines[:d], map(offsets, s.kernel, s.steps, s.pads, own), strict=True
            )
        ]  # fmt: skip
        for places in product(*reversed(has)):
            tap = (*[0] * (len(p.lines) - d), *(t for t, _ in places))
            w[(b, slice(None), *tap)] = filters[tuple(k for _, k in places)]
    want = np.zeros((n, *p.results[0].tensor.shape[-d - 1 :]))
    for at in np.ndindex(*reversed(s.sizes)):
        for k in np.ndindex(*reversed(s.kernel)):
            y = [
                i * m - pad + e
                for i, m, pad, e in zip(at, s.steps[::-1], s.pads[::-1], k, strict=True)
            ]
            if all(0 <= e < m for e, m in zip(y, want.shape[1:-1], strict=True)):
                want[(slice(None), *y)] += x[(slice(None), *at)] @ filters[k].T
    want = want.reshape(p.results[0].tensor.shape)
    return Values(x.ravel(), w.reshape(p.batch, p.features, p.taps, p.channels), residual), (
        want + residual if s.residual else want
    )
