"""Elementwise arithmetic, comparisons and logic of two operands."""

from __future__ import annotations

from onchip.errors import InputError, OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Expr, Number, Tensor, call, cast, tensor
from onchip.ops.promotion import (
    broadcast_shape,
    common_dtype,
    compare,
    element,
    float_dtype,
    pointwise,
    read_rounded,
    shape_of,
)
from onchip.ops.registry import op

Operand = Tensor | Number


def _declare_comparison(fn: str, alias: str) -> None:
    """Both sides are first rounded to their common type, as ATen does."""
    names = [n for n in (fn, alias) if n]

    @op(*(f"aten.{n}.{o}" for n in names for o in ("Tensor", "Scalar")))
    def comparison(a: Operand, b: Operand) -> Tensor:
        dtype = common_dtype(a, b)
        shape = broadcast_shape(shape_of(a), shape_of(b))
        return tensor(
            shape,
            DType.BOOL,
            lambda *i: compare(
                fn, read_rounded(a, i, shape, dtype), read_rounded(b, i, shape, dtype)
            ),
            fn,
        )


for _name, _alias in (
    ("eq", ""), ("ne", "not_equal"), ("lt", "less"), ("le", "less_equal"), ("gt", "greater"),
    ("ge", "greater_equal"),
):  # fmt: skip
    _declare_comparison(_name, _alias)


# ---- arithmetic --------------------------------------------------------------------------------


def _scaled(b: Expr, alpha: Number) -> Expr:
    return b if alpha == 1 else b * alpha


def _declare_sum(fn: str, alias: str) -> None:
    @op(*(f"aten.{n}.{o}" for n in (fn, alias) if n for o in ("Tensor", "Scalar")))
    def add_or_sub(a: Operand, b: Operand, alpha: Number = 1) -> Tensor:
        dtype = common_dtype(a, b)
        if dtype is DType.BOOL:
            if fn == "sub":
                raise InputError("subtraction of bool tensors is undefined; use logical_xor")
            return pointwise(
                fn, [a, b], lambda x, y: call("logical_or", x, y if alpha else False), dtype
            )
        return pointwise(fn, [a, b], lambda x, y: call(fn, x, _scaled(y, alpha)), dtype)


_declare_sum("add", "")
_declare_sum("sub", "subtract")


@op("aten.rsub.Tensor", "aten.rsub.Scalar")
def rsub(a: Operand, b: Operand, alpha: Number = 1) -> Tensor:
    """b - alpha * a."""
    return pointwise("rsub", [a, b], lambda x, y: y - _scaled(x, alpha), common_dtype(a, b))


@op("aten.mul.Tensor", "aten.mul.Scalar", "aten.multiply.Tensor", "aten.multiply.Scalar")
def mul(a: Operand, b: Operand) -> Tensor:
    dtype = common_dtype(a, b)
    fn = "logical_and" if dtype is DType.BOOL else "mul"
    return pointwise("mul", [a, b], lambda x, y: call(fn, x, y), dtype)


@op(
    *(f"aten.{n}.{o}" for n in ("div", "divide") for o in ("Tensor", "Scalar")),
    *(f"aten.{n}.{o}_mode" for n in ("div", "divide") for o in ("Tensor", "Scalar")),
    "aten.true_divide.Tensor",
    "aten.true_divide.Scalar",
)
def div(a: Operand, b: Operand, rounding_mode: str | None = None) -> Tensor:
    """Quotient: exact (floating), or rounded to zero ("trunc") or down ("floor")."""
    if rounding_mode is None:
        return pointwise("div", [a, b], lambda x, y: call("div", x, y), float_dtype(a, b))
    fn = {"trunc": "truncdiv", "floor": "floordiv"}[rounding_mode]
    return pointwise(fn, [a, b], lambda x, y: call(fn, x, y), _divisible(fn, a, b))


@op("aten.floor_divide.default", "aten.floor_divide.Scalar")
def floor_divide(a: Operand, b: Operand) -> Tensor:
    return div(a, b, rounding_mode="floor")


def _divisible(name: str, a: Operand, b: Operand) -> DType:
    dtype = common_dtype(a, b)
    if dtype is DType.BOOL:
        raise OpaqueOperator(f"{name} of bool tensors is left to ATen")
    return dtype


def _declare_remainder(fn: str, *targets: str) -> None:
    @op(*targets)
    def remainder(a: Operand, b: Operand) -> Tensor:
        return pointwise(fn, [a, b], lambda x, y: call(fn, x, y), _divisible(fn, a, b))


_declare_remainder("fmod", "aten.fmod.Tensor", "aten.fmod.Scalar")
_declare_remainder("mod", *(f"aten.remainder.{o}" for o in ("Tensor", "Scalar", "Scalar_Tensor")))


@op("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def power(a: Operand, b: Operand) -> Tensor:
    """a ** b. Small constant exponents become products and square roots, as in ATen."""
    dtype = common_dtype(a, b)
    if dtype is DType.BOOL:
        raise OpaqueOperator("pow of bool tensors is left to ATen")
    if not dtype.is_float and not isinstance(b, Tensor) and b < 0:
        raise InputError("integers to negative integer powers are not allowed")
    return pointwise("pow", [a, b], lambda x, y: _power(x, y, b), dtype)


def _power(x: Expr, y: Expr, exponent: Operand) -> Expr:
    if isinstance(exponent, Tensor):
        return call("pow", x, y)
    match float(exponent):
        case 1.0:
            return x
        case 2.0:
            return x * x
        case 3.0:
            return x * x * x
        case 0.5 if x.dtype.is_float:
            return call("sqrt", x)
        case -1.0 if x.dtype.is_float:
            return call("reciprocal", x)
        case -2.0 if x.dtype.is_float:
            return call("reciprocal", x * x)
    return call("pow", x, y)


@op("aten.float_power.Tensor_Scalar", "aten.float_power.Tensor_Tensor", "aten.float_power.Scalar")
def float_power(a: Operand, b: Operand) -> Tensor:
    return pointwise("pow", [a, b], lambda x, y: _power(x, y, b), DType.F64)


def _declare_binary(fn: str, *targets: str, floating: bool) -> None:
    @op(*targets)
    def binary(a: Operand, b: Operand) -> Tensor:
        dtype = float_dtype(a, b) if floating else common_dtype(a, b)
        return pointwise(fn, [a, b], lambda x, y: call(fn, x, y), dtype)


_declare_binary("maximum", "aten.maximum.default", "aten.max.other", floating=False)
_declare_binary("minimum", "aten.minimum.default", "aten.min.other", floating=False)
_declare_binary("hypot", "aten.hypot.default", floating=False)
_declare_binary("logaddexp", "aten.logaddexp.default", floating=False)
_declare_binary("atan2", "aten.atan2.default", "aten.arctan2.default", floating=True)
_declare_binary("copysign", "aten.copysign.Tensor", "aten.copysign.Scalar", floating=True)
_declare_binary("ldexp", "aten.ldexp.Tensor", floating=True)
_declare_binary(
    "xlogy",
    *(f"aten.xlogy.{o}" for o in ("Tensor", "Scalar_Other", "Scalar_Self")),
    *(f"aten.special_xlogy.{o}" for o in ("default", "other_scalar", "self_scalar")),
    floating=True,
)


def _declare_number_extreme(fn: str, otherwise: str) -> None:
    """The larger or smaller; a NaN loses against a number. Integers have no NaN."""

    @op(f"aten.{fn}.default")
    def extreme(a: Tensor, b: Tensor) -> Tensor:
        dtype = common_dtype(a, b)
        name = fn if dtype.is_float else otherwise
        return pointwise(fn, [a, b], lambda x, y: call(name, x, y), dtype)


_declare_number_extreme("fmax", "maximum")
_declare_number_extreme("fmin", "minimum")


@op("aten.nextafter.default")
def nextafter(a: Tensor, b: Tensor) -> Tensor:
    """The next representable number from a towards b; half precision has its own spacing."""
    dtype = common_dtype(a, b)
    if dtype.size < 4:
        raise OpaqueOperator(f"nextafter in {dtype.label} is left to ATen")
    return pointwise("nextafter", [a, b], lambda x, y: call("nextafter", x, y), dtype)


# ---- logic -------------------------------------------------------------------------------------


def _declare_logic(fn: str) -> None:
    @op(f"aten.{fn}.default")
    def logic(a: Tensor, b: Tensor) -> Tensor:
        shape = broadcast_shape(a.shape, b.shape)
        return tensor(
            shape,
            DType.BOOL,
            lambda *i: call(fn, *(cast(element(x, i, shape), DType.BOOL) for x in (a, b))),
            fn,
        )


for _name in ("logical_and", "logical_or", "logical_xor"):
    _declare_logic(_name)


@op("aten.bitwise_not.default")
def bitwise_not(x: Tensor) -> Tensor:
    return pointwise("bitwise_not", [x], lambda a: call("bitwise_not", a), x.dtype)


def _declare_bitwise(fn: str, name: str, dunder: str, number: str) -> None:
    @op(
        *(f"aten.{name}.{o}" for o in ("Tensor", number, "Scalar_Tensor")),
        f"aten.{dunder}.Tensor",
        f"aten.{dunder}.Scalar",
    )
    def bitwise(a: Operand, b: Operand) -> Tensor:
        dtype = common_dtype(a, b)
        if dtype.is_float:
            raise OpaqueOperator(f"{name} of {dtype.label} is left to ATen")
        return pointwise(name, [a, b], lambda x, y: call(fn, x, y), dtype)


for _name in ("and", "or", "xor"):
    _declare_bitwise(f"bitwise_{_name}", f"bitwise_{_name}", f"__{_name}__", "Scalar")
_declare_bitwise("shift_left", "bitwise_left_shift", "__lshift__", "Tensor_Scalar")
_declare_bitwise("shift_right", "bitwise_right_shift", "__rshift__", "Tensor_Scalar")
