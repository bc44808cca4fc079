"""Random small graphs in one generated kernel equal the interpreter, for every choice of tile."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, note
from hypothesis import strategies as st
from tests.fusion.harness import Program, close, jobs_of, op, program, value

from onchip.backends.cpp.run import run_all
from onchip.fusion.refusal import Refusal
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor

EXTENTS = st.sampled_from([1, 2, 3, 5, 7, 12, 33])
UNARY = ("relu", "neg", "tanh", "sigmoid", "abs", "gelu", "silu")
BINARY = ("add.Tensor", "sub.Tensor", "mul.Tensor", "maximum", "minimum")
REDUCTIONS = ("sum.dim_IntList", "amax", "amin", "mean.dim")
GRAPHS = 8  # graphs of one example: they share one compilation


def pointwise(draw, pool: list[Tensor]) -> Tensor:
    x = draw(st.sampled_from(pool))
    if draw(st.booleans()):
        return op(draw(st.sampled_from(UNARY)), x)
    same = [y for y in pool if y.shape == x.shape]
    return op(draw(st.sampled_from(BINARY)), x, draw(st.sampled_from(same)))


def view(draw, pool: list[Tensor]) -> Tensor:
    x = draw(st.sampled_from([t for t in pool if t.rank] or pool))
    if not x.rank:
        return op("unsqueeze", x, 0)
    dim = draw(st.integers(0, x.rank - 1))
    n = x.shape[dim]
    match draw(st.sampled_from(["permute", "slice", "flip", "pad", "flatten", "expand", "cat"])):
        case "permute":
            return op("permute", x, draw(st.permutations(range(x.rank))))
        case "slice":
            start = draw(st.integers(0, n - 1))
            return op("slice.Tensor", x, dim, start, None, draw(st.integers(1, 3)))
        case "flip":
            return op("flip", x, [dim])
        case "pad":
            low, high = draw(st.integers(-1 if n > 2 else 0, 2)), draw(st.integers(0, 2))
            return op("constant_pad_nd", x, [low, high], draw(st.sampled_from([0.0, -1.5])))
        case "flatten":
            return op("view", x, [x.numel])
        case "expand":
            return op("expand", op("unsqueeze", x, dim), [*x.shape[:dim], 3, *x.shape[dim:]])
    return op("cat", [x, op("neg", x)], dim)


def reduction(draw, pool: list[Tensor]) -> Tensor:
    x = draw(st.sampled_from(pool))
    assume(x.rank > 0)
    dim = draw(st.integers(0, x.rank - 1))
    kind = draw(st.sampled_from([*REDUCTIONS, "softmax.int", "layer_norm", "argmax"]))
    if kind in REDUCTIONS:
        r = op(kind, x, [dim], True)
        return r if draw(st.booleans()) else op("sub.Tensor", x, r)
    if kind == "layer_norm":
        return op(kind, x, x.shape[-1:])
    return op(kind, x, dim)


def product(draw, pool: list[Tensor]) -> Tensor:
    x = draw(st.sampled_from([t for t in pool if t.rank >= 2 and t.dtype is DType.F32] or pool[:1]))
    assume(x.rank >= 2)
    w = value((x.shape[-1], draw(EXTENTS)), seed=draw(st.integers(0, 99)))
    return op("matmul", x, w)


def window(draw, pool: list[Tensor]) -> Tensor:
    x = draw(st.sampled_from([t for t in pool if t.rank == 4 and t.dtype is DType.F32] or pool[:1]))
    assume(x.rank == 4 and min(x.shape[2:]) >= 2)
    match draw(st.sampled_from(["max", "avg", "conv"])):
        case "max":
            return op("max_pool2d", x, [3, 3], [2, 2], [1, 1])
        case "avg":
            return op("avg_pool2d", x, [2, 2], [draw(st.integers(1, 2))] * 2)
    c = draw(EXTENTS)
    return op("conv2d", x, value((c, x.shape[1], 3, 3), seed=5), None, draw(st.integers(1, 2)), 1)


@st.composite
def graphs(draw) -> Program:
    """Up to six operators over one or two inputs; the last result, and sometimes one on the way."""
    rank = draw(st.integers(1, 4))
    shape = tuple(draw(EXTENTS) for _ in range(rank))
    assume(np.prod(shape) < 5000)
    pool = [value(shape), value(shape, seed=1)]
    made: list[Tensor] = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from([pointwise, pointwise, view, reduction, product, window]))
        t = kind(draw, [p for p in pool if p.dtype is DType.F32])
        assume(0 < t.numel < 20000)
        pool.append(t)
        made.append(t)
    outputs = [made[-1]]
    if len(made) > 1 and draw(st.booleans()):
        outputs.append(draw(st.sampled_from(made[:-1])))
    constants = [t for t in program(outputs).values if t not in pool[:2] and draw(st.booleans())]
    return program(outputs, constants, tolerance=2e-4)


@given(st.lists(graphs(), min_size=GRAPHS, max_size=GRAPHS))
def test_one_kernel_is_the_interpreter(programs: list[Program]) -> None:
    work = [(p, j) for p in programs if not isinstance(js := jobs_of(p), Refusal) for j in js]
    for (p, j), got in zip(work, run_all([j for _, j in work]), strict=True):
        note(j.source.text)
        assert not isinstance(got, Exception), f"{got!r}\n{j.source.text}"
        close(got, p, j.source.text)
