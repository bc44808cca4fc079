"""The command line as a user runs it; the optimiser is replaced where it is not the subject."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onchip import cli
from onchip.errors import OnchipError
from onchip.report import KernelRow, Report, Totals, bench
from onchip.settings import Settings

runner = CliRunner()


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    env = {"OMP_NUM_THREADS": "1", "ONCHIP_CACHE": str(tmp_path_factory.mktemp("cache"))}
    return {**os.environ, **env}


def run(*args, env):
    return subprocess.run(
        [sys.executable, "-m", "onchip", *args],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )


def one_line_error(done):
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_unknown_model_is_one_line_and_exit_code_2(environment):
    line = one_line_error(run("analyze", "nonsense:model", "--device", "h200", env=environment))
    assert line.startswith("onchip: ")
    assert "nonsense" in line


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("analyze", "pipeline:add-mul", "--device", "tpu"), "known are a100"),
        (("optimize", "pipeline:add-mul", "--device", "tpu"), "use cpu or cuda"),
        (("analyze", "pipeline:add-mul", "--device", "h200", "--dtype", "int4"), "use fp32, bf16"),
    ],
)
def test_a_wrong_choice_is_one_line(args, part, environment):
    assert part in one_line_error(run(*args, env=environment))


def test_analyze_needs_no_gpu(environment):
    done = run("analyze", "pipeline:conv-relu-bn-pool", "--device", "h200", env=environment)
    assert done.returncode == 0, done.stderr
    for part in ("contraction", "window", "roofline classes", "accesses 8 -> 2", "launches 4 -> 1",
                 "physical limit"):  # fmt: skip
        assert part in done.stdout


def test_help_does_not_import_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from onchip import cli;"
        "r = CliRunner().invoke(cli.app, ['--help']); assert r.exit_code == 0, r.output;"
        "assert 'optimize' in r.output; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


class _Program:
    sources = {"k0/a": "int kernel();", "k1": "@triton.jit\ndef k(): ..."}  # noqa: RUF012


@pytest.fixture
def api(monkeypatch):
    """onchip.api with an `optimize` that records its arguments."""
    fake = types.ModuleType("onchip.api")
    fake.calls, fake.program = [], _Program()
    report = Report(
        "m", "cpu", "float32", Totals(2, 5, 50, 10, 20.0), Totals(1, 3, 30, 10, 10.0),
        kernels=(KernelRow("k0", ("add", "mul"), "cpp"),),
    )  # fmt: skip

    def optimize(model, **options):
        options.pop("progress")("fusing", 1, 2)
        fake.calls.append((model, options))
        if model == "broken":
            raise OnchipError("two\nlines")
        return fake.program, report

    fake.optimize = optimize
    monkeypatch.setitem(sys.modules, "onchip.api", fake)
    monkeypatch.setattr("onchip.api", fake, raising=False)
    return fake


def test_optimize_writes_what_is_asked_for(api, tmp_path):
    import torch

    html, out = tmp_path / "r.html", tmp_path / "r.json"
    done = runner.invoke(
        cli.app,
        ["optimize", "m", "--dtype", "bf16", "--batch", "3", "--peers", "--report", str(html),
         "--json", str(out), "--lock", "plan.lock"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    given = {"device": "cpu", "dtype": torch.bfloat16, "batch": 3, "peers": True}
    assert api.calls == [("m", {**given, "settings": Settings(lock="plan.lock")})]
    assert "tensor accesses" in done.output
    assert "40% less" in done.output
    assert Report.from_json(out.read_text()).speedup == 2.0
    assert "<svg" in html.read_text()


def test_json_to_stdout_is_json_alone(api):
    done = runner.invoke(cli.app, ["optimize", "m", "--json", "-"])
    assert json.loads(done.stdout)["unfused"]["launches"] == 2


def test_why_and_kernels(api, tmp_path):
    assert "one kernel, k0" in runner.invoke(cli.app, ["why", "m", "add", "mul"]).output
    assert "int kernel();" in runner.invoke(cli.app, ["kernels", "m"]).output
    done = runner.invoke(cli.app, ["kernels", "m", "--out", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["k0_a.cpp", "k1.py"]


def test_bench_checks_its_result(monkeypatch):
    result = {"suite": "s", "device": "d", "versions": {}, "date": "2026-01-01", "rows": []}
    asked = []

    def run(suite, peers, without):
        asked.append((suite, peers, without))
        return {**result, "suite": suite}

    monkeypatch.setattr(bench, "run", run)
    assert json.loads(runner.invoke(cli.app, ["bench", "memory"]).stdout)["suite"] == "memory"
    options = ["--peers", "--without", "inductor", "--without", "cudnn"]
    assert runner.invoke(cli.app, ["bench", "engine", *options]).exit_code == 0
    assert asked == [("memory", False, ()), ("engine", True, ("inductor", "cudnn"))]
    monkeypatch.setattr(bench, "run", lambda suite, peers, without: {"suite": suite})
    broken = runner.invoke(cli.app, ["bench", "memory"])
    assert isinstance(broken.exception, OnchipError)


@pytest.mark.parametrize(("losers", "code"), [(0, 0), (2, 1)])
def test_bench_verify_ends_with_1_if_a_kernel_lost(losers, code, monkeypatch):
    def verify(suite, show):
        show(f"the table of {suite}")
        return losers

    monkeypatch.setattr(bench, "verify", verify)
    done = runner.invoke(cli.app, ["bench", "smoke", "--verify"])
    assert (done.exit_code, done.stdout) == (code, "the table of smoke\n")
    odd = runner.invoke(cli.app, ["bench", "smoke", "--verify", "--peers"])
    assert isinstance(odd.exception, OnchipError)


@pytest.mark.parametrize(
    ("suite", "without", "message"),
    [
        ("gpu-resnet50", "inductor_freezin", "did you mean inductor_freezing"),
        ("engine", "cudn", "did you mean cudnn"),
        ("gpu", "eager", "has only the peers inductor"),
        ("smoke", "inductor", "runs on the CPU"),
    ],
)
def test_a_peer_that_a_suite_has_not_is_an_error(suite, without, message):
    done = runner.invoke(cli.app, ["bench", suite, "--without", without])
    assert isinstance(done.exception, OnchipError)
    assert message in str(done.exception)


def test_main_flattens_a_message(api, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["onchip", "optimize", "broken"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "onchip: two lines\n"


def test_doctor_says_what_is_missing(monkeypatch, tmp_path):
    from onchip.analysis.roofline import Ceilings, Costs
    from onchip.planning import doctor

    costs = Costs(((1_000_000, 50.0),), 2.0, 4, 16.0, 0.5)
    made_up = Ceilings("proc", 12.0, {"float32": 34.0}, 5.0, "made up", gpu=False, costs=costs)
    monkeypatch.setattr(doctor, "ceilings", lambda refresh: [made_up])
    monkeypatch.setattr(doctor, "version", lambda name: None)
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "c"))
    out = runner.invoke(cli.app, ["doctor"]).output
    for part in ("copy 12 GB/s", "34 GFLOP/s", "C++ compiler", "not installed", "1 MB 20 GB/s"):
        assert part in out
    assert Path(tmp_path / "c").is_dir()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "file" / "c"))
    assert dict((r[0], r[1]) for r in doctor.examine())["cache folder"] == "unusable"


def test_doctor_tries_triton_and_asks_the_driver(monkeypatch, tmp_path):
    from onchip.errors import CompilerError, DeviceError
    from onchip.planning import doctor

    monkeypatch.setattr(doctor, "build_all", lambda sources, gpu: [CompilerError("it died")])
    monkeypatch.setattr(doctor, "triton_version", lambda: "3.8.0")
    assert doctor._triton() == ("Triton", "3.8.0, builds nothing", "it died")
    monkeypatch.setattr(doctor.cuda, "build_all", lambda sources, gpu: [CompilerError("it died")])
    monkeypatch.setattr(doctor.cuda, "nvrtc_version", lambda: "NVRTC 13.0")
    assert doctor._nvrtc() == ("NVRTC", "NVRTC 13.0, builds nothing", "it died")

    def version(pointer):
        pointer._obj.value = 13010
        return 0

    monkeypatch.setattr(doctor, "driver", lambda: types.SimpleNamespace(cuDriverGetVersion=version))
    assert "for CUDA 13.1" in doctor._driver()[1]

    def missing():
        raise DeviceError("no libcuda")

    monkeypatch.setattr(doctor, "driver", missing)
    assert doctor._driver()[1] == "not installed"


def test_a_kernel_of_many_operators_has_a_file(tmp_path):
    path = cli._write_source(tmp_path, "k3_" + "tanh+" * 100, "text")
    assert path.read_text() == "text"
    assert path.name.startswith("k3_tanh_tanh")


def test_cache_shows_and_clears(monkeypatch, tmp_path):
    import time

    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "c"))
    assert "all" in runner.invoke(cli.app, ["cache"]).output  # an empty one
    for kind, name, days in (("cpp", "a.so", 0), ("cpp", "a.json", 0), ("choices", "b.json", 9)):
        path = tmp_path / "c" / kind / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 2**19)
        os.utime(path, (time.time() - days * 86400 - 60,) * 2)
    out = runner.invoke(cli.app, ["cache"]).output
    rows = [line.split("│")[1:4] for line in out.splitlines() if "│" in line]
    found = {r[0].split(":")[0].strip(): (r[1].strip(), r[2].strip()) for r in rows}
    assert found["cpp"] == ("1", "1.0 MiB")
    assert found["choices"] == ("1", "0.5 MiB")
    assert found["triton"] == ("0", "0.0 MiB")
    assert found["all"] == ("2", "1.5 MiB")
    assert str(tmp_path / "c") in out
    done = runner.invoke(cli.app, ["cache", "clear", "--older-than", "5"])
    assert "removed 1 entries, 0.5 MiB; 1 entries left" in done.output
    assert not (tmp_path / "c" / "choices" / "b.json").exists()
    assert "removed 1 entries, 1.0 MiB; 0" in runner.invoke(cli.app, ["cache", "clear"]).output
