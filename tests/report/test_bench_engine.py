"""The engine's suite, as far as it runs without a GPU: with the CPU and a clock in its place."""

import json
import sys
import types

import pytest
import torch
from bench.gpu import merge, suite
from torch.nn import functional as F

from onchip.errors import OnchipError
from onchip.models import resolve
from onchip.planning import fused_peers
from onchip.report import bench, bench_engine, benchmarks, schema
from onchip.report import bench_once as once
from onchip.report.bench_suites import SUITES, Case

# ---- the protocol ------------------------------------------------------------------------------


class Clock:
    """The GPU in order: what is enqueued takes its time at once."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def event(self, enable_timing):
        assert enable_timing
        return Event(self)

    def flush(self):
        return types.SimpleNamespace(zero_=lambda: self.run("flush", 50.0))

    def graph(self, name, times):
        return lambda: self.run(name, times.pop(0))

    def run(self, name, milliseconds):
        self.log.append(name)
        self.now += milliseconds


class Event:
    def __init__(self, clock):
        self.clock, self.at = clock, None

    def record(self):
        self.clock.log.append("event")
        self.at = self.clock.now

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(once, "_buffer", found.flush)
    return found


def test_each_replay_is_timed_alone_behind_a_flush(clock):
    warm = [9.0] * once.WARM
    graphs = {
        "a": clock.graph("a", [*warm, 5.0, 1.0, 3.0]),
        "b": clock.graph("b", [*warm, 2.0, 2.0, 8.0]),
    }
    assert once.timed(graphs, rounds=3) == {"a": 3000.0, "b": 2000.0}
    turn = ["flush", "event", "a", "event", "flush", "event", "b", "event"]
    assert clock.log == turn * (once.WARM + 3)


def test_a_form_that_cannot_be_captured_has_a_reason(clock, monkeypatch):
    def captured(calls, repeats):
        assert (len(calls), repeats) == (1, 1)
        if calls[0] is None:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        replay = clock.graph("good", [4.0] * 100)
        return types.SimpleNamespace(recording=types.SimpleNamespace(replay=replay), calls=1)

    monkeypatch.setattr(once, "captured", captured)
    found, failed = once.medians({"bad": None, "good": print}, rounds=2)
    assert found == {"good": 4000.0}
    assert failed == {"bad": "RuntimeError: operation not permitted when stream is capturing"}


# ---- peers -------------------------------------------------------------------------------------


def test_the_bare_product_is_without_bias_and_operators():
    model = resolve("layer:3x3/2+relu+bn+pool:2x4x9x9-8:channels-last")
    (x,) = model.example_inputs
    found = fused_peers.bare(model.module, (x,))()
    assert torch.equal(found, F.conv2d(x, model.module.product.weight, None, 2, 1))
    assert model.module.product.bias is not None
    x, y = resolve("layer:bmm+gelu:2x3x4-5").example_inputs
    product = fused_peers.bare(resolve("layer:bmm+gelu:2x3x4-5").module, (x, y))()
    assert torch.equal(product, x @ y)
    network = resolve("torchcrepe:tiny:random", batch=1)
    with pytest.raises(fused_peers.NoPeer, match="7 products"):
        fused_peers.bare(network.module, network.example_inputs)


class Value:
    """A tensor of a graph: how to compute it."""

    def __init__(self, run):
        self.run = run

    def same(self, *_):
        return self

    set_output = set_data_type = set_dim = set_stride = same


class FakeGraph:
    """cudnn.pygraph with PyTorch's operators. Plan 1 can't be built, plan 2 computes nonsense."""

    def __init__(self, handle, **types):
        self.handle, self.built = handle, []

    def tensor(self, dim, stride, data_type):
        found = Value(lambda pack: pack[found])
        found.dim, found.stride = dim, stride
        return found

    def conv_fprop(self, image, weight, padding, stride, dilation):
        return Value(
            lambda p: F.conv2d(image.run(p), weight.run(p), None, stride, padding, dilation)
        )

    def bias(self, input, bias):
        return self.add(input, bias)

    def add(self, a, b):
        return Value(lambda p: a.run(p) + b.run(p))

    def scale(self, input, scale):
        return Value(lambda p: input.run(p) * scale.run(p))

    def relu(self, input):
        return Value(lambda p: input.run(p).relu())

    def validate(self):
        pass

    build_operation_graph = validate

    def create_execution_plans(self, modes):
        assert modes == ["A", "FALLBACK"]

    def get_execution_plan_count(self):
        return 4

    def build_plan_at_index(self, n):
        if n == 1:
            raise RuntimeError("not supported")
        self.built.append(n)

    def get_workspace_size_plan_at_index(self, n):
        return 0

    def execute_plan_at_index(self, pack, workspace, index, handle):
        assert handle is self.handle
        for key, data in pack.items():
            assert not hasattr(key, "dim") or (key.dim, key.stride) == (
                list(data.shape), list(data.stride()),
            )  # fmt: skip
        (out,) = [k for k in pack if not hasattr(k, "dim")]
        pack[out].copy_(out.run(pack) if index != 2 else torch.zeros_like(pack[out]))


@pytest.fixture
def fake_cudnn(monkeypatch):
    module = types.ModuleType("cudnn")
    module.data_type = types.SimpleNamespace(FLOAT="float", HALF="half", BFLOAT16="bf16")
    module.heur_mode = types.SimpleNamespace(A="A", FALLBACK="FALLBACK")
    module.create_handle = lambda: object()
    module.set_stream = lambda handle, stream: None
    module.pygraph = FakeGraph
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(fused_peers, "has_cudnn", lambda: True)
    stream = types.SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return module


@pytest.mark.parametrize(
    "spec",
    [
        "pipeline:conv-relu-bn-pool:2x4x8x8:channels-last",
        "pipeline:stem:1x3x16x16:channels-last",
        "layer:1x1+bn+residual+relu:2x8x5x5-16:channels-last",
    ],
)
@torch.no_grad()
def test_cudnns_graph_computes_the_model_and_wrong_plans_are_left_out(fake_cudnn, spec):
    model = resolve(spec)
    want = model.module(*model.example_inputs)
    calls = fused_peers.cudnn_plans(model.module, model.example_inputs)
    assert len(calls) == 2  # of four plans one can't be built, one is wrong
    for call in calls:
        torch.testing.assert_close(call(), want, rtol=1e-5, atol=1e-5)


def test_cudnn_without_a_right_plan_is_an_error(fake_cudnn, monkeypatch):
    model = resolve("pipeline:conv-bn-relu:1x4x8x8:channels-last")
    monkeypatch.setattr(FakeGraph, "relu", lambda self, input: input)
    with torch.no_grad(), pytest.raises(RuntimeError, match="no plan gives eager's result"):
        fused_peers.cudnn_plans(model.module, model.example_inputs)
    linear = resolve("layer:linear+relu:2x3-4")
    with pytest.raises(fused_peers.NoPeer, match="does not start with a convolution"):
        fused_peers.cudnn_plans(linear.module, linear.example_inputs)


# ---- rows --------------------------------------------------------------------------------------


def test_inputs_are_not_those_that_were_compiled_on():
    given = (torch.randn(3, 64, 5)[..., ::2] * 3 + 7, torch.arange(5))
    x, n = bench_engine.unseen(given)
    assert x.stride() == given[0].stride()
    assert not torch.isclose(x, given[0]).any()
    assert float(x.mean()) == pytest.approx(7, abs=1)
    assert float(x.std()) == pytest.approx(3, abs=0.5)
    assert torch.equal(n, given[1])


@pytest.fixture
def on_cpu(monkeypatch, cpu_for_gpu):
    """The CPU in the GPU's place; the clock gives each form 10 us more than the one before it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def medians(forms):
        for call in forms.values():
            call()
        return {name: 10.0 * (n + 1) for n, name in enumerate(forms)}, {}

    monkeypatch.setattr(once, "medians", medians)
    monkeypatch.setattr(bench_engine.peers, "inductor", lambda module, args: lambda: module(*args))


ONCE = dict(dtype=torch.float32, device="cuda", protocol="once")
CASES = (
    Case("layer:3x3+bn+relu:2x4x8x8-4:channels-last", **ONCE, target_us=9.0),
    Case("layer:linear+gelu:8x8-8", **ONCE, target_bare=0.5),
    Case("layer:nothing", **ONCE, target_us=1.0),
)


def test_rows_of_single_calls(on_cpu, fake_cudnn):
    bench_rows = bench_engine.EngineBench(with_peers=True)
    image, linear, bad = bench_rows.rows(CASES)
    # forms: onchip, eager, bare, cudnn 0, cudnn 1, inductor
    assert image["onchip_us"] == 10.0
    assert image["peers"] == {"eager": 20.0, "bare": 30.0, "cudnn": 40.0, "inductor": 60.0}
    assert image["target_us"] == 9.0
    assert image["error"] <= 4 * max(image["eager_error"], 1e-7)
    assert linear["peers"] == {"eager": 20.0, "bare": 30.0, "inductor": 40.0}
    assert linear["target_us"] == 30.0 / 0.5
    assert bad["onchip_us"] is None
    assert "no layer" in bad["notes"]
    conditions = bench_rows.conditions()
    assert conditions["empty_us"] == 4.5
    assert "no cudnn" not in conditions["protocol"]


def test_peers_that_fail_or_are_left_out(on_cpu, monkeypatch):
    def broken(module, args):
        raise ValueError("does not\ncompile")

    monkeypatch.setattr(bench_engine.peers, "inductor", broken)
    monkeypatch.setattr(fused_peers, "has_cudnn", lambda: False)
    (row,) = bench_engine.EngineBench(with_peers=True).rows(CASES[:1])
    assert row["peers"] == {"eager": 20.0, "bare": 30.0, "inductor": None}
    assert "inductor: ValueError: does not compile" in row["notes"]
    without = bench_engine.EngineBench(with_peers=True, without=("inductor", "bare"))
    image, linear = without.rows(CASES[:2])
    assert image["peers"] == linear["peers"] == {"eager": 20.0}
    assert linear["target_us"] is None
    assert without.conditions()["protocol"].endswith(bench_engine.NO_CUDNN)


def test_the_result_is_the_contracts_and_its_page_says_how_it_was_measured(on_cpu, monkeypatch):
    monkeypatch.setattr("onchip.planning.machine.device_name", lambda device="cpu": "a GPU")
    monkeypatch.setattr(fused_peers, "has_cudnn", lambda: False)
    result = bench.run_cases("engine", CASES, peers=True)
    schema.check(result, schema.BENCH)
    assert json.loads(json.dumps(result)) == result
    page = benchmarks.document({"engine.json": result})
    assert "\nA CUDA graph of one call" in page
    assert "An empty kernel takes 4.50 µs." in page or "An empty kernel takes 4.5 µs." in page
    image, linear, bad = (x for x in page.splitlines() if x.startswith("| layer:"))
    assert "(missed)" in image
    assert "(met)" in linear
    assert "| 2.00× | 2.00× |" in image  # eager's 20 us; bare is no peer of the whole model
    assert "(missed)" in bad


def test_cases_of_the_engine_are_what_the_project_promises():
    cases = {(c.model, c.batch, c.dtype): c for c in SUITES["engine"]}
    four = "pipeline:conv-relu-bn-pool:32x64x56x56:channels-last"
    assert cases[four, None, torch.bfloat16].target_us == 18.0
    assert cases["torchcrepe:full:random", 512, torch.bfloat16].target_us == 5000.0
    assert cases["layer:linear+gelu:8192x8192-8192", None, torch.bfloat16].target_bare == 0.9
    assert sum(c.target_us is not None or c.target_bare is not None for c in cases.values()) == 14


@pytest.mark.parametrize("spec", sorted({c.model for c in SUITES["engine"]}))
def test_models_of_the_engine_resolve(spec):
    if "8192" in spec:  # a second for its weights: a smaller one of the same kind
        spec = spec.replace("8192", "64")
    model = resolve(spec, batch=1)
    assert model.example_inputs[0].shape[0] == 1


# ---- bench/gpu/suite.py and merge.py -----------------------------------------------------------


def result_of(*rows, **more):
    cells = dict(
        dtype="bfloat16", onchip_us=2.0, peers={"eager": 3.0}, launches=1, error=0.1,
        eager_error=0.1, floor_us=1.0, bytes=1, share=None, target_us=1.5, notes="",
    )  # fmt: skip
    facts = dict(suite="engine-smoke", device="a GPU", date="today", versions={})
    return {**facts, "protocol": "p", "empty_us": 4.0, **more, "rows": [
        {**cells, "name": n, "onchip_us": us} for n, us in rows
    ]}  # fmt: skip


def test_a_case_that_broke_the_process_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    cases = suite.chosen("engine-smoke", "")
    options, state = suite.arguments(["engine-smoke"]), tmp_path / "state"
    state.touch()
    names = [suite.name_of(c) for c in cases]
    error = dict(case=names[1], variant="engine-smoke", error="the process hung for 240 s")
    suite.kernels.append(state, dict(row=error))
    assert suite.written(options, state) is None
    good = dict(case=names[0], variant="s", result=result_of((cases[0].name, 2.0)))
    suite.kernels.append(state, dict(row=good))
    rows = suite.written(options, state)["rows"]
    assert [(r["name"], r["onchip_us"]) for r in rows] == [
        (cases[1].name, None), (cases[0].name, 2.0),
    ]  # fmt: skip
    assert "hung" in rows[0]["notes"]
    assert json.loads((tmp_path / "engine-smoke-cuda.json").read_text())["rows"] == rows
    assert all(suite.missed(r) for r in rows)
    assert "hung" in suite.line(rows[0], suite.columns(cases))


def test_cases_are_chosen_by_name_and_type():
    found = suite.chosen("engine", "conv-relu.*float32")
    assert [c.dtype for c in found] == [torch.float32]
    with pytest.raises(SystemExit):
        suite.chosen("engine", "nonsense")
    options = suite.arguments(["engine", "", "--without"])
    assert (options.pattern, options.without) == ("", [])
    assert suite.arguments(["engine", "x", "--without", "inductor"]).without == ["inductor"]


def test_runs_are_merged_in_the_suites_order(tmp_path):
    first, second, third = (c.name for c in SUITES["engine-smoke"])
    files = {
        "a": result_of((third, 1.0), (first, 2.0)),
        "b": result_of((second, 3.0), (first, 4.0), empty_us=5.0),
    }
    found = merge.merged(files)
    assert [(r["name"], r["onchip_us"]) for r in found["rows"]] == [
        (first, 4.0), (second, 3.0), (third, 1.0),
    ]  # fmt: skip
    assert found["empty_us"] == 5.0
    schema.check(found, schema.BENCH)
    with pytest.raises(OnchipError, match="c: device is 'another', not 'a GPU'"):
        merge.merged(files | {"c": result_of(device="another")})
    with pytest.raises(OnchipError, match="no results"):
        merge.merged({})
