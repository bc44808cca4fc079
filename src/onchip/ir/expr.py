"""What one element of a tensor is: the whole representation on one page.

    Expr = Axis(name, extent)                     a loop variable, 0 <= axis < extent
         | Const(value, dtype)
         | Load(src, index, pad)                  an element of a tensor; `pad`: outside of it
         | Call(fn, args, dtype)                  a scalar function of ir/functions.py
         | Reduce(monoid, axes, body)             a monoid folded over axes
         | Var(name, dtype)                       a stream's state
         | Stream(axis, state, init, step, finish)   state carried over one axis, block by block

    Tensor = (name, shape, dtype, axes, body)     body None: given from outside (input, opaque)

Evaluation rule: an expression is evaluated over exactly the axes it mentions, once per binding.
Hoisting, broadcasting and sharing follow from it. Arithmetic happens in the compute type (half
precision is widened by Load, rounded by the store or by an explicit cast).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from onchip.ir.dtype import DType, promote, scalar_dtype

Number = int | float | bool

_counter = itertools.count()


class Expr:
    """Base of the node kinds; carries the arithmetic operators, nothing else."""

    __slots__ = ()
    dtype: DType

    def __add__(self, other: Operand) -> Expr:
        return arithmetic("add", self, other)

    def __radd__(self, other: Operand) -> Expr:
        return arithmetic("add", lift(other, self.dtype), self)

    def __sub__(self, other: Operand) -> Expr:
        return arithmetic("sub", self, other)

    def __rsub__(self, other: Operand) -> Expr:
        return arithmetic("sub", lift(other, self.dtype), self)

    def __mul__(self, other: Operand) -> Expr:
        return arithmetic("mul", self, other)

    def __rmul__(self, other: Operand) -> Expr:
        return arithmetic("mul", lift(other, self.dtype), self)

    def __truediv__(self, other: Operand) -> Expr:
        return arithmetic("div", self, other)

    def __rtruediv__(self, other: Operand) -> Expr:
        return arithmetic("div", lift(other, self.dtype), self)

    def __floordiv__(self, other: Operand) -> Expr:
        return arithmetic("floordiv", self, other)

    def __mod__(self, other: Operand) -> Expr:
        return arithmetic("mod", self, other)

    def __neg__(self) -> Expr:
        return Call("neg", (self,), self.dtype)


Operand = Expr | int | float | bool


@dataclass(frozen=True, eq=False, slots=True)
class Axis(Expr):
    name: str
    extent: int
    dtype: DType = DType.I64

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, slots=True)
class Const(Expr):
    value: Number
    dtype: DType


@dataclass(frozen=True, eq=False, slots=True)
class Load(Expr):
    src: Tensor
    index: tuple[Expr, ...]
    pad: Number | None = None

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.src.dtype.compute


@dataclass(frozen=True, eq=False, slots=True)
class Call(Expr):
    fn: str
    args: tuple[Expr, ...]
    dtype: DType
    label: str = ""  # the operator whose result it is, for names in generated code


@dataclass(frozen=True, eq=False, slots=True)
class Reduce(Expr):
    """`monoid` is one of MONOIDS. argmax/argmin fold `body` and give the position (int64, one
    axis; the first NaN, else the first extreme, wins as in ATen)."""

    monoid: str
    axes: tuple[Axis, ...]
    body: Expr

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return DType.I64 if self.monoid in ("argmax", "argmin") else self.body.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Var(Expr):
    name: str
    dtype: DType


@dataclass(frozen=True, eq=False, slots=True)
class Stream(Expr):
    """State carried over `axis` in blocks: `step[i]` is the next value of `state[i]`, written
    with the states and with reductions over `axis` (which then range over the block)."""

    axis: Axis
    state: tuple[Var, ...]
    init: tuple[Expr, ...]
    step: tuple[Expr, ...]
    finish: Expr

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.finish.dtype


MONOIDS: dict[str, Number | None] = {
    "sum": 0, "prod": 1, "max": None, "min": None, "any": False, "all": True,
    "argmax": None, "argmin": None,
}  # fmt: skip


@dataclass(eq=False, slots=True)
class Tensor:
    """A tensor: its elements' expression over `axes`, or (body None) a value given from outside."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    axes: tuple[Axis, ...] = ()
    body: Expr | None = None
    tag: dict[str, object] = field(default_factory=dict)

    def __getitem__(self, index: object) -> Load:
        return Load(self, _index(index, self))

    def padded(self, value: Number) -> Padded:
        return Padded(self, value)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.size

    def __repr__(self) -> str:
        return f"{self.name}:{self.dtype.label}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Padded:
    """A tensor read with a value outside its bounds: `x.padded(0)[i - 1, j]`."""

    src: Tensor
    value: Number

    def __getitem__(self, index: object) -> Load:
        return Load(self.src, _index(index, self.src), self.value)


def _index(index: object, src: Tensor) -> tuple[Expr, ...]:
    parts = index if isinstance(index, tuple) else (index,)
    assert len(parts) == src.rank, f"{src} indexed with {len(parts)} axes"
    return tuple(lift(p, DType.I64) for p in parts)  # type: ignore[arg-type]


# ---- construction ------------------------------------------------------------------------------


def lift(x: Operand, like: DType | None = None) -> Expr:
    """A Python number as a constant; of `like`'s type unless its category is higher."""
    if isinstance(x, Expr):
        return x
    own = scalar_dtype(x)
    if like is not None and own.category <= like.category:
        own = like
    value: Number = float(x) if own.is_float else (bool(x) if own is DType.BOOL else int(x))
    return Const(value, own.compute)


def arithmetic(fn: str, a: Operand, b: Operand) -> Expr:
    """A binary scalar function; integers that are constants fold (index arithmetic)."""
    if not isinstance(a, Expr):
        a = lift(a, b.dtype if isinstance(b, Expr) else None)
    b = lift(b, a.dtype)
    dtype = promote(a.dtype, b.dtype)
    if dtype is DType.I64:
        return index_arithmetic(fn, a, b)
    return Call(fn, (cast(a, dtype), cast(b, dtype)), dtype)


def index_arithmetic(fn: str, a: Expr, b: Expr) -> Expr:
    """int64 arithmetic with the obvious identities folded, so that indices stay small."""
    match fn, a, b:
        case _, Const(value=x), Const(value=y) if fn != "div" and not (
            y == 0 and fn in ("floordiv", "mod")
        ):
            x, y = int(x), int(y)
            ops = {"add": x + y, "sub": x - y, "mul": x * y}
            value = ops[fn] if fn in ops else (x // y if fn == "floordiv" else x % y)
            return Const(value, DType.I64)
        case "add", _, Const(value=0):
            return a
        case "add", Const(value=0), _:
            return b
        case "sub", _, Const(value=0):
            return a
        case "mul", _, Const(value=1):
            return a
        case "mul", Const(value=1), _:
            return b
        case "mul", _, Const(value=0):
            return b
        case "mul", Const(value=0), _:
            return a
        case "floordiv", _, Const(value=1):
            return a
        case "mod", _, Const(value=1):
            return Const(0, DType.I64)
    return Call(fn, (a, b), DType.I64)


def cast(x: Expr, dtype: DType) -> Expr:
    """Value conversion. A cast to a half type rounds explicitly (and computes on in float32)."""
    if x.dtype is dtype and dtype.compute is dtype:
        return x
    if isinstance(x, Const) and dtype.compute is dtype:
        return lift(_convert(x.value, dtype), dtype)
    return Call(f"cast_{dtype.label}", (x,), dtype.compute)


def _convert(value: Number, dtype: DType) -> Number:
    if dtype.is_float:
        return float(value)
    return bool(value) if dtype is DType.BOOL else int(value)


def call(fn: str, *args: Operand, dtype: DType | None = None) -> Expr:
    """A scalar function; the result has the promoted type of the arguments unless given."""
    first = next((a for a in args if isinstance(a, Expr)), None)
    lifted = [lift(a, first.dtype if first is not None else None) for a in args]
    if dtype is None:
        dtype = lifted[0].dtype
        for a in lifted[1:]:
            dtype = promote(dtype, a.dtype)
        lifted = [cast(a, dtype) for a in lifted]
    return Call(fn, tuple(lifted), dtype)


def where(cond: Expr, a: Operand, b: Operand) -> Expr:
    like = next((x.dtype for x in (a, b) if isinstance(x, Expr)), None)
    x, y = lift(a, like), lift(b, like)
    dtype = promote(x.dtype, y.dtype)
    return Call("where", (cast(cond, DType.BOOL), cast(x, dtype), cast(y, dtype)), dtype)


def axis(extent: int, stem: str = "i") -> Axis:
    return Axis(f"{stem}{next(_counter)}", extent)


def tensor(
    shape: Sequence[int], dtype: DType, fn: Callable[..., Operand], name: str = "t"
) -> Tensor:
    """A tensor whose element at (i, j, ...) is `fn(i, j, ...)`."""
    axes = tuple(axis(n) for n in shape)
    body = cast(lift(fn(*axes), dtype.compute), dtype.compute)
    return Tensor(f"{name}_{next(_counter)}", tuple(shape), dtype, axes, body)


def given(shape: Sequence[int], dtype: DType, name: str = "x") -> Tensor:
    """A tensor whose values come from outside (graph input, parameter, opaque result)."""
    return Tensor(f"{name}_{next(_counter)}", tuple(shape), dtype)


def fold(monoid: str, extents: Sequence[int], fn: Callable[..., Operand]) -> Reduce:
    """`monoid` folded over new axes: fold("max", (3, 3), lambda i, j: x[y + i, z + j])."""
    axes = tuple(axis(n, "r") for n in extents)
    body = lift(fn(*axes))
    return Reduce(monoid, axes, body)


# ---- traversal ---------------------------------------------------------------------------------


def children(e: Expr) -> tuple[Expr, ...]:
    match e:
        case Load():
            return e.index
        case Call():
            return e.args
        case Reduce():
            return (e.body,)
        case Stream():
            return (*e.init, *e.step, e.finish)
    return ()


def walk(e: Expr) -> Iterator[Expr]:
    """Every node once, parents before children (shared nodes are visited once)."""
    seen: set[Expr] = set()
    stack = [e]
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        yield x
        stack.extend(reversed(children(x)))


def loads(e: Expr) -> list[Load]:
    return [x for x in walk(e) if isinstance(x, Load)]


def reduces(e: Expr) -> list[Reduce]:
    return [x for x in walk(e) if isinstance(x, Reduce)]


def mentioned(e: Expr) -> set[Axis]:
    """Axes an expression reads, its own reduction axes included."""
    return {x for x in walk(e) if isinstance(x, Axis)}


def rewrite(
    e: Expr, leaf: Callable[[Expr], Expr | None], memo: dict[Expr, Expr] | None = None
) -> Expr:
    """Rebuild bottom-up. `leaf(node)` is asked first, on the way down: a replacement or None."""
    memo = {} if memo is None else memo
    if e in memo:
        return memo[e]
    new = leaf(e)
    if new is None:
        kids = children(e)
        done = tuple(rewrite(k, leaf, memo) for k in kids)
        new = e if all(a is b for a, b in zip(kids, done, strict=True)) else rebuild(e, done)
    memo[e] = new
    return new


def rebuild(e: Expr, kids: tuple[Expr, ...]) -> Expr:
    match e:
        case Load(src=src, pad=pad):
            return Load(src, kids, pad)
        case Call(fn=fn, dtype=dtype, label=label):
            if dtype is DType.I64 and len(kids) == 2 and fn in _INDEX_FNS:
                return index_arithmetic(fn, *kids)
            return Call(fn, kids, dtype, label)
        case Reduce(monoid=monoid, axes=axes):
            return Reduce(monoid, axes, kids[0])
        case Stream(axis=ax, state=state):
            n = len(state)
            return Stream(ax, state, kids[:n], kids[n : 2 * n], kids[2 * n])
    return e


_INDEX_FNS = frozenset(("add", "sub", "mul", "floordiv", "mod"))


def substitute(e: Expr, mapping: Mapping[Axis, Expr]) -> Expr:
    """Replace axes by expressions."""
    return rewrite(e, lambda x: mapping.get(x) if isinstance(x, Axis) else None)
