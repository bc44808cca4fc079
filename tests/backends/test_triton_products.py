"""Matrix products and convolutions as Triton kernels: their values under Triton's interpreter
against float64, the form of their texts, their tiles, and what the compiler makes of them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.triton_jobs import Job, interpret, job_of, staged_of
from tests.fusion.harness import VALUES, Program, close, op, program, stored, value
from tests.fusion.test_convolution import POOLS, batch_norm

from onchip.backends.interpreter import evaluate
from onchip.backends.nvidia.resources import tool
from onchip.backends.triton.kernel import emit_kernel
from onchip.backends.triton.source import Options, TritonSource, Variant
from onchip.backends.triton.tiles import variants
from onchip.fusion.layout import channels_last
from onchip.fusion.machine import GPUS
from onchip.fusion.refusal import Refusal
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor
from onchip.ir.graph import defined_by, reads

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the triton package is not installed (torch brings it on Linux)",
)
HALF = {DType.BF16: 2e-2, DType.F16: 3e-3}


def result(outputs: list[Tensor], constants: list[Tensor], strides: dict | None = None) -> Program:
    tolerance = HALF.get(outputs[0].dtype, 1e-4)
    return program(outputs, constants, strides=strides or {}, tolerance=tolerance)


def conv(
    shape: tuple[int, ...], channels: int, kernel=3, stride=1, padding=1, order=("relu",),
    dtype=DType.F32, last=True, groups=1, dilation=1,
) -> Program:  # fmt: skip
    """conv2d with bias, then `order`; last: images (not weights) are channels-last."""
    x = value(shape, dtype)
    w = value((channels, shape[1] // groups, kernel, kernel), dtype, seed=1)
    b = value((channels,), dtype, seed=2)
    constants, residual = [w, b], []
    t = op("conv2d", x, w, b, stride, padding, dilation, groups)
    for step in order:
        if step == "bn":
            t = batch_norm(t, constants)
        elif step == "add":
            residual.append(value(t.shape, dtype, seed=7))
            t = op("add.Tensor", t, residual[-1])
        else:
            t = POOLS[step](t) if step in POOLS else op(step, t)
    strides = {y: channels_last(y.shape) for y in (x, t, *residual)} if last else {}
    return result([t], constants, strides)


def conv_1d(
    shape: tuple[int, ...], channels: int, kernel: int, stride=1, padding: int | str = 0
) -> Program:
    x, w = value(shape), value((channels, shape[1], kernel), seed=1)
    target = "conv1d.padding" if isinstance(padding, str) else "conv1d"
    return result([op("relu", op(target, x, w, None, stride, padding))], [w])


def conv_3d(
    shape: tuple[int, ...], channels: int, kernel: tuple[int, ...], stride=1,
    padding: tuple[int, ...] = (1, 1, 1),
) -> Program:  # fmt: skip
    x, w = value(shape), value((channels, shape[1], *kernel), seed=1)
    return result([op("relu", op("conv3d", x, w, None, stride, padding))], [w])


def transposed(shape: tuple[int, ...], channels: int, kernel=3, dilation=1) -> Program:
    x, w = value(shape), value((shape[1], channels, kernel, kernel), seed=1)
    t = op("conv_transpose2d.input", x, w, None, 1, 1, 0, 1, dilation)
    return result([op("relu", t)], [w])


def upsampling(
    shape: tuple[int, ...], channels: int, kernel: int | tuple[int, ...] = 4, stride=2, padding=1,
    more=0, groups=1, dilation=1, order=("relu",), before="", dtype=DType.F32, last=True,
    derived=True,
) -> Program:  # fmt: skip
    """A transposed convolution with a stride, bias, and what comes behind it; more: its
    output_padding; derived: its weight is a constant, reindexed at load."""
    d = len(shape) - 2
    taps = (kernel,) * d if isinstance(kernel, int) else kernel
    x = value(shape, dtype)
    w = value((shape[1], channels // groups, *taps), dtype, seed=1)
    b = value((channels,), dtype, seed=2)
    constants, residual = [w, b], []
    name = ("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")[d - 1]
    t = op(name, op(before, x) if before else x, w, b, stride, padding, more, groups, dilation)
    for step in order:
        if step == "bn":
            t = batch_norm(t, constants)
        elif step == "add":
            residual.append(value(t.shape, dtype, seed=7))
            t = op("add.Tensor", t, residual[-1])
        elif step == "swish":
            t = op("mul.Tensor", t, op("sigmoid", t))
        else:
            t = op(step, t)
    if derived:
        for taps in defined_by([t], list(VALUES)):
            if set(reads(taps)) == {w}:
                (values,) = evaluate([taps], {w: VALUES[w]})
                VALUES[taps] = stored(values, dtype)
                constants.append(taps)
    strides = {y: channels_last(y.shape) for y in (x, t, *residual)} if last else {}
    return result([t], constants, strides)


def patches(dtype: DType) -> Program:
    """A vision transformer's first convolution: windows side by side, K in one run a row."""
    x, w = value((2, 3, 16, 24), dtype), value((40, 3, 8, 8), dtype, seed=1)
    return result([op("conv2d", x, w, None, 8)], [w], {x: channels_last(x.shape)})


def linear(m: int, k: int, n: int, after=("gelu", "add"), dtype=DType.F32, strides=()) -> Program:
    x, w, b = value((m, k), dtype), value((n, k), dtype, seed=1), value((n,), dtype, seed=2)
    t = op("linear", x, w, b)
    for step in after:
        if step == "softmax":
            t = op("softmax.int", op("mul.Scalar", t, 0.1), -1)
        elif step == "norm":
            t = op("layer_norm", t, (n,), value((n,), dtype, seed=3), value((n,), dtype, seed=4))
        else:
            other = (value((m, n), dtype, seed=5),) if step == "add" else ()
            t = op("add.Tensor" if step == "add" else step, t, *other)
    return result([t], [w, b], dict(zip((x, w, t), strides, strict=False)))


def matmul(
    a: tuple[int, ...], b: tuple[int, ...], turned=(False, False), before="", after="relu",
    dtype=DType.F32,
) -> Program:  # fmt: skip
    """after(before(a) @ b); turned: operands are stored transposed."""
    x, y = value(a, dtype), value(b, dtype, seed=1)
    left = op("transpose.int", x, -1, -2) if turned[0] else x
    right = op("transpose.int", y, -1, -2) if turned[1] else y
    t = op("matmul", op(before, left) if before else left, right)
    return result([op(after, t)], [])


def flattened() -> Program:
    x, w = value((5, 7, 4, 4)), value((19, 112), seed=1)
    return result([op("relu", op("linear", op("reshape", x, [5, 112]), w))], [w])


def two_outputs() -> Program:
    x, w, r = value((37, 50)), value((33, 50), seed=1), value((37, 33), seed=2)
    t = op("linear", x, w)
    return result([t, op("add.Tensor", op("relu", t), r)], [w])


def attention(q: int, k: int, d: int, dtype: DType = DType.F32) -> Program:
    a, b, c = (value((2, n, d), dtype, seed=s) for s, n in enumerate((q, k, k)))
    scores = op("matmul", op("mul.Scalar", a, d**-0.5), op("transpose.int", b, 1, 2))
    return result([op("matmul", op("softmax.int", scores, -1), c)], [])


CHAIN = ("relu", "bn", "max2")


def padded_product() -> Program:
    """A sum over products and the zeros behind them, whose end is not the sum's own."""
    a, b = value((20, 1, 40)), value((1, 30, 40), seed=1)
    wide = op("constant_pad_nd", op("mul.Tensor", a, b), [0, 3], 0.0)
    return result([op("sum.dim_IntList", wide, [-1])], [])


PROGRAMS: dict[str, Callable[[], Program]] = {
    "sum of a padded product": padded_product,
    "conv, relu, bn, pool": lambda: conv((1, 64, 6, 7), 40, order=CHAIN),
    "conv, relu, bn, pool, NCHW": lambda: conv((1, 70, 6, 7), 33, order=CHAIN, last=False),
    "conv, relu, bn, pool, bfloat16":
        lambda: conv((1, 64, 6, 7), 40, order=CHAIN, dtype=DType.BF16),
    "conv and overlapping pool": lambda: conv((1, 32, 5, 7), 17, order=("bn", "max3")),
    "conv of 20 channels": lambda: conv((2, 20, 5, 7), 9),
    "conv of 16 channels": lambda: conv((2, 16, 5, 7), 9, dtype=DType.F16),
    "stem": lambda: conv((1, 3, 19, 23), 40, 7, 2, 3, ("bn", "relu")),
    "stem, bfloat16": lambda: conv((1, 3, 19, 23), 40, 7, 2, 3, ("bn", "relu"), DType.BF16),
    "dilated conv": lambda: conv((1, 35, 9, 9), 17, 3, 1, 2, ("gelu", "add"), dilation=2),
    "grouped conv": lambda: conv((2, 64, 5, 7), 64, groups=2),
    "many groups": lambda: conv((2, 16, 5, 7), 16, groups=2, last=False),
    "conv 1x1 strided": lambda: conv((2, 80, 5, 7), 90, 1, 2, 0, ("relu",)),
    "conv of nothing": lambda: conv((0, 32, 5, 7), 20),
    "conv1d of 512 taps": lambda: conv_1d((1, 1, 300), 20, 512, 4, 254),
    "conv1d of 64 taps": lambda: conv_1d((1, 33, 70), 20, 64, 1, "same"),
    "conv3d": lambda: conv_3d((1, 33, 5, 6, 7), 18, (3, 1, 3), 1, (1, 0, 1)),
    "conv3d of 3 channels": lambda: conv_3d((1, 3, 5, 6, 7), 18, (3, 3, 3), 2),
    "transposed conv": lambda: transposed((1, 35, 5, 6), 20),
    "transposed conv, dilated": lambda: transposed((1, 33, 5, 6), 20, dilation=2),
    "upsampling": lambda: upsampling((1, 35, 5, 6), 20),
    "upsampling, NCHW": lambda: upsampling((2, 17, 3, 5), 5, last=False),
    "upsampling, float16": lambda: upsampling((2, 16, 3, 5), 9, dtype=DType.F16),
    "upsampling, many features":
        lambda: upsampling((2, 17, 4, 3), 70, order=("bn", "relu", "add"), before="relu"),
    "upsampling, many features, NCHW": lambda: upsampling((1, 5, 4, 3), 67, last=False),
    "upsampling, 2 taps": lambda: upsampling((2, 32, 3, 5), 17, 2, padding=0),
    "upsampling, 2 taps, cut off": lambda: upsampling((2, 32, 3, 5), 70, 2, padding=1),
    "upsampling, 3 taps": lambda: upsampling((2, 17, 4, 5), 33, 3),
    "upsampling, 3 taps, even":
        lambda: upsampling((1, 3, 4, 5), 70, 3, more=1, order=("bn", "relu", "add")),
    "upsampling, 3 taps, not padded": lambda: upsampling((2, 33, 4, 5), 20, 3, padding=0),
    "upsampling, 3 taps, bfloat16": lambda: upsampling((1, 64, 4, 5), 33, 3, dtype=DType.BF16),
    "upsampling, 5 taps by 3": lambda: upsampling((1, 20, 4, 5), 17, 5, 3, 2, 1),
    "upsampling, 3 taps by 4": lambda: upsampling((1, 20, 4, 5), 17, 3, 4),
    "upsampling, two kinds": lambda: upsampling((1, 20, 4, 5), 17, (3, 4)),
    "upsampling, dilated": lambda: upsampling((1, 20, 4, 5), 17, 3, dilation=2),
    "upsampling, dilated by 3": lambda: upsampling((1, 20, 4, 5), 17, 3, dilation=3),
    "upsampling, 2 groups": lambda: upsampling((1, 34, 4, 5), 40, groups=2),
    "upsampling, 2 wide groups, 3 taps": lambda: upsampling((1, 34, 4, 5), 140, 3, groups=2),
    "upsampling, depthwise": lambda: upsampling((1, 33, 4, 5), 33, groups=33),
    "upsampling, depthwise, 3 taps": lambda: upsampling((1, 33, 4, 5), 33, 3, groups=33),
    "upsampling, one feature": lambda: upsampling((1, 33, 4, 5), 1, order=("sigmoid",)),
    "upsampling, one feature, 3 taps": lambda: upsampling((1, 33, 4, 5), 1, 3),
    "upsampling 1d": lambda: upsampling((2, 33, 7), 20, 16, 8, 4),
    "upsampling 1d, many features": lambda: upsampling((2, 33, 7), 70, 16, 8, 4),
    "upsampling 3d": lambda: upsampling((1, 17, 3, 2, 4), 20),
    "upsampling 3d, 3 taps": lambda: upsampling((1, 17, 3, 2, 4), 20, 3),
    "upsampling, read twice":
        lambda: upsampling((1, 17, 4, 5), 33, 3, order=("swish", "add"), last=False),
    "upsampling 3d, read twice":
        lambda: upsampling((1, 17, 3, 2, 4), 20, 3, more=1, order=("add", "swish", "swish")),
    "upsampling by a weight that is no constant":
        lambda: upsampling((1, 20, 4, 5), 17, derived=False),
    "upsampling, 3 taps of a weight that is no constant":
        lambda: upsampling((1, 20, 4, 5), 17, 3, derived=False),
    "upsampling of nothing": lambda: upsampling((0, 17, 3, 2), 20),
    "patches": lambda: patches(DType.F32),
    "patches, float16": lambda: patches(DType.F16),
    "linear": lambda: linear(37, 150, 70),
    "linear, bfloat16": lambda: linear(37, 150, 70, dtype=DType.BF16),
    "linear of strided tensors":
        lambda: linear(37, 50, 33, ("relu",), strides=((1, 41), (111, 2), (70, 2))),
    "linear and softmax": lambda: linear(23, 150, 41, ("softmax",)),
    "linear, residual, layer norm": lambda: linear(23, 50, 48, ("add", "norm"), DType.BF16),
    "linear of a flattened image": flattened,
    "product of two outputs": two_outputs,
    "product": lambda: matmul((37, 70), (70, 41)),
    "product of transposed operands": lambda: matmul((70, 37), (41, 70), (True, True)),
    "product of many tiles": lambda: matmul((600, 32), (32, 140)),
    "product with a prologue": lambda: matmul((37, 70), (70, 41), before="silu"),
    "product with a prologue, float16":
        lambda: matmul((37, 70), (70, 41), before="silu", dtype=DType.F16),
    "batches": lambda: matmul((2, 37, 20), (2, 41, 20), (False, True)),
    "one row": lambda: matmul((1, 70), (70, 41)),
    "three rows": lambda: matmul((3, 70), (70, 41)),
    "one column": lambda: matmul((37, 70), (70, 1)),
    "K of 1": lambda: matmul((37, 1), (1, 41)),
    "K of 3": lambda: matmul((37, 3), (3, 41)),
    "empty K": lambda: matmul((5, 0), (0, 4)),
    "no rows": lambda: matmul((0, 8), (8, 9)),
    "no columns": lambda: matmul((7, 8), (8, 0)),
    "float64": lambda: matmul((7, 18), (18, 20), dtype=DType.F64),
    "attention": lambda: attention(19, 23, 16),
    "attention, bfloat16": lambda: attention(19, 23, 16, DType.BF16),
    "K split: conv": lambda: conv((1, 64, 6, 6), 40, order=("relu", "add")),
    "K split: conv and pool": lambda: conv((1, 64, 6, 6), 40, order=CHAIN),
    "K split: linear": lambda: linear(5, 300, 70),
    "K split: batches": lambda: matmul((2, 17, 300), (2, 300, 20)),
    "K split: upsampling": lambda: upsampling((1, 70, 3, 4), 20),
    "K split: upsampling, many features": lambda: upsampling((1, 70, 3, 4), 70),
    "K split: upsampling, 3 taps": lambda: upsampling((1, 70, 3, 4), 20, 3),
    "K split: softmax": lambda: linear(7, 300, 20, ("softmax",)),
}  # fmt: skip

# A wrong edit of a kernel (a pattern, new text), which the comparison must notice.
FAULTS: dict[str, tuple[str, str, str]] = {
    "taps in another order": ("conv, relu, bn, pool", r"tap0 = k0 // \d+", "tap0 = k0 % 3"),
    "padding is not zero": ("conv, relu, bn, pool", r"mask=m\d+\[:, None\], other=0\.0",
                            "mask=None"),
    "K is not masked": ("stem", r"(i\d+) < 147", r"\1 < 256"),
    "a window's rows swapped": ("conv, relu, bn, pool", r"lane1 = (.*) // 4", r"lane1 = \1 % 32"),
    "one program's sums are missing": ("K split: linear", r"in range\(0, (\d+)\):\n( *acc\d+ \+=)",
                                       r"in range(1, \1):\n\2"),
    "the last step of K is left out": ("linear", r"range\(0, 150, ", "range(0, 128, "),
    "a tap too few": ("upsampling, 3 taps", r"taps0 = (.*)", r"taps0 = \1 * 0 + 1"),
    "another class's weights": ("upsampling, many features", r"(t1 \* \d+) \+ t0 \* \d+ \+ i1",
                                r"\1 + i1"),
    "the last position is not stored": ("upsampling", r"(m\d+ = \(\(t1 \* 2\).* - 1\)) < (\d+)",
                                        r"\1 < \2 - 1"),
    "columns of the next tile": ("product of many tiles", r"t0 = block0 \* ", "t0 = group0 * "),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Case:
    program: Program
    variant: Variant
    source: TritonSource
    strides: dict

    def job(self, name: str) -> Job:
        return job_of(name, self.program, self.strides, self.source)


def ways(p: Program, gpu: str = "h200", base: Options = Options()) -> list[Variant] | Refusal:
    return variants(*staged_of(p), GPUS[gpu], base)


def written(p: Program, v: Variant) -> Case:
    _, strides = staged_of(p)
    source = emit_kernel(v.nest, strides, v.options, constants=p.constants)
    assert isinstance(source, TritonSource), f"{v.label} is refused: {source}"
    return Case(p, v, source, strides)


def case_of(name: str) -> Case:
    """The variant with the fewest programs, which the interpreter runs one by one; K of three
    parts, which do not divide it, where the name says so."""
    p = PROGRAMS[name]()
    found = ways(p)
    assert isinstance(found, list), f"refused: {found}"
    v = max(found, key=lambda v: (v.options.lanes * prod(v.nest.tile), v.options.k_block))
    split = 3 if name.startswith("K split") else 1
    return written(p, replace(v, options=replace(v.options, split=split)))


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {name: case_of(name) for name in PROGRAMS}


@pytest.fixture(scope="module")
def results(cases, tmp_path_factory) -> dict[str, list[torch.Tensor] | str]:
    """What the interpreter computes: of every case, and of every fault."""
    jobs = [case.job(name) for name, case in cases.items()]
    for name, (base, old, new) in FAULTS.items():
        job = cases[base].job(name)
        text, count = re.subn(old, new, job.source.text)
        assert count, f"the fault {name!r} does not apply to\n{text}"
        jobs.append(replace(job, source=replace(job.source, text=text)))
    got = interpret(jobs, tmp_path_factory.mktemp("products"))
    return {job.name: outputs for job, outputs in zip(jobs, got, strict=True)}


def arrays(got: Sequence[torch.Tensor]) -> list[np.ndarray]:
    return [(x.float() if x.dtype.itemsize == 2 else x).numpy() for x in got]


@needs_triton
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_agrees_with_float64(name: str, cases, results) -> None:
    got, case = results[name], cases[name]
    what = f"{case.variant.label}\n{case.source.text}"
    assert not isinstance(got, str), f"{got} in {what}"
    close(arrays(got), case.program, what)


@needs_triton
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_kernel_is_noticed(name: str, cases, results) -> None:
    got = results[name]
    assert not isinstance(got, str), f"the fault does not run: {got}"
    with pytest.raises(AssertionError):
        close(arrays(got), cases[FAULTS[name][0]].program, name)


# ---- the texts ---------------------------------------------------------------------------------


def first(name: str, cases: dict[str, Case]) -> TritonSource:
    return cases[name].source


def test_taps_are_scalars_of_one_loop(cases) -> None:
    text = first("conv, relu, bn, pool", cases).text
    assert re.search(r"tap0 = k0 // \d+$", text, re.M)
    assert re.search(r"tap1 = k0( // \d+)? % 3$", text, re.M)
    assert text.count("tl.dot") == 1
    assert re.search(r"tl.reshape\(acc0, \(\d+, 2, 2, 64\)\)", text)


def test_steps_over_several_taps_number_k_as_one(cases) -> None:
    text = first("stem", cases).text
    assert re.search(r"for k0 in range\(0, 147, \d+\):", text)


def test_a_run_of_two_axes_is_one_axis(cases) -> None:
    """8 columns of 3 channels are 24 neighbours, too few for a step; with the rows of the window
    they are K in the order of memory."""
    text = first("patches", cases).text
    assert re.search(r"range\(0, 192, \d+\)", text)


def test_weights_are_laid_out_along_k(cases) -> None:
    source = first("conv, relu, bn, pool", cases)
    (w,) = [t for t in source.laid_out if t.rank == 4]
    assert source.laid_out[w] == channels_last(w.shape)
    assert source.inputs[-1] is w


def test_operands_of_half_types_are_not_widened(cases) -> None:
    found = first("conv, relu, bn, pool, bfloat16", cases).text
    dot = re.search(r"tl.dot\((\w+), (\w+), acc0\)", found)
    assert dot is not None
    for name in dot.groups():
        assert re.search(
            rf"\b{name} = tl.load\(.*other=0.0\)$|\b{name} = tl.load\([^=]*\)$", found, re.M
        )
    assert ".to(tl.float16)" in first("product with a prologue, float16", cases).text


def test_the_interpreter_gets_float32() -> None:
    p = PROGRAMS["conv, relu, bn, pool, bfloat16"]()
    found = ways(p, base=Options(interpret=True))
    assert isinstance(found, list)
    assert 'input_precision="ieee"' in written(p, found[0]).source.text


def test_classes_of_different_numbers_of_taps_are_one_product(cases) -> None:
    """One loop, whose end the class says; 9 taps of 4 classes of at most 4 are not 16."""
    text = first("upsampling, 3 taps", cases).text
    assert text.count("tl.dot") == 1
    assert re.search(r"taps0 = \(t\d \* -1 \+ 2\)", text)
    assert re.search(r"in range\(0, \(taps0 \* taps1( \* \d+)?\)\)", text)


@pytest.mark.parametrize("name", ["upsampling, read twice", "upsampling 3d, read twice"])
def test_a_transposed_convolution_that_is_read_twice_is_one_product(name, cases) -> None:
    text = first(name, cases).text
    assert text.count("tl.dot") == 1
    assert len(cases[name].source.launches) == 1


def test_classes_whose_taps_lie_elsewhere_are_branches(cases) -> None:
    text = first("upsampling, dilated by 3", cases).text
    assert text.count("tl.dot") == 4
    assert text.count("else:") == 3


def test_the_weights_of_each_class_are_laid_out_along_k(cases) -> None:
    source = first("upsampling, many features", cases)
    ((w, strides),) = [(t, s) for t, s in source.laid_out.items() if t.rank == 6]
    channels, *_, taps = w.shape
    assert strides[0] == 1
    assert strides[5] == channels
    assert strides[3] == channels * taps
    assert strides[1] == channels * taps * taps
    assert strides[2] > strides[1]


@pytest.mark.parametrize(("kernel", "groups"), [(4, 1), (2, 1), (3, 1), (4, 2)])
def test_no_row_of_a_wide_transposed_convolution_is_idle(kernel: int, groups: int) -> None:
    """Classes are batches of as many rows as they have results, whatever the padding."""
    p = upsampling((2, 32, 8, 16), 128, kernel, 2, kernel // 2, kernel % 2, groups)
    found = ways(p)
    assert isinstance(found, list)
    images, height, width = 2, *p.outputs[0].shape[2:]
    for v in found:
        columns = prod(v.nest.tile)
        assert v.nest.tiles * columns == images * height * width * 128, v.label


@pytest.mark.parametrize("name", ["one row", "one column", "float64", "upsampling, depthwise"])
def test_no_tensor_cores_for(name: str, cases) -> None:
    assert "tl.dot" not in first(name, cases).text


def test_programs_that_share_k_leave_zeros(cases) -> None:
    source = first("K split: linear", cases)
    sums, arrived = source.workspace
    assert source.pointers[-2:] == ("*fp32", "*i32")
    assert arrived.zeroed
    assert not sums.zeroed
    assert "tl.store(arrived + program, 0)" in source.text


# ---- tiles -------------------------------------------------------------------------------------


@cache
def four_operators(n: int = 32) -> Program:
    return conv((n, 64, 56, 56), 64, order=CHAIN, dtype=DType.BF16)


@cache
def upsampled(kernel: int) -> Program:
    order = ("bn", "relu")
    more = kernel % 2
    return upsampling((16, 256, 32, 32), 128, kernel, more=more, order=order, dtype=DType.BF16)


@cache
def large_linear() -> Program:
    return linear(1024, 8192, 8192)


def chosen(found: list[Variant] | Refusal) -> list[tuple[int, ...]]:
    """(lanes, last tile, K, warps, stages) of variants."""
    assert isinstance(found, list)
    options = [(v.options, v.nest.tile[-1]) for v in found]
    return [(o.lanes, t, o.k_block, o.warps, o.stages) for o, t in options]


def test_the_tiles_that_were_fastest_by_hand_are_tried() -> None:
    assert (32, 64, 64, 4, 3) in chosen(ways(four_operators()))
    found = ways(large_linear(), base=Options(precision="tf32x3"))
    assert (128, 128, 64, 8, 3) in chosen(found)[:2]


def test_k_is_split_where_multiprocessors_would_idle() -> None:
    small, large = conv((1, 512, 7, 7), 512, dtype=DType.BF16), four_operators()
    for p, split in ((small, True), (large, False)):
        found = ways(p)
        assert isinstance(found, list)
        assert (found[0].options.split > 1) is split
        assert any(v.options.split == 1 for v in found)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("precision", ["tf32x3", "tf32", "ieee"])
def test_operands_fit_shared_memory(gpu: str, precision: str) -> None:
    for p, size in ((four_operators(), 2), (large_linear(), 4), (linear(16, 4096, 4096), 4)):
        found = ways(p, gpu, Options(precision=precision))
        assert isinstance(found, list)
        assert 2 <= len(found) <= 6
        for v in found:
            o = v.options
            rows = o.lanes * (4 if size == 2 else 1)
            used = o.stages * (rows + v.nest.tile[-1]) * o.k_block * size
            assert used <= GPUS[gpu].shared_bytes, v.label
            assert rows * v.nest.tile[-1] // (32 * o.warps) <= 128, v.label


# ---- the compiler ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, object]:
    """Binaries of the variants that matter most, for three generations of GPUs."""
    from onchip.backends.triton.build import build_all

    wanted = {
        "conv sm_80": ("a100", four_operators(), Options(), None),
        "conv sm_90": ("h200", four_operators(), Options(), (32, 64, 64, 4, 3)),
        "conv sm_100": ("b200", four_operators(), Options(), None),
        "linear sm_90": ("h200", large_linear(), Options(precision="tf32x3"), (128, 128, 64, 8, 3)),
        "upsampling sm_80": ("a100", upsampled(4), Options(), None),
        "upsampling sm_90": ("h200", upsampled(4), Options(), None),
        "upsampling sm_100": ("b200", upsampled(3), Options(), None),
        "3 taps sm_90": ("h200", upsampled(3), Options(), None),
        "split sm_90": ("h200", conv((1, 512, 7, 7), 512, dtype=DType.BF16), Options(), None),
    }
    out: dict[str, object] = {}
    for name, (gpu, p, base, which) in wanted.items():
        found = ways(p, gpu, base)
        assert isinstance(found, list)
        v = found[chosen(found).index(which) if which else 0]
        (out[name],) = build_all([written(p, v).source], GPUS[gpu])
    return out


@needs_triton
@pytest.mark.parametrize(
    "name",
    ["conv sm_80", "conv sm_90", "conv sm_100", "linear sm_90", "split sm_90", "upsampling sm_80",
     "upsampling sm_90", "upsampling sm_100", "3 taps sm_90"],
)  # fmt: skip
def test_it_compiles_without_spills(name: str, built) -> None:
    from onchip.backends.nvidia.build import Built

    made = built[name]
    assert isinstance(made, Built), made
    (r,) = made.resources
    assert r.spills == 0, r
    assert r.programs >= 1, r


@needs_triton
def test_warpgroups_multiply_half_and_tf32_operands(built) -> None:
    assert "HGMMA.64x64x16.F32.BF16" in disassembled(built["conv sm_90"].cubins[0].path)
    assert re.search(r"HGMMA\.\S*TF32", disassembled(built["linear sm_90"].cubins[0].path))


@needs_triton
def test_operands_are_copied_16_bytes_at_a_time(built) -> None:
    code = disassembled(built["conv sm_90"].cubins[0].path)
    copies = re.findall(r"LDGSTS\.\S+", code)
    assert copies
    assert all(".128" in c for c in copies)


def disassembled(cubin: Path) -> str:
    command = [str(tool()), "-sass", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
