"""The scalar functions of ir/functions.py in numpy: the meaning that emitters must match."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import special

from onchip.ir.dtype import DType

Array = np.ndarray

# bfloat16 has no numpy type: its values are kept as float32 that is already rounded.
STORAGE: dict[DType, np.dtype] = {
    d: np.dtype("float32" if d is DType.BF16 else d.label) for d in DType if d.is_computable
}


def numpy_dtype(dtype: DType, exact: bool = False) -> np.dtype:
    """The numpy type that arithmetic in `dtype` uses; float64 for every float if `exact`."""
    if dtype.is_float:
        return np.dtype("float64") if exact else STORAGE[dtype.compute]
    return STORAGE[dtype]


def round_bfloat16(x: Array) -> Array:
    """float32 rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    wide = np.asarray(x, dtype=np.float32)
    bits = wide.view(np.uint32)
    even = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    rounded = ((bits + even) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(wide), wide, rounded)


def convert(x: Array, dtype: DType, exact: bool = False) -> Array:
    """Tensor.to(dtype) in the compute type: half types round unless `exact`; float to integer
    truncates; integers wrap; float to uint8 goes through int64, so that -1 gives 255."""
    target = numpy_dtype(dtype, exact)
    if dtype.is_float:
        if exact:
            return x.astype(target)
        if dtype is DType.BF16:
            return round_bfloat16(x.astype(np.float32))
        if dtype is DType.F16:
            return x.astype(np.float32).astype(np.float16).astype(np.float32)
        return x.astype(target)
    if dtype is DType.BOOL:
        return x != 0
    if x.dtype.kind == "f" and dtype is not DType.I64:
        return x.astype(np.int64).astype(target)
    return x.astype(target)


def store(x: Array, dtype: DType, exact: bool = False) -> Array:
    """A compute-type value as the tensor's storage holds it."""
    rounded = convert(x, dtype, exact)
    return rounded if exact else rounded.astype(STORAGE[dtype])


def _checked(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Integer division by zero is an error, as in ATen; floats follow IEEE."""

    def divide(a: Array, b: Array) -> Array:
        if b.dtype.kind in "iu" and np.any(b == 0):
            raise ZeroDivisionError("integer division or remainder by zero")
        return fn(a, b)

    return divide


def _floordiv(a: Array, b: Array) -> Array:
    """The quotient rounded down; floats by c10::div_floor_floating, which is numpy's rule too."""
    return np.floor_divide(a, b)


def _mod(a: Array, b: Array) -> Array:
    """Remainder with the divisor's sign; a zero keeps the dividend's sign (unlike numpy)."""
    m = np.fmod(a, b)
    return np.where((m != 0) & ((b < 0) != (m < 0)), m + b, m)


def _truncdiv(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.trunc(a / b)
    quotient = np.floor_divide(a, b)
    inexact = quotient * b != a
    return quotient + (inexact & ((a < 0) != (b < 0))).astype(quotient.dtype)


def _pow(a: Array, b: Array) -> Array:
    """Powers; integers wrap, and a negative exponent gives 0 except for bases 1 and -1."""
    if a.dtype.kind == "f":
        return np.power(a, b)
    positive = np.power(a, np.maximum(b, 0))
    odd = np.where(b % 2 == 0, 1, a)
    negative = np.where((a == 1) | (a == -1), odd, 0)
    return np.where(b < 0, negative, positive)


def _logaddexp(a: Array, b: Array) -> Array:
    r = np.maximum(a, b) + np.log1p(np.exp(-np.abs(a - b)))
    return np.where(np.isinf(a) & (a == b), a, r)


def _xlogy(a: Array, b: Array) -> Array:
    return np.where((a == 0) & ~np.isnan(b), a.dtype.type(0), a * np.log(b))


def _shift(fn: Callable[..., Array], left: bool) -> Callable[..., Array]:
    """Amounts outside the width: left gives 0, right gives the sign."""

    def shift(a: Array, b: Array) -> Array:
        width = a.dtype.itemsize * 8
        outside = (b < 0) | (b >= width)
        inside = fn(a, np.where(outside, 0, b).astype(a.dtype))
        return np.where(outside, 0 if left else np.where(a < 0, -1, 0), inside)

    return shift


def _truth(fn: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *args: fn(*(x != 0 for x in args))


def _fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once (float32 through float64; float64 rounds twice)."""
    wide = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return wide.astype(a.dtype) if a.dtype.kind == "f" else a * b + c


FUNCTIONS_NUMPY: dict[str, Callable[..., Array]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": np.true_divide,
    "neg": np.negative,
    "abs": np.abs,
    "sign": lambda x: (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype),  # NaN gives 0, as in ATen
    "maximum": np.maximum,
    "minimum": np.minimum,
    "fmax": np.fmax,
    "fmin": np.fmin,
    "floordiv": _checked(_floordiv),
    "mod": _checked(_mod),
    "truncdiv": _checked(_truncdiv),
    "fmod": _checked(np.fmod),
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": lambda x: np.rint(x) if x.dtype.kind == "f" else x,
    "frac": lambda x: x - np.trunc(x),
    "sqrt": np.sqrt,
    "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
    "reciprocal": lambda x: x.dtype.type(1) / x,
    "copysign": np.copysign,
    "fma": _fma,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "erf": special.erf,
    "erfc": special.erfc,
    "erfinv": lambda x: np.copysign(special.erfinv(x), x),  # SciPy drops the sign of zero
    "lgamma": lambda x: np.where(np.isinf(x), np.abs(x), special.gammaln(x)),
    "digamma": special.psi,
    "sigmoid": special.expit,
    "pow": _pow,
    "atan2": np.arctan2,
    "hypot": np.hypot,
    "logaddexp": _logaddexp,
    "xlogy": _xlogy,
    "nextafter": np.nextafter,
    "ldexp": lambda a, b: a * np.exp2(b),  # ATen: x * pow(2, n)
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "isfinite": np.isfinite,
    "where": np.where,
    "logical_and": _truth(np.logical_and),
    "logical_or": _truth(np.logical_or),
    "logical_xor": _truth(np.logical_xor),
    "logical_not": _truth(np.logical_not),
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "bitwise_not": np.invert,
    "shift_left": _shift(np.left_shift, left=True),
    "shift_right": _shift(np.right_shift, left=False),
} | {f"cast_{d.label}": (lambda x, d=d: convert(x, d)) for d in DType if d.is_computable}


def apply(fn: str, args: list[Array], dtype: DType, exact: bool = False) -> Array:
    """One scalar function on arrays, its result in the numpy type of `dtype`."""
    if fn.startswith("cast_"):
        target = next(d for d in DType if d.label == fn[5:])
        out = convert(args[0], target, exact)
    else:
        try:
            spelled = FUNCTIONS_NUMPY[fn]
        except KeyError:
            raise NotImplementedError(f"scalar function {fn!r} has no numpy spelling") from None
        out = spelled(*args)
    return np.asarray(out).astype(numpy_dtype(dtype, exact), copy=False)
