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
    cases, problems, jobs = list(PENDING), [], []
    PENDING.clear()
    for number, case in enumerate(cases):
        layout = LAYOUTS[number % len(LAYOUTS)]
        made = _prepared(case, layout)
        if isinstance(made, Refusal):
            problems.append(f"{case.target}: refused: {made}")
        elif made is not None:
            jobs.append((case, made, layout.__name__))
    for (case, made, layout), got in zip(jobs, run_all([j for _, j, _ in jobs]), strict=True):
        shapes = [f"{t.dtype}{list(t.shape)}" for t in case.values]
        try:
            if isinstance(got, Exception):
                raise AssertionError(repr(got))
            for x, want, tol in zip(got, case.want, case.tol, strict=True):
                case.compare(case.target, x, want, tol)
        except AssertionError as error:
            problems.append(f"{case.target} {layout} {shapes}: {error}\n{made.source.text}")
    assert not problems, f"{len(problems)} of {len(cases)} cases in C++:\n" + "\n".join(problems)


def _prepared(case: Case, layout: Callable[[tuple[int, ...]], Strides]) -> Job | Refusal | None:
    """None: every result is a given tensor, or the operator has no C++ and the partition says so."""
    outputs = [t for t in case.outputs if t not in case.values]
    tensors = defined_by(outputs, case.values)
    if len(outputs) != len(case.outputs) or any(unsupported(t) for t in tensors):
        return None
    strides = {t: layout(t.shape) for t in (*case.values, *outputs)}
    return prepare(outputs, case.values, strides=strides)
