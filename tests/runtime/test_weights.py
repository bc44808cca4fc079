"""Weights that change under a compiled program: every way of writing them is noticed."""

import threading

import pytest
import torch
from tests.modules import Fn, same
from torch import nn

from onchip.planning.plan import Derived, KernelStep, LibraryStep, Plan
from onchip.runtime import fingerprint
from onchip.runtime.fingerprint import BLOCK, CALLS

from .library import compile_library
from .test_kernels import Kernel


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=["compiled", "interpreted"])
def way(request, monkeypatch):
    if request.param == "interpreted":
        monkeypatch.setattr(fingerprint, "_compiled", lambda: None)
    return request.param


def pair(width=3):
    """Two layers whose norms are folded into their weights."""
    layers = [(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(2)]
    m = nn.Sequential(*layers[0], *layers[1]).eval()
    for n in (m[1], m[3]):
        n.running_mean.normal_()
        n.running_var.uniform_(1, 2)
    return m


def close(c, m, x):
    torch.testing.assert_close(c(x), m(x), rtol=1e-4, atol=1e-5)


def ema(m):
    tensors = [p.data for p in m.parameters()]
    torch._foreach_mul_(tensors, 0.5)
    torch._foreach_add_(tensors, 0.25)


def write_all(m, write):
    for t in (*m.parameters(), *(b for b in m.buffers() if b.is_floating_point())):
        write(t)


UNCOUNTED = {
    "data.mul_": lambda m: m[0].weight.data.mul_(-2),
    "data[...] =": lambda m: m[2].bias.data.__setitem__(0, 7.0),
    "numpy": lambda m: m[0].weight.detach().numpy().__setitem__(slice(None), -1.5),
    "numpy, a buffer": lambda m: m[3].running_mean.numpy().__setitem__(2, 3.0),
    "_foreach_ of .data": ema,
    "everything": lambda m: write_all(m, lambda t: t.data.copy_(torch.rand_like(t) + 0.5)),
    "data of another's view": lambda m: m[2].weight.view(-1).data[1:].fill_(0.75),
}


@pytest.mark.parametrize("how", UNCOUNTED)
def test_the_next_call_notices_a_write_that_pytorch_does_not_count(how, way):
    m, x = pair(), torch.randn(4, 3)
    c = compile_library(m, (x,))
    before = c(x)
    versions = [t._version for t in (*m.parameters(), *m.buffers())]
    UNCOUNTED[how](m)
    assert [t._version for t in (*m.parameters(), *m.buffers())] == versions
    assert not torch.allclose(m(x), before)
    close(c, m, x)
    assert len(c.builds) == 1


def test_a_fused_optimizer_that_writes_data():
    m, x = pair(), torch.randn(4, 3)
    c = compile_library(m, (x,))
    close(c, m, x)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
    for _ in range(2):
        with torch.enable_grad():
            m(x).square().sum().backward()
        optimizer.step()
        close(c, m, x)


def large():
    """One folded layer of several times as many bytes as a share has."""
    n = 3 * BLOCK // 512
    return nn.Sequential(nn.Linear(128, n), nn.BatchNorm1d(n)).eval()


@pytest.mark.parametrize("element", [1, 130, -2])
def test_one_element_is_noticed_within_the_stated_number_of_calls(element, way):
    m, x = large(), torch.randn(2, 128)
    c = compile_library(m, (x,))
    weights = c.latest.weights
    assert 1 < weights.snapshot.fingerprint.steps <= CALLS
    m[0].weight.data.view(-1)[element] += 100
    old = weights.snapshot
    for _ in range(CALLS):
        c(x)
    assert weights.snapshot is not old
    close(c, m, x)


def test_one_noticed_change_makes_everything_be_compared():
    m, other = large(), large()
    both = nn.ModuleList([m, other])
    f = Fn(lambda s, x: s.parts[0](x) + s.parts[1](x), parts=both).eval()
    x = torch.randn(2, 128)
    c = compile_library(f, (x,))
    close(c, f, x)
    other[0].weight.data.view(-1)[130] += 100
    assert c.latest.weights.snapshot.fingerprint.holds(1)  # the next call alone would miss it
    m[0].weight.add_(1)
    close(c, f, x)


def test_only_what_changed_is_computed_again(way):
    m, x = pair(), torch.randn(4, 3)
    c = compile_library(m, (x,))
    weights = c.latest.weights
    before = list(weights.snapshot.tensors)
    m[2].weight.data.add_(1)
    c(x)
    changed = [a is not b for a, b in zip(before, weights.snapshot.tensors, strict=True)]
    assert sum(changed) == 2
    kept = weights.snapshot
    for _ in range(5):
        c(x)
    assert weights.snapshot is kept


def tripled(m, during=lambda: None):
    """A program that multiplies by w * 3, computed once and again when w changes. `during` runs
    while it is computed, after w was read."""

    def plan(captured):
        (n,) = captured.graph.nodes
        x, w = n.inputs

        def compute(values):
            out = values[0] * 3
            during()
            return out

        k = Kernel(lambda a, b: a * b, [4, 4, 4])
        return Plan((KernelStep("k", k, (x,), n.results, (Derived("w*3", (w,), compute),), (n,)),))

    return compile_library(m, (torch.ones(4),), plan=plan)


@pytest.mark.parametrize("counted", [True, False])
def test_a_write_while_values_are_computed_is_noticed_by_the_next_call(counted):
    m = Fn(lambda s, x: x * s.w, w=nn.Parameter(torch.ones(4)))
    todo = []
    c = tripled(m, lambda: todo and todo.pop()())
    same(c(torch.ones(4)), torch.full((4,), 3.0))
    todo.append(lambda: (m.w if counted else m.w.data).mul_(10))
    m.w.data.mul_(2)
    same(c(torch.ones(4)), torch.full((4,), 6.0))  # read before the second write
    same(c(torch.ones(4)), torch.full((4,), 60.0))


def test_constants_that_are_read_live_need_no_check():
    m = Fn(lambda s, x: x * s.w, w=nn.Parameter(torch.ones(4)))
    plan = lambda captured: Plan(tuple(LibraryStep(n) for n in captured.graph.nodes))  # noqa: E731
    c = compile_library(m, (torch.ones(4),), plan=plan)
    assert c.latest.weights.sources == []
    m.w.data.mul_(5)
    same(c(torch.ones(4)), torch.full((4,), 5.0))


def test_inference_tensors_have_no_counter_and_are_noticed():
    with torch.inference_mode():
        m, x = pair(), torch.randn(4, 3)
        c = compile_library(m, (x,))
        close(c, m, x)
        m[0].weight.mul_(2)
        close(c, m, x)


def test_threads_call_while_another_writes():
    m, x = pair(16), torch.randn(4, 16)
    c = compile_library(m, (x,))
    bad, stop = [], threading.Event()

    def call():
        try:
            while not stop.is_set():
                with torch.no_grad():
                    c(x)
        except BaseException as e:
            bad.append(repr(e))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for t in threads:
        t.start()
    for k in range(60):
        m[0].weight.data.add_(0.01)
        m[2].weight.data = torch.randn(16, 16) * k / 60  # the old memory may be looked at
    stop.set()
    for t in threads:
        t.join()
    assert not bad
    close(c, m, x)


def test_refresh_after_weights_of_another_type():
    m, x = pair(), torch.randn(4, 3)
    c = compile_library(m, (x,))
    m.double()
    c.refresh()
    close(c, m, x.double())
