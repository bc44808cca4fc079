"""CUDA graphs without a GPU: a stand-in records a call and repeats it in the same memory, which is
what a graph does. Which graph serves a call, what is copied, and what is never overwritten."""

import gc
import json
from dataclasses import replace

import pytest
import torch
from tests.modules import Fn, same
from torch import nn

from onchip.analysis.record import Blocker
from onchip.backends.nvidia import launcher
from onchip.planning.recording import Recording
from onchip.runtime import graph_choice, graphs
from onchip.runtime.blockers import find_blockers
from onchip.runtime.graphs import Graphs
from onchip.runtime.weights import Snapshot

from .library import compile_library, library_plan
from .test_kernels import by_op, kernel_plan

CPU = torch.device("cpu")


class Replay:
    """Computes again into the memory of the first results, reading the recorded inputs."""

    def __init__(self, run, results):
        self.run, self.results = run, results

    def replay(self):
        written = tuple(t for t in reached(self.run) if not t.is_inference())
        with torch.inference_mode(False), torch.no_grad():
            with torch.autograd._unsafe_preserve_version_counter(written):
                computed = self.run()
            for old, new in zip(self.results, computed, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def reached(run):
    """The inputs and weights that a recorded call reads and may write."""
    for cell in run.__closure__:
        match cell.cell_contents:
            case list() as inputs:
                yield from inputs
            case Snapshot() as now:
                yield from now.tensors


class Streams:
    """One after the other, whatever the stream is."""

    def __init__(self, count, device):
        self.went = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def go(self, n, *events):
        self.went.append(n)

    def mark(self):
        return len(self.went)


def recording(times, race):
    """What stands for recording and for the clock; `times`: launched, replayed, copied; `race`: in
    a row, with branches at once."""

    def record(run, device):
        saved = [(t, t.clone()) for t in reached(run)]
        with torch.inference_mode(False), torch.no_grad():
            results = run()
        for t, value in saved:  # recording runs nothing
            if not torch.equal(t, value):
                t.copy_(value)
        kept = [t.detach() for t in results]  # as a graph: it keeps memory, not tensors
        return Recording(Replay(run, kept), results)  # type: ignore[arg-type]

    def medians(runs, device, repeats=1):
        for run in runs:
            run()
        return list(times) if len(runs) == 3 else list(race)

    return record, medians


@pytest.fixture
def prepared(monkeypatch):
    """(model, inputs, times) -> a function that calls its graphs as a program would."""

    def make(model, inputs, times=(100.0, 10.0, 20.0), race=(10.0, 10.0), plan=library_plan):
        record, medians = recording(times, race)
        monkeypatch.setattr(graphs, "Streams", Streams)
        monkeypatch.setattr(graphs, "record", record)
        monkeypatch.setattr(graphs, "_medians", medians)
        monkeypatch.setattr(graphs, "_stream", lambda device: 0)
        with torch.no_grad():
            entry = compile_library(model, inputs, plan=plan).latest
            entry.graphs = made = Graphs(
                entry.captured, entry.plan, entry.executable, CPU, entry.mutated,
                entry.mutated_constants,
            )  # fmt: skip
            made.prepare(inputs, entry.weights.current())
        return entry

    return make


@torch.no_grad()
def call(entry, *inputs, stream=0):
    return entry.graphs.run(inputs, entry.weights.current(), stream)


def sums(s, x, y):
    z = torch.cumsum(x + y, 0)
    return z, z[1:], x, s.w


def model():
    return Fn(sums, w=torch.ones(2))


def test_new_inputs_are_copied_and_known_ones_are_not(prepared):
    x, y = torch.randn(2, 4, 3)
    entry = prepared(model(), (x, y))
    assert entry.graphs.coverage.graphed
    lane = entry.graphs.lanes[0]
    for _ in range(3):
        a, b = torch.randn(2, 4, 3).unbind()
        got, want = call(entry, a, b), sums(entry.captured.module, a, b)
        assert len(lane.lent) == 0
        assert got[2] is a
        assert got[3] is entry.captured.module.w
        assert got[1].data_ptr() == got[0][1:].data_ptr()
        for p, q in zip(got, want, strict=True):
            same(p, q)
            assert p.stride() == q.stride()
    call(entry, x, y)
    got = call(entry, x, y)  # seen before: a graph on this memory
    assert len(lane.lent) == 1
    x.add_(1)
    del got
    gc.collect()
    again = call(entry, x, y)
    assert len(lane.lent) == 1
    for p, q in zip(again, sums(entry.captured.module, x, y), strict=True):
        same(p, q)


def test_held_results_are_never_overwritten(prepared):
    x, y = torch.randn(2, 4, 3)
    entry = prepared(model(), (x, y))
    kept, wanted = [], []
    for k in range(12):
        x.fill_(k)
        kept.append(call(entry, x, y))
        wanted.append([t.clone() for t in sums(entry.captured.module, x, y)])
        for got, want in zip(kept, wanted, strict=True):
            same(got[0], want[0])
            same(got[1], want[1])
    view = kept[-1][0][2]  # a view alone keeps the memory too
    value = view.clone()
    del kept, got
    gc.collect()
    for k in range(8):
        x.fill_(-k)
        call(entry, x, y)
    same(view, value)


@pytest.mark.parametrize("one", [0, 1])
def test_one_of_two_results_of_one_memory_keeps_it(prepared, one):
    x, y = torch.randn(2, 4, 3)
    entry = prepared(model(), (x, y))
    kept, wanted = [], []
    for k in range(4):  # the second and later ones run on graphs of their own memory
        x.fill_(k)
        kept.append(call(entry, x, y)[one])
        wanted.append(sums(entry.captured.module, x, y)[one].clone())
        gc.collect()
    for got, want in zip(kept, wanted, strict=True):
        same(got, want)


def test_dropped_results_are_used_again(prepared):
    x, y = torch.randn(2, 4, 3)
    entry = prepared(model(), (x, y))
    pointers = set()
    for _ in range(10):
        out = call(entry, x, y)  # the last one is held while this is computed
        pointers.add(out[0].data_ptr())
    assert len(entry.graphs.lanes[0].lent) == 2
    assert len(pointers) <= 3
    assert entry.graphs.records <= 3


def test_a_result_is_a_new_object(prepared):
    x, y = torch.randn(2, 4, 3)
    entry = prepared(model(), (x, y))
    for _ in range(4):
        out = call(entry, x, y)[0]
        assert out.shape == (4, 3)
        out.t_()  # changes the caller's object only


def test_results_that_share_memory_in_another_order_do_so_as_copies(prepared):
    def f(s, x):
        z = torch.cumsum(x, 0)
        return z[1:], z

    entry = prepared(Fn(f), (torch.ones(4),))
    a, b = call(entry, torch.arange(4.0))
    same(b, torch.tensor([0.0, 1.0, 3.0, 6.0]))
    b.zero_()
    same(a, torch.zeros(3))


def writes(s, x):
    x.mul_(2)
    s.total.add_(x.sum())
    return torch.cumsum(x, 0)


def test_writes_reach_the_caller_and_are_counted(prepared):
    m = nn.Module()
    m.register_buffer("total", torch.zeros(()))
    m.forward = writes.__get__(m)
    x = torch.arange(3.0)
    entry = prepared(m, (x,))
    same(x, torch.arange(3.0))  # preparing changed nothing
    same(m.total, torch.zeros(()))
    total = 0.0
    for k in range(6):
        mine = torch.ones(3) if k < 2 else x
        want = mine * 2
        versions = mine._version, m.total._version
        same(call(entry, mine)[0], torch.cumsum(want, 0))
        same(mine, want)
        total += float(want.sum())
        assert float(m.total) == pytest.approx(total)
        assert mine._version > versions[0]
        assert m.total._version > versions[1]
    assert entry.graphs.lanes[0].lent


def test_changed_weights_are_recorded_again(prepared):
    linear = nn.Linear(3, 2)
    m = Fn(lambda s, x: torch.cumsum(s.linear(x), 0))
    m.linear = linear
    x = torch.randn(4, 3)
    entry = prepared(m, (x,))
    for _ in range(3):
        same(call(entry, x)[0], m(x).detach())
    with torch.no_grad():
        linear.weight = nn.Parameter(linear.weight * 2)
    before = entry.graphs.records
    for _ in range(3):
        same(call(entry, x)[0], m(x).detach())
    assert entry.graphs.records > before
    with torch.no_grad():
        linear.weight.mul_(3)  # in place: the graph reads what is there
    before = entry.graphs.records
    same(call(entry, x)[0], m(x).detach())
    assert entry.graphs.records == before


@pytest.mark.parametrize("times", [(100.0, 10.0, 20.0), (100.0, 10.0, 200.0)])  # own, lent
def test_weights_that_change_at_every_call_are_not_recorded_for_ever(prepared, times):
    """As in a training loop that evaluates after each step. When it is over graphs are used."""
    m = Fn(lambda s, x: torch.cumsum(x * s.w, 0), w=torch.ones(3))
    x = torch.randn(4, 3)
    entry = prepared(m, (x,), times)
    made = entry.graphs
    for k in range(100):
        m.w = torch.full((3,), float(k))
        got = call(entry, x)
        same(m(x) if got is None else got[0], m(x))
    assert made.records <= graphs.PATIENCE
    for _ in range(graphs.LEAST_CALLS * graphs.PATIENCE + 1):
        got = call(entry, x)
        same(m(x) if got is None else got[0], m(x))
    assert got is not None
    assert made.records <= graphs.PATIENCE + 2


@pytest.mark.parametrize("times", [(100.0, 10.0, 20.0), (100.0, 10.0, 200.0)])
def test_graphs_that_serve_many_calls_are_recorded_for_each_change(prepared, times):
    m = Fn(lambda s, x: torch.cumsum(x * s.w, 0), w=torch.ones(3))
    x = torch.randn(4, 3)
    entry = prepared(m, (x,), times)
    for k in range(3 * graphs.PATIENCE):
        m.w = torch.full((3,), float(k))
        for _ in range(3 * graphs.LEAST_CALLS):
            got = call(entry, x)
            same(m(x) if got is None else got[0], m(x))
        assert got is not None


def test_expanded_and_strided_inputs(prepared):
    m = Fn(lambda s, x: torch.cumsum(x, 1))
    forms = [torch.randn(1, 5).expand(4, 5), torch.randn(5, 4).t(), torch.randn(8, 5)[::2]]
    for x in forms:
        entry = prepared(m, (x,))
        for _ in range(3):
            same(call(entry, x)[0], m(x))
            other = torch.randn(x.shape).as_strided(x.shape, x.stride()) if 0 in x.stride() else x
            same(call(entry, other)[0], m(other))


def test_streams_have_graphs_of_their_own_and_not_without_end(prepared):
    x, y = torch.randn(2, 4, 3)
    entry = prepared(model(), (x, y))
    for stream in range(graphs.STREAMS + 2):
        got = call(entry, x, y, stream=stream)
        assert (got is None) == (stream >= graphs.STREAMS)
    arenas = [lane.arena for lane in entry.graphs.lanes.values()]
    assert len(arenas) == graphs.STREAMS


def test_calls_in_inference_mode_and_outside_share_graphs(prepared):
    x, y = torch.randn(2, 4, 3)
    entry = prepared(model(), (x, y))
    for stream in (0, 1):
        with torch.inference_mode():
            a, b = torch.randn(2, 4, 3).unbind()
            same(entry.graphs.run((a, b), entry.weights.current(), stream)[0], (a + b).cumsum(0))
        for _ in range(3):
            same(call(entry, x, y, stream=stream)[0], (x + y).cumsum(0))
            with torch.inference_mode():
                same(call(entry, x, y, stream=stream)[0], (x + y).cumsum(0))


def test_no_graph_that_is_not_faster(prepared):
    x, y = torch.randn(2, 4, 3)
    entry = prepared(model(), (x, y), (10.0, 9.9, 20.0))
    assert not entry.graphs.coverage.graphed
    assert "gain nothing" in entry.graphs.coverage.text
    assert call(entry, x, y) is None


def test_copies_are_not_made_where_they_cost_more_than_the_graph_saves(prepared):
    x, y = torch.randn(2, 4, 3)
    entry = prepared(model(), (x, y), (10.0, 5.0, 20.0))
    assert call(entry, *torch.randn(2, 4, 3)) is None
    assert call(entry, x, y) is None
    assert call(entry, x, y) is not None  # seen before
    assert "addresses seen before" in entry.graphs.coverage.text


def forks(s, x):
    """Two branches, one of which writes to a buffer at the end."""
    a = torch.cumsum(x * s.w, 0)
    b = torch.cumprod(x, 0).sort(0).values
    s.total.add_(b.sum())
    return a + b, a


def forking():
    m = Fn(forks, w=torch.ones(3))
    m.register_buffer("total", torch.zeros(()))
    return m


@pytest.mark.parametrize(
    ("race", "branches"), [((100.0, 50.0), 2), ((100.0, 99.0), 1), ((50.0, 100.0), 1)]
)
def test_branches_run_at_once_where_that_is_faster(prepared, race, branches):
    x = torch.rand(4, 3)
    entry = prepared(forking(), (x,), race=race)
    cover = entry.graphs.coverage
    assert (cover.graphed, cover.branches) == (True, branches)
    assert (cover.row_us, cover.branched_us) == race
    told = "one CUDA graph, 2 branches at once (50 µs against 100 µs in a row): 10 µs"
    assert cover.text.startswith(told) == (branches == 2)
    assert entry.graphs.executable.streams == branches
    assert entry.executable.streams == 1  # what is launched without a graph
    assert "streams" not in entry.executable.source
    mirror = forking()
    for k in range(8):
        given = x if k % 2 else torch.rand(4, 3)
        got = call(entry, given)
        for p, q in zip(got, mirror(given), strict=True):
            same(p, q)
        same(entry.captured.module.total, mirror.total)
    assert entry.graphs.lanes[0].lent


def test_branches_have_an_arena_in_which_less_is_shared(prepared):
    def f(s, x):
        return torch.cumsum(x.exp().neg(), 0) + torch.cumsum(x.neg().exp(), 0)

    x = torch.rand(4, 3)
    entry = prepared(Fn(f), (x,), race=(100.0, 50.0), plan=kernel_plan(by_op))
    row, at_once = (e.arenas.nbytes for e in (entry.executable, entry.graphs.executable))
    assert (row, at_once) == (2 * 64, 4 * 64)
    for stream in (0, 1):
        for _ in range(3):
            torch.testing.assert_close(call(entry, x, stream=stream)[0], f(None, x))
        assert entry.graphs.lanes[stream].arena.block.numel() == at_once


def test_a_chain_is_recorded_once(prepared):
    entry = prepared(model(), tuple(torch.randn(2, 4, 3)))
    assert entry.graphs.records == 1
    cover = entry.graphs.coverage
    assert (cover.branches, cover.row_us, cover.branched_us) == (1, None, None)


def test_branches_that_cannot_be_recorded_are_named(prepared, monkeypatch):
    def fails(self, n, *events):
        raise RuntimeError("a stream too many")

    monkeypatch.setattr(Streams, "go", fails)
    x = torch.rand(4, 3)
    entry = prepared(forking(), (x,))
    cover = entry.graphs.coverage
    assert (cover.graphed, cover.branches) == (True, 1)
    assert "(in a row: " in cover.text
    assert "RuntimeError: a stream too many" in cover.text
    same(call(entry, x)[0], forking()(x)[0])


@pytest.mark.parametrize("race", [(100.0, 90.0), (100.0, 99.0)])
def test_kernels_start_early_where_that_is_faster(prepared, monkeypatch, race):
    launched = []

    def plan(captured):
        made = kernel_plan(by_op)(captured)
        for s in made.steps:
            real = s.kernel.f
            s.kernel.f = lambda x, f=real: launched.append(launcher._mode.early) or f(x)
        return replace(made, steps=tuple(replace(s, waits=True) for s in made.steps))

    x = torch.rand(4, 3)
    entry = prepared(Fn(lambda s, x: torch.exp(-x)), (x,), race=race, plan=plan)
    cover, faster = entry.graphs.coverage, race[1] < 98
    assert (cover.row_us, cover.early_us, cover.branched_us) == (*race, None)
    assert cover.text.startswith(
        f"one CUDA graph{', kernels start early (90 µs against 100 µs)' * faster}: 10 µs"
    )
    now = entry.weights.current()
    ways = {
        "replayed": (lambda: call(entry, x), faster),
        "in a caller's graph": (lambda: entry._be_captured([x], now), faster),
        "without a graph": (lambda: entry._launch([x], now, 0), False),
    }
    for way, early in ways.values():
        launched.clear()
        torch.testing.assert_close(way()[0], torch.exp(-x))
        assert launched == [early] * 2


def test_one_kernel_has_none_to_start_before(prepared):
    def plan(captured):
        made = kernel_plan(by_op)(captured)
        return replace(made, steps=tuple(replace(s, waits=True) for s in made.steps))

    entry = prepared(Fn(lambda s, x: torch.exp(x)), (torch.rand(3),), race=(9.0, 1.0), plan=plan)
    assert entry.graphs.coverage.early_us is None
    assert not entry.graphs.executable.early


def test_attention_without_dropout_draws_nothing():
    def blocked(p):
        def f(s, x):
            return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=p)

        with torch.no_grad():
            captured = compile_library(Fn(f), (torch.ones(1, 2, 4, 8),)).builds[-1]
        return [b.reason for b in find_blockers(captured, library_plan(captured), CPU)]

    assert blocked(0.0) == []
    assert blocked(0.25) == ["it draws random numbers"]


def test_blockers_name_operator_place_and_reason():
    def f(s, x):
        return torch.cumsum(nn.functional.dropout(x, 0.5, training=True), 0)

    with torch.no_grad():
        captured = compile_library(Fn(f), (torch.ones(3),)).builds[-1]
    plan = library_plan(captured)
    (found,) = find_blockers(captured, plan, CPU)
    assert "dropout" in found.operator
    assert "modules.py:" in found.origin
    assert found.reason == "it draws random numbers"
    elsewhere = find_blockers(captured, plan, torch.device("cuda:0"))
    assert elsewhere[0] == Blocker("input0", "", "this input is on cpu")


def test_an_operator_that_cannot_be_recorded_is_named(prepared, monkeypatch):
    x, y = torch.randn(2, 4, 3)
    entry = prepared(model(), (x, y))

    def fails(run, device, pool=None):
        def broken(*_, **__):
            raise RuntimeError("operation not permitted when stream is capturing")

        name = next(k for k, v in entry.executable.run.__globals__.items()
                    if "cumsum" in str(v))  # fmt: skip
        monkeypatch.setitem(entry.executable.run.__globals__, name, broken)
        return run()

    monkeypatch.setattr(graphs, "record", fails)
    made = Graphs(
        entry.captured, entry.plan, entry.executable, CPU, entry.mutated, entry.mutated_constants
    )
    with torch.no_grad():
        made.prepare((x, y), entry.weights.current())
    (found,) = made.coverage.blockers
    assert "cumsum" in found.operator
    assert "modules.py:" in found.origin
    assert "not permitted when stream is capturing" in found.reason
    assert not made.coverage.graphed
    assert made.run((x, y), entry.weights.current(), 0) is None


@pytest.mark.parametrize(
    ("form", "times", "race"),
    [
        ("branches", (100.0, 10.0, 20.0), (100.0, 50.0)),
        ("row", (100.0, 10.0, 20.0), (50.0, 100.0)),
        ("row", (100.0, 10.0, 99.9), (50.0, 100.0)),  # not with inputs copied
        ("row", (10.0, 10.0, 10.0), (50.0, 100.0)),  # no graph
        ("early", (100.0, 10.0, 20.0), (50.0, 100.0)),
    ],
)
def test_a_choice_is_repeated_without_timing(prepared, monkeypatch, form, times, race):
    x = torch.rand(4, 3)
    choice = json.loads(json.dumps(prepared(forking(), (x,), times, race).graphs.choice))
    if form == "early":  # the library's program has no kernels that could
        choice["form"] = "early"
    entry = prepared(forking(), (x,))
    entry.graphs = again = Graphs(
        entry.captured, entry.plan, entry.executable, CPU, entry.mutated, entry.mutated_constants
    )
    monkeypatch.setattr(graphs, "_medians", lambda *_: pytest.fail("it is timed"))
    again.prepare((x,), entry.weights.current(), choice)
    assert again.choice == choice
    assert choice["form"] == form
    assert (again.executable.streams > 1, again.executable.early) == (
        form == "branches", form == "early",
    )  # fmt: skip
    assert again.copying == (times[2] < 0.98 * times[0])
    same(entry.captured.module.total, torch.zeros(()))  # neither inputs nor buffers change
    mirror = forking()
    for k in range(4):
        got = call(entry, x)
        assert (got is None) == (times[1] == times[0] or (not again.copying and k == 0))
        for p, q in zip(got or (), mirror(x) if got else (), strict=True):
            same(p, q)


def test_a_choice_names_operators_that_hinder_without_places_in_files(prepared):
    x = torch.rand(4, 3)
    first = prepared(Fn(lambda s, x: torch.bernoulli(x)), (x,)).graphs
    assert first.coverage.blockers[0].origin
    text = json.dumps(first.choice)
    assert "test_graphs" not in text
    again = graph_choice.covered(json.loads(text), first.captured)
    assert again == first.coverage
