"""Folds, rows and phases of generated Triton kernels, every variant of each program.

Interpreted in a child process, against the expressions in float64; and compiled for three
generations of GPUs. Programs that share a row take turns in random order at every atomic operation.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.triton_jobs import Job, interpret, job_of, staged_of
from tests.fusion.harness import Program, close, op, program, value

from onchip.backends.nvidia.build import Built
from onchip.backends.triton.build import build_all
from onchip.backends.triton.kernel import emit_kernel
from onchip.backends.triton.phases import MOST_IN_CLUSTER, MOST_SHARING
from onchip.backends.triton.source import TritonSource, Variant
from onchip.backends.triton.tiles import variants
from onchip.fusion.machine import GPUS
from onchip.fusion.refusal import Refusal
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor
from onchip.ops.registry import OPERATORS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the triton package is not installed"
)
H200 = GPUS["h200"]
BF16 = DType.BF16
Shape = tuple[int, ...]


def softmax(shape: Shape, dtype: DType = DType.F32, dim: int = -1) -> Program:
    return program([op("softmax.int", value(shape, dtype), dim)])


def layer_norm(shape: Shape, dtype: DType = DType.F32) -> Program:
    w, b = value(shape[-1:], dtype, seed=2), value(shape[-1:], dtype, seed=3)
    return program([op("layer_norm", value(shape, dtype), shape[-1:], w, b)])


def group_norm(shape: Shape, groups: int) -> Program:
    x, (w, b) = value(shape), (value(shape[1:2], seed=s) for s in (1, 2))
    return program([op("silu", op("group_norm", x, groups, w, b, 1e-5))])


def mean_deviation(shape: Shape) -> Program:
    """Two folds, the second about the first in a form that is not taken apart: two barriers."""
    x = value(shape)
    away = op("sub.Tensor", x, op("mean.dim", x, [-1], True))
    return program([op("div.Tensor", away, op("mean.dim", op("abs", away), [-1], True))])


def channels_last(shape: Shape) -> Shape:
    _, c, h, w = shape
    return (c * h * w, 1, w * c, c)


def batch_norm(shape: Shape, last: bool = False) -> Program:
    """Batch statistics, normalised and through ReLU, and the running statistics."""
    x = value(shape)
    four = [value(shape[1:2], seed=s, low=0.5) for s in (1, 2, 3, 4)]
    name = "aten._native_batch_norm_legit_functional.default"
    y, _, _, *running = OPERATORS[name](x, *four, True, 0.1, 1e-5)
    y = op("relu", y)
    strides = {t: channels_last(shape) for t in (x, y)} if last else {}
    return program([y, *running], strides=strides)


def cross_entropy(rows: int, classes: int) -> Program:
    target = np.random.default_rng(0).integers(0, classes, rows)
    x, t = value((rows, classes)), value((rows,), DType.I64, like=target)
    return program([op("cross_entropy_loss", x, t)])


def fold(name: str, shape: Shape, *args: object) -> Program:
    return program([op(name, value(shape), *args)])


def transposed(n: int, m: int) -> Program:
    x, y = value((n, m)), value((m, n), seed=1)
    return program([op("add.Tensor", op("transpose.int", x, 0, 1), y)])


def max_pool(shape: Shape) -> Program:
    x = value(shape, high=-1.0)
    y = op("max_pool2d", x, [3, 3], [2, 2], [1, 1])
    return program([y], strides={x: channels_last(shape), y: channels_last(y.shape)})


def depthwise(shape: Shape) -> Program:
    """A 7x7 window, and a layer norm over the channels."""
    c = shape[1]
    x, k = value(shape), value((c, 1, 7, 7), seed=1)
    w, b, bias = (value((c,), seed=s) for s in (2, 3, 4))
    y = op("conv2d", x, k, bias, [1, 1], [3, 3], [1, 1], c)
    y = op("layer_norm", op("permute", y, [0, 2, 3, 1]), (c,), w, b)
    return program([y], strides={x: channels_last(shape)})


def scaled(shape: Shape, axis: int) -> Program:
    """A value for each element of one axis, broadcast along the others."""
    like = tuple(n if d == axis else 1 for d, n in enumerate(shape))
    return program([op("relu", op("mul.Tensor", value(shape), value(like, seed=1)))])


def strided(n: int, m: int) -> Program:
    """Every second column of a wider array."""
    x = value((n, m))
    return program([op("softmax.int", x, -1)], strides={x: (3 * m, 2)})


LONG_CHAIN = 60  # operators


def chain(length: int, shape: Shape) -> Program:
    """Pointwise operators in a row, each third one a cosine, that read one from far back, too."""
    values = [value(shape), op("tanh", value(shape, seed=1))]
    for step in range(length):
        last, back = values[-1], values[max(0, len(values) - 9)]
        values.append(
            op("cos", last)
            if step % 3
            else op("mul.Tensor" if step % 2 else "sub.Tensor", last, back)
        )
    return program([values[-1]])


PROGRAMS: dict[str, Callable[[], Program]] = {
    "softmax": lambda: softmax((7, 311)),
    "softmax of one row": lambda: softmax((1, 4096)),
    "softmax of columns": lambda: softmax((61, 37), dim=0),
    "strided softmax": lambda: strided(5, 83),
    "bfloat16 layer norm": lambda: layer_norm((9, 768), BF16),
    "long prime softmax": lambda: softmax((3, 65537)),
    "long softmax": lambda: softmax((2, 65536)),
    "long layer norm": lambda: layer_norm((2, 40000)),
    "long bfloat16 layer norm": lambda: layer_norm((2, 49152), BF16),
    "group norm": lambda: group_norm((2, 6, 64, 128), 2),
    "odd group norm": lambda: group_norm((1, 6, 97, 61), 2),
    "mean deviation": lambda: mean_deviation((2, 40960)),
    "batch norm": lambda: batch_norm((8, 6, 24, 40)),
    "batch norm of primes": lambda: batch_norm((11, 3, 31, 29)),
    "batch norm, channels-last": lambda: batch_norm((8, 6, 24, 40), last=True),
    "cross-entropy": lambda: cross_entropy(3, 40000),
    "sum of columns": lambda: fold("sum.dim_IntList", (8191, 37), [0]),
    "sum of wide columns": lambda: fold("sum.dim_IntList", (257, 512), [0]),
    "sum of rows": lambda: fold("sum.dim_IntList", (5, 20011), [1]),
    "sum of everything": lambda: fold("sum", (257, 513)),
    "maximum of everything": lambda: fold("max", (257, 513)),
    "mean of a row": lambda: fold("mean", (1, 131072)),
    "long log-sum-exp": lambda: fold("logsumexp", (2, 50000), [1]),
    "transpose and add": lambda: transposed(67, 129),
    "max pool": lambda: max_pool((2, 24, 13, 11)),
    "depthwise and layer norm": lambda: depthwise((1, 24, 9, 11)),
    "scaled channels": lambda: scaled((3, 5, 49), 1),
    "scaled last axis": lambda: scaled((67, 129), 1),
    "long chain": lambda: chain(LONG_CHAIN, (5, 997)),
    "empty": lambda: fold("sum.dim_IntList", (0, 5), [0]),
}

JOINED = ("long softmax", "long layer norm", "long bfloat16 layer norm", "group norm")
TWO_BARRIERS = "mean deviation"
MOST = 3  # variants of each program


@dataclass(frozen=True, eq=False)
class Case:
    program: Program
    strides: dict[Tensor, Shape]
    ways: list[tuple[Variant, TritonSource]]


def case(p: Program, interpreted: bool = True) -> Case:
    staged, strides = staged_of(p)
    found = variants(staged, strides, H200)
    assert not isinstance(found, Refusal), f"refused: {found}"
    ways = []
    older = variants(staged, strides, GPUS["a100"])  # no clusters
    assert not isinstance(older, Refusal)
    for v in found[:MOST] + [v for v in older if v.options.joined][:MOST]:
        source = emit_kernel(v.nest, strides, replace(v.options, interpret=interpreted))
        assert not isinstance(source, Refusal), f"{v.label} is refused: {source}"
        ways.append((v, source))
    return Case(p, strides, ways)


def job(name: str, c: Case, source: TritonSource) -> Job:
    return job_of(name, c.program, c.strides, source)


CASES: dict[str, Case] = {}


def made(name: str) -> Case:
    if name not in CASES:
        CASES[name] = case(PROGRAMS[name]())
    return CASES[name]


def check(c: Case, got: list[torch.Tensor] | str, what: str) -> None:
    if isinstance(got, str):
        pytest.fail(f"{got}\n{what}")
    close([x.float().numpy() if x.is_floating_point() else x.numpy() for x in got], c.program, what)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, list]:
    cases = {name: made(name) for name in PROGRAMS}
    jobs = [job(name, c, source) for name, c in cases.items() for _, source in c.ways]
    got = interpret(jobs, tmp_path_factory.mktemp("rows"))
    out: dict[str, list] = {name: [] for name in PROGRAMS}
    for j, x in zip(jobs, got, strict=True):
        out[j.name].append(x)
    return out


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_variant_agrees_with_float64(name, results) -> None:
    c = made(name)
    for (v, source), got in zip(c.ways, results[name], strict=True):
        check(c, got, f"{name}: {v.label}\n{source.text}")


# ---- rows that programs share ------------------------------------------------------------------


def joined(name: str) -> list[tuple[Variant, TritonSource]]:
    return [(v, s) for v, s in made(name).ways if v.options.joined]


@pytest.mark.parametrize("name", JOINED)
def test_a_long_row_is_read_once_in_one_launch(name) -> None:
    ways = joined(name)
    assert len(ways) >= 2
    for _, source in ways:
        assert len(source.launches) == 1
        assert len(re.findall(r"tl.load\(in0", source.text)) == 1


def test_a_row_of_half_types_stays_packed_in_one_program() -> None:
    """As stored between two folds: each widens it anew, and it is read from memory once."""
    v, source = case(softmax((2, 65536), BF16), interpreted=False).ways[0]
    assert v.options.packed
    assert not v.options.joined
    assert v.options.warps == 32
    assert source.text.count("x0 = again(x0)") == 2
    assert len(re.findall(r"tl.load\(in0", source.text)) == 1
    assert not any(
        w.options.packed for w, _ in case(softmax((2, 65536))).ways if not w.options.joined
    )


def test_a_fold_of_some_thousand_lookups_is_shared() -> None:
    """Each reads a row of its own: one program would wait for thousands of pages."""
    at = value((8192, 1), DType.I64, like=np.arange(8192)[:, None] % 3)
    p = program([op("sum", op("gather", value((8192, 3)), 1, at))])
    _, source = case(p).ways[0]
    assert source.launches[0].programs >= 8


def test_two_folds_that_depend_on_each_other_have_two_barriers() -> None:
    for v, source in joined(TWO_BARRIERS):
        barriers = 0 if v.options.cluster else 2
        assert sum(w.zeroed for w in source.workspace) == barriers
        assert source.text.count("while") == barriers
        assert len(re.findall(r"= (both_)?of_cluster\(", source.text)) == 2 - barriers
    assert {v.options.cluster for v, _ in joined(TWO_BARRIERS)} == {False, True}


def test_programs_of_a_row_are_a_cluster_where_the_gpu_has_them() -> None:
    for name in JOINED:
        for v, source in joined(name):
            chunks = v.nest.root.loops[-2].extent
            assert source.launches[0].cluster == (chunks if v.options.cluster else 1)
            assert source.launches[0].programs % chunks == 0
            assert not v.options.cluster or chunks <= MOST_IN_CLUSTER
    region, strides = staged_of(PROGRAMS["long softmax"]())
    older = variants(region, strides, GPUS["a100"])
    assert not isinstance(older, Refusal)
    assert any(v.options.joined for v in older)
    assert not any(v.options.cluster for v in older)


def test_few_programs_wait_for_each_other() -> None:
    for name in (*JOINED, TWO_BARRIERS):
        for v, _ in joined(name):
            assert 2 <= v.nest.root.loops[-2].extent <= MOST_SHARING


FAULTS = {
    "one program's values for all of its cluster": (r"both_of_cluster\((.*), ranks0\)", r"\1"),
    "nobody waits": (r"while .*\n\s+pass\n", ""),
    "one program is not waited for": (r"< 8:", "< 7:"),
    "the counter is left": (r"tl.store\(row0, 0\)", "pass"),
    "partial results of another row": (r"tl.load\(part1 \+ \((.*?)\)", r"tl.load(part1 + (\1 * 0)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_barrier_is_noticed(fault, tmp_path) -> None:
    c = made("long softmax")
    old, new = FAULTS[fault]
    source = next(
        s
        for v, s in joined("long softmax")
        if v.nest.root.loops[-2].extent == 8 and v.options.cluster == ("cluster" in fault)
    )
    text, count = re.subn(old, new, source.text)
    assert count
    (got,) = interpret([job(fault, c, replace(source, text=text))], tmp_path)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(c, got, fault)


# ---- the compiled binary -----------------------------------------------------------------------

COMPILED = {
    "softmax": lambda: softmax((2048, 4096), BF16),
    "long softmax": lambda: softmax((2, 65536), BF16),
    "sum of columns": lambda: fold("sum.dim_IntList", (8192, 512), [0]),
    "max pool": lambda: max_pool((8, 64, 56, 56)),
}


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200"])
def test_compiled_without_spills(gpu, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    sources = [case(make(), interpreted=False).ways[0][1] for make in COMPILED.values()]
    for name, built in zip(COMPILED, build_all(sources, GPUS[gpu]), strict=True):
        assert isinstance(built, Built), f"{name}: {built}"
        assert built.over_budget(GPUS[gpu]) is None
        assert all(r.spills == 0 for r in built.resources), f"{name}: {built.resources}"


def test_a_thread_of_a_long_chain_has_few_elements() -> None:
    """Its text grows with both: 32 elements of 60 operators would take the compiler minutes."""
    staged, strides = staged_of(chain(LONG_CHAIN, (1 << 14, 997)))
    short, its_strides = staged_of(chain(3, (1 << 14, 997)))
    each = {}
    for name, s, at in (("long", staged, strides), ("short", short, its_strides)):
        found = variants(s, at, H200)
        assert not isinstance(found, Refusal)
        each[name] = [
            v.options.lanes * math.prod(v.nest.tile) / (32 * v.options.warps) for v in found
        ]
    assert max(each["long"]) <= 4
    assert max(each["short"]) >= 16
