"""Kernels of the tensor-core engine for Hopper GPUs, beside Triton's or alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from onchip.backends.cuda import build, form, kernel, model, packed_model
from onchip.backends.cuda.packed import narrow
from onchip.backends.cuda.problem import Config, Problem
from onchip.backends.cuda.source import CudaSource
from onchip.backends.nvidia.build import Built
from onchip.backends.nvidia.source import TensorMap
from onchip.backends.nvidia.tensor_map import problem_of as problem_of_map
from onchip.errors import CompilerError
from onchip.fusion.machine import Gpu, Machine
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.region import Region
from onchip.ir.expr import Tensor
from onchip.planning.candidates import Candidate, Context, Strides, comment_of
from onchip.planning.derive import derived_tensor
from onchip.planning.generators import NoVariant, in_turn, triton
from onchip.planning.generators.triton import DeviceKernel, TritonGenerator
from onchip.planning.machine import driver_version
from onchip.planning.precision import has_float32_product, has_product, precisions


@dataclass(frozen=True, eq=False, slots=True)
class Variant:
    """The region as the engine sees it, and the choices of one kernel. precision: of its float32
    products, where it has any."""

    problem: Problem
    config: Config
    precision: str

    @property
    def label(self) -> str:
        return f"engine, {self.config.label}" + f", {self.precision}" * bool(self.precision)


@dataclass(frozen=True, slots=True)
class CudaGenerator:
    """See Generator. device: where tensors live; allowed: where PyTorch may use TF32 (see
    precision.tf32_allowed); beside: writes further variants, and what the engine refuses (None:
    nothing does)."""

    machine: Machine
    device: torch.device
    allowed: tuple[bool, bool]
    beside: TritonGenerator | None

    name = "cuda"
    pads_operands = True  # the copy engine fills with zeros
    timed = True

    @property
    def gpu(self) -> Gpu:
        assert self.machine.gpu is not None
        return self.machine.gpu

    @property
    def problem(self) -> str:
        if self.beside is not None:
            return self.beside.problem
        return _missing()

    @property
    def key(self) -> tuple[str, ...]:
        matrix, convolution = self.allowed
        flags = f"engine: tf32 in matrix products {matrix}, in convolutions {convolution}"
        driver = f"driver {driver_version(str(self.device))}"
        own = (flags, driver, _missing() or build.nvrtc_version())
        return own if self.beside is None else (*own, *self.beside.key)

    @property
    def seconds_per_kernel(self) -> float:
        return 1.0 if self.beside is None else self.beside.seconds_per_kernel

    def root_of(
        self, region: Region, strides: dict[Tensor, Strides], constants: frozenset[Tensor]
    ) -> Tensor | Refusal | None:
        found: Tensor | Refusal | None = None
        if self.beside is not None:
            found = self.beside.root_of(region, strides, constants)
            if not isinstance(found, Refusal):
                return found
        problem = self._ways(region, strides, constants)
        if isinstance(problem, Refusal):
            return found if found is not None else problem
        return None  # another region with this one inside is another problem: no root to build on

    def has_short_form(self, region: Region, constants: frozenset[Tensor]) -> bool:
        return False

    def engine_takes(self, region: Region, context: Context) -> bool:
        return isinstance(self._ways(region, context.strides, context.constants), list)

    def floor_us(self, region: Region) -> float:
        return triton.floor_us(region, self.gpu)

    def variants(
        self, region: Region, context: Context
    ) -> Sequence[Variant | NoVariant | triton.Variant] | Refusal:
        mine = self._ways(region, context.strides, context.constants)
        if self.beside is None:
            return mine
        others = self.beside.variants(region, context)
        if isinstance(mine, Refusal):
            if isinstance(others, Refusal) or not has_product(region):
                return others
            return [NoVariant(mine, "engine"), *others]
        if isinstance(others, Refusal):
            return mine
        return in_turn(mine, others)

    def _ways(
        self, region: Region, strides: dict[Tensor, Strides], constants: frozenset[Tensor]
    ) -> list[Variant] | Refusal:
        """The engine's variants."""
        if missing := _missing():
            return Refusal(Rule.COMPILER, region.name, missing)
        # "ieee" is what it has no products for: "tf32x3" is as exact as PyTorch's
        wanted = [p for p in precisions(region, self.allowed) if p != "ieee"]
        found: list[Variant] = []
        for p in wanted:
            problem = form.problem_of(region, strides, constants, p or "tf32")
            if isinstance(problem, Refusal):
                return problem
            choices = packed_model if narrow(problem) else model
            configs = choices.configurations(problem, self.gpu)
            if isinstance(configs, Refusal):
                return configs
            found += [Variant(problem, c, p) for c in configs]
        return found

    def write(
        self, region: Region, variant: Variant | NoVariant | triton.Variant, context: Context
    ) -> Candidate | Refusal:
        match variant:
            case NoVariant():
                return variant.refusal
            case Variant():
                return self._write(region, variant, context)
        assert self.beside is not None
        made = self.beside.write(region, variant, context)
        return made if isinstance(made, Refusal) else replace(made, token={"triton": variant.label})

    def again(
        self, region: Region, token: Mapping[str, Any], context: Context
    ) -> Variant | triton.Variant | None:
        """The engine's model looks at hundreds of choices for a region."""
        match token:
            case {"triton": label} if self.beside is not None:
                others = self.beside.variants(region, context)
                if isinstance(others, Refusal):
                    return None
                alike = [v for v in others if v.label == label]
                return alike[0] if len(alike) == 1 else None
            case {"config": config, "precision": precision}:
                where = (region, context.strides, context.constants)
                problem = form.problem_of(*where, precision or "tf32")
                if isinstance(problem, Refusal):
                    return None
                config = {**config, "patch": tuple(config["patch"])}
                return Variant(problem, Config(**config), precision)
        return None

    def _write(self, region: Region, variant: Variant, context: Context) -> Candidate | Refusal:
        late = frozenset(t for t in region.inputs if t not in context.available)
        source = kernel.emit(
            variant.problem,
            variant.config,
            self.gpu,
            context.strides,
            "_".join(dict.fromkeys(n.op.strip("_") for n in region.nodes)),
            comment_of(region),
            late,
        )
        if isinstance(source, Refusal):
            return source
        for m in source.parameters:
            if isinstance(m, TensorMap) and (problem := problem_of_map(m)):
                tensor = (*source.inputs, *source.outputs)[m.n]
                return Refusal(Rule.CONTRACTION_FORM, tensor.name, f"its tensor map: {problem}")
        real = tuple(
            t for t in source.inputs if t in context.available and t not in source.laid_out
        )
        assert source.inputs[: len(real)] == real, "inputs that are derived come last"
        derived = source.inputs[len(real) :]
        strides = {t: context.strides[t] for t in (*real, *source.outputs)} | source.laid_out
        return Candidate(
            region,
            source,
            frozenset(source.outputs),
            variant.label,
            tuple(
                derived_tensor(t, context.available, strides.get(t), self.device) for t in derived
            ),
            real,
            strides,
            source.workspace,
            variant.precision if has_float32_product(region) else "",
            source.waits,
            token={"config": asdict(variant.config), "precision": variant.precision},
        )

    def build_all(self, candidates: Sequence[Candidate]) -> list[Built | CompilerError | Refusal]:
        mine = [i for i, c in enumerate(candidates) if isinstance(c.source, CudaSource)]
        others = [i for i, c in enumerate(candidates) if not isinstance(c.source, CudaSource)]
        made: dict[int, Built | CompilerError | Refusal] = {}
        if mine:
            built = build.build_all([candidates[i].source for i in mine], self.gpu)
            worth = [(isinstance(b, Built) and b.over_budget(self.gpu)) or b for b in built]
            made |= zip(mine, worth, strict=True)
        if others:
            assert self.beside is not None
            built = self.beside.build_all([candidates[i] for i in others])
            made |= zip(others, built, strict=True)
        return [made[i] for i in range(len(candidates))]

    def kernel(self, candidate: Candidate, built: Built) -> DeviceKernel:
        return DeviceKernel(built, self.device.index or 0)


def _missing() -> str:
    """What the engine's kernels can't be compiled without; "" if it is all here."""
    try:
        build.nvrtc_version()
    except CompilerError:
        return "the cuda-bindings package, or NVRTC, is not installed"
    return ""


# ---- which GPU -----------------------------------------------------------------------------------


def for_device(device: torch.device, alone: bool = False) -> CudaGenerator:
    """The generator for the GPU that `device` is, for which the engine is; alone: without Triton's
    kernels."""
    return _over(triton.for_device(device), alone)


def for_gpu(gpu: Gpu, alone: bool = False) -> CudaGenerator:
    """The generator for such a GPU, which need not be here: its kernels can be written and
    compiled."""
    return _over(triton.for_gpu(gpu), alone)


def _over(other: TritonGenerator, alone: bool) -> CudaGenerator:
    return CudaGenerator(other.machine, other.device, other.allowed, None if alone else other)
