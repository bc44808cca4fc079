"""How Triton spells the element types, the scalar functions and the monoids."""

from __future__ import annotations

import math

from onchip.ir.dtype import DType
from onchip.ir.expr import Number

TYPES = {
    DType.BOOL: "tl.int1",
    DType.F16: "tl.float16",
    DType.BF16: "tl.bfloat16",
    DType.F32: "tl.float32",
}
POINTERS = {DType.BOOL: "*i1", DType.F16: "*fp16", DType.BF16: "*bf16", DType.F32: "*fp32"}

# Division and square root round as IEEE does: Triton's own `/` and tl.sqrt are approximations.
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
    "gt": ">", "ge": ">=", "logical_and": "&", "logical_or": "|", "logical_xor": "^",
}  # fmt: skip
_CALLS = {
    "div": "tl.div_rn", "sqrt": "tl.sqrt_rn", "exp": "tl.exp", "exp2": "tl.exp2", "log": "tl.log",
    "log2": "tl.log2", "abs": "tl.abs", "erf": "tl.erf", "floor": "tl.floor", "ceil": "tl.ceil",
    "sin": "tl.sin", "cos": "tl.cos", "where": "tl.where", "maximum": "maximum",
    "minimum": "minimum",
}  # fmt: skip
_FORMS = {
    "neg": "-{0}",
    "reciprocal": "tl.div_rn(1.0, {0})",
    "rsqrt": "tl.div_rn(1.0, tl.sqrt_rn({0}))",
    "sigmoid": "tl.div_rn(1.0, 1.0 + tl.exp(-{0}))",
    "isnan": "{0} != {0}",
    "logical_not": "{0} == 0",
}
FUNCTIONS = frozenset((*_INFIX, *_CALLS, *_FORMS))

# Functions of the generated file that it calls by name. tl.maximum and tl.max drop NaN unless told.
HELPERS = {
    "maximum": "return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)",
    "multiply": "return a * b",
}

IDENTITY: dict[str, Number] = {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}
_COMBINE = {"prod": "multiply", "max": "maximum", "min": "minimum"}


def constant(value: Number, dtype: DType) -> str:
    """A literal; Triton gives it the type of what it meets."""
    if dtype is DType.BOOL:
        return "True" if value else "False"
    if not dtype.is_float:
        return str(int(value))
    x = float(value)
    return repr(x) if math.isfinite(x) else f'float("{x}")'


def spells(fn: str) -> bool:
    return fn in FUNCTIONS or (fn.startswith("cast_") and _target(fn) in TYPES)


def _target(fn: str) -> DType | None:
    return next((d for d in DType if d.label == fn.removeprefix("cast_")), None)


def call(fn: str, args: list[str]) -> str:
    """One scalar function of block values (names or bracketed texts)."""
    if fn in _INFIX:
        return f"{args[0]} {_INFIX[fn]} {args[1]}"
    if fn in _CALLS:
        return f"{_CALLS[fn]}({', '.join(args)})"
    if fn in _FORMS:
        return _FORMS[fn].format(*args)
    target = _target(fn)
    assert target is not None, fn
    if target is DType.BOOL:
        return f"{args[0]} != 0"
    rounded = f"{args[0]}.to({TYPES[target]})"
    return rounded if target is target.compute else f"{rounded}.to(tl.float32)"


def fold_axis(monoid: str, value: str, position: int) -> str:
    """The monoid over one dimension of a block."""
    if monoid == "sum":
        return f"tl.sum({value}, axis={position})"
    return f"tl.reduce({value}, {position}, {_COMBINE[monoid]})"


def combine(monoid: str, a: str, b: str) -> str:
    """One folding step of two blocks."""
    return f"{a} + {b}" if monoid == "sum" else f"{_COMBINE[monoid]}({a}, {b})"
