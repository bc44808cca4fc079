"""C++ kernels for the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from onchip.backends.cpp.compiler import (
    Binary,
    build_all,
    compiler_version,
    find_compiler,
    panel_width,
    target_macros,
)
from onchip.backends.cpp.kernel import KernelOptions, KernelSource, emit_kernel
from onchip.errors import CompilerError
from onchip.fusion.layout import contiguous
from onchip.fusion.machine import Machine
from onchip.fusion.nest import Nest
from onchip.fusion.partition import region_root
from onchip.fusion.phases import nests_for
from onchip.fusion.product_tiles import predicted_ns
from onchip.fusion.refusal import Refusal
from onchip.fusion.region import Region
from onchip.fusion.staging import Staged, stage
from onchip.fusion.tiling import nest_of
from onchip.fusion.winograd import transformed_weights, winograd
from onchip.ir.expr import Tensor
from onchip.planning.candidates import Candidate, Context, Strides, comment_of
from onchip.planning.derive import derived_tensor, packed
from onchip.planning.machine import device_name
from onchip.settings import Settings

# Results larger than this leave the caches anyway: storing past them may pay.
STREAM_BYTES = 8 << 20
MOST_NESTS = 3


@dataclass(frozen=True, eq=False, slots=True)
class Variant:
    """One way to run a region, before any code is written."""

    nest: Nest
    options: KernelOptions
    transformed: tuple[Tensor, ...] = ()  # weights in another form, computed at load

    @property
    def label(self) -> str:
        """How it differs from others."""
        text = "tile " + "x".join(map(str, self.nest.tile))
        text += f" in {len(self.nest.phases)} phases" if self.nest.before else ""
        return text + " streamed" * self.options.stream + " winograd" * bool(self.transformed)


@dataclass(frozen=True, eq=False, slots=True)
class CompiledKernel:
    """A loaded kernel; see plan.Kernel."""

    binary: Binary
    arity: int

    def run(self, pointers: list[int]) -> int:
        return self.binary.function((ctypes.c_void_p * self.arity)(*pointers))


@dataclass(frozen=True, slots=True)
class CppGenerator:
    """See Generator. fewer_products: 3-tap convolutions may take Winograd's form."""

    machine: Machine
    fewer_products: bool = True

    name = "cpp"
    pads_operands = False
    timed = True
    seconds_per_kernel = 0.5

    @property
    def problem(self) -> str:
        try:
            find_compiler()
        except CompilerError:
            return "no C++ compiler was found"
        return ""

    @property
    def key(self) -> tuple[str, ...]:
        products = () if self.fewer_products else ("all products",)
        if self.problem:
            return products
        return (*products, device_name(), compiler_version(), *sorted(target_macros()))

    def root_of(
        self, region: Region, strides: dict[Tensor, Strides], constants: frozenset[Tensor]
    ) -> Tensor | Refusal | None:
        return region_root(region, strides, self.machine)

    def engine_takes(self, region: Region, context: Context) -> bool:
        return False

    def has_short_form(self, region: Region, constants: frozenset[Tensor]) -> bool:
        if not self.fewer_products:
            return False
        staged = stage(region)
        return not isinstance(staged, Refusal) and winograd(staged, constants) is not None

    def floor_us(self, region: Region) -> float:
        return 0.0

    def variants(self, region: Region, context: Context) -> list[Variant] | Refusal:
        staged = stage(region)
        if isinstance(staged, Refusal):
            return staged
        nests = nests_for(staged, context.strides, self.machine)
        if isinstance(nests, Refusal):
            return nests
        size = sum(t.nbytes for t in region.outputs)
        parallel = _parallel(region)
        out: list[Variant] = []
        for nest in nests[:MOST_NESTS]:
            out.append(Variant(nest, KernelOptions(parallel=parallel)))
            if size >= STREAM_BYTES and not any(s.contraction for s in nest.stages):
                out.append(Variant(nest, KernelOptions(stream=True, parallel=parallel)))
        short = winograd(staged, context.constants) if self.fewer_products else None
        if short is None:
            return out
        return _by_promise(out, self._short(short, context, parallel), self.machine)

    def _short(self, staged: tuple[Staged, ...], context: Context, parallel: bool) -> list[Variant]:
        """The region with its 3-tap convolutions in Winograd's form."""
        nests = nests_for(staged, context.strides, self.machine)
        if isinstance(nests, Refusal):
            return []
        options = KernelOptions(parallel=parallel)
        return [Variant(n, options, transformed_weights(staged)) for n in nests[:MOST_NESTS]]

    def write(self, region: Region, variant: Variant, context: Context) -> Candidate | Refusal:
        given = (*region.inputs, *variant.transformed)
        late = frozenset(t for t in given if t not in context.available)
        strides = context.strides | {t: contiguous(t.shape) for t in variant.transformed}
        constants = context.constants.union(variant.transformed)
        comment = comment_of(region)
        source = emit_kernel((variant.nest,), strides, constants, variant.options, comment, late)
        if isinstance(source, Refusal):
            return source
        return _candidate(region, source, variant, context, late, strides)

    def again(self, region: Region, token: Mapping[str, Any], context: Context) -> Variant | None:
        """`variants` makes a nest for each of some dozen tiles."""
        staged = stage(region)
        if not token or isinstance(staged, Refusal):
            return None
        short = winograd(staged, context.constants) if token["winograd"] else staged
        if short is None:
            return None
        root = region.outputs[token["root"]]
        nest = nest_of(short, root, context.strides, tuple(token["tile"]))
        if isinstance(nest, Refusal):
            return None
        options = KernelOptions(stream=token["stream"], parallel=_parallel(region))
        return Variant(nest, options, transformed_weights(short) if token["winograd"] else ())

    def build_all(self, candidates: Sequence[Candidate]) -> list[Binary | CompilerError]:
        return build_all([c.source.text for c in candidates])

    def kernel(self, candidate: Candidate, built: Binary) -> CompiledKernel:
        arity = len(candidate.inputs) + len(candidate.derived) + len(candidate.outputs)
        return CompiledKernel(built, arity)


def for_cpu(settings: Settings) -> CppGenerator:
    """The generator for this processor."""
    machine = Machine(settings.threads or torch.get_num_threads(), _panel_width())
    return CppGenerator(machine, settings.winograd and settings.numerics == "fast")


def _panel_width() -> int:
    try:
        return panel_width()
    except CompilerError:
        return 16


def _by_promise(a: list[Variant], b: list[Variant], machine: Machine) -> list[Variant]:
    """Two forms' variants in turn, the one with the shorter predicted time first: the model
    compares tiles of one form well, forms less so, and both should be tried."""
    if b and predicted_ns(b[0].nest, machine) < predicted_ns(a[0].nest, machine):
        a, b = b, a
    turns = [v for pair in zip_longest(a, b) for v in pair if v is not None]
    return turns[:MOST_NESTS] if b else turns


def _parallel(region: Region) -> bool:
    """Below some ten thousand elements, waking the threads costs more than the work."""
    work = sum(t.numel for t in (*region.inputs, *region.outputs, *region.tensors))
    return work >= 1 << 15


def _token(region: Region, variant: Variant) -> dict[str, Any]:
    """See CppGenerator.again; {} for nests of several phases, which are not told by a tile."""
    nest = variant.nest
    if nest.before:
        return {}
    return {
        "root": next(i for i, t in enumerate(region.outputs) if t is nest.root.tensor),
        "tile": list(nest.tile),
        "stream": variant.options.stream,
        "winograd": bool(variant.transformed),
    }


def _candidate(
    region: Region,
    source: KernelSource,
    variant: Variant,
    context: Context,
    late: frozenset[Tensor],
    strides: dict[Tensor, Strides],
) -> Candidate:
    nest = variant.nest
    stored = frozenset(s.tensor for phase in nest.phases for s in phase.stages)
    real = tuple(t for t in source.inputs if t not in late and t not in source.laid_out)
    derived = [
        derived_tensor(t, context.available, source.laid_out.get(t))
        for t in source.inputs[len(real) :]
    ]
    derived += [packed(p, panel_width(), context.available) for p in source.panels]
    own = {t: strides[t] for t in (*source.inputs, *source.outputs)}
    return Candidate(
        region,
        source,
        stored,
        variant.label,
        tuple(derived),
        real,
        own,
        fewer_products=bool(variant.transformed),
        token=_token(region, variant),
    )
