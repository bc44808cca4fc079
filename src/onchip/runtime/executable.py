"""A plan as one Python function: straight-line code, written once, readable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from onchip.backends.library import aten
from onchip.backends.nvidia.launcher import early_starts
from onchip.capture import schema
from onchip.capture.captured import Captured, Result
from onchip.fusion.layout import captured_strides, contiguous, extent
from onchip.ir.expr import Tensor
from onchip.planning.plan import (
    GPU_POINTER,
    CallStep,
    Derived,
    DeviceCode,
    KernelStep,
    LibraryStep,
    Plan,
)
from onchip.planning.recording import Streams
from onchip.planning.values import aligned, copied, torch_dtype
from onchip.runtime.aliasing import Memory, analyse
from onchip.runtime.arena import (
    Arena,
    ArenaPool,
    Buffer,
    OutputPool,
    View,
    alignment,
    plan_offsets,
    together,
)
from onchip.runtime.tensors import restride, view_of
from onchip.runtime.weights import Snapshot

PROGRAM = "<onchip program>"  # in place of a file name, in tracebacks


@dataclass(frozen=True, eq=False, slots=True)
class Executable:
    """`run(inputs, tensors, pointers, derived, derived_pointers, arena)` gives the flat results;
    `constants` and `derived` say what the middle four are of. results: for each, "computed", or
    "alias" of an input, a constant or an earlier result. streams: that its steps run on; with more
    than one, `run` also takes a recording.Streams (branched.py). early: its kernels start while the
    one before ends (launcher.early_starts)."""

    run: Callable[..., list[torch.Tensor]]
    source: str
    arenas: ArenaPool | None
    derived: tuple[Derived, ...]
    constants: list[Tensor]
    results: list[str]
    streams: int = 1
    early: bool = False

    def call(
        self, inputs: Sequence[torch.Tensor], now: Snapshot, arena: Arena | None, *streams: Streams
    ) -> list[torch.Tensor]:
        """`run` with these values of the constants, launched as it says."""
        given = (inputs, now.tensors, now.pointers, now.derived, now.derived_pointers, arena)
        if not self.early:
            return self.run(*given, *streams)
        with early_starts():
            return self.run(*given, *streams)


def check_status(status: int, name: str) -> None:
    """Raise what eager would have raised for a kernel's status."""
    match status:
        case 1:
            raise IndexError("index out of range in self")
        case 2:
            raise RuntimeError("ZeroDivisionError")
    raise RuntimeError(f"kernel {name} failed with status {status}; please report this")


class Writer:
    """Writes the plan as a function. Kernel outputs nobody outside can see share one arena."""

    parameters = "inputs, w, p, t, d, arena"

    def __init__(self, captured: Captured, plan: Plan, device: torch.device) -> None:
        self.captured, self.graph, self.plan, self.device = captured, captured.graph, plan, device
        self.globals: dict[str, Any] = {
            "check_status": check_status, "restride": restride, "copied": copied,
            "flat_results": schema.flat_results, "view_of": view_of, "aligned": aligned,
        }  # fmt: skip
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self.globals["current_stream"] = torch._C._cuda_getCurrentRawStream
        self.ask_stream = f"stream = current_stream({device.index or 0})"
        self.lines: list[str] = []
        self.count = 0
        self.names: dict[Tensor, str] = {}
        self.memory: Memory = analyse(captured, plan)
        self.derived: list[Derived] = []
        prepared = [t for p in captured.prepare for t in p.outputs]
        self.constants = [*captured.slots, *prepared]
        self.uses: dict[Tensor, list[int]] = _uses(plan)
        self.workspace_index: dict[tuple[int, int], int] = {}
        self.addresses: dict[Tensor, str] = {}  # names of those that a call has looked up
        self.restrided: set[Tensor] = set()

    # -- values

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def constant(self, value: Any) -> str:
        name = f"c{len(self.globals)}"
        self.globals[name] = value
        return name

    def value(self, x: Any) -> str:
        """A Python expression for a call argument."""
        match x:
            case Tensor():
                return self.names[x]
            case Derived():
                self.derived.append(x)
                return f"t[{len(self.derived) - 1}]"
            case bool() | int() | str() | None:
                return repr(x)
            case list() if any(isinstance(y, (Tensor, list, tuple)) for y in x):
                return "[" + ", ".join(self.value(y) for y in x) + "]"
            case tuple() if any(isinstance(y, (Tensor, list, tuple)) for y in x):
                return "(" + "".join(self.value(y) + ", " for y in x) + ")"
        return self.constant(x)

    def strides(self, t: Tensor) -> tuple[int, ...]:
        planned = self.plan.layouts.get(t)
        if planned is not None:
            return tuple(planned)
        if t in self.memory.written:
            return contiguous(t.shape)
        return captured_strides(t)

    # -- the program

    def write(self) -> Executable:
        arenas = self.place()
        for i, t in enumerate(self.graph.inputs):
            self.names[t] = f"i{i}"
        for i, t in enumerate(self.constants):
            self.names[t] = f"w[{i}]"
        for k, step in enumerate(self.plan.steps):
            self.begin(k)
            match step:
                case LibraryStep():
                    self.library(step)
                case CallStep():
                    self.call(step)
                case KernelStep():
                    self.kernel(step, k)
            self.end(k)
        self.finish()
        unpack = "".join(f"i{i}, " for i in range(len(self.graph.inputs)))
        head = [f"def run({self.parameters}):"]
        head += [f"    {unpack}= inputs"] if unpack else []
        head += ["    at = arena.pointers"] if arenas is not None else []
        head += [f"    {self.ask_stream}"] if self.on_gpu else []
        source = "\n".join([*head, *("    " + x for x in self.lines)]) + "\n"
        exec(compile(source, PROGRAM, "exec"), self.globals)
        return Executable(
            self.globals["run"], source, arenas, tuple(self.derived), self.constants,
            self.memory.results,
        )  # fmt: skip

    def begin(self, k: int) -> None:
        """Before a step's own lines."""

    def end(self, k: int) -> None:
        """Behind a step's own lines."""
        self.drop(self.unread_after(k))

    def meet(self, a: Buffer, b: Buffer) -> bool:
        """Whether two buffers of the arena are in use at once."""
        return together(a, b)

    def place(self) -> ArenaPool | None:
        """Give every tensor that kernels write a place in the arena or an output pool, and every
        workspace one in the arena."""
        inside = [t for t in self.memory.written if t not in self.memory.escaping]
        sizes = [extent(t.shape, self.strides(t)) * t.dtype.size for t in inside]
        requests = [Buffer(n, self.memory.uses[t]) for n, t in zip(sizes, inside, strict=True)]
        steps = [(k, s) for k, s in enumerate(self.plan.steps) if isinstance(s, KernelStep)]
        spaces = [(w.zeroed, Buffer(w.nbytes, (k,))) for k, s in steps for w in s.workspace]
        requests += [b for zeroed, b in spaces if not zeroed]
        if not inside and not spaces:
            return None
        step = alignment(self.device)
        offsets, total = plan_offsets(requests, step, self.meet)
        zeros, behind = plan_offsets([b for zeroed, b in spaces if zeroed], step, self.meet)
        views = [
            View(o, t.shape, self.strides(t), torch_dtype(t))
            for o, t in zip(offsets, inside, strict=False)
        ]
        for i, t in enumerate(inside):
            self.names[t] = f"arena.tensors[{i}]"
        self.arena_index = {t: i for i, t in enumerate(inside)}
        # those that hold zeros before and after lie behind all else
        places = {False: iter(offsets[len(inside) :]), True: (total + n for n in zeros)}
        for k, s in steps:
            for i, w in enumerate(s.workspace):
                self.workspace_index[k, i] = len(views)
                views.append(View(next(places[w.zeroed]), (w.nbytes,), (1,), torch.uint8))
        return ArenaPool(total + behind, views, self.device, behind)

    def library(self, step: LibraryStep) -> None:
        node = step.node
        op = self.constant(aten.operator(node))
        args = [self.value(a) for a in node.call.args]
        args += [f"{k}={self.value(v)}" for k, v in node.call.kwargs.items()]
        call = f"{op}({', '.join(args)})"
        for t in node.results:
            self.names[t] = self.fresh()
        single = len(node.outputs) == 1 and not schema.returns_list(node.call.target)
        target = self.names[node.outputs[0]] if single and node.outputs[0] is not None else "r"
        self.lines.append(f"{target} = {call}  # {node.name}")
        if not single:
            self.lines.append("r = flat_results(r)")
            for i, t in enumerate(node.outputs):
                if t is not None:
                    self.lines.append(f"{self.names[t]} = r[{i}]")
            self.lines.append("r = None")

    def call(self, step: CallStep) -> None:
        op = self.constant(schema.overload(step.call.target))
        args = ", ".join(self.value(a) for a in step.call.args)
        name = self.names[step.output] = self.fresh()
        self.lines.append(f"{name} = {op}({args})  # {step.name}, {step.call.target}")
        # the nodes' own calls might have given another layout: what reads it relies on the plan's
        self.require_strides(step.output)

    def kernel(self, step: KernelStep, k: int) -> None:
        own = self.lay_out(step)
        for t in step.outputs:
            if t in self.memory.escaping:
                self.names[t] = self.fresh()
                self.lines.append(f"{self.names[t]} = {self.constant(self.maker(t))}()")
        first = len(self.derived)
        self.derived.extend(step.derived)
        given = {t: self.names[t] for t in own}
        self.names.update(own)
        pointers = [self.pointer(t) for t in step.inputs]
        pointers += [f"d[{first + i}]" for i in range(len(step.derived))]
        pointers += [self.pointer(t) for t in step.outputs]
        pointers += [f"at[{self.workspace_index[k, i]}]" for i in range(len(step.workspace))]
        if self.on_gpu:
            enqueue = self.constant(cast(DeviceCode, step.kernel).enqueue)
            listed = "".join(p + ", " for p in pointers)
            self.lines.append(f"{enqueue}(({listed}), stream)  # {step.name}")
        else:
            run = self.constant(step.kernel.run)
            self.lines.append(f"s = {run}([{', '.join(pointers)}])  # {step.name}")
            self.lines.append(f"if s: check_status(s, {step.name!r})")
        if own:
            self.lines.append(" = ".join(own.values()) + " = None")
        self.names.update(given)

    def maker(self, t: Tensor) -> Callable[[], torch.Tensor]:
        """What makes a new tensor for a result. On a GPU PyTorch's allocator is the pool."""
        shape, strides, dtype = t.shape, self.strides(t), torch_dtype(t)
        if self.on_gpu:
            return partial(torch.empty_strided, shape, strides, dtype=dtype, device=self.device)
        return OutputPool(shape, strides, dtype, self.device).take

    def lay_out(self, step: KernelStep) -> dict[Tensor, str]:
        """See to it that inputs have the strides that the kernel was generated for. Returns the
        names of copies for this step alone."""
        for t in step.inputs:
            self.require_strides(t)
        return {}

    def is_aligned(self, t: Tensor) -> bool:
        """Whether a pointer needs no look: kernels for the CPU take any, what kernels write is
        allocated well, and a weight's place is guarded (weights.py)."""
        if not self.on_gpu or t in self.memory.written:
            return True
        slot = self.captured.slots.get(t)
        return slot is not None and slot.fetch().data_ptr() % GPU_POINTER == 0

    def address(self, t: Tensor) -> str:
        """A name for the address of a tensor that the call has in hand, looked up once. What may be
        a view into the middle of something is copied, where it is one: the copy lives as long as
        the call, since other kernels may read it."""
        if t not in self.addresses:
            name, at = self.names[t], f"x{len(self.addresses)}"
            self.addresses[t] = at
            self.lines.append(f"{at} = {name}.data_ptr()")
            if not self.is_aligned(t):
                copy = f"({self.fresh()} := aligned({name}))"
                self.lines.append(f"if {at} % {GPU_POINTER}: {at} = {copy}.data_ptr()")
        return self.addresses[t]

    def require_strides(self, t: Tensor) -> None:
        """A library result has the strides that the kernel was generated for, or is copied."""
        if t not in self.restrided and self.is_librarys(t):
            self.restrided.add(t)
            name, expected = self.names[t], self.strides(t)
            self.lines.append(
                f"if {name}.stride() != {expected!r}: {name} = restride({name}, {expected!r})"
            )

    def is_librarys(self, t: Tensor) -> bool:
        """Whether a library call has made a tensor, so that its strides need a look."""
        known = t in self.memory.written or t in self.graph.inputs or t in self.captured.slots
        return not known and self.names[t].startswith("v")

    def pointer(self, t: Tensor) -> str:
        name = self.names[t]
        if name.startswith("w[") and self.is_aligned(t):
            return f"p[{name[2:-1]}]"
        if name.startswith("arena."):
            return f"at[{self.arena_index[t]}]"
        return self.address(t)

    def unread_after(self, k: int) -> list[Tensor]:
        """Library results that no later step reads."""
        kept = set(self.graph.output_tensors)
        return [
            t for t, uses in self.uses.items()
            if uses[-1] == k and t not in kept and self.names.get(t, "").startswith("v")
        ]  # fmt: skip

    def drop(self, dead: list[Tensor]) -> None:
        """Drop results, so that their memory is free early."""
        if dead:
            self.lines.append(" = ".join(self.names[t] for t in dead) + " = None")

    # -- results and mutations

    def finish(self) -> None:
        results = self.captured.results
        names = [f"o{i}" for i in range(len(results))]
        for i, r in enumerate(results):
            if self.memory.results[i] == "computed":
                self.computed(names[i], self.graph.outputs[i], r, self.memory.copies[i])
        writes = []
        for i, m in enumerate(self.graph.mutations):
            value = self.names[m.value]
            if self.memory.copied_mutations[i]:
                self.lines.append(f"m{i} = {value}.clone()")
                value = f"m{i}"
            writes.append(f"{self.names[m.target]}.copy_({value})")
        self.lines += writes
        for i, r in enumerate(results):
            if self.memory.results[i] == "alias":
                self.alias(names[i], r, names)
        self.lines.append(f"return [{', '.join(names)}]")

    def computed(self, name: str, t: Tensor, r: Result, copy: bool) -> None:
        source = self.names[t]
        if copy:
            self.lines.append(f"{name} = copied({source}, {r.strides!r})")
            return
        self.lines.append(f"{name} = {source}")
        if t not in self.memory.written or self.strides(t) != r.strides:
            self.lines.append(
                f"if {name}.stride() != {r.strides!r}: {name} = restride({name}, {r.strides!r})"
            )

    def alias(self, name: str, r: Result, names: list[str]) -> None:
        assert r.alias is not None
        kind, key = r.alias
        base = {"input": lambda: f"i{key}", "output": lambda: names[key]}.get(
            kind, lambda: self.names[key]
        )()
        if r.same:
            self.lines.append(f"{name} = {base}")
            return
        self.lines.append(
            f"{name} = view_of({base}, {self.constant(r.dtype)}, {r.shape!r}, {r.strides!r},"
            f" {r.shift})"
        )


def _uses(plan: Plan) -> dict[Tensor, list[int]]:
    uses: dict[Tensor, list[int]] = {}
    for k, step in enumerate(plan.steps):
        for t in (*step.inputs, *step.outputs):
            uses.setdefault(t, []).append(k)
    return uses


def write(captured: Captured, plan: Plan, device: torch.device) -> Executable:
    """The plan as a function."""
    return Writer(captured, plan, device).write()
