"""Kernel steps: pointers, arena, derived values, statuses, strides. The kernels here are Python
functions that read and write memory through the pointers, as compiled code would."""

import ctypes
import itertools
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from tests.modules import Fn, same
from torch import nn

from onchip.backends.nvidia.source import Workspace
from onchip.planning.plan import Derived, KernelStep, LibraryStep, Plan
from onchip.planning.values import aligned
from onchip.runtime import executable

from .library import compile_library


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def memory(pointer, n):
    return np.ctypeslib.as_array((ctypes.c_float * n).from_address(pointer))


@dataclass
class Kernel:
    """Applies `f` to flat float32 arrays: inputs and derived values, then the output."""

    f: object
    sizes: list
    status: int = 0
    calls: list = field(default_factory=list)
    streams: list = field(default_factory=list)

    def run(self, pointers):
        self.calls.append(list(pointers))
        arrays = [memory(p, n) for p, n in zip(pointers, self.sizes, strict=True)]
        arrays[-1][:] = self.f(*arrays[:-1])
        return self.status

    def enqueue(self, pointers, stream):
        assert not any(p % 16 for p in pointers), "a GPU's kernel would fault"
        self.streams.append(stream)
        self.run(pointers)


def kernel_plan(choose):
    """Nodes for which `choose(node)` gives a function become kernels."""
    made = []

    def plan(captured):
        steps = []
        for n in captured.graph.nodes:
            f = choose(n)
            if f is None:
                steps.append(LibraryStep(n))
                continue
            inputs = n.inputs
            k = Kernel(f, [t.numel for t in (*inputs, n.results[0])])
            made.append(k)
            steps.append(KernelStep(n.name, k, inputs, n.results, (), (n,)))
        return Plan(tuple(steps))

    plan.made = made
    return plan


NUMPY = {"exp": np.exp, "neg": np.negative, "mul": lambda x: x * 2, "add": lambda x: x + 1}


def by_op(n):
    return NUMPY.get(n.op) if len(n.inputs) == 1 else None


def test_a_chain_of_kernels_in_the_arena():
    def f(s, x):
        for _ in range(4):
            x = (x * 2).exp().neg()
        return x

    plan = kernel_plan(by_op)
    x = torch.randn(33) * 0.1
    c = compile_library(Fn(f), (x,), plan=plan)
    for _ in range(3):
        y = torch.randn(33) * 0.1
        torch.testing.assert_close(c(y), f(None, y))
    assert c.latest.executable.arenas.nbytes == 2 * 192  # two buffers take turns
    assert c.launches == 12


def test_kernel_results_are_not_overwritten():
    c = compile_library(Fn(lambda s, x: x * 2), (torch.ones(1 << 15),), plan=kernel_plan(by_op))
    xs = [torch.full((1 << 15,), float(i)) for i in range(5)]
    ys = [c(x) for x in xs]
    assert all(bool((y == 2 * i).all()) for i, y in enumerate(ys))


def test_a_view_of_a_kernel_result_leaves_the_arena():
    def f(s, x):
        return (x * 2).view(3, 4)[1:].t()

    c = compile_library(Fn(f), (torch.ones(12),), plan=kernel_plan(by_op))
    held = []
    for i in range(4):
        x = torch.arange(12.0) + i
        held.append((c(x), f(None, x)))
    for a, b in held:
        same(a, b)
        assert a.stride() == b.stride()


def test_library_reads_views_of_arena_memory_while_it_lives():
    def f(s, x):
        a = (x * 2).view(3, 4)
        b = x.exp()  # must not take the place of `a`
        return a.softmax(0).square().sum() + b.sum()

    c = compile_library(Fn(f), (torch.ones(12),), plan=kernel_plan(by_op))
    x = torch.randn(12)
    torch.testing.assert_close(c(x), f(None, x))


def test_kernels_and_mutation():
    def f(s, x):
        y = x.exp()
        x.mul_(2)
        s.state.add_(1)
        return y, -x

    m, n = Fn(f, state=torch.zeros(4)), Fn(f, state=torch.zeros(4))
    c = compile_library(m, (torch.ones(4),), plan=kernel_plan(by_op))
    for _ in range(3):
        x = torch.randn(4)
        z = x.clone()
        for a, b in zip(c(x), n(z), strict=True):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(x, z)
        torch.testing.assert_close(m.state, n.state)


def test_strided_library_results_are_made_what_the_kernel_expects():
    # `t()` gives a transposed view; this kernel reads flat contiguous memory
    plan = kernel_plan(by_op)
    m = Fn(lambda s, x: torch.mm(x, x).t().exp())

    def contiguous(captured):
        p = plan(captured)
        step = p.steps[-1]
        for t in step.inputs:
            t.tag["strides"] = (5, 1)
        return p

    c = compile_library(m, (torch.randn(5, 5),), plan=contiguous)
    x = torch.randn(5, 5)
    torch.testing.assert_close(c(x), m(x))


def test_derived_values_follow_their_sources():
    computed = []

    def plan(captured):
        (n,) = captured.graph.nodes
        x, w = n.inputs

        def compute(values):
            computed.append(1)
            return values[0] * 3

        k = Kernel(lambda a, b: a * b, [4, 4, 4])
        step = KernelStep("k", k, (x,), n.results, (Derived("w*3", (w,), compute),), (n,))
        return Plan((step,))

    m = Fn(lambda s, x: x * s.w, w=nn.Parameter(torch.ones(4)))
    c = compile_library(m, (torch.ones(4),), plan=plan)
    for _ in range(3):
        same(c(torch.ones(4)), torch.full((4,), 3.0))
    assert len(computed) == 1
    m.w.mul_(2)
    same(c(torch.ones(4)), torch.full((4,), 6.0))
    m.w = nn.Parameter(torch.full((4,), 5.0))
    same(c(torch.ones(4)), torch.full((4,), 15.0))
    assert len(computed) == 3


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (1, IndexError, "index out of range"),
        (2, RuntimeError, "ZeroDivision"),
        (9, RuntimeError, "k"),
    ],
)
def test_statuses(status, kind, text):
    def plan(captured):
        (n,) = captured.graph.nodes
        k = Kernel(lambda a: a, [4, 4], status)
        return Plan((KernelStep("k", k, n.inputs, n.results, (), (n,)),))

    c = compile_library(Fn(lambda s, x: x.exp()), (torch.ones(4),), plan=plan)
    for _ in range(2):  # an error leaves the program usable
        with pytest.raises(kind, match=text):
            c(torch.ones(4))


def test_layouts_are_respected():
    def plan(captured):
        (n,) = captured.graph.nodes
        k = Kernel(lambda a: a.reshape(3, 4).T.reshape(-1) * 2, [12, 12])
        return Plan((KernelStep("k", k, n.inputs, n.results, (), (n,)),), {n.results[0]: (1, 3)})

    c = compile_library(Fn(lambda s, x: x * 2), (torch.ones(3, 4),), plan=plan)
    x = torch.randn(3, 4)
    y = c(x)
    same(y, x * 2)
    assert y.stride() == (4, 1)  # eager's strides, whatever the kernel writes


# ---- workspaces and alignment


@dataclass
class Summing:
    """The sum of the input so far, in two steps that hand memory on: `scratch` gets the doubles,
    `zeros` is added up in and left as it was found."""

    n: int
    found: list = field(default_factory=list)
    places: list = field(default_factory=list)

    def run(self, pointers):
        x, out, scratch, zeros, more = (memory(p, self.n) for p in pointers)
        self.found.append(float(np.abs(zeros).sum() + np.abs(more).sum()))
        self.places.append(pointers)
        scratch[:] = x * 2
        zeros += scratch
        more += zeros
        out[:] = more / 2
        zeros[:] = more[:] = 0
        return 0


def summing_plan(captured):
    steps = []
    for node in captured.graph.nodes:
        n = node.inputs[0].numel
        work = (Workspace(4 * n), Workspace(4 * n, zeroed=True), Workspace(4 * n, zeroed=True))
        kernel = Summing(n)
        steps.append(
            KernelStep(node.name, kernel, node.inputs, node.results, (), (node,), workspace=work)
        )
    return Plan(tuple(steps))


def test_workspaces_lie_in_the_arena_and_zeroed_ones_hold_zeros():
    m = Fn(lambda s, x: (x.neg().exp(), x.cos()))
    x = torch.randn(100)
    p = compile_library(m, (x,), plan=summing_plan)
    kept = [p(torch.full((100,), float(k)))[1] for k in range(4)]
    for k, got in enumerate(kept):
        same(got, torch.full((100,), float(k)))
    kernels = [s.kernel for s in p.latest.plan.steps]
    assert all(k.found == [0.0] * 4 for k in kernels)
    for k in kernels:
        spans = sorted((at, at + 400) for at in k.places[-1])
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    # the places that hold zeros before and after are shared by kernels
    assert {tuple(k.places[0][3:]) for k in kernels} == {tuple(kernels[0].places[0][3:])}


def on_a_gpu(monkeypatch, model, inputs):
    """The kernels of a program as it is written for a GPU, and what runs it on the CPU's memory."""
    captured = compile_library(model, inputs).builds[-1]
    plan = kernel_plan(by_op)
    here = {"device": torch.device("cpu")}

    def raw(index):
        return 70 + index

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", raw, raising=False)
    monkeypatch.setattr(executable, "partial", lambda f, *a, **k: partial(f, *a, **k | here))
    made = executable.write(captured, plan(captured), torch.device("cuda:1"))
    return plan.made, made.source, lambda *x: made.run(x, [], [], [], [], None)


def misaligned(t):
    """The same values and strides at an address that is no multiple of 16."""
    flat = torch.empty(t.numel() + 8)
    start = 1 if flat.data_ptr() % 16 == 0 else 0
    return flat.as_strided(t.shape, t.stride(), start).copy_(t)


def test_a_gpus_kernels_get_aligned_pointers(monkeypatch):
    """Inputs and library results may start anywhere: where they do, they are copied once a call,
    however many kernels read them."""

    def f(s, x):
        sums = torch.cumsum(x, 0)
        rest = torch.as_strided(sums, (13,), (1,), 3)  # starts 12 bytes later
        return x.exp(), x * 2, rest.exp(), rest * 2, sums

    x = torch.randn(4, 5)
    kernels, source, run = on_a_gpu(monkeypatch, Fn(f), (x,))
    assert source.count("aligned(") == 2
    for given in (x, misaligned(x), misaligned(-x), x + 1):
        for got, want in zip(run(given), f(None, given), strict=True):
            torch.testing.assert_close(got, want)
        read = [k.calls[-1][0] for k in kernels]
        assert (read[0] == given.data_ptr()) == (given.data_ptr() % 16 == 0)
        assert read[0] == read[1]
        assert read[2] == read[3]
    assert [k.streams for k in kernels] == [[71] * 4] * 4
    copy = aligned(misaligned(torch.randn(5, 4).t()))
    assert copy.data_ptr() % 16 == 0
    assert copy.stride() == (1, 4)
    assert aligned(copy) is copy
