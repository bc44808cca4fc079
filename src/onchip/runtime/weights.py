"""The model's constants as the program sees them: read live, derived values kept up to date."""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from onchip.capture.captured import Prepare, Slot
from onchip.ir.expr import Tensor
from onchip.planning.plan import GPU_POINTER, Derived
from onchip.planning.values import aligned
from onchip.runtime.fingerprint import Fingerprint


class Stale(Exception):
    """A constant has another shape, dtype, device or strides now: specialise again."""


@dataclass(frozen=True, eq=False, slots=True)
class Snapshot:
    """One consistent set of values; never changed, only replaced."""

    values: dict[Tensor, torch.Tensor]
    tensors: list[torch.Tensor]  # in the order of Weights.order
    pointers: list[int]
    derived: list[torch.Tensor]
    derived_pointers: list[int]
    # per slot: (dict that holds it, its name, tensor, data_ptr)
    checks: list[tuple[dict[str, Any], str, torch.Tensor, int]]
    # of what derived values were computed from
    versions: list[tuple[torch.Tensor, int]]
    fingerprint: Fingerprint
    # what was computed here lies on a GPU, and the streams that have used it
    computed: list[torch.Tensor]
    streams: set[int]

    def used_on(self, stream: int) -> None:
        """Work on a GPU's current stream (its handle) is about to read the values: PyTorch's
        allocator must not give the memory of dropped ones away before that work is done."""
        if stream not in self.streams:
            self.streams.add(stream)
            for t in self.computed:
                t.record_stream(torch.cuda.current_stream(t.device))


def _layout(t: torch.Tensor) -> tuple[Any, ...]:
    """What kernels were generated for; on a GPU they load 16 bytes at a time, if the place allows
    it (executable.py)."""
    askew = t.device.type == "cuda" and t.data_ptr() % GPU_POINTER != 0
    return (t.shape, t.dtype, t.device, t.stride(), askew)


class Weights:
    """Constants of one specialisation.

    Values that kernels read as they are need no check. Of the others, those that something was
    computed from (a packed panel, a folded norm), a change is noticed

    - by the next call, if the tensor or its memory was replaced, or it was written by an operator
      that PyTorch counts; or if an uncounted write (through `.data`, numpy, another process)
      changed every element, or every element of a quarter of its memory in one run, or any of the
      words that each call compares (fingerprint.py);
    - by the 128th call (fingerprint.CALLS) of this specialisation in any case, but for a collision
      of 64-bit hashes (32-bit without a compiler).

    What one noticed change leads to is a comparison of everything: a step of an optimizer is seen
    whole if it is seen at one place. `refresh()` recomputes everything, and leaves no doubt.

    The memory of a GPU is not looked at: there a write that PyTorch does not count (through
    `.data`) needs refresh().
    """

    def __init__(
        self, slots: dict[Tensor, Slot], prepare: tuple[Prepare, ...], derived: tuple[Derived, ...]
    ) -> None:
        self.slots, self.prepare, self.derived = slots, prepare, derived
        self.order = [*slots, *(t for p in prepare for t in p.outputs)]
        used = {s for d in (*prepare, *derived) for s in d.sources}
        self.sources = [t for t in slots if t in used]
        self.lock = threading.Lock()
        self.calls = itertools.count()
        self.layouts = {t: _layout(s.fetch()) for t, s in slots.items()}
        self.snapshot = self._compute(None)

    def current(self) -> Snapshot:
        """The values now. Raises Stale if a constant's layout changed."""
        now = self.snapshot
        for place, name, tensor, pointer in now.checks:
            if place.get(name) is not tensor or tensor.data_ptr() != pointer:
                return self._update()
        for tensor, version in now.versions:
            if tensor._version != version:
                return self._update()
        return now if now.fingerprint.holds(next(self.calls)) else self._update()

    def refresh(self) -> None:
        """Recompute every derived value."""
        with self.lock:
            self.snapshot = self._compute(None)

    def _update(self) -> Snapshot:
        with self.lock:
            self.snapshot = self._compute(self.snapshot)
            return self.snapshot

    def _compute(self, old: Snapshot | None) -> Snapshot:
        values, changed = self._fetch(old)
        # taken before anything is computed: what is written meanwhile is noticed by the next call
        versions = self._versions(values)
        fingerprint = Fingerprint([values[t] for t in self.sources])
        if old is not None:
            changed |= {self.sources[i] for i in fingerprint.changed(old.fingerprint)}
        with torch.no_grad():
            for p in self.prepare:
                if old is not None and changed.isdisjoint(p.sources):
                    values.update((t, old.values[t]) for t in p.outputs)
                else:
                    got = p.compute([values[s] for s in p.sources])
                    values.update(zip(p.outputs, got, strict=True))
                    changed.update(p.outputs)
        derived = self._derive(values, changed, old)
        tensors = [values[t] for t in self.order]
        made = [values[t] for p in self.prepare for t in p.outputs] + derived
        computed = [t for t in made if t.device.type == "cuda"]
        for d in {t.device for t in computed}:
            torch.cuda.synchronize(d)  # the next call may come on another stream
        return Snapshot(
            values, tensors, [t.data_ptr() for t in tensors], derived,
            [_pointer(t) for t in derived], self._checks(values), versions, fingerprint,
            computed, set(),
        )  # fmt: skip

    def _derive(
        self, values: dict[Tensor, torch.Tensor], changed: set[Tensor], old: Snapshot | None
    ) -> list[torch.Tensor]:
        """Derived values, those of unchanged sources from `old`; on a few threads, since most of
        it is copying, which holds no lock of the interpreter. (Not on a GPU, whose current stream
        and device are each thread's own.)"""

        def one(i: int) -> torch.Tensor:
            d = self.derived[i]
            if old is not None and changed.isdisjoint(d.sources):
                return old.derived[i]
            with torch.no_grad():  # a setting of each thread
                found = d.compute([values[s] for s in d.sources])
                return aligned(found) if found.device.type == "cuda" else found

        if len(self.derived) < 2 or any(x.device.type == "cuda" for x in values.values()):
            return [one(i) for i in range(len(self.derived))]
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            return list(pool.map(one, range(len(self.derived))))

    def _fetch(self, old: Snapshot | None) -> tuple[dict[Tensor, torch.Tensor], set[Tensor]]:
        """The live values, and which of them are another tensor or counted a write."""
        values: dict[Tensor, torch.Tensor] = {}
        changed: set[Tensor] = set()
        previous = dict(zip(self.order, old.pointers, strict=True)) if old else {}
        versions = {id(t): v for t, v in old.versions} if old else {}
        for t, s in self.slots.items():
            try:
                live = s.fetch()
            except KeyError:
                raise Stale from None
            if live is None or _layout(live) != self.layouts[t]:
                raise Stale
            values[t] = live
            same = old is not None and old.values[t] is live and previous[t] == live.data_ptr()
            if not same or versions.get(id(live), _version(live)) != _version(live):
                changed.add(t)
        return values, changed

    def _checks(self, values: dict[Tensor, torch.Tensor]) -> list[Any]:
        return [
            (s.place if s.kind != "value" else {s.name: values[t]}, s.name, values[t],
             values[t].data_ptr())
            for t, s in self.slots.items()
        ]  # fmt: skip

    def _versions(self, values: dict[Tensor, torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        return [
            (values[t], values[t]._version) for t in self.sources if not values[t].is_inference()
        ]


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _pointer(t: torch.Tensor) -> int:
    """Where a derived value lies; 0 for one in oneDNN's own layout, which has no address."""
    return 0 if t.is_mkldnn else t.data_ptr()
