"""What is kept of recorded CUDA graphs (graphs.py)."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

import torch

from onchip.runtime.arena import Arena, use_count
from onchip.runtime.weights import Snapshot

MOST_LENT = 4  # graphs on callers' memory, for each stream


@dataclass(eq=False)
class Instance:
    """One recorded graph. pointers: addresses of the inputs that it reads; own: those inputs, where
    they are its own; results: computed ones, None for those made anew by each call."""

    graph: torch.cuda.CUDAGraph
    snapshot: Snapshot
    pointers: tuple[int, ...]
    own: list[torch.Tensor] | None
    results: list[torch.Tensor | None]
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    counts: list[tuple[int, int]] = field(default_factory=list)  # _cdata of a storage, its holders

    def __post_init__(self) -> None:
        kept = {id(t): t for t in self.results if t is not None}
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in kept.values()}
        self.storages = list(storages.values())
        if use_count is not None:
            self.counts = [(s._cdata, use_count(s._cdata)) for s in self.storages]

    def free(self) -> bool:
        """Whether nobody else holds a result."""
        return use_count is not None and all(use_count(data) <= n for data, n in self.counts)


@dataclass(eq=False)
class Lane:
    """What belongs to one stream."""

    arena: Arena | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    snapshot: Snapshot | None = None  # the weights of the graphs
    own: Instance | None = None
    lent: deque[Instance] = field(default_factory=lambda: deque(maxlen=MOST_LENT))
    seen: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=MOST_LENT))
