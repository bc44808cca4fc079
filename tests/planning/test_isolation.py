"""Kernels that break the process that tries them first: what the planner makes of it."""

from pathlib import Path

import pytest
import torch

from onchip.backends.nvidia import pool
from onchip.backends.nvidia.build import Built
from onchip.fusion.refusal import Rule
from onchip.planning import isolation, tuner
from onchip.planning.isolation import Isolation

CHILD = pool.Compiler("the process that tries kernels", "tests.planning.first_run_child")
SPECS = [("float32", 64, "values"), ("float32", 64, "poison")]


@pytest.fixture(autouse=True)
def no_children_left():
    yield
    pool.end_idle()


def isolated(**more):
    return Isolation(0, CHILD, free_bytes=lambda device: 1 << 20, **more)


def idle():
    return [w for _, w in pool._idle if w.compiler == CHILD]


def built(**more):
    return Built("cuda", Path("/somewhere/kernel.cu"), (), (), False)


def test_a_kernel_that_ran_is_not_refused_and_its_process_is_used_again() -> None:
    mine = isolated()
    mine.prepare()
    (waiting,) = idle()
    assert mine.first_run("good", built(), SPECS) is None
    assert mine.first_run("good", built(), SPECS) is None
    (worker,) = idle()
    assert worker is waiting
    assert not mine.notes


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dies", "SIGSEGV"),
        ("hangs", "took more than"),
        ("wrong address", "illegal memory access"),
        ("raises", "out of memory"),
    ],
)
def test_what_breaks_a_process_costs_the_candidate_only(name, said, monkeypatch) -> None:
    monkeypatch.setattr(isolation, "LIMIT_S", 0.5)
    mine = isolated()
    refused = mine.first_run(name, built(), SPECS)
    assert refused is not None
    assert refused.rule is Rule.CRASHES
    assert said in refused.text
    assert refused.subject == name
    # the next one has a process again
    assert mine.first_run("good", built(), SPECS) is None
    assert not mine.notes


def test_a_process_with_a_broken_gpu_is_not_asked_again() -> None:
    mine = isolated()
    assert mine.first_run("good", built(), SPECS) is None
    (before,) = idle()
    assert mine.first_run("wrong address", built(), SPECS) is not None
    assert not idle()
    assert before.process.poll() is not None


def test_the_tensors_reach_the_child() -> None:
    refused = isolated().first_run("beyond", built(), SPECS)
    assert refused is not None
    assert "['float32', 64, 'values'], ['float32', 64, 'poison']" in refused.text


def test_a_child_that_can_not_start_is_no_reason_to_refuse(monkeypatch) -> None:
    monkeypatch.setenv("ONCHIP_TEST_BROKEN_CHILD", "1")
    mine = isolated()
    assert mine.first_run("good", built(), SPECS) is None
    assert mine.first_run("dies", built(), SPECS) is None  # not asked
    assert len(mine.notes) == 1
    assert "ran in this process" in mine.notes[0]


def test_what_does_not_fit_twice_runs_where_it_is() -> None:
    mine = isolated()
    assert mine.first_run("dies", built(), [("float32", 1 << 20, "values")]) is None
    assert mine.notes == ["dies: too large to be tried in a process of its own"]


@pytest.mark.parametrize(
    ("x", "nbytes"),
    [
        (torch.empty(3, 5), 60),
        (torch.empty(3, 5).t(), 60),
        (torch.empty(4, 10)[:, ::3], 4 * (30 + 9 + 1)),
        (torch.empty(3, 1).expand(3, 7), 12),
        (torch.empty(0, 5), 0),
        (torch.empty((), dtype=torch.bfloat16), 2),
    ],
)
def test_the_bytes_of_a_tensor_reach_from_its_first_to_its_last_element(x, nbytes) -> None:
    assert tuner._nbytes(x) == nbytes
