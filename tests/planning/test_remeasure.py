"""Every fused kernel that ships, measured again: with times told, and on this machine."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import onchip
from onchip.analysis.record import Interval
from onchip.planning import remeasure as module
from onchip.planning.remeasure import remeasure
from onchip.report import bench_verify
from onchip.report.bench_suites import Case
from onchip.settings import Settings


class Blocks(nn.Module):
    """Two equal regions around one that has no expression."""

    def forward(self, x):
        y = torch.sort(torch.tanh(x) * x).values
        return torch.tanh(y) * y


X = torch.randn(8, 700)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    with pytest.MonkeyPatch.context() as m, torch.no_grad():
        m.setenv("ONCHIP_CACHE", str(tmp_path_factory.mktemp("cache")))
        found = onchip.compile(Blocks(), (X,), settings=Settings(budget_s=60.0)).compiled[-1]
    assert found.outcome.form == "fused"
    return found


class Told:
    """A clock that runs each function once and then tells its seconds, fused before unfused."""

    def __init__(self, *seconds):
        self.seconds = itertools.cycle(seconds)

    def ready(self, function):
        function()
        mine = next(self.seconds)
        return lambda: mine


@pytest.mark.parametrize(("fused", "slower"), [(1e-6, False), (2e-6, False), (3e-6, True)])
def test_a_kernel_that_loses_is_found(compiled, monkeypatch, fused, slower):
    monkeypatch.setattr(module, "clock_for", lambda _: Told(fused, 2e-6))
    (row,) = remeasure(compiled, [X])
    assert row.ops == ("tanh", "mul")
    assert row.places == 2
    assert (row.fused_us, row.unfused_us) == pytest.approx((fused * 1e6, 2.0))
    assert row.ratio.median == pytest.approx(fused / 2e-6)
    assert row.slower == slower
    assert row.then_us == compiled.planned.steps_of[0][2].kernel_us


def test_what_runs_unfused_has_no_rows(compiled):
    lost = replace(compiled, outcome=replace(compiled.outcome, form="library"))
    assert remeasure(lost, [X]) == []


def test_the_table_counts_losers_and_failures(monkeypatch, tmp_path):
    """Of three cases one loses, one does not exist, and one has no fused kernel."""
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    ratio = Interval(1.5, 1.4, 1.6, 6)
    row = module.Again(("a", "b"), "tile 4", 3, 30.0, 20.0, ratio, 19.0)
    told = iter([[row], []])
    monkeypatch.setattr(bench_verify, "remeasure", lambda *_: next(told))
    lines = []
    cases = [Case("pipeline:add-mul:2^10"), Case("pipeline:nothing"), Case("pipeline:softmax:4x8")]
    assert bench_verify.verify_cases(cases, lines.append) == 2
    assert "30 µs      20 µs  SLOWER: 1.50× (1.40–1.60), ×3, a + b [tile 4]" in lines[2]
    assert "UnknownModel" in lines[3]
    assert lines[4] == "pipeline:softmax:4x8: no fused kernel ships"
    assert lines[-1] == (
        "1 kernels of 3 cases: 1 slower than unfused, 1 cases could not be measured"
    )


def test_by_the_clock_of_this_machine(compiled):
    (row,) = remeasure(compiled, [X])
    assert row.ratio.rounds >= 6
    assert 0 < row.ratio.low <= row.ratio.median <= row.ratio.high
