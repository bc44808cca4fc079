"""Which kernels are written: one set for each kind of region, within the budget."""

import pytest
import torch
from torch import nn

from onchip.capture import capture
from onchip.planning import decide, planner, units
from onchip.planning.generators.cpp import CppGenerator
from onchip.planning.plan import KernelStep
from onchip.planning.tuner import Verdict
from onchip.runtime.program import Program
from onchip.settings import Settings


def test_every_kind_gets_one_and_heavy_kinds_more():
    wishes = {"light": 5, "none": 0, "heavy": 5, "middle": 2}
    weights = {"light": 1.0, "none": 9.0, "heavy": 50.0, "middle": 21.0}
    assert units.share_out(wishes, weights, 0) == {"light": 1, "none": 0, "heavy": 1, "middle": 1}
    found = units.share_out(wishes, weights, 7)
    assert found == {"light": 1, "none": 0, "heavy": 4, "middle": 2}
    assert units.share_out(wishes, weights, 99) == wishes


class Twins(nn.Module):
    """Two isomorphic blocks with weights of their own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))

    def forward(self, x):
        y = self.a(x).relu()
        return self.b(y).relu()


@pytest.fixture
def written(monkeypatch):
    seen, original = [], CppGenerator.write

    def watched(self, region, *rest):
        seen.append(region)
        return original(self, region, *rest)

    monkeypatch.setattr(CppGenerator, "write", watched)
    return seen


def test_isomorphic_regions_share_their_kernels(tmp_path, monkeypatch, written):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    # the outcome of timing is not the point here: the kernel runs in any case
    monkeypatch.setattr(decide, "tune", lambda *_: Verdict("kernel", 0))
    monkeypatch.setattr(decide, "most_sources", lambda *_: 0)  # one kernel for each kind
    net, x = Twins().eval(), torch.randn(1, 16, 9, 11).to(memory_format=torch.channels_last)
    captured = capture(net, (x,))

    def run():
        del written[:]
        planned = planner.plan(captured, [x], Settings(budget_s=600.0))
        steps = [s for s in planned.plan.steps if isinstance(s, KernelStep)]
        program = Program(net, (x,), {}, lambda *_: (captured, planned.plan), Settings())
        with torch.no_grad():
            want = net.double()(x.double())
            net.float()
            torch.testing.assert_close(program(x).double(), want, rtol=1e-4, atol=1e-5)
        return steps

    first = run()
    assert len(first) >= 2
    kinds = len({id(r) for r in written})
    assert kinds < len(first), "isomorphic blocks are written once"
    sources = [t.name for s in first for d in s.derived for t in d.sources]
    assert {"a.weight", "b.weight"} <= set(sources)
    run()
    assert len(written) <= kinds, "a known verdict needs its own kernel only"


class Addressed(nn.Module):
    """The same operator twice, once read by memory address: there eager's layout decides, and
    roll keeps channels-last where tracing says that it does not."""

    def forward(self, x, y):
        return torch.as_strided(x.relu().roll(1, 0), (3, 7), (5, 2), 1), y.relu().roll(1, 0)


def test_what_as_strided_reads_is_left_to_pytorch(tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    monkeypatch.setattr(decide, "tune", lambda *_: Verdict("kernel", 0))
    monkeypatch.setattr(decide, "most_sources", lambda *_: 0)  # one kernel for each kind
    inputs = [
        torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last),
    ]
    net = Addressed()
    captured = capture(net, tuple(inputs))
    planned = planner.plan(captured, inputs, Settings(budget_s=600.0))
    fused = [n.name for s in planned.plan.steps if isinstance(s, KernelStep) for n in s.nodes]
    assert fused == ["relu_1", "roll_1"]
    refused = {d.edge: d.rule for d in planned.decisions if not d.fused}
    assert refused == {("relu", "roll"): "ADDRESSED", ("roll", "as_strided"): "ADDRESSED"}
    program = Program(net, tuple(inputs), {}, lambda *_: (captured, planned.plan), Settings())
    for got, expected in zip(program(*inputs), net(*inputs), strict=True):
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()
