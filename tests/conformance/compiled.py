"""The conformance cases on generated C++.

`harness.check` leaves each case here; `flush` compiles them together, runs them, and compares the
results with ATen's, to the same tolerance. Inputs and outputs of every case lie in memory in one
of LAYOUTS, in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from onchip.backends.cpp.run import Job, prepare, run_all
from onchip.fusion.refusal import Refusal
from onchip.fusion.staging import unsupported
from onchip.ir.expr import Tensor
from onchip.ir.graph import defined_by

Strides = tuple[int, ...]
Compare = Callable[[str, np.ndarray, torch.Tensor, tuple[float, float] | None], None]


@dataclass(frozen=True, eq=False)
class Case:
    target: str
    outputs: list[Tensor]
    values: dict[Tensor, np.ndarray]
    want: list[torch.Tensor]
    tol: list[tuple[float, float] | None]
    compare: Compare


PENDING: list[Case] = []


def dense(shape: tuple[int, ...]) -> Strides:
    return in_order(shape, range(len(shape)))


def reversed_axes(shape: tuple[int, ...]) -> Strides:
    return in_order(shape, range(len(shape) - 1, -1, -1))


def channels_last_with_gaps(shape: tuple[int, ...]) -> Strides:
    """Axis 1 innermost, two elements apart, and each row longer than it need be."""
    order = [d for d in range(len(shape)) if d != 1] + [1] * (len(shape) > 1)
    return in_order(shape, order, step=2, gap=3)


def in_order(shape: tuple[int, ...], order, step: int = 1, gap: int = 0) -> Strides:
    """Strides with the last axis of `order` innermost."""
    out = [0] * len(shape)
    for d in reversed(list(order)):
        out[d] = step
        step = step * max(shape[d], 1) + gap
        gap = 0
    return tuple(out)


LAYOUTS = (dense, reversed_axes, channels_last_with_gaps)


def flush() -> None:
    """Run what is pending; raise one AssertionError that lists every case that differs."""
    cases, problems = list(PENDING), []
    jobs: list[tuple[Case, list[int], Job, str]] = []
    PENDING.clear()
    for number, case in enumerate(cases):
        layout = LAYOUTS[number % len(LAYOUTS)]
        for which, made in _prepared(case, layout):
            if isinstance(made, Refusal):
                problems.append(f"{case.target}: refused: {made}")
            else:
                jobs.append((case, which, made, layout.__name__))
    for (case, which, made, layout), got in zip(jobs, run_all([j[2] for j in jobs]), strict=True):
        shapes = [f"{t.dtype}{list(t.shape)}" for t in case.values]
        try:
            if isinstance(got, Exception):
                raise AssertionError(repr(got))
            for n, x in zip(which, got, strict=True):
                case.compare(case.target, x, case.want[n], case.tol[n])
        except AssertionError as error:
            problems.append(f"{case.target} {layout} {shapes}: {error}\n{made.source.text}")
    assert not problems, f"{len(problems)} of {len(cases)} cases in C++:\n" + "\n".join(problems)


def _prepared(
    case: Case, layout: Callable[[tuple[int, ...]], Strides]
) -> list[tuple[list[int], Job | Refusal]]:
    """Kernels with the numbers of the results they compute: one for all, or one for each where
    the results have no tile in common. None where every result is a given tensor, or where the
    operator has no C++ and the partition says so."""
    which = [n for n, t in enumerate(case.outputs) if t not in case.values]
    outputs = [case.outputs[n] for n in which]
    if not outputs or any(unsupported(t) for t in defined_by(outputs, case.values)):
        return []
    strides = {t: layout(t.shape) for t in (*case.values, *outputs)}
    made = prepare(outputs, case.values, strides=strides)
    if isinstance(made, Job) or len(outputs) == 1:
        return [(which, made)]
    return [([n], prepare([case.outputs[n]], case.values, strides=strides)) for n in which]
