"""Generated kernels that could run a region, and built ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import torch

from onchip.backends.cpp.compiler import Binary, panel_width
from onchip.backends.cpp.kernel import KernelOptions, KernelSource, emit_kernel
from onchip.fusion.layout import contiguous
from onchip.fusion.machine import Machine
from onchip.fusion.nest import Nest
from onchip.fusion.phases import nests_for
from onchip.fusion.product_tiles import predicted_ns
from onchip.fusion.refusal import Refusal
from onchip.fusion.region import Region
from onchip.fusion.staging import Staged, stage
from onchip.fusion.winograd import transformed_weights, winograd
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
    transformed: tuple[Tensor, ...] = ()  # weights in another form, computed at load


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
    fewer_products: bool = False  # Winograd's form

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
    region: Region,
    strides: dict[Tensor, Strides],
    constants: frozenset[Tensor],
    machine: Machine,
    fewer_products: bool = True,
) -> list[Variant] | Refusal:
    """Ways to run a region, most promising first. fewer_products: Winograd's form is allowed."""
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
    short = winograd(staged, constants) if fewer_products else None
    if short is None:
        return out
    return _by_promise(out, _short_variants(short, strides, machine, parallel), machine)


def has_short_form(region: Region, constants: frozenset[Tensor]) -> bool:
    """Whether a convolution of the region could have Winograd's form, in a kernel of its own."""
    staged = stage(region)
    return not isinstance(staged, Refusal) and winograd(staged, constants) is not None


def _short_variants(
    staged: tuple[Staged, ...], strides: dict[Tensor, Strides], machine: Machine, parallel: bool
) -> list[Variant]:
    """The region with its 3-tap convolutions in Winograd's form."""
    nests = nests_for(staged, strides, machine)
    if isinstance(nests, Refusal):
        return []
    options = KernelOptions(parallel=parallel)
    return [Variant(n, options, transformed_weights(staged)) for n in nests[:MOST_NESTS]]


def _by_promise(a: list[Variant], b: list[Variant], machine: Machine) -> list[Variant]:
    """Two forms' variants in turn, the one with the shorter predicted time first: the model
    compares tiles of one form well, forms less so, and both should be tried."""
    if b and predicted_ns(b[0].nest, machine) < predicted_ns(a[0].nest, machine):
        a, b = b, a
    turns = [v for pair in zip_longest(a, b) for v in pair if v is not None]
    return turns[:MOST_NESTS] if b else turns


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
    late = frozenset(t for t in (*region.inputs, *variant.transformed) if t not in available)
    strides = strides | {t: contiguous(t.shape) for t in variant.transformed}
    constants = constants.union(variant.transformed)
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
    choice += f" in {len(nest.phases)} phases" if nest.before else ""
    choice += " streamed" if variant.options.stream else ""
    choice += " winograd" if variant.transformed else ""
    stored = frozenset(s.tensor for phase in nest.phases for s in phase.stages)
    real = tuple(t for t in source.inputs if t not in late and t not in source.laid_out)
    derived = [
        derived_tensor(t, available, source.laid_out.get(t)) for t in source.inputs[len(real) :]
    ]
    derived += [packed(p, panel_width(), available) for p in source.panels]
    fewer = bool(variant.transformed)
    return Candidate(region, source, stored, choice, tuple(derived), real, fewer)


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
