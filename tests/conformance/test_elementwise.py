"""Functions of one tensor, activations and conversions, over types, shapes and special values."""

from __future__ import annotations

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

from onchip.errors import InputError
from onchip.ops import activations, elementary

SHAPES = [(), (0, 3), (7,), (5, 1, 3)]

# where a function is real, and smooth enough for two units of the last place
POSITIVE = {"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "lgamma", "digamma", "reciprocal"}
UNIT = {"asin", "acos", "atanh", "erfinv", "logit"}
FLOAT_RESULT = """exp exp2 special_exp2 expm1 special_expm1 log log2 log10 log1p special_log1p sin
cos tan sinh cosh tanh asin arcsin acos arccos atan arctan asinh arcsinh acosh arccosh atanh arctanh
erf special_erf erfc special_erfc erfinv special_erfinv digamma special_digamma special_psi lgamma
special_gammaln sigmoid special_expit sqrt rsqrt reciprocal deg2rad rad2deg sinc special_sinc logit
special_logit""".split()  # noqa: SIM905
ANY_TYPE = """floor ceil trunc fix round special_round abs absolute sign sgn signbit square
nan_to_num isnan isinf isfinite isposinf isneginf logical_not""".split()  # noqa: SIM905
ONLY_FLOAT = ["frac"]

COVERED = {f"aten.{n}.default" for n in (*FLOAT_RESULT, *ANY_TYPE, *ONLY_FLOAT)} | {
    "aten.round.decimals", "aten.neg.default", "aten.negative.default",
}  # fmt: skip


def inputs(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    x = sample(shape, dtype)
    if not dtype.is_floating_point:
        return x
    base = name.removeprefix("special_").replace("arc", "a")
    if base in POSITIVE or base in ("gammaln", "psi"):
        return x.abs() + 0.5
    if base in UNIT:
        return x.sin() * 0.9
    return x.abs() + 1.5 if base == "acosh" else x


@pytest.mark.parametrize("name", FLOAT_RESULT)
def test_float_functions(name: str) -> None:
    for dtype in FLOATS:
        for shape in SHAPES:
            check(f"aten.{name}.default", [inputs(name, shape, dtype)])
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
        check(f"aten.{name}.default", [inputs(name, (7,), dtype)])


@pytest.mark.parametrize("name", ANY_TYPE)
def test_functions_that_keep_the_type(name: str) -> None:
    for dtype in (*FLOATS, *INTS, torch.bool):
        if dtype is torch.bool and name in (
            "floor", "ceil", "trunc", "fix", "round", "special_round", "abs", "absolute"
        ):  # fmt: skip
            continue  # ATen has no bool kernels for these
        if name == "special_round" and not dtype.is_floating_point:
            continue  # nor an integer kernel for this alias
        for shape in SHAPES:
            check(f"aten.{name}.default", [sample(shape, dtype, scale=3)])


@pytest.mark.parametrize("name", [*FLOAT_RESULT, *ANY_TYPE, *ONLY_FLOAT, "neg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_special_values(name: str, dtype: torch.dtype) -> None:
    if name in ("lgamma", "special_gammaln", "tan", "exp2", "special_exp2"):
        tolerance = (3e-5, 1e-5) if dtype is torch.float32 else None
    else:
        tolerance = None
    # the largest finite number depends on the type, so float64 is no reference for nan_to_num
    reference = "own" if name == "nan_to_num" else "float64"
    check(f"aten.{name}.default", [specials(dtype)], tol=tolerance, reference=reference)


def test_frac_and_neg() -> None:
    for dtype in FLOATS:
        check("aten.frac.default", [sample((5, 1, 3), dtype, scale=3)])
    for dtype in (*FLOATS, *INTS):
        check("aten.neg.default", [sample((7,), dtype)])
        check("aten.negative.default", [sample((7,), dtype)])


def test_neg_of_bool_is_refused() -> None:
    with pytest.raises(RuntimeError):
        aten("aten.neg.default")(sample((3,), torch.bool))
    with pytest.raises(InputError, match="logical_not"):
        express("aten.neg.default", [sample((3,), torch.bool)])


@pytest.mark.parametrize("decimals", [-1, 0, 1, 2])
def test_round_decimals(decimals: int) -> None:
    x = sample((13,), torch.float32, scale=30)
    check("aten.round.decimals", [x], {"decimals": decimals}, reference="own")
    check("aten.round.decimals", [x.double()], {"decimals": decimals})


def test_options() -> None:
    for dtype in FLOATS:
        check("aten.nan_to_num.default", [specials(dtype), 2.0, 3.0, -4.0])
        check("aten.nan_to_num.default", [specials(dtype)], reference="own")
        check("aten.logit.default", [sample((11,), dtype).sigmoid(), 0.2])


ACTIVATIONS: list[tuple[str, list]] = [
    ("relu.default", []), ("relu6.default", []), ("hardtanh.default", []),
    ("hardtanh.default", [-0.3, 2]), ("leaky_relu.default", []), ("leaky_relu.default", [0.2]),
    ("leaky_relu.default", [-0.5]), ("rrelu.default", []), ("elu.default", []),
    ("elu.default", [0.7, 1.3, 0.4]), ("selu.default", []), ("celu.default", []),
    ("celu.default", [0.6]), ("gelu.default", []), ("silu.default", []), ("mish.default", []),
    ("softplus.default", []), ("softplus.default", [2, 3]), ("hardsigmoid.default", []),
    ("hardswish.default", []), ("hardshrink.default", []), ("hardshrink.default", [1.0]),
    ("softshrink.default", []), ("softshrink.default", [1.0]), ("log_sigmoid.default", []),
    ("threshold.default", [0.3, -2.0]),
]  # fmt: skip

COVERED_ACTIVATIONS = {f"aten.{n}" for n, _ in ACTIVATIONS} | {
    "aten.log_sigmoid_forward.default", "aten.prelu.default", "aten._prelu_kernel.default",
    "aten.glu.default",
}  # fmt: skip


@pytest.mark.parametrize(("name", "rest"), ACTIVATIONS)
def test_activations(name: str, rest: list) -> None:
    for dtype in FLOATS:
        for shape in SHAPES:
            check(f"aten.{name}", [sample(shape, dtype, scale=3), *rest])
    for dtype in (torch.float32, torch.float64):
        check(f"aten.{name}", [specials(dtype), *rest])


def test_gelu_by_tanh() -> None:
    for dtype in FLOATS:
        check("aten.gelu.default", [sample((5, 3), dtype, scale=3)], {"approximate": "tanh"})
    check("aten.gelu.default", [specials()], {"approximate": "tanh"})


@pytest.mark.parametrize("dtype", INTS)
def test_integer_activations(dtype: torch.dtype) -> None:
    check("aten.relu.default", [sample((7,), dtype)])
    check("aten.threshold.default", [sample((7,), dtype), 2, 5])
    if dtype is not torch.uint8:
        check("aten.hardtanh.default", [sample((7,), dtype), -2, 3])
    check("aten.relu6.default", [sample((7,), dtype)])


def test_log_sigmoid_forward_gives_its_first_result() -> None:
    results, _ = express("aten.log_sigmoid_forward.default", [sample((5,))])
    assert results[1] is None
    check("aten.log_sigmoid_forward.default", [sample((5,))])


def test_prelu() -> None:
    for dtype in FLOATS:
        check("aten.prelu.default", [sample((2, 3, 5), dtype), sample((3,), dtype)])
        check("aten.prelu.default", [sample((2, 3), dtype), sample((1,), dtype)])
        check("aten.prelu.default", [sample((5,), dtype), sample((1,), dtype)])
        weight = sample((1, 3, 1), dtype, seed=1)
        check("aten._prelu_kernel.default", [sample((2, 3, 5), dtype), weight])
    with pytest.raises(InputError, match="channels"):
        express("aten.prelu.default", [sample((2, 3, 5)), sample((5,))])


def test_glu() -> None:
    for dtype in FLOATS:
        check("aten.glu.default", [sample((3, 10), dtype)])
        check("aten.glu.default", [sample((4, 7, 2), dtype), 0])
    with pytest.raises(InputError, match="even"):
        express("aten.glu.default", [sample((3, 5))])


def test_every_function_and_activation_is_covered() -> None:
    assert declared_in(elementary) == COVERED
    assert declared_in(activations) == COVERED_ACTIVATIONS
