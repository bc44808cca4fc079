"""How CUDA C++ spells the element types and the scalar functions (include/onchip/scalar.cuh).

float32 values get what ATen's CUDA kernels have: IEEE division and square root, CUDA's functions
for the rest. Values that a kernel only rounds to a half type (`coarse`) get shorter forms, whose
errors such a result does not show: an epilogue is run by a few warps, once for each element.

Differences from ATen on the CPU: an integer divided by zero gives zero (no error); a float outside
an integer type's range converts to the nearest integer of 32 bits (64 for int64) and wraps from
there.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from onchip.ir.dtype import BY_LABEL, DType
from onchip.ir.expr import Number

VALUES = {
    DType.BOOL: "bool",
    DType.U8: "unsigned char",
    DType.I8: "signed char",
    DType.I16: "short",
    DType.I32: "int",
    DType.I64: "long long",
    DType.F32: "float",
}
# What a pointer to elements in memory points to.
STORAGE = VALUES | {
    DType.BOOL: "unsigned char", DType.F16: "unsigned short", DType.BF16: "unsigned short",
}  # fmt: skip

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_TRUTH = {"logical_and": "&&", "logical_or": "||", "logical_xor": "!="}
_BITS = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
_FLOATS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "__fdiv_rn({0}, {1})",
    "neg": "-{0}",
    "abs": "fabsf({0})",
    "maximum": "onchip::maximum({0}, {1})",
    "minimum": "onchip::minimum({0}, {1})",
    "fmax": "fmaxf({0}, {1})",
    "fmin": "fminf({0}, {1})",
    "floordiv": "onchip::floor_quotient({0}, {1})",
    "mod": "onchip::floor_remainder({0}, {1})",
    "truncdiv": "truncf(__fdiv_rn({0}, {1}))",
    "round": "rintf({0})",
    "frac": "{0} - truncf({0})",
    "sqrt": "__fsqrt_rn({0})",
    "reciprocal": "onchip::reciprocal({0})",
    "fma": "fmaf({0}, {1}, {2})",
    "sigmoid": "onchip::sigmoid({0})",
    "digamma": "onchip::digamma({0})",
    "logaddexp": "onchip::logaddexp({0}, {1})",
    "xlogy": "onchip::xlogy({0}, {1})",
    "ldexp": "{0} * exp2f({1})",
    "sign": "onchip::sign<float>({0})",
    "isnan": "{0} != {0}",
    "isinf": "fabsf({0}) == onchip::infinity()",
    "isfinite": "fabsf({0}) < onchip::infinity()",
} | {  # CUDA's functions of the same name
    name: f"{name}f({{0}}{second})"
    for names, second in (
        ("""floor ceil trunc rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan
        sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma""", ""),
        ("pow atan2 hypot nextafter copysign fmod", ", {1}"),
    )
    for name in names.split()
}  # fmt: skip
_COARSE = {
    "exp": "onchip::coarse_exp({0})",
    "exp2": "onchip::approx_exp2({0})",
    "div": "onchip::approx_divide({0}, {1})",
    "reciprocal": "onchip::approx_divide(1.0f, {0})",
    "sqrt": "onchip::approx_sqrt({0})",
    "sigmoid": "onchip::coarse_sigmoid({0})",
    "tanh": "onchip::coarse_tanh({0})",
    "erf": "onchip::coarse_erf({0})",
}
_INTEGERS = {
    "add": "onchip::sum<{T}>({0}, {1})",
    "sub": "onchip::difference<{T}>({0}, {1})",
    "mul": "onchip::product<{T}>({0}, {1})",
    "neg": "onchip::negated<{T}>({0})",
    "abs": "onchip::magnitude<{T}>({0})",
    "sign": "onchip::sign<{T}>({0})",
    "maximum": "onchip::larger<{T}>({0}, {1})",
    "minimum": "onchip::smaller<{T}>({0}, {1})",
    "fmax": "onchip::larger<{T}>({0}, {1})",
    "fmin": "onchip::smaller<{T}>({0}, {1})",
    "floordiv": "onchip::floor_quotient<{T}>({0}, {1})",
    "mod": "onchip::floor_remainder<{T}>({0}, {1})",
    "truncdiv": "onchip::truncated_quotient<{T}>({0}, {1})",
    "fmod": "onchip::truncated_remainder<{T}>({0}, {1})",
    "floor": "{0}",
    "ceil": "{0}",
    "trunc": "{0}",
    "round": "{0}",
    "frac": "({T})({0} * 0)",
    "fma": "onchip::sum<{T}>(onchip::product<{T}>({0}, {1}), {2})",
    "bitwise_not": "({T})(~{0})",
    "shift_left": "onchip::shifted_left<{T}>({0}, {1})",
    "shift_right": "onchip::shifted_right<{T}>({0}, {1})",
    "pow": "onchip::power<{T}>({0}, {1})",
    "isnan": "{0} != {0}",
    "isinf": "{0} != {0}",
    "isfinite": "{0} == {0}",
}
_BOOLS = {
    "add": "{0} || {1}",
    "mul": "{0} && {1}",
    "sub": "{0} != {1}",
    "maximum": "{0} || {1}",
    "minimum": "{0} && {1}",
    "fmax": "{0} || {1}",
    "fmin": "{0} && {1}",
    "bitwise_not": "!{0}",
}


def constant(value: Number, dtype: DType) -> str:
    """A literal of the compute type; negative ones are in brackets."""
    kind = dtype.compute
    if kind is DType.BOOL:
        return "true" if value else "false"
    if kind.is_int:
        v = int(value)
        if v == -(2**63):
            return "onchip::kLowest"
        text = f"{v}ll" if kind is DType.I64 else f"{v}"
        text = f"({text})" if v < 0 else text
        return text if kind in (DType.I64, DType.I32) else f"({VALUES[kind]}){text}"
    x = _single(float(value))
    if math.isnan(x):
        return "onchip::not_a_number()"
    text = "onchip::infinity()" if math.isinf(x) else f"{abs(x)!r}f"
    return f"(-{text})" if math.copysign(1.0, x) < 0 else text


def _single(x: float) -> float:
    """The nearest float32."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def inverse(value: Number) -> str | None:
    """The literal that multiplies in place of a division by one, as in ATen's CUDA kernels."""
    x = _single(float(value))
    return constant(1 / x, DType.F32) if 2.0**-126 <= abs(x) <= 2.0**126 else None


def call(
    fn: str, args: Sequence[str], dtype: DType, operand: DType | None = None, coarse: bool = False
) -> str:
    """One scalar function of values (names, literals or bracketed texts).

    dtype: of the result; operand: of the arguments (of the last one of `where`), `dtype` unless
    given; coarse: float32 results only go on to a half type. Raises KeyError for what has no form.
    """
    own = dtype if operand is None else operand
    if fn == "where":
        return f"{args[0]} ? {args[1]} : {args[2]}"
    if fn.startswith("cast_"):
        return _cast(BY_LABEL[fn.removeprefix("cast_")], args[0], own)
    if fn in _TRUTH:
        a, b = (x if own is DType.BOOL else f"({x} != 0)" for x in args)
        return f"{a} {_TRUTH[fn]} {b}"
    if fn == "logical_not":
        return f"!{args[0]}" if own is DType.BOOL else f"{args[0]} == 0"
    if fn in _COMPARISONS:
        return f"{args[0]} {_COMPARISONS[fn]} {args[1]}"
    if fn in _BITS and not own.is_float:
        return f"({VALUES[own]})({args[0]} {_BITS[fn]} {args[1]})"
    table = _FLOATS if own is DType.F32 else _INTEGERS if own.is_int else {}
    if own is DType.BOOL:
        table = _BOOLS
    form = _COARSE.get(fn) if coarse and own is DType.F32 else None
    form = form or table.get(fn)
    if form is None:
        raise KeyError(f"no CUDA spelling of {fn} of {own.label} values")
    return form.format(*args, T=VALUES[own])


def _cast(target: DType, x: str, own: DType) -> str:
    if target is DType.BOOL:
        return x if own is DType.BOOL else f"{x} != 0"
    if target in (DType.BF16, DType.F16):
        wide = x if own is DType.F32 else f"float({x})"
        return f"onchip::rounded_{'bf16' if target is DType.BF16 else 'fp16'}({wide})"
    if target not in VALUES:
        raise KeyError(f"no CUDA spelling of {target.label} values")
    if own is DType.F32 and target.is_int:
        return f"onchip::whole<{VALUES[target]}>({x})"
    return f"({VALUES[target]}){x}"


def loaded(text: str, dtype: DType) -> str:
    """An element of memory in its compute type."""
    if dtype in (DType.BF16, DType.F16):
        return f"onchip::from_{'bf16' if dtype is DType.BF16 else 'fp16'}({text})"
    return f"({text} != 0)" if dtype is DType.BOOL else text
