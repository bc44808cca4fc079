"""Kernels for a GPU that is not here: every operator in one launch, figures of the compiled binary,
what was refused and why."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from onchip import cli
from onchip.analysis.roofline import datasheet
from onchip.backends.nvidia import pool
from onchip.backends.triton import build
from onchip.capture import capture
from onchip.errors import CompilerError, OnchipError
from onchip.fusion.machine import GPUS
from onchip.planning.generators import triton as generator
from onchip.report import preview as module
from onchip.report.preview import gpu_named, preview

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the triton package is not installed (torch brings it on Linux)",
)


class Sorted(torch.nn.Module):
    """A kernel, an operator that only the library has, a view, and the same kernel again."""

    def forward(self, x):
        values, _ = torch.sort(torch.relu(x + 1) * 2)
        return torch.relu(values.transpose(0, 1) + 1) * 2


@pytest.fixture
def captured(tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield capture(Sorted(), (torch.randn(128, 128),))
    pool.end_idle()


@pytest.mark.parametrize("name", ["a100", "h200"])
def test_every_operator_is_in_one_launch(name, captured):
    found = preview(captured, GPUS[name], datasheet(name))
    assert [p.row.backend for p in found] == ["triton", "library", "triton"]
    first, sort, last = found
    assert len(first.row.ops) == 3
    for p in (first, last):
        k = p.row
        assert "@triton.jit" in p.text
        assert 8 <= (k.registers or 0) <= 255
        assert (k.spills, k.shared_bytes) == (0, 0) or (k.shared_bytes or 0) > 0
        assert 0 < (k.occupancy or 0) <= 1
        assert (k.code_bytes or 0) % 16 == 0
        assert k.measured_us is None
        assert k.dram_bytes == 2 * 128 * 128 * 4
    # a node of a CUDA graph, and 131 kB
    ceilings = datasheet(name)
    assert first.row.predicted_us >= ceilings.graph_launch_us + ceilings.memory_us(
        2 * 128 * 128 * 4
    )
    assert first.row.predicted_us < 1.5 * ceilings.graph_launch_us
    assert sort.text == ""
    assert sort.row.choice == "aten.sort.default"
    assert "no expression" in sort.refused[0][1]


def test_the_next_variant_stands_in_for_one_that_cannot_be_built(captured, monkeypatch):
    real = build.build_all
    asked = []

    def failing(sources, gpu):
        made = real(sources, gpu)
        asked.append(len(sources))
        return [CompilerError("Triton died"), *made[1:]] if len(asked) == 1 else made

    # the same one twice: how many a region has is the emitter's affair
    of = generator.TritonGenerator.variants
    twice = lambda self, region, context: list(of(self, region, context))[:1] * 2  # noqa: E731
    monkeypatch.setattr(generator.TritonGenerator, "variants", twice)
    monkeypatch.setattr(generator, "build_all", failing)
    first, _, _ = preview(captured, GPUS["h200"], datasheet("h200"))
    assert first.row.backend == "triton"
    assert asked[1] == 1
    assert first.refused == ((first.row.choice, "Triton died"),)


def test_where_nothing_is_within_budget_the_library_runs(captured, monkeypatch):
    monkeypatch.setattr("onchip.backends.nvidia.resources.MOST_CODE", 16)
    found = preview(captured, GPUS["h200"], datasheet("h200"))
    assert {p.row.backend for p in found} == {"library"}
    assert len(found) == 7  # three operators of each kernel, and sort; the view launches nothing
    assert 1 <= len(found[0].refused) <= module.MOST_TRIED
    assert "KiB of machine code" in found[0].refused[0][1]


def test_names_of_gpus():
    assert gpu_named("NVIDIA H200") is GPUS["h200"]
    with pytest.raises(OnchipError, match="a100, h100, h200, b200"):
        gpu_named("l4")


# ---- the command line --------------------------------------------------------------------------

MODEL = "pipeline:conv-relu-bn-pool:2x8x16x16"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield tmp_path
    pool.end_idle()


def test_kernels_of_a_gpu_that_is_not_here(cache):
    done = CliRunner().invoke(cli.app, ["kernels", MODEL, "--device", "a100"])
    assert done.exit_code == 0, done.output
    for part in ("@triton.jit", "1 generated kernels, 0 library calls", "registers", "conv + relu"):
        assert part in done.output
    out = cache / "out"
    again = CliRunner().invoke(cli.app, ["kernels", MODEL, "--device", "a100", "--out", str(out)])
    assert again.exit_code == 0, again.output
    (source,) = out.iterdir()
    assert source.suffix == ".py"
    assert "@triton.jit" in source.read_text()
    assert "reused" in again.output


def test_analyze_shows_them_if_asked(cache):
    done = CliRunner().invoke(cli.app, ["analyze", MODEL, "--device", "b200", "--kernels"])
    assert done.exit_code == 0, done.output
    assert "roofline classes" in done.output
    assert "what would run on b200" in done.output


@pytest.mark.parametrize("command", [["kernels"], ["analyze", "--kernels"]])
def test_errors_are_one_sentence(command, cache, monkeypatch):
    done = CliRunner().invoke(cli.app, [command[0], MODEL, "--device", "l4", *command[1:]])
    assert isinstance(done.exception, OnchipError)
    assert "no kernels are generated for device 'l4'" in str(done.exception)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(build, "triton_version", build.triton_version.__wrapped__)
    done = CliRunner().invoke(cli.app, [command[0], MODEL, "--device", "h200", *command[1:]])
    assert isinstance(done.exception, OnchipError)
    assert "Triton is not installed" in str(done.exception)
