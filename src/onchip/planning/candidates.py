"""Generated kernels that could run a region, and built ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from onchip.backends.cpp.compiler import Binary, panel_width
from onchip.backends.cpp.kernel import KernelOptions, KernelSource, emit_kernel
from onchip.fusion.nest import Nest
from onchip.fusion.refusal import Refusal
from onchip.fusion.region import Region
from onchip.fusion.staging import stage
from onchip.fusion.tiling import Machine, nests_for
from onchip.ir.expr import Tensor
from onchip.planning.derive import derived_tensor, packed
from onchip.planning.plan import Derived

Strides = tuple[int, ...]

# Results larger than this leave the caches anyway: storing past them may pay.
STREAM_BYTES = 8 << 20
MOST_NESTS = 5


@dataclass(frozen=True, eq=False, slots=True)
class Candidate:
    """One generated kernel. choice: how it differs from its siblings, readable."""

    region: Region
    source: KernelSource
    nest: Nest
    choice: str
    derived: tuple[Derived, ...]
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False, slots=True)
class CompiledKernel:
    """A loaded kernel; see plan.Kernel."""

    binary: Binary
    arity: int

    @property
    def source_path(self) -> Path:
        """The generated C++ text, beside the binary in the cache."""
        return self.binary.path.with_suffix(".cpp")

    def run(self, pointers: list[int]) -> int:
        return self.binary.function((ctypes.c_void_p * self.arity)(*pointers))


def propose(
    region: Region,
    strides: dict[Tensor, Strides],
    constants: frozenset[Tensor],
    available: frozenset[Tensor],
    machine: Machine,
    note: str = "",
) -> list[Candidate] | Refusal:
    """Generated kernels for a region, most promising first. `available`: tensors that exist when
    the program runs (the rest of the constants are derived at load)."""
    staged = stage(region)
    if isinstance(staged, Refusal):
        return staged
    nests = nests_for(staged, strides, machine)
    if isinstance(nests, Refusal):
        return nests
    late = frozenset(t for t in region.inputs if t not in available)
    out: list[Candidate] = []
    refused: Refusal | None = None
    size = sum(t.nbytes for t in region.outputs)
    for nest in nests[:MOST_NESTS]:
        options = [KernelOptions(parallel=_parallel(region))]
        if size >= STREAM_BYTES and not any(s.contraction for s in nest.stages):
            options.append(KernelOptions(stream=True, parallel=_parallel(region)))
        for o in options:
            source = emit_kernel((nest,), strides, constants, o, _comment(region, note), late)
            if isinstance(source, Refusal):
                refused = source
                continue
            out.append(_candidate(region, source, nest, o, available, late))
    if not out:
        assert refused is not None
        return refused
    distinct = {c.source.text: c for c in reversed(out)}
    return [c for c in out if distinct[c.source.text] is c]


def _parallel(region: Region) -> bool:
    """Below some ten thousand elements, waking the threads costs more than the work."""
    work = sum(t.numel for t in (*region.inputs, *region.outputs, *region.tensors))
    return work >= 1 << 15


def _comment(region: Region, note: str) -> str:
    lines = [note] if note else []
    return "\n".join(lines + [f"{n.name} = {n.op}   {n.origin}" for n in region.nodes])


def _candidate(
    region: Region,
    source: KernelSource,
    nest: Nest,
    options: KernelOptions,
    available: frozenset[Tensor],
    late: frozenset[Tensor],
) -> Candidate:
    choice = "tile " + "x".join(map(str, nest.tile)) + (" streamed" if options.stream else "")
    real = tuple(t for t in source.inputs if t not in late and t not in source.laid_out)
    derived = [
        derived_tensor(t, available, source.laid_out.get(t))
        for t in source.inputs[len(real) :]
    ]
    derived += [packed(p, panel_width(), available) for p in source.panels]
    return Candidate(region, source, nest, choice, tuple(derived), real)


def runner(
    candidate: Candidate,
    kernel: CompiledKernel,
    value: Callable[[Tensor], torch.Tensor],
    derived: list[torch.Tensor],
    outputs: list[torch.Tensor],
) -> Callable[[], int]:
    """A closure that runs the kernel on these tensors once."""
    pointers = [value(t).data_ptr() for t in candidate.inputs]
    pointers += [d.data_ptr() for d in derived]
    pointers += [o.data_ptr() for o in outputs]
    keep = (derived, outputs)

    def run() -> int:
        assert keep
        return kernel.run(pointers)

    return run
