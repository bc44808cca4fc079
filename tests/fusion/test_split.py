"""Large folds cut into chunks, and kernels of several phases, against the interpreter in float64
and ATen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.fusion.harness import Program, Programs, jobs_of, op, program, value

from onchip.backends.cpp.compiler import build
from onchip.backends.cpp.kernel import KernelOptions
from onchip.backends.cpp.run import region_for
from onchip.fusion.chunks import cut_fold
from onchip.fusion.layout import channels_last, contiguous
from onchip.fusion.machine import Machine
from onchip.fusion.nest import Nest
from onchip.fusion.phases import nests_for, phased
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.split import split_folds
from onchip.fusion.staging import Staged, stage
from onchip.ir.dtype import DType
from onchip.ir.expr import Load, Reduce, Tensor, axis, given, loads, reduces, substitute
from onchip.ops.registry import OPERATORS

PROGRAMS = Programs("-O1")
PRIME = 131071
# Sizes that divide into chunks, that do not, and that are several axes (merged, or cut in two).
SIZES = [(1 << 17,), (PRIME,), (65537, 2), (257, 3, 127), (2, 3, 11, 1999), (37, 5021)]


def batch_norm(x, weight=None, bias=None) -> list:
    """Output, new running mean and variance of the training form."""
    c = x.shape[1]
    mean, var = value((c,), seed=7), value((c,), seed=8, low=0.5)
    name = "aten._native_batch_norm_legit_functional.default"
    out = OPERATORS[name](x, weight, bias, mean, var, True, 0.1, 1e-5)
    return [out[0], out[3], out[4]]


def whole(target: str, shape, dtype: DType = DType.F32, **more) -> Program:
    low, high = (0.98, 1.02) if target == "prod" else (-3.0, 4.0)
    x = value(shape, dtype, low=low, high=high)
    return program([op(target, x)], **more)


for n in SIZES:
    for f in ("sum", "max", "min", "argmax", "argmin", "linalg_vector_norm", "var"):
        PROGRAMS.add(lambda f=f, n=n: whole(f, n), f"{f} {n}")
for f in ("sum", "amax", "argmax", "mean"):
    for d in (DType.F64, DType.BF16, DType.F16):
        PROGRAMS.add(lambda f=f, d=d: whole(f, (300, 401), d), f"{f} {d}")
for f in ("any", "all", "sum", "argmax"):
    PROGRAMS.add(lambda f=f: whole(f, (300, 401), DType.BOOL), f"{f} of bools")
    PROGRAMS.add(lambda f=f: whole(f, (300, 401), DType.I32), f"{f} of integers")
PROGRAMS.add(lambda: whole("prod", (300, 401)), "prod")


@PROGRAMS.add
def dot_product() -> Program:
    """Two inputs, pointwise work before and after, and a second fold over the same chunks."""
    x, y = value((PRIME,)), value((PRIME,), seed=1)
    product = op("mul.Tensor", x, op("tanh", y))
    return program([op("exp", op("mean", product)), op("max", product)])


@PROGRAMS.add
def mse_loss() -> Program:
    x, y = value((129, 1021)), value((129, 1021), seed=1)
    d = op("sub.Tensor", x, y)
    return program([op("mean", op("mul.Tensor", d, d))])


@PROGRAMS.add
def cross_entropy() -> Program:
    """Rows of a softmax live in the tiles of the fold over the batch."""
    target = value((1500,), DType.I64, like=np.arange(1500) * 7 % 97)
    return program([op("cross_entropy_loss", value((1500, 97)), target)])


@PROGRAMS.add
def logsumexp() -> Program:
    """The maximum is complete before the sum begins: five phases."""
    return program([op("logsumexp", value((3, 70001)), [1])])


@PROGRAMS.add
def divided_by_its_norm() -> Program:
    x = value((311, 401))
    return program([op("div.Tensor", x, op("linalg_vector_norm", x))])


@PROGRAMS.add
def softmax_of_a_long_row() -> Program:
    return program([op("softmax.int", value((2, 1 << 17)), -1)])


def columns(rows: int, width: int, target: str = "sum.dim_IntList", strides=None) -> Program:
    one_row = np.random.default_rng(1).uniform(-3, 4, (1, width))
    x = value((rows, width), like=one_row.repeat(rows, 0) if strides and not strides[0] else None)
    last = -1 if target in ("argmax", "argmin") else None
    axes = 0 if last else [0]
    return program([op(target, x, axes)], strides={x: strides} if strides else {})


for rows, width in [(70001, 1), (9001, 13), (1031, 700), (257, 1023)]:
    for f in ("sum.dim_IntList", "amax", "argmax", "var.dim"):
        PROGRAMS.add(lambda a=(rows, width), f=f: columns(*a, f), f"{f} of columns {rows}x{width}")
PROGRAMS.add(lambda: columns(4001, 20, strides=(40, 2)), "sum of strided columns")
PROGRAMS.add(lambda: columns(4001, 20, strides=(1, 4001)), "sum of transposed columns")
PROGRAMS.add(lambda: columns(4001, 20, strides=(0, 1)), "sum of a broadcast row")


@PROGRAMS.add
def sum_over_outer_and_inner() -> Program:
    """The kept axis lies between the folded ones."""
    return program([op("sum.dim_IntList", value((37, 5, 1021)), [0, 2])])


for layout in (contiguous, channels_last):
    for shape in [(8, 6, 37, 41), (3, 19, 64, 64), (2, 70, 30, 31), (5, 3, 128, 128)]:

        def normalised(shape=shape, layout=layout) -> Program:
            x = value(shape)
            w, b = value(shape[1:2], seed=2), value(shape[1:2], seed=3)
            out, mean, var = batch_norm(op("mul.Tensor", x, value(shape, seed=4)), w, b)
            p = program([op("relu", out), mean, var], [w, b])
            wide = {t: layout(shape) for t in (*p.values, p.outputs[0]) if t.shape == shape}
            return Program(p.outputs, p.values, p.constants, wide)

        PROGRAMS.add(normalised, f"batch norm {shape} {layout.__name__}")


@PROGRAMS.add
def group_norm_of_few_groups() -> Program:
    x, w, b = value((1, 6, 151, 157)), value((6,), seed=1), value((6,), seed=2)
    return program([op("silu", op("group_norm", x, 2, w, b))], [w, b])


@PROGRAMS.add
def batch_norm_of_a_pool() -> Program:
    return program(batch_norm(op("max_pool2d", value((4, 3, 130, 130)), [3, 3], [1, 1])))


@PROGRAMS.add
def padded() -> Program:
    """A fold of a padded tensor: conditions in the body."""
    return program([op("sum", op("constant_pad_nd", value((300, 301)), [1, 2, 3, 0], 2.5))])


@PROGRAMS.add
def in_one_thread() -> Program:
    x = value((PRIME,))
    return program([op("sum", x), op("argmax", x)], options=KernelOptions(parallel=False))


@pytest.mark.parametrize("name", PROGRAMS.names())
def test_program(name: str) -> None:
    PROGRAMS.check(name)


# ---- structure ---------------------------------------------------------------------------------


def nest_of(p: Program) -> Nest | Refusal | None:
    region = region_for(p.outputs, list(p.values))
    staged = stage(region)
    assert not isinstance(staged, Refusal)
    strides = {t: contiguous(t.shape) for t in (*region.inputs, *region.tensors)} | p.strides
    return phased(staged, strides, Machine(2, 16))


def phases(p: Program) -> list[set[str]]:
    """The names of what each phase stores."""
    nest = nest_of(p)
    assert isinstance(nest, Nest)
    return [{st.tensor.name.rsplit("_", 1)[0] for st in n.stages} for n in nest.phases]


def test_batch_norm_reads_its_input_twice() -> None:
    """Statistics in one pass over memory, the small ones combined, then the normalised tensor."""
    found = phases(program([op("relu", batch_norm(value((8, 6, 64, 64)))[0])]))
    assert found == [{"partial"}, {"mean", "inverse_deviation"}, {"relu"}]


def test_squares_about_the_mean_share_its_chunks() -> None:
    """However the square is written: d * d has two copies of the distance."""
    x = value((PRIME,))
    d = op("sub.Tensor", x, op("mean", x))
    found = phases(program([op("sum", op("mul.Tensor", d, d))]))
    assert found == [{"partial"}, {"mean", "sum"}]


def test_phases_wait_for_each_other() -> None:
    """Every loop but the last phase's ends with OpenMP's barrier."""
    jobs = jobs_of(program([op("logsumexp", value((3, 70001)), [1])]))
    assert isinstance(jobs, list)
    shared = [line for line in jobs[0].source.text.split("\n") if "#pragma omp" in line]
    loops = [line for line in shared if "for" in line or "single" in line]
    assert len(loops) > 1
    assert ["nowait" in line for line in loops] == [False] * (len(loops) - 1) + [True]


def test_a_different_mean_is_not_taken_for_the_mean() -> None:
    """Squares about the mean of something else need that mean first."""
    x, y = value((PRIME,)), value((PRIME,), seed=1)
    d = op("sub.Tensor", x, op("mean", y))
    found = phases(program([op("sum", op("mul.Tensor", d, d))]))
    assert found == [{"partial"}, {"mean"}, {"partial"}, {"sum"}]


@pytest.mark.parametrize("shape", [(255, 256), (64, 1000), (0,), (1,), (4096, 300)])
def test_small_and_many_folds_are_left_alone(shape) -> None:
    x = value(shape)
    assert nest_of(program([op("sum.dim_IntList", x, [-1])])) is None


def gaps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a slice: no two axes walk memory as one."""
    return tuple(s * (len(shape) - d) for d, s in enumerate(contiguous(shape)))


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("strides", [contiguous, gaps])
def test_chunks_cover_each_element_once(shape, strides) -> None:
    """Every point of the fold, counted over chunks and what is left."""
    x = given(shape, DType.F32)
    (r,) = reduces(op("sum", x).body)
    cut = cut_fold(r, {x: strides(shape)}, set())
    assert cut is not None
    seen = np.zeros(shape, np.int64)
    for axes, place in [((*cut.chunks, *cut.inside), cut.place), (cut.tail, cut.rest)]:
        if axes:
            (ld,) = loads(r.body)
            grid = np.indices([a.extent for a in axes])
            index = [
                _numbers(substitute(i, place), dict(zip(axes, grid, strict=True))) for i in ld.index
            ]
            np.add.at(seen, tuple(index), 1)
    assert (seen == 1).all()


def _numbers(e, at):
    from onchip.ir.expr import Axis, Call, Const

    match e:
        case Axis():
            return at[e]
        case Const(value=v):
            return v
        case Call(fn=fn, args=(a, b)):
            x, y = _numbers(a, at), _numbers(b, at)
            table = {"add": np.add, "mul": np.multiply, "floordiv": np.floor_divide, "mod": np.mod}
            return table[fn](x, y)
    raise AssertionError(e)


def test_a_product_behind_a_fold_is_refused() -> None:
    x, w = value((400, 64)), value((300, 64), seed=1)
    found = nest_of(program([op("sum", op("linear", x, w))], [w]))
    assert isinstance(found, Refusal)
    assert found.rule is Rule.SPLIT_PRODUCT


def test_a_lookup_counts_what_it_reads() -> None:
    """A few losses that are looked up in a large tensor are not worth cutting."""
    x, t = given((300, 5000), DType.F32), given((300,), DType.I64)
    a = axis(300)
    body = Reduce("sum", (a,), Load(x, (a, Load(t, (a,)))))
    total = Tensor("total_0", (), DType.F32, (), body)
    s = Staged(total, body, True, (), ())
    assert len(split_folds((s,), {x: (5000, 1), t: (1,)})) == 1
    whole = Reduce("sum", (a, b := axis(5000)), Load(x, (a, b)))
    assert len(split_folds((replace(s, body=whole),), {x: (5000, 1)})) == 2


def test_partial_results_have_a_budget() -> None:
    x = given((1 << 18, 1 << 18), DType.F32)
    region = region_for([op("sum.dim_IntList", x, [0])], [x])
    found = phased(stage(region), {x: contiguous(x.shape)}, Machine(2, 16))  # type: ignore[arg-type]
    assert isinstance(found, Refusal)
    assert found.rule is Rule.WORKSPACE


def test_a_fold_of_a_window_is_folded_once() -> None:
    """The statistics and the result both read the pooled tensor, which lies in the workspace."""
    x = op("max_pool2d", value((4, 3, 130, 130)), [3, 3], [1, 1])
    found = phases(program([batch_norm(x)[0]]))
    assert found[0] == {"max_pool"}
    assert "max_pool" not in set().union(*found[1:])


def test_phases_where_tiles_have_nothing_in_common() -> None:
    """Many channels need no cut; the running statistics still are no part of the result's tiles."""
    p = program(batch_norm(value((2, 70, 30, 31))))
    assert nest_of(p) is None
    region = region_for(p.outputs, list(p.values))
    strides = {t: contiguous(t.shape) for t in (*region.inputs, *region.tensors)}
    (nest,) = nests_for(stage(region), strides, Machine(2, 16))  # type: ignore[arg-type]
    assert len(nest.phases) == 2


# ---- values ------------------------------------------------------------------------------------


def run(p: Program, choice: int = 0) -> np.ndarray:
    jobs = jobs_of(p)
    assert isinstance(jobs, list)
    return jobs[choice].run(build(jobs[choice].source.text).function)[0]


@pytest.mark.parametrize("f", ["argmax", "argmin"])
@pytest.mark.parametrize("at", [(), (5,), (PRIME - 1,), (70000, 3), (PRIME - 1, 40000)])
@pytest.mark.parametrize("special", ["nan", "ties", "inf"])
def test_positions_are_atens(f: str, at: tuple[int, ...], special: str) -> None:
    """The first NaN, else the first of equal extremes; also in what no chunk covers."""
    x = np.random.default_rng(3).uniform(-1, 1, PRIME).astype(np.float32)
    top = {"nan": np.nan, "ties": 2.0, "inf": np.inf}[special] * (1 if f == "argmax" else -1)
    x[list(at)] = top
    got = run(program([op(f, value((PRIME,), like=x))]))
    assert int(got) == int(getattr(torch, f)(torch.from_numpy(x)))


def test_nan_is_seen_by_extremes() -> None:
    x = np.zeros(PRIME, np.float32)
    x[PRIME - 2] = np.nan
    assert np.isnan(run(program([op("max", value((PRIME,), like=x))])))


@pytest.mark.parametrize("shape", [(1 << 20,), (PRIME,), (1 << 15, 40), (40, 1 << 15)])
@pytest.mark.parametrize("f", ["sum", "mean", "var", "linalg_vector_norm"])
def test_error_is_not_above_atens(f: str, shape: tuple[int, ...]) -> None:
    """Against float64, on data whose sum does not cancel (a relative error would say nothing)."""
    x = np.random.default_rng(5).normal(3.0, 1.0, shape).astype(np.float32)
    call = getattr(torch, f) if f in ("sum", "mean", "var") else torch.linalg.vector_norm
    exact = float(call(torch.from_numpy(x).double()))
    theirs = abs(float(call(torch.from_numpy(x))) - exact)
    ours = abs(float(run(program([op(f, value(shape, like=x))]))) - exact)
    half_ulp = 0.5 * float(np.spacing(np.float32(exact)))
    assert ours <= max(1.5 * theirs, 2 * half_ulp), (ours, theirs, half_ulp)


def test_variance_of_a_large_mean() -> None:
    """Squares about the mean, not differences of squares: no cancellation."""
    x = np.random.default_rng(6).normal(1e4, 1.0, PRIME).astype(np.float32)
    got = float(run(program([op("var", value((PRIME,), like=x))])))
    assert got == pytest.approx(x.astype(np.float64).var(ddof=1), rel=1e-5)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x = value((16, 3, 67, 67))
    p = program([op("relu", batch_norm(x)[0]), op("sum", x)])
    threads = torch.get_num_threads()
    found = []
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            jobs = jobs_of(p)
            assert isinstance(jobs, list)
            found.append(jobs[0].run(build(jobs[0].source.text).function))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
