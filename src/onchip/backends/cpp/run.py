"""Evaluate tensors with generated kernels on numpy arrays: for tests, and for a first look."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onchip.backends.cpp.compiler import build, panel_width
from onchip.backends.cpp.kernel import KernelOptions, KernelSource, contiguous, emit_kernel
from onchip.backends.cpp.roles import Panels
from onchip.backends.interpreter import evaluate
from onchip.backends.scalar_numpy import round_bfloat16
from onchip.errors import CompilerError
from onchip.fusion.layout import extent
from onchip.fusion.machine import Machine
from onchip.fusion.nest import Nest
from onchip.fusion.phases import nests_for
from onchip.fusion.refusal import Refusal
from onchip.fusion.region import Region
from onchip.fusion.staging import stage
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor
from onchip.ir.graph import defined_by, reads

Strides = tuple[int, ...]

# The numpy type of a tensor's storage (bfloat16 has none: its bits).
STORED = {d: np.dtype("uint16" if d is DType.BF16 else d.label) for d in DType if d.is_computable}
POISON = 0xA5


def region_for(outputs: Sequence[Tensor], given: Sequence[Tensor]) -> Region:
    tensors = defined_by(outputs, given)
    inside = set(tensors)
    inputs = dict.fromkeys(s for t in tensors for s in reads(t) if s not in inside)
    return Region((), tuple(inputs), tuple(dict.fromkeys(outputs)), tensors)


def kernels_for(
    region: Region,
    strides: dict[Tensor, Strides],
    constants: frozenset[Tensor] = frozenset(),
    options: KernelOptions = KernelOptions(),
    threads: int = 2,
) -> list[tuple[KernelSource, Nest]] | Refusal:
    """The kernels of a region, one for each choice of tile, best guess first; tensors without
    strides are dense."""
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
    return good


def kernel_for(
    region: Region,
    strides: dict[Tensor, Strides],
    constants: frozenset[Tensor] = frozenset(),
    choice: int = 0,
    options: KernelOptions = KernelOptions(),
    threads: int = 2,
) -> tuple[KernelSource, Nest] | Refusal:
    """The kernel of a region with the given choice of tile (the last one if there are fewer)."""
    good = kernels_for(region, strides, constants, options, threads)
    return good if isinstance(good, Refusal) else good[min(choice, len(good) - 1)]


def pack(panels: Panels, values: dict[Tensor, np.ndarray]) -> np.ndarray:
    """Panels [batch][ceil(N / NR)][K][NR] of a constant right operand (zeros beyond N)."""
    nr = panel_width()
    (matrix,) = evaluate([panels.matrix], values)
    matrix = np.asarray(matrix, np.float32).reshape(panels.batch, panels.k, panels.n)
    padded = np.zeros((panels.batch, panels.k, -(-panels.n // nr) * nr), np.float32)
    padded[:, :, : panels.n] = matrix
    shaped = padded.reshape(panels.batch, panels.k, padded.shape[2] // nr, nr).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(shaped)


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """A generated kernel with the memory that it works on. Values are as the interpreter has
    them (bfloat16 as float32 that is already rounded)."""

    source: KernelSource
    wanted: tuple[Tensor, ...]
    arrays: tuple[np.ndarray, ...]
    buffers: tuple[np.ndarray, ...]  # the outputs' whole memory, poisoned
    results: tuple[np.ndarray, ...]  # the outputs, views of `buffers`

    def run(self, function: object, number: int | None = None) -> list[np.ndarray]:
        """Call the kernel (number `number` of several in one file); returns the wanted tensors.
        Raises IndexError and ZeroDivisionError as the interpreter does, and AssertionError if
        anything but the elements of the outputs was written."""
        arrays = (*self.arrays, *self.results)
        first = () if number is None else (number,)
        pointers = (ctypes.c_void_p * (len(first) + len(arrays)))(
            *first, *(a.ctypes.data for a in arrays)
        )
        status = function(ctypes.cast(pointers, ctypes.c_void_p))  # type: ignore[operator]
        if status & 1:
            raise IndexError("index out of range")
        if status & 2:
            raise ZeroDivisionError("integer division by zero")
        by_tensor = {}
        for t, buffer, result in zip(self.source.outputs, self.buffers, self.results, strict=True):
            by_tensor[t] = _unstored(np.array(result, order="C"), t.dtype)
            result.view(_bits(result.dtype))[...] = int.from_bytes(
                bytes([POISON]) * result.itemsize, "little"
            )
            untouched = bool((buffer.view(np.uint8) == POISON).all())
            assert untouched, f"memory around the elements of {t} was written"
        return [by_tensor[t] for t in self.wanted]


def _bits(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"u{dtype.itemsize}")


def prepare(
    outputs: Sequence[Tensor],
    values: dict[Tensor, np.ndarray],
    constants: frozenset[Tensor] = frozenset(),
    strides: dict[Tensor, Strides] | None = None,
    **choice: object,
) -> Job | Refusal:
    """A kernel for given tensors, and its memory: inputs and outputs lie as `strides` (elements;
    dense where absent) say."""
    strides = strides or {}
    made = kernel_for(region_for(outputs, list(values)), strides, constants, **choice)  # type: ignore[arg-type]
    return made if isinstance(made, Refusal) else job(made[0], outputs, values, strides)


def job(
    source: KernelSource,
    outputs: Sequence[Tensor],
    values: dict[Tensor, np.ndarray],
    strides: dict[Tensor, Strides],
) -> Job:
    """The memory of one call of `source`."""
    strides = strides | source.laid_out
    arrays = []
    for t in source.inputs:
        _, view = _memory(t, strides.get(t))
        view[...] = _stored(np.asarray(values[t]), t.dtype)
        arrays.append(view)
    arrays += [pack(p, values) for p in source.panels]
    memory = [_memory(t, strides.get(t)) for t in source.outputs]
    return Job(
        source, tuple(outputs), tuple(arrays), tuple(m[0] for m in memory),
        tuple(m[1] for m in memory),
    )  # fmt: skip


def _memory(t: Tensor, strides: Strides | None) -> tuple[np.ndarray, np.ndarray]:
    """Poisoned memory, with a cache line to spare at both ends, and the tensor in it."""
    strides = contiguous(t.shape) if strides is None else strides
    size = STORED[t.dtype].itemsize
    nbytes = extent(t.shape, strides) * size
    buffer = np.full(128 + nbytes, POISON, np.uint8)
    view = np.lib.stride_tricks.as_strided(
        buffer[64:].view(np.uint8)[:nbytes].view(STORED[t.dtype]),
        t.shape,
        tuple(s * size for s in strides),
    )
    return buffer, view


def _stored(x: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is DType.BF16:
        bits = round_bfloat16(x.astype(np.float32)).view(np.uint32)
        return np.where(np.isnan(x), np.uint32(0x7FC0), bits >> np.uint32(16)).astype(np.uint16)
    return x.astype(STORED[dtype])


def _unstored(x: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is DType.BF16:
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x


def cpp_evaluate(
    outputs: Sequence[Tensor],
    values: dict[Tensor, np.ndarray],
    constants: frozenset[Tensor] = frozenset(),
    strides: dict[Tensor, Strides] | None = None,
    **choice: object,
) -> list[np.ndarray]:
    """The outputs computed by one generated kernel. Raises IndexError / ZeroDivisionError as the
    interpreter does, and ValueError with the refusal where no kernel exists."""
    made = prepare(outputs, values, constants, strides, **choice)
    if isinstance(made, Refusal):
        raise ValueError(str(made))
    return made.run(build(made.source.text).function)


def run_all(
    jobs: Sequence[Job], optimise: str = "-O0", per_file: int = 200
) -> list[list[np.ndarray] | Exception]:
    """Many kernels, compiled together in a few files: each job's results, or what it raised."""
    out: list[list[np.ndarray] | Exception] = []
    for first in range(0, len(jobs), per_file):
        part = jobs[first : first + per_file]
        try:
            function = build(merged([j.source.text for j in part]), optimise).function
        except CompilerError as error:
            # halve until the kernel that does not compile is alone
            one = len(part) == 1
            out += [error] if one else run_all(part, optimise, (len(part) + 1) // 2)
            continue
        for number, j in enumerate(part):
            try:
                out.append(j.run(function, number))
            except (IndexError, ZeroDivisionError, AssertionError) as error:
                out.append(error)
    return out


def merged(sources: Sequence[str]) -> str:
    """Several kernels as one file, whose `kernel` finds at pointers[0] the number of the one to
    run and passes on the pointers that follow."""
    include = '#include "onchip/kernel.h"'
    lines = [include]
    for number, source in enumerate(sources):
        own = source.replace(include, "").replace('extern "C" int kernel(', "int kernel(")
        lines += [f"namespace kernel{number} {{", own, "}"]
    cases = "\n".join(
        f"    case {n}: return kernel{n}::kernel(pointers + 1);" for n in range(len(sources))
    )
    lines += [
        'extern "C" int kernel(void** pointers) {',
        "  switch ((int64_t)pointers[0]) {",
        cases,
        "  }",
        "  return 4;",
        "}",
    ]
    return "\n".join(lines) + "\n"
