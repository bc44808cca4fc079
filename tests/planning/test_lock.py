"""A lock file: the same program again, without measuring, or an error that says what differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import onchip
from onchip.errors import LockError
from onchip.planning import assess, timing, tuner
from onchip.planning.lock import OUTCOME, Lock, source_hash
from onchip.planning.records import load_record, store_record
from onchip.settings import Settings


class Tiny(nn.Module):
    def __init__(self, operator=torch.relu) -> None:
        super().__init__()
        self.w, self.operator = nn.Parameter(torch.linspace(-1, 1, 24)), operator

    def forward(self, x):
        return torch.softmax(self.operator(x * self.w) * 2 + 1, -1)


X = torch.linspace(-1, 1, 64 * 24).view(64, 24)


@pytest.fixture
def fresh(monkeypatch, tmp_path) -> None:
    """An empty cache folder."""
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "empty"))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A program compiled with a cache and a lock file of its own: both folders, and the program."""
    folder = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as m:
        m.setenv("ONCHIP_CACHE", str(folder / "cache"))
        return folder, compiled(folder / "plan.lock")


@pytest.fixture
def first(written):
    return written[1]


@pytest.fixture
def path(written, tmp_path, monkeypatch) -> Path:
    """A copy of that lock file, beside a copy of that cache."""
    folder, _ = written
    shutil.copytree(folder / "cache", tmp_path / "cache")
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copy(folder / "plan.lock", tmp_path))


@torch.no_grad()
def compiled(path: Path, x=X, model=None, **settings):
    return onchip.compile(model or Tiny(), (x,), settings=Settings(lock=str(path), **settings))


def nothing_may_be_timed(monkeypatch) -> None:
    def measured(*_: object, **__: object) -> None:
        pytest.fail("something was measured")

    for module, name in ((timing, "_rounds"), (tuner, "fastest"), (assess, "rounds")):
        monkeypatch.setattr(module, name, measured)


def books(program) -> tuple:
    planned = program.compiled[-1].planned
    verdicts = tuple((u.key, v) for _, u, v, _ in planned.steps_of)
    return program.sources, program.source, verdicts, program.compiled[-1].outcome


def test_a_second_compilation_measures_nothing_and_is_the_same(path, first, fresh, monkeypatch):
    text = path.read_text()
    nothing_may_be_timed(monkeypatch)
    second = compiled(path)
    assert books(second) == books(first)
    assert second.sources
    assert second.compiled[-1].planned.built > 0  # the cache was empty
    assert path.read_text() == text
    with torch.no_grad():
        assert torch.equal(second(X), first(X))


def test_the_file_decides_and_not_the_cache(path, first, monkeypatch):
    for key in json.loads(path.read_text())["choices"]:
        record = load_record(key)
        assert record is not None
        store_record(key, {**record, "kind": "library"})
    with monkeypatch.context() as m:
        nothing_may_be_timed(m)
        assert books(compiled(path)) == books(first)
    path.unlink()
    assert not compiled(path).sources  # as the cache says


def test_a_warm_cache_gives_the_same_file(path, tmp_path, monkeypatch):
    nothing_may_be_timed(monkeypatch)
    compiled(tmp_path / "again.lock")
    assert (tmp_path / "again.lock").read_text() == path.read_text()


def test_the_file_is_for_people(path, tmp_path):
    text = path.read_text()
    held = json.loads(text)
    assert text == json.dumps(held, indent=1, sort_keys=True) + "\n"
    assert str(tmp_path) not in text
    assert "/" not in text.replace(held["made_with"].get("compiler", "-"), "")
    (program,) = held["programs"].values()
    assert program["inputs"] == "64x24 float32"
    assert program["outcome"]["record"]["form"] in ("fused", "library", "eager")
    kernels = [s for s in program["steps"] if "source" in s]
    assert kernels
    for k in kernels:
        record = held["choices"][k["region"]]["record"]
        assert record["times_us"][k["choice"]] == pytest.approx(record["kernel_us"], rel=0.5)
        assert held["choices"][k["region"]]["operators"] == k["kernel"]


def test_the_sources_hash_is_that_of_the_code(path, first):
    (held,) = json.loads(path.read_text())["programs"].values()
    written = [s["source"] for s in held["steps"] if "source" in s]
    assert written == [source_hash(t) for t in first.sources.values()]
    (text, *_) = first.sources.values()
    assert source_hash("// another place\n" + text) == source_hash(text)
    assert source_hash(text + "int more;\n") != source_hash(text)


def test_shapes_share_a_file_and_an_unknown_one_is_refused(path, monkeypatch):
    path.unlink()
    first = compiled(path)
    with torch.no_grad():
        first(X[:32])
    held = json.loads(path.read_text())
    assert sorted(p["inputs"] for p in held["programs"].values()) == [
        "32x24 float32", "64x24 float32",
    ]  # fmt: skip
    nothing_may_be_timed(monkeypatch)
    second = compiled(path, X[:32])
    with torch.no_grad():
        assert torch.allclose(second(X), Tiny()(X), atol=1e-6)
        with pytest.raises(LockError, match=r"no choices for the inputs 8x24 float32, only for"):
            second(X[:8])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch": "1.0"}, r"made with torch 1\.0 \(here \d"),
        ({"onchip": "9.9"}, r"made with onchip 9\.9 \(here"),
        ({"code": "0"}, r"code 0 \(here \w+\)"),
        ({"device": "another"}, r"device another \(here"),
        ({"threads": "99"}, r"threads 99 \(here"),
        ({"settings": {"numerics": "eager"}}, r"settings\.numerics eager \(here fast\)"),
    ],
)
def test_another_version_device_or_setting_is_named(path, change, message):
    held = json.loads(path.read_text())
    for k, v in change.items():
        held["made_with"][k] = held["made_with"][k] | v if isinstance(v, dict) else v
    path.write_text(json.dumps(held))
    with pytest.raises(LockError, match=message) as error:
        compiled(path)
    assert "delete the file" in str(error.value)
    assert str(path) in str(error.value)


def test_settings_that_choose_are_compared_and_others_are_not(path):
    compiled(path, budget_s=1.0, eager_calls=2)
    with pytest.raises(LockError, match=r"settings\.winograd True \(here False\)"):
        compiled(path, winograd=False)


def test_another_model_is_refused(path):
    with pytest.raises(LockError, match="another model with the inputs 64x24 float32"):
        compiled(path, model=Tiny(torch.tanh))


def change_regions(held: dict) -> None:
    held["choices"] = {f"x{k}": v for k, v in held["choices"].items()}


def change_outcome(held: dict) -> None:
    for p in held["programs"].values():
        p["outcome"]["key"] = OUTCOME + "another"


def change_source(held: dict) -> None:
    for p in held["programs"].values():
        next(s for s in p["steps"] if "source" in s)["source"] = "0"


def change_candidate(held: dict) -> None:
    for c in held["choices"].values():
        c["record"] |= {"index": 77, "token": {}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_regions, r"does not decide how .* runs \(region \w+\)"),
        (change_outcome, "does not decide which form of the program ships"),
        (change_source, r"step \d+ of 64x24 float32 source '0' \(here '\w+'\)"),
        (change_candidate, r"step \d+ of 64x24 float32 .*\(here"),
    ],
)
def test_what_does_not_fit_is_an_error_and_not_measured(path, change, message, monkeypatch):
    held = json.loads(path.read_text())
    change(held)
    path.write_text(json.dumps(held))
    nothing_may_be_timed(monkeypatch)
    with pytest.raises(LockError, match=message):
        compiled(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "can't be read"),
        ("[]", "not a lock file"),
        ('{"format": 99, "made_with": {}, "programs": {}, "choices": {}}', "not a lock file"),
    ],
)
def test_a_damaged_file_is_an_error(path, text, message):
    path.write_text(text)
    with pytest.raises(LockError, match=message):
        compiled(path)
    assert path.read_text() == text


def test_a_folder_that_can_not_be_written_is_an_error(tmp_path):
    with pytest.raises(LockError, match="can't be written"):
        compiled(tmp_path / "nowhere" / "plan.lock")


def test_a_compilation_that_fails_leaves_nothing_in_the_file(path, monkeypatch):
    path.unlink()
    program = compiled(path)
    with monkeypatch.context() as m, torch.no_grad():
        m.setattr(assess, "settle", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            program(X[:16])
    with torch.no_grad():
        program(X[:32])
    inputs = sorted(p["inputs"] for p in json.loads(path.read_text())["programs"].values())
    assert inputs == ["32x24 float32", "64x24 float32"]


def test_graph_choices_are_written_and_must_be_repeated(path):
    path.unlink()
    lock = Lock(str(path))
    lock._mine.current = "p"
    lock.held["programs"]["p"] = lock._mine.program = {"graph": None}
    choice = {"form": "early", "copying": True, "text": "one CUDA graph", "replayed_us": 0.1}
    lock.settle_graph(choice)
    again = Lock(str(path))
    again._mine.current = "p"
    assert again.graph == choice
    again.settle_graph(choice)
    with pytest.raises(LockError, match=r"can't be repeated \(no CUDA graph\)"):
        again.settle_graph({**choice, "text": "no CUDA graph"})
