"""The same loop nests give C++ and Triton kernels that agree with the interpreter in float64.

Each program becomes one nest. Its Triton kernel runs under Triton's interpreter and is compiled for
sm_90 (without a GPU); the C++ kernel is emitted from the very same nest. All are compared with the
oracle on signed values and odd sizes; memory around inputs and outputs is NaN.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.fusion.harness import Program, close, op, program, value
from tests.fusion.test_convolution import pipeline

from onchip.backends.cpp.kernel import KernelOptions, KernelSource, contiguous
from onchip.backends.cpp.kernel import emit_kernel as emit_cpp
from onchip.backends.cpp.run import job, region_for, run_all
from onchip.backends.triton.kernel import TritonSource, emit_kernel
from onchip.backends.triton.tiles import choose_tile
from onchip.fusion.nest import Nest, build_nest
from onchip.fusion.refusal import Family, Refusal
from onchip.fusion.staging import stage
from onchip.ir.dtype import DType

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the triton package is not installed (torch brings it on Linux)",
)
ROOT = Path(__file__).parents[2]
MOST_SHARED = 227 * 1024  # bytes a program may use on sm_90


def softmax(shape: tuple[int, ...], dim: int = -1) -> Program:
    x, y = value(shape), value(shape, seed=1)
    t = op("softmax.int", op("mul.Scalar", op("add.Tensor", x, y), 1.7), dim)
    return program([op("mul.Tensor", t, op("sigmoid", y))])


def layer_norm(shape: tuple[int, ...]) -> Program:
    """Two outputs: the sum is needed by others as well."""
    x, r = value(shape), value(shape, seed=1)
    w, b = value(shape[-1:], seed=2), value(shape[-1:], seed=3)
    total = op("add.Tensor", x, r)
    return program([op("layer_norm", total, shape[-1:], w, b), total])


def row_maximum_of_nan() -> Program:
    x = np.random.default_rng(3).uniform(-3, 3, (5, 11))
    x[1, 4], x[3, 0], x[4] = np.nan, np.inf, -2
    return program([op("amax", op("relu", value((5, 11), like=x)), [1])])


def product(m: int, k: int, n: int, after: str) -> Program:
    x, w, b = value((m, k)), value((k, n), seed=1), value((n,), seed=2)
    t = op("add.Tensor", op("mm", x, w), b)
    if after == "softmax":
        t = op("softmax.int", op("mul.Scalar", t, 0.3), -1)
    elif after == "max":
        t = op("amax", t, [1])
    return program([t], [w], tolerance=1e-4)


def attention(q: int, k: int, d: int) -> Program:
    a, b, c = (value((2, n, d), seed=s) for s, n in enumerate((q, k, k)))
    scores = op("matmul", op("mul.Scalar", a, d**-0.5), op("transpose.int", b, 1, 2))
    return program([op("matmul", op("softmax.int", scores, -1), c)], tolerance=1e-4)


CHAIN = ("relu", "bn", "pool")
PROGRAMS: dict[str, Callable[[], Program]] = {
    "softmax": lambda: softmax((5, 37)),
    "softmax of three axes": lambda: softmax((2, 3, 67)),
    "softmax of axis 0": lambda: softmax((13, 5), 0),
    "softmax of one": lambda: softmax((3, 1)),
    "layer norm and its sum": lambda: layer_norm((7, 19)),
    "row maximum of NaN": row_maximum_of_nan,
    "conv relu bn": lambda: pipeline(("relu", "bn"), shape=(1, 3, 7, 5), channels=5),
    "conv relu bn max2": lambda: pipeline(CHAIN, "max2"),
    "conv relu bn max3": lambda: pipeline(CHAIN, "max3", (1, 5, 9, 11)),
    "channels-last max3": lambda: pipeline(CHAIN, "max3", (1, 5, 9, 7), 17, last=True),
    "negative max3": lambda: pipeline(("pool",), "max3", (1, 2, 7, 5), 3, negative=True),
    "conv relu avg3": lambda: pipeline(("relu", "pool"), "avg3", (1, 3, 7, 9), 7),
    "depthwise": lambda: pipeline(("bn", "relu"), shape=(2, 6, 7, 5), channels=6, groups=6),
    "mm bias": lambda: product(1, 29, 3, ""),
    "mm of empty K": lambda: product(5, 0, 4, "max"),
    "mm bias softmax": lambda: product(37, 70, 41, "softmax"),
    "mm bias row maximum": lambda: product(5, 7, 9, "max"),
    "attention": lambda: attention(19, 23, 16),
}

# A wrong edit of a generated kernel (old text, new text), which the comparison must notice.
FAULTS: dict[str, tuple[str, str, str]] = {
    "padding adds to the row's sum": ("softmax", "v4, 0.0)", "v4, 1.0)"),
    "NaN is dropped": ("row maximum of NaN", "tl.PropagateNan.ALL", "tl.PropagateNan.NONE"),
    "a pool padded with zeros": ("negative max3", ', float("-inf"))', ", 0.0)"),
    "K is not masked": ("conv relu bn max2", " < 45", " < 64"),
    "a window's rows swapped for pixels": ("conv relu bn max2", "// 32 % 2", "// 2 % 2"),
}


@dataclass(frozen=True, eq=False)
class Case:
    program: Program
    nest: Nest
    source: TritonSource
    strides: dict


def emitted(p: Program) -> Case | Refusal:
    region = region_for(p.outputs, list(p.values))
    staged = stage(region)
    if isinstance(staged, Refusal):
        return staged
    root = next(s for s in reversed(staged) if s.tensor is p.outputs[0])
    tile = choose_tile(staged, root)
    nest = tile if isinstance(tile, Refusal) else build_nest(staged, root, tile)
    if isinstance(nest, Refusal):
        return nest
    strides = {t: contiguous(t.shape) for t in (*region.inputs, *region.tensors)} | p.strides
    source = emit_kernel(nest, strides)
    return source if isinstance(source, Refusal) else Case(p, nest, source, strides)


def case(name: str) -> Case:
    made = emitted(PROGRAMS[name]())
    assert isinstance(made, Case), f"{name} is refused: {made}"
    return made


def start(mode: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    environment["TRITON_INTERPRET"] = "1" if mode == "interpret" else "0"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "tests.backends.triton_child", mode, str(folder)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def finish(child: subprocess.Popen[str]) -> None:
    _, errors = child.communicate()
    assert child.returncode == 0, errors[-4000:]


def write(folder: Path, name: str, c: Case, text: str, broken: bool) -> dict:
    (folder / f"{name}.py").write_text(text)
    arrays = {f"in{n}": np.asarray(c.program.values[t]) for n, t in enumerate(c.source.inputs)}
    np.savez(folder / f"{name}.npz", **arrays)
    inputs, outputs = (
        [(t.shape, c.strides[t]) for t in ts] for ts in (c.source.inputs, c.source.outputs)
    )
    tiles = c.source.tiles
    return dict(name=name, inputs=inputs, outputs=outputs, tiles=tiles, broken=broken)


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {name: case(name) for name in PROGRAMS}


@pytest.fixture(scope="module")
def started(cases, tmp_path_factory):
    """All kernels, written down; and the processes that interpret and compile them."""
    folder = tmp_path_factory.mktemp("triton")
    jobs = [write(folder, n, c, c.source.text, False) for n, c in cases.items()]
    for name, (base, old, new) in FAULTS.items():
        text = cases[base].source.text
        assert old in text, f"the fault {name!r} does not apply to\n{text}"
        jobs.append(write(folder, name, cases[base], text.replace(old, new), True))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    children = {mode: start(mode, folder) for mode in ("interpret", "compile")}
    yield folder, children
    for child in children.values():
        child.kill()
        child.wait()


@pytest.fixture(scope="module")
def folder(started) -> Path:
    finish(started[1]["interpret"])
    return started[0]


@pytest.fixture(scope="module")
def compiled(started) -> dict:
    finish(started[1]["compile"])
    return json.loads((started[0] / "compiled.json").read_text())


def results(folder: Path, name: str, c: Case) -> list[np.ndarray]:
    got = np.load(folder / f"{name}.out.npz")
    by_tensor = {t: got[f"out{n}"] for n, t in enumerate(c.source.outputs)}
    return [by_tensor[t] for t in c.program.outputs]


@needs_triton
@pytest.mark.parametrize("name", PROGRAMS)
def test_interpreted_triton_agrees_with_float64(name: str, cases, folder) -> None:
    close(results(folder, name, cases[name]), cases[name].program, cases[name].source.text)


@needs_triton
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_kernel_is_noticed(name: str, cases, folder) -> None:
    c = cases[FAULTS[name][0]]
    with pytest.raises(AssertionError):
        close(results(folder, name, c), c.program, name)


@needs_triton
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_compiles_for_sm_90_without_spills(name: str, compiled) -> None:
    figures = compiled[name]
    assert isinstance(figures, dict), figures
    assert 8 <= figures["registers"] <= 255
    assert figures["stack_bytes"] == 0
    assert figures["shared_bytes"] <= MOST_SHARED
    assert figures["binary_bytes"] > 1000


def test_the_same_nests_give_cpp(cases) -> None:
    jobs = []
    for name, c in cases.items():
        options = KernelOptions()
        made = emit_cpp((c.nest,), c.strides, c.program.constants, options, name)
        assert isinstance(made, KernelSource), f"{name} is refused: {made}"
        jobs.append(job(made, c.program.outputs, c.program.values, c.program.strides))
    for (name, c), got in zip(cases.items(), run_all(jobs, "-O0"), strict=True):
        assert not isinstance(got, Exception), f"{got!r} from {name}"
        close(got, c.program, name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_names_are_canonical(name: str, cases) -> None:
    """The text depends on the computation only, not on what was built before it."""
    assert case(name).source.text == cases[name].source.text


def test_disjoint_windows_are_rows_of_one_product() -> None:
    """The 2x2 pool computes each element of the convolution once; the 3x3 pool loops over taps."""
    two, three = (case(f"conv relu bn max{n}").source.text for n in (2, 3))
    assert two.count("tl.dot") == three.count("tl.dot") == 1
    assert "tl.reshape(acc0, (2, 8, 2, 2, 16))" in two
    assert "in range(0, 3):" not in two
    assert three.count("in range(0, 3):") == 2


def test_a_row_is_read_once() -> None:
    """The three stages of a softmax share it in registers."""
    assert case("softmax").source.text.count("tl.load") == 2


REFUSED: dict[str, Callable[[], Program]] = {
    "int64": lambda: program([op("argmax", value((5, 7)), 1)]),
    "float64": lambda: program([op("relu", value((5, 7), DType.F64))]),
    "the function atan2": lambda: program([op("atan2", value((5,)), value((5,)))]),
    "elements": lambda: program([op("softmax.int", value((2, 50_000)), -1)]),
    "several batches": lambda: program([op("sum", op("bmm", value((3, 2, 4)), value((3, 4, 5))))]),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_fit_is_refused_with_a_sentence(text: str) -> None:
    made = emitted(REFUSED[text]())
    assert isinstance(made, Refusal), f"{text} gave a kernel"
    assert text in made.text
    assert made.family in (Family.UNSUPPORTED, Family.OVER_BUDGET)
