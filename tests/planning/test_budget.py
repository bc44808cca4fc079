"""The budget bounds building and measuring, and the report says what it left out and what it was
for."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import onchip
from onchip.planning import assess, building, decide
from onchip.planning.assess import EAGER, FUSED, Outcome
from onchip.planning.building import build_within
from onchip.planning.records import load_record
from onchip.report.build import compile_summary
from onchip.report.text import closing
from onchip.settings import Settings


class Compiler:
    """Takes a second for each slice, on a clock of its own."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.slices = 100.0, []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr("os.cpu_count", lambda: 1)

    def build_all(self, candidates):
        self.now += 1
        self.slices.append(list(candidates))
        return [f"built {c}" for c in candidates]


@pytest.mark.parametrize(
    ("must", "seconds", "built"),
    [
        (0, 10.0, 12),  # all
        (0, 1.5, 8),  # the second slice was begun in time
        (0, -1.0, 4),  # one slice at least
        (6, -1.0, 8),  # what must be, up to the end of its slice
        (12, -1.0, 12),
    ],
)
def test_candidates_beyond_the_budget_are_not_built(monkeypatch, must, seconds, built):
    compiler = Compiler(monkeypatch)
    wanted = [(n, f"c{n}") for n in range(12)]
    done = []
    found = build_within(
        compiler, wanted[:must], wanted[must:], 100.0 + seconds, lambda *at: done.append(at)
    )
    assert found == {n: f"built c{n}" for n in range(built)}
    assert [len(s) for s in compiler.slices] == [building.AT_ONCE] * (built // building.AT_ONCE)
    assert done == [(n, 12) for n in range(0, built, building.AT_ONCE)]


class Two(nn.Module):
    """Two kinds of regions: one operator is the library's."""

    def forward(self, x):
        a, _ = torch.sort(torch.softmax(x * 2, -1))
        return torch.tanh(a) + 1


X = torch.linspace(-1, 1, 256 * 64).view(256, 64)


@torch.no_grad()
def program_of(monkeypatch, tmp_path, **settings):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "cache"))
    return onchip.compile(Two(), (X,), settings=Settings(**settings))


def test_without_time_the_library_runs_and_the_report_says_so(monkeypatch, tmp_path):
    program = program_of(monkeypatch, tmp_path, budget_s=0.0)
    assert not program.sources
    with torch.no_grad():
        torch.testing.assert_close(program(X), Two()(X))
    planned = program.compiled[-1].planned
    kinds = {u.key: (u, v) for _, u, v, _ in planned.steps_of if u.candidates}
    assert len(kinds) == 2
    assert all(v.left_out >= 1 and v.library_us is None for _, v in kinds.values())
    assert all(load_record(k) is None for k in kinds)  # more time may find more
    assert {d.rule for d in planned.decisions} >= {"NO_TIME"}
    text = next(d.text for d in planned.decisions if d.rule == "NO_TIME")
    assert "budget_s left no time" in text
    report = program.report()
    assert report.compile.kernels_left_out == sum(v.left_out for _, v in kinds.values())
    assert "left out: Settings.budget_s" in closing(report)


def test_with_time_nothing_is_left_out(monkeypatch, tmp_path):
    program = program_of(monkeypatch, tmp_path, budget_s=600.0)
    assert program.report().compile.kernels_left_out == 0
    assert "left out" not in closing(program.report())


def test_what_was_not_built_is_counted_in_the_verdict(monkeypatch, tmp_path):
    """Of two variants of each kind only the first is built."""
    real = decide.build_within

    def first_ones(generator, must, may, end, progress):
        return real(generator, must, [(k, c) for k, c in may if k[1] == 0], end, progress)

    monkeypatch.setattr(decide, "build_within", first_ones)
    program = program_of(monkeypatch, tmp_path, budget_s=600.0)
    steps = program.compiled[-1].planned.steps_of
    found = [(unit, verdict) for _, unit, verdict, _ in steps if unit.candidates]
    assert found
    for unit, verdict in found:
        assert verdict.left_out == len(unit.candidates) - 1
        assert len(verdict.times_us) == 1


def test_a_budget_is_part_of_a_lock_files_choices(monkeypatch, tmp_path):
    """What was left out is repeated as well."""
    path = str(tmp_path / "plan.lock")
    program_of(monkeypatch, tmp_path, budget_s=0.0, lock=path)
    again = program_of(monkeypatch, tmp_path, budget_s=600.0, lock=path)
    assert not again.sources


# ---- what it was for ---------------------------------------------------------------------------


def test_seconds_for_each_microsecond_saved(monkeypatch, tmp_path):
    program = program_of(monkeypatch, tmp_path)
    compiled = replace(
        program.compiled[-1], seconds=3.0, outcome=Outcome(FUSED, {FUSED: 50.0, EAGER: 200.0})
    )
    found = compile_summary(compiled, 200.0, 50.0)
    assert found.seconds_per_us_saved == pytest.approx(0.02)
    assert found.pays_off_after == 20_000  # 3 s / 150 us
    for eager_us, program_us in ((50.0, 50.0), (50.0, 200.0), (None, 1.0), (1.0, None)):
        none = compile_summary(compiled, eager_us, program_us)
        assert (none.seconds_per_us_saved, none.pays_off_after) == (None, None)
    report = replace(program.report(), compile=found)
    assert "0.02 s for each µs saved, paid off after 20,000 calls" in closing(report)


# ---- the race ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fused_ms", "count", "form"),
    [(1.0, 7, FUSED), (2.9, 7, FUSED), (9.0, 7, EAGER)],
)
def test_a_clear_winner_is_timed_less_often(monkeypatch, fused_ms, count, form):
    now, calls = [0.0], []

    def takes(ms):
        def run():
            calls.append(ms)
            now[0] += ms / 1e3

        return run

    with monkeypatch.context() as m:
        m.setattr(time, "perf_counter", lambda: now[0])
        found = assess.race(takes(3.0), takes(fused_ms), lambda: takes(9.5))
    assert found.form == form
    assert calls.count(fused_ms) == count  # one unmeasured


def test_the_heaviest_regions_are_measured_first(monkeypatch, tmp_path):
    class Sizes(nn.Module):
        def forward(self, x):
            small, _ = torch.sort(torch.tanh(x[:2]) + 1, -1)
            return small, torch.softmax(x * 2, -1)

    measured, real = [], decide.tune
    monkeypatch.setattr(
        decide, "tune", lambda region, *rest: measured.append(region) or real(region, *rest)
    )
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "cache"))
    with torch.no_grad():
        onchip.compile(Sizes(), (X,), settings=Settings(budget_s=600.0))
    sizes = [sum(t.numel for t in r.outputs) for r in measured]
    assert len(sizes) >= 2
    assert sizes[0] == max(sizes) == X.numel()
