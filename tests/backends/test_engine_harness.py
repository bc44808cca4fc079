"""tests/gpu/engine_kernels.py, on the CPU with a launch that is played: what a kernel may do wrong
shows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.backends.triton_jobs import MARGIN
from tests.gpu import engine_kernels
from tests.gpu.engine_cases import CASES, prepare

from onchip.backends.nvidia.build import Built

NOTHING = Built("cuda", Path("played"), (), (), False)


@cache
def subject() -> engine_kernels.Ready:
    p = prepare(CASES["smaller_than_a_tile"])
    return engine_kernels.Ready(p, [p.candidate(p.configs[0])], [NOTHING])


def played(m: engine_kernels.Memory) -> None:
    """What the kernel should do, from the memory that it gets."""
    r = subject()
    c = r.candidates[0]
    given = dict(zip(c.inputs, (x for _, x in m.given), strict=True))
    want = dict(zip(r.case.results, r.case.truth([given[t] for t in r.case.inputs]), strict=True))
    for t, (_, view) in zip(c.outputs, m.made, strict=True):
        view.copy_(want[t])


def found(launch: Callable[[engine_kernels.Memory], None], monkeypatch) -> list[str]:
    monkeypatch.setattr(engine_kernels, "FLUSH", 1)
    return engine_kernels.problems(subject(), 0, lambda _, m: launch(m), "cpu")


def test_a_right_kernel_passes(monkeypatch):
    assert found(played, monkeypatch) == []


def _leaves_one(m):
    played(m)
    m.made[0][1][0, 3, 1, 0] = float("nan")


def _one_step_off(m):
    played(m)
    bits = m.made[0][1].view(torch.int16)
    bits[0, 99, 1, 1] += 1


def _beside(m):
    played(m)
    m.made[0][0].view(torch.bfloat16)[MARGIN - 1] = 0


def _hides_nan(m):
    played(m)
    m.made[0][1].nan_to_num_(0.0, 1e30, -1e30)


def _writes_weights(m):
    played(m)
    m.fixed[0][1].view(-1)[0] += 1


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (_leaves_one, "integers: "),
        (_one_step_off, "integers: "),
        (_beside, "outside of a result"),
        (_hides_nan, "odd: "),
        (_writes_weights, "wrote an input"),
    ],
)
def test_a_fault_shows(fault, text, monkeypatch):
    assert any(text in p for p in found(fault, monkeypatch))


def test_other_bits_in_another_launch_show(monkeypatch):
    calls = []

    def launch(m):
        played(m)
        calls.append(m)
        if len(calls) == 5:
            m.made[0][1].view(torch.int16)[0, 0, 0, 0] ^= 1

    assert any("other bits" in p and "warm" in p for p in found(launch, monkeypatch))


def test_a_kernel_that_was_not_built_is_a_problem():
    r = engine_kernels.Ready(subject().case, subject().candidates, [ValueError("no")])
    assert "not built: no" in engine_kernels.problems(r, 0, lambda *_: None, "cpu")[0]
