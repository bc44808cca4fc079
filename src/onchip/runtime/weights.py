"""The model's constants as the program sees them: read live, derived values kept up to date."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from onchip.capture.captured import Prepare, Slot
from onchip.ir.expr import Tensor
from onchip.planning.plan import Derived


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
    # per slot: (dict that holds it, its name, tensor, data_ptr, version or None)
    checks: list[tuple[dict[str, Any], str, torch.Tensor, int]]
    versions: list[tuple[torch.Tensor, int]]


def _layout(t: torch.Tensor) -> tuple[Any, ...]:
    return (t.shape, t.dtype, t.device, t.stride())


class Weights:
    """Constants of one specialisation.

    A constant is known by its tensor object, its data pointer and, where something was computed
    from it, its version counter. Writes that PyTorch does not count (through `.data` or numpy)
    are not seen: `refresh()` recomputes everything.
    """

    def __init__(
        self, slots: dict[Tensor, Slot], prepare: tuple[Prepare, ...], derived: tuple[Derived, ...]
    ) -> None:
        self.slots, self.prepare, self.derived = slots, prepare, derived
        self.order = [*slots, *(t for p in prepare for t in p.outputs)]
        self.sources = {s for d in (*prepare, *derived) for s in d.sources} & set(slots)
        self.lock = threading.Lock()
        self.layouts = {t: _layout(s.fetch()) for t, s in slots.items()}
        self.parameters = [s for s in slots.values() if s.kind == "parameter"]
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
        return now

    def refresh(self) -> None:
        """Recompute every derived value."""
        with self.lock:
            self.snapshot = self._compute(None)

    def require_grad(self) -> bool:
        return any(s.fetch().requires_grad for s in self.parameters)

    def _update(self) -> Snapshot:
        with self.lock:
            self.snapshot = self._compute(self.snapshot)
            return self.snapshot

    def _compute(self, old: Snapshot | None) -> Snapshot:
        values, changed = self._fetch(old)
        with torch.no_grad():
            for p in self.prepare:
                if old is not None and changed.isdisjoint(p.sources):
                    values.update((t, old.values[t]) for t in p.outputs)
                else:
                    got = p.compute([values[s] for s in p.sources])
                    values.update(zip(p.outputs, got, strict=True))
                    changed.update(p.outputs)
            derived = [
                d.compute([values[s] for s in d.sources])
                if old is None or not changed.isdisjoint(d.sources)
                else old.derived[i]
                for i, d in enumerate(self.derived)
            ]
        tensors = [values[t] for t in self.order]
        return Snapshot(
            values, tensors, [t.data_ptr() for t in tensors],
            derived, [t.data_ptr() for t in derived], self._checks(values), self._versions(values),
        )  # fmt: skip

    def _fetch(self, old: Snapshot | None) -> tuple[dict[Tensor, torch.Tensor], set[Tensor]]:
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
