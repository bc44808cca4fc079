"""Reductions over rows, matrix products and attention with their neighbours, in one kernel."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fusion.harness import Program, Programs, op, program, value

from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor

# Unoptimised: these are many kernels, and the main loop of each product is a template.
PROGRAMS = Programs("-O0")
SHAPES = [(5, 7), (3, 1), (1, 33), (2, 3, 67), (1, 1), (0, 4), (3, 1200)]


def add(name: str, maker) -> None:
    PROGRAMS.add(maker, name)


def softmax(shape, dim: int = -1, dtype: DType = DType.F32) -> Program:
    x, y = value(shape, dtype), value(shape, dtype, seed=1)
    t = op("softmax.int", op("mul.Scalar", op("add.Tensor", x, y), 1.7), dim)
    return program([op("mul.Tensor", t, op("tanh", y))])


def layer_norm(shape, dtype: DType = DType.F32) -> Program:
    x, r = value(shape, dtype), value(shape, dtype, seed=1)
    n = shape[-1:]
    w, b = value(n, dtype, seed=2), value(n, dtype, seed=3)
    return program([op("gelu", op("layer_norm", op("add.Tensor", x, r), n, w, b))], [w, b])


def residual_norm(shape) -> Program:
    """The sum is needed by others as well: two outputs of one kernel."""
    x, r = value(shape), value(shape, seed=1)
    total = op("add.Tensor", x, r)
    return program([op("layer_norm", total, shape[-1:]), total])


for s in SHAPES:
    add(f"softmax {s}", lambda s=s: softmax(s))
    add(f"softmax of axis 0 {s}", lambda s=s: softmax(s, 0))
    if 0 not in s:
        add(f"layer norm {s}", lambda s=s: layer_norm(s))
        add(f"residual norm {s}", lambda s=s: residual_norm(s))
for d in (DType.F64, DType.F16, DType.BF16):
    add(f"softmax {d}", lambda d=d: softmax((4, 37), dtype=d))
    add(f"layer norm {d}", lambda d=d: layer_norm((4, 37), d))


LONG = 70001  # a row that is cut into chunks, with elements that no chunk covers


def long_rows(dtype: DType = DType.F32) -> Tensor:
    """Maxima that differ between the chunks; a chunk that is masked, and a row that is."""
    x = np.linspace(-40, 5, LONG) + np.random.default_rng(3).normal(size=(3, LONG))
    x[0, 20000:60000] = x[2] = -np.inf
    return value(x.shape, dtype, like=x)


for d in (DType.F32, DType.F64, DType.BF16):
    add(f"long softmax {d}", lambda d=d: program([op("softmax.int", long_rows(d), -1)]))
    add(f"long layer norm {d}", lambda d=d: layer_norm((2, LONG), d))
add("long log softmax", lambda: program([op("log_softmax.int", long_rows(), -1)]))
add("long safe softmax", lambda: program([op("_safe_softmax", long_rows(), -1)]))


@PROGRAMS.add
def sum_of_a_part() -> Program:
    """The first to read exp(x) reads a part of each row; the second reads all of it."""
    x = value((3, 140))
    e = op("exp", op("sub.Tensor", x, op("amax", x, [1], True)))
    part = op("slice.Tensor", e, 1, 0, 70)
    return program([op("mul.Tensor", e, op("sum.dim_IntList", part, [1], True))])


@PROGRAMS.add
def group_norm() -> Program:
    x, w, b = value((2, 6, 5, 7)), value((6,), seed=1), value((6,), seed=2)
    return program([op("silu", op("group_norm", op("relu", x), 3, w, b))], [w, b])


@PROGRAMS.add
def rms_norm() -> Program:
    x, w = value((3, 5, 40)), value((40,), seed=1)
    squares = op("mean.dim", op("mul.Tensor", x, x), [-1], True)
    scale = op("rsqrt", op("add.Scalar", squares, 1e-6))
    return program([op("mul.Tensor", op("mul.Tensor", x, scale), w)], [w])


@PROGRAMS.add
def mean_and_variance() -> Program:
    x = value((7, 130))
    mean = op("mean.dim", x, [1], True)
    d = op("sub.Tensor", x, mean)
    return program([op("mean.dim", op("mul.Tensor", d, d), [1]), op("sum.dim_IntList", x, [1])])


@PROGRAMS.add
def two_reductions_of_columns() -> Program:
    x = value((130, 7))
    centred = op("sub.Tensor", x, op("mean.dim", x, [0], True))
    return program([op("amax", op("abs", centred), [0])])


@PROGRAMS.add
def argmax_of_products() -> Program:
    x, w = value((6, 10)), value((10, 17), seed=1)
    return program([op("argmax", op("mm", x, w), 1)], [w])


# ---- matrix products ---------------------------------------------------------------------------


def product(m: int, k: int, n: int, after: str, constant: bool = True, dtype=DType.F32) -> Program:
    x, w = value((m, k), dtype), value((k, n), dtype, seed=1)
    t = op("mm", op("relu", x) if after == "both" else x, w)
    if after in ("softmax", "both"):
        t = op("softmax.int", op("mul.Scalar", t, 0.3), -1)
    elif after == "norm":
        t = op("layer_norm", op("add.Tensor", t, value((m, n), dtype, seed=3)), (n,))
    elif after == "gelu":
        t = op("gelu", op("add.Tensor", t, value((n,), dtype, seed=4)))
    elif after == "sum":
        t = op("sum.dim_IntList", t, [1])
    elif after == "columns":
        t = op("amax", t, [0])
    elif after == "transpose":
        t = op("neg", op("t", t))
    return program([t], [w] if constant else [], tolerance=None if dtype.size < 4 else 1e-4)


for after in ("none", "softmax", "both", "norm", "gelu", "sum", "columns", "transpose"):
    for constant in (True, False):
        add(f"mm {after} {constant}", lambda a=after, c=constant: product(37, 29, 41, a, c))
for m, k, n in ((1, 64, 33), (64, 1, 33), (33, 17, 1), (1, 1, 1), (5, 0, 4), (0, 4, 4), (4, 4, 0)):
    for constant in (True, False):
        add(
            f"mm {m} {k} {n} {constant}",
            lambda m=m, k=k, n=n, c=constant: product(m, k, n, "gelu", c),
        )
for d in (DType.F64, DType.BF16, DType.F16):
    add(f"mm softmax {d}", lambda d=d: product(19, 23, 31, "softmax", True, d))
add("mm long rows", lambda: product(70, 530, 70, "softmax"))


@PROGRAMS.add
def linear_of_flattened() -> Program:
    x, w, b = value((3, 4, 5, 2)), value((11, 40), seed=1), value((11,), seed=2)
    flat = op("view", op("relu", x), [3, 40])
    return program([op("sigmoid", op("linear", flat, w, b))], [w, b], tolerance=1e-4)


@PROGRAMS.add
def product_of_transposed() -> Program:
    x, y = value((2, 13, 9)), value((2, 13, 11), seed=1)
    return program([op("bmm", op("transpose.int", x, 1, 2), y)], tolerance=1e-4)


@PROGRAMS.add
def mlp() -> Program:
    x = value((21, 16))
    w, b = value((40, 16), seed=1), value((40,), seed=2)
    return program([op("gelu", op("linear", x, w, b)), op("linear", x, w)], [w, b])


def attention(batch: int, heads: int, q: int, k: int, d: int, **options) -> Program:
    shapes = ((batch, heads, q, d), (batch, heads, k, d), (batch, heads, k, d))
    a, b, c = (value(s, seed=n) for n, s in enumerate(shapes))
    scores = op("matmul", op("mul.Scalar", a, d**-0.5), op("transpose.int", b, 2, 3))
    if options.get("mask"):
        mask = value((q, k), DType.BOOL, seed=5)
        scores = op("where.ScalarOther", mask, scores, -1e9)
    p = op("softmax.int", scores, -1)
    return program([op("matmul", p, c)], tolerance=1e-4)


add("attention", lambda: attention(2, 3, 17, 13, 8))
add("attention of one query", lambda: attention(1, 2, 1, 33, 16))
add("attention of one key", lambda: attention(1, 2, 5, 1, 16))
add("masked attention", lambda: attention(1, 2, 19, 23, 16, mask=True))


@pytest.mark.parametrize("name", PROGRAMS.names())
def test_program_is_one_right_kernel(name: str) -> None:
    PROGRAMS.check(name)
