"""Problems of the tensor-core engine from modules, and what they mean, in numpy and float64."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import nn

from onchip.backends.cuda.form import problem_of
from onchip.backends.cuda.problem import ACC, Line, Problem
from onchip.backends.interpreter import evaluate
from onchip.capture import capture
from onchip.capture.cleanup import constant_tensors
from onchip.capture.schema import is_view
from onchip.fusion.layout import choose_layouts, extent
from onchip.fusion.refusal import Refusal
from onchip.fusion.region import region_of
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Expr, Load, Tensor, given, rewrite

Strides = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Case:
    """A module's whole graph as a problem. values: of what it reads, float64; wanted: the module's
    results in float64; results: which tensors they are."""

    problem: Problem | Refusal
    strides: dict[Tensor, Strides]
    values: dict[Tensor, np.ndarray]
    wanted: list[np.ndarray]
    results: list[Tensor]


def case_of(module: nn.Module, *inputs: torch.Tensor, precision: str = "tf32") -> Case:
    module = module.eval()
    with torch.no_grad():
        captured = capture(module, inputs)
    graph = captured.graph
    strides = choose_layouts(graph, lambda n: is_view(n.call.target))
    constants = frozenset(constant_tensors(graph)) | frozenset(graph.constants)
    position = {n: i for i, n in enumerate(graph.nodes)}
    region = region_of(graph.nodes, graph, constants, position)
    values = {t: array(x) for t, x in zip(graph.inputs, inputs, strict=True)}
    held = {t: s.fetch() for t, s in captured.slots.items()}
    for p in captured.prepare:
        held.update(zip(p.outputs, p.compute([held[s] for s in p.sources]), strict=True))
    values |= {t: array(x) for t, x in held.items() if isinstance(x, torch.Tensor)}
    derived = [t for t in region.inputs if t not in values]
    values |= dict(zip(derived, evaluate(derived, values, exact=True), strict=True))
    with torch.no_grad():
        wide = module.double()(*(x.double() if x.is_floating_point() else x for x in inputs))
    wanted = [array(x) for x in (wide if isinstance(wide, tuple) else (wide,))]
    problem = problem_of(region, strides, constants, precision)
    return Case(problem, strides, values, wanted, list(graph.outputs))


def array(x: torch.Tensor) -> np.ndarray:
    x = x.detach()
    return (x.double() if x.is_floating_point() else x).numpy()


def memory(x: np.ndarray, strides: Strides) -> np.ndarray:
    """A tensor's elements as they lie; NaN between them."""
    flat = np.full(extent(x.shape, strides), np.nan)
    if x.size:
        np.lib.stride_tricks.as_strided(flat, x.shape, [8 * s for s in strides])[...] = x
    return flat


def over(e: Expr, axes: tuple[Axis, ...], values: dict[Tensor, np.ndarray], acc=None) -> np.ndarray:
    """An expression over axes, in float64; acc: the accumulators, over the same axes."""
    shape = tuple(a.extent for a in axes)
    known = dict(values)
    if acc is not None:
        held = given(shape, DType.F64, "acc")
        known[held] = acc
        e = rewrite(e, lambda x: Load(held, axes) if x is ACC else None)
    t = Tensor("whole", shape, e.dtype, axes, e)
    return evaluate([t], known, exact=True)[0]


def sums(p: Problem, case: Case) -> np.ndarray:
    """D over (batch, feature, positions of each line), from memory."""
    x = memory(case.values[p.x], case.strides[p.x])
    lines = p.lines
    shape = (p.batch, *(n.positions for n in lines), *(n.taps for n in lines), p.channels)
    grids = np.indices(shape, sparse=True)
    at = p.x_offset + grids[0] * p.x_batch + grids[-1]
    inside = np.ones((1,) * len(shape), bool)
    for k, n in enumerate(lines):
        tap = grids[1 + len(lines) + k]
        e = grids[1 + k] * n.stride + tap * n.dilation - n.pad
        if n.shifts:
            own = grids[0] // prod(m.classes for m in lines[:k]) % n.classes
            e = e + np.array(n.shifts)[own]
            inside = inside & (tap >= np.array(n.skips)[own])
        inside = inside & (e >= 0) & (e < n.size)
        at = at + np.clip(e, 0, n.size - 1) * n.step
    read = np.where(inside, x[at], 0.0)
    assert p.w_element is not None
    assert p.channel_axis is not None
    axes = (p.batch_axis, p.feature_axis, *p.tap_axes, p.channel_axis)
    w = over(p.w_element, axes, case.values)
    if not p.w_constant:
        flat = memory(case.values[p.w], case.strides[p.w])
        b, f, c = np.indices((p.batch, p.features, p.channels), sparse=True)
        feature, channel = (1, p.w_step) if p.w_features_inner else (p.w_step, 1)
        as_read = flat[p.w_offset + b * p.w_batch + f * feature + c * channel]
        np.testing.assert_array_equal(as_read, w.reshape(as_read.shape))
    names = "abcdefghijklmnop"
    positions, taps = names[: len(lines)], names[8 : 8 + len(lines)]
    return np.einsum(f"z{positions}{taps}y,zx{taps}y->zx{positions}", read, w, optimize=True)


def folded(fold: str, d: np.ndarray, lines: tuple[Line, ...]) -> np.ndarray:
    """Cells from positions: windows along each line, positions that there are."""
    fn = {"max": np.max, "min": np.min, "sum": np.sum}[fold]
    for k, n in enumerate(lines):
        parts = []
        for q in range(n.cells):
            own = range(n.hop * q - n.lead, n.hop * q - n.lead + n.window)
            there = [i for i in own if 0 <= i < n.positions]
            parts.append(fn(np.take(d, there, axis=2 + k), axis=2 + k))
        d = np.stack(parts, axis=2 + k)
    return d


def in_reach(p: Problem, e: Expr) -> Expr:
    """The value, which reads zeros at positions that a class does not have (nothing of them is
    stored)."""
    if not p.uneven:
        return e
    return rewrite(e, lambda x: Load(x.src, x.index, x.pad or 0) if isinstance(x, Load) else None)


def exists(p: Problem) -> np.ndarray:
    """Which positions each batch has, over (batch, feature, positions of each line)."""
    own = np.array([p.lengths_of(n) for n in range(p.batch)])
    ranges = [np.arange(x.positions) for x in p.lines]
    each = [r < own[:, k, None] for k, r in enumerate(ranges)]
    there = np.ones((p.batch, 1, *(1,) * len(ranges)), bool)
    for k, e in enumerate(each):
        there = there & e.reshape(p.batch, 1, *(1,) * k, -1, *(1,) * (len(ranges) - 1 - k))
    return there


@dataclass(frozen=True)
class Epilogue:
    """How values of accumulators are found: the expressions in float64, unless a test has others.
    before(d) gives those of positions; result(n, d) those of the n-th result."""

    p: Problem
    case: Case

    def axes(self, pooled: bool) -> tuple[Axis, ...]:
        places = self.p.cell_axes if pooled else self.p.position_axes
        return (self.p.batch_axis, self.p.feature_axis, *places)

    def before(self, d: np.ndarray) -> np.ndarray:
        return over(self.p.before, self.axes(False), self.case.values, d)

    def result(self, n: int, d: np.ndarray) -> np.ndarray:
        r = self.p.results[n]
        return over(in_reach(self.p, r.value), self.axes(r.pooled), self.case.values, d)

    def total(self, n: int, d: np.ndarray) -> np.ndarray:
        """What the n-th total folds."""
        return over(self.p.totals[n].value, self.axes(False), self.case.values, d)

    def kept(self) -> tuple[Axis, ...]:
        """Axes of finals."""
        lines = zip(self.p.position_axes, self.p.lines, strict=True)
        return (self.p.batch_axis, self.p.feature_axis, *(a for a, x in lines if x.apart))

    def final(self, n: int, totals: list[np.ndarray]) -> np.ndarray:
        """Of the n-th final, from the totals over its axes."""
        values, value = dict(self.case.values), self.p.finals[n].value
        for t, total in zip(self.p.totals, totals, strict=True):
            held = given(total.shape, DType.F64, "total")
            values[held], element = total, Load(held, self.kept())
            value = rewrite(value, lambda x, t=t, element=element: element if x is t.var else None)
        return over(value, self.kept(), values)


def results(p: Problem, case: Case, epilogue: Epilogue | None = None) -> list[np.ndarray]:
    """Each result; an element that is stored twice or not at all is an error."""
    epilogue = epilogue or Epilogue(p, case)
    d = sums(p, case)
    cells = folded(p.fold, epilogue.before(d), p.lines) if p.fold else d
    summed = tuple(2 + n for n, x in enumerate(p.lines) if not x.apart)
    folds = {"sum": np.sum, "max": np.max, "min": np.min}
    totals = [folds[t.fold](epilogue.total(n, d), summed) for n, t in enumerate(p.totals)]
    made = [
        (r, epilogue.axes(r.pooled), epilogue.result(n, cells if r.pooled else d))
        for n, r in enumerate(p.results)
    ]
    made += [(r, epilogue.kept(), epilogue.final(n, totals)) for n, r in enumerate(p.finals)]
    out, own = [], {r.tensor for r in p.results if not r.pooled}
    for r, axes, value in made:
        there = np.broadcast_to(exists(p) if r.tensor in own else True, value.shape)
        index = [over(i, axes, case.values)[there] for i in r.index]
        stored = np.full(r.tensor.shape, np.nan)
        count = np.zeros(r.tensor.shape, int)
        np.add.at(count, tuple(index), 1)
        assert (count == 1).all(), f"{r.tensor} is stored {count.min()} to {count.max()} times"
        stored[tuple(index)] = value[there]
        out.append(stored)
    return out


def check(case: Case, tolerance: float = 1e-7, epilogue: Epilogue | None = None) -> Problem:
    """Assert that the problem's results are the module's."""
    p = case.problem
    assert isinstance(p, Problem), f"refused: {p}"
    stored = (*p.results, *p.finals)
    got = dict(zip((r.tensor for r in stored), results(p, case, epilogue), strict=True))
    for t, want in zip(case.results, case.wanted, strict=True):
        scale = np.abs(want[np.isfinite(want)]).max(initial=1e-3)
        np.testing.assert_allclose(got[t], want, rtol=tolerance, atol=tolerance * scale)
    return p


def tile_places(p: Problem, case: Case) -> None:
    """Assert that what is copied in tiles lies as tiles do: features side by side, and other steps
    multiples of 16 bytes."""
    own = [(r.tensor, r.index, r.pooled) for r in p.results if r.tile]
    own += [(q.tensor, q.index, bool(p.fold)) for q in p.reads if q.kind == "tile"]
    for t, index, pooled in own:
        axes = Epilogue(p, case).axes(pooled)
        places = [over(i, axes, case.values) for i in index]
        whole = sum(i * s for i, s in zip(places, case.strides[t], strict=True))
        for flat in np.split(whole, p.classes) if p.classes > 1 else [whole]:
            assert flat.min() * t.dtype.size % 16 == 0
            for k in range(len(axes)):
                steps = np.unique(np.diff(flat, axis=k))
                assert len(steps) <= 1
                for s in steps:
                    assert s == 1 if k == 1 else s * t.dtype.size % 16 == 0
