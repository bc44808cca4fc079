"""Reductions, statistics and reads at data-dependent positions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.conformance.harness import (
    FLOATS,
    INTS,
    aten,
    check,
    declared_in,
    express,
    sample,
    specials,
)

from onchip.backends.interpreter import evaluate
from onchip.errors import InputError, OpaqueOperator
from onchip.ops import indexing, reductions, statistics

ALL = [*FLOATS, *INTS, torch.bool]
DIMS = [[0], [1], [-1], [0, 2], [2, 0, 1], []]
SEEN: set[str] = set()

# sums of many half-precision values: the result is rounded once, ATen's float64 not at all
HALF_SUM = {torch.float16: (4e-3, 8e-3), torch.bfloat16: (2e-2, 6e-2)}


def see(target: str, args: list, kwargs: dict | None = None, **more) -> None:
    SEEN.add(target)
    check(target, args, kwargs, **more)


@pytest.mark.parametrize("dtype", ALL)
def test_sums(dtype: torch.dtype) -> None:
    tol = HALF_SUM.get(dtype)
    for shape in ((), (7,), (5, 3, 4), (0, 3), (3, 0, 4)):
        x = sample(shape, dtype)
        see("aten.sum.default", [x], tol=tol)
        see("aten.count_nonzero.default", [x])
        for name in ("any", "all"):
            see(f"aten.{name}.default", [x])
        if dtype.is_floating_point:
            see("aten.mean.default", [x], tol=tol)
            see("aten.nansum.default", [x], tol=tol)
    x = sample((5, 3, 4), dtype)
    for dims in DIMS:
        for keep in (False, True):
            see("aten.sum.dim_IntList", [x, dims, keep], tol=tol)
            if dtype.is_floating_point:
                see("aten.mean.dim", [x, dims, keep], tol=tol)
            for name in ("any", "all"):
                see(f"aten.{name}.dims", [x, dims or None, keep])
                see(f"aten.{name}.dim", [x, -1, keep])
        if dims:
            see("aten.count_nonzero.dim_IntList", [x, dims])
    see("aten.sum.dim_IntList", [x, None], tol=tol)
    for other in (torch.float64, torch.int32, torch.float32):
        if not (dtype.is_floating_point and other is torch.int32):
            see("aten.sum.dim_IntList", [x, [1]], {"dtype": other})
    see("aten.mean.dim", [x, [1]], {"dtype": torch.float32})


@pytest.mark.parametrize("dtype", ALL)
def test_products(dtype: torch.dtype) -> None:
    tol = HALF_SUM.get(dtype)
    x = sample((2, 3, 4), dtype)
    see("aten.prod.default", [sample((2, 3), dtype)], tol=tol)
    see("aten.prod.default", [sample((0,), dtype)])
    for dim in (0, -1):
        for keep in (False, True):
            see("aten.prod.dim_int", [x, dim, keep], tol=tol)
    see("aten.prod.dim_int", [x, 1], {"dtype": torch.float64})


@pytest.mark.parametrize("dtype", ALL)
def test_extremes(dtype: torch.dtype) -> None:
    x = sample((5, 3, 4), dtype)
    for side in ("max", "min"):
        for dims in DIMS:
            for keep in (False, True):
                see(f"aten.a{side}.default", [x, dims, keep])
        see(f"aten.{side}.default", [x])
        for shape in ((), (7,)):
            see(f"aten.{side}.default", [sample(shape, dtype)])
        # many ties in x, all of which ATen's positions break towards the first
        for keep in (False, True):
            for dim in (0, 1, -1):
                see(f"aten.{side}.dim", [x, dim, keep])
                if dtype is not torch.bool:
                    see(f"aten.arg{side}.default", [x, dim, keep])
            if dtype is not torch.bool:
                see(f"aten.arg{side}.default", [x, None, keep])
    see("aten.aminmax.default", [x])
    see("aten.aminmax.default", [x], {"dim": 1, "keepdim": True})
    see("aten.max.dim", [sample((), dtype), 0])
    if dtype is not torch.bool:
        see("aten.argmin.default", [sample((), dtype)])


def test_nan_is_an_extreme_and_its_position_is_found() -> None:
    rows = torch.stack([specials(), specials().flip(0), specials()[3:].repeat(2)[:16]])
    for side in ("max", "min"):
        see(f"aten.a{side}.default", [rows, [1]])
        see(f"aten.{side}.dim", [rows, 1])
        see(f"aten.arg{side}.default", [rows])
    see("aten.nansum.default", [torch.tensor([1.0, math.nan, 2.0])])
    see("aten.nansum.default", [sample((3,), torch.int32)])
    for name in ("any", "all"):
        see(f"aten.{name}.default", [specials()])


@pytest.mark.parametrize(
    ("target", "rest"),
    [
        ("aten.amax.default", [[1]]), ("aten.amin.default", []), ("aten.max.default", []),
        ("aten.max.dim", [1]), ("aten.argmax.default", [1]), ("aten.argmin.default", []),
    ],
)  # fmt: skip
def test_an_extreme_of_nothing_is_an_error(target: str, rest: list) -> None:
    x = sample((3, 0))
    with pytest.raises((RuntimeError, IndexError)):
        aten(target)(x, *rest)
    with pytest.raises(InputError, match="size 0"):
        express(target, [x, *rest])


def test_an_extreme_over_other_dimensions_of_an_empty_tensor() -> None:
    see("aten.amax.default", [sample((3, 0)), [0]])
    see("aten.argmax.default", [sample((3, 0)), 0])


@pytest.mark.parametrize("dtype", FLOATS)
def test_variances(dtype: torch.dtype) -> None:
    x = sample((5, 3, 4), dtype) + 1
    for name in ("var", "std", "var_mean", "std_mean"):
        for dims in ([0], [-1], [0, 2], None):
            for correction in (None, 0, 1, 2):
                for keep in (False, True):
                    kwargs = {"correction": correction, "keepdim": keep}
                    see(f"aten.{name}.correction", [x, dims], kwargs)
        for unbiased in (False, True):
            see(f"aten.{name}.default", [x, unbiased])
            see(f"aten.{name}.dim", [x, [1], unbiased, True])
        see(f"aten.{name}.correction", [x[:1], [0]])  # 0 / 0


def test_a_variance_far_from_zero_keeps_its_digits() -> None:
    """A one-pass E[x²] - E[x]² would lose everything in float32 here."""
    see("aten.var.correction", [sample((1001,)) + 10000.0, None], tol=(1e-4, 0))


def test_logsumexp() -> None:
    for dtype in FLOATS:
        x = sample((5, 3, 4), dtype, scale=4)
        for dims in ([0], [1, -1]):
            for keep in (False, True):
                see("aten.logsumexp.default", [x, dims, keep])
        see("aten.special_logsumexp.default", [x, [0]])
    see("aten.logsumexp.default", [sample((5, 3), torch.int64), [1]], tol=(1e-5, 1e-5))
    see("aten.logsumexp.default", [torch.tensor([[1000.0, 999.0], [-2000.0, -2001.0]]), [1]])
    inf = math.inf
    rows = torch.tensor([[inf, 1.0], [-inf, -inf], [-inf, 2.0], [math.nan, 1.0], [inf, -inf]])
    see("aten.logsumexp.default", [rows, [1]])
    see("aten.logsumexp.default", [sample((3, 0)), [1]])


@pytest.mark.parametrize("order", [2, 1, 0, 3, 0.5, -1.5, math.inf, -math.inf])
def test_norms(order: float) -> None:
    for dtype in FLOATS:
        x = sample((5, 3, 4), dtype)
        tol = HALF_SUM.get(dtype)
        for dims in (None, [0], [1, 2]):
            for keep in (False, True):
                see("aten.linalg_vector_norm.default", [x, order, dims, keep], tol=tol)
        see("aten.norm.ScalarOpt_dim", [x, order, [1]], tol=tol)
        see("aten.norm.Scalar", [x, order], tol=tol)
    x = sample((5, 3))
    see("aten.linalg_vector_norm.default", [x, order], {"dtype": torch.float64})
    see("aten.norm.ScalarOpt_dim_dtype", [x, order, [0], False], {"dtype": torch.float64})


def test_named_norms() -> None:
    see("aten.norm.ScalarOpt_dim", [sample((5, 3)), None, [1], True])
    see("aten.frobenius_norm.dim", [sample((5, 3, 4)), [1, 2]])
    with pytest.raises(InputError, match="floating"):
        express("aten.linalg_vector_norm.default", [sample((3,), torch.int64)])


def test_scans_are_opaque() -> None:
    for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"):
        SEEN.add(f"aten.{name}.default")
        with pytest.raises(OpaqueOperator, match="scan"):
            express(f"aten.{name}.default", [sample((3,)), 0])


# ---- indexing ----------------------------------------------------------------------------------


def positions(shape: tuple[int, ...], size: int, dtype: torch.dtype = torch.int64, low: int = 0):
    generator = torch.Generator().manual_seed(sum(shape) + size)
    return torch.randint(low, size, shape, generator=generator).to(dtype)


def test_embedding() -> None:
    for dtype in FLOATS:
        weight = sample((11, 5), dtype)
        for kind in (torch.int64, torch.int32):
            see("aten.embedding.default", [weight, positions((2, 3), 11, kind)])
            see("aten.embedding.default", [weight, positions((), 11, kind), 2])
        see("aten.embedding.default", [weight, positions((0, 3), 11)])


@pytest.mark.parametrize(
    ("target", "rest"),
    [("aten.embedding.default", []), ("aten.index_select.default", [0])],
)
@pytest.mark.parametrize("bad", [-1, 11])
def test_a_position_outside_is_an_error(target: str, rest: list, bad: int) -> None:
    weight, index = sample((11, 5)), torch.tensor([3, bad])
    args = [weight, *rest, index]
    with pytest.raises((IndexError, RuntimeError)):
        aten(target)(*args)
    (out,), values = express(target, args)
    with pytest.raises(IndexError, match=f"at {bad} in dimension 0"):
        evaluate([out], values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_selection_and_gathering(dtype: torch.dtype) -> None:
    x = sample((5, 7, 3), dtype)
    for dim, size in ((0, 5), (1, 7), (-1, 3)):
        see("aten.index_select.default", [x, dim, positions((4,), size)])
        see("aten.index_select.default", [x, dim, positions((), size, torch.int32)])
        index = positions((2, 3, 2), size)
        see("aten.gather.default", [x, dim, index])
        see("aten.gather.default", [x, dim, positions((0, 3, 2), size)])
    see("aten.index_select.default", [sample((), dtype), 0, torch.tensor(0)])
    see("aten.take_along_dim.default", [x, positions((5, 1, 3), 7), 1])
    see("aten.take_along_dim.default", [x, positions((1, 2, 1), 7), 1])
    see("aten.take_along_dim.default", [x[:1], positions((5, 2, 3), 7), 1])
    see("aten.take_along_dim.default", [x, positions((4,), 105)])
    see("aten.take.default", [x, positions((2, 2), 105, low=-105)])


@pytest.mark.parametrize("name", ["index", "_unsafe_index"])
def test_advanced_indexing(name: str) -> None:
    x = sample((5, 7, 3, 4))
    a, b, c = positions((2, 3), 3, low=-3), positions((3,), 3), positions((2, 1), 4, torch.int32)
    for indices in (
        [a], [None, a], [None, None, None, c], [a, b], [None, a, b], [a, None, b],
        [None, a, None, c], [a, b, a, c], [None, None, b], [torch.tensor(2)],
        [positions((0,), 3)],
    ):  # fmt: skip
        see(f"aten.{name}.Tensor", [x, indices])
    see(f"aten.{name}.Tensor", [sample((5, 7), torch.int64), [b, b]])


def test_what_depends_on_data_is_opaque() -> None:
    x, i = sample((5, 3)), positions((2, 3), 5)
    with pytest.raises(OpaqueOperator, match="mask"):
        express("aten.index.Tensor", [x, [x > 0]])
    with pytest.raises(OpaqueOperator, match="num_classes"):
        express("aten.one_hot.default", [i])
    with pytest.raises(OpaqueOperator, match="0-d"):
        express("aten.gather.default", [sample(()), 0, torch.tensor(0)])
    for target in declared_in(indexing):
        if any(
            word in target for word in ("put", "scatter", "_add", "copy", "fill", "mask", "zer")
        ):
            SEEN.add(target)
            with pytest.raises(OpaqueOperator, match="data"):
                express(target, [x, i])


def test_one_hot() -> None:
    for shape in ((), (7,), (2, 3)):
        see("aten.one_hot.default", [positions(shape, 5), 6])


def test_every_operator_is_covered() -> None:
    """Runs after the tests above, which collect what they check."""
    assert not declared_in(reductions, statistics, indexing) - SEEN


def test_large_reductions_are_folded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from onchip.backends import interpreter

    x = sample((13, 11, 7))
    for target, rest in (
        ("aten.sum.dim_IntList", [[0, 2]]), ("aten.amax.default", [[1, 2]]),
        ("aten.prod.dim_int", [1]), ("aten.any.dims", [[0, 1]]), ("aten.var.correction", [[0]]),
    ):  # fmt: skip
        (out,), values = express(target, [x, *rest])
        (whole,) = evaluate([out], values, exact=True)
        with monkeypatch.context() as patch:
            patch.setattr(interpreter, "ELEMENT_LIMIT", 50)
            (parts,) = evaluate([out], values, exact=True)
        np.testing.assert_allclose(parts, whole, rtol=1e-13)
