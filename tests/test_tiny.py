"""The whole product in a minute: capture, fuse, build, verify, measure, report."""

import json

import pytest
import torch

import onchip
from onchip.report import Report


class Tiny(torch.nn.Module):
    """The mission's four operators, a residual add and a classifier; every parameter matters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.relu = torch.nn.ReLU()
        self.bn = torch.nn.BatchNorm2d(16)
        self.pool = torch.nn.MaxPool2d(2)
        self.conv2 = torch.nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(16)
        self.head = torch.nn.Linear(16, 10)

    def forward(self, x):
        x = self.pool(self.bn(self.relu(self.conv(x))))
        x = torch.relu(self.bn2(self.conv2(x)) + x)
        return self.head(x.mean(dim=(2, 3)))


def unsettled(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for m in module.modules():
            if isinstance(m, torch.nn.BatchNorm2d):
                m.running_mean.normal_(0, 0.5, generator=generator)
                m.running_var.uniform_(0.3, 2, generator=generator)
                m.weight.normal_(0, 1, generator=generator)  # signed
                m.bias.normal_(0, 1, generator=generator)
    return module.eval()


@pytest.fixture(scope="module")
def compiled():
    torch.manual_seed(0)
    model, x = unsettled(Tiny()), torch.randn(2, 3, 18, 14)
    with torch.no_grad():
        return model, x, onchip.compile(model, (x,))


def test_the_program_is_as_exact_as_eager(compiled):
    model, x, fast = compiled
    with torch.no_grad():
        got, eager = fast(x), model(x)
        exact = model.double()(x.double())
        model.float()
    error, own = (eager - exact).norm() / exact.norm(), (got - exact).norm() / exact.norm()
    assert own <= 4 * max(float(error), 1e-7)
    assert got.shape == eager.shape
    assert got.stride() == eager.stride()


def test_the_four_operators_are_one_kernel(compiled):
    """What fusion decides, whatever the form that this machine's timing ships."""
    fast = compiled[2]
    steps = fast.compiled[-1].planned.plan.steps
    fused = [{n.name for n in s.nodes} for s in steps if hasattr(s, "nodes")]
    groups = fast.compiled[-1].planned.partition.groups
    planned = [{n.name for n in g.nodes} for g in groups]
    four = {"conv", "relu", "bn", "pool"}
    assert any(four <= g for g in planned), planned
    assert all(any(f <= g for g in planned) for f in fused)


def test_the_report_adds_up(compiled):
    fast = compiled[2]
    report = fast.report()
    assert report.unfused.launches == 10  # every operator of forward()
    assert report.fused.launches == len(report.kernels)
    assert report.fused.dram_bytes == sum(k.dram_bytes for k in report.kernels)
    assert report.fused.dram_bytes < report.unfused.dram_bytes
    assert report.unfused.latency_us > 0
    names = {o for k in report.kernels for o in k.ops}
    assert {"conv", "relu", "bn", "pool", "conv2", "bn2", "head"} <= names
    edges = {d.edge for d in report.decisions}
    assert {("conv", "relu"), ("relu", "bn"), ("bn", "pool"), ("conv2", "bn2")} <= edges
    assert [e.where for e in report.numerics.ledger if e.kind == "batch_norm_folded"] == ["conv2"]
    assert "conv2" in fast.why("conv2", "bn2")
    assert Report.from_json(report.to_json()) == report
    assert "tensor accesses" in str(report)


def test_another_shape_and_new_weights_follow(compiled):
    model, _, fast = compiled
    y = torch.randn(1, 3, 10, 22)
    with torch.no_grad():
        assert torch.allclose(fast(y), model(y), rtol=1e-4, atol=1e-5)
        model.bn2.running_mean += 0.5
        assert torch.allclose(fast(y), model(y), rtol=1e-4, atol=1e-5)
        model.bn2.running_mean -= 0.5


def test_optimize_measures_and_verifies():
    program, report = onchip.optimize("pipeline:conv-relu-bn-pool:1x4x8x8")
    data = json.loads(report.to_json())
    assert data["numerics"]["error"] < 1e-5
    assert data["numerics"]["eager_error"] > 0
    assert data["fused"]["latency_us"] > 0
    assert data["baselines"]["eager_channels_last"] > 0
    assert data["bound_us"] > 0
    assert report.unfused.accesses == 8
    # what is measured on a busy machine may be other kernels, or none
    if program.compiled[-1].outcome.form == "fused" and report.fused.launches == 1:
        assert report.fused.accesses == 2
        assert report.kernels[0].code_bytes > 0
        assert program.sources
    assert program.report() is report


def test_analyze_runs_nothing():
    facts = onchip.analyze("pipeline:add-mul:2^10", device="h200")
    assert (facts.unfused.accesses, facts.fused.accesses) == (5, 3)
    assert facts.bound_us == pytest.approx(3 * 4 * 2**10 / 4275 / 1e3)


def test_a_view_of_a_moved_layout_is_reported():
    """Inside, images are channels-last: flattening them copies, in a kernel or as a call."""
    pool = torch.nn.AdaptiveAvgPool2d(2)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), pool, torch.nn.Flatten())
    x = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        fast = onchip.compile(model.eval(), (x,))
        assert torch.allclose(fast(x), model(x), rtol=1e-4, atol=1e-5)
    ops = {o for k in fast.report().kernels for o in k.ops}
    assert {"0", "1"} <= ops
