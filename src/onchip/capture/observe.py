"""One eager run of the model, on copies of what it mutates: what its results' strides are, and
whose storage they share. The program reproduces exactly that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from onchip.capture.captured import Result, Slot
from onchip.capture.containers import Spec, flatten, rebuild
from onchip.capture.export import gpus
from onchip.ir.expr import Tensor
from onchip.ir.graph import Graph


def clone_storage(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and offset, overlaps included, on a storage of its own."""
    flat = torch.empty(0, dtype=t.dtype, device=t.device)
    source = t.untyped_storage()
    with torch.no_grad():
        flat.set_(source.clone(), t.storage_offset(), t.shape, t.stride())
    return flat


@contextlib.contextmanager
def mutable_copies(slots: list[Slot]) -> Iterator[dict[int, int]]:
    """Inside, the model holds copies of these tensors. Gives copy's storage -> original's."""
    saved = [(s, s.fetch()) for s in slots]
    copies: dict[int, Any] = {}
    back: dict[int, int] = {}
    try:
        for s, t in saved:
            copy = copies.setdefault(id(t), clone_storage(t.detach()))
            back[_storage(copy)] = _storage(t)
            if s.kind != "value":
                s.place[s.name] = (
                    torch.nn.Parameter(copy, t.requires_grad) if s.kind == "parameter" else copy
                )
        yield back
    finally:
        for s, t in saved:
            if s.kind != "value":
                s.place[s.name] = t


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def observe(
    module: torch.nn.Module, graph: Graph, slots: dict[Tensor, Slot], spec: Spec,
    leaves: list[Any], tensors: list[torch.Tensor],
) -> tuple[tuple[Result, ...], tuple[str, ...], list[Any]]:  # fmt: skip
    """Run eagerly. Returns a Result for each tensor output, the names of attributes that forward
    changes by itself, and the flat output leaves. Neither module nor inputs are changed."""
    mutated = {m.target for m in graph.mutations}
    copies = {
        id(t): clone_storage(t) for g, t in zip(graph.inputs, tensors, strict=True) if g in mutated
    }
    own = [copies.get(id(t), t) for t in tensors]
    by_id = {id(t): c for t, c in zip(tensors, own, strict=True)}
    filled = [by_id.get(id(x), x) if isinstance(x, torch.Tensor) else x for x in leaves]
    args, kwargs = rebuild(spec, filled)
    live = [slots[t] for t in graph.constants if t in mutated]
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=gpus(module, tensors)),
        _attributes(module) as changed,
        mutable_copies(live),
    ):
        out, _ = flatten(module(*args, **kwargs))
        fetched = {t: s.fetch() for t, s in slots.items()}
        results = _results([x for x in out if isinstance(x, torch.Tensor)], own, fetched)
    return results, tuple(changed), out


@contextlib.contextmanager
def _attributes(module: torch.nn.Module) -> Iterator[list[str]]:
    """Collects the plain attributes that change inside, and puts them back."""
    before = [(n, m, dict(m.__dict__)) for n, m in module.named_modules()]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for name, m, old in before:
            for key in set(old) | set(m.__dict__):
                if key not in m.__dict__ or key not in old or m.__dict__[key] is not old[key]:
                    changed.append(f"{name}.{key}".removeprefix("."))
            for key in set(m.__dict__) - set(old):
                del m.__dict__[key]
            m.__dict__.update(old)


def _results(
    out: list[torch.Tensor], inputs: list[torch.Tensor], constants: dict[Tensor, torch.Tensor]
) -> tuple[Result, ...]:
    results: list[Result] = []
    for i, t in enumerate(out):
        found = _base(t, inputs, constants, out[:i], results)
        alias, base = (found[:2], found[2]) if found is not None else (None, t)
        offset = int(t.storage_offset())
        shift = offset * t.itemsize - int(base.storage_offset()) * base.itemsize
        shape, strides = tuple(t.shape), tuple(t.stride())
        results.append(
            Result(
                shape,
                strides,
                offset,
                t.dtype,
                alias,
                found is not None and base is t,
                shift,
            )
        )
    return tuple(results)


def _base(
    t: torch.Tensor,
    inputs: list[torch.Tensor],
    constants: dict[Tensor, torch.Tensor],
    earlier: list[torch.Tensor],
    results: list[Result],
) -> tuple[str, Any, torch.Tensor] | None:
    """The tensor whose storage `t` shares: (kind, key, tensor)."""
    sources: list[tuple[str, Any, torch.Tensor]] = [
        *(("input", i, x) for i, x in enumerate(inputs)),
        *(("constant", c, x) for c, x in constants.items()),
        *(("output", j, x) for j, x in enumerate(earlier) if results[j].alias is None),
    ]
    for source in sources:
        if source[2] is t:
            return source
    pointer = _storage(t)
    if not pointer or t.is_conj() or t.is_neg():  # lazily conjugated: the program computes it
        return None
    return next((s for s in sources if _storage(s[2]) == pointer), None)
