"""Generated kernels that could run a region, and built ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from onchip.backends.cpp.compiler import Binary, panel_width
from onchip.backends.cpp.kernel import KernelOptions, KernelSource, emit_kernel
from onchip.fusion.machine import Machine
from onchip.fusion.nest import Nest
from onchip.fusion.refusal import Refusal
from onchip.fusion.region import Region
from onchip.fusion.staging import stage
from onchip.fusion.tiling import nests_for
from onchip.ir.expr import Tensor
from onchip.planning.derive import derived_tensor, packed
from onchip.planning.plan import Derived

Strides = tuple[int, ...]

# Results larger than this leave the caches anyway: storing past them may pay.
STREAM_BYTES = 8 << 20
MOST_NESTS = 3


@dataclass(frozen=True, eq=False, slots=True)
class Variant:
    """One way to run a region, before any code is written."""

    nest: Nest
    options: KernelOptions


@dataclass(frozen=True, eq=False, slots=True)
class Candidate:
    """One generated kernel. choice: how it differs from its siblings, readable. stored: tensors
    that it keeps in memory, scratch or the program's, rather than in registers."""

    region: Region
    source: KernelSource
    stored: frozenset[Tensor]
    choice: str
    derived: tuple[Derived, ...]
    inputs: tuple[Tensor, ...]

    def moved(self, region: Region, same: dict[Tensor, Tensor]) -> Candidate:
        """This kernel for an isomorphic region; `same` maps each tensor to its counterpart. The
        source keeps the names that it has: names are comments."""
        source = replace(
            self.source,
            inputs=tuple(same.get(t, t) for t in self.source.inputs),
            outputs=tuple(same[t] for t in self.source.outputs),
            laid_out={same.get(t, t): s for t, s in self.source.laid_out.items()},
        )
        return replace(
            self,
            region=region,
            source=source,
            stored=frozenset(same.get(t, t) for t in self.stored),
            derived=tuple(_moved(d, same) for d in self.derived),
            inputs=tuple(same[t] for t in self.inputs),
        )


def _moved(d: Derived, same: dict[Tensor, Tensor]) -> Derived:
    sources = tuple(same[s] for s in d.sources)
    name = d.name
    for old, new in zip(d.sources, sources, strict=True):
        name = name.replace(old.name, new.name)
    return replace(d, name=name, sources=sources)


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


def variants(
    region: Region, strides: dict[Tensor, Strides], machine: Machine
) -> list[Variant] | Refusal:
    """Ways to run a region, most promising first."""
    staged = stage(region)
    if isinstance(staged, Refusal):
        return staged
    nests = nests_for(staged, strides, machine)
    if isinstance(nests, Refusal):
        return nests
    size = sum(t.nbytes for t in region.outputs)
    parallel = _parallel(region)
    out: list[Variant] = []
    for nest in nests[:MOST_NESTS]:
        out.append(Variant(nest, KernelOptions(parallel=parallel)))
        if size >= STREAM_BYTES and not any(s.contraction for s in nest.stages):
            out.append(Variant(nest, KernelOptions(stream=True, parallel=parallel)))
    return out


def write(
    region: Region,
    variant: Variant,
    strides: dict[Tensor, Strides],
    constants: frozenset[Tensor],
    available: frozenset[Tensor],
    note: str = "",
) -> Candidate | Refusal:
    """The kernel of one variant. `available`: tensors that exist when the program runs (the rest
    of the constants are derived at load)."""
    late = frozenset(t for t in region.inputs if t not in available)
    comment = _comment(region, note)
    source = emit_kernel((variant.nest,), strides, constants, variant.options, comment, late)
    if isinstance(source, Refusal):
        return source
    return _candidate(region, source, variant, available, late)


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
    variant: Variant,
    available: frozenset[Tensor],
    late: frozenset[Tensor],
) -> Candidate:
    nest = variant.nest
    choice = "tile " + "x".join(map(str, nest.tile))
    choice += " streamed" if variant.options.stream else ""
    stored = frozenset(s.tensor for s in nest.stages)
    real = tuple(t for t in source.inputs if t not in late and t not in source.laid_out)
    derived = [
        derived_tensor(t, available, source.laid_out.get(t)) for t in source.inputs[len(real) :]
    ]
    derived += [packed(p, panel_width(), available) for p in source.panels]
    return Candidate(region, source, stored, choice, tuple(derived), real)


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

    def run(_alive: object = (derived, outputs)) -> int:  # or the memory could go to others
        return kernel.run(pointers)

    return run
