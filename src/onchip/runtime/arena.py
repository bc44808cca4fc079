"""Memory for intermediates that kernels write: one block, offsets planned by liveness."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onchip.fusion.layout import extent

ALIGNMENT = 64
GPU_ALIGNMENT = 512  # what PyTorch's allocator gives on a GPU
HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class Buffer:
    """A request: `nbytes` that are written by the first of `steps` and read by the others."""

    nbytes: int
    steps: tuple[int, ...]


def together(a: Buffer, b: Buffer) -> bool:
    """Whether two buffers are alive at once, where each step is done before the next one starts."""
    return a.steps[0] <= b.steps[-1] and b.steps[0] <= a.steps[-1]


def alignment(device: torch.device) -> int:
    """Bytes that the start of every buffer on a device is a multiple of."""
    return GPU_ALIGNMENT if device.type == "cuda" else ALIGNMENT


def plan_offsets(
    buffers: list[Buffer],
    step: int = ALIGNMENT,
    meet: Callable[[Buffer, Buffer], bool] = together,
) -> tuple[list[int], int]:
    """Offsets (bytes, multiples of `step`) such that buffers that meet (are alive at once) do not
    overlap, and the size of the block. Largest first, each at the lowest place that is free while
    it lives."""
    offsets = [0] * len(buffers)
    placed: list[int] = []
    total = 0
    for i in sorted(range(len(buffers)), key=lambda i: -buffers[i].nbytes):
        b = buffers[i]
        busy = sorted(
            (offsets[j], offsets[j] + rounded(buffers[j].nbytes, step))
            for j in placed
            if meet(buffers[j], b)
        )
        at = 0
        for start, end in busy:
            if at + rounded(b.nbytes, step) <= start:
                break
            at = max(at, end)
        offsets[i] = at
        placed.append(i)
        total = max(total, at + rounded(b.nbytes, step))
    return offsets, total


def rounded(n: int, step: int = ALIGNMENT) -> int:
    """n bytes, one at least, up to a multiple of `step`."""
    return -(-max(n, 1) // step) * step


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """A block of bytes, aligned to 64; large ones on CPU ask for huge pages (fewer TLB misses)."""
    if device.type != "cpu" or nbytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    block = mmap.mmap(-1, nbytes + HUGE_PAGE)
    with contextlib.suppress(OSError):  # a system without transparent huge pages: only slower
        block.madvise(mmap.MADV_HUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(block))
    shift = -start % HUGE_PAGE
    return torch.frombuffer(block, dtype=torch.uint8)[shift : shift + nbytes]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor inside an arena."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Arena:
    """One block with its tensors made once: pointers for kernels, tensors for library calls."""

    block: torch.Tensor
    pointers: list[int]
    tensors: list[torch.Tensor]


class ArenaPool:
    """Arenas of one program; concurrent calls take different ones.

    On a GPU a call gives its arena back when its work is enqueued, not when it is done: an arena
    is only taken again on the stream that it was used on (0 on a CPU), where work stays in order.
    `zeroed`: bytes at the end of the block that hold zeros at first.
    """

    KEEP = 4  # of each stream
    STREAMS = 8

    def __init__(
        self, nbytes: int, views: list[View], device: torch.device, zeroed: int = 0
    ) -> None:
        self.nbytes, self.views, self.device, self.zeroed = nbytes, views, device, zeroed
        self.free: dict[int, deque[Arena]] = {}

    def take(self, stream: int = 0) -> Arena:
        try:
            return self.free[stream].pop()
        except (KeyError, IndexError):
            return self.new()

    def give(self, arena: Arena, stream: int = 0) -> None:
        mine = self.free.get(stream)
        if mine is None:
            mine = self.free.setdefault(stream, deque(maxlen=self.KEEP))
            if len(self.free) > self.STREAMS:  # its memory goes back to the stream it came from
                self.free.pop(next(iter(self.free)), None)
        mine.append(arena)

    def new(self) -> Arena:
        """An arena that is nobody else's, for work on the current stream."""
        with torch.inference_mode(False):
            block = allocate(self.nbytes, self.device)
            if self.zeroed:
                block[self.nbytes - self.zeroed :].zero_()
            tensors = [_view(block, v) for v in self.views]
        return Arena(block, [t.data_ptr() for t in tensors], tensors)


def _view(block: torch.Tensor, v: View) -> torch.Tensor:
    t = torch.empty(0, dtype=v.dtype, device=block.device)
    start = (block.storage_offset() + v.offset) // t.element_size()
    return t.set_(block.untyped_storage(), start, v.shape, v.strides)


# How many hold a storage, by its `_cdata`; None where PyTorch does not tell.
use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class OutputPool:
    """Fresh tensors for a result. A large storage is used again only when nobody else holds it,
    so a result is never overwritten while its owner can see it; at most two are kept."""

    KEEP = 2
    WORTH = 1 << 16  # bytes; below, malloc is as fast

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.shape, self.strides, self.dtype, self.device = shape, strides, dtype, device
        self.extent = extent(shape, strides)
        nbytes = self.extent * dtype.itemsize
        pooled = device.type == "cpu" and nbytes >= self.WORTH
        self.use_count = use_count if pooled else None
        self.idle_count = 0
        self.kept: deque[torch.UntypedStorage] = deque()

    def take(self) -> torch.Tensor:
        use_count = self.use_count
        if use_count is None:
            return torch.empty_strided(
                self.shape, self.strides, dtype=self.dtype, device=self.device
            )
        for _ in range(len(self.kept)):
            try:
                storage = self.kept.popleft()
            except IndexError:  # another thread took it
                break
            if use_count(storage._cdata) <= self.idle_count:
                return self._on(storage)
            self._keep(storage)
        storage = self._new_storage()
        self.idle_count = self.idle_count or use_count(storage._cdata)
        return self._on(storage)

    def _new_storage(self) -> torch.UntypedStorage:
        block = allocate(self.extent * self.dtype.itemsize, self.device)
        if block.storage_offset():  # set_ below starts at 0: a plain block then
            block = torch.empty_like(block)
        storage = block.untyped_storage()
        return storage

    def _on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        out = torch.empty(0, dtype=self.dtype, device=self.device)
        out.set_(storage, 0, self.shape, self.strides)
        self._keep(storage)
        return out

    def _keep(self, storage: torch.UntypedStorage) -> None:
        self.kept.append(storage)
        while len(self.kept) > self.KEEP:
            self.kept.popleft()
