"""Operands of the engine beside the usual: weights whose features lie innermost, as the matrix unit
addresses them, and float32 that is split into two TF32 (what ptxas makes of it, and whose registers
it takes)."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.cuda_problems import case_of
from tests.backends.cuda_threads import run
from tests.backends.engine_compile import compiled
from tests.backends.engine_problems import Shape, Values, contraction, expected, values_of
from tests.backends.engine_simulator import Box, Shared, Simulator, fetched, permuted
from tests.modules import Fn
from torch import nn

from onchip.backends.cuda.geometry import BLOCK, STEP_BYTES, Geometry
from onchip.backends.cuda.kernel import emit
from onchip.backends.cuda.limits import refusal
from onchip.backends.cuda.model import configurations
from onchip.backends.cuda.problem import Config, Problem
from onchip.backends.cuda.registers import HELPING, REGISTERS, available, held, launched
from onchip.backends.cuda.source import CudaSource
from onchip.fusion.layout import contiguous
from onchip.fusion.machine import GPUS
from onchip.fusion.refusal import Refusal, Rule

# ---- features innermost ------------------------------------------------------------------------


def inner(s: Shape) -> tuple[Problem, Values]:
    """A product with w [batch, channels, features]; values.w is [batch, features, 1, channels]."""
    p = contraction(replace(s, constant=False))
    steps = {"w_step": s.features, "w_batch": s.features * s.channels}
    return replace(p, w_features_inner=True, **steps), values_of(p)


class FeaturesInner(Simulator):
    """Tiles of weights in blocks of 64 features, a row of 128 bytes for each channel; operands by
    the canonical layout of features innermost (PTX ISA, matrix descriptor: MN-major, 128 bytes
    permuted): 8 channels are 8 rows, groups of 8 channels lie the descriptor's stride apart."""

    def fetch_weights(self, shared: Shared, n: int, rank: int, c: int, tap: int, slot: int) -> None:
        g, p, programs = self.g, self.p, self.c.w_shared
        memory = self.v.w[:, :, 0].transpose(0, 2, 1).ravel()
        nbytes, share = 0, g.chunk // programs
        assert share % 8 == 0, "a part would begin within what is permuted"
        for block in range(g.w_copies):
            for part in range(programs):
                t = self.tile(n, part if programs > 1 else rank)
                features = t.feature + block * BLOCK + np.arange(BLOCK)
                channels = c * g.chunk + part * share + np.arange(share)
                box = Box((features, channels), (p.features, p.channels))
                values = fetched(memory, box, (1, p.w_step), t.batch * p.w_batch)
                to = self.w_start + slot * g.w_bytes + (block * programs + part) * share * g.w_row
                at = to + np.arange(share)[:, None] * g.w_row + np.arange(BLOCK) * p.size
                shared.write(permuted(at, g.w_row), values)
                nbytes += values.size * p.size
        assert nbytes == g.w_bytes, "the barrier waits for other bytes than are copied"

    def multiply(self, shared: Shared, sums: np.ndarray, w: int, x: int, tap_rows: int) -> None:
        g, row, size = self.g, self.c.row_bytes, self.p.size
        depth, apart = STEP_BYTES // size, 8 * g.w_row  # channels of an instruction; the stride
        k = np.arange(depth)
        b_rows = self.x_start + x * g.x_slot + (tap_rows + self.rows_of_columns)[:, None] * row
        for step in range(g.k_steps):
            right = shared.read(permuted(b_rows + STEP_BYTES * step + k * size, row))
            for n in range(g.w_copies):
                start = self.w_start + w * g.w_bytes + n * BLOCK * row + step * g.w_k_step
                of_channel = start + k // 8 * apart + k % 8 * g.w_row
                left = shared.read(permuted(of_channel[:, None] + np.arange(BLOCK) * size, g.w_row))
                sums[n * BLOCK : (n + 1) * BLOCK] += left.T @ right.T


INNER = {
    "two warpgroups": (Shape(0, 72, (40,), 96, (1,), batch=2), Config((32,), 0, split=2)),
    "two blocks, half rows": (
        Shape(0, 72, (40,), 136, (1,), kind="fp16"), Config((16,), 0, blocks=2, row_bytes=64)
    ),
    "quarter rows": (Shape(0, 40, (24,), 64, (1,)), Config((24,), 0, row_bytes=32)),
    "parts of four programs": (
        Shape(0, 136, (16,), 128, (1,)), Config((16,), 0, split=2, w_shared=4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INNER)
def test_features_innermost(name: str) -> None:
    shape, config = INNER[name]
    p, values = inner(shape)
    config = replace(config, x_stages=2, w_stages=2)
    assert refusal(Geometry(p, config), GPUS["h200"].shared_bytes) is None
    simulated = FeaturesInner(p, config, 8, values)
    simulated.run()
    np.testing.assert_array_equal(simulated.stored, 1)
    np.testing.assert_array_equal(simulated.results, expected(p, values))


def test_features_innermost_are_refused() -> None:
    p, _ = inner(Shape(0, 64, (64,), 64, (1,)))
    config = Config((64,), 0, x_stages=2, w_stages=2)
    shared = GPUS["h200"].shared_bytes

    def why(p: Problem, c: Config = config) -> str:
        found = refusal(Geometry(p, c), shared)
        assert found is not None
        assert found.rule is Rule.CONTRACTION_FORM
        return found.text

    assert refusal(Geometry(p, config), shared) is None
    assert why(replace(p, kind="tf32")) == "features innermost of tf32 weights"
    assert why(replace(p, kind="tf32x3")) == "features innermost of tf32x3 weights"
    assert why(replace(p, w_constant=True)) == "features innermost of constant weights"
    narrow = replace(config, row_bytes=32, w_shared=4)
    assert why(p, narrow) == "16 channels of features innermost for 4 programs"


# ---- text --------------------------------------------------------------------------------------


def source_of(p: Problem, c: Config, strides: dict) -> CudaSource:
    source = emit(p, c, GPUS["h200"], strides)
    assert isinstance(source, CudaSource), source
    return source


def checked(source: CudaSource, registers: int) -> None:
    """registers: that the kernel starts with, if its warps hand some on, or at most."""
    got = compiled(source.text)
    assert got.spilled == 0
    # C7507: registers are not handed on; C7510 to C7514: products wait for each other
    assert "C75" not in got.log, got.log
    if "REGISTERS = 0;" in source.text:
        assert got.registers <= registers
    else:
        assert got.registers == registers, "as many are handed on as there were"


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.linear(x)) + residual


LINEAR = {
    "two warpgroups": Config((128,), 0, split=2, x_stages=2, w_stages=2, r_stages=2),
    "two blocks": Config((48,), 0, blocks=2, split=2, x_stages=2, w_stages=2, r_stages=2),
    "three teams": Config((32,), 0, teams=3, x_stages=3, w_stages=4, r_stages=6),
    "one warpgroup": Config((64,), 0, x_stages=3, w_stages=4, r_stages=2),
    "input shared": Config((64,), 0, split=2, x_stages=3, w_stages=3, r_stages=2, x_shared=2),
    "weights shared": Config((64,), 0, split=2, x_stages=3, w_stages=3, r_stages=2, w_shared=2),
    "channels shared": Config((64,), 0, split=2, x_stages=3, w_stages=3, r_stages=2, k_split=4),
}


@pytest.mark.parametrize("name", LINEAR)
def test_split_linear(name: str) -> None:
    case = case_of(Linear(), torch.randn(256, 512), torch.randn(256, 512), precision="tf32x3")
    p, c = case.problem, LINEAR[name]
    assert isinstance(p, Problem), p
    assert p.kind == "tf32x3"
    checked(source_of(p, c, case.strides), launched(Geometry(p, c)))


@pytest.mark.parametrize("c", [
    Config((8, 14, 1), 1, split=2, x_stages=2, w_stages=5),
    Config((16, 8, 1), 1, split=2, x_stages=2, w_stages=5),
    Config((8, 24, 1), 1, split=2, x_stages=2, w_stages=2),
    Config((16, 2, 1), 0, row_bytes=64, x_stages=2, w_stages=2),
], ids=lambda c: c.label)  # fmt: skip
def test_split_convolution(c: Config) -> None:
    module = nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    x = torch.randn(4, 64, 56, 56).to(memory_format=torch.channels_last)
    case = case_of(module, x, precision="tf32x3")
    p = case.problem
    assert isinstance(p, Problem), p
    checked(source_of(p, c, case.strides), launched(Geometry(p, c)))


@pytest.mark.parametrize("name", INNER)
def test_features_innermost_compile(name: str) -> None:
    shape, config = INNER[name]
    p, _ = inner(shape)
    c = replace(config, x_stages=2, w_stages=2)
    tensors = (p.x, p.w, *(r.tensor for r in p.results))
    source = source_of(p, c, {t: contiguous(t.shape) for t in tensors})
    assert "p, 1, 1, 1, 0;" in source.text  # A is transposed, B is not (PTX ISA, wgmma)
    checked(source, launched(Geometry(p, c)))


# ---- on threads of this machine ----------------------------------------------------------------

FEW = replace(GPUS["h200"], multiprocessors=2)
SPLIT = {
    "two warpgroups": (Shape(0, 72, (40,), 136, (1,)), Config((32,), 0, split=2)),
    "two teams": (Shape(0, 64, (72,), 64, (1,)), Config((16,), 0, teams=2)),
    "three warpgroups": (Shape(0, 40, (24,), 192, (1,)), Config((24,), 0, split=3)),
    "two blocks": (Shape(0, 40, (16,), 128, (1,)), Config((16,), 0, blocks=2)),
}  # fmt: skip


def ran(p: Problem, c: Config, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of a product's kernel, and in float64."""
    torch.manual_seed(0)
    dtype = {2: torch.bfloat16, 4: torch.float32}[p.size]
    x = torch.randn(p.lines[0].size, p.channels).to(dtype)
    w = torch.randn(p.channels, p.features).to(dtype)
    y = torch.full((p.lines[0].positions, p.features), torch.nan, dtype=dtype)
    tensors = (p.x, p.w, p.results[0].tensor)
    source = emit(p, c, FEW, {t: contiguous(t.shape) for t in tensors})
    assert isinstance(source, CudaSource), source
    held = {p.x: x, p.w: w if p.w_features_inner else w.t().contiguous(), tensors[2]: y}
    run(source, 0, [held[t] for t in (*source.inputs, *source.outputs)], folder)
    return y, x.double() @ w.double()


@pytest.mark.parametrize("name", SPLIT)
def test_split_products(name: str, tmp_path: Path) -> None:
    shape, config = SPLIT[name]
    p = contraction(replace(shape, kind="tf32", constant=False))
    c = replace(config, x_stages=3, w_stages=3)
    y, exact = ran(replace(p, kind="tf32x3"), c, tmp_path)
    assert (y - exact).norm() / exact.norm() < 3e-7  # of one TF32 product: 3e-4


def test_features_innermost_products(tmp_path: Path) -> None:
    p, _ = inner(Shape(0, 72, (40,), 136, (1,)))
    c = Config((32,), 0, split=2, x_stages=3, w_stages=3)
    y, exact = ran(p, c, tmp_path)
    torch.testing.assert_close(y, exact.to(y.dtype), rtol=2**-7, atol=1e-3)


def test_a_batched_product_by_rows_from_its_module(tmp_path: Path) -> None:
    """Addresses that form finds, the model's first choice, the device text."""
    torch.manual_seed(0)
    a, b = torch.randn(3, 24, 128).bfloat16(), torch.randn(3, 128, 40).bfloat16()
    case = case_of(Fn(lambda s, a, b: torch.bmm(a, b)), a, b)
    p = case.problem
    assert isinstance(p, Problem), p
    assert p.w_features_inner
    found = configurations(p, FEW)
    assert isinstance(found, list), found
    source = emit(p, found[0], FEW, case.strides)
    assert isinstance(source, CudaSource), source
    y = torch.full((3, 24, 40), torch.nan, dtype=torch.bfloat16)
    held = {p.x: a, p.w: b, p.results[0].tensor: y}
    run(source, 0, [held[t] for t in (*source.inputs, *source.outputs)], tmp_path)
    exact = torch.bmm(a.double(), b.double())
    torch.testing.assert_close(y, exact.to(y.dtype), rtol=2**-7, atol=1e-3)


# ---- registers ---------------------------------------------------------------------------------


def test_registers_are_handed_on() -> None:
    """No more than a multiprocessor has are asked for, none of the others' is waited for in vain,
    and who multiplies has no less than before."""
    p = replace(contraction(Shape(0, 64, (64,), 64, (1,), kind="tf32")), kind="tf32x3")
    seen = 0
    for teams in range(1, 5):
        for split in range(1, 5):
            g = Geometry(p, Config((64,), 0, split=split, teams=teams))
            if g.threads > 1024:
                continue
            started = g.threads * launched(g)
            assert started <= REGISTERS
            if g.warpgroups > 1:
                after = 128 * (HELPING + g.warpgroups * available(g))
                assert after <= started < after + 8 * 128 * g.warpgroups
                assert launched(g) <= available(g) <= 240
                assert available(g) % 8 == HELPING % 8 == 0
                seen += 1
    assert seen > 3
    wide = Config((192,), 0, split=2)
    g = Geometry(p, replace(wide, x_stages=2, w_stages=2))
    assert (available(g), held(g)) == (232, 96 + 2 * 32 + 32 + 8)
    assert refusal(g, GPUS["h200"].shared_bytes) is None
    found = refusal(Geometry(p, Config((256,), 0, x_stages=2, w_stages=2, split=2)), 1 << 30)
    assert isinstance(found, Refusal)
    assert found.text == "232 sums a thread of 232 registers"


def test_split_input_has_room() -> None:
    """The low parts lie behind the input, from an address on where a permuted tile may start."""
    p = replace(contraction(Shape(0, 64, (64,), 64, (1,), kind="tf32")), kind="tf32x3")
    plain = Geometry(replace(p, kind="tf32"), Config((24,), 0, w_stages=2))
    g = Geometry(p, plain.config)
    assert prod(g.config.patch) * 128 == g.x_bytes == 3072
    assert g.x_slot == 2 * plain.x_slot == 2 * 3072
    assert g.x_slot // 2 % 1024 == 0
    assert g.barriers == plain.barriers + g.config.x_stages + 1
