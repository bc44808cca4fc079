"""Which form of a region is chosen, and where a group that loses is cut. Times are given, not
taken, wherever the choice is the point."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onchip.analysis.record import Contest, Interval
from onchip.analysis.roofline import Ceilings, Costs
from onchip.capture import capture
from onchip.fusion.partition import Partitioner
from onchip.fusion.region import region_of
from onchip.planning import decide, planner
from onchip.planning.assess import Compiled, Outcome
from onchip.planning.cut import Cut, cheapest_cut, launches, may_gain, promising_cuts
from onchip.planning.intervals import Comparison, words
from onchip.planning.library import onednn_steps, run_of
from onchip.planning.plan import CallStep, KernelStep, LibraryStep
from onchip.planning.pool import Pool, RankedCut
from onchip.planning.tuner import Verdict, check_steps, load_verdict, store_verdict, tune
from onchip.planning.values import run_eagerly
from onchip.report.build import Facts, build_report
from onchip.runtime.program import Program
from onchip.settings import Settings

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN"
)


# 1 MB takes 30 µs, a start 2
COSTS = Costs(((1 << 20, 30.0), (1 << 28, 15_000.0)), 2.0, 2, 16.0, 0.5)
CEILINGS = Ceilings("c", 20.0, {"float32": 100.0}, 2.0, "made up", gpu=False, costs=COSTS)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    monkeypatch.setattr(decide, "_ceilings", lambda *_: CEILINGS)
    # no time that a test tells is far from what is predicted
    monkeypatch.setattr(decide, "FAR_FROM_PREDICTED", float("inf"))
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def image(*shape):
    return torch.randn(shape).to(memory_format=torch.channels_last)


def program_of(model, x, settings=Settings(budget_s=600.0)):
    """The plan, and the program checked against float64."""
    captured = capture(model, (x,))
    planned = planner.plan(captured, [x], settings)
    program = Program(model, (x,), {}, lambda *_: (captured, planned.plan), Settings())
    as_tuple = lambda y: y if isinstance(y, tuple) else (y,)  # noqa: E731
    got, eager = as_tuple(program(x)), as_tuple(model(x))
    want = as_tuple(model.double()(x.double()))
    model.float()
    for a, b, c in zip(got, eager, want, strict=True):
        assert (a.double() - c).norm() < 1e-5 * c.norm()
        assert a.stride() == b.stride()
    return captured, planned, program


def kinds(planned):
    return [(type(s).__name__, "+".join(n.op for n in s.nodes)) for s in planned.plan.steps]


def report_of(captured, planned):
    compiled = Compiled(captured, captured, planned, Outcome("fused"), 0.0)
    return build_report(Facts("model", "cpu", "float32"), compiled, None)


# ---- oneDNN ------------------------------------------------------------------------------------


class ConvSilu(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return F.relu(F.silu(self.conv(x)))


@needs_onednn
def test_a_call_of_onednn_counts_as_one_fused_launch(monkeypatch):
    verdict = Verdict("onednn", 0, 9.0, 8.0, 7.0)
    monkeypatch.setattr(decide, "tune", lambda *_: verdict)
    monkeypatch.setattr(decide, "may_gain", lambda *_: 0.0)
    captured, planned, program = program_of(ConvSilu().eval(), image(2, 8, 7, 5))
    assert kinds(planned) == [("CallStep", "conv2d+silu"), ("LibraryStep", "relu_")]
    assert program.launches == 2
    (silu, relu) = planned.decisions
    assert silu.fused
    assert silu.text == "one library call (oneDNN)"
    assert silu.costs == {
        "bytes_saved": 2 * 4 * 2 * 8 * 35, "kernel_us": 9.0, "library_us": 8.0, "onednn_us": 7.0,
    }  # fmt: skip
    assert (relu.fused, relu.rule) == (False, "LIBRARY_BETTER")
    report = report_of(captured, planned)
    # x read, silu written, read and written by the ReLU; the convolution's result nowhere
    assert (report.fused.launches, report.fused.accesses) == (2, 4)
    assert report.unfused.accesses == 6
    first = report.kernels[0]
    assert (first.backend, first.choice) == ("library", "mkldnn._convolution_pointwise.default")
    assert len(first.ops) == 2
    assert "one kernel" in report.why("conv", silu.edge[1])


def parts_of(model, x):
    """(region, oneDNN's form, constants, values) of the whole model."""
    captured = capture(model.eval(), (x,))
    graph = captured.graph
    constants = frozenset(graph.constants)
    position = {n: i for i, n in enumerate(graph.nodes)}
    region = region_of(graph.nodes, graph, constants, position)
    values = run_eagerly(captured, [x], {})
    return region, onednn_steps(region, constants), constants, values


class InTurn:
    """A clock that tells each function's times, by the order in which they are made ready."""

    def __init__(self, *seconds):
        self.seconds = iter(seconds)

    def ready(self, function):
        function()
        mine = itertools.cycle(next(self.seconds))
        return lambda: next(mine)


@needs_onednn
@pytest.mark.parametrize(
    ("library", "fused", "kind", "text"),
    [
        ([2.0], [1.0], "onednn", "0.50× (0.50–0.50)"),
        ([1.0], [1.5], "library", "1.50× (1.50–1.50)"),
        ([1.0], [1.1, 0.9], "library", "no difference beyond noise (0.90–1.10×)"),
        ([1.0], [0.9, 1.01, 0.5, 1.01], "library", "no difference beyond noise (0.90–1.01×)"),
    ],
)
def test_a_fused_form_must_take_less_than_the_library_beyond_noise(library, fused, kind, text):
    region, form, constants, values = parts_of(ConvSilu(), image(2, 8, 7, 5))
    clock = InTurn(library, fused, [0.5])
    found = tune(region, {}, {}, form, constants, values, 60.0, clock)
    assert found.kind == kind
    assert words(found.library_ratio) == text
    assert found.library_us == pytest.approx(min(library) * 1e6)
    assert found.onednn_us == pytest.approx(min(fused) * 1e6)
    assert found.calls_us == pytest.approx(0.5e6)
    assert found.kernel_us is None
    assert not found.refused
    store_verdict("k", found)
    assert load_verdict("k") == found


@needs_onednn
def test_a_wrong_form_is_refused_before_it_is_timed(monkeypatch):
    region, form, constants, values = parts_of(ConvSilu(), image(2, 8, 7, 5))
    assert check_steps(form, region, constants, values) == ""
    (weight,) = form[0].derived
    values.tensors[weight.sources[0]] = -values[weight.sources[0]]
    found = tune(region, {}, {}, form, constants, values, 0.01)
    assert found.kind == "library"
    assert found.onednn_us is None
    assert "relative error" in found.refused[0][1]


@needs_onednn
def test_what_onednn_refuses_to_run_is_no_candidate():
    region, form, constants, values = parts_of(ConvSilu(), image(2, 8, 7, 5))
    first = form[0]
    assert isinstance(first, CallStep)
    args = tuple("no such operator" if a == "swish" else a for a in first.call.args)
    broken = (replace(first, call=replace(first.call, args=args)), *form[1:])
    found = tune(region, {}, {}, broken, constants, values, 0.01)
    assert found.kind == "library"
    assert "Fusion behavior undefined" in found.refused[0][1]


@needs_onednn
def test_a_form_that_loses_nan_is_refused(monkeypatch):
    """oneDNN's own ReLU is such a form; so it is never proposed."""
    from onchip.backends.library import onednn

    monkeypatch.setattr(onednn, "_unary", lambda n: ("relu", [], "") if n.op == "relu" else None)
    region, form, constants, values = parts_of(
        nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU()), image(2, 16, 9, 11)
    )
    assert [type(s) for s in form] == [CallStep]
    found = tune(region, {}, {}, form, constants, values, 0.01)
    assert found.kind == "library"
    assert "NaN" in found.refused[0][1]


def test_running_steps_leaves_the_values_alone():
    region, form, _, values = parts_of(ConvSilu(), image(2, 8, 7, 5))
    before = {t: x.clone() for t, x in values.tensors.items()}
    run_of(form or [LibraryStep(n) for n in region.nodes], values)()
    assert all(torch.equal(x, before[t]) for t, x in values.tensors.items())


# ---- cuts --------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """Two equal blocks, so that a verdict is used twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

    def forward(self, x):
        y = F.max_pool2d(F.relu(self.a(x)), 3, stride=1, padding=1)
        return F.max_pool2d(F.relu(self.b(y)), 3, stride=1, padding=1)


class Told:
    """Verdicts and times in place of measured ones: whole groups are the library's, parts are
    kernels; `whole` and `parts` are the times when both are run side by side."""

    def __init__(self, monkeypatch, whole, parts):
        self.tuned, self.whole, self.parts = [], whole, parts
        monkeypatch.setattr(decide, "tune", self.tune)
        monkeypatch.setattr(decide, "clock_for", lambda _: Untimed())
        monkeypatch.setattr(decide, "compare", self.compare)

    def tune(self, region, candidates, *_):
        self.tuned.append("+".join(n.op for n in region.nodes))
        if len(region.nodes) == 3:
            return Verdict("library", 0, 90.0, 80.0)
        index = next(iter(candidates))
        return Verdict("kernel", index, 30.0, 40.0, times_us={candidates[index].choice: 30.0})

    def compare(self, whole, parts, _):
        whole(), parts()  # both forms run
        return met(self.whole, self.parts)


class Untimed:
    """A clock under which a function is what times it."""

    def ready(self, function):
        return function


def met(whole, parts):
    """Six rounds that all took the same."""
    return Comparison((whole,) * 6, (parts,) * 6)


@pytest.fixture
def blocks():
    return Pooled().eval(), image(1, 8, 9, 7)


def test_a_group_that_loses_is_cut_where_that_is_faster(monkeypatch, blocks):
    told = Told(monkeypatch, 80e-6, 60e-6)
    captured, planned, _ = program_of(*blocks)
    # equal blocks: each kind is tuned once; every edge is as cheap to cut, and the ReLU stays with
    # its convolution
    assert len(told.tuned) == len(set(told.tuned))
    assert kinds(planned) == [("KernelStep", "conv2d+relu"), ("KernelStep", "max_pool2d")] * 2
    cuts = [d for d in planned.decisions if d.rule == "SLOWER"]
    assert [d.edge for d in cuts] == [("relu", "max_pool2d"), ("relu_1", "max_pool2d_1")]
    for d in cuts:
        assert not d.fused
        assert (
            "one kernel takes 90 µs, library calls take 80 µs, the parts take 60 µs: whole over "
            "parts 1.33× (1.33–1.33)"
        ) in d.text
        assert d.costs["split_ratio_low"] == pytest.approx(4 / 3)
        assert (d.costs["kernel_us"], d.costs["split_us"]) == (90.0, pytest.approx(60.0))
        assert (d.costs["library_us"], d.family) == (pytest.approx(80.0), "unprofitable")
        assert 0 < d.costs["predicted_us"] < d.costs["predicted_split_us"]
    assert sum(d.fused for d in planned.decisions) == 2
    report = report_of(captured, planned)
    assert report.fused.launches == 4
    # the kernel had lost already, so one kernel against two was not measured
    assert [c.against for c in report.contests] == ["operators"] * 6
    lost = [c for c in report.contests if not c.won]
    assert [c.ops for c in lost] == [("a", "relu", "max_pool2d"), ("b", "relu_1", "max_pool2d_1")]
    assert (lost[0].fused_us, lost[0].unfused_us) == (90.0, pytest.approx(80.0))
    assert "a + relu + max_pool2d: 90 µs fused, 80 µs as library calls" in report.text(200)

    def never(*_, **__):
        raise AssertionError("a stored verdict is not measured again")

    monkeypatch.setattr(decide, "tune", never)
    monkeypatch.setattr(decide, "compare", never)
    _, again, _ = program_of(*blocks)
    assert kinds(again) == kinds(planned)
    assert again.decisions == planned.decisions


def test_a_cut_that_is_not_faster_is_not_made_and_stays_known(monkeypatch, blocks):
    Told(monkeypatch, 80e-6, 80e-6)
    _, planned, _ = program_of(*blocks)
    whole = kinds(planned)
    assert whole == [("LibraryStep", op) for op in ("conv2d", "relu", "max_pool2d")] * 2
    verdict = load_verdict(planned.steps_of[0][1].key)
    assert verdict is not None
    assert (verdict.kind, verdict.split_us) == ("library", pytest.approx(80.0))
    assert verdict.split_ratio == Interval(1.0, 1.0, 1.0, 6)
    assert {d.rule for d in planned.decisions} == {"LIBRARY_BETTER"} | {
        d.rule for d in planned.decisions if d.edge == ("max_pool2d", "b")
    }
    _, again, _ = program_of(*blocks)
    assert kinds(again) == whole


def test_a_part_may_be_cut_again(monkeypatch):
    def tuned(region, candidates, *_):
        if len(region.nodes) > 1:
            return Verdict("library", 0, 90.0, 80.0)
        return Verdict("kernel", next(iter(candidates)), 30.0, 40.0)

    monkeypatch.setattr(decide, "tune", tuned)
    monkeypatch.setattr(decide, "compare", lambda *_: met(80e-6, 60e-6))
    model = nn.Sequential(nn.Softmax(-1), nn.Softmax(-2), nn.Softmax(-1)).eval()
    _, planned, _ = program_of(model, torch.randn(5, 7))
    assert kinds(planned) == [("KernelStep", "softmax")] * len(planned.plan.steps)
    assert len(planned.plan.steps) == 3
    for d in planned.decisions:
        assert not d.fused


@pytest.mark.parametrize(("parts", "won"), [(60e-6, False), (80e-6, True), (90e-6, True)])
def test_one_kernel_against_two_stands_in_the_report(monkeypatch, one_cut, parts, won):
    """Whichever of the two wins; a tie leaves one."""
    one_cut(4, [parts, parts], "kernel")
    monkeypatch.setattr(decide, "may_gain", lambda v, *_: v.best_us)
    captured, planned, _ = program_of(Four(), torch.randn(5, 7))
    (found,) = [c for c in planned.contests if c.against == "two kernels"]
    ops = ("relu", "sigmoid", "tanh", "elu")
    ratio = Interval(*[pytest.approx(80e-6 / parts)] * 3, 6)
    first = ops[: len(found.first)]
    assert found == Contest(ops, "two kernels", pytest.approx(80.0), parts * 1e6, ratio, won, first)
    assert len(planned.plan.steps) == (1 if won else 2)
    text = report_of(captured, planned).text(300)
    winner = "one kernel" if won else "two kernels"
    assert f"relu + sigmoid + tanh + elu: {winner}: 80 µs as one, {parts * 1e6:.0f} µs" in text
    assert ("fusion was tried and lost" in text) != won
    assert all("whole over parts" in d.text for d in planned.decisions if not d.fused)
    assert all("against two kernels" in d.text for d in planned.decisions if d.fused and won)


def test_what_a_cut_may_gain():
    lost, won = Verdict("library", 0, 9.0, 8.0), Verdict("kernel", 0, 8.0, 9.0)
    assert may_gain(lost, 3) == 8.0
    assert may_gain(lost, 1) == may_gain(won, 3) == may_gain(Verdict("library"), 3) == 0.0
    # the kernel wins, but most of its time is not the convolution's
    assert may_gain(Verdict("kernel", 0, 8.0, 9.0, 8.5, 3.0), 3) == 5.0
    assert may_gain(Verdict("onednn", 0, 9.0, 9.0, 8.0, 7.5), 3) == 0.0
    # the kernel wins, but its convolution alone could do with fewer products
    assert may_gain(won, 3, short_part=True) == 4.0
    assert may_gain(won, 1, short_part=True) == 0.0
    # far from what its bytes and products take (3.2 times), not far (2 times)
    assert may_gain(won, 3, floor_us=2.5) == 5.5
    assert may_gain(won, 3, floor_us=4.0) == may_gain(won, 1, floor_us=2.5) == 0.0


def test_a_pool_that_keeps_a_convolution_from_its_short_form_may_be_cut_off(monkeypatch, tmp_path):
    """Winograd's form computes two by two results, tiles of an overlapping pool begin anywhere."""
    asked = []
    monkeypatch.setattr(decide, "may_gain", lambda *a: asked.append(a[2]) or 0.0)

    def all_products(region, candidates, *_):
        return Verdict("kernel", next(i for i, c in candidates.items() if not c.fewer_products))

    def fewer_products(region, candidates, *_):
        return Verdict("kernel", next(i for i, c in candidates.items() if c.fewer_products))

    class Block(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.a = nn.Conv2d(16, 16, size, padding=size // 2)

        def forward(self, x):
            return F.relu(self.a(x))

    cases = (
        (3, all_products, Settings(), True),
        (3, fewer_products, Settings(), False),
        (5, all_products, Settings(), False),
        (3, all_products, Settings(winograd=False), False),
        (3, all_products, Settings(numerics="eager"), False),
    )
    for n, (size, chosen, settings, wanted) in enumerate(cases):
        monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / str(n)))  # no verdict is known
        asked.clear()
        monkeypatch.setattr(decide, "tune", chosen)
        program_of(Block(size).eval(), image(1, 16, 8, 6), settings=settings)
        assert asked == [wanted], (size, settings)


class Diamond(nn.Module):
    def forward(self, x):
        y = x.exp()
        a, b = y.sum(1, keepdim=True), y[:, :2].tanh()
        return (y / a)[:, :3] + (b.sum(1, keepdim=True) * 2).sin()


class Chain(nn.Module):
    def forward(self, x):
        y = torch.relu(x).mean((2, 3))
        return (y * 2).sin().unsqueeze(1).expand(-1, 5, -1) + y.cos().unsqueeze(1)


class Views(nn.Module):
    def forward(self, x):
        return torch.relu(x).flatten(1).t()


@pytest.mark.parametrize("model", [Diamond(), Chain(), Pooled().eval()])
def test_the_cut_is_legal_and_cheapest(model):
    region, form, _, _ = parts_of(model, image(2, 8, 6, 5))
    cut = cheapest_cut(region, form, launches)
    assert cut is not None
    first = {region.nodes[i] for i in cut.first}
    made = {t for n in first for t in n.results}

    def legal(nodes):
        results = {t for n in region.nodes if n not in nodes for t in n.results}
        return not any(t in results for n in nodes for t in n.inputs)

    def price(nodes):
        made = {t for n in nodes for t in n.results}
        read = {t for n in region.nodes if n not in nodes for t in n.inputs}
        return sum(t.nbytes * (2 - (t in region.outputs)) for t in made & read)

    assert legal(first)
    assert made
    every = [
        price(set(nodes))
        for size in range(1, len(region.nodes))
        for nodes in itertools.combinations(region.nodes, size)
        if legal(set(nodes))
        and any(map(launches, nodes))
        and any(launches(n) for n in region.nodes if n not in nodes)
    ]
    assert cut.nbytes == price(first) == min(every)


def test_no_cut_that_leaves_a_part_without_work():
    region, form, _, _ = parts_of(Views(), torch.randn(3, 2, 4))
    assert cheapest_cut(region, form, launches) is None


@needs_onednn
def test_of_equal_cuts_one_that_leaves_pointwise_operators_where_they_are():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            return F.max_pool2d(torch.sigmoid(F.relu(self.a(x))), 3, stride=1, padding=1)

    region, form, _, _ = parts_of(Block().eval(), image(1, 8, 6, 5))
    cut = cheapest_cut(region, form, launches)
    assert cut is not None
    assert [region.nodes[i].op for i in cut.first] == ["conv2d", "relu", "sigmoid"]


def test_kernels_are_steps_of_their_own_kind(monkeypatch, blocks):
    monkeypatch.setattr(decide, "tune", lambda r, c, *_: Verdict("kernel", next(iter(c))))
    _, planned, _ = program_of(*blocks)
    assert all(isinstance(s, KernelStep) for s in planned.plan.steps)


# ---- cuts that the search ranks ----------------------------------------------------------------


def test_the_cheapest_cut_goes_first_unless_the_model_is_sure_of_another():
    region, form, _, _ = parts_of(nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Tanh(), nn.ELU()),
                                  torch.randn(8))  # fmt: skip
    a, b, c, _ = region.nodes
    cheapest = cheapest_cut(region, form, launches)
    assert cheapest is not None
    assert cheapest.first == (0, 1)
    ranked = [RankedCut((a,), 10.0), RankedCut((a, b), 12.0), RankedCut((a, b, c), 40.0)]
    found = promising_cuts(region, cheapest, ranked, launches)
    assert [f.first for f in found] == [(0, 1), (0,)]
    assert found[1].nbytes == 2 * 4 * 8  # written and read again
    sure = [RankedCut((a,), 10.0), RankedCut((a, b), 20.0), RankedCut((a, b, c), 40.0)]
    assert [f.first for f in promising_cuts(region, cheapest, sure, launches)] == [(0,)]
    assert promising_cuts(region, cheapest, [], launches) == [cheapest]


class Four(nn.Module):
    def forward(self, x):
        return F.elu(torch.tanh(torch.sigmoid(torch.relu(x))))


class Siblings(nn.Module):
    def forward(self, x):
        return torch.relu(x), torch.sigmoid(x), x * 2


@pytest.fixture
def one_cut(monkeypatch):
    """Wholes of `size` operators are the library's, parts kernels; one_cut(size, times) gives the
    parts' times in the order in which cuts are tried, and the list of what was stored."""

    def told(size, times, kind="library"):
        def tuned(region, c, *_):
            if len(region.nodes) == size:
                return Verdict(kind, next(iter(c)), 90.0, 80.0)
            return Verdict("kernel", next(iter(c)), 30.0, 40.0)

        left, stored, keep = iter(times), [], decide.store_verdict
        monkeypatch.setattr(decide, "tune", tuned)
        monkeypatch.setattr(decide, "compare", lambda *_: met(80e-6, next(left)))
        monkeypatch.setattr(decide, "store_verdict", lambda k, v: stored.append(v) or keep(k, v))
        return stored

    monkeypatch.setattr(decide, "DEPTH", 1)
    return told


def test_a_second_cut_is_tried_where_the_first_lost(one_cut):
    stored = one_cut(4, [80e-6, 50e-6])
    _, planned, _ = program_of(Four(), torch.randn(5, 7))
    first, second = [v for v in stored if v.cut]
    assert (first.kind, first.split_us) == ("library", pytest.approx(80.0))
    assert (second.kind, second.split_us) == ("split", pytest.approx(50.0))
    assert first.cut != second.cut
    assert len(planned.plan.steps) == 2


def test_the_first_cut_stays_where_the_second_is_worse(one_cut):
    stored = one_cut(4, [80e-6, 81e-6])
    program_of(Four(), torch.randn(5, 7))
    first, second = [v for v in stored if v.cut]
    assert first == second
    assert (first.kind, first.split_us) == ("library", pytest.approx(80.0))


@pytest.mark.parametrize("which", ["engine_cut", "results_cut"])
def test_a_cut_that_lets_the_engine_in_is_measured_first(which, one_cut, monkeypatch):
    own = Cut((0, 1, 2), 280)

    def found(region, *_):
        return own if len(getattr(region, "nodes", region)) == 4 else None

    monkeypatch.setattr(decide, which, found)
    monkeypatch.setattr(decide.Decider, "_gain", lambda *_: 0.0)  # nothing else would be tried
    stored = one_cut(4, [60e-6])
    _, planned, _ = program_of(Four(), torch.randn(5, 7))
    (found,) = [v for v in stored if v.cut]
    assert (found.kind, found.cut) == ("split", own.first)
    assert [len(s.nodes) for s in planned.plan.steps] == [3, 1]


def test_no_second_cut_where_the_first_won(one_cut):
    stored = one_cut(4, [60e-6])
    program_of(Four(), torch.randn(5, 7))
    assert len([v for v in stored if v.cut]) == 1


@pytest.mark.parametrize("parts", [60e-6, 100e-6])
def test_joined_siblings_are_measured_against_their_groups(monkeypatch, one_cut, parts):
    """One kernel of three results, or three kernels: whatever the groups' own verdicts are."""
    monkeypatch.setattr(decide, "DEPTH", 2)
    monkeypatch.setattr(decide, "may_gain", lambda *_: 0.0)
    stored = one_cut(0, [parts, parts])
    captured, planned, _ = program_of(Siblings(), torch.randn(64, 300))
    whole = next(v for v in stored if v.cut)
    assert whole.cut == (0,)
    assert whole.split_us == pytest.approx(parts * 1e6)
    if parts < 80e-6:
        assert kinds(planned) == [("KernelStep", op) for op in ("relu", "sigmoid", "mul")]
        return
    assert kinds(planned) == [("KernelStep", "relu+sigmoid+mul")]
    report = report_of(captured, planned)
    # x is read once for three results
    assert (report.fused.launches, report.fused.accesses) == (1, 4)
    assert report.unfused.accesses == 6


def test_fuel_joins_nothing(one_cut):
    _, planned, _ = program_of(Siblings(), torch.randn(64, 300), Settings(fuel=5))
    assert planned.pool is None
    assert len(planned.plan.steps) == 3


def test_a_kernel_far_from_what_is_predicted_for_its_parts_may_gain():
    won = Verdict("kernel", 0, 8.0, 9.0)
    assert may_gain(won, 3, parts_us=5.0) == 3.0
    assert may_gain(won, 3, parts_us=6.0) == may_gain(won, 1, parts_us=5.0) == 0.0


def test_the_report_holds_bound_and_gap():
    captured, planned, _ = program_of(Four(), torch.randn(5, 7))
    ceilings = CEILINGS
    compiled = Compiled(captured, captured, planned, Outcome("fused", {"fused": 50.0}), 0.0)
    report = build_report(Facts("m", "cpu", "float32", ceilings=ceilings), compiled, None)
    bound = planned.bound(ceilings)
    assert report.plan.predicted_us == sum(k.predicted_us for k in report.kernels)
    assert report.plan.lower_bound_us == bound.lower_bound_us
    assert report.plan.gap == pytest.approx(50.0 / bound.lower_bound_us - 1)
    unknown = build_report(Facts("m", "cpu", "float32"), compiled, None)
    assert unknown.plan == type(unknown.plan)()


def test_groups_that_could_be_one_have_both_prices(monkeypatch):
    """Where a join is possible but saves too little, the edge says so."""
    monkeypatch.setattr(planner, "pool_of", lambda partition, *_: Pool(partition, (), {}, {}))
    # the greedy partitioner merges nothing, and refuses nothing
    monkeypatch.setattr(Partitioner, "try_merge", lambda *_: None)
    _, planned, _ = program_of(nn.Sequential(nn.ReLU(), nn.Sigmoid()), torch.randn(64, 300))
    (d,) = planned.decisions
    assert (d.rule, d.family, d.fused) == ("NOT_CHOSEN", "unprofitable", False)
    nbytes = 64 * 300 * 4
    # a start, two tensors moved; as two kernels twice that
    assert d.costs["predicted_split_us"] > d.costs["predicted_us"] > 2 * nbytes / (1 << 20) * 30
    assert f"predicted {d.costs['predicted_us']:,.0f} µs" in d.text
