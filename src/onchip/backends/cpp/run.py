"""Evaluate tensors with one generated kernel on numpy arrays: for tests, and for a first look."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from onchip.backends.cpp.compiler import build, panel_width
from onchip.backends.cpp.kernel import KernelOptions, KernelSource, contiguous, emit_kernel
from onchip.backends.cpp.product import Panels
from onchip.backends.interpreter import evaluate
from onchip.fusion.nest import Nest
from onchip.fusion.refusal import Refusal
from onchip.fusion.region import Region
from onchip.fusion.staging import stage
from onchip.fusion.tiling import Machine, nests_for
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor
from onchip.ir.graph import defined_by, reads

NUMPY = {d: d.label for d in DType} | {DType.BF16: "uint16"}


def region_for(outputs: Sequence[Tensor], given: Sequence[Tensor]) -> Region:
    tensors = defined_by(outputs, given)
    inside = set(tensors)
    inputs = dict.fromkeys(s for t in tensors for s in reads(t) if s not in inside)
    return Region((), tuple(inputs), tuple(outputs), tensors)


def kernel_for(
    region: Region,
    strides: dict[Tensor, tuple[int, ...]],
    constants: frozenset[Tensor] = frozenset(),
    choice: int = 0,
    options: KernelOptions = KernelOptions(),
    threads: int = 2,
) -> tuple[KernelSource, Nest] | Refusal:
    """The kernel of a region with the given choice of tile; tensors without strides are dense."""
    staged = stage(region)
    if isinstance(staged, Refusal):
        return staged
    full = {t: contiguous(t.shape) for t in (*region.inputs, *region.tensors)} | strides
    nests = nests_for(staged, full, Machine(threads, panel_width()))
    if isinstance(nests, Refusal):
        return nests
    comment = "\n".join(map(repr, region.outputs))
    made = [(emit_kernel((n,), full, constants, options, comment), n) for n in nests]
    good = [(s, n) for s, n in made if isinstance(s, KernelSource)]
    if not good:
        refusal = made[0][0]
        assert isinstance(refusal, Refusal)
        return refusal
    return good[min(choice, len(good) - 1)]


def pack(panels: Panels, values: dict[Tensor, np.ndarray]) -> np.ndarray:
    """Panels [batch][ceil(N / NR)][K][NR] of a constant right operand (zeros beyond N)."""
    nr = panel_width()
    (matrix,) = evaluate([panels.matrix], values)
    matrix = np.asarray(matrix, np.float32).reshape(panels.batch, panels.k, panels.n)
    padded = np.zeros((panels.batch, panels.k, -(-panels.n // nr) * nr), np.float32)
    padded[:, :, : panels.n] = matrix
    shaped = padded.reshape(panels.batch, panels.k, -1, nr).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(shaped)


def cpp_evaluate(
    outputs: Sequence[Tensor],
    values: dict[Tensor, np.ndarray],
    constants: frozenset[Tensor] = frozenset(),
    **choice: object,
) -> list[np.ndarray]:
    """The outputs computed by one generated kernel. Raises IndexError / ZeroDivisionError as the
    interpreter does, and ValueError with the refusal where no kernel exists."""
    region = region_for(outputs, list(values))
    made = kernel_for(region, {}, constants, **choice)  # type: ignore[arg-type]
    if isinstance(made, Refusal):
        raise ValueError(str(made))
    source, _ = made
    binary = build(source.text)
    arrays = [np.ascontiguousarray(values[t]) for t in source.inputs]
    arrays += [pack(p, values) for p in source.panels]
    results = [np.empty(t.shape, NUMPY[t.dtype]) for t in source.outputs]
    for r in results:
        r.view(np.uint8).fill(0xA5) if r.size and r.ndim else None
    pointers = (ctypes.c_void_p * (len(arrays) + len(results)))(
        *(a.ctypes.data for a in (*arrays, *results))
    )
    status = binary.function(ctypes.cast(pointers, ctypes.c_void_p))
    if status & 1:
        raise IndexError("index out of range")
    if status & 2:
        raise ZeroDivisionError("integer division by zero")
    by_tensor = dict(zip(source.outputs, results, strict=True))
    return [by_tensor[t] for t in outputs]
