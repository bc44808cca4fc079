"""Two operands and more: promotion, broadcasting, numbers, NaN; then conversions and constants."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.conformance.harness import (
    FLOATS,
    INTS,
    check,
    declared_in,
    express,
    sample,
    specials,
)

from onchip.backends.interpreter import evaluate
from onchip.errors import InputError, OpaqueOperator
from onchip.ir.dtype import BY_LABEL
from onchip.ops import conversion, pointwise, selection
from onchip.ops.promotion import common_dtype, rounded

ALL = [*FLOATS, *INTS, torch.bool]
PAIRS = [((5, 3), (5, 3)), ((5, 1, 3), (7, 1)), ((), (3,)), ((2, 3), ()), ((0, 3), (1, 3))]
SEEN: set[str] = set()


def see(target: str, args: list, kwargs: dict | None = None, **more) -> None:
    SEEN.add(target)
    check(target, args, kwargs, **more)


def away_from_zero(x: torch.Tensor) -> torch.Tensor:
    if x.dtype.is_floating_point:
        return torch.where(x.abs() < 0.25, torch.ones_like(x), x)
    return torch.where(x == 0, torch.ones_like(x), x)


@pytest.mark.parametrize("name", ["add", "sub", "subtract", "mul", "multiply", "rsub"])
def test_arithmetic(name: str) -> None:
    for a in ALL:
        for b in ALL:
            if "sub" in name and torch.bool in (a, b):
                continue
            see(f"aten.{name}.Tensor", [sample((5, 3), a), sample((3,), b, seed=1)])
            if a.is_floating_point == b.is_floating_point:
                # a 0-d operand ranks lower: float32[] does not widen bfloat16[n]
                see(f"aten.{name}.Tensor", [sample((5,), a), sample((), b, seed=1)])
    for x, y in PAIRS:
        see(f"aten.{name}.Tensor", [sample(x), sample(y, seed=1)])
    for dtype in (*FLOATS, *INTS):
        for number in (3, -1.5) if dtype is not torch.uint8 else (3,):
            see(f"aten.{name}.Scalar", [sample((7,), dtype), number])
    if "mul" not in name:
        for alpha in (2, -3):
            for dtype in (torch.float32, torch.int32, torch.bfloat16):
                args = [sample((7,), dtype), sample((7,), dtype, seed=1)]
                see(f"aten.{name}.Tensor", args, {"alpha": alpha})
        see(f"aten.{name}.Tensor", [sample((7,)), sample((7,), seed=1)], {"alpha": 0.5})
        see(f"aten.{name}.Scalar", [sample((7,)), 0.3, -2])


def test_integers_wrap_in_their_own_type() -> None:
    large = torch.tensor([120, -128, 127], dtype=torch.int8)
    see("aten.add.Tensor", [large, large])
    see("aten.mul.Tensor", [large, large])
    see("aten.mul.Scalar", [large, 100])
    check("aten.neg.default", [large])
    check("aten.abs.default", [large])
    see("aten.add.Tensor", [torch.tensor([250, 3], dtype=torch.uint8)] * 2)
    see("aten.pow.Tensor_Scalar", [large, 3])


def test_bool_subtraction_is_refused() -> None:
    with pytest.raises(InputError, match="logical_xor"):
        express("aten.sub.Tensor", [sample((3,), torch.bool)] * 2)


@pytest.mark.parametrize("name", ["div", "divide", "true_divide"])
def test_division(name: str) -> None:
    for a in ALL:
        for b in (torch.float32, torch.int64, torch.bfloat16, torch.float64):
            args = [sample((5, 3), a), away_from_zero(sample((3,), b, seed=1))]
            see(f"aten.{name}.Tensor", args)
        see(f"aten.{name}.Scalar", [sample((7,), a), -3])
    see(f"aten.{name}.Tensor", [specials(), specials().flip(0)])
    if name != "true_divide":
        for mode in (None, "trunc", "floor"):
            for dtype in (torch.float32, torch.float64, *INTS):
                y = away_from_zero(sample((31,), dtype, seed=1))
                args = [sample((31,), dtype, scale=4), y]
                see(f"aten.{name}.Tensor_mode", args, {"rounding_mode": mode}, reference="own")
                args = [sample((31,), dtype), 2]
                see(f"aten.{name}.Scalar_mode", args, {"rounding_mode": mode}, reference="own")


@pytest.mark.parametrize("name", ["fmod", "remainder"])
def test_remainders(name: str) -> None:
    for dtype in (torch.float32, torch.float64, *INTS):
        args = [sample((5, 31), dtype, scale=4), away_from_zero(sample((31,), dtype, seed=1))]
        see(f"aten.{name}.Tensor", args, reference="own")
        for number in (3, 2.5) if dtype is torch.uint8 else (3, -3, 2.5):
            see(f"aten.{name}.Scalar", [sample((31,), dtype, scale=4), number], reference="own")
    see(f"aten.{name}.Tensor", [specials(), specials().flip(0)], reference="own")
    if name == "remainder":
        y = away_from_zero(sample((9,)))
        see("aten.remainder.Scalar_Tensor", [7, y], reference="own")


def test_floor_division() -> None:
    for dtype in (torch.float32, torch.float64, *INTS):
        args = [sample((31,), dtype, scale=4), away_from_zero(sample((31,), dtype, seed=1))]
        see("aten.floor_divide.default", args, reference="own")
        see("aten.floor_divide.Scalar", [sample((31,), dtype), 4], reference="own")
    see("aten.floor_divide.default", [specials(), specials().flip(0)], reference="own")


@pytest.mark.parametrize(
    "target", ["aten.floor_divide.default", "aten.remainder.Tensor", "aten.fmod.Tensor"]
)
def test_integer_division_by_zero_is_an_error(target: str) -> None:
    (out,), values = express(target, [sample((3,), torch.int32), torch.zeros(3).int()])
    with pytest.raises(ZeroDivisionError):
        evaluate([out], values)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        getattr(torch, target.split(".")[1])(sample((3,), torch.int32), torch.zeros(3).int())


def test_powers() -> None:
    for dtype in FLOATS:
        base = sample((7,), dtype).abs() + 0.25
        for exponent in (0, 1, 2, 3, -1, -2, 0.5, -0.5, 2.5, 4):
            see("aten.pow.Tensor_Scalar", [base, exponent])
        see("aten.pow.Tensor_Tensor", [base, sample((3, 1), dtype, seed=1)])
        see("aten.pow.Scalar", [1.7, sample((7,), dtype)])
        see("aten.float_power.Tensor_Scalar", [base, 1.5])
    for dtype in INTS:
        for exponent in (0, 1, 2, 3, 5):
            see("aten.pow.Tensor_Scalar", [sample((7,), dtype), exponent])
        see("aten.pow.Tensor_Tensor", [sample((7,), dtype), sample((7,), dtype, seed=1)])
        see("aten.float_power.Tensor_Tensor", [sample((7,), dtype).abs() + 1, sample((7,), dtype)])
        see("aten.float_power.Scalar", [2, sample((7,), dtype)])
    see("aten.pow.Tensor_Scalar", [sample((7,), torch.int32), 0.5], reference="own")
    see("aten.pow.Tensor_Tensor", [specials().double(), specials().double().flip(0)])
    with pytest.raises(InputError, match="negative integer powers"):
        express("aten.pow.Tensor_Scalar", [sample((3,), torch.int64), -1])


@pytest.mark.parametrize("name", ["maximum.default", "max.other", "minimum.default", "min.other"])
def test_extremes(name: str) -> None:
    for a in ALL:
        see(f"aten.{name}", [sample((5, 3), a), sample((3,), a, seed=1)])
    see(f"aten.{name}", [specials(), specials().flip(0)])
    see(f"aten.{name}", [sample((5,), torch.int32), sample((5,), torch.float32)])


def test_functions_of_two() -> None:
    for name in ("fmax.default", "fmin.default"):
        for a in ALL:
            see(f"aten.{name}", [sample((5, 3), a), sample((3,), a, seed=1)])
        see(f"aten.{name}", [specials(), specials().flip(0)])
    for dtype in FLOATS:
        x, y = sample((5, 3), dtype), away_from_zero(sample((3,), dtype, seed=1))
        for name in (
            "hypot.default", "logaddexp.default", "atan2.default", "arctan2.default",
            "copysign.Tensor", "ldexp.Tensor", "xlogy.Tensor", "special_xlogy.default",
        ):  # fmt: skip
            see(f"aten.{name}", [x, y.abs() if "xlogy" in name else y])
        see("aten.copysign.Scalar", [x, -1.0])
        see("aten.xlogy.Scalar_Other", [x, 2.0])
        see("aten.special_xlogy.other_scalar", [x, 2.0])
        see("aten.xlogy.Scalar_Self", [2.0, y.abs()])
        see("aten.special_xlogy.self_scalar", [0.0, y.abs()])
    for name in ("hypot", "logaddexp", "atan2", "xlogy"):
        see(f"aten.{name}.{'Tensor' if name == 'xlogy' else 'default'}",
            [specials(), specials().roll(3)], tol=(2e-5, 1e-5))  # fmt: skip
    for name in ("atan2.default", "xlogy.Tensor", "copysign.Tensor", "ldexp.Tensor"):
        x = sample((7,), torch.int32)
        see(f"aten.{name}", [x, x.abs() + 1])
    for dtype in (torch.float32, torch.float64):
        see("aten.nextafter.default", [sample((7,), dtype), sample((7,), dtype, seed=1)],
            reference="own", tol=(0, 0))  # fmt: skip
    with pytest.raises(OpaqueOperator, match="bfloat16"):
        express("aten.nextafter.default", [sample((3,), torch.bfloat16)] * 2)


COMPARISONS = """eq ne lt le gt ge not_equal less less_equal greater greater_equal""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name: str) -> None:
    for a in ALL:
        for b in ALL:
            args = [sample((5, 3), a), sample((3,), b, seed=1)]
            see(f"aten.{name}.Tensor", args, reference="own")
        see(f"aten.{name}.Scalar", [sample((31,), a).to(torch.int32).to(a), 1], reference="own")
    see(f"aten.{name}.Tensor", [specials(), specials().flip(0)])
    # ATen rounds the number to the tensor's type before it compares
    for dtype in FLOATS:
        tenth = torch.tensor([0.1, 0.3, -0.1], dtype=dtype)
        see(f"aten.{name}.Scalar", [tenth, 0.1], reference="own")
        see(f"aten.{name}.Tensor", [tenth, torch.tensor(0.1)], reference="own")


def test_logic() -> None:
    for fn in ("and", "or", "xor"):
        for a in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
            for b in (torch.float32, torch.bool):
                args = [sample((5, 3), a), sample((3,), b, seed=1)]
                see(f"aten.logical_{fn}.default", args)
        for dtype in (*INTS, torch.bool):
            args = [sample((5, 3), dtype), sample((3,), dtype, seed=1)]
            for name in (f"bitwise_{fn}", f"__{fn}__"):
                see(f"aten.{name}.Tensor", args)
                see(f"aten.{name}.Scalar", [args[0], 1])
            see(f"aten.bitwise_{fn}.Scalar_Tensor", [1, args[0]])
    for dtype in (*INTS, torch.bool):
        see("aten.bitwise_not.default", [sample((7,), dtype)])
    for dtype in INTS:
        x = sample((9,), dtype)
        amount = torch.tensor([0, 1, 2, 3, 7, 8, 31, 64, 5]).to(dtype)
        for name in ("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"):
            see(f"aten.{name}.Tensor", [x, amount])
        for name in ("__lshift__", "__rshift__"):
            see(f"aten.{name}.Scalar", [x, 2])
        see("aten.bitwise_left_shift.Tensor_Scalar", [x, 2])
        see("aten.bitwise_right_shift.Tensor_Scalar", [x, 2])
        see("aten.bitwise_left_shift.Scalar_Tensor", [5, amount.clamp(0, 5)])
        see("aten.bitwise_right_shift.Scalar_Tensor", [100, amount.clamp(0, 5)])


def test_choice() -> None:
    mask = sample((5, 3), torch.bool)
    for a in ALL:
        for b in (torch.float32, torch.bfloat16, torch.int64):
            see("aten.where.self", [mask, sample((5, 3), a), sample((3,), b, seed=1)])
        see("aten.where.ScalarOther", [mask, sample((3,), a), 2])
        see("aten.where.ScalarSelf", [mask, 1.5, sample((3,), a)])
        see("aten.masked_fill.Scalar", [sample((2, 1, 3), a), mask, 1])
        see("aten.masked_fill.Tensor", [sample((5, 3), a), mask, torch.tensor(1)])
    see("aten.where.Scalar", [mask, 1.5, 2])
    see("aten.where.Scalar", [mask, 1, 2])
    see("aten.masked_fill.Scalar", [sample((5, 3)), mask, -math.inf])


def test_limits() -> None:
    for name in ("clamp", "clip"):
        for dtype in (*FLOATS, torch.int32, torch.int64):
            x = sample((5, 3), dtype)
            for low, high in ((-1, 1), (None, 0.5), (-0.5, None), (2, -2)):
                see(f"aten.{name}.default", [x, low, high])
            see(f"aten.{name}.Tensor", [x, sample((3,), dtype, 1), sample((5, 1), dtype, 2)])
            see(f"aten.{name}.Tensor", [x, None, sample((3,), dtype, 1)])
        see(f"aten.{name}.default", [specials(), -1.0, 1.0])
        if torch.ones(16).clamp(min=math.nan).isnan().all():  # PyTorch 2.11 ignores such a limit
            see(f"aten.{name}.default", [specials(), math.nan, None])
        see(f"aten.{name}.Tensor", [specials(), specials().flip(0), specials().roll(5)])
    for name in ("clamp_min", "clamp_max"):
        see(f"aten.{name}.default", [specials(), 0.5])
        see(f"aten.{name}.default", [sample((5,), torch.int32), 0.5])
        see(f"aten.{name}.Tensor", [specials(), specials().flip(0)])
    with pytest.raises(InputError, match="at least one"):
        express("aten.clamp.default", [sample((3,))])


def test_combinations() -> None:
    for dtype in FLOATS:
        x, y, z = (sample(s, dtype, k) for k, s in enumerate(((5, 3), (3,), (5, 1))))
        for weight in (0.3, 0.5, 0.9, -1.5):
            see("aten.lerp.Scalar", [x, x.flip(0), weight])
        see("aten.lerp.Tensor", [x, y, z])
        # written from the start, the end would be missed by a rounding of the distance
        ends = [torch.tensor([2000.0], dtype=dtype), torch.tensor([0.1], dtype=dtype), 1.0]
        see("aten.lerp.Scalar", ends, tol=(0, 0), reference="own")
        for value in (1, -0.5):
            see("aten.addcmul.default", [x, y, z], {"value": value})
            see("aten.addcdiv.default", [x, y, away_from_zero(z)], {"value": value})
    see("aten.addcmul.default", [sample((5,), torch.int32)] * 3, {"value": 2})
    with pytest.raises(InputError, match="addcdiv"):
        express("aten.addcdiv.default", [sample((5,), torch.int32)] * 3)


def test_triangles() -> None:
    for name in ("tril", "triu"):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            for k in (-2, 0, 1, 7):
                see(f"aten.{name}.default", [sample((2, 5, 3), dtype), k])


def test_conversions() -> None:
    for a in ALL:
        for b in ALL:
            x = sample((5, 3), a, scale=40)
            if a.is_floating_point and b is torch.uint8:
                x = x.abs()
            see("aten._to_copy.default", [x], {"dtype": b}, reference="own")
            see("aten.to.dtype", [x, b], reference="own", exact=False)
            see("prims.convert_element_type.default", [x, b], reference="own", exact=False)
            see("aten.type_as.default", [x, sample((1,), b)], reference="own")
            see("aten.to.other", [x, sample((1,), b)], reference="own")
        see("aten.to.dtype_layout", [x], {"dtype": torch.float32}, reference="own")
        see("aten.to.device", [x, torch.device("cpu"), torch.int64], reference="own")
        for name in """clone contiguous alias alias_copy detach detach_copy lift_fresh_copy
        positive resolve_conj resolve_neg conj conj_physical lift lift_fresh real""".split():  # noqa: SIM905
            if name == "positive" and a is torch.bool:
                continue
            see(f"aten.{name}.default", [x])
    see("aten.clone.default", [sample((3,))], {"memory_format": torch.contiguous_format})
    with pytest.raises(OpaqueOperator, match="complex"):
        express("aten._to_copy.default", [sample((3,))], {"dtype": torch.complex64})
    with pytest.raises(OpaqueOperator, match="float8"):
        express("aten._to_copy.default", [sample((3,))], {"dtype": torch.float8_e4m3fn})


def test_a_cast_to_half_rounds_where_it_stands() -> None:
    third = torch.full((3,), 1 / 3)
    (half,), values = express("aten._to_copy.default", [third], {"dtype": torch.bfloat16})
    (got,) = evaluate([half], values)
    np.testing.assert_array_equal(got, third.bfloat16().float().numpy())
    assert got[0] != np.float32(1 / 3)


def test_dropout() -> None:
    for name in ("dropout", "feature_dropout", "alpha_dropout"):
        see(f"aten.{name}.default", [sample((2, 3)), 0.5, False])
        see(f"aten.{name}.default", [sample((2, 3)), 0.0, True])
        with pytest.raises(OpaqueOperator, match="random"):
            express(f"aten.{name}.default", [sample((2, 3)), 0.5, True])
    see("aten.native_dropout.default", [sample((2, 3)), 0.5, False])


def test_constants() -> None:
    x = sample((2, 3), torch.bfloat16)
    for dtype in (None, *ALL):
        kind = {"dtype": dtype}
        see("aten.full.default", [[2, 3], 1], kind)
        for name in ("zeros", "ones"):
            see(f"aten.{name}.default", [[2, 0]], kind)
            see(f"aten.{name}_like.default", [x], kind)
            see(f"aten.new_{name}.default", [x, [3]], kind)
        see("aten.scalar_tensor.default", [2], kind)
        see("aten.full_like.default", [x, 3], kind)
        see("aten.new_full.default", [x, [], 1], kind)
        see("aten.eye.default", [3], kind)
        see("aten.eye.m", [3, 5], kind)
        if dtype is not torch.bool:
            see("aten.arange.default", [7], kind)
            see("aten.arange.start", [-2, 5], kind)
            see("aten.arange.start_step", [-2, 11, 3], kind)
    see("aten.full.default", [[], 0.1], {"dtype": torch.bfloat16}, tol=(0, 0))
    see("aten.full.default", [[2], True])
    see("aten.full.default", [[2], -math.inf])
    see("aten.arange.start_step", [5, -2, -3])
    see("aten.arange.start_step", [0.0, 1.0, 0.1])
    see("aten.arange.default", [3.5])
    see("aten.arange.default", [0])
    for n in (0, 1, 2, 7, 8):
        see("aten.linspace.default", [-1.5, 2, n])
        see("aten.linspace.default", [-1.5, 2, n], {"dtype": torch.float64}, tol=(1e-12, 1e-12))
    see("aten.fill.Scalar", [x, 0.3])
    see("aten.fill.Tensor", [x, torch.tensor(2)])


OPAQUE = {
    "aten.empty.memory_format": [[2]], "aten.empty_like.default": [torch.ones(2)],
    "aten.new_empty.default": [torch.ones(2), [2]], "aten.rand.default": [[2]],
    "aten.empty_strided.default": [[2], [1]], "aten.randn.default": [[2]],
    "aten.new_empty_strided.default": [torch.ones(2), [2], [1]],
    "aten.empty_permuted.default": [[2], [0]], "aten.rand_like.default": [torch.ones(2)],
    "aten.randn_like.default": [torch.ones(2)], "aten.bernoulli.default": [torch.ones(2)],
}  # fmt: skip


@pytest.mark.parametrize("target", OPAQUE)
def test_what_has_no_defined_elements_is_opaque(target: str) -> None:
    SEEN.add(target)
    with pytest.raises(OpaqueOperator):
        express(target, OPAQUE[target])


def test_promotion_is_torchs() -> None:
    kinds = [sample(s, d) for d in ALL for s in ((), (2,))]
    for a in kinds:
        for b in [*kinds, True, 2, 0.5]:
            mine = common_dtype(*express_operands(a, b))
            want = str(torch.result_type(a, b)).removeprefix("torch.")
            assert mine.label == want, f"{a.dtype}{list(a.shape)} with {b}"


def express_operands(*xs: object) -> list:
    from onchip.ir.expr import given

    label = lambda x: str(x.dtype).removeprefix("torch.")  # noqa: E731
    return [
        given(tuple(x.shape), BY_LABEL[label(x)]) if isinstance(x, torch.Tensor) else x for x in xs
    ]


@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_round_as_in_torch(dtype: torch.dtype) -> None:
    label = BY_LABEL[str(dtype).removeprefix("torch.")]
    generator = np.random.default_rng(0)
    numbers = [0.1, -0.1, 1e-8, 6e-8, 65519.0, 65520.0, 1e39, -1e39, 3.39e38, 3.4e38, math.inf]
    numbers += [1 + k / 512 for k in range(9)] + [1 + k / 4096 for k in range(9)]  # ties to even
    numbers += list(generator.standard_normal(50) * 10.0 ** generator.integers(-9, 9, 50))
    for value in numbers:
        want = torch.tensor(value, dtype=torch.float64).to(dtype).double().item()
        assert rounded(float(value), label) == want
    assert math.isnan(rounded(math.nan, label))


def test_every_operator_is_covered() -> None:
    """Runs after the tests above, which collect what they check."""
    missing = declared_in(pointwise, selection, conversion) - SEEN
    # ATen has the names, but no kernel or no way to call them
    missing -= {"aten.true_divide.Scalar"} - SEEN
    assert not missing
