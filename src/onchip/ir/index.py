"""Index algebra: bounds and normal forms of int64 index expressions.

A normal form is a sum of coefficient x atom plus a constant, where an atom is an axis or an
irreducible sub-expression (floordiv, mod, a load). Reshapes become floordiv/mod chains, which
`simplify` removes again wherever the bounds allow.
"""

from __future__ import annotations

from dataclasses import dataclass

from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Var,
    children,
    index_arithmetic,
    mentioned,
)

Interval = tuple[int, int]
Env = dict[Axis, Interval]

UNKNOWN: Interval = (-(2**62), 2**62)


def bounds(e: Expr, env: Env | None = None) -> Interval:
    """Smallest and largest value of an index when each axis spans env[axis] (inclusive; default
    its whole extent). Data-dependent parts are unbounded."""
    env = env or {}
    match e:
        case Axis():
            return env.get(e, (0, e.extent - 1))
        case Const(value=v):
            return (int(v), int(v))
        case Call(fn="add", args=(a, b)):
            (p, q), (r, s) = bounds(a, env), bounds(b, env)
            return (p + r, q + s)
        case Call(fn="sub", args=(a, b)):
            (p, q), (r, s) = bounds(a, env), bounds(b, env)
            return (p - s, q - r)
        case Call(fn="mul", args=(a, b)):
            (p, q), (r, s) = bounds(a, env), bounds(b, env)
            corners = (p * r, p * s, q * r, q * s)
            return (min(corners), max(corners))
        case Call(fn="floordiv", args=(a, Const(value=c))) if c > 0:
            p, q = bounds(a, env)
            return (p // int(c), q // int(c))
        case Call(fn="mod", args=(a, Const(value=c))) if c > 0:
            p, q = bounds(a, env)
            c = int(c)
            return (p % c, q % c) if p // c == q // c else (0, c - 1)
        case Call(fn="neg", args=(a,)):
            p, q = bounds(a, env)
            return (-q, -p)
        case Call(fn="abs", args=(a,)):
            p, q = bounds(a, env)
            return (max(p, -q, 0), max(abs(p), abs(q)))
        case Call(fn="maximum", args=(a, b)):
            (p, q), (r, s) = bounds(a, env), bounds(b, env)
            return (max(p, r), max(q, s))
        case Call(fn="minimum", args=(a, b)):
            (p, q), (r, s) = bounds(a, env), bounds(b, env)
            return (min(p, r), min(q, s))
        case Call(fn="where", args=(_, a, b)):
            (p, q), (r, s) = bounds(a, env), bounds(b, env)
            return (min(p, r), max(q, s))
    return UNKNOWN


@dataclass(frozen=True)
class Linear:
    """sum(coefficient * atom) + constant."""

    terms: tuple[tuple[Expr, int], ...]
    constant: int

    def coefficient(self, atom: Expr) -> int:
        return next((c for a, c in self.terms if a is atom), 0)


def linear(e: Expr) -> Linear:
    """Normal form of an index. Structurally equal floordiv/mod atoms are merged."""
    terms: dict[object, tuple[Expr, int]] = {}
    constant = 0

    def collect(x: Expr, k: int) -> None:
        nonlocal constant
        match x:
            case Const(value=v):
                constant += k * int(v)
            case Call(fn="add", args=(a, b)):
                collect(a, k)
                collect(b, k)
            case Call(fn="sub", args=(a, b)):
                collect(a, k)
                collect(b, -k)
            case Call(fn="neg", args=(a,)):
                collect(a, -k)
            case (
                Call(fn="mul", args=(a, Const(value=v))) | Call(fn="mul", args=(Const(value=v), a))
            ):
                collect(a, k * int(v))
            case _:
                key = structural_key(x)
                atom, old = terms.get(key, (x, 0))
                terms[key] = (atom, old + k)

    collect(e, 1)
    return Linear(tuple((a, c) for a, c in terms.values() if c), constant)


def structural_key(e: Expr) -> object:
    """Hashable key, equal for structurally equal expressions over the same axes and tensors."""
    match e:
        case Axis() | Var():
            return e
        case Const(value=v, dtype=d):
            return ("const", repr(v), d)
        case Call(fn=fn, args=args, dtype=d):
            return (fn, d, *(structural_key(a) for a in args))
        case Load(src=src, index=index, pad=pad):
            return ("load", id(src), repr(pad), *(structural_key(i) for i in index))
    return ("object", id(e))


def from_linear(form: Linear) -> Expr:
    out: Expr | None = None
    for atom, c in form.terms:
        term = index_arithmetic("mul", atom, Const(c, DType.I64))
        out = term if out is None else index_arithmetic("add", out, term)
    const = Const(form.constant, DType.I64)
    return const if out is None else index_arithmetic("add", out, const)


def simplify(e: Expr, env: Env | None = None) -> Expr:
    """An equal, simpler index: floordiv and mod are resolved where divisibility or bounds allow."""
    if e.dtype is not DType.I64:
        return e
    match e:
        case Call(fn="floordiv" | "mod" as fn, args=(a, Const(value=c))) if c > 0:
            return _divide(fn, simplify(a, env), int(c), env)
        case Call(fn="add" | "sub" | "mul" as fn, args=(a, b)):
            whole = index_arithmetic(fn, simplify(a, env), simplify(b, env))
            return from_linear(_recombine(linear(whole), env))
        case Call(fn=fn, args=args, dtype=d):
            return Call(fn, tuple(simplify(a, env) for a in args), d)
    return e


def _divide(fn: str, a: Expr, c: int, env: Env | None) -> Expr:
    """a // c or a % c for a constant c > 0: multiples of c leave, the rest may be in bounds."""
    form = linear(a)
    out = [(t, k) for t, k in form.terms if k % c == 0]
    rest = [(t, k) for t, k in form.terms if k % c]
    rest_expr = from_linear(Linear(tuple(rest), form.constant % c))
    lo, hi = bounds(rest_expr, env)
    q = Linear(tuple((t, k // c) for t, k in out), form.constant // c)
    if lo // c == hi // c and lo > UNKNOWN[0] and hi < UNKNOWN[1]:
        shift = lo // c
        if fn == "floordiv":
            return from_linear(Linear(q.terms, q.constant + shift))
        return from_linear(Linear(tuple(rest), form.constant % c - shift * c))
    # (x // m) // c == x // (m * c); (x % m) % c == x % c when c divides m
    match fn, rest_expr:
        case "floordiv", Call(fn="floordiv", args=(x, Const(value=m))) if not out:
            return _divide("floordiv", x, int(m) * c, env)
        case "mod", Call(fn="mod", args=(x, Const(value=m))) if int(m) % c == 0:
            return _divide("mod", x, c, env)
        case "floordiv", Call(fn="mod", args=(x, Const(value=m))) if not out and int(m) % c == 0:
            return _divide("mod", _divide("floordiv", x, c, env), int(m) // c, env)
    common = _common_factor(rest, form.constant % c, c)
    if common > 1:
        inner = Linear(tuple((t, k // common) for t, k in rest), (form.constant % c) // common)
        sub = _divide(fn, from_linear(inner), c // common, env)
        if fn == "floordiv":
            return index_arithmetic("add", from_linear(q), sub)
        return index_arithmetic("mul", sub, Const(common, DType.I64))
    apart = _apart(rest, form.constant % c, c, env)
    if apart is not None:
        g, high, low = apart
        sub = _divide(fn, high, c // g, env)
        if fn == "floordiv":
            return index_arithmetic("add", from_linear(q), sub)
        sub = index_arithmetic("mul", sub, Const(g, DType.I64))
        return index_arithmetic("add", sub, low)
    divided = index_arithmetic(fn, rest_expr, Const(c, DType.I64))
    return divided if fn == "mod" else index_arithmetic("add", from_linear(q), divided)


def _common_factor(rest: list[tuple[Expr, int]], constant: int, c: int) -> int:
    """g > 1 that divides c and every coefficient; the constant then only needs flooring, which is
    exact for floordiv when 0 <= constant % g (nested floor) but for mod only if g divides it."""
    from math import gcd

    g = c
    for _, k in rest:
        g = gcd(g, k)
    return g if constant % g == 0 and g < c else 1


def _apart(
    rest: list[tuple[Expr, int]], constant: int, c: int, env: Env | None
) -> tuple[int, Expr, Expr] | None:
    """g, a and b of g * a + b with 0 <= b < g, where g divides c: then (g * a + b) // c is
    a // (c / g), and the remainder is g * (a % (c / g)) + b."""
    from math import gcd

    for g in sorted({gcd(c, k) for _, k in rest}, reverse=True):
        low = [(t, k) for t, k in rest if k % g]
        if g == 1 or not low:
            continue
        b = from_linear(Linear(tuple(low), constant % g))
        lo, hi = bounds(b, env)
        if lo >= 0 and hi < g:
            high = tuple((t, k // g) for t, k in rest if k % g == 0)
            return g, from_linear(Linear(high, constant // g)), b
    return None


def _same_quotient(x: Expr, c: int, y: Expr, d: int, env: Env | None) -> bool:
    """x // c is y // d: (y // e) // c, where d is e * c."""
    if d % c:
        return False
    inner = y if d == c else _divide("floordiv", y, d // c, env)
    return structural_key(x) == structural_key(inner)


def _recombine(form: Linear, env: Env | None) -> Linear:
    """(x // c) * (c * k) + (x % c) * k  ->  x * k."""
    terms = list(form.terms)
    for i, (atom, k) in enumerate(terms):
        match atom:
            case Call(fn="mod", args=(x, Const(value=c))):
                for j, (other, m) in enumerate(terms):
                    match other:
                        case Call(fn="floordiv", args=(y, Const(value=d))) if m == k * int(
                            c
                        ) and _same_quotient(x, int(c), y, int(d), env):
                            keep = [t for n, t in enumerate(terms) if n not in (i, j)]
                            whole = index_arithmetic("mul", x, Const(k, DType.I64))
                            merged = linear(
                                index_arithmetic(
                                    "add", from_linear(Linear(tuple(keep), form.constant)), whole
                                )
                            )
                            return _recombine(merged, env)
    return form


# ---- strides ----------------------------------------------------------------------------------


def stride_along(index: tuple[Expr, ...], strides: tuple[int, ...], v: Axis) -> int | None:
    """Elements between neighbours along an axis; None if that is not a constant."""
    total = 0
    for i, s in zip(index, strides, strict=True):
        form = linear(i)
        for atom, c in form.terms:
            if atom is v:
                total += c * s
            elif not isinstance(atom, Axis) and v in mentioned(atom):
                return _stride_of_merged(index, strides, v)
    return total


def _stride_of_merged(index: tuple[Expr, ...], strides: tuple[int, ...], v: Axis) -> int | None:
    """The same for an axis that is several merged into one: x // w and x % w in two dimensions
    may be x again in memory."""
    total: Expr = Const(0, DType.I64)
    for i, s in zip(index, strides, strict=True):
        total = index_arithmetic("add", total, i * s)
    form = linear(simplify(total))
    if any(not isinstance(atom, Axis) and v in mentioned(atom) for atom, _ in form.terms):
        return None
    return form.coefficient(v)


def is_affine(e: Expr) -> bool:
    """Whether an index is a sum of axes with constant factors, and a constant."""
    return all(isinstance(atom, Axis) for atom, _ in linear(e).terms)


def used_as_value(e: Expr, axes: tuple[Axis, ...]) -> bool:
    """An axis counts as a number, not only in addresses (an arange, a condition on a bound)."""
    stack, seen = [e], set()
    while stack:
        x = stack.pop()
        if x in axes:
            return True
        if x not in seen and not isinstance(x, Load):
            seen.add(x)
            stack.extend(children(x))
    return False
