"""Strips of generated Triton kernels: neighbouring windows that share what they read, in every
variant that is proposed and with tiles that do not fit, interpreted against float64."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from tests.backends.triton_jobs import Job, interpret, job_of, staged_of
from tests.fusion.harness import Program, close, op, program, value

from onchip.backends.nvidia.build import Built
from onchip.backends.triton.build import build_all
from onchip.backends.triton.kernel import emit_kernel
from onchip.backends.triton.source import TritonSource, Variant
from onchip.backends.triton.tiles import variants
from onchip.backends.triton.writer import power_of_two
from onchip.fusion.machine import GPUS
from onchip.fusion.nest import build_nest
from onchip.fusion.refusal import Refusal
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor
from onchip.ops.registry import OPERATORS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the triton package is not installed"
)
H200 = GPUS["h200"]
F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
Shape = tuple[int, ...]


def last(shape: Shape, gap: int = 0) -> Shape:
    """Strides of channels-last; gap: elements behind each pixel's channels."""
    _, c, h, w = shape
    return ((c + gap) * h * w, 1, w * (c + gap), c + gap)


def window(
    shape: Shape, size: int, stride: int = 1, pad: int = 0, dilation: int = 1,
    dtype: DType = F32, norm: bool = False, residual: bool = False, gap: int = 0,
    channels_last: bool = True,
) -> Program:  # fmt: skip
    """A depthwise convolution, with what follows it."""
    c = shape[1]
    x, k, bias = value(shape, dtype), value((c, 1, size, size), dtype, 1), value((c,), dtype, 2)
    two = lambda n: [n, n]  # noqa: E731
    y = op("conv2d", x, k, bias, two(stride), two(pad), two(dilation), c)
    strides = {x: last(shape, gap)} if channels_last else {}
    if residual:
        other = value(y.shape, dtype, 5)
        strides |= {other: last(other.shape)} if channels_last else {}
        y = op("add.Tensor", other, op("relu", y))
    if norm:
        w, b = value((c,), dtype, 3), value((c,), dtype, 4)
        y = op("layer_norm", op("permute", y, [0, 2, 3, 1]), (c,), w, b)
    elif channels_last:
        strides[y] = last(y.shape)
    return program([y], strides=strides)


def pool(name: str, shape: Shape, *args: object, dtype: DType = F32) -> Program:
    x = value(shape, dtype, high=-1.0)
    y = OPERATORS[f"aten.{name}.default"](x, *args)
    results = [*y] if isinstance(y, tuple) else [y]
    return program(results, strides={t: last(t.shape) for t in (x, *results)})


PROGRAMS: dict[str, Callable[[], Program]] = {
    "7x7 and layer norm": lambda: window((1, 96, 2, 9), 7, pad=3, norm=True),
    "5x5 and layer norm of bfloat16": lambda: window((1, 24, 3, 8), 5, 1, 2, 1, BF16, norm=True),
    "layer norm of 130 channels": lambda: window((1, 130, 3, 5), 3, pad=1, norm=True),
    "layer norm of 5 channels": lambda: window((1, 5, 3, 11), 3, pad=1, norm=True),
    "layer norm of 9x9 channels": lambda: window((1, 9, 9, 9), 3, pad=1, norm=True),
    "stride 2": lambda: window((2, 24, 9, 13), 3, 2, 1, residual=True),
    "stride 2 of float16": lambda: window((1, 96, 9, 14), 3, 2, 1, 1, F16),
    "dilation 2": lambda: window((1, 5, 7, 13), 5, 1, 4, 2),
    "stride beyond the dilation": lambda: window((1, 8, 9, 19), 3, 2, 2, 3, norm=True),
    "no padding": lambda: window((2, 24, 7, 13), 3, gap=3, residual=True),
    "narrower than the window": lambda: window((1, 24, 2, 3), 7, pad=3),
    "one pixel": lambda: window((2, 24, 1, 1), 3, pad=1, norm=True),
    "channels first": lambda: window((1, 3, 9, 40), 3, pad=1, channels_last=False),
    "max pool": lambda: pool("max_pool2d", (2, 24, 9, 13), [3, 3], [2, 2], [1, 1]),
    "max pool of bfloat16": lambda: pool(
        "max_pool2d", (1, 8, 6, 7), [3, 3], [1, 1], [1, 1], dtype=BF16
    ),
    "max pool and its positions": lambda: pool(
        "max_pool2d_with_indices", (2, 24, 9, 13), [3, 3], [2, 2], [1, 1]
    ),
    "average pool": lambda: pool("avg_pool2d", (1, 40, 9, 11), [3, 3], [1, 1], [1, 1]),
}
PROPOSED = (
    "stride 2",
    "layer norm of 5 channels",
    "max pool and its positions",
)  # others: tiles of misfits only


@dataclass(frozen=True, eq=False)
class Case:
    program: Program
    strides: dict[Tensor, Shape]
    ways: list[tuple[Variant, TritonSource]]


def proposed(p: Program) -> tuple[list[Variant], dict[Tensor, Shape]]:
    staged, strides = staged_of(p)
    found = variants(staged, strides, H200)
    assert not isinstance(found, Refusal), f"refused: {found}"
    return [v for v in found if v.options.strip is not None], strides


def misfits(v: Variant) -> Iterator[Variant]:
    """The same with strips that leave something over, of rows whole, in parts of one width, and in
    parts of several."""
    assert v.options.strip is not None
    n = v.nest.root.loops[-1].extent
    parted = v.nest.tile[-1] == n
    for size, chunk in ((4, power_of_two(n) // 2), (3, power_of_two(n) // 4), (7, 0)):
        tile = list(v.nest.tile)
        tile[v.options.strip] = min(size, v.nest.root.loops[v.options.strip].extent)
        staged = tuple(st.staged for st in v.nest.stages)
        nest = build_nest(staged, v.nest.root, tuple(tile))
        assert not isinstance(nest, Refusal)
        yield Variant(nest, replace(v.options, chunk=chunk if parted else 0, lanes=16))


def case(p: Program, proposals: int = 0, interpreted: bool = True) -> Case:
    found, strides = proposed(p)
    ways = []
    for v in (*found[:proposals], *(misfits(found[0]) if found else ())):
        options = replace(v.options, interpret=interpreted)
        source = emit_kernel(v.nest, strides, options, constants=p.constants)
        assert not isinstance(source, Refusal), f"{v.label} is refused: {source}"
        ways.append((v, source))
    return Case(p, strides, ways)


def job(name: str, c: Case, source: TritonSource) -> Job:
    return job_of(name, c.program, c.strides, source)


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {name: case(make(), 2 * (name in PROPOSED)) for name, make in PROGRAMS.items()}


@pytest.fixture(scope="module")
def results(cases, tmp_path_factory) -> dict[str, list]:
    jobs = [job(name, c, source) for name, c in cases.items() for _, source in c.ways]
    got = interpret(jobs, tmp_path_factory.mktemp("strips"))
    out: dict[str, list] = {name: [] for name in PROGRAMS}
    for j, x in zip(jobs, got, strict=True):
        out[j.name].append(x)
    return out


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_strip_agrees_with_float64(name, cases, results) -> None:
    c = cases[name]
    assert c.ways or name == "one pixel"
    for (v, source), got in zip(c.ways, results[name], strict=True):
        what = f"{name}: {v.label}\n{source.text}"
        assert not isinstance(got, str), f"{got}\n{what}"
        arrays = [x.float().numpy() if x.is_floating_point() else x.numpy() for x in got]
        close(arrays, c.program, what)


def test_a_column_is_loaded_once_a_row() -> None:
    """7 results of a 7x7 window: 13 columns and 7 weights in place of 49 of each."""
    found, strides = proposed(window((8, 64, 56, 56), 7, pad=3))
    v = next(misfits(found[0]))
    tile = tuple(7 if d == v.options.strip else n for d, n in enumerate(v.nest.tile))
    nest = build_nest(tuple(st.staged for st in v.nest.stages), v.nest.root, tile)
    assert not isinstance(nest, Refusal)
    source = emit_kernel(nest, strides, v.options)
    assert not isinstance(source, Refusal)
    loaded = re.findall(r"tl.load\((in\d)", source.text)
    assert sorted(loaded.count(x) for x in set(loaded)) == [1, 7, 13]
    assert len(re.findall(r"acc\d = acc\d \+", source.text)) == 49


def test_a_strip_that_ends_outside_reads_nothing_there() -> None:
    """11 results of a row of 13 in strips of 4: the last one's last column would be the 14th."""
    found, strides = proposed(PROGRAMS["no padding"]())
    v = next(misfits(found[0]))
    source = emit_kernel(v.nest, strides, v.options)
    assert not isinstance(source, Refusal)
    masks = dict(re.findall(r"(m\d+) = (.*)\n", source.text))
    guarded = re.findall(r"tl.load\(in\d .*?mask=(m\d+)", source.text)
    tests = [name for name, text in masks.items() if text.endswith("< 13")]
    assert len(tests) == 1
    assert [m for m in guarded if tests[0] in (m, *re.findall(r"m\d+", masks[m]))]


def test_an_axis_that_looks_like_the_strip_is_not_taken_for_it() -> None:
    """A strip over a whole row of 9, and a layer norm over 9 channels."""
    found, strides = proposed(PROGRAMS["layer norm of 9x9 channels"]())
    v = found[0]
    assert v.options.strip is not None
    assert all(x.nest.tile[v.options.strip] < 9 for x in found)
    tile = tuple(9 if d == v.options.strip else n for d, n in enumerate(v.nest.tile))
    nest = build_nest(tuple(st.staged for st in v.nest.stages), v.nest.root, tile)
    assert not isinstance(nest, Refusal)
    refusal = emit_kernel(nest, strides, v.options)
    assert isinstance(refusal, Refusal)
    assert "same range" in str(refusal)


COMPILED = {
    "7x7 and layer norm": lambda: window((128, 96, 56, 56), 7, pad=3, dtype=BF16, norm=True),
    "3x3": lambda: window((32, 144, 56, 56), 3, pad=1, dtype=F16, residual=True),
}


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200"])
def test_compiled_without_spills(gpu, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    sources = [case(make(), 1, interpreted=False).ways[0][1] for make in COMPILED.values()]
    for name, built in zip(COMPILED, build_all(sources, GPUS[gpu]), strict=True):
        assert isinstance(built, Built), f"{name}: {built}"
        assert built.over_budget(GPUS[gpu]) is None
        assert all(r.spills == 0 for r in built.resources), f"{name}: {built.resources}"
