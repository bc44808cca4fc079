"""The scalar functions of the expression language: one row each, for every reader.

name -> (FLOPs counted for one evaluation, how it is cheap or dear to recompute). The languages'
spellings stand beside their emitters and are tested to cover this table.
FLOP weights: arithmetic and comparisons 1; division and square root count 1 as well (the usual
convention); transcendental functions are counted as 1 operation too, and are listed apart so
that the cost model can price them.
"""

from __future__ import annotations

ARITHMETIC = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "abs",
        "sign",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "floordiv",
        "mod",
        "truncdiv",
        "fmod",
        "floor",
        "ceil",
        "trunc",
        "round",
        "frac",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "copysign",
        "fma",
    ]
)
TRANSCENDENTAL = frozenset(
    [
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "acosh",
        "atanh",
        "erf",
        "erfc",
        "erfinv",
        "lgamma",
        "digamma",
        "sigmoid",
        "pow",
        "atan2",
        "hypot",
        "logaddexp",
        "xlogy",
        "nextafter",
        "ldexp",
    ]
)
COMPARISON = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite"])
LOGICAL = frozenset(
    [
        "where",
        "logical_and",
        "logical_or",
        "logical_xor",
        "logical_not",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "bitwise_not",
        "shift_left",
        "shift_right",
    ]
)
CASTS = frozenset(
    f"cast_{d}"
    for d in [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    ]
)
FUNCTIONS = ARITHMETIC | TRANSCENDENTAL | COMPARISON | LOGICAL | CASTS


def flops_of(fn: str) -> int:
    """Floating-point operations of one call: casts and selections are free."""
    return 0 if fn in CASTS or fn in LOGICAL else 1
