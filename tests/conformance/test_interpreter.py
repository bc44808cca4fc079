"""The interpreter itself: the function table, streams, contractions, padding, its errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from onchip.backends.interpreter import evaluate, identity
from onchip.backends.scalar_numpy import FUNCTIONS_NUMPY, apply, convert, round_bfloat16
from onchip.ir.dtype import DType
from onchip.ir.expr import (
    MONOIDS,
    Const,
    Reduce,
    Stream,
    Var,
    axis,
    call,
    cast,
    fold,
    given,
    tensor,
    where,
)
from onchip.ir.functions import FUNCTIONS

RNG = np.random.default_rng(7)


def test_every_scalar_function_has_a_numpy_spelling() -> None:
    assert set(FUNCTIONS_NUMPY) == FUNCTIONS


TORCH = {
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "mod": torch.remainder,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"), "eq": torch.eq,
    "shift_left": torch.bitwise_left_shift, "shift_right": torch.bitwise_right_shift,
    "fma": lambda a, b, c: torch.addcmul(c, a, b),
}  # fmt: skip
BINARY = """add sub mul div maximum minimum fmax fmin floordiv mod truncdiv fmod copysign pow atan2
hypot logaddexp xlogy nextafter ldexp eq ne lt le gt ge logical_and logical_or
logical_xor""".split()  # noqa: SIM905
BITS = "bitwise_and bitwise_or bitwise_xor shift_left shift_right".split()  # noqa: SIM905
TERNARY = ["fma", "where"]


@pytest.mark.parametrize("fn", sorted(f for f in FUNCTIONS if not f.startswith("cast_")))
def test_scalar_functions_are_torchs(fn: str) -> None:
    values = np.concatenate([RNG.standard_normal(64) * 3, [math.nan, math.inf, -math.inf, 0, 1]])
    a, b, c = values, np.roll(values, 7), np.roll(values, 3)
    reference = TORCH.get(fn) or getattr(torch, fn)
    if fn in BITS or fn == "bitwise_not":
        a, b = (RNG.integers(-9, 9, 64) for _ in range(2))
    arity = 3 if fn in TERNARY else 2 if fn in (*BINARY, *BITS) else 1
    args = [a, b, c][:arity] if fn != "where" else [a > 0, b, c]
    want = reference(*(torch.from_numpy(np.ascontiguousarray(x)) for x in args)).numpy()
    dtype = {"b": DType.BOOL, "i": DType.I64, "f": DType.F64}[want.dtype.kind]
    with np.errstate(all="ignore"):
        got = apply(fn, args, dtype)
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13, equal_nan=True)


def test_bfloat16_rounding_is_torchs() -> None:
    x = (RNG.standard_normal(4096) * 10.0 ** RNG.integers(-38, 38, 4096)).astype(np.float32)
    ties = np.arange(1, 400, dtype=np.float32) * np.float32(2**-8) + 1
    x = np.concatenate([x, ties, [math.nan, math.inf, -math.inf, 0, -0.0, 3.4e38]]).astype("f4")
    want = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(round_bfloat16(x), want)
    assert np.signbit(round_bfloat16(np.float32(-0.0)))


def test_conversions_wrap_and_truncate() -> None:
    x = np.array([-1.9, -1.0, 2.9, 255.0])
    np.testing.assert_array_equal(convert(x, DType.U8), [255, 255, 2, 255])
    np.testing.assert_array_equal(convert(x, DType.I8), [-1, -1, 2, -1])
    np.testing.assert_array_equal(convert(np.array([-1, 300]), DType.U8), [255, 44])


def test_half_storage_rounds_but_arithmetic_does_not() -> None:
    x = given((3,), DType.BF16)
    y = tensor((3,), DType.BF16, lambda i: (x[i] + 1.0) - 1.0)
    value = np.array([2**-9, 2**-10, 0.5], dtype=np.float32)
    (got,) = evaluate([y], {x: value})
    np.testing.assert_array_equal(got, value)  # 1 + 2^-9 would round to 1 in bfloat16
    z = tensor((3,), DType.F32, lambda i: cast(x[i] + 1.0, DType.BF16) - 1.0)
    (got,) = evaluate([z], {x: value})
    np.testing.assert_array_equal(got, [0, 0, 0.5])
    (exact,) = evaluate([z], {x: value}, exact=True)
    np.testing.assert_array_equal(exact, value.astype(np.float64))


def test_padding_counts_outside_on_every_side() -> None:
    x = given((3, 4), DType.F32)
    y = tensor((5, 8), DType.F32, lambda i, j: x.padded(-7.0)[i - 1, j - 2])
    value = RNG.standard_normal((3, 4)).astype(np.float32)
    (got,) = evaluate([y], {x: value})
    np.testing.assert_array_equal(got, np.pad(value, ((1, 1), (2, 2)), constant_values=-7))
    empty = given((0, 4), DType.F32)
    z = tensor((2, 4), DType.F32, lambda i, j: empty.padded(3.0)[i, j])
    (got,) = evaluate([z], {empty: np.empty((0, 4))})
    np.testing.assert_array_equal(got, np.full((2, 4), 3))


def test_reading_outside_without_padding_is_an_error() -> None:
    x, index = given((3,), DType.F32), given((2,), DType.I64)
    beyond = tensor((4,), DType.F32, lambda i: x[i])
    with pytest.raises(IndexError, match="at 3 in dimension 0, whose size is 3"):
        evaluate([beyond], {x: np.zeros(3)})
    data = tensor((2,), DType.F32, lambda i: x[index[i]])
    with pytest.raises(IndexError, match="at -1"):
        evaluate([data], {x: np.zeros(3), index: np.array([0, -1])})
    (got,) = evaluate([data], {x: np.arange(3), index: np.array([2, 0])})
    np.testing.assert_array_equal(got, [2, 0])


def test_missing_and_misshapen_values_are_named() -> None:
    x = given((3,), DType.F32, "speed")
    y = tensor((3,), DType.F32, lambda i: x[i] * 2.0)
    with pytest.raises(KeyError, match="speed"):
        evaluate([y], {})
    with pytest.raises(ValueError, match=r"shape \[4\]"):
        evaluate([y], {x: np.zeros(4)})


@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 1, 1), (0, 4, 3), (3, 0, 2)])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F64, DType.I32])
def test_a_sum_of_products_is_a_matrix_product(shape, dtype) -> None:
    m, k, n = shape
    a, b = given((m, k), dtype), given((k, n), dtype)
    c = tensor((m, n), dtype, lambda i, j: fold("sum", (k,), lambda r: a[i, r] * b[r, j]))
    x, y = (RNG.integers(-9, 9, s).astype(dtype.label) for s in ((m, k), (k, n)))
    (got,) = evaluate([c], {a: x, b: y})
    np.testing.assert_array_equal(got, x.astype(np.int64) @ y.astype(np.int64))
    assert got.dtype == dtype.label


def test_a_fold_counts_axes_that_its_body_does_not_mention() -> None:
    x = given((3,), DType.F32)
    value = np.array([1.5, -2, 3], dtype=np.float32)
    total = tensor((3,), DType.F32, lambda i: fold("sum", (2, 5), lambda r, s: x[i]))
    power = tensor((3,), DType.F32, lambda i: fold("prod", (3,), lambda r: x[i]))
    got = evaluate([total, power], {x: value})
    np.testing.assert_array_equal(got[0], value * 10)
    np.testing.assert_array_equal(got[1], value**3)


@pytest.mark.parametrize("monoid", [m for m in MONOIDS if not m.startswith("arg")])
def test_a_fold_over_nothing_is_the_identity(monoid: str) -> None:
    dtype = DType.BOOL if monoid in ("any", "all") else DType.F32
    x = given((0,), dtype)
    y = tensor((), dtype, lambda: fold(monoid, (0,), lambda r: x[r]))
    (got,) = evaluate([y], {x: np.empty(0)})
    want = {"sum": 0, "prod": 1, "max": -math.inf, "min": math.inf, "any": False, "all": True}
    assert got[()] == want[monoid] == identity(monoid, dtype)


def online_softmax_row(x, n: int):
    """Row maximum and denominator in one pass over blocks of the row."""

    def body(i, j):
        r = axis(n, "r")
        m, s = Var("m", DType.F32), Var("s", DType.F32)
        top = call("maximum", m, Reduce("max", (r,), x[i, r]))
        weight = Reduce("sum", (r,), call("exp", x[i, r] - top))
        lowest, zero = Const(-math.inf, DType.F32), Const(0.0, DType.F32)
        rescaled = s * where(call("eq", m, -math.inf, dtype=DType.BOOL), 0.0, call("exp", m - top))
        return Stream(r, (m, s), (lowest, zero), (top, rescaled + weight),
                      call("exp", x[i, j] - m) / s)  # fmt: skip

    return body


@pytest.mark.parametrize("block", [1, 3, 7, 64])
def test_a_stream_carries_its_state_over_blocks(block: int) -> None:
    x = given((5, 13), DType.F32)
    y = tensor((5, 13), DType.F32, online_softmax_row(x, 13))
    value = (RNG.standard_normal((5, 13)) * 5).astype(np.float32)
    (got,) = evaluate([y], {x: value}, exact=True, block=block)
    want = torch.softmax(torch.from_numpy(value).double(), 1).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-13)


def test_shared_subexpressions_are_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that does not vary over a reduction is computed outside of it, once."""
    calls: list[tuple[str, int]] = []
    real = FUNCTIONS_NUMPY["exp"]
    monkeypatch.setitem(FUNCTIONS_NUMPY, "exp", lambda a: calls.append(a.size) or real(a))
    x = given((4,), DType.F32)

    def body(i):
        shared = call("exp", x[i])
        return fold("sum", (9,), lambda r: shared * cast(r, DType.F32)) + shared

    y = tensor((4,), DType.F32, body)
    (got,) = evaluate([y], {x: np.zeros(4)})
    np.testing.assert_array_equal(got, np.full(4, 37))
    assert calls == [4]
