"""KernelBench as a suite, and ResNet-50's, as far as they run without a GPU."""

import copy
import json

import pytest
import torch
from bench.gpu import merge, suite

from onchip.errors import OnchipError, VerificationError
from onchip.planning import peers
from onchip.report import bench, bench_gpu, bench_kernelbench, benchmarks, schema
from onchip.report import bench_once as once
from onchip.report import bench_replay as replay
from onchip.report.bench_suites import SUITES, Case
from onchip.runtime.verify import verify

NORM = """
import torch
class Model(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = torch.nn.Linear(12, features)
        self.norm = torch.nn.BatchNorm1d(features)
    def forward(self, x):
        return torch.relu(self.norm(self.linear(x)))
def get_inputs():
    return [torch.rand(16, 12)]
def get_init_inputs():
    return [8]
"""
SINGLE = NORM.replace("self.linear(x)", "self.linear(x.float()) + torch.ones(8).float()").replace(
    "12, features)", "12, features, dtype=torch.float32)"
)
BROKEN = "raise ValueError('no such file')"
PLAIN = NORM.replace("self.norm(self.linear(x))", "self.linear(x)")


@pytest.fixture
def clone(tmp_path):
    """A clone of a KernelBench with four problems."""
    folder = tmp_path / "KernelBench" / "level2"
    folder.mkdir(parents=True)
    problems = {1: NORM, 2: SINGLE, 10: BROKEN, 13: PLAIN}
    for n, text in problems.items():
        (folder / f"{n}_Problem.py").write_text(text)
    (folder / "notes.py").write_text("")
    return tmp_path


@pytest.fixture
def on_cpu(monkeypatch, cpu_for_gpu):
    """The CPU in the GPU's place; the clock gives each form 10 us more than the one before it."""
    monkeypatch.setattr(once, "recorded", lambda forms: (dict(forms), {}))
    monkeypatch.setitem(peers.PEERS, "inductor", lambda module, args: lambda: module(*args))
    rounds = []

    def timed(calls, count):
        rounds.append(count)
        for call in calls.values():
            call()
        return {name: 10.0 * (n + 1) for n, name in enumerate(calls)}

    monkeypatch.setattr(once, "timed", timed)
    return rounds


# ---- which problems ----------------------------------------------------------------------------


def test_what_measures_nothing_is_left_out():
    assert len(bench_kernelbench.IDS) == 94
    assert {9, 23, 36, 66, 80, 83}.isdisjoint(bench_kernelbench.IDS)
    assert set(bench_kernelbench.IDS) > bench_kernelbench.SHORTENED


def test_problems_are_chosen(clone):
    def ids(*a, **k):
        return [int(c.name.partition("_")[0]) for c in bench_kernelbench.cases(*a, **k)]

    assert ids(str(clone), "13,1-2,2") == [13, 1, 2]
    assert ids(str(clone / "KernelBench" / "level2"), "10") == [10]
    assert ids(str(clone / "KernelBench"), "1,2,10,13", every=2) == [1, 10]
    assert ids(str(clone), "1,2,10,13", skip=1, every=2) == [2, 13]
    one, _, _, thirteen = bench.cases("kernelbench", path=str(clone), ids="1,2,10,13")
    assert (one.name, one.protocol, one.dtype) == ("1_Problem", "kernelbench", torch.float32)
    assert one.group == "fusion alone"
    assert thirteen.group == "algebra can shorten the product"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (dict(ids="1,x"), "'x' is no number"),
        (dict(ids="23"), "problem 23 is left out: its results are zero"),
        (dict(ids="3"), "no problem 3: it has 4 problems"),
        (dict(), "no problem 3:"),  # all 94 are wanted
        (dict(ids="1", skip=1), "leaves none of 1"),
        (dict(ids="1", every=0), "every 0"),
    ],
)
def test_a_choice_that_cannot_be_is_an_error(clone, given, text):
    with pytest.raises(OnchipError, match=text):
        bench_kernelbench.cases(str(clone), **given)


def test_a_suite_says_what_it_needs(tmp_path):
    with pytest.raises(OnchipError, match="has no problems"):
        bench.cases("kernelbench", path=str(tmp_path))
    with pytest.raises(OnchipError, match="needs the PATH"):
        bench.cases("kernelbench")
    with pytest.raises(OnchipError, match="takes no PATH"):
        bench.cases("smoke", path="here")
    with pytest.raises(OnchipError, match="kernelbench"):
        bench.cases("nonsense")


# ---- the stricter check ------------------------------------------------------------------------


@pytest.fixture
def problem(clone, on_cpu):
    (case,) = bench.cases("kernelbench", path=str(clone), ids="1")
    return bench_kernelbench.KernelBench(with_peers=False).model(case)


def checked(program, module, inputs):
    bench_kernelbench.strict(verify(program, module, inputs), "it")


@torch.no_grad()
def test_the_module_itself_passes(problem):
    module, inputs = problem
    checked(module, module, inputs)


@torch.no_grad()
def test_wrong_results_and_buffers_are_found(problem):
    module, inputs = problem
    with pytest.raises(VerificationError, match=r"output 0 has relative error 1\.0e-05"):
        checked(lambda x: module(x) * (1 + 1e-5), module, inputs)
    with pytest.raises(VerificationError, match=r"output 0 has relative error 1\.0e"):
        checked(lambda x: module(x) * 0, module, inputs)
    aside = copy.deepcopy(module)
    with pytest.raises(VerificationError, match=r"buffer norm\.running_mean"):
        checked(aside, module, inputs)

    def not_counted(x):
        out = module(x)
        module.norm.num_batches_tracked -= 1
        return out

    with pytest.raises(VerificationError, match=r"buffer norm\.num_batches_tracked"):
        checked(not_counted, module, inputs)


@torch.no_grad()
def test_three_times_eagers_error_is_too_much(problem):
    module, inputs = problem

    def cut(x):  # the operands as bfloat16 in place of float32, and of float32 in place of float64
        return module(x.bfloat16().float())

    with pytest.raises(VerificationError, match="more than 2 times eager's"):
        checked(cut, module, inputs)


def test_parameters_and_inputs_hide_nothing(problem):
    module, (x,) = problem
    assert module.training
    assert float(x.min()) < -0.5 < 0.5 < float(x.max())
    for t in (*module.norm.parameters(), module.norm.running_mean, module.norm.running_var):
        assert float(t.detach().std()) > 0.01
    assert bool((module.norm.running_var > 0).all())
    assert int(module.norm.num_batches_tracked) == 0


# ---- rows --------------------------------------------------------------------------------------


def test_rows_of_problems(on_cpu, clone):
    found = bench.device_bench("kernelbench")(True)
    rows = found.rows(bench.cases("kernelbench", path=str(clone), ids="1,2,10,13"))
    facts = dict(suite="kernelbench", device="a GPU", versions={}, date="today")
    result = {**facts, **found.conditions(), "rows": rows}
    schema.check(result, schema.BENCH)
    assert json.loads(json.dumps(result)) == result
    norm, single, broken, plain = result["rows"]
    assert norm["onchip_us"] == 10.0, norm["notes"]
    assert norm["peers"] == {"eager": 20.0, "inductor": 30.0}
    assert norm["error"] <= 2 * max(norm["eager_error"], 2**-23)
    assert {*norm["seconds"]} == {"load", "compile", "verify", "peers", "time"}
    assert single["onchip_us"] is broken["onchip_us"] is None
    assert "no float64 reference: the model does not run in float64" in single["notes"]
    assert "ValueError: no such file" in broken["notes"]
    assert on_cpu == [1, 50] * 2  # once to see how long calls take
    page = benchmarks.document({"kernelbench.json": result})
    assert "Algebra can shorten the product: against eager: 2.00× in the geometric mean" in page
    assert "Fusion alone: against inductor: 3.00× in the geometric mean of 1 rows" in page
    assert plain["group"] != broken["group"] == single["group"]
    assert "constant parameters and buffers perturbed" in page


def test_a_program_that_is_wrong_or_cannot_be_captured(on_cpu, clone, monkeypatch):
    cases = bench.cases("kernelbench", path=str(clone), ids="13")
    reasons = {"onchip": "RuntimeError: not permitted"}
    monkeypatch.setattr(once, "recorded", lambda forms: ({"eager": forms["eager"]}, reasons))
    (row,) = bench_kernelbench.KernelBench(with_peers=False).rows(cases)
    assert row["onchip_us"] == 10.0  # launched
    assert row["peers"] == {"eager": 20.0}
    assert row["notes"].endswith("onchip: timed without a CUDA graph: RuntimeError: not permitted")
    made = bench_gpu.verify
    monkeypatch.setattr(
        bench_gpu, "verify", lambda program, m, args: made(lambda x: program(x) * 1.01, m, args)
    )
    (row,) = bench_kernelbench.KernelBench(with_peers=False).rows(cases)
    assert row["onchip_us"] is None
    assert "more than 2 times eager's" in row["notes"]


def test_long_calls_are_timed_in_fewer_rounds(monkeypatch):
    monkeypatch.setattr(once, "recorded", lambda forms: (dict(forms), {}))
    counts = []

    def timed(calls, count):
        counts.append(count)
        return dict.fromkeys(calls, 50_000.0)

    monkeypatch.setattr(once, "timed", timed)
    bench_kernelbench._medians({"a": print, "b": print})
    assert counts == [1, 20]


# ---- bench/gpu/suite.py ------------------------------------------------------------------------


def test_the_script_takes_problems(clone, monkeypatch, tmp_path):
    options = suite.arguments(["kernelbench", str(clone), "Prob", "--ids", "1,13", "--without"])
    assert (options.pattern, options.without) == ("Prob", [])
    cases = suite.wanted(options)
    assert [c.name for c in cases] == ["1_Problem", "13_Problem"]
    assert suite.columns(cases) == ["eager", "inductor"]
    with pytest.raises(SystemExit, match="no problem 3"):
        suite.wanted(suite.arguments(["kernelbench", str(clone)]))
    monkeypatch.setenv("OUT", str(tmp_path))
    state = tmp_path / "state"
    state.touch()
    suite.kernels.append(state, dict(row=dict(case="1_Problem float32", variant="", error="hung")))
    row = bench.failed(cases[1], RuntimeError("no GPU"))
    facts = dict(suite="kernelbench", device="a GPU", versions={}, date="today", rows=[row])
    done = dict(case="13_Problem float32", variant="", result=facts)
    suite.kernels.append(state, dict(row=done))
    rows = suite.written(options, state)["rows"]
    assert [r["name"] for r in rows] == ["1_Problem", "13_Problem"]
    assert rows[0]["group"] == "fusion alone"
    assert "13_Problem float32 MISSED" in suite.line(rows[1], suite.columns(cases))
    files = {"a": facts, "b": {**facts, "rows": [{**row, "name": n} for n in ("100_A", "2_B")]}}
    names = [r["name"] for r in merge.merged(files)["rows"]]
    assert names == ["2_B", "13_Problem", "100_A"]


# ---- ResNet-50 ---------------------------------------------------------------------------------


def test_a_suite_of_the_gpu_is_run_where_there_is_one(monkeypatch):
    ran = []
    monkeypatch.setattr(bench, "run_cases", lambda suite, *_: ran.append(suite))
    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        bench.run("resnet50")
        bench.run("memory")
    assert ran == ["resnet50", "memory", "gpu-resnet50", "memory"]


def test_resnet50_is_what_the_project_promises():
    found = {c.batch: c for c in SUITES["gpu-resnet50"]}
    assert {n: c.target_us for n, c in found.items()} == {1: 300.0, 32: 950.0, 128: 3500.0}
    assert all(c.channels_last and c.dtype is torch.bfloat16 for c in found.values())
    assert suite.columns(SUITES["gpu-resnet50"]) == [
        "eager", "inductor", "inductor_freezing", "inductor_max_autotune",
    ]  # fmt: skip


def test_each_peer_is_compiled_with_its_own_options(monkeypatch):
    from torch._inductor import config

    seen = []

    def compiled(module, dynamic, options):
        def call(x):
            seen.append((options, config.freezing, config.max_autotune))
            if options.get("max_autotune"):
                raise RuntimeError("no\nchoice")
            return module(x)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    module = torch.nn.Linear(2, 2)
    found, failed = peers.compiled_forms(module, (torch.ones(1, 2),), tuple(peers.FORMS))
    assert [*found] == ["inductor", "inductor_freezing"]
    assert failed == {"inductor_max_autotune": "RuntimeError: no"}
    assert seen[0] == ({}, False, False)
    assert seen[1] == ({"freezing": True}, True, False)
    assert seen[2][2] is True
    assert not config.freezing


def test_peers_of_a_case_may_be_left_out(on_cpu, monkeypatch):
    asked = []

    def forms(module, args, names):
        asked.append(names)
        return dict.fromkeys(names, module), {}

    monkeypatch.setattr(peers, "compiled_forms", forms)
    monkeypatch.setattr(replay, "cache_bytes", lambda device: 1 << 12)
    monkeypatch.setattr(replay, "medians", lambda calls: (dict.fromkeys(calls, 1.0), {}))
    case = Case("pipeline:add-mul:16", peers=("inductor", "inductor_freezing"))
    (row,) = bench_gpu.DeviceBench(True, without=("inductor",)).rows([case])
    assert row["peers"] == {"eager": 1.0, "inductor_freezing": 1.0}
    bench_gpu.DeviceBench(False).rows([case])
    assert asked == [("inductor_freezing",), ()]
