"""Expressions to C++ statements: value numbering, and hoisting to the loop that needs them.

Open loops form levels; a value is written at the shallowest level at which everything it
mentions is known, once (the evaluation rule of ir/expr.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onchip.backends.cpp import spelling
from onchip.fusion.staging import Staged
from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Tensor,
    loads,
    mentioned,
    substitute,
    walk,
)
from onchip.ir.index import UNKNOWN, bounds, linear, simplify, stride_along


@dataclass(eq=False)
class Buffer:
    """Where a tensor's elements lie: element (i, j) at pointer[(i - origin_i) * stride_i + ...].

    level: the shallowest loop level at which it may be read (written by this kernel: the tile's).
    margin: whatever is read out of bounds lies in memory as well, as padding.
    """

    pointer: str
    dtype: DType
    strides: tuple[int, ...]
    origins: tuple[Expr | None, ...] = ()
    level: int = 0
    margin: bool = False


@dataclass(eq=False)
class Level:
    lines: list[str] = field(default_factory=list)
    bound: dict[Axis, str] = field(default_factory=dict)
    numbers: dict[object, str] = field(default_factory=dict)
    values: dict[Expr, str] = field(default_factory=dict)
    head: str = ""


class Writer:
    """Emits into a stack of levels. `buffers` says where loads read from."""

    def __init__(self, buffers: dict[Tensor, Buffer]) -> None:
        self.buffers = buffers
        self.levels = [Level()]
        self.where: dict[str, int] = {}
        self.follows: dict[str, str] = {}  # text -> the loop variable that decides its level
        self.count = 0
        self.vector_axis: Axis | None = None
        self.vector_chunk = 0
        self.on_first_read: dict[Tensor, Staged] = {}  # what this stage must store
        self.pads: dict[tuple[str, str], str] = {}
        self.uses_status = False
        self.laid_out: set[Tensor] = set()
        self.env: dict[Axis, tuple[int, int]] = {}

    # ---- loops ---------------------------------------------------------------------------------

    def open(self, head: str, axes: dict[Axis, str]) -> None:
        self.levels.append(Level(head=head, bound=dict(axes)))
        for name in axes.values():
            self.where[name] = len(self.levels) - 1

    def close(self) -> None:
        done = self.levels.pop()
        outer = self.levels[-1].lines
        outer.extend((f"{done.head} {{" if done.head else "{").split("\n"))
        outer.extend("  " + line for line in done.lines)
        outer.append("}")

    def line(self, text: str, level: int | None = None) -> None:
        self.levels[-1 if level is None else level].lines.append(text)

    def fresh(self, stem: str = "v") -> str:
        self.count += 1
        return f"{stem}{self.count}"

    @property
    def depth(self) -> int:
        return len(self.levels) - 1

    def bind(self, e: Expr, name: str) -> None:
        """Make `name` the value of an expression at the innermost level."""
        self.levels[-1].values[e] = name
        self.where[name] = self.depth

    def level_of(self, e: Expr) -> int:
        """The shallowest level at which an expression can be written: that of the deepest axis
        or buffer it reads."""
        axes = [self.axis_level(a) for a in mentioned(e) if self.is_bound(a)]
        return max([*axes, *(self.buffers[ld.src].level for ld in loads(e))], default=0)

    def is_bound(self, a: Axis) -> bool:
        return any(a in lv.bound for lv in self.levels)

    def axis_level(self, a: Axis) -> int:
        for n in range(self.depth, -1, -1):
            if a in self.levels[n].bound:
                return n
        raise KeyError(f"axis {a} is not bound")

    # ---- values --------------------------------------------------------------------------------

    def value(self, e: Expr) -> str:
        for lv in reversed(self.levels):
            if e in lv.values:
                return lv.values[e]
        match e:
            case Axis():
                return self.levels[self.axis_level(e)].bound[e]
            case Const(value=v, dtype=d):
                return spelling.constant(v, d)
            case Call():
                return self._call(e)
            case Load():
                return self._load(e)
            case Reduce():
                from onchip.backends.cpp.reduce import emit_reduction

                return emit_reduction(self, e)
        raise TypeError(f"no C++ for {type(e).__name__}")

    def define(self, e: Expr | None, text: str, kind: str, level: int, key: object = None) -> str:
        """A named constant at a level; equal keys share it."""
        key = key if key is not None else text
        for lv in self.levels[: level + 1]:
            if key in lv.numbers:
                name = lv.numbers[key]
                break
        else:
            name = self.fresh()
            self.line(f"const {kind} {name} = {text};", level)
            self.where[name] = level
            self.levels[level].numbers[key] = name
        if e is not None:
            self.levels[level].values[e] = name
        return name

    def level_of_name(self, name: str) -> int:
        return self.where.get(self.follows.get(name, name), 0)

    def fail_unless(self, condition: str, bit: int, level: int) -> None:
        """Set a bit of the kernel's status. In a vector loop the status is a reduction variable,
        or lanes would overwrite each other's."""
        self.uses_status = True
        self.line(f"status |= {condition} ? 0 : {bit};", level)
        head = self.levels[level].head
        plain = "#pragma omp simd"
        if head.startswith(plain) and "status" not in head:
            self.levels[level].head = plain + " reduction(|:status)" + head[len(plain) :]

    def _call(self, e: Call) -> str:
        args = [self.value(a) for a in e.args]
        level = max((self.level_of_name(a) for a in args), default=0)
        arg_dtype = e.args[0].dtype if e.args else e.dtype
        if e.fn in spelling.INTEGER_DIVISIONS and e.dtype.is_int and len(e.args) == 2:
            self._check_divisor(e.args[1], args[1], level)
        limit = e.args[1].value if len(e.args) == 2 and isinstance(e.args[1], Const) else None
        fn = spelling.bounded(e.fn, limit, e.dtype)
        text = spelling.call(fn, args, e.dtype, arg_dtype)
        return self.define(e, text, spelling.value_type(e.dtype), level, (e.fn, e.dtype, *args))

    def _check_divisor(self, divisor: Expr, name: str, level: int) -> None:
        if isinstance(divisor, Const) and divisor.value:
            return
        self.fail_unless(f"({name} != 0)", 2, level)

    # ---- loads ---------------------------------------------------------------------------------

    def _load(self, e: Load) -> str:
        if e.src in self.on_first_read:
            return self._stored_first(e, self.on_first_read[e.src])
        buffer = self.buffers[e.src]
        condition = self._condition(e)
        index = e.index
        if any(isinstance(x, Load) for i in index for x in walk(i)):
            return self._gather(e, buffer, condition)
        if condition is None:
            _, level, text = self.address(e.src, index, buffer)
            return self.define(e, self._read(buffer, text), spelling.value_type(e.dtype), level)
        pad = spelling.constant(e.pad if e.pad is not None else 0, e.dtype)
        return self._guarded(e, buffer, index, condition, pad)

    def _stored_first(self, e: Load, s: Staged) -> str:
        """Compute the element and store it, in the innermost loop: later stages read it."""
        name = self.value(substitute(s.body, dict(zip(s.loops, e.index, strict=True))))
        _, _, place = self.address(e.src, e.index, self.buffers[e.src])
        self.line(f"{place} = {name};")
        self.levels[-1].values[e] = name
        return name

    def _read(self, buffer: Buffer, place: str) -> str:
        return f"float({place})" if buffer.dtype.compute is not buffer.dtype else place

    def in_memory(self, e: Load) -> bool:
        """Whether all that a load reads lies in memory, at an index that is not read itself."""
        if any(isinstance(x, Load) for i in e.index for x in walk(i)):
            return False
        inside = [bounds(i, self.env) for i in e.index]
        plain = all(lo >= 0 and hi < n for (lo, hi), n in zip(inside, e.src.shape, strict=True))
        return e.src not in self.on_first_read and (plain or self.buffers[e.src].margin)

    def _condition(self, e: Load) -> str | None:
        """Conjunction of the bounds that can't be proved; each part at its own level."""
        if self.buffers[e.src].margin:
            return None
        parts: list[str] = []
        for i, n in zip(e.index, e.src.shape, strict=True):
            if any(isinstance(x, Load) for x in walk(i)) and e.pad is None:
                continue
            lo, hi = bounds(i, self.env)
            if lo < 0:
                parts.append(self.value(Call("ge", (i, Const(0, DType.I64)), DType.BOOL)))
            if hi >= n:
                parts.append(self.value(Call("lt", (i, Const(n, DType.I64)), DType.BOOL)))
        if not parts:
            return None
        parts.sort(key=self.level_of_name)
        whole = parts[0]
        for p in parts[1:]:
            level = max(self.level_of_name(whole), self.level_of_name(p))
            whole = self.define(None, f"{whole} && {p}", "bool", level)
        return whole

    def address(self, src: Tensor, index: tuple[Expr, ...], buffer: Buffer) -> tuple[str, int, str]:
        """(offset text, its level, "pointer[offset]"): terms are summed level by level, so that
        what does not change in an inner loop is computed outside it."""
        total: Expr = Const(0, DType.I64)
        for d, (i, s) in enumerate(zip(index, buffer.strides, strict=True)):
            origin = buffer.origins[d] if buffer.origins else None
            total = total + (i - origin if origin is not None else i) * s
        form = linear(simplify(total, self.env))
        by_level: dict[int, list[str]] = {}
        for atom, c in form.terms:
            name = self.value(atom)
            level = self.level_of_name(name)
            by_level.setdefault(level, []).append(name if c == 1 else f"{name} * {c}l")
        text = ""
        level = buffer.level
        for n in sorted(by_level):
            if text and " " in text:
                text = self.define(None, text, "int64_t", level)
            text = " + ".join(([text] if text else []) + by_level[n])
            level = max(n, level)
        if form.constant or not by_level:  # last: neighbours share the rest, and it costs nothing
            text += f"{' + ' if text else ''}{form.constant}l"
        return text, level, f"{buffer.pointer}[{text}]"

    def _guarded(
        self, e: Load, buffer: Buffer, index: tuple[Expr, ...], condition: str, pad: str
    ) -> str:
        kind = spelling.value_type(e.dtype)
        v = self.vector_axis
        vector_level = self.axis_level(v) if v is not None and self.is_bound(v) else None
        if (
            vector_level is not None
            and buffer.dtype.compute is buffer.dtype
            and self.level_of_name(condition) < vector_level
            and self._stride_along(index, buffer, v) == 1  # type: ignore[arg-type]
            and self.vector_chunk
        ):
            return self._redirected(e, buffer, index, condition, pad, vector_level)
        _, level, place = self.address(e.src, index, buffer)
        level = max(level, self.level_of_name(condition))
        read = self._read(buffer, place)
        return self.define(e, f"{condition} ? {read} : {pad}", kind, level)

    def _redirected(
        self, e: Load, buffer: Buffer, index: tuple[Expr, ...], condition: str, pad: str, level: int
    ) -> str:
        """Out of bounds, a whole vector run is read from a row of padding values instead: the
        vector loop stays free of conditions."""
        v = self.vector_axis
        assert v is not None
        kind = spelling.value_type(e.dtype)
        row = self.pads.setdefault((kind, pad), f"padding{len(self.pads)}")
        first = self.chunk_start
        at_start = tuple(simplify(substitute(i, {v: first})) for i in index)
        text, at, _ = self.address(e.src, at_start, buffer)
        at = max(at, self.level_of_name(condition))
        pointer = self.define(
            None, f"{condition} ? {buffer.pointer} + ({text}) : {row}", f"{kind}*", at
        )
        inner = f"{self.value(v)} - {self.value(first)}"
        return self.define(e, f"{pointer}[{inner}]", kind, level)

    chunk_start: Expr = Const(0, DType.I64)

    def _stride_along(self, index: tuple[Expr, ...], buffer: Buffer, v: Axis) -> int | None:
        return stride_along(index, buffer.strides, v)

    def _gather(self, e: Load, buffer: Buffer, condition: str | None) -> str:
        """A data-dependent index is checked: out of range sets the status and reads element 0."""
        parts: list[Expr] = []
        for i, n in zip(e.index, e.src.shape, strict=True):
            if e.pad is None and any(isinstance(x, Load) for x in walk(i)):
                lo, hi = bounds(i, self.env)
                if lo < 0 or hi >= n or lo <= UNKNOWN[0]:
                    raw = self.value(i)
                    level = self.level_of_name(raw)
                    ok = self.define(None, f"{raw} >= 0 && {raw} < {n}l", "bool", level)
                    self.fail_unless(ok, 1, level)
                    name = self.define(None, f"{ok} ? {raw} : 0l", "int64_t", level)
                    safe = _Named(name)
                    self.levels[level].values[safe] = name
                    parts.append(safe)
                    continue
            parts.append(i)
        _, level, place = self.address(e.src, tuple(parts), buffer)
        kind = spelling.value_type(e.dtype)
        read = self._read(buffer, place)
        if condition is None:
            return self.define(e, read, kind, level)
        level = max(level, self.level_of_name(condition))
        pad = spelling.constant(e.pad if e.pad is not None else 0, e.dtype)
        return self.define(e, f"{condition} ? {read} : {pad}", kind, level)


class _Named(Expr):
    """An index that already has a C++ name."""

    dtype = DType.I64

    def __init__(self, name: str) -> None:
        self.name = name
