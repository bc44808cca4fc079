"""Classes of positions of a transposed convolution with a stride, in one kernel: a tile is of one
class. It shifts the input, has taps of its own, and results that lie a stride apart."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from onchip.backends.cuda.form_axes import Strides, affine
from onchip.backends.cuda.form_classes import forms_by_class
from onchip.backends.cuda.geometry import Geometry
from onchip.backends.cuda.problem import Problem
from onchip.ir.expr import Axis, Expr, Tensor


def class_taps(g: Geometry) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The taps that each class has, as in a phase: the input is one copy."""
    p = g.problem
    numbers = [prod(line.taps for line in p.lines[:n]) for n in range(len(p.lines))]
    found = []
    for n in range(p.classes):
        taps = list(g.phases[0].taps)
        for line, own, every in zip(p.lines, p.class_of(n), numbers, strict=True):
            skip = line.skips[own] if line.skips else 0
            taps = [t for t in taps if t[1] // every % line.taps >= skip]
        found.append(tuple(taps))
    return tuple(found)


def tap_tables(g: Geometry) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """All taps, in a phase's form: those of one phase after the other, or of one class, where
    classes have different ones; where each phase begins, and each class, with the end."""
    parts = class_taps(g) if g.problem.unlike else [phase.taps for phase in g.phases]
    begins = [sum(map(len, parts[:n])) for n in range(len(parts) + 1)]
    all_taps = [t for part in parts for t in part]
    return all_taps, *(([0, len(g.phases[0].taps)], begins) if g.problem.unlike else (begins, [0]))


def class_shifts(p: Problem) -> list[list[int]]:
    """Elements along each line that a class' input starts further on."""
    return [
        [x.shifts[c] if x.shifts else 0 for x, c in zip(p.lines, p.class_of(n), strict=True)]
        for n in range(p.classes)
    ]


def steps_by_class(
    p: Problem, t: Tensor, index: tuple[Expr, ...], strides: Mapping[Tensor, Strides]
) -> list[dict[Axis | None, int]]:
    """Elements between neighbours along each axis of an index, for each class; under None, before
    the first."""
    forms = forms_by_class(p, index, strides[t])
    assert all(map(affine, forms)), "a tile's elements lie at equal distances"
    return [{None: f.constant} | {a: c for a, c in f.terms if isinstance(a, Axis)} for f in forms]
