"""Conformance cases as Triton kernels: written, interpreted in a child process, compared.

The interpreter takes some twenty milliseconds a kernel, so only some of an operator's cases are run
(`selected`): with tensors in memory as `compiled.LAYOUTS` say in turn, and with one variant after
the other. On a GPU, tests/gpu/test_conformance.py runs the same kernels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from tests.backends.triton_jobs import Job, bare, interpret, launch_on_gpu
from tests.conformance.compiled import LAYOUTS, Case

from onchip.backends.cpp.run import region_for
from onchip.backends.triton.kernel import emit_kernel
from onchip.backends.triton.source import TritonSource
from onchip.backends.triton.tiles import variants
from onchip.fusion.machine import GPUS
from onchip.fusion.refusal import Refusal
from onchip.fusion.staging import stage, unsupported
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor
from onchip.ir.graph import defined_by

Strides = tuple[int, ...]
GPU = GPUS["h200"]
KINDS = {
    DType.F32: "float", DType.F64: "double", DType.F16: "half", DType.BF16: "half",
    DType.I64: "long", DType.BOOL: "bool",
}  # fmt: skip

# Operators that no Triton kernel computes, and part of the sentence that says why.
REFUSED: dict[str, str] = {}

# What the tests of this session or module have checked so far (conftest.py).
OFFERED: list[Case] = []


@dataclass(frozen=True, eq=False)
class Kernel:
    """A job, and which of the case's results it computes."""

    case: Case
    which: list[int]
    job: Job


def selected(cases: Sequence[Case]) -> list[Case]:
    """One case of each operator for every kind of type that its first input may have, and one
    whose results are empty; which one of several depends on the operator's name alone."""
    groups: dict[tuple[str, str, bool], list[Case]] = {}
    for case in cases:
        first = next(iter(case.values), None)
        kind = KINDS.get(first.dtype, "int") if first is not None else ""
        empty = any(t.numel == 0 for t in case.outputs)
        groups.setdefault((case.target, kind, empty), []).append(case)
    return [found[crc32(key[0].encode()) % len(found)] for key, found in groups.items()]


def kernels_of(case: Case, number: int) -> list[Kernel] | Refusal:
    """Kernels for the results of a case: one for all, or one for each; [] where nothing is
    computed, or where the partition leaves the operator to the library."""
    which = [n for n, t in enumerate(case.outputs) if t not in case.values]
    outputs = [case.outputs[n] for n in which]
    if not outputs or any(unsupported(t) for t in defined_by(outputs, case.values)):
        return []
    layout = LAYOUTS[number % len(LAYOUTS)]
    strides = {t: layout(t.shape) for t in (*case.values, *outputs)}
    made = _source(outputs, case, strides, number)
    if isinstance(made, TritonSource):
        return [Kernel(case, which, _job(case, made, outputs, strides, number))]
    found = []
    for n in which if len(which) > 1 else []:
        one = _source([case.outputs[n]], case, strides, number)
        if isinstance(one, Refusal):
            return one
        found.append(Kernel(case, [n], _job(case, one, [case.outputs[n]], strides, number)))
    return found or made


def _source(
    outputs: list[Tensor], case: Case, strides: dict[Tensor, Strides], number: int
) -> TritonSource | Refusal:
    staged = stage(region_for(outputs, list(case.values)))
    if isinstance(staged, Refusal):
        return staged
    ways = variants(staged, strides, GPU)
    if isinstance(ways, Refusal):
        return ways
    turn = number % len(ways)
    first: Refusal | None = None
    for way in (*ways[turn:], *ways[:turn]):
        made = emit_kernel(way.nest, strides, way.options, case.target)
        if isinstance(made, TritonSource):
            return made
        first = first or made
    assert first is not None
    return first


def _job(
    case: Case, source: TritonSource, outputs: list[Tensor], strides: dict, number: int
) -> Job:
    wanted = {t: n for n, t in enumerate(source.outputs)}
    assert set(outputs) <= set(source.outputs), f"{case.target}: a result is not stored"
    inputs = tuple(
        (torch.from_numpy(np.array(case.values[t], order="C")).to(_type(t)), strides[t])
        for t in source.inputs
    )
    made = tuple((_type(t), t.shape, strides[t]) for t in source.outputs)
    order = tuple(wanted[t] for t in outputs)
    name = f"{case.target} {number} {LAYOUTS[number % len(LAYOUTS)].__name__}"
    return Job(name, bare(source), inputs, made, order)


def _type(t: Tensor) -> torch.dtype:
    return getattr(torch, t.dtype.label)


def problems_of(
    kernels: Sequence[Kernel], results: Sequence[list[torch.Tensor] | str]
) -> list[str]:
    """What differs from ATen, a text each."""
    out = []
    for k, got in zip(kernels, results, strict=True):
        shapes = [f"{t.dtype}{list(t.shape)}" for t in k.case.values]
        try:
            if isinstance(got, str):
                raise AssertionError(got)
            for n, x in zip(k.which, got, strict=True):
                value = x.float() if x.dtype is torch.bfloat16 else x
                k.case.compare(k.case.target, value.numpy(), k.case.want[n], k.case.tol[n])
        except AssertionError as error:
            out.append(f"{k.job.name} {shapes}: {error}\n{k.job.source.text}")
    return out


def written(cases: Sequence[Case]) -> tuple[list[Kernel], dict[str, str]]:
    """All kernels of some cases, and the refusals by operator."""
    kernels: list[Kernel] = []
    refused: dict[str, str] = {}
    for number, case in enumerate(cases):
        made = kernels_of(case, number)
        if isinstance(made, Refusal):
            refused[case.target] = str(made)
        else:
            kernels += made
    return kernels, refused


def unexpected(refused: dict[str, str]) -> list[str]:
    """Refusals that REFUSED does not list."""
    return [
        f"{target}: refused: {text}"
        for target, text in refused.items()
        if REFUSED.get(target) is None or REFUSED[target] not in text
    ]


def on_gpu() -> bool:
    """Whether kernels run on this machine's GPU (tests/gpu/test_conformance.py asks for it)."""
    return os.environ.get("ONCHIP_CONFORMANCE") == "cuda"


def flush(folder: Path) -> None:
    """Run what was offered; raise one AssertionError that lists every case that differs."""
    cases = selected(OFFERED)
    OFFERED.clear()
    kernels, refused = written(cases)
    jobs = [k.job for k in kernels]
    results = launch_on_gpu(jobs) if on_gpu() else interpret(jobs, folder)
    problems = problems_of(kernels, results)
    problems += unexpected(refused)
    text = "\n".join(problems)
    assert not problems, f"{len(problems)} of {len(cases)} cases in Triton:\n{text}"
