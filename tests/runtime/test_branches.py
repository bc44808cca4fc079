"""Branches without a GPU: the order of steps against brute force, and the program written for
several streams run with stand-ins that know of each access what is done before it."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.modules import Fn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from onchip.backends.nvidia.source import Workspace
from onchip.capture import schema
from onchip.fusion.layout import contiguous
from onchip.planning.plan import KernelStep, LibraryStep, Plan
from onchip.runtime import arena, branched, executable
from onchip.runtime.arena import Buffer, plan_offsets
from onchip.runtime.branches import START, assign, branches_of, dependencies

from .library import compile_library, library_plan
from .test_kernels import memory

CPU = torch.device("cpu")


@st.composite
def needs(draw):
    """For each step which earlier ones it needs; None where it launches nothing."""
    found = []
    for k in range(draw(st.integers(0, 14))):
        earlier = [d for d in range(k) if found[d] is not None]
        few = st.sets(st.sampled_from(earlier), max_size=3) if earlier else st.just(set())
        found.append(draw(st.one_of(few.map(frozenset), few.map(frozenset), st.none())))
    return found


def happens_before(branches, waits=None):
    """For each step all that is done when it starts: what it waits for, what stands before it on
    its stream, and what is done before those."""
    done, tails = [], {}
    for k, (stream, wanted) in enumerate(
        zip(branches.streams, waits or branches.waits, strict=True)
    ):
        done.append(set())
        if stream is None:
            continue
        for d in {*wanted, *tails.get(stream, ())} - {START}:
            done[k] |= {d, *done[d]}
        tails[stream] = {k}
    return done


def bits(steps):
    return sum(1 << d for d in steps)


@given(needs(), st.integers(1, 4))
@settings(max_examples=300)
def test_every_need_is_met_and_no_wait_is_spare(wanted, most):
    found = assign(wanted, most)
    done = happens_before(found)
    launched = [k for k, need in enumerate(wanted) if need is not None]
    for k in launched:
        assert wanted[k] <= done[k]
        assert found.before[k] == bits(done[k])
        assert all(d == START or found.streams[d] != found.streams[k] for d in found.waits[k])
    assert found.streams[-1] == 0
    assert done[-1] == set(launched)
    assert found.count <= most
    assert found == assign(wanted, most)
    for k, waits in enumerate(found.waits):
        for d in set(waits) - {START}:
            fewer = [tuple(x for x in w if (j, x) != (k, d)) for j, w in enumerate(found.waits)]
            assert d not in happens_before(found, fewer)[k]


@given(needs())
@settings(max_examples=200)
def test_a_stream_joins_before_it_works(wanted):
    """A stream is part of a recording from its first wait on."""
    found = assign(wanted)
    first = {s: k for k, s in reversed(list(enumerate(found.streams))) if s}
    assert all(found.waits[k] for k in first.values())
    assert all(START not in w or k in first.values() for k, w in enumerate(found.waits))


@pytest.mark.parametrize("n", [0, 1, 2, 9])
def test_a_chain_stays_on_one_stream(n):
    found = assign([frozenset(range(max(k - 1, 0), k)) for k in range(n)])
    assert found.count == 1
    assert not found.awaited


def test_branches_of_well_known_shapes():
    def steps(*wanted):
        return [frozenset(w) for w in wanted]

    # x, two convolutions, the short cut, their sum; twice
    residual = steps([], [0], [1], [0], [2, 3], [4], [5], [4], [6, 7])
    found = assign(residual)
    assert found.streams == (0, 0, 0, 1, 0, 0, 0, 1, 0, 0)
    assert found.waits == ((), (), (), (0,), (3,), (), (), (4,), (7,), ())
    # three products of the call's input, and what reads them
    found = assign(steps([], [], [], [0, 1, 2]))
    assert found.streams == (0, 1, 2, 0, 0)
    assert found.waits == ((), (START,), (START,), (1, 2), ())
    # more branches than streams; they need not join
    found = assign(steps([], [], [], []), most=2)
    assert found.streams == (0, 1, 0, 1, 0)
    assert found.waits[-1] == (3,)
    # a step goes on with what nobody else goes on with
    assert assign(steps([], [], [0, 1], [0])).streams == (0, 1, 1, 0, 0)


@given(needs(), st.lists(st.tuples(st.integers(0, 500), st.integers(0, 99)), max_size=10))
@settings(max_examples=300)
def test_memory_is_shared_in_order_only(wanted, asked):
    found = assign(wanted)
    done = happens_before(found)
    launched = [k for k, need in enumerate(wanted) if need is not None]
    buffers = []
    for nbytes, seed in asked if launched else []:
        draw = random.Random(seed)
        first = draw.choice(launched)
        readers = [k for k in range(first + 1, len(found.streams)) if k not in launched]
        readers += [k for k in range(first + 1, len(found.streams)) if first in done[k]]
        steps = sorted(draw.sample(readers, min(len(readers), draw.randrange(3))))
        buffers.append(Buffer(nbytes, (first, *steps)))
    offsets, total = plan_offsets(buffers, 64, found.together)
    for i, (a, at) in enumerate(zip(buffers, offsets, strict=True)):
        assert at + a.nbytes <= total
        for b, other in zip(buffers[:i], offsets[:i], strict=True):
            if a.nbytes and b.nbytes and at < other + b.nbytes and other < at + a.nbytes:
                uses = [{k for k in x.steps if found.streams[k] is not None} for x in (a, b)]
                assert uses[0] <= done[b.steps[0]] or uses[1] <= done[a.steps[0]]


# ---- what a plan's steps need


def plan_of(f, *inputs, **buffers):
    with torch.no_grad():
        return library_plan(compile_library(Fn(f, **buffers), inputs).builds[-1])


def needed(f, *inputs, **buffers):
    plan = plan_of(f, *inputs, **buffers)
    return dict(zip([s.node.op for s in plan.steps], dependencies(plan), strict=True))


def test_views_launch_nothing_and_what_may_copy_does():
    found = needed(lambda s, x: x.exp().view(4, 3).t().sin(), torch.ones(12))
    order = list(found)
    assert [found[op] for op in ("view", "t")] == [None, None]
    assert found["exp"] == frozenset()
    assert found["sin"] == {order.index("exp")}
    for name in ("reshape.default", "contiguous.default", "to.dtype"):
        assert not schema.never_copies(f"aten.{name}")


def test_a_random_operator_and_an_unknown_one_run_alone():
    @torch.library.custom_op("onchip_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    for op, alone in (("rand_like", torch.rand_like), ("twice", twice)):
        found = needed(lambda s, x, alone=alone: (x.exp(), alone(x), x.sin()), torch.ones(3))
        order = list(found)
        assert found[op] == set(range(order.index(op)))
        later = [found[name] for name in order[order.index(op) + 1 :]]
        assert later
        assert all(order.index(op) in need for need in later)


def test_kernels_whose_programs_wait_run_one_at_a_time():
    plan = plan_of(lambda s, x: (x.exp(), x.sin(), x.cos()), torch.ones(3))

    def with_space(k, *space):
        n = plan.steps[k].node
        return KernelStep(n.name, None, n.inputs, n.results, (), (n,), space)

    barrier, zeroed = Workspace(4, True, barrier=True), Workspace(4, True)
    steps = [with_space(0, barrier), with_space(1, zeroed), with_space(2, barrier)]
    assert dependencies(Plan(tuple(steps))) == [frozenset(), frozenset(), {0}]


# ---- the program that is recorded


class Streams:
    """Knows which accesses are done before what comes next on the current stream."""

    def __init__(self):
        self.done, self.current, self.most = {0: frozenset()}, 0, 0

    def go(self, n, *events):
        assert n in self.done or events, f"stream {n} is not part of the recording"
        self.done[n] = self.done.get(n, frozenset()).union(*events)
        self.current, self.most = n, max(self.most, n)

    def mark(self):
        return self.done[self.current]


class Watch(TorchDispatchMode):
    """Asserts of each access that others of the same memory, one of the two a write, are done
    before; and of each step that memory which was freed on its stream, and which it may be given,
    is used by nobody any more."""

    def __init__(self, streams):
        super().__init__()
        self.streams, self.steps = streams, 0
        self.lasting = []  # accesses (first byte, end, step, whether it writes) of what stays
        self.storages = {}  # by address, those made meanwhile: weak reference, stream, accesses
        self.freed = []  # (stream, steps that used it)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = (
            [x for x in torch.utils._pytree.tree_leaves(y) if isinstance(x, torch.Tensor)]
            for y in ((args, kwargs), out)
        )
        known = {x.untyped_storage().data_ptr() for x in given}
        fresh = [x.untyped_storage() for x in made if x.untyped_storage().data_ptr() not in known]
        writes = func._schema.is_mutable
        if fresh or writes:  # no view
            self.step(
                [x for i, x in enumerate(given) if i or not writes],
                [*made, *given[:writes]],
                {s.data_ptr(): StorageWeakRef(s) for s in fresh},
            )
        return out

    def step(self, reads, writes, fresh=()):
        """Tensors, or pairs of an address and a size."""
        s = self.streams
        for address, (storage, home, accesses) in list(self.storages.items()):
            if storage.expired():
                self.freed.append((home, {step for *_, step, _ in accesses}))
                del self.storages[address]
        for home, steps in self.freed:
            assert home != s.current or steps <= s.done[home], "freed too early"
        for address in fresh:
            self.storages[address] = fresh[address], s.current, []
        for x in reads:
            self.access(*place(x), False)
        for x in writes:
            self.access(*place(x), True)
        s.done[s.current] |= {self.steps}
        self.steps += 1

    def access(self, start, end, write):
        inside = (
            accesses for a, (ref, _, accesses) in self.storages.items()
            if a <= start < a + torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes()
        )  # fmt: skip
        accesses = next(inside, self.lasting)
        for a, b, step, written in accesses:
            if a < end and start < b and (write or written) and step != self.steps:
                assert step in self.streams.done[self.streams.current], "not in order"
        accesses.append((start, end, self.steps, write))


def place(x):
    if isinstance(x, tuple):
        return x[0], x[0] + x[1]
    reach = (
        sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    )
    return x.data_ptr(), x.data_ptr() + reach * x.itemsize


class Kernel:
    """Applies `f` to flat float32 arrays, using and leaving zeros in the last workspace."""

    def __init__(self, f, sizes, spaces):
        self.f, self.sizes, self.spaces, self.watch = f, sizes, spaces, None

    def run(self, pointers):
        n = len(self.sizes)
        arrays = [memory(p, n) for p, n in zip(pointers, self.sizes, strict=False)]
        spaces = [memory(p, n) for p, n in zip(pointers[n:], self.spaces, strict=True)]
        if self.watch is not None:
            regions = [(a.ctypes.data, a.nbytes) for a in (*arrays, *spaces)]
            self.watch.step(regions[: n - 1], regions[n - 1 :])
        for space in spaces[:-1]:
            space[:] = np.nan
        if spaces:
            assert not spaces[-1].any()
        arrays[-1][:] = self.f(*arrays[:-1])
        return 0

    def enqueue(self, pointers, stream):
        assert stream == self.watch.streams.current
        assert not any(p % 16 for p in pointers)
        self.run(pointers)


KERNELS = {"exp": (np.exp, 1), "sin": (np.sin, 1), "neg": (np.negative, 1), "add": (np.add, 2)}


def kernel_plan(made):
    """Operators of KERNELS are kernels that read dense memory, some with workspaces."""

    def plan(captured):
        steps = []
        for n in captured.graph.nodes:
            f, many = KERNELS.get(n.op, (None, 0))
            if len(n.inputs) != many or any(t.shape != n.results[0].shape for t in n.inputs):
                steps.append(LibraryStep(n))
                continue
            size = n.results[0].numel
            spaces = (size, 5) if n.op == "sin" else ()
            k = Kernel(f, [size] * (many + 1), spaces)
            made.append(k)
            work = tuple(Workspace(4 * m, i > 0) for i, m in enumerate(spaces))
            steps.append(KernelStep(n.name, k, n.inputs, n.results, (), (n,), work))
        tensors = {t for s in steps for t in (*s.inputs, *s.outputs)}
        return Plan(tuple(steps), {t: contiguous(t.shape) for t in tensors})

    return plan


def run_on_streams(f, inputs, device=CPU, **buffers):
    """The results, and how many streams they took."""
    made = []
    module = Fn(f, **buffers)
    with torch.no_grad():
        entry = compile_library(module, inputs, plan=kernel_plan(made)).latest
        program = branched.write(entry.captured, entry.plan, device, branches_of(entry.plan))
        now = entry.weights.current()
        arena = program.arenas.new() if program.arenas is not None else None
        streams = Streams()
        watch = Watch(streams)
        for k in made:
            k.watch = watch
        with watch:
            out = program.run(
                inputs, now.tensors, now.pointers, now.derived, now.derived_pointers, arena, streams
            )
    assert streams.current == 0
    return out, streams.most + 1, program


def check(f, *inputs, **buffers):
    copies = [x.clone() for x in inputs]
    want = Fn(f, **{k: v.clone() for k, v in buffers.items()})(*copies)
    got, count, program = run_on_streams(f, inputs, **buffers)
    for a, b in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()
    for a, b in zip(inputs, copies, strict=True):
        torch.testing.assert_close(a, b)
    return count, program


def residual(s, x):
    for _ in range(2):
        y = torch.cumsum(x.exp().sin(), 0).sin()
        x = y + torch.cumsum(-x, 1).sin()
    return x


def products(s, x):
    q, k, v = (torch.mm(x, w) for w in (s.q, s.k, s.v))
    return torch.mm(torch.softmax(torch.mm(q, k.t()), -1), v), k


def strided(s, x):
    """Kernels read library results as dense copies; library calls read the same as they are."""
    y = torch.mm(x, x).t()
    a, b = y.sin(), torch.cumsum(y, 0).exp()
    return a + y.exp(), b, torch.cumsum(y, 1)


def reused(s, x):
    """Results and views of them that one stream makes and another one still reads while the first
    goes on."""
    a = torch.cumsum(x, 0)
    b = torch.cumprod(a, 1)
    x, side, part = torch.cumsum(b, 0), torch.cumprod(a, 0), torch.cumsum(b[1:], 1)
    for _ in range(3):
        x = torch.cumsum(torch.cumprod(x, 1), 0)
    return x, torch.cumsum(side, 0), part


def writes(s, x):
    y = x.exp()
    s.state.add_(x.sum())
    x.mul_(2)
    return y + torch.cumsum(x, 0), s.state * 3


def test_residual_blocks():
    count, program = check(residual, torch.rand(7, 5) * 0.1)
    assert count == 2
    assert "streams.go(1, e" in program.source


def test_a_gpus_kernels_go_to_the_stream_of_their_branch(monkeypatch):
    """And what is copied for them, since it starts anywhere, is copied on that stream."""

    def f(s, x):
        y = torch.cumsum(x, 0)
        return torch.cumsum(x.exp(), 0) + torch.cumsum(x.sin(), 1) + torch.cumsum(-y, 0) + y.exp()

    handles = []
    go, here = Streams.go, {"device": CPU}

    def going(self, n, *events):
        go(self, n, *events)
        handles.append(n)

    def current(index):
        return handles[-1] if handles else 0

    monkeypatch.setattr(Streams, "go", going)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current, raising=False)
    monkeypatch.setattr(executable, "partial", lambda f, *a, **k: partial(f, *a, **k | here))
    monkeypatch.setattr(arena, "allocate", lambda n, _: torch.empty(n, dtype=torch.uint8))
    x = torch.empty(21)[1:].view(4, 5).normal_()
    (got,), count, _ = run_on_streams(f, (x,), torch.device("cuda:1"))
    torch.testing.assert_close(got, f(None, x))
    assert count > 1


def test_products_of_one_input():
    x, q, k, v = torch.randn(4, 5, 5).unbind()
    count, program = check(products, x, q=q, k=k, v=v)
    assert count == 3
    assert "streams.go(1, start)" in program.source


@pytest.mark.parametrize(("f", "least"), [(strided, 3), (reused, 2), (writes, 2)])
def test_memory_of_branches(f, least):
    count, _ = check(f, torch.rand(5, 5) * 0.1, state=torch.zeros(()))
    assert count >= least


def test_no_elements():
    check(residual, torch.rand(0, 5))
    check(residual, torch.rand(7, 0))


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed):
    def f(s, x):
        draw, values = random.Random(seed), [x]
        one = [
            torch.exp, torch.sin, torch.neg, lambda a: a.t(), lambda a: a.t().reshape(6, 6),
            lambda a: torch.cumsum(a, 0), lambda a: a.flip(0), lambda a: torch.cat((a[:3], a[3:])),
        ]  # fmt: skip
        for _ in range(16):
            a, b = draw.choices(values[-5:], k=2)
            y = draw.choice(one)(a) if draw.random() < 0.7 else torch.add(a, b)
            values.append(torch.tanh(y))
            values.append(y)
        return tuple(draw.sample(values[1:], 3))

    check(f, torch.rand(6, 6))
