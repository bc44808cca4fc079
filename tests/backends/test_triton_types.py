"""Element types and data-dependent indices in generated Triton kernels, against the expressions in
float64; and compiled for three generations of GPUs."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.backends.triton_jobs import interpret
from tests.conformance.compiled import Case
from tests.conformance.generated_triton import Kernel, kernels_of
from tests.fusion.harness import Program, close, op, program, value

from onchip.backends.nvidia.build import Built
from onchip.backends.triton.build import build_all
from onchip.fusion.machine import GPUS
from onchip.ir.dtype import DType

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the triton package is not installed"
)
BIG = 2**40


def integers(*shape: int, dtype: DType = DType.I64, scale: int = 1):
    x = np.random.default_rng(sum(shape)).integers(-50, 50, shape) * scale
    return value(shape, dtype, like=x)


def large_integers() -> Program:
    x = integers(7, 5, scale=BIG)
    return program([op("mul.Scalar", op("add.Scalar", x, 2**33 + 1), 3)])


def large_counts() -> Program:
    """Numbers of an axis that 32 bits don't hold."""
    return program([op("arange.start_step", 0, 6 * 2**31, 2**31, dtype=DType.I64)])


def sum_of_bytes() -> Program:
    return program([op("sum.dim_IntList", integers(3, 300, dtype=DType.I8), [1])])


def positions(name: str) -> Program:
    """NaN first, then the first of equal extremes; a row of infinities."""
    x = np.random.default_rng(1).integers(-3, 4, (6, 37)).astype(float)
    x[1, 20] = x[1, 30] = np.nan
    x[2], x[3] = -np.inf, np.inf
    return program([op(name, value(x.shape, like=x), 1)])


def embedding(at: np.ndarray, dtype: DType = DType.F32) -> Program:
    table = value((9, 6), dtype)
    return program([op("embedding", table, value(at.shape, DType.I64, like=at))])


def picked() -> Program:
    """Positions that one fold finds are another load's index."""
    x, table = value((5, 13)), value((13, 4), seed=1)
    return program([op("embedding", table, op("argmax", x, 1))])


def product_of_picked_rows() -> Program:
    """What lies beyond K must count as zero, though a wrong index reads as NaN."""
    at = value((18,), DType.I64, like=np.arange(18) * 5 % 9)
    rows = op("embedding", value((9, 20)), at)
    return program([op("mm", rows, value((20, 17), seed=1))], tolerance=1e-4)


def gelu(dtype: DType) -> Program:
    return program([op("gelu", value((4, 33), dtype))])


PROGRAMS: dict[str, Callable[[], Program]] = {
    "large integers": large_integers,
    "large counts": large_counts,
    "sum of bytes": sum_of_bytes,
    "argmax": lambda: positions("argmax"),
    "argmin": lambda: positions("argmin"),
    "any": lambda: program([op("any.dim", value((5, 19), DType.BOOL), 1)]),
    "product of integers": lambda: program([op("prod.dim_int", integers(4, 9), 1)]),
    "embedding": lambda: embedding(np.arange(-4, 8).reshape(3, 4) % 9),
    "embedding of halves": lambda: embedding(np.arange(8) % 9, DType.BF16),
    "picked rows": picked,
    "product of picked rows": product_of_picked_rows,
    "double product": lambda: program(
        [op("mm", value((5, 17), DType.F64), value((17, 9), DType.F64, seed=1))]
    ),
    "double softmax": lambda: program([op("softmax.int", value((3, 41), DType.F64), -1)]),
    "gelu": lambda: gelu(DType.F32),
    "gelu of halves": lambda: gelu(DType.F16),
    "lengths of bfloat16": lambda: program(
        [op("norm.ScalarOpt_dim", value((4, 70), DType.BF16), 2, [1])]
    ),
}

# A wrong edit of a generated kernel (program, old text, new text), which must show.
FAULTS: dict[str, tuple[str, str, str]] = {
    "64 bits cut to 32": ("large integers", "v0 * 3", "v0.to(tl.int32) * 3"),
    "the last of equal extremes": ("argmax", "(i < j)", "(i > j)"),
    "NaN is not the largest": ("argmax", "(a != a) & (b == b)", "(a != a) & (b != b)"),
    "NaN beyond K": ("product of picked rows", "tl.where(m2[None, :], x1, 0.0)", "x1"),
    "all in place of any": ("any", "return a | b", "return a & b"),
}


def made(p: Program, name: str) -> list[Kernel]:
    case = Case(name, p.outputs, p.values, [], [], lambda *_: None)
    kernels = kernels_of(case, 0)
    assert isinstance(kernels, list), f"{name} is refused: {kernels}"
    return kernels


@pytest.fixture(scope="module")
def kernels() -> dict[str, tuple[Program, Kernel]]:
    out = {}
    for name, maker in PROGRAMS.items():
        p = maker()
        (out[name],) = [(p, k) for k in made(p, name)]
    return out


@pytest.fixture(scope="module")
def results(kernels, tmp_path_factory) -> dict[str, list[np.ndarray]]:
    jobs = {name: k.job for name, (_, k) in kernels.items()}
    for name, (base, old, new) in FAULTS.items():
        job = jobs[base]
        assert old in job.source.text, f"the fault {name!r} does not apply to\n{job.source.text}"
        text = job.source.text.replace(old, new)
        jobs[name] = replace(job, source=replace(job.source, text=text))
    got = interpret(list(jobs.values()), tmp_path_factory.mktemp("types"))
    for name, r in zip(jobs, got, strict=True):
        assert not isinstance(r, str), f"{name}: {r}\n{jobs[name].source.text}"
    return {
        name: [x.float().numpy() if str(x.dtype) == "torch.bfloat16" else x.numpy() for x in r]
        for name, r in zip(jobs, got, strict=True)
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_agrees_with_float64(name: str, kernels, results) -> None:
    p, kernel = kernels[name]
    close(results[name], p, kernel.job.source.text)


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_kernel_is_noticed(name: str, kernels, results) -> None:
    p, _ = kernels[FAULTS[name][0]]
    with pytest.raises(AssertionError):
        close(results[name], p, name)


def test_an_index_outside_of_its_tensor_gives_nan_and_zero(tmp_path) -> None:
    """Eager raises, or aborts the process on a GPU."""
    at = np.array([0, 9, -1, 2**32, -(2**40), 3])  # 2**32 is 0 in 32 bits
    good = [0, 5]
    p = embedding(at)
    q = embedding(at, DType.I32)
    got = interpret([k.job for k in (*made(p, "float"), *made(q, "int"))], tmp_path)
    assert not any(isinstance(r, str) for r in got), got
    floats, ints = (r[0].numpy() for r in got)  # type: ignore[union-attr]
    (x, _), (y, _) = (list(r.values.values()) for r in (p, q))
    bad = [n for n in range(len(at)) if n not in good]
    np.testing.assert_array_equal(floats[good], x[at[good]])
    assert np.isnan(floats[bad]).all()
    np.testing.assert_array_equal(ints[good], y[at[good]])
    assert (ints[bad] == 0).all()


def test_only_results_in_half_types_get_short_functions(kernels) -> None:
    assert "coarse_erf" in kernels["gelu of halves"][1].job.source.text
    assert "coarse" not in kernels["gelu"][1].job.source.text


def test_axes_are_counted_in_32_bits(kernels) -> None:
    assert "int64" not in re.sub("#.*", "", kernels["gelu"][1].job.source.text)
    assert "tl.int64" in kernels["large counts"][1].job.source.text


def test_nothing_is_launched_for_results_without_elements() -> None:
    (kernel,) = made(program([op("relu", value((3, 0, 2)))]), "empty")
    assert [one.programs for one in kernel.job.source.launches] == [0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_texts_depend_on_the_computation_alone(name: str, kernels) -> None:
    (again,) = made(PROGRAMS[name](), name)
    assert again.job.source.text == kernels[name][1].job.source.text


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200"])
def test_they_compile(gpu: str, kernels) -> None:
    names = ["large integers", "argmax", "any", "embedding of halves", "gelu of halves"]
    sources = [kernels[n][1].job.source for n in names]
    for name, built in zip(names, build_all(sources, GPUS[gpu]), strict=True):
        assert isinstance(built, Built), f"{name}: {built}"
        assert built.over_budget(GPUS[gpu]) is None
