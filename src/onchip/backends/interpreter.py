"""The oracle: evaluates tensors with numpy, each expression over exactly the axes it mentions.

A value is a Tile: an array with one dimension per free axis. Scopes nest where a reduction or a
stream binds an axis; a subexpression is evaluated once, in the outermost scope that binds every
axis and variable it reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from onchip.backends.scalar_numpy import STORAGE, apply, numpy_dtype, store
from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Stream,
    Tensor,
    Var,
    children,
    walk,
)
from onchip.ir.graph import defined_by, reads

# A reduction whose body would be larger is folded in halves of its axes.
ELEMENT_LIMIT = 2**25


@dataclass(frozen=True, slots=True)
class Tile:
    """`data` has one dimension per axis, in the order of `axes`."""

    axes: tuple[Axis, ...]
    data: np.ndarray

    def onto(self, axes: tuple[Axis, ...]) -> np.ndarray:
        """The data with one dimension per axis of `axes` (a superset), 1 where absent."""
        have = [a for a in axes if a in self.axes]
        x = np.transpose(self.data, [self.axes.index(a) for a in have])
        sizes = dict(zip(have, x.shape, strict=True))
        return x.reshape([sizes.get(a, 1) for a in axes])


def _union(tiles: Sequence[Tile]) -> tuple[Axis, ...]:
    return tuple(dict.fromkeys(a for t in tiles for a in t.axes))


@dataclass(slots=True)
class Scope:
    """Axes bound to the range they cover here, variables to tiles, and values known here."""

    ranges: dict[Axis, range] = field(default_factory=dict)
    variables: dict[Var, Tile] = field(default_factory=dict)
    parent: Scope | None = None
    memo: dict[Expr, Tile] = field(default_factory=dict)

    def range_of(self, a: Axis) -> range | None:
        if a in self.ranges:
            return self.ranges[a]
        return self.parent.range_of(a) if self.parent else None

    def variable(self, v: Var) -> Tile:
        if v in self.variables:
            return self.variables[v]
        assert self.parent is not None, f"variable {v.name} read outside its stream"
        return self.parent.variable(v)


def evaluate(
    outputs: Sequence[Tensor],
    values: dict[Tensor, np.ndarray],
    exact: bool = False,
    block: int = 64,
) -> list[np.ndarray]:
    """The values of `outputs`, given those of the tensors they are computed from.

    Floats are computed in each tensor's compute type and rounded to its storage type at the store
    (float64 without any rounding if `exact`). bfloat16 values are float32 arrays that are already
    rounded. `block` is the number of elements a stream takes at once. Raises KeyError for a given
    tensor without a value, IndexError for an index outside a tensor that is read without padding,
    ZeroDivisionError for an integer divided by zero.
    """
    known = {t: _input(t, v, exact) for t, v in values.items()}
    with np.errstate(all="ignore"):
        for t in defined_by(outputs, values):
            for source in reads(t):
                _require(source, known, t)
            known[t] = TensorEvaluation(t, known, exact, block).run()
    for t in outputs:
        _require(t, known, t)
    return [known[t] for t in outputs]


def _require(source: Tensor, known: dict[Tensor, np.ndarray], reader: Tensor) -> None:
    if source not in known:
        raise KeyError(f"{source} has no value; it is needed for {reader}: pass it in `values`")


def _input(t: Tensor, value: np.ndarray, exact: bool) -> np.ndarray:
    x = np.asarray(value)
    if x.shape != t.shape:
        raise ValueError(f"{t} was given a value of shape {list(x.shape)}")
    if t.dtype.is_float:
        return x.astype(np.float64) if exact else x.astype(STORAGE[t.dtype])
    return x.astype(STORAGE[t.dtype])


class TensorEvaluation:
    """Evaluates the body of one tensor; `run` gives its stored value."""

    def __init__(self, t: Tensor, known: dict[Tensor, np.ndarray], exact: bool, block: int) -> None:
        self.tensor, self.known, self.exact, self.block = t, known, exact, block
        self.free: dict[Expr, frozenset[Axis | Var]] = {}
        assert t.body is not None
        self.stream_axes = {e.axis for e in walk(t.body) if isinstance(e, Stream)}

    def run(self) -> np.ndarray:
        t = self.tensor
        assert t.body is not None
        if t.numel == 0:
            return np.empty(t.shape, np.float64 if self._wide(t) else STORAGE[t.dtype])
        scope = Scope({a: range(a.extent) for a in t.axes})
        data = self.value(t.body, scope).onto(t.axes)
        return store(np.array(np.broadcast_to(data, t.shape), order="C"), t.dtype, self.exact)

    def _wide(self, t: Tensor) -> bool:
        return self.exact and t.dtype.is_float

    def value(self, e: Expr, scope: Scope) -> Tile:
        needs = self._free(e)
        while scope.parent and not any(x in scope.ranges or x in scope.variables for x in needs):
            scope = scope.parent
        if e not in scope.memo:
            scope.memo[e] = self._compute(e, scope)
        return scope.memo[e]

    def _free(self, e: Expr) -> frozenset[Axis | Var]:
        """Axes and variables that `e` needs from outside."""
        if e in self.free:
            return self.free[e]
        match e:
            case Axis() | Var():
                out: frozenset[Axis | Var] = frozenset((e,))
            case Reduce(axes=axes, body=body):
                # over the axis of an enclosing stream, a reduction covers the current block only
                out = self._free(body) - (set(axes) - self.stream_axes)
                out |= self.stream_axes & set(axes)
            case Stream(axis=axis, state=state, init=init):
                inner = frozenset().union(*(self._free(x) for x in (*e.step, e.finish)))
                outer = frozenset().union(*(self._free(x) for x in init))
                out = outer | (inner - {axis, *state})
            case _:
                out = frozenset().union(*(self._free(x) for x in children(e)))
        self.free[e] = out
        return out

    def _compute(self, e: Expr, scope: Scope) -> Tile:
        match e:
            case Axis():
                span = scope.range_of(e)
                assert span is not None, f"axis {e} of {self.tensor} is not bound"
                return Tile((e,), np.arange(span.start, span.stop, dtype=np.int64))
            case Const(value=v, dtype=d):
                return Tile((), np.asarray(v, dtype=numpy_dtype(d, self.exact)))
            case Var():
                return scope.variable(e)
            case Call(fn=fn, args=args, dtype=d):
                tiles = [self.value(a, scope) for a in args]
                axes = _union(tiles)
                return Tile(axes, apply(fn, [t.onto(axes) for t in tiles], d, self.exact))
            case Load():
                return self._load(e, scope)
            case Reduce(axes=axes):
                # an axis that is bound already is a stream's: its block is what is reduced
                ranges = {a: scope.range_of(a) or range(a.extent) for a in axes}
                return self._reduce(e, ranges, scope)
            case Stream():
                return self._stream(e, scope)
        raise TypeError(f"{type(e).__name__} is not an expression")

    # ---- loads ---------------------------------------------------------------------------------

    def _load(self, e: Load, scope: Scope) -> Tile:
        source = self.known[e.src]
        compute = numpy_dtype(e.src.dtype, self.exact)
        window = self._window(e, scope)
        if window is not None:
            return Tile(window[0], source[window[1]].astype(compute, copy=False))
        tiles = [self.value(i, scope) for i in e.index]
        axes = _union(tiles)
        index = [t.onto(axes) for t in tiles]
        inside = [(i >= 0) & (i < n) for i, n in zip(index, source.shape, strict=True)]
        if e.pad is None:
            self._check_inside(e, index, inside)
            return Tile(axes, np.asarray(source[tuple(index)]).astype(compute, copy=False))
        ok = inside[0] if inside else np.asarray(True)
        for more in inside[1:]:
            ok = ok & more
        pad = np.asarray(e.pad, dtype=compute)
        if source.size == 0:
            return Tile(axes, np.broadcast_to(pad, ok.shape))
        clipped = tuple(np.clip(i, 0, n - 1) for i, n in zip(index, source.shape, strict=True))
        return Tile(axes, np.where(ok, source[clipped].astype(compute, copy=False), pad))

    def _check_inside(self, e: Load, index: list[np.ndarray], inside: list[np.ndarray]) -> None:
        for dim, (i, ok) in enumerate(zip(index, inside, strict=True)):
            if not ok.all():
                bad = int(np.asarray(i)[~ok].reshape(-1)[0])
                raise IndexError(
                    f"{self.tensor} reads {e.src} at {bad} in dimension {dim}, "
                    f"whose size is {e.src.shape[dim]}"
                )

    def _window(
        self, e: Load, scope: Scope
    ) -> tuple[tuple[Axis, ...], tuple[slice | int, ...]] | None:
        """Axes and slices of a load whose indices are distinct axes and constants in bounds."""
        axes: list[Axis] = []
        slices: list[slice | int] = []
        for i, n in zip(e.index, e.src.shape, strict=True):
            match i:
                case Axis():
                    span = scope.range_of(i)
                    if span is None or i in axes or (len(span) and span.stop > n):
                        return None
                    axes.append(i)
                    slices.append(slice(span.start, span.stop))
                case Const(value=v) if 0 <= int(v) < n:
                    slices.append(int(v))
                case _:
                    return None
        return tuple(axes), tuple(slices)

    # ---- reductions ----------------------------------------------------------------------------

    def _reduce(self, e: Reduce, ranges: dict[Axis, range], scope: Scope) -> Tile:
        if not ranges:
            return self.value(e.body, scope)
        if any(len(r) == 0 for r in ranges.values()):
            if e.monoid in ("argmax", "argmin"):
                raise ValueError(f"{e.monoid} over an empty axis in {self.tensor}")
            return Tile((), identity(e.monoid, e.body.dtype, self.exact))
        inner = Scope({a: r for a, r in ranges.items()}, parent=scope)
        if e.monoid == "sum":
            product = self._contract(e, inner)
            if product is not None:
                return product
        longest = max(ranges, key=lambda a: len(ranges[a]))
        if self._size(e.body, inner) > ELEMENT_LIMIT and len(ranges[longest]) > 1:
            return self._halves(e, ranges, longest, scope)
        tile = self.value(e.body, inner)
        keep = tuple(a for a in tile.axes if a not in ranges)
        order = (*keep, *ranges)
        shape = [len(inner.range_of(a) or ()) for a in order]
        full = np.broadcast_to(tile.onto(order), shape)
        over = tuple(range(len(keep), len(order)))
        return Tile(keep, _fold(e.monoid, full, over))

    def _size(self, e: Expr, scope: Scope) -> int:
        axes = [a for a in self._free(e) if isinstance(a, Axis)]
        return math.prod(len(scope.range_of(a) or ()) for a in axes)

    def _halves(self, e: Reduce, ranges: dict[Axis, range], a: Axis, scope: Scope) -> Tile:
        """Both halves of one reduction axis, folded apart and combined."""
        r = ranges[a]
        middle = (r.start + r.stop) // 2
        if e.monoid in ("argmax", "argmin"):
            raise MemoryError(f"{e.monoid} over more than {ELEMENT_LIMIT} elements")
        parts = [
            self._reduce(e, ranges | {a: part}, scope)
            for part in (range(r.start, middle), range(middle, r.stop))
        ]
        axes = _union(parts)
        fn = _COMBINE[e.monoid]
        return Tile(axes, np.asarray(fn(*(p.onto(axes) for p in parts))))

    def _contract(self, e: Reduce, scope: Scope) -> Tile | None:
        """sum(a * b) with axes of its own on both sides: a matrix product."""
        match e.body:
            case Call(fn="mul", args=(x, y)) if x.dtype is y.dtype and x.dtype is not DType.BOOL:
                own_x, own_y = self._free(x) - self._free(y), self._free(y) - self._free(x)
            case _:
                return None
        if not own_x - set(e.axes) or not own_y - set(e.axes):
            return None
        if max(self._size(x, scope), self._size(y, scope)) > ELEMENT_LIMIT:
            return None
        a, b = self.value(x, scope), self.value(y, scope)
        every = _union((a, b))
        if any(r not in every for r in e.axes):
            return None
        number = {axis: k for k, axis in enumerate(every)}
        keep = tuple(axis for axis in every if axis not in e.axes)
        data = np.einsum(
            a.data, [number[i] for i in a.axes], b.data, [number[i] for i in b.axes],
            [number[i] for i in keep], optimize=True,
        )  # fmt: skip
        return Tile(keep, data.astype(numpy_dtype(e.dtype, self.exact), copy=False))

    # ---- streams -------------------------------------------------------------------------------

    def _stream(self, e: Stream, scope: Scope) -> Tile:
        state = {v: self.value(x, scope) for v, x in zip(e.state, e.init, strict=True)}
        for low in range(0, e.axis.extent, self.block):
            span = range(low, min(low + self.block, e.axis.extent))
            inner = Scope({e.axis: span}, state, scope)
            state = {v: self.value(x, inner) for v, x in zip(e.state, e.step, strict=True)}
        return self.value(e.finish, Scope({}, state, scope))


_COMBINE = {
    "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum,
    "any": np.logical_or, "all": np.logical_and,
}  # fmt: skip


def identity(monoid: str, dtype: DType, exact: bool = False) -> np.ndarray:
    """What a fold over nothing gives: 0, 1, the type's extreme, False, True."""
    kind = numpy_dtype(dtype, exact)
    lowest, highest = (-math.inf, math.inf)
    if kind.kind in "iu":
        lowest, highest = np.iinfo(kind).min, np.iinfo(kind).max
    elif kind.kind == "b":
        lowest, highest = False, True
    value = {
        "sum": 0, "prod": 1, "max": lowest, "min": highest, "any": False, "all": True,
    }[monoid]  # fmt: skip
    return np.asarray(value, dtype=kind)


def _fold(monoid: str, x: np.ndarray, over: tuple[int, ...]) -> np.ndarray:
    match monoid:
        case "sum":
            return np.asarray(np.sum(x, axis=over, dtype=x.dtype))
        case "prod":
            return np.asarray(np.prod(x, axis=over, dtype=x.dtype))
        case "max":
            return np.asarray(np.max(x, axis=over))
        case "min":
            return np.asarray(np.min(x, axis=over))
        case "any":
            return np.asarray(np.any(x, axis=over))
        case "all":
            return np.asarray(np.all(x, axis=over))
        case "argmax" | "argmin":
            assert len(over) == 1, f"{monoid} folds one axis"
            fn = np.argmax if monoid == "argmax" else np.argmin
            return np.asarray(fn(x, axis=over[0]), dtype=np.int64)
    raise ValueError(f"{monoid!r} is not a monoid of ir/expr.py")
