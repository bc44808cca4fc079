"""What a user can do wrong, and what never changes: one line each, the model untouched."""

import copy
import json
import os
import subprocess
import sys
import time
import warnings

import pytest
import torch

import onchip
from onchip import api, cli
from onchip.analysis.record import Interval
from onchip.errors import CaptureError, InputError, OnchipError, UnknownModel, VerificationError
from onchip.planning import assess, peers
from onchip.planning.records import record_path, store_record
from onchip.runtime.verify import Comparison, Verification
from onchip.settings import Settings


class Small(torch.nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.bn = torch.nn.BatchNorm1d(channels)
        self.bn.running_mean.uniform_(-1, 1)
        self.bn.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return torch.relu(self.bn(x)) * 2 - 1


@pytest.fixture
def small():
    torch.manual_seed(0)
    return Small().eval(), torch.randn(6, 8)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def command(cache, capsys, monkeypatch):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["onchip", *args])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code or 0, out, err.strip()

    return run


# ---- nothing of the user's changes -------------------------------------------------------------


def test_the_model_and_its_inputs_are_untouched(small):
    model, x = small
    model.train()  # batch statistics: eager changes buffers on every call
    state, y = copy.deepcopy(model.state_dict()), x.clone()
    attributes = {k: id(v) for k, v in model.__dict__.items()}
    random = torch.get_rng_state()
    with torch.no_grad():
        onchip.compile(model, (x,)).report()
    assert torch.equal(x, y)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert {k: id(v) for k, v in model.__dict__.items()} == attributes
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_training_mode_updates_buffers_once_a_call(small):
    model, x = small
    model.train()
    eager = copy.deepcopy(model)
    with torch.no_grad():
        fast = onchip.compile(model, (x,))
        assert torch.allclose(fast(x), eager(x), atol=1e-5)
    assert int(model.bn.num_batches_tracked) == 1
    assert torch.allclose(model.bn.running_mean, eager.bn.running_mean, atol=1e-6)


# ---- wrong arguments ---------------------------------------------------------------------------


def test_a_call_that_does_not_fit_says_so(small):
    model, x = small
    with torch.no_grad():
        fast = onchip.compile(model, (x,))
        with pytest.raises(InputError, match="can't be called like this"):
            fast(x, x)
        for wrong in (torch.randn(6, 9), torch.ones(6, 8, dtype=torch.int64)):
            with pytest.raises((OnchipError, RuntimeError)) as caught:
                fast(wrong)
            assert len(str(caught.value).strip().splitlines()[0]) > 20
        assert torch.allclose(fast(x), model(x), atol=1e-5)  # and goes on working


def test_another_device_is_refused(small):
    model, _ = small
    x = torch.empty(6, 8, device="meta")
    with pytest.raises(CaptureError, match=r"argument tensor 0 is on meta.*CPU and NVIDIA GPUs"):
        onchip.compile(model, (x,))
    eager = onchip.compile(model, (x,), settings=Settings(uncapturable="eager"))
    assert eager.launches is None
    for name in ("mps", "h200"):
        with pytest.raises(OnchipError, match=f"device {name}: programs are compiled for cpu"):
            onchip.optimize("pipeline:add-mul:2^4", device=name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_device_is_refused():
    for name in ("cuda", "cuda:1"):
        with pytest.raises(OnchipError, match=f"device {name}: torch .* sees no GPU"):
            onchip.optimize("pipeline:add-mul:2^4", device=name)


def test_a_model_that_depends_on_data_is_one_error():
    def branch(x):
        return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(CaptureError) as caught:
        onchip.compile(branch, (torch.ones(3),))
    assert "\n" not in str(caught.value)


def test_a_model_that_depends_on_data_can_run_eagerly():
    def branch(x):
        return x + 1 if x.sum() > 0 else x - 1

    fast = onchip.compile(branch, (torch.ones(3),), settings=onchip.Settings(uncapturable="eager"))
    with pytest.warns(UserWarning, match="onchip"):
        assert torch.equal(fast(torch.ones(3)), torch.full((3,), 2.0))
    assert fast.notes
    with pytest.raises(InputError, match="eager mode"):
        fast.report()


# ---- the command line --------------------------------------------------------------------------


def test_unknown_models_end_with_code_2(command):
    code, out, err = command("optimize", "torchvision:resnet5")
    assert (code, out) == (2, "")
    assert err.startswith("onchip: ")
    assert "resnet50" in err
    assert "\n" not in err


def test_a_model_that_can_not_be_exported_ends_with_code_2(command, tmp_path):
    file = tmp_path / "branch.py"
    file.write_text(
        "import torch\n"
        "def branch(x):\n    return x + 1 if x.sum() > 0 else x - 1\n"
        "def get_inputs():\n    return [torch.ones(3)]\n"
    )
    code, out, err = command("optimize", f"{file}:branch")
    assert (code, out) == (2, "")
    assert err.startswith("onchip: ")
    assert "\n" not in err


def test_without_a_compiler_the_library_runs_and_says_so(cache, tmp_path):
    """In a process of its own: which compiler there is, is asked once."""
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "onchip", "optimize", "pipeline:add-mul:2^10", "--json", "-"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": str(tmp_path / "empty"), "CXX": ""},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [k["backend"] for k in report["kernels"]] == ["library", "library"]
    assert any("no C++ compiler" in n for n in report["notes"])
    assert "no C++ compiler" in done.stderr
    assert report["fused"]["launches"] == 2


@pytest.mark.parametrize("blocked", ["cache", "cpp"])
def test_a_cache_that_can_not_be_used_ends_with_code_2(blocked, cache, command):
    """A file where the folder should be: also root can't write there."""
    path = cache if blocked == "cache" else cache / "cpp"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    code, out, err = command("optimize", "pipeline:add-mul:2^10")
    assert (code, out) == (2, "")
    assert "ONCHIP_CACHE" in err
    assert "\n" not in err


def test_a_damaged_cache_is_made_again(cache, small):
    model, x = small
    with torch.no_grad():
        onchip.compile(model, (x,))
        for path in (*cache.glob("cpp/*.so"), *cache.glob("choices/*")):
            path.unlink()  # the mapped library of this process must not change
            path.write_bytes(b"not what was written")
        fast = onchip.compile(model, (x,))
        assert torch.allclose(fast(x), model(x), atol=1e-5)
    assert all(json.loads(p.read_text()) for p in cache.glob("choices/*"))


# ---- never slower ------------------------------------------------------------------------------


class Clock:
    """A clock that only the functions under test advance: no load on the machine matters."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def takes(self, ms):
        def run():
            self.now += ms / 1e3

        return run


@pytest.mark.parametrize(
    ("fused", "library", "form"), [(1, 9, "fused"), (9, 1, "library"), (9, 9, "eager")]
)
def test_the_fastest_form_ships(fused, library, form, monkeypatch):
    clock = Clock()
    with monkeypatch.context() as m:
        m.setattr(time, "perf_counter", clock)
        found = assess.race(clock.takes(3), clock.takes(fused), lambda: clock.takes(library))
    assert found.form == form
    assert ("slower" in found.text) == (form != "fused")
    assert ("3.00× (3.00–3.00)" in found.text) == (form != "fused")
    assert found.times_us["eager"] == pytest.approx(3000)
    assert found.times_us["fused"] == pytest.approx(fused * 1000)


def test_an_outcome_is_measured_once(cache):
    calls = []
    for _ in range(2):
        assess.settle("program-x", lambda: calls.append(1), lambda: None, lambda: lambda: None, 0.1)
    once = len(calls)
    store_record("program-x", {"form": "nonsense"})
    assess.settle("program-x", lambda: calls.append(1), lambda: None, lambda: lambda: None, 0.1)
    assert once > 0
    assert len(calls) > once  # a damaged record is measured again
    assert json.loads(record_path("program-x").read_text())["form"] in ("fused", "library")


def test_a_slower_program_is_not_shipped(small, monkeypatch):
    model, x = small
    lost = assess.Outcome("eager", {"fused": 20.0, "library": 15.0, "eager": 10.0}, "it was slower")
    monkeypatch.setattr(assess, "settle", lambda *_, **__: lost)
    with torch.no_grad():
        fast = onchip.compile(model, (x,))
        with pytest.warns(UserWarning, match="it was slower"):
            assert torch.equal(fast(x), model(x))
    report = fast.report()
    assert "it was slower" in report.notes
    assert {k.backend for k in report.kernels} == {"library"}
    assert report.fused.launches == report.unfused.launches
    assert report.speedup == 1.0
    assert all(not d.fused for d in report.decisions)


def test_a_form_is_timed_until_its_interval_is_clear_of_1(monkeypatch):
    """In six rounds where it is; a slow program that is clearly faster needs two."""
    clock = Clock()
    calls = []

    def counted(ms):
        return lambda: (calls.append(ms), clock.takes(ms)())

    with monkeypatch.context() as m:
        m.setattr(time, "perf_counter", clock)
        found = assess.race(counted(3), counted(1), lambda: counted(9))
        assert len(calls) == 2 * (1 + 6)  # one to warm up
        assert found.ratios["fused"] == Interval(
            pytest.approx(1 / 3), *[pytest.approx(1 / 3)] * 2, 6
        )
        calls.clear()
        slow = assess.race(counted(900), counted(300), lambda: counted(9))
    assert len(calls) == 2 * (1 + 2)
    assert (slow.form, slow.ratios) == ("fused", {})


def test_a_tie_ships_the_fused_program(monkeypatch):
    """Rounds that go both ways: it is not slower beyond noise."""
    times = iter([3.0, 3.1, 2.9, 3.0] * 40)
    clock = Clock()
    with monkeypatch.context() as m:
        m.setattr(time, "perf_counter", clock)
        fused = assess.race(
            clock.takes(3), lambda: clock.takes(next(times))(), lambda: clock.takes(3), 0.0
        )
    assert fused.form == "fused"
    assert fused.ratios["fused"].low < 1 < fused.ratios["fused"].high
    assert not fused.text


# ---- verification, peers -----------------------------------------------------------------------


def test_a_wrong_program_is_not_reported():
    def verdict(error, eager, difference=0.0):
        return Verification((Comparison("output 0", difference, error, eager),), "float64")

    api.judge(verdict(2e-7, 1e-7), "m")
    with pytest.raises(VerificationError, match="output 0"):
        api.judge(verdict(1e-5, 1e-7), "m")
    with pytest.raises(VerificationError):
        api.judge(verdict(float("inf"), 1e-7), "m")
    with pytest.raises(VerificationError):
        api.judge(verdict(float("nan"), float("nan"), 0.5), "m")


def test_a_peer_that_fails_is_named(small):
    model, x = small

    def broken(module, args):
        raise RuntimeError("no such thing\nmore")

    peers.PEERS["broken"] = broken
    try:
        found, failed = peers.make_peers(model, (x,), ("broken",))
    finally:
        del peers.PEERS["broken"]
    assert found == {}
    assert failed == {"broken": "RuntimeError: no such thing"}


def test_onnxruntime_is_a_peer(small):
    pytest.importorskip("onnxruntime")
    model, x = small
    found, failed = peers.make_peers(model, (x,), ("onnxruntime",))
    assert failed == {}
    with torch.no_grad():
        (got,) = found["onnxruntime"]()
        assert torch.allclose(torch.from_numpy(got), model(x), atol=1e-5)


def test_channels_last_is_a_form_of_image_networks_only(small):
    model, x = small
    assert peers.channels_last(model, (x,)) is None
    net, images = torch.nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        call = peers.channels_last(net, (images,))
        assert torch.allclose(call(), net(images), atol=1e-5)
    assert net.weight.is_contiguous()  # the user's own stays as it is


def test_names_of_the_package():
    with pytest.raises(AttributeError):
        onchip.load  # noqa: B018
    assert issubclass(UnknownModel, OnchipError)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert onchip.Report is not None
