"""Calls run the original module until the background has put the program in its place."""

from __future__ import annotations

import threading
import time
import warnings

import pytest
import torch
from tests.modules import Fn
from torch import nn

import onchip
from onchip import api
from onchip.capture import capture
from onchip.errors import CompilerError
from onchip.planning import assess
from onchip.runtime.background import COMPILING, leaves_no_trace
from onchip.settings import Settings


class Tiny(nn.Module):
    """Counts the calls of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 24))
        self.calls = Counter()

    def forward(self, x):
        self.calls.add()
        return torch.softmax(torch.relu(x * self.w) * 2, -1)


class Counter:
    count = 0

    def add(self) -> None:
        self.count += 1


X = torch.linspace(-1, 1, 8 * 24).view(8, 24)


def reference(x):
    return torch.softmax(torch.relu(x.double() * torch.linspace(-1, 1, 24).double()) * 2, -1)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def held(monkeypatch, tmp_path):
    """Planning waits until this event is set."""
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "cache"))
    event, plan = threading.Event(), api.plan
    event.planned_on = []  # type: ignore[attr-defined]

    def waits(captured, inputs, *rest):
        assert event.wait(60)
        event.planned_on[:] = [x.clone() for x in inputs]  # type: ignore[attr-defined]
        return plan(captured, inputs, *rest)

    monkeypatch.setattr(api, "plan", waits)
    yield event
    event.set()


def started(model=None, x=X, **settings):
    return onchip.compile(model or Tiny(), (x,), settings=Settings(start="eager", **settings))


def right(got, x=X) -> None:
    torch.testing.assert_close(got.double(), reference(x), rtol=1e-5, atol=1e-6)


def test_calls_run_the_module_until_the_program_is_ready(held):
    model = Tiny()
    program = started(model)
    before = model.calls.count
    right(program(X))
    right(program(X + 1), X + 1)
    assert model.calls.count == before + 2
    assert program.latest is None
    assert not program.wait(0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program(X)  # it was chosen: no warning
    assert program.notes == [COMPILING]
    held.set()
    assert program.wait(60)
    before = model.calls.count
    right(program(X))
    assert program.latest is not None
    assert program.sources
    assert model.calls.count == before


def test_an_error_is_a_warning_once_and_a_note(monkeypatch, held):
    def fails(*_, **__):
        raise CompilerError("the compiler\nwent away")

    monkeypatch.setattr(api, "plan", fails)
    note = "compiling failed, so the original module runs: CompilerError: the compiler went away"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        program = started()
        assert program.wait(60)
    assert [str(w.message) for w in told if "onchip" in str(w.message)] == [f"onchip: {note}"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            right(program(X))
    assert program.notes.count(note) == 1
    assert program.latest is None


@pytest.mark.parametrize(
    "f",
    [
        lambda s, x: torch.bernoulli(torch.sigmoid(x)),
        lambda s, x: x + s.w.add_(1),
    ],
    ids=["draws", "writes"],
)
def test_what_leaves_traces_is_compiled_at_once(held, f):
    held.set()
    model = Fn(f, w=torch.zeros(24))
    assert not leaves_no_trace(capture(model, (X,)))
    program = started(model)
    assert program.compiled
    assert COMPILING not in program.notes


def test_timing_rolls_nothing_back_that_another_thread_does(held):
    held.set()
    module = nn.BatchNorm1d(24).eval()
    with assess.undisturbed(module, (), traceless=True):
        module.running_mean.add_(1)
        first = torch.rand(4)
    assert torch.equal(module.running_mean, torch.ones(24))
    assert not torch.equal(first, torch.rand(4))
    with assess.undisturbed(module):
        module.running_mean.add_(1)
        first = torch.rand(4)
    assert torch.equal(module.running_mean, torch.ones(24))
    assert torch.equal(first, torch.rand(4))


def test_another_shape_does_not_wait_and_is_compiled_later(held):
    program = started()
    right(program(X[:4]), X[:4])
    assert len(program.table) == 1
    held.set()
    assert program.wait(60)
    right(program(X[:4]), X[:4])
    assert program.wait(60)
    right(program(X[:4]), X[:4])
    right(program(X))
    assert all(e.state.holds() and not hasattr(e, "reason") for es in program.table.values()
               for e in es)  # fmt: skip
    assert len(program.table) == 2


def test_inputs_may_be_overwritten_meanwhile(held):
    x = X.clone()
    program = started(x=x)
    x.fill_(float("nan"))
    held.set()
    assert program.wait(60)
    assert torch.equal(held.planned_on[0], X)
    right(program(X))


def test_threads_get_right_results_while_it_is_put_in_place(held):
    program, stop, wrong = started(), threading.Event(), []

    def calls(k: int) -> None:
        x = X * (k + 1)
        while not stop.is_set():
            try:
                with torch.no_grad():
                    right(program(x), x)
            except Exception as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=calls, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    time.sleep(0.05)
    held.set()
    assert program.wait(100)
    time.sleep(0.1)
    stop.set()
    for t in threads:
        t.join(60)
    assert not wrong, wrong[0]
    assert program.latest is not None


def test_a_report_waits_and_a_lock_file_is_written(held, tmp_path):
    path = tmp_path / "plan.lock"
    program = started(lock=str(path))
    assert not path.exists()
    threading.Timer(0.05, held.set).start()
    assert program.report().kernels
    text = path.read_text()
    again = onchip.compile(Tiny(), (X,), settings=Settings(lock=str(path)))
    assert again.sources == program.sources
    assert path.read_text() == text
