"""Benchmarks on a GPU, as far as they can be run without one: with the CPU in its place."""

import contextlib
import importlib.util
import json
import sys
from dataclasses import replace

import pytest
import torch
from bench.gpu import kernels, measure, region, sanitize

from onchip.capture import capture
from onchip.fusion.machine import GPUS
from onchip.models import resolve
from onchip.planning.generators import triton
from onchip.report import bench_gpu, benchmarks, schema
from onchip.report import bench_replay as replay
from onchip.report.bench_suites import SHORT, SUITES, Case

# ---- the protocol ------------------------------------------------------------------------------


def test_rotated_sets_exceed_the_cache():
    assert replay.sets_for(1000, 50_000) == 200
    assert replay.sets_for(60_000, 50_000) == 4
    assert replay.sets_for(10**9, 50_000) == 1
    assert replay.sets_for(0, 50_000) == replay.MOST_SETS


def test_rotated_sets_have_the_same_values_and_strides_in_other_memory():
    given = (torch.randn(4, 6)[:, ::2], torch.randn(3, 1).expand(3, 5), 7)
    sets = replay.rotated(given, 3)
    assert len(sets) == 3
    assert sets[0][0] is given[0]
    places = set()
    for one in sets:
        assert one[2] == 7
        for mine, x in zip(one[:2], given[:2], strict=True):
            assert torch.equal(mine, x)
            assert mine.stride() == x.stride()
            places.add(mine.data_ptr())
    assert len(places) == 6


def test_medians_are_of_one_call_and_a_failed_capture_has_a_reason(monkeypatch):
    """A graph of 10 calls in 5, 1, 3 ms: 300 us a call."""

    class Graph:
        calls = 10

        def __init__(self):
            self.times = iter([5.0, 1.0, 3.0])

        def milliseconds(self):
            return next(self.times)

    def graphed(calls):
        if not calls:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return Graph()

    monkeypatch.setattr(replay, "graphed", graphed)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found, failed = replay.medians({"good": [print], "bad": []}, rounds=3)
    assert found == {"good": pytest.approx(300.0)}
    assert failed == {
        "bad": "RuntimeError: operation not permitted when stream is capturing",
    }


# ---- rows --------------------------------------------------------------------------------------


def test_compulsory_bytes_count_everything_once():
    model = resolve("pipeline:linear-gelu-residual:5x16")
    graph = capture(model.module, model.example_inputs).graph
    assert bench_gpu.compulsory_bytes(graph) == 4 * (16 * 16 + 16 + 3 * 5 * 16)
    same = torch.nn.Linear(8, 8)
    shared = capture(torch.nn.Sequential(same, same), (torch.randn(2, 8),)).graph
    assert bench_gpu.compulsory_bytes(shared) == 4 * (8 * 8 + 8 + 2 * 16)


@pytest.fixture
def on_cpu(monkeypatch):
    """The CPU in the GPU's place, with a clock that gives the second form twice the first's."""
    monkeypatch.setattr(bench_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(replay, "copy_gbs", lambda: 100.0)
    monkeypatch.setattr(replay, "cache_bytes", lambda device: 1 << 12)
    monkeypatch.setattr(replay, "free", lambda: None)
    seen = {}

    def medians(forms):
        for calls in forms.values():
            for call in calls:
                call()
        seen.update({k: len(calls) for k, calls in forms.items()})
        return {name: 10.0 * (n + 1) for n, name in enumerate(forms)}, {}

    monkeypatch.setattr(replay, "medians", medians)
    return seen


def test_a_row_holds_what_was_measured(on_cpu):
    case = Case("pipeline:add-mul:1000", dtype=torch.float32, memory_bound=True, target_share=0.5)
    (row,) = bench_gpu.DeviceBench(with_peers=False).rows([case])
    facts = {"suite": "s", "device": "d", "versions": {}, "date": "2026-01-01", "rows": [row]}
    schema.check(facts, schema.BENCH)
    assert row["onchip_us"] == 10.0
    assert row["peers"] == {"eager": 20.0}
    assert row["bytes"] == 12_000
    assert row["share"] == pytest.approx(12_000 / 10.0 / 1e3 / 100.0)
    assert row["target_us"] == pytest.approx(12_000 / (0.5 * 100.0) / 1e3)
    assert row["error"] <= 4 * max(row["eager_error"], 1e-7)
    assert on_cpu == {"onchip": 2, "eager": 2}  # 12,000 bytes in a cache of 4,096: two sets


def test_a_case_that_fails_is_a_row(on_cpu):
    cases = [Case("pipeline:nothing"), Case("pipeline:softmax:4x8", target_us=3.0)]
    bad, good = bench_gpu.DeviceBench(with_peers=False).rows(cases)
    assert bad["onchip_us"] is None
    assert "no model 'nothing'" in bad["notes"]
    assert good["target_us"] == 3.0
    assert good["share"] is None


def test_a_row_that_misses_its_target_has_the_suites_reason():
    case = next(c for c in SUITES["memory"] if c.short)
    row = dict(
        name=case.name, dtype="bfloat16", onchip_us=2.0, peers={}, launches=1, error=0.1,
        eager_error=0.1, floor_us=1.0, bytes=1, share=None, target_us=1.5, notes="",
    )  # fmt: skip
    result = dict(suite="memory", device="a GPU", date="today", versions={}, rows=[row])
    reason = f"{case.name}: short of its target: {case.short}"
    assert reason in benchmarks._suite(result)
    row["target_us"] = 2.5
    assert reason not in benchmarks._suite(result)


@pytest.mark.parametrize("suite", ["kernelbench", "memory", "cpu"])
def test_rows_over_twice_their_floor_have_reasons_in_any_suite(suite, monkeypatch):
    """Also where the cases are a user's files, and where a case leaves the type open."""
    name = {"memory": SUITES["memory"][0].name, "cpu": "pipeline:softmax"}.get(suite, "20_Conv")
    monkeypatch.setitem(SHORT, suite, {name: "the text"})
    if suite == "cpu":
        monkeypatch.setitem(SHORT, suite, {})
        monkeypatch.setitem(SUITES, suite, (Case("pipeline:softmax", short="the text"),))
    row = dict(name=name, dtype="float32", onchip_us=5.0, floor_us=2.0, target_us=None)
    found = dict(suite=suite, rows=[row, {**row, "onchip_us": 3.9}])
    assert benchmarks._reasons(found) == [f"- {name}: 2.5 times its floor: the text"]


def test_a_row_says_where_one_kernel_met_two(on_cpu, monkeypatch):
    monkeypatch.setattr(bench_gpu, "one_or_two", lambda contests: [f"{len(contests)} contests"])
    case = Case("pipeline:add-mul:1000", dtype=torch.float32, contests=True)
    rows = bench_gpu.DeviceBench(with_peers=False).rows([case, replace(case, contests=False)])
    assert ["1 contests" in r["notes"] for r in rows] == [True, False]


def test_cases_of_a_suite_are_on_one_device_and_measured_alike():
    for name, suite in SUITES.items():
        assert len({(c.device, c.protocol) for c in suite}) == 1, name
        assert len({(c.name, c.dtype) for c in suite}) == len(suite), name


# ---- bench/gpu/kernels.py ----------------------------------------------------------------------

CHILD = """
import json, os, sys, time
state, restart = sys.argv[1], int(sys.argv[2])

def note(**entry):
    with open(state, "a") as f:
        f.write(json.dumps(entry) + "\\n")

rows = [json.loads(line) for line in open(state)]
done = {e["row"]["variant"] for e in rows if "row" in e}
for name in ("good", "crash", "hang", "lost", "last"):
    if name in done:
        continue
    note(begin=dict(case="c", variant=name))
    if name == "crash":
        os.abort()
    if name == "hang":
        time.sleep(60)
    if name == "lost":
        note(row=dict(case="c", variant=name, error="illegal address"))
        os._exit(restart)
    note(row=dict(case="c", variant=name, us=1.0))
"""


def test_a_crash_or_a_hang_is_a_row_and_the_rest_is_measured(tmp_path, capfd):
    script, state = tmp_path / "child.py", tmp_path / "state"
    script.write_text(CHILD)
    state.touch()
    command = [sys.executable, str(script), str(state), str(kernels.RESTART)]
    assert kernels.supervise(command, state, quiet_s=2.0) == 0
    rows = [e["row"] for e in kernels.read(state) if "row" in e]
    assert [r["variant"] for r in rows] == ["good", "crash", "hang", "lost", "last"]
    errors = {r["variant"]: r.get("error") for r in rows}
    assert errors["good"] is errors["last"] is None
    assert "code -6" in errors["crash"]
    assert "hung for 2 s" in errors["hang"]
    assert errors["lost"] == "illegal address"
    assert "going on" in capfd.readouterr().out


def test_a_case_without_a_correct_variant_fails_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    slow = dict(case="c", variant="slow", us=2.0)
    entries = [
        dict(row=slow),
        dict(row=dict(case="c", variant="fast", us=9.0)),
        dict(row=dict(case="c", variant="fast", us=1.0)),  # measured again
        dict(row=dict(case="c", variant="eager", us=0.5, peer=True)),
    ]
    assert kernels.show(entries, 0) == 0
    lines = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if "    " in line]
    assert lines == ["variant", "eager", "fast", "slow"]
    assert json.loads((tmp_path / "kernels.json").read_text()) == entries
    wrong = dict(row=dict(case="d", variant="fast", us=1.0, error="error 1.0"))
    eager = dict(row=dict(case="d", variant="eager", us=1.0, peer=True))
    with contextlib.redirect_stdout(sys.stderr):
        assert kernels.show([*entries, wrong, eager], 0) == 1
        assert kernels.show(entries, 3) == 1


@pytest.fixture(scope="module")
def sets():
    """A small case in two sets on the CPU, its variants written for an H200."""
    case = Case("pipeline:layernorm:7x33", dtype=torch.float32)
    subject = region.prepare(case, triton.for_gpu(GPUS["h200"]), region.Sweep())
    return region.on_device(subject, "cpu", 2)


def test_variants_are_written_and_swept(sets):
    case, generator = sets.subject.case, triton.for_gpu(GPUS["h200"])
    swept = region.Sweep(fields=(("warps", (1, 2)), ("fold_block", (16, 64))))
    found = region.prepare(case, generator, swept)
    assert sets.subject.candidates
    assert not sets.subject.refused
    for c in found.candidates.values():
        assert c.source.launches[0].warps in (1, 2)
    blocks = [label.rpartition("fold_block=")[2] for label in found.candidates]
    assert {b: blocks.count(b) for b in ("16", "64")} == dict.fromkeys(
        ("16", "64"), len(blocks) / 2
    )
    tiled = region.prepare(case, generator, region.Sweep(tiles=((2, 33),)))
    assert all("2x33" in label for label in tiled.candidates)
    assert tiled.candidates


CONV = Case("pipeline:conv-relu-bn-pool:2x16x16x16:channels-last", dtype=torch.bfloat16)


def options(*more: str):
    return kernels.arguments([".", "--no-run", *more])


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed"
)
def test_the_generator_says_whose_variants():
    def labels(*more: str) -> list[str]:
        chosen = options(*more)
        generator = measure.generator_of(chosen, run=False)
        return [*region.prepare(CONV, generator, measure.sweep(chosen)).candidates]

    engine = [n for n in labels() if n.startswith("engine")]
    assert engine
    assert labels()[0] == engine[0]  # what --limit 1 and profile.sh take
    assert labels("--generator", "cuda") == engine
    assert {*labels("--generator", "triton")} == {*labels()} - {*engine}
    swept = labels("--generator", "cuda", "--set", "x_stages=1,2", "--set", "patch=8x2x1")
    assert len(swept) == len({*swept})
    assert all("patch 8x2x1" in n for n in swept)
    assert {n.partition(" chunks")[0][-1] for n in swept} == {"1", "2"}


def test_what_can_not_be_chosen_is_said():
    with pytest.raises(SystemExit, match="no field 'x_stage'"):
        measure.sweep(options("--set", "x_stage=1"))
    with pytest.raises(SystemExit, match="a100 is sm_80"):
        measure.generator_of(options("--generator", "cuda", "--device", "a100"), run=False)


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("triton") is None,
    reason="cuda-bindings or triton is not installed: torch for CUDA brings both",
)
def test_each_candidate_is_built_by_its_own_compiler(monkeypatch):
    s = region.prepare(CONV, measure.generator_of(options(), run=False), region.Sweep())
    for module, name in ((region.engine_build, "engine"), (region.triton_build, "triton")):
        monkeypatch.setattr(module, "build_all", lambda got, gpu, n=name: [(n, x) for x in got])
    made = region.build_all([*s.candidates.values()], GPUS["h200"])
    for (label, c), found in zip(s.candidates.items(), made, strict=True):
        assert found == ("engine" if label.startswith("engine") else "triton", c.source)


def test_kinds_of_the_engine_for_the_sanitizer_are_there():
    for case, n in sanitize.ENGINE.values():
        assert 0 <= n < len(sanitize.engine_cases.CASES[case].configs)


def test_pointers_are_inputs_outputs_and_workspace(sets):
    (label, c), *_ = sets.subject.candidates.items()
    tensors = region.tensors_of(c, region.memory_of(c, sets), sets, 1)
    assert len(tensors) == len(c.source.pointers), label
    assert tensors[0].data_ptr() == sets.inputs[1][0].data_ptr()


def test_what_is_wrong_with_results_is_found(sets):
    expected = region.truth(sets)
    guarded, *more = sets.outputs[1].values()
    assert not more
    assert expected.eager_error < 1e-6
    guarded.poison()
    error, wrong = region.fault(sets, expected, 1)
    assert not error < 1
    assert "error inf" in wrong  # nothing was written
    guarded.tensor.copy_(sets.subject.module(*sets.inputs[1]).detach())
    error, wrong = region.fault(sets, expected, 1)
    assert error < 1e-6
    assert not wrong
    guarded.tensor[3, 5] += 0.1
    assert "eager's" in region.fault(sets, expected, 1)[1]
    guarded.tensor[3, 5] -= 0.1
    guarded.raw[region.GUARD - 1] = 7
    assert "outside" in region.fault(sets, expected, 1)[1]
    guarded.poison()
