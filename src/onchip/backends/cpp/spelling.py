"""How C++ spells the element types and the scalar functions (include/onchip/scalar.h)."""

from __future__ import annotations

import math

from onchip.ir.dtype import DType
from onchip.ir.expr import Number
from onchip.ir.functions import FUNCTIONS

STORAGE = {
    DType.BOOL: "bool",
    DType.U8: "uint8_t",
    DType.I8: "int8_t",
    DType.I16: "int16_t",
    DType.I32: "int32_t",
    DType.I64: "int64_t",
    DType.F16: "onchip::f16",
    DType.BF16: "onchip::bf16",
    DType.F32: "float",
    DType.F64: "double",
}

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_RENAMED = {"floordiv": "floor_divide", "mod": "remainder", "truncdiv": "trunc_divide"}
# Divisions of integers by zero raise in eager: these set the kernel's status instead of trapping.
INTEGER_DIVISIONS = frozenset(("floordiv", "mod", "truncdiv", "fmod"))


def value_type(dtype: DType) -> str:
    """The type a value has in registers."""
    return STORAGE[dtype.compute]


def constant(value: Number, dtype: DType) -> str:
    """A literal of the compute type."""
    kind = dtype.compute
    if kind is DType.BOOL:
        return "true" if value else "false"
    if kind.is_int:
        v = int(value)
        if v == -(2**63):
            return "INT64_MIN"
        return f"{v}l" if kind is DType.I64 else f"{STORAGE[kind]}({v})"
    x = float(value)
    if math.isnan(x):
        text = "NAN"
    elif math.isinf(x):
        text = "INFINITY" if x > 0 else "-INFINITY"
    else:
        return f"{x!r}f" if kind is DType.F32 else repr(x)
    return f"{value_type(kind)}({text})"


def bounded(fn: str, limit: Number | None, dtype: DType) -> str:
    """maximum and minimum with a constant that is not NaN are one instruction."""
    if limit is None or not dtype.is_float or math.isnan(limit):
        return fn
    return {"maximum": "at_least", "minimum": "at_most"}.get(fn, fn)


def call(fn: str, args: list[str], dtype: DType, arg_dtype: DType) -> str:
    """One scalar function of C++ values; integer results wrap in their own type."""
    out = value_type(dtype)
    if fn.startswith("cast_"):
        return _cast(fn[5:], args[0], arg_dtype)
    if fn in _INFIX:
        if fn == "div" or dtype.is_float or dtype is DType.I64:
            text = f"({args[0]} {_INFIX[fn]} {args[1]})"
            return text if dtype is not DType.I64 or fn == "div" else _wrapping(fn, args)
        if dtype is DType.BOOL:
            return f"({args[0]} {'|' if fn == 'add' else '&'} {args[1]})"
        return f"{out}({args[0]} {_INFIX[fn]} {args[1]})"
    if fn == "neg":
        return f"(-{args[0]})" if dtype.is_float or dtype is DType.I64 else f"{out}(-{args[0]})"
    if fn == "where":
        return f"({args[0]} ? {args[1]} : {args[2]})"
    if fn not in FUNCTIONS and fn not in ("at_least", "at_most"):
        raise KeyError(f"no C++ spelling of {fn}")
    name = _RENAMED.get(fn, fn)
    return f"{out}(onchip::{name}({', '.join(args)}))"


def _wrapping(fn: str, args: list[str]) -> str:
    """Signed overflow is undefined in C++ and wraps in ATen (-fwrapv is set)."""
    return f"({args[0]} {_INFIX[fn]} {args[1]})"


def _cast(label: str, arg: str, arg_dtype: DType) -> str:
    match label:
        case "bfloat16":
            return f"float(onchip::to_bf16(float({arg})))"
        case "float16":
            return f"float(onchip::to_f16(float({arg})))"
    target = next(d for d in DType if d.label == label)
    if target is DType.BOOL:
        return f"({arg} != 0)"
    if target.is_int and arg_dtype.is_float:
        return f"onchip::cast<{STORAGE[target]}>({arg})"
    return f"{STORAGE[target]}({arg})"


def store(value: str, dtype: DType) -> str:
    """A register value in its storage type."""
    if dtype is DType.BF16:
        return f"onchip::to_bf16({value})"
    if dtype is DType.F16:
        return f"onchip::to_f16({value})"
    return f"{STORAGE[dtype]}({value})"


IDENTITY = {"sum": 0, "prod": 1, "any": False, "all": True}


def identity(monoid: str, dtype: DType) -> str:
    """The neutral element, as a literal."""
    if monoid in IDENTITY:
        return constant(IDENTITY[monoid], dtype)
    low = monoid in ("max", "argmax")
    if dtype.compute.is_float:
        return constant(-math.inf if low else math.inf, dtype)
    if dtype is DType.BOOL:
        return "false" if low else "true"
    kind = STORAGE[dtype]
    return f"std::numeric_limits<{kind}>::{'lowest' if low else 'max'}()"


def combine(monoid: str, a: str, b: str, dtype: DType) -> str:
    """One folding step."""
    match monoid:
        case "sum":
            return f"{a} + {b}"
        case "prod":
            return f"{a} * {b}"
        case "max":
            return f"onchip::maximum({a}, {b})"
        case "min":
            return f"onchip::minimum({a}, {b})"
        case "any":
            return f"{a} | ({b} != 0)"
        case "all":
            return f"{a} & ({b} != 0)"
    raise KeyError(monoid)
