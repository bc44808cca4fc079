"""Kernels take any strides, for inputs and outputs: transposed, sliced with a step, expanded,
channels-last; and write nothing between the elements."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from tests.fusion.harness import Program, Programs, op, program, value

from onchip.backends.cpp.kernel import KernelOptions
from onchip.backends.cpp.run import cpp_evaluate
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor

PROGRAMS = Programs()
Strides = tuple[int, ...]


def in_order(shape: tuple[int, ...], order: tuple[int, ...], step: int, gap: int) -> Strides:
    out = [0] * len(shape)
    for d in reversed(order):
        out[d] = step
        step = step * max(shape[d], 1) + gap
        gap = 0
    return tuple(out)


LAYOUTS: dict[str, Callable[[tuple[int, ...]], Strides]] = {
    "dense": lambda s: in_order(s, tuple(range(len(s))), 1, 0),
    "transposed": lambda s: in_order(s, tuple(reversed(range(len(s)))), 1, 0),
    "stepped": lambda s: in_order(s, tuple(range(len(s))), 3, 0),
    "rows apart": lambda s: in_order(s, tuple(range(len(s))), 1, 5),
    "channels last": lambda s: in_order(s, (0, *range(2, len(s)), 1), 1, 0),
    "expanded": lambda s: (0, *in_order(s[1:], tuple(range(len(s) - 1)), 1, 0)),
}
WRITABLE = [name for name in LAYOUTS if name != "expanded"]


def same_rows(t: Tensor) -> Tensor:
    """A value that an expanded layout can hold: equal along axis 0."""
    return value(t.shape, t.dtype, like=np.broadcast_to(t_values(t)[:1], t.shape))


def t_values(t: Tensor) -> np.ndarray:
    from tests.fusion.harness import VALUES

    return VALUES[t]


def chain(x: Tensor) -> list[Tensor]:
    return [op("add.Tensor", op("relu", x), op("sum.dim_IntList", x, [-1], True))]


def two_outputs(x: Tensor) -> list[Tensor]:
    y = op("mul.Scalar", x, 2.5)
    return [op("tanh", y), y]


def softmax(x: Tensor) -> list[Tensor]:
    return [op("softmax.int", x, 1)]


def pool(x: Tensor) -> list[Tensor]:
    return [op("max_pool2d", op("neg", x), [3, 3], [2, 2], [1, 1])]


def convolution(x: Tensor) -> list[Tensor]:
    w = value((7, x.shape[1], 3, 3), seed=9)
    return [op("relu", op("conv2d", x, w, None, 1, 1))]


def product(x: Tensor) -> list[Tensor]:
    return [op("matmul", x, op("transpose.int", value(x.shape, seed=9), 2, 3))]


BODIES = (chain, two_outputs, softmax, pool, convolution, product)
# every layout of the input with one of the output, and the other way round
PAIRS = list(zip(LAYOUTS, itertools.cycle(WRITABLE[::-1]), strict=False))


def make(body: Callable, before: str, after: str, dtype: DType, **more) -> Program:
    x = value((2, 5, 6, 7), dtype)
    if before == "expanded":
        x = same_rows(x)
    outputs = body(x)
    strides = {t: LAYOUTS[after](t.shape) for t in outputs} | {x: LAYOUTS[before](x.shape)}
    return program(outputs, strides=strides, tolerance=1e-4, **more)


for body in BODIES:
    for before, after in PAIRS:
        PROGRAMS.add(
            lambda body=body, b=before, a=after: make(body, b, a, DType.F32),
            f"{body.__name__} {before} to {after}",
        )
for before, after in PAIRS:
    PROGRAMS.add(lambda b=before, a=after: make(two_outputs, b, a, DType.F64), f"f64 {before}")
    PROGRAMS.add(
        lambda b=before, a=after: make(
            two_outputs, b, a, DType.F32, options=KernelOptions(stream=True)
        ),
        f"streamed {before}",
    )


@pytest.mark.parametrize("name", PROGRAMS.names())
def test_layout(name: str) -> None:
    PROGRAMS.check(name)


def test_a_write_between_the_elements_is_noticed() -> None:
    """The check itself: a kernel for dense rows, run on memory with gaps."""
    x = value((3, 4))
    y = op("neg", x)
    p = program([y])
    from tests.fusion.harness import jobs_of

    from onchip.backends.cpp.compiler import build
    from onchip.backends.cpp.run import job

    dense = jobs_of(p)[0]
    apart = job(dense.source, [y], p.values, {y: (7, 1)})
    with pytest.raises(AssertionError, match="around the elements"):
        apart.run(build(dense.source.text, "-O0").function)


def test_evaluation_at_the_product_s_own_optimisation() -> None:
    x = value((5, 37))
    y = op("gelu", x)
    (got,) = cpp_evaluate([y], {x: t_values(x)}, strides={y: (1, 5)})
    np.testing.assert_allclose(got, t_values(x) * 0.5 * (1 + _erf(t_values(x))), atol=1e-5)


def _erf(x: np.ndarray) -> np.ndarray:
    from scipy import special

    return special.erf(x / np.sqrt(2))
