"""The text of an epilogue: what the engine calls for its accumulators, in CUDA C++.

    struct Features { ... };        what features and batch alone decide, loaded once a feature
    features(a, batch, feature)
    before(a, acc, c, at)           a position's value, which windows fold
    resultN(a, acc, c, at, tile)    what is stored
    totalN(a, acc, c, at, tile)     what a total folds
    finalN(a, total, at)            what is stored of totals (`finals_text`)
    elementN(at)                    where: elements from the result's first; finals come last

Every value has one name, after the operator whose it is. The text calls include/onchip/scalar.cuh.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onchip.backends.cuda import spelling
from onchip.backends.cuda.form_axes import Strides, address
from onchip.backends.cuda.problem import ACC, Problem, Read, Result
from onchip.fusion.inline import in_bounds
from onchip.fusion.layout import extent
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, Load, Tensor, children, loads, walk
from onchip.ir.index import bounds, from_linear, structural_key

HALVES = (DType.BF16, DType.F16)
INT = 2**31
HEAD = "__device__ __forceinline__"


@dataclass(frozen=True, eq=False, slots=True)
class Epilogue:
    """text: stands behind `Args`, `Place`, scalar.cuh; tile_reads: whose elements `tile` holds."""

    text: str
    tile_reads: tuple[Read, ...]


def epilogue_text(
    problem: Problem, pointer: Callable[[Tensor], str], strides: Mapping[Tensor, Strides],
    tiles: bool = True,
) -> Epilogue:  # fmt: skip
    """The functions of a problem's epilogue. pointer: the member of `Args` that points to a
    tensor's elements (spelling.STORAGE has their type); strides: elements, of all tensors that it
    reads or stores; tiles: whether the caller has the reads of that kind (else they are by address,
    and `tile` is not used). Raises KeyError for a function without a CUDA spelling."""
    p = problem
    copied = tuple(r for r in p.reads if r.kind == "tile" and tiles)
    # errors of coarse functions add up in a total
    coarse = all(r.tensor.dtype in HALVES for r in p.results) and not p.totals
    shared = _Shared(pointer, strides, coarse, {_key(r): n for n, r in enumerate(copied)})
    names = ["before", *(f"result{n}" for n in range(len(p.results)))]
    names += [f"total{n}" for n in range(len(p.totals))]
    values = (p.before, *(r.value for r in p.results), *(t.value for t in p.totals))
    fixed = _Fixed({p.feature_axis, p.batch_axis})
    hoisted = list(dict.fromkeys(e for v in values for e in fixed.parts(v)))
    fields = {e: f"v{n}" for n, e in enumerate(hoisted)}
    once = _Function(shared, {p.feature_axis: "feature", p.batch_axis: "batch"}, {})
    texts = [once.value(e) for e in hoisted]
    members = " ".join(f"{spelling.VALUES[e.dtype]} {fields[e]};" for e in hoisted)
    given = "const Args& a, float acc, const Features& c, const Place& at"
    parts = [
        f"struct Features {{ {members} }};" if members else "struct Features {};",
        _function(
            "Features features(const Args& a, int batch, int feature)", once.lines,
            f"Features{{{', '.join(texts)}}}",
        ),
    ]  # fmt: skip
    for n, (name, v) in enumerate(zip(names, values, strict=True)):
        result = p.results[n - 1] if 0 < n <= len(p.results) else None
        axes = _places(p, result is not None and result.pooled)
        own = _Function(shared, axes, {e: f"c.{name}" for e, name in fields.items()})
        tile = ", const float* tile" * (n > 0)
        text = own.value(v)
        parts.append(_function(f"float {name}({given}{tile})", own.lines, text))
        if result is not None:
            parts.append(_element(n - 1, result, shared, axes))
    return Epilogue("\n\n".join(parts) + "\n", copied)


def finals_text(
    p: Problem, pointer: Callable[[Tensor], str], strides: Mapping[Tensor, Strides]
) -> str:
    """The functions of a problem's finals, as epilogue_text has those of results."""
    shared = _Shared(pointer, strides, False, {})
    totals: dict[Expr, str] = {t.var: f"total[{n}]" for n, t in enumerate(p.totals)}
    parts = []
    for n, r in enumerate(p.finals):
        own = _Function(shared, _places(p, False), totals.copy())
        text = own.value(r.value)
        head = (
            f"float final{n}(const Args& a, const float (&total)[{len(totals)}], const Place& at)"
        )
        parts.append(_function(head, own.lines, text))
        parts.append(_element(len(p.results) + n, r, shared, _places(p, False)))
    return "\n\n".join(parts)


def _places(p: Problem, pooled: bool) -> dict[Axis, str]:
    """What the axes of a value are called."""
    axes = p.cell_axes if pooled else p.position_axes
    names = {p.feature_axis: "at.feature", p.batch_axis: "at.batch"}
    return names | {a: f"at.at[{k}]" for k, a in enumerate(axes)}


def _element(n: int, r: Result, shared: _Shared, names: Mapping[Axis, str]) -> str:
    """Where the n-th result lies."""
    place = _Function(shared, names, {})
    strides = shared.strides[r.tensor]
    where = from_linear(address(r.index, strides))
    text = place.index(where, extent(r.tensor.shape, strides) > INT)
    return _function(f"long long element{n}(const Place& at)", place.lines, text)


def _function(head: str, lines: Sequence[str], result: str) -> str:
    return "\n    ".join([f"{HEAD} {head} {{", *lines, f"return {result};"]) + "\n}"


def _key(r: Read | Load) -> object:
    t = r.tensor if isinstance(r, Read) else r.src
    return structural_key(Load(t, r.index, r.pad))


@dataclass(frozen=True, eq=False, slots=True)
class _Shared:
    """What all functions of one text have in common. tiles: numbers of the reads in tiles."""

    pointer: Callable[[Tensor], str]
    strides: Mapping[Tensor, Strides]
    coarse: bool
    tiles: Mapping[object, int]


class _Fixed:
    """Finds what a few axes decide."""

    def __init__(self, axes: set[Axis]) -> None:
        self.axes = axes
        self.known: dict[Expr, bool] = {}

    def decides(self, e: Expr) -> bool:
        if e not in self.known:
            own = e in self.axes if isinstance(e, Axis) else e is not ACC
            self.known[e] = own and all(map(self.decides, children(e)))
        return self.known[e]

    def parts(self, e: Expr) -> list[Expr]:
        """The largest parts of a value that the axes decide and that read memory."""
        out, stack, seen = [], [e], set()
        while stack:
            x = stack.pop()
            if x in seen:
                continue
            seen.add(x)
            if not self.decides(x):
                stack += reversed(() if isinstance(x, Load) else children(x))
            elif loads(x):
                out.append(x)
        return out


@dataclass(eq=False, slots=True)
class _Function:
    """One function's statements. names: of axes; known: texts of values."""

    shared: _Shared
    names: Mapping[Axis, str]
    known: dict[Expr, str]
    lines: list[str] = field(default_factory=list)
    count: dict[str, int] = field(default_factory=dict)

    def value(self, e: Expr) -> str:
        """The name of a value, or its text where that is as short."""
        if e not in self.known:
            self.known[e] = self._made(e)
        return self.known[e]

    def _made(self, e: Expr) -> str:
        match e:
            case _ if e is ACC:
                return "acc"
            case Const(value=v, dtype=d):
                return spelling.constant(v, d)
            case Load():
                return self._loaded(e)
            case Axis():
                return self.index(e)
            case Call() if e.dtype is DType.I64 and not loads(e):
                return self.index(e)
            case Call(fn=fn, args=args, dtype=d, label=label):
                operand = args[-1].dtype if fn == "where" else args[0].dtype
                texts = [self.value(x) for x in args]
                inverse = None
                if fn == "div" and isinstance(args[1], Const) and d is DType.F32:
                    inverse = spelling.inverse(args[1].value)
                if inverse is not None:
                    text = f"{texts[0]} * {inverse}"
                else:
                    text = spelling.call(fn, texts, d, operand, self.shared.coarse)
                return self._named(label or fn, d, text)
        raise KeyError(f"no CUDA spelling of {type(e).__name__}")

    def _named(self, stem: str, dtype: DType, text: str) -> str:
        stem = re.sub(r"^[\d_]+|_+$", "", re.sub(r"\W+", "_", stem)) or "value"
        n = self.count[stem] = self.count.get(stem, -1) + 1
        name = f"{stem}_{n}"
        self.lines.append(f"const {spelling.VALUES[dtype]} {name} = {text};")
        return name

    def _loaded(self, e: Load) -> str:
        tile = self.shared.tiles.get(_key(e))
        if tile is not None:
            return f"tile[{tile}]"
        t, strides = e.src, self.shared.strides[e.src]
        where = from_linear(address(e.index, strides))
        text = self.index(where, extent(t.shape, strides) > INT)
        if isinstance(where, Call) and where.fn in ("add", "sub", "mul"):
            text = text[1:-1]
        text = spelling.loaded(f"a.{self.shared.pointer(t)}[{text}]", t.dtype)
        test = in_bounds(e.index, t.shape)
        if test is not None:
            outside = spelling.constant(0 if e.pad is None else e.pad, t.dtype)
            text = f"{self.value(test)} ? {text} : {outside}"
        return self._named(t.name.rpartition("_")[0] or t.name, t.dtype.compute, text)

    def index(self, e: Expr, wide: bool = False) -> str:
        """The text of an index, in brackets where it is not one word; int, or wide: long long."""
        kind = DType.I64 if wide or _exceeds(e) else DType.I32
        return self._index(e, kind)

    def _index(self, e: Expr, kind: DType) -> str:
        match e:
            case Axis():
                name = self.names[e]
                return name if kind is DType.I32 else f"(long long){name}"
            case Const(value=v):
                return spelling.constant(v, kind)
            case Call(fn="add" | "sub" | "mul" as fn, args=(a, b)):
                sign = {"add": "+", "sub": "-", "mul": "*"}[fn]
                return f"({self._index(a, kind)} {sign} {self._index(b, kind)})"
            case Call(fn="floordiv" | "mod" as fn, args=(a, Const(value=c))) if (
                c > 0 and bounds(a)[0] >= 0
            ):
                sign = "/" if fn == "floordiv" else "%"
                if kind is DType.I64:
                    return f"({self._index(a, kind)} {sign} {c}ll)"
                return f"int(unsigned({self._index(a, kind)}) {sign} {c}u)"
            case Call(fn="where", args=(test, a, b)):
                return f"({self.value(test)} ? {self._index(a, kind)} : {self._index(b, kind)})"
            case Call(fn=fn, args=args) if all(x.dtype is DType.I64 for x in args):
                return f"({spelling.call(fn, [self._index(x, kind) for x in args], kind)})"
        return self._named(e.fn if isinstance(e, Call) else "index", DType.I64, self._cast(e))

    def _cast(self, e: Expr) -> str:
        """An index from a value of another type."""
        assert isinstance(e, Call), f"{e} is no index"
        return spelling.call(e.fn, [self.value(x) for x in e.args], e.dtype, e.args[0].dtype)


def _exceeds(e: Expr) -> bool:
    """Whether an index, or a part of it, may need more than 32 bits."""
    return any(
        low < -INT or high >= INT
        for low, high in (bounds(x) for x in walk(e) if x.dtype is DType.I64)
    )
