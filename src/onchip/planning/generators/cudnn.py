"""cuDNN's plans beside another generator's kernels: for each convolution with what follows it
element by element, the first few that cuDNN's heuristics propose."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onchip.backends.cudnn import build
from onchip.backends.cudnn.form import Form, form_of, written
from onchip.backends.cudnn.source import GraphSource
from onchip.errors import CompilerError
from onchip.fusion.machine import Machine
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.region import Region
from onchip.ir.expr import Tensor
from onchip.planning.candidates import Candidate, Context, Strides, comment_of
from onchip.planning.derive import derived_tensor
from onchip.planning.generators import Built, Failure, Generator, NoVariant, in_turn
from onchip.planning.generators.triton import DeviceKernel, with_index
from onchip.planning.plan import Derived, Kernel
from onchip.planning.precision import has_float32_product, precisions, tf32_allowed

MOST_PLANS = 3  # of one region


@dataclass(frozen=True, eq=False, slots=True)
class Variant:
    """A region as cuDNN sees it, and a plan's place among those proposed, from 0."""

    form: Form
    place: int

    @property
    def label(self) -> str:
        return f"cuDNN, plan {self.place}"


@dataclass(frozen=True, slots=True)
class WithCudnn:
    """See Generator: `other`'s kernels and cuDNN's plans, on the GPU `device`. properties: of it,
    as cuDNN says them; tf32: PyTorch may round float32 operands of convolutions to it; missing: why
    cuDNN can build none here, "" if it can."""

    other: Generator
    device: torch.device
    properties: str
    tf32: bool
    missing: str = ""

    timed = True

    @property
    def name(self) -> str:
        return self.other.name

    @property
    def machine(self) -> Machine:
        return self.other.machine

    @property
    def problem(self) -> str:
        return self.other.problem

    @property
    def key(self) -> tuple[str, ...]:
        return (*self.other.key, self.missing or build.cudnn_version())

    @property
    def seconds_per_kernel(self) -> float:
        return self.other.seconds_per_kernel

    @property
    def pads_operands(self) -> bool:
        return self.other.pads_operands

    def root_of(
        self, region: Region, strides: dict[Tensor, Strides], constants: frozenset[Tensor]
    ) -> Tensor | Refusal | None:
        return self.other.root_of(region, strides, constants)

    def has_short_form(self, region: Region, constants: frozenset[Tensor]) -> bool:
        return self.other.has_short_form(region, constants)

    def engine_takes(self, region: Region, context: Context) -> bool:
        return self.other.engine_takes(region, context)

    def floor_us(self, region: Region) -> float:
        return self.other.floor_us(region)

    def variants(self, region: Region, context: Context) -> Sequence[Any] | Refusal:
        others = self.other.variants(region, context)
        form = self._form(region, context)
        match form:
            case None:
                return others
            case Refusal():
                return (
                    others if isinstance(others, Refusal) else [*others, NoVariant(form, "cuDNN")]
                )
        plans = [Variant(form, n) for n in range(MOST_PLANS)]
        return plans if isinstance(others, Refusal) else in_turn(others, plans)

    def _form(self, region: Region, context: Context) -> Form | Refusal | None:
        form = form_of(region, context.strides, context.constants)
        if self.missing and form is not None:
            return Refusal(Rule.COMPILER, region.name, self.missing)
        if isinstance(form, Form) and precisions(region, (True, self.tf32)) == ("tf32x3",):
            text = "its products of float32 are TF32's, less exact than PyTorch's here"
            return Refusal(Rule.CUDNN_FORM, region.name, text)
        return form

    def write(self, region: Region, variant: Any, context: Context) -> Candidate | Refusal:
        match variant:
            case NoVariant():
                return variant.refusal
            case Variant():
                return self._write(region, variant, context)
        return self.other.write(region, variant, context)

    def _write(self, region: Region, variant: Variant, context: Context) -> Candidate:
        late = frozenset(t for t in region.inputs if t not in context.available)
        source = written(variant.form, context.strides, late, variant.place, comment_of(region))
        strides = {t: context.strides[t] for t in (*source.inputs, *source.outputs)}
        strides |= source.laid_out
        real = tuple(t for t in source.inputs if t not in late and t not in source.laid_out)
        derived = [
            derived_tensor(t, context.available, strides[t], self.device)
            for t in source.inputs[len(real) :]
        ]
        derived += [_number(x, self.device) for x in source.scalars]
        return Candidate(
            region,
            source,
            frozenset(source.outputs),
            variant.label,
            tuple(derived),
            real,
            strides,
            precision="tf32" if has_float32_product(region) else "",
            foreign=True,
            token={"cudnn": variant.place},
        )

    def again(self, region: Region, token: Mapping[str, Any], context: Context) -> Any | None:
        match token:
            case {"cudnn": place}:
                form = self._form(region, context)
                return Variant(form, place) if isinstance(form, Form) else None
        return self.other.again(region, token, context)

    def build_all(self, candidates: Sequence[Candidate]) -> list[Built | Failure]:
        mine = [i for i, c in enumerate(candidates) if isinstance(c.source, GraphSource)]
        others = [i for i, c in enumerate(candidates) if not isinstance(c.source, GraphSource)]
        made: dict[int, Built | Failure] = {}
        if mine:
            sources = [candidates[i].source for i in mine]
            made |= zip(mine, build.build_all(sources, self.properties), strict=True)
        if others:
            made |= zip(others, self.other.build_all([candidates[i] for i in others]), strict=True)
        return [made[i] for i in range(len(candidates))]

    def kernel(self, candidate: Candidate, built: Any) -> Kernel:
        if isinstance(built, build.Plan):
            return DeviceKernel(built, self.device.index or 0)
        return self.other.kernel(candidate, built)


def _number(x: float, device: torch.device) -> Derived:
    """One float32 in memory."""
    return Derived(f"{x!r} for cuDNN", (), lambda _: torch.full((1,), x, device=device))


def beside(other: Generator, device: torch.device) -> Generator:
    """`other` with cuDNN's plans beside its kernels, or alone without the package (`onchip doctor`
    says so)."""
    if not build.installed():
        return other
    device, tf32 = with_index(device), tf32_allowed()[1]
    try:
        build.cudnn_version()
        return WithCudnn(other, device, _properties(device.index or 0), tf32)
    except CompilerError as error:
        return WithCudnn(other, device, "", tf32, str(error))


@functools.cache
def _properties(device: int) -> str:
    return build.device_properties(device)
