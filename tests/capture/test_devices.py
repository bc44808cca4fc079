"""Where a model's tensors are: checked before capture, and operators across devices left alone.

Fake tensors stand for those on a GPU, so that no GPU is needed.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from onchip.backends.interpreter import evaluate
from onchip.capture import export as exporting
from onchip.capture.build import build
from onchip.capture.containers import flatten
from onchip.capture.devices import check_devices
from onchip.errors import CaptureError
from onchip.ir.graph import reads


class Mixed(torch.nn.Module):
    """On the GPU, but for a number and a table that it makes on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4, device="cuda")
        self.register_buffer("factor", torch.empty(()))

    def forward(self, x):
        y = self.linear(x) * self.factor
        return torch.relu(y) + torch.arange(4).to("cuda")


@pytest.fixture
def mixed():
    with FakeTensorMode():
        yield Mixed(), torch.empty(2, 3, device="cuda")


def test_a_model_on_a_gpu_with_a_number_on_the_cpu_runs_there(mixed):
    model, x = mixed
    assert check_devices(model, (x,), {}) == torch.device("cuda:0")
    assert check_devices(torch.nn.ReLU(), (torch.empty(()),), {}) == torch.device("cpu")


@pytest.mark.parametrize("where", ["cpu", "cuda:1"])
def test_tensors_apart_are_refused_with_both_names(mixed, where):
    model, _ = mixed
    with pytest.raises(CaptureError) as caught:
        check_devices(model, (), {"x": torch.empty(2, 3, device=where)})
    text = str(caught.value)
    assert f"argument tensor 0 is on {where}, parameter linear.weight on cuda:0" in text
    assert ".to()" in text


def test_a_buffer_elsewhere_is_named(mixed):
    model, x = mixed
    model.register_buffer("table", torch.empty(3))
    with pytest.raises(CaptureError, match="buffer table on cpu"):
        check_devices(model, (x,), {})


def test_operators_with_tensors_off_the_gpu_are_the_librarys(mixed, monkeypatch):
    model, x = mixed
    monkeypatch.setattr(exporting, "gpus", lambda *_: [])  # there is no generator to save
    leaves, spec = flatten(((x,), {}))
    graph, _ = build(exporting.export(model, spec, leaves, [x]).program, model)
    reasons = {n.op: n.opaque for n in graph.nodes}
    assert reasons["mul"] == "its tensors are on cpu, cuda:0: left to the library"
    assert reasons["arange"] == "its tensors are on cpu: left to the library"
    assert not reasons["linear"] and not reasons["relu"] and not reasons["add"]  # noqa: PT018
    assert {t.tag["device"] for n in graph.nodes if not n.opaque for t in n.results} == {"cuda:0"}


class Numbers(torch.nn.Module):
    """Makes tensors of numbers on the CPU, in its own call."""

    def forward(self, x):
        return torch.minimum(x, torch.tensor(0.7)) * torch.tensor(3)


def test_a_number_made_on_the_cpu_is_part_of_a_kernel(monkeypatch):
    monkeypatch.setattr(exporting, "gpus", lambda *_: [])
    model = Numbers()
    with FakeTensorMode():
        x = torch.empty(2, 2, device="cuda")
    leaves, spec = flatten(((x,), {}))
    graph, slots = build(exporting.export(model, spec, leaves, [x]).program, model)
    named = {n.op: n for n in graph.nodes}
    low, high = named["minimum"], named["mul"]
    assert not low.opaque and not high.opaque  # noqa: PT018
    assert not any(t in slots for n in (low, high) for b in n.tensors for t in reads(b))
    given = torch.tensor([[0.5, 2.0], [-1.0, 0.7]])
    (found,) = evaluate(high.results, {graph.inputs[0]: given.numpy()})
    assert torch.equal(torch.from_numpy(found), model(given))
