"""Whether memory still holds what it held: a few words of each tensor, and all bytes in turn."""

from __future__ import annotations

import ctypes
import functools
import itertools
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from onchip.backends.cpp.spans import span_checker
from onchip.errors import CompilerError

# Words of each tensor that every call looks at.
SAMPLES = 8
# After so many calls in a row every byte was looked at. A call reads each weight once, so that
# this costs less than a hundredth of a call that waits for memory.
CALLS = 128
# Bytes hashed as one, and least bytes of a call's share: small models are done in fewer calls.
BLOCK = 32 * 1024
_WORDS = {8: ctypes.c_uint64, 4: ctypes.c_uint32, 2: ctypes.c_uint16, 1: ctypes.c_uint8}
_START, _BYTES, _HASH = range(3)


class Fingerprint:
    """The contents of some tensors when this was made. Those on the CPU only; others are taken to
    be unchanged. Immutable, and safe to use from several threads.

    holds(n)   whether the n-th share of their memory is as it was. Each share has SAMPLES words
               of every tensor (the first, the last, and others between; all of a small one) and
               part of the rest: `steps` (at most CALLS) shares with consecutive n are all bytes.
    changed    the positions of the tensors that differ between two fingerprints
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # aliases: memory that is looked at stays alive although its owner drops it meanwhile
        self._kept = [t.detach() for t in tensors]
        extents = [_extent(t) for t in self._kept]
        samples = [_samples(*e) for e in extents]
        blocks = [_blocks(*e) for e in extents]
        self._spans = np.concatenate([*samples, *blocks, np.zeros((0, 3), np.uint64)])
        self._sampled = sum(len(s) for s in samples)
        self._owners = np.repeat(np.arange(len(blocks)), [len(b) for b in blocks])
        sizes = self._spans[self._sampled :, _BYTES].astype(np.int64)
        total = int(sizes.sum())
        self.steps = max(1, min(CALLS, total // BLOCK))
        share = (np.cumsum(sizes) - sizes) * self.steps // max(total, 1)
        self._cuts = np.searchsorted(share, np.arange(self.steps + 1)).tolist()
        self._check = self._checker() if len(sizes) else _nothing

    def holds(self, n: int) -> bool:
        """Whether the n-th share (modulo `steps`) is unchanged."""
        return not self._check(n % self.steps)

    def changed(self, old: Fingerprint) -> set[int]:
        """Positions of tensors whose contents differ from `old`'s, of tensors of the same sizes.
        64-bit hashes are compared: a change of eight bytes is always found."""
        mine, other = (f._spans[f._sampled :, _HASH] for f in (self, old))
        return set(self._owners[mine != other].tolist())

    def _checker(self) -> Callable[[int], int]:
        """Store the hashes now; what compares share n with them, 0 if it is the same."""
        function = _compiled()
        if function is None:
            return _interpreted(self._spans, self._sampled, self._cuts)
        at, end = self._sampled, len(self._spans)
        rows = [[at, at + a, b - a, 0] for a, b in itertools.pairwise(self._cuts)]
        rows.append([at, at, end - at, 1])
        table = self._requests = np.array([[self._spans.ctypes.data, *r] for r in rows], np.int64)
        first, size = table.ctypes.data, table.strides[0]
        function(first + size * self.steps)
        return lambda n: function(first + size * n)


def _nothing(_: int) -> int:
    return 0


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """Address and bytes from the first element to the last; no bytes if not on the CPU."""
    if t.device.type != "cpu" or t.layout is not torch.strided or 0 in t.shape:
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), (last + 1) * t.itemsize


def _samples(start: int, size: int) -> np.ndarray:
    """Words of 8 bytes (fewer if there are fewer), spread in golden steps: never all in one
    column, and no gap longer than a quarter."""
    if not size:
        return np.zeros((0, 3), np.uint64)
    width = next(w for w in _WORDS if w <= size)
    words = size // width
    few = range(words) if words < SAMPLES else ()
    places = few or {int((k * 0.6180339887498949 % 1) * words) for k in range(SAMPLES - 1)}
    offsets = sorted({*(width * p for p in places), size - width})
    return np.array([(start + o, width, 0) for o in offsets], np.uint64)


def _blocks(start: int, size: int) -> np.ndarray:
    offsets = np.arange(0, size, BLOCK, dtype=np.uint64)
    rows = np.zeros((len(offsets), 3), np.uint64)
    rows[:, _START] = np.uint64(start) + offsets
    rows[:, _BYTES] = np.minimum(np.uint64(BLOCK), np.uint64(size) - offsets)
    return rows


@functools.cache
def _compiled() -> Callable[[int], int] | None:
    try:
        return span_checker()
    except CompilerError:
        return None


def _interpreted(spans: np.ndarray, sampled: int, cuts: list[int]) -> Callable[[int], int]:
    """The same without a compiler: ten times the time, and 32-bit hashes."""
    rows = spans.tolist()
    words = [_WORDS[size].from_address(start) for start, size, _ in rows[:sampled]]
    blocks = [(ctypes.c_char * size).from_address(start) for start, size, _ in rows[sampled:]]
    spans[sampled:, _HASH] = [zlib.crc32(b) for b in blocks]
    spans[:sampled, _HASH] = seen = [w.value for w in words]
    hashes = spans[sampled:, _HASH].tolist()

    def check(n: int) -> int:
        part = slice(cuts[n], cuts[n + 1])
        if [w.value for w in words] != seen:
            return 1
        return [zlib.crc32(b) for b in blocks[part]] != hashes[part]

    return check
