"""Triton kernels for NVIDIA GPUs; on the CPU, for tests, under Triton's interpreter.

Nothing here imports triton: kernels are compiled in other processes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from onchip.analysis.roofline import DEVICES
from onchip.analysis.work import flops
from onchip.backends.nvidia.build import Built
from onchip.backends.triton.build import build_all, interpret, interpreting, triton_version
from onchip.backends.triton.kernel import emit_kernel
from onchip.backends.triton.source import Options, TritonSource, Variant
from onchip.backends.triton.tiles import variants
from onchip.errors import CompilerError, InputError, InternalError
from onchip.fusion.layout import extent
from onchip.fusion.machine import GPUS, HOPPER, Gpu, Machine
from onchip.fusion.refusal import Refusal
from onchip.fusion.region import Region
from onchip.fusion.staging import stage
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor
from onchip.planning.candidates import Candidate, Context, Strides, comment_of
from onchip.planning.derive import derived_tensor
from onchip.planning.machine import driver_version
from onchip.planning.precision import has_float32_product, precisions, tf32_allowed
from onchip.planning.values import torch_dtype


@dataclass(frozen=True, eq=False, slots=True)
class DeviceKernel:
    """A kernel on a GPU; see plan.DeviceCode. `run` enqueues it on PyTorch's current stream."""

    built: Built
    device: int

    def run(self, pointers: list[int]) -> int:
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        return self.built.launcher(self.device).run(pointers, stream)

    @property
    def enqueue(self) -> Callable[[Sequence[int], int], None]:
        return self.built.launcher(self.device).enqueue


@dataclass(frozen=True, eq=False, slots=True)
class InterpretedKernel:
    """A kernel under Triton's interpreter, on CPU memory. memory: element type and number of
    elements behind each pointer."""

    source: TritonSource
    source_path: Path
    memory: tuple[tuple[torch.dtype, int], ...]

    def run(self, pointers: list[int]) -> int:
        tensors = [_at(p, *m) for p, m in zip(pointers, self.memory, strict=True)]
        try:
            interpret(self.source_path, self.source.launches, tensors)
        except Exception as error:
            text = f"Triton's interpreter failed on {self.source_path}: {error}"
            raise InternalError(text) from error
        return 0


def _at(pointer: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """The memory at an address, as a tensor of one dimension."""
    if count == 0:
        return torch.empty(0, dtype=dtype)
    block = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(block, dtype=dtype)


@dataclass(frozen=True, slots=True)
class TritonGenerator:
    """See Generator. device: where tensors live; allowed: where PyTorch may use TF32 (see
    precision.tf32_allowed); interpret: for Triton's interpreter."""

    machine: Machine
    device: torch.device
    allowed: tuple[bool, bool]
    interpret: bool = False

    name = "triton"
    pads_operands = False
    seconds_per_kernel = 1.5

    @property
    def gpu(self) -> Gpu:
        assert self.machine.gpu is not None
        return self.machine.gpu

    @property
    def timed(self) -> bool:
        return not self.interpret

    @property
    def problem(self) -> str:
        try:
            triton_version()
        except CompilerError:
            return "the triton package is not installed"
        return ""

    @property
    def key(self) -> tuple[str, ...]:
        matrix, convolution = self.allowed
        flags = f"tf32 in matrix products {matrix}, in convolutions {convolution}"
        driver = driver_version(str(self.device))
        where = "interpreted" if self.interpret else f"CUDA {torch.version.cuda}, driver {driver}"
        return (flags, where) if self.problem else (flags, where, triton_version())

    def root_of(
        self, region: Region, strides: dict[Tensor, Strides], constants: frozenset[Tensor]
    ) -> Tensor | Refusal | None:
        found = self._ways(region, strides)
        if isinstance(found, Refusal):
            return found
        first: Refusal | None = None
        for v in found:
            source = emit_kernel(v.nest, strides, v.options)
            if not isinstance(source, Refusal):
                return None if v.nest.before else v.nest.root.tensor
            first = first or source
        assert first is not None, "variants are not empty"
        return first

    def has_short_form(self, region: Region, constants: frozenset[Tensor]) -> bool:
        return False

    def floor_us(self, region: Region) -> float:
        return floor_us(region, self.gpu)

    def variants(self, region: Region, context: Context) -> list[Variant] | Refusal:
        return self._ways(region, context.strides)

    def _ways(self, region: Region, strides: dict[Tensor, Strides]) -> list[Variant] | Refusal:
        """The backend's variants, in turn for each precision that the products may have."""
        staged = stage(region)
        if isinstance(staged, Refusal):
            return staged
        found: list[list[Variant]] = []
        for p in precisions(region, self.allowed):
            # where no product is float32, the choice counts for a float32 intermediate times a
            # half-precision tensor: PyTorch would round it to that
            waits = not self.interpret and self.gpu.capability >= HOPPER
            base = Options(precision=p or "tf32", interpret=self.interpret, waits=waits)
            some = variants(staged, strides, self.gpu, base)
            if isinstance(some, Refusal):
                return some
            found.append(some)
        return [v for turn in zip_longest(*found) for v in turn if v is not None]

    def write(self, region: Region, variant: Variant, context: Context) -> Candidate | Refusal:
        late = frozenset(t for t in region.inputs if t not in context.available)
        comment = comment_of(region)
        source = emit_kernel(
            variant.nest,
            context.strides,
            variant.options,
            comment,
            late,
            "_".join(dict.fromkeys(n.op.strip("_") for n in region.nodes)),
            context.constants,
        )
        if isinstance(source, Refusal):
            return source
        real = tuple(t for t in source.inputs if t not in late and t not in source.laid_out)
        strides = {t: context.strides[t] for t in (*source.inputs, *source.outputs)}
        strides |= source.laid_out
        derived = tuple(
            derived_tensor(t, context.available, strides[t], self.device, t in source.rounded)
            for t in source.inputs[len(real) :]
        )
        stages = [s for phase in variant.nest.phases for s in phase.stages]
        precision = variant.options.precision if has_float32_product(region) else ""
        return Candidate(
            region,
            source,
            frozenset(s.tensor for s in stages if s.placement in ("global", "shared")),
            variant.label,
            derived,
            real,
            strides,
            source.workspace,
            precision,
            all(launch.waits for launch in source.launches),
        )

    def again(self, region: Region, token: Mapping[str, Any], context: Context) -> None:
        return None

    def build_all(self, candidates: Sequence[Candidate]) -> list[Built | CompilerError | Refusal]:
        return [
            (isinstance(b, Built) and b.over_budget(self.gpu)) or b
            for b in build_all([c.source for c in candidates], self.gpu)
        ]

    def kernel(self, candidate: Candidate, built: Built) -> DeviceKernel | InterpretedKernel:
        if not self.interpret:
            return DeviceKernel(built, self.device.index or 0)
        source: TritonSource = candidate.source
        tensors = (*source.inputs, *source.outputs)
        memory = [(torch_dtype(t), extent(t.shape, candidate.strides[t])) for t in tensors]
        kinds = source.pointers[len(tensors) :]
        for kind, w in zip(kinds, source.workspace, strict=True):
            dtype = POINTED[kind.removeprefix("*")]
            memory.append((dtype, w.nbytes // dtype.itemsize))
        return InterpretedKernel(source, built.path, tuple(memory))


# Element types behind the pointers of a kernel, in Triton's names.
POINTED = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8,
    "u8": torch.uint8, "i1": torch.bool,
}  # fmt: skip


def floor_us(region: Region, gpu: Gpu) -> float:
    """See Generator.floor_us."""
    ceilings = DEVICES.get(gpu.name)
    if ceilings is None:
        return 0.0
    nbytes = sum(t.nbytes for t in (*region.inputs, *region.outputs))
    wide = any(t.dtype is DType.F32 for t in region.inputs)
    rate = ceilings.rate(DType.F32 if wide else DType.BF16, matrix=True, tf32=True)
    products = sum(map(flops, region.tensors))
    return max(nbytes / ceilings.copy_gbs, products / rate) / 1e3


# ---- which GPU -----------------------------------------------------------------------------------


def gpu_of(device: torch.device) -> Gpu:
    """The GPU at hand, by PyTorch's account of it."""
    p = torch.cuda.get_device_properties(device)
    name = next((k for k in GPUS if k in p.name.lower()), p.name)
    shared = getattr(p, "shared_memory_per_block_optin", 0) or p.shared_memory_per_block
    return Gpu(name, 10 * p.major + p.minor, p.multi_processor_count, shared, p.L2_cache_size)


def for_device(device: torch.device) -> TritonGenerator:
    """The generator for the GPU that `device` is."""
    machine = Machine(1, 16, gpu_of(device))
    return TritonGenerator(machine, _with_index(device), tf32_allowed())


def for_gpu(gpu: Gpu) -> TritonGenerator:
    """The generator for a GPU that need not be here: its kernels can be written and compiled."""
    return TritonGenerator(Machine(1, 16, gpu), torch.device("cpu"), tf32_allowed())


def interpreted() -> TritonGenerator:
    """The generator for tests without a GPU. Raises InputError where the interpreter is off."""
    if not interpreting():
        raise InputError(
            'Settings(generator="triton") runs tensors on the CPU under Triton\'s interpreter: set '
            "TRITON_INTERPRET=1 in the environment before triton is imported, or move model and "
            "inputs to a GPU"
        )
    machine = Machine(1, 16, GPUS["h200"])
    return TritonGenerator(machine, torch.device("cpu"), tf32_allowed(), interpret=True)


def _with_index(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
