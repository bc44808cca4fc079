"""How Triton spells the element types, the scalar functions and the monoids.

Triton's own `/`, tl.exp and tl.sqrt are approximations. float32 and float64 values get what ATen's
CUDA kernels have: IEEE division and square root, CUDA's libdevice for the rest. float32 values that
a kernel only rounds to a half type (`coarse`) get shorter forms, whose errors of a few units of
float32 (erf: 1e-4) such a result does not show: a kernel that streams bfloat16 has some 27
instructions an element before they cost more than its memory traffic.

Differences from ATen on the CPU: libdevice takes denormal float32 for zero; an integer divided by
zero gives some number, as in ATen's CUDA kernels (no error); a float outside an integer type's
range converts to the nearest integer of 32 bits (64 for int64) and wraps from there.
"""

from __future__ import annotations

import ast
import math
import re
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from onchip.ir.dtype import BY_LABEL, DType
from onchip.ir.expr import Number

TYPES = {
    DType.BOOL: "tl.int1",
    DType.U8: "tl.uint8",
    DType.I8: "tl.int8",
    DType.I16: "tl.int16",
    DType.I32: "tl.int32",
    DType.I64: "tl.int64",
    DType.F16: "tl.float16",
    DType.BF16: "tl.bfloat16",
    DType.F32: "tl.float32",
    DType.F64: "tl.float64",
}
POINTERS = {
    DType.BOOL: "*i1",
    DType.U8: "*u8",
    DType.I8: "*i8",
    DType.I16: "*i16",
    DType.I32: "*i32",
    DType.I64: "*i64",
    DType.F16: "*fp16",
    DType.BF16: "*bf16",
    DType.F32: "*fp32",
    DType.F64: "*fp64",
}

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
    "gt": ">", "ge": ">=", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
}  # fmt: skip
_OF_BOOLS = {"add": "|", "mul": "&", "sub": "^"}
_TRUTH = {"logical_and": "&", "logical_or": "|", "logical_xor": "^"}
_LIBDEVICE = frozenset(
    """exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh
    atanh erf erfc erfinv lgamma pow atan2 hypot nextafter copysign trunc fmod""".split()  # noqa: SIM905
)
_FLOATS = {
    "div": "tl.div_rn({0}, {1})",
    "neg": "{0} * -1.0",  # Triton 3.6 has 0 - x, whose zero has the wrong sign
    "abs": "tl.abs({0})",
    "maximum": "maximum({0}, {1})",
    "minimum": "minimum({0}, {1})",
    "fmax": "tl.maximum({0}, {1})",
    "fmin": "tl.minimum({0}, {1})",
    "floordiv": "floor_divide_floats({0}, {1})",
    "mod": "remainder_of_floats({0}, {1})",
    "truncdiv": "libdevice.trunc(tl.div_rn({0}, {1}))",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "round": "libdevice.rint({0})",
    "frac": "{0} - libdevice.trunc({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.rsqrt({0})",
    "reciprocal": "tl.div_rn(1.0, {0})",
    "fma": "tl.fma({0}, {1}, {2})",
    "sigmoid": "tl.div_rn(1.0, libdevice.exp({0} * -1.0) + 1.0)",
    "digamma": "digamma({0})",
    "logaddexp": "logaddexp({0}, {1})",
    "xlogy": "xlogy({0}, {1})",
    "ldexp": "{0} * libdevice.exp2({1})",
    "isnan": "{0} != {0}",
    "isinf": 'tl.abs({0}) == float("inf")',
    "isfinite": 'tl.abs({0}) < float("inf")',
}
# tl.div_rn and tl.sqrt_rn are for float32; float64 has no other division.
_DOUBLES = {
    "div": "{0} / {1}",
    "reciprocal": "1.0 / {0}",
    "sqrt": "tl.sqrt({0})",
    "truncdiv": "libdevice.trunc({0} / {1})",
    "sigmoid": "1.0 / (libdevice.exp({0} * -1.0) + 1.0)",
}
_INTEGERS = {
    "neg": "0 - {0}",
    "abs": "tl.abs({0})",
    "maximum": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1})",
    "fmax": "tl.maximum({0}, {1})",
    "fmin": "tl.minimum({0}, {1})",
    "floordiv": "floor_divide({0}, {1})",
    "mod": "remainder({0}, {1})",
    "truncdiv": "{0} // {1}",
    "fmod": "{0} % {1}",
    "floor": "{0}",
    "ceil": "{0}",
    "trunc": "{0}",
    "round": "{0}",
    "frac": "{0} * 0",
    "fma": "{0} * {1} + {2}",
    "bitwise_not": "~{0}",
    "shift_left": "shift_left({0}, {1})",
    "shift_right": "shift_right({0}, {1})",
    "pow": "signed_power({0}, {1})",
    "isnan": "{0} != {0}",
    "isinf": "{0} != {0}",
    "isfinite": "{0} == {0}",
}
_UNSIGNED = {
    "floordiv": "{0} // {1}",
    "mod": "{0} % {1}",
    "pow": "power({0}, {1})",
    "shift_right": "shift_right_unsigned({0}, {1})",
    "bitwise_not": "{0} ^ 255",
}
_COARSE = {
    "exp": "coarse_exp({0})",
    "exp2": "tl.exp2({0})",
    "div": "{0} / {1}",
    "reciprocal": "1.0 / {0}",
    "sigmoid": "coarse_sigmoid({0})",
    "tanh": "coarse_tanh({0})",
    "erf": "coarse_erf({0})",
}

_LITERAL = re.compile(r'-?(\d[\d.e+-]*|float\("\S+"\))|True|False')


def _spelled(fn: str, dtype: DType, coarse: bool) -> str | None:
    """The form of a function of values of one type."""
    if dtype.is_float:
        if dtype is DType.F64 and fn in _DOUBLES:
            return _DOUBLES[fn]
        if coarse and dtype is DType.F32 and fn in _COARSE:
            return _COARSE[fn]
        if fn in _LIBDEVICE:
            return f"libdevice.{fn}({{0}}{', {1}' * (fn in _TWO_ARGUMENTS)})"
        return _FLOATS.get(fn)
    return (_UNSIGNED.get(fn) if dtype is DType.U8 else None) or _INTEGERS.get(fn)


_TWO_ARGUMENTS = frozenset(("pow", "atan2", "hypot", "nextafter", "copysign", "fmod"))


def constant(value: Number, dtype: DType) -> str:
    """A literal, rounded to the compute type; Triton gives it the type of what it meets."""
    if dtype is DType.BOOL:
        return "True" if value else "False"
    if not dtype.is_float:
        return str(int(value))
    x = float(value)
    if dtype.compute is DType.F32:
        x = _single(x)
    return repr(x) if math.isfinite(x) else f'float("{x}")'


def _single(x: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def is_literal(text: str) -> bool:
    return _LITERAL.fullmatch(text) is not None


def typed(text: str, dtype: DType) -> str:
    """A value of a type, where its text is a literal: what Triton infers from that alone is its
    own choice (and a negative zero loses its sign)."""
    if not is_literal(text):
        return text
    if text == "-0.0":
        return f"(tl.full((), 0.0, {TYPES[dtype.compute]}) * -1.0)"
    return f"tl.full((), {text}, {TYPES[dtype.compute]})"


def call(
    fn: str,
    args: Sequence[str],
    dtype: DType = DType.F32,
    operand: DType | None = None,
    coarse: bool = False,
) -> str:
    """One scalar function of block values (names, literals or bracketed texts).

    dtype: of the result; operand: of the arguments (of the last one of `where`), `dtype` unless
    given; coarse: float32 results only go on to a half type
    """
    own = dtype if operand is None else operand
    # Triton 3.6 compares a float64 with a float32 literal
    wide = own is DType.F64 and fn in _COMPARISONS
    args = [typed(a, own) if a == "-0.0" or wide else a for a in args]
    if fn == "where":
        if args[0] in ("True", "False"):
            return typed(args[1 if args[0] == "True" else 2], dtype)
        return f"tl.where({args[0]}, {typed(args[1], dtype)}, {typed(args[2], dtype)})"
    if fn.startswith("cast_"):
        return _cast(BY_LABEL[fn.removeprefix("cast_")], typed(args[0], own), own)
    if fn in _TRUTH or fn == "logical_not":
        return _truth(fn, [typed(a, own) for a in args], own)
    if fn in _INFIX:
        sign = _OF_BOOLS.get(fn, _INFIX[fn]) if own is DType.BOOL else _INFIX[fn]
        return f"{_left(args, own)} {sign} {args[1]}"
    if fn == "sign":
        x, kind = typed(args[0], own), TYPES[own.compute]
        return f"({x} > 0).to({kind}) - ({x} < 0).to({kind})"
    if fn == "div" and (inverse := _inverse(args[1], own)) is not None:
        return f"{_left(args, own)} * {inverse}"
    form = _spelled(fn, own, coarse)
    if form is None:
        raise KeyError(f"no Triton spelling of {fn} of {own.label} values")
    return form.format(*(typed(a, own) for a in args))


def _left(args: Sequence[str], own: DType) -> str:
    """The left operand; one of the two has a type of its own."""
    return typed(args[0], own) if all(map(is_literal, args)) else args[0]


def _inverse(text: str, dtype: DType) -> str | None:
    """The literal that multiplies in place of a division by one, as in ATen's CUDA kernels."""
    if not is_literal(text) or not dtype.is_float:
        return None
    c = float(text.removeprefix('float("').removesuffix('")'))
    tiny, huge = (2.0**-126, 2.0**126) if dtype.compute is DType.F32 else (2.0**-1022, 2.0**1022)
    return constant(1 / c, dtype) if tiny <= abs(c) <= huge else None


def _truth(fn: str, args: list[str], own: DType) -> str:
    if fn == "logical_not":
        return f"{args[0]} == 0" if own is not DType.BOOL else f"~{args[0]}"
    if own is DType.BOOL:
        return f"{args[0]} {_TRUTH[fn]} {args[1]}"
    return f"({args[0]} != 0) {_TRUTH[fn]} ({args[1]} != 0)"


def _cast(target: DType, x: str, own: DType) -> str:
    """Half types round; floats become integers of 32 or 64 bits first, which then wrap."""
    if target is DType.BOOL:
        return x if own is DType.BOOL else f"{x} != 0"
    if target.compute is not target:  # a half type: through float32, as in ATen
        wide = x if own.compute is DType.F32 else f"{x}.to(tl.float32)"
        return f"{wide}.to({TYPES[target]}).to(tl.float32)"
    if own.is_float and target.is_int and target.size < 4:
        x = f"{x}.to(tl.int32)"
    return f"{x}.to({TYPES[target]})"


# ---- monoids -----------------------------------------------------------------------------------

IDENTITY: dict[str, Number] = {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}
_COMBINE = {
    "prod": "multiply", "max": "maximum", "min": "minimum", "any": "either", "all": "both",
    "argmax": "first_largest", "argmin": "first_smallest",
}  # fmt: skip


def identity(monoid: str, dtype: DType) -> str:
    """The neutral element, as a literal; of argmax and argmin: of their values."""
    match monoid:
        case "sum" | "prod":
            return constant(int(monoid == "prod"), dtype)
        case "any" | "all":
            return constant(monoid == "all", DType.BOOL)
    low = monoid in ("max", "argmax")
    if dtype.is_float:
        return constant(-math.inf if low else math.inf, dtype)
    if dtype is DType.BOOL:
        return constant(not low, dtype)
    bits = 8 * dtype.size
    ends = (0, 2**bits - 1) if dtype is DType.U8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return str(ends[0] if low else ends[1])


def fold_axis(monoid: str, value: str, position: int, dtype: DType = DType.F32) -> str:
    """The monoid over one dimension of a block; of argmax and argmin `value` is "values,
    positions", and the result is such a pair."""
    if monoid in ("argmax", "argmin"):
        return f"tl.reduce(({value}), {position}, {_COMBINE[monoid]})"
    if monoid == "sum" and dtype is not DType.BOOL:
        return f"tl.sum({value}, axis={position})" + f".to({TYPES[dtype]})" * (dtype.size < 4)
    return f"tl.reduce({value}, {position}, {_combining(monoid, dtype)})"


def combine(monoid: str, a: str, b: str, dtype: DType = DType.F32) -> str:
    """One folding step of two blocks (argmax, argmin: of two "values, positions")."""
    if monoid == "sum" and dtype is not DType.BOOL:
        return f"{a} + {b}"
    return f"{_combining(monoid, dtype)}({a}, {b})"


def _combining(monoid: str, dtype: DType) -> str:
    if dtype is DType.BOOL and monoid in ("sum", "max"):
        return "either"
    if dtype is DType.BOOL and monoid in ("prod", "min"):
        return "both"
    return _COMBINE[monoid]


# ---- what a generated file holds besides its kernels ------------------------------------------


@cache
def _library() -> dict[str, str]:
    """The functions of functions.py: their texts, in order."""
    text = Path(__file__).with_name("functions.py").read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = node.decorator_list[0].lineno - 1
            found[node.name] = "\n".join(lines[first : node.end_lineno])
    return found


def prelude(body: str) -> list[str]:
    """Parts of a generated file that its text calls for: the imports, then functions."""
    library = _library()
    needed: set[str] = set()
    texts = [body]
    while texts:
        text = texts.pop()
        words = set(re.findall(r"(?<![.\w])[a-z]\w*(?=[(),])", text))
        texts += [library[n] for n in library.keys() & words - needed]
        needed |= library.keys() & words
    functions = [text for name, text in library.items() if name in needed]
    imports = "import triton\nimport triton.language as tl"
    if any("libdevice." in text for text in (body, *functions)):
        imports += "\nfrom triton.language.extra import libdevice"
    return [imports, *functions]
