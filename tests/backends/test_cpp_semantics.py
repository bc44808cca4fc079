"""What generated C++ must do in the corners: NaN, infinities, signed zeros, wrapping integers,
indices and divisors that are errors, and branches that are not taken."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.fusion.harness import (
    Program,
    Programs,
    jobs_of,
    op,
    program,
    value,
)

from onchip.backends.cpp.run import run_all
from onchip.backends.interpreter import evaluate
from onchip.ir.dtype import DType
from onchip.ir.expr import Call, Tensor, fold, tensor

NAN, INF = math.nan, math.inf
SPECIAL = np.array(
    [[1.0, NAN, -2.0, INF, -0.0], [0.0, -INF, 3.0, NAN, NAN], [-INF] * 5, [INF, INF, 1, 2, 3]]
)
INTEGERS = (DType.I8, DType.I16, DType.I32, DType.I64, DType.U8)
PROGRAMS = Programs()


def add(name: str, maker) -> None:
    PROGRAMS.add(maker, name)


def special(dtype: DType = DType.F32) -> Tensor:
    return value(SPECIAL.shape, dtype, like=SPECIAL)


def _wide(seed: int, n: int = 101) -> np.ndarray:
    """More than a vector's worth, so that both vector loops and their tails see a NaN."""
    x = np.random.default_rng(seed).normal(size=(3, n))
    x[0, 17], x[1, n - 1], x[2, 3] = NAN, NAN, INF
    return x


def wide_special(seed: int) -> Tensor:
    return value((3, 101), like=_wide(seed))


def wide_double() -> Tensor:
    return value((3, 101), DType.F64, like=_wide(4))


def wide_integers() -> Tensor:
    """All below zero, and all above: a start value of 0 would show."""
    x = np.random.default_rng(5).integers(1, 100, (2, 101)) * np.array([[-1], [1]])
    return value(x.shape, DType.I32, like=x)


def wide_bools() -> Tensor:
    """Only the last one differs."""
    x = np.zeros((2, 101), bool)
    x[0, 100], x[1, :100] = True, True
    return value(x.shape, DType.BOOL, like=x)


def tall_special() -> Tensor:
    """So many rows that each column has an accumulator of its own."""
    return value((101, 3), like=_wide(6).T)


for d in (DType.F32, DType.F64):
    add(f"relu {d}", lambda d=d: program([op("relu", special(d))]))
    add(f"clamp {d}", lambda d=d: program([op("clamp", special(d), -1, 2)]))
    for name in ("maximum", "minimum"):
        add(
            f"{name} {d}",
            lambda d=d, name=name: program(
                [op(name, special(d), value(SPECIAL.shape, d, like=SPECIAL[::-1]))]
            ),
        )
    for name in ("amax", "amin", "argmax", "argmin", "softmax.int", "sum.dim_IntList"):
        for dim in (0, 1):
            add(
                f"{name} {d} {dim}",
                lambda d=d, name=name, dim=dim: program(
                    [op(name, special(d), dim if "arg" in name or "soft" in name else [dim])]
                ),
            )
for name in ("amax", "amin", "argmax", "argmin"):
    for dim in (0, 1):
        add(
            f"wide {name} {dim}",
            lambda name=name, dim=dim: program(
                [op(name, wide_special(3), dim if "arg" in name else [dim])]
            ),
        )
for name in ("amax", "amin"):
    add(f"wide {name} in double", lambda name=name: program([op(name, wide_double(), [1])]))
    add(f"wide {name} of integers", lambda name=name: program([op(name, wide_integers(), [1])]))
    add(f"wide {name} of bools", lambda name=name: program([op(name, wide_bools(), [1])]))
    add(f"tall {name}", lambda name=name: program([op(name, tall_special(), [0])]))


@PROGRAMS.add
def pool_passes_nan_on() -> Program:
    x = np.random.default_rng(5).normal(size=(1, 3, 9, 11)) - 5
    x[0, 0, 4, 5], x[0, 1, 8, 10], x[0, 2, 0, 0] = NAN, NAN, -INF
    return program([op("max_pool2d", value(x.shape, like=x), [3, 3], [2, 2], [1, 1])])


@PROGRAMS.add
def zero_times_infinity() -> Program:
    return program([op("mul.Scalar", special(), 0.0), op("sub.Tensor", *[special()] * 2)])


@PROGRAMS.add
def mask_of_minus_infinity() -> Program:
    """A row that is masked whole gives NaN, as in eager."""
    return program([op("softmax.int", op("add.Tensor", special(), special()), 1)])


for d in INTEGERS:

    def wrapping(d: DType = d) -> Program:
        info = np.iinfo(d.label)
        x = value((6,), d, like=np.array([info.max, info.min, 0, 1, info.max // 2 + 1, 3]))
        y = value((6,), d, like=np.array([info.max, info.min, 1, 7, 5, info.max]))
        outputs = [op("add.Tensor", x, y), op("mul.Tensor", x, y), op("sub.Tensor", x, y)]
        outputs += [op("neg", x), op("abs", x), op("bitwise_xor.Tensor", x, y)]
        return program(outputs)

    def long_sums(d: DType = d) -> Program:
        x = value((3, 77), d, low=0 if d is DType.U8 else -100, high=100)
        return program(
            [op("sum.dim_IntList", x, [1]), op("amax", x, [1]), op("prod.dim_int", x, 1)][:2]
        )

    def division(d: DType = d) -> Program:
        low = 0 if d is DType.U8 else -9
        x = value((64,), d, low=low, high=9)
        y = value((64,), d, low=1, high=5)
        if d is not DType.U8:
            y = op("neg", y)
        floor = op("floor_divide", x, y)
        return program([floor, op("remainder.Tensor", x, y), op("fmod.Tensor", x, y)])

    add(f"wrapping {d}", wrapping)
    add(f"sums {d}", long_sums)
    add(f"division {d}", division)


@PROGRAMS.add
def smallest_by_minus_one() -> Program:
    """Traps on x86 unless the emitter avoids it; ATen traps as well, so any value will do but
    none may end the process: numpy's, which wraps."""
    smallest = np.array([-(2**31), 5, -7])
    x = value((3,), DType.I32, like=smallest)
    y = value((3,), DType.I32, like=np.array([-1, -1, -1]))
    return program([op("remainder.Tensor", x, y), op("floor_divide", x, y)])


@PROGRAMS.add
def bools() -> Program:
    x, y = value((33,), DType.BOOL), value((33,), DType.BOOL, seed=1)
    outputs = [op("add.Tensor", x, y), op("mul.Tensor", x, y), op("logical_xor", x, y)]
    return program([*outputs, op("bitwise_not", x)])


@PROGRAMS.add
def bool_reductions() -> Program:
    x = value((5, 77), DType.BOOL)
    return program([op("any.dim", x, 1), op("all.dim", x, 1), op("sum.dim_IntList", x, [1])])


@PROGRAMS.add
def float_to_integers() -> Program:
    x = value((5,), like=np.array([-1.7, 2.9, -0.2, 100.5, -100.5]))
    types = (DType.I8, DType.U8, DType.I32, DType.I64, DType.BOOL)
    return program([tensor(x.shape, d, lambda i, d=d: Call(f"cast_{d.label}", (x[i],), d))
                    for d in types])  # fmt: skip


@PROGRAMS.add
def negative_index_arithmetic() -> Program:
    """int64 floor division and remainder of axis values below zero."""
    y = tensor((23,), DType.I64, lambda i: (i - 11) // 4)
    z = tensor((23,), DType.I64, lambda i: (i - 11) % 4)
    return program([y, z, op("add.Tensor", y, z)])


@PROGRAMS.add
def index_of_negative_quotient() -> Program:
    x = value((9,))
    return program([tensor((23,), DType.F32, lambda i: x.padded(7.0)[(i - 11) // 3])])


@PROGRAMS.add
def branch_not_taken_reads_out_of_range() -> Program:
    """-x is evaluated where it is read, with the padding's condition around it."""
    y = op("neg", value((590,)))
    return program([tensor((600,), DType.F32, lambda i: y.padded(-1.0)[i - 7])])


@PROGRAMS.add
def padded_quotient_has_no_divisor_outside() -> Program:
    """a // b is padded: outside it there is no b, so nothing is divided by zero."""
    a = value((5,), DType.I32, low=-9, high=9)
    b = value((5,), DType.I32, low=1, high=5)
    return program([op("constant_pad_nd", op("floor_divide", a, b), [2, 3], 7)])


@PROGRAMS.add
def padded_gather_has_no_index_outside() -> Program:
    x = value((9,))
    index = value((5,), DType.I64, low=0, high=8.9)
    shifted = op("sub.Tensor", index, value((5,), DType.I64, like=np.zeros(5)))
    taken = op("index.Tensor", x, [shifted])
    return program([op("constant_pad_nd", taken, [2, 3], 7.0)])


@PROGRAMS.add
def padded_read_at_a_given_index() -> Program:
    """The padding of an inlined tensor catches an index that is out of range: no error."""
    y = op("tanh", value((9,)))
    index = value((4,), DType.I64, like=np.array([3, -1, 9, 8]))
    return program([tensor((4,), DType.F32, lambda i: y.padded(-1.0)[index[i]])])


@PROGRAMS.add
def output_read_transposed() -> Program:
    """Both outputs have the same shape, but the second reads the first across the tiles."""
    y = op("mul.Scalar", value((37, 37)), 2.5)
    return program([y, op("tanh", op("t", y))])


@PROGRAMS.add
def argmax_of_flattened() -> Program:
    return program([op("argmax", op("view", op("neg", value((3, 5, 7))), [3, 35]), 1)])


@PROGRAMS.add
def shifted_reads_of_a_stored_value() -> Program:
    y = op("exp", op("tanh", op("sin", value((700,)))))
    return program([tensor((690,), DType.F32, lambda i: y[i] * y[i + 9] - y[i + 4])])


@PROGRAMS.add
def reductions_over_nothing() -> Program:
    x = value((4, 0))
    return program([op("sum.dim_IntList", x, [1]), op("prod.dim_int", x, 1)])


@PROGRAMS.add
def nested_reductions() -> Program:
    """A maximum over j of sums over k that change with j."""
    x = value((70, 70, 3))

    def element(i):
        def row(j):
            return fold("sum", (70,), lambda k: x[j, k, i] * x[k, j, i])

        return fold("max", (70,), row)

    return program([tensor((3,), DType.F32, element)])


@PROGRAMS.add
def deviation_from_a_mean_of_lanes() -> Program:
    """The inner sum varies along the vector axis and is used inside the outer one's loop."""
    x = value((80, 33))

    def element(i):
        mean = fold("sum", (80,), lambda k: x[k, i]) / 80.0
        return fold("sum", (80,), lambda k: (x[k, i] - mean) * (x[k, i] - mean))

    return program([tensor((33,), DType.F32, element)])


@PROGRAMS.add
def a_result_read_again_is_not_read_early() -> Program:
    """`total` is stored by this kernel, and read at an element that no loop mentions."""
    x = value((4, 33))
    total = op("sum.dim_IntList", x, [1])
    last = tensor((4,), DType.F32, lambda i: total[3 - i] + total[2])
    return program([op("sub.Tensor", op("tanh", total), last), total])


@PROGRAMS.add
def same_text_at_two_levels() -> Program:
    x = value((3, 600))
    y = value((3, 600), seed=1)
    sums = [op("sum.dim_IntList", t, [1], True) for t in (x, y)]
    both = op("add.Tensor", *sums)
    return program([op("mul.Tensor", op("add.Tensor", x, both), op("sub.Tensor", y, both))])


@pytest.mark.parametrize("name", PROGRAMS.names())
def test_semantics(name: str) -> None:
    PROGRAMS.check(name)


def test_zero_keeps_its_sign() -> None:
    """x + 0 makes -0 into +0 and must not be folded away; x * 1 and -x keep or flip it."""
    x = value((3,), like=np.array([-0.0, 0.0, 1.0]))
    outputs = [op("add.Scalar", x, 0.0), op("mul.Scalar", x, 1.0), op("neg", x)]
    (results,) = run_all(jobs_of(program(outputs))[:1])
    signs = [list(np.signbit(r)) for r in results]
    assert signs == [[False, False, False], [True, False, False], [False, True, True]]


def test_first_nan_wins_argmax() -> None:
    (results,) = run_all(jobs_of(program([op("argmax", special(), 1)]))[:1])
    assert results[0].tolist() == [1, 3, 0, 0]


FAILING = {
    "gather above": lambda: _gather([0, 9, 2]),
    "gather below": lambda: _gather([0, -10, 2]),
    "embedding": lambda: _embedding(33),
    "gather in a vector loop": lambda: _gather([*range(9), *[3] * 600, 9]),
    "division": lambda: _divide("floor_divide", [1, 0, 2]),
    "remainder": lambda: _divide("remainder.Tensor", [1, 0, 2]),
    "fmod": lambda: _divide("fmod.Tensor", [1, 0, 2]),
    "division in a vector loop": lambda: _divide("floor_divide", [1] * 700 + [0] + [2] * 500),
    "division inside a sum": lambda: _sum_of_quotients(),
}


def _gather(index: list[int]) -> Program:
    i = value((len(index),), DType.I64, like=np.array(index))
    x = value((9,))
    return program([op("neg", tensor(i.shape, DType.F32, lambda k: x[i[k]]))])


def _embedding(bad: int) -> Program:
    w = value((33, 7))
    index = value((2, 3), DType.I64, like=np.array([[0, 1, bad], [32, 5, 6]]))
    return program([op("relu", op("embedding", w, index))])


def _divide(name: str, divisor: list[int]) -> Program:
    y = value((len(divisor),), DType.I32, like=np.array(divisor))
    x = value(y.shape, DType.I32, low=-9, high=9)
    return program([op("add.Scalar", op(name, x, y), 1)])


def _sum_of_quotients() -> Program:
    y = value((3, 700), DType.I64, like=np.where(np.arange(2100).reshape(3, 700) == 900, 0, 1))
    x = value((3, 700), DType.I64, low=-9, high=9)
    return program([op("sum.dim_IntList", op("floor_divide", x, y), [1])])


@pytest.fixture(scope="module")
def failures() -> dict[str, list]:
    jobs = {name: jobs_of(make()) for name, make in FAILING.items()}
    flat = [j for js in jobs.values() for j in js]
    results = iter(run_all(flat, "-O1"))
    return {name: [next(results) for _ in js] for name, js in jobs.items()}


@pytest.mark.parametrize("name", FAILING)
def test_errors_are_raised_as_in_eager(name: str, failures: dict[str, list]) -> None:
    p = FAILING[name]()
    kind = IndexError if "gather" in name or "embedding" in name else ZeroDivisionError
    with pytest.raises(kind):
        evaluate(p.outputs, p.values)
    assert failures[name], f"{name} has no kernel"
    assert all(type(got) is kind for got in failures[name])


def test_two_hundred_operators_compile_in_seconds() -> None:
    import time

    from onchip.backends.cpp.compiler import build

    x = value((1000,))
    t = x
    for n in range(200):
        t = op(("tanh", "sigmoid", "neg", "relu")[n % 4], op("add.Scalar", t, 0.1 * n))
    (job, *_) = jobs_of(program([t]))
    start = time.process_time()
    build(job.source.text)
    assert time.process_time() - start < 30
