"""Elementwise functions of one tensor: mathematical functions, rounding, predicates."""

from __future__ import annotations

import math
from collections.abc import Callable

from onchip.errors import InputError, OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Expr, Tensor, call, where
from onchip.ops.promotion import compare, float_dtype, pointwise
from onchip.ops.registry import op


def _declare_float_function(name: str, *aliases: str) -> None:
    """name(x): integers and bools are computed in, and give, the default float type."""

    @op(f"aten.{name}.default", *(f"aten.{a}.default" for a in aliases))
    def function(x: Tensor) -> Tensor:
        return pointwise(name, [x], lambda a: call(name, a), float_dtype(x))


for _name, *_also in (
    ("exp",), ("exp2", "special_exp2"), ("expm1", "special_expm1"), ("log",), ("log2",),
    ("log10",), ("log1p", "special_log1p"), ("sin",), ("cos",), ("tan",), ("sinh",), ("cosh",),
    ("tanh",), ("asin", "arcsin"), ("acos", "arccos"), ("atan", "arctan"), ("asinh", "arcsinh"),
    ("acosh", "arccosh"), ("atanh", "arctanh"), ("erf", "special_erf"), ("erfc", "special_erfc"),
    ("erfinv", "special_erfinv"), ("digamma", "special_digamma", "special_psi"),
    ("lgamma", "special_gammaln"), ("sigmoid", "special_expit"), ("sqrt",), ("rsqrt",),
    ("reciprocal",),
):  # fmt: skip
    _declare_float_function(_name, *_also)


def _declare_rounding(name: str, *aliases: str) -> None:
    """name(x): an integer is its own rounding."""

    @op(f"aten.{name}.default", *(f"aten.{a}.default" for a in aliases))
    def function(x: Tensor) -> Tensor:
        return pointwise(name, [x], lambda a: call(name, a) if x.dtype.is_float else a, x.dtype)


for _name, *_also in (("floor",), ("ceil",), ("trunc", "fix"), ("round", "special_round")):
    _declare_rounding(_name, *_also)


@op("aten.round.decimals")
def round_decimals(x: Tensor, *, decimals: int) -> Tensor:
    """Rounded to `decimals` places: scaled by a power of ten, rounded half to even, unscaled."""
    ten = float(10 ** abs(decimals))
    up, down = ("mul", "div") if decimals > 0 else ("div", "mul")
    if not x.dtype.is_float:
        raise OpaqueOperator("round(decimals) of integers is left to ATen")
    scale = decimals != 0
    return pointwise(
        "round",
        [x],
        lambda a: call(down, call("round", call(up, a, ten)), ten) if scale else call("round", a),
        x.dtype,
    )


@op("aten.frac.default")
def frac(x: Tensor) -> Tensor:
    return pointwise("frac", [x], lambda a: call("frac", a), x.dtype)


@op("aten.abs.default", "aten.absolute.default")
def absolute(x: Tensor) -> Tensor:
    same = x.dtype in (DType.BOOL, DType.U8)
    return pointwise("abs", [x], lambda a: a if same else call("abs", a), x.dtype)


@op("aten.neg.default", "aten.negative.default")
def neg(x: Tensor) -> Tensor:
    if x.dtype is DType.BOOL:
        raise InputError("neg of a bool tensor is undefined; use logical_not")
    return pointwise("neg", [x], lambda a: call("neg", a), x.dtype)


@op("aten.sign.default", "aten.sgn.default")
def sign(x: Tensor) -> Tensor:
    same = x.dtype is DType.BOOL
    return pointwise("sign", [x], lambda a: a if same else call("sign", a), x.dtype)


@op("aten.signbit.default")
def signbit(x: Tensor) -> Tensor:
    """True for negative numbers, -0.0 and negative NaN included."""
    if x.dtype.is_float:
        return predicate("signbit", x, lambda a: compare("lt", call("copysign", 1.0, a), 0.0))
    return predicate("signbit", x, lambda a: compare("lt", a, 0) if x.dtype.is_int else False)


@op("aten.square.default")
def square(x: Tensor) -> Tensor:
    dtype = DType.I64 if x.dtype is DType.BOOL else x.dtype
    return pointwise("square", [x], lambda a: a * a, dtype)


@op("aten.deg2rad.default")
def deg2rad(x: Tensor) -> Tensor:
    return pointwise("deg2rad", [x], lambda a: a * (math.pi / 180), float_dtype(x))


@op("aten.rad2deg.default")
def rad2deg(x: Tensor) -> Tensor:
    return pointwise("rad2deg", [x], lambda a: a * (180 / math.pi), float_dtype(x))


@op("aten.sinc.default", "aten.special_sinc.default")
def sinc(x: Tensor) -> Tensor:
    """sin(pi x) / (pi x), 1 at 0."""

    def body(a: Expr) -> Expr:
        angle = a * math.pi
        return where(compare("eq", a, 0.0), 1.0, call("sin", angle) / angle)

    return pointwise("sinc", [x], body, float_dtype(x))


@op("aten.logit.default", "aten.special_logit.default")
def logit(x: Tensor, eps: float | None = None) -> Tensor:
    """log(x / (1 - x)), x first clamped to [eps, 1 - eps] if eps is given."""

    def body(a: Expr) -> Expr:
        z = a if eps is None else call("minimum", call("maximum", a, eps), 1 - eps)
        return call("log", z / (1.0 - z))

    return pointwise("logit", [x], body, float_dtype(x))


@op("aten.nan_to_num.default")
def nan_to_num(
    x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """NaN replaced by `nan` (0), infinities by the given or the type's extreme finite values."""
    if not x.dtype.is_float:
        return pointwise("nan_to_num", [x], lambda a: a, x.dtype)
    largest = {
        DType.F16: 65504.0,
        DType.BF16: 3.3895313892515355e38,
        DType.F32: 3.4028234663852886e38,
        DType.F64: 1.7976931348623157e308,
    }[x.dtype]
    top = largest if posinf is None else posinf
    bottom = -largest if neginf is None else neginf

    def body(a: Expr) -> Expr:
        finite = where(compare("eq", a, math.inf), top, a)
        finite = where(compare("eq", a, -math.inf), bottom, finite)
        return where(call("isnan", a, dtype=DType.BOOL), 0.0 if nan is None else nan, finite)

    return pointwise("nan_to_num", [x], body, x.dtype)


# ---- predicates --------------------------------------------------------------------------------


def predicate(name: str, x: Tensor, fn: Callable[[Expr], Expr | bool]) -> Tensor:
    return pointwise(name, [x], fn, DType.BOOL, compute=x.dtype)


@op("aten.isnan.default")
def isnan(x: Tensor) -> Tensor:
    known = not x.dtype.is_float
    return predicate("isnan", x, lambda a: False if known else call("isnan", a, dtype=DType.BOOL))


@op("aten.isinf.default")
def isinf(x: Tensor) -> Tensor:
    known = not x.dtype.is_float
    return predicate("isinf", x, lambda a: False if known else call("isinf", a, dtype=DType.BOOL))


@op("aten.isfinite.default")
def isfinite(x: Tensor) -> Tensor:
    known = not x.dtype.is_float
    return predicate(
        "isfinite", x, lambda a: True if known else call("isfinite", a, dtype=DType.BOOL)
    )


@op("aten.isposinf.default")
def isposinf(x: Tensor) -> Tensor:
    known = not x.dtype.is_float
    return predicate("isposinf", x, lambda a: False if known else compare("eq", a, math.inf))


@op("aten.isneginf.default")
def isneginf(x: Tensor) -> Tensor:
    known = not x.dtype.is_float
    return predicate("isneginf", x, lambda a: False if known else compare("eq", a, -math.inf))


@op("aten.logical_not.default")
def logical_not(x: Tensor) -> Tensor:
    return predicate("logical_not", x, lambda a: call("logical_not", a, dtype=DType.BOOL))
