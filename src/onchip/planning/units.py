"""Groups of the partition with the kernels that could run them. Isomorphic groups share them: code
is written once for each kind of region, and for a kind whose verdict is known, only what was
chosen."""

from __future__ import annotations

import functools
import hashlib
import heapq
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import onchip
from onchip.analysis.work import flops
from onchip.backends.cpp.compiler import compiler_version, find_compiler, target_macros
from onchip.capture.schema import is_view
from onchip.errors import CompilerError
from onchip.fusion.machine import Machine
from onchip.fusion.partition import Group, Partitioner
from onchip.fusion.refusal import Refusal
from onchip.fusion.region import Region
from onchip.fusion.signature import numbered
from onchip.ir.expr import Tensor
from onchip.planning.candidates import Candidate, Variant, variants, write
from onchip.planning.tuner import Verdict, load_verdict
from onchip.settings import Settings

# What one kernel takes to compile, and the part of the budget that compiling may take.
SECONDS_PER_KERNEL = 0.5
COMPILE_SHARE = 0.15
# Floating-point operations in the time that one byte takes: only to compare kinds of regions.
FLOPS_PER_BYTE = 8


@dataclass(frozen=True, eq=False, slots=True)
class Unit:
    """One group of the partition. candidates: kernels that may run it, by the number that their
    verdict knows them by; refusal: why there can't be any."""

    group: Group
    region: Region
    key: str
    candidates: Mapping[int, Candidate]
    refusal: Refusal | None


@dataclass(frozen=True, eq=False, slots=True)
class _Kind:
    """A set of isomorphic regions, by the first of them."""

    region: Region
    tensors: tuple[Tensor, ...]
    variants: Sequence[Variant]
    refusal: Refusal | None = None


def most_sources(settings: Settings) -> int:
    """Kernels that may be compiled for one specialisation (each kind of region gets one)."""
    seconds = settings.budget_s * COMPILE_SHARE * (os.cpu_count() or 1)
    return int(seconds / SECONDS_PER_KERNEL)


def find_units(
    groups: Sequence[Group],
    partitioner: Partitioner,
    available: frozenset[Tensor],
    machine: Machine,
    most: int,
    fewer_products: bool = True,
) -> tuple[list[Unit], dict[str, Verdict]]:
    """Units in the groups' order, and the verdicts that are known already. `available`: tensors
    that exist when the program runs. `most`: sources worth compiling, beyond one for each kind.
    fewer_products: 3-tap convolutions may take Winograd's form."""
    strides, constants = partitioner.strides, partitioner.constants
    places: list[tuple[Group, Region, str, tuple[Tensor, ...]]] = []
    for g in groups:
        region = partitioner.region(g.nodes)
        text, tensors = numbered(region, strides, constants)
        # an operator may be the library's for its place in the graph: another kind, then
        text = f"library only\n{text}" if g.opaque else text
        key = _key(text if fewer_products else f"all products\n{text}", machine)
        places.append((g, region, key, tensors))
    kinds, known = _kinds(places, partitioner, fewer_products)
    limits = _limits(kinds, known, [key for _, _, key, _ in places], most)
    written: dict[str, dict[int, Candidate] | Refusal] = {}
    for k, kind in kinds.items():
        chosen = [known[k].index] if k in known else range(limits[k])
        written[k] = _write(kind, chosen, strides, constants, available)
    units = []
    for g, region, k, tensors in places:
        found = partitioner.own_refusal(g.nodes[0]) if g.opaque else written.get(k, {})
        if isinstance(found, Refusal):
            units.append(Unit(g, region, k, {}, found))
        else:
            units.append(Unit(g, region, k, _moved(found, kinds.get(k), region, tensors), None))
    return units, known


def _kinds(
    places: Sequence[tuple[Group, Region, str, tuple[Tensor, ...]]],
    partitioner: Partitioner,
    fewer_products: bool,
) -> tuple[dict[str, _Kind], dict[str, Verdict]]:
    """The first region of each kind that kernels might run, and the stored verdicts."""
    kinds: dict[str, _Kind] = {}
    known: dict[str, Verdict] = {}
    for group, region, key, tensors in places:
        if key in kinds or group.opaque or _launches_nothing(group) or not have_compiler():
            continue
        verdict = load_verdict(key)
        if verdict is not None:
            known[key] = verdict
        if verdict is not None and verdict.kind != "kernel":
            kinds[key] = _Kind(region, tensors, ())
            continue
        p = partitioner
        ways = variants(region, p.strides, p.constants, p.machine, fewer_products)
        match ways:
            case Refusal():
                kinds[key] = _Kind(region, tensors, (), ways)
            case _:
                kinds[key] = _Kind(region, tensors, ways)
    return kinds, known


def _limits(
    kinds: dict[str, _Kind], known: dict[str, Verdict], keys: list[str], most: int
) -> dict[str, int]:
    """How many variants of each kind without a verdict are built."""
    wishes = {k: len(x.variants) for k, x in kinds.items() if k not in known}
    return share_out(wishes, {k: work(kinds[k].region) * keys.count(k) for k in wishes}, most)


def _write(
    kind: _Kind,
    chosen: Sequence[int],
    strides: dict[Tensor, tuple[int, ...]],
    constants: frozenset[Tensor],
    available: frozenset[Tensor],
) -> dict[int, Candidate] | Refusal:
    """The chosen variants' kernels, equal ones once; if none can be written, the first that can."""
    out: dict[int, Candidate] = {}
    texts: set[str] = set()
    refused = kind.refusal
    rest = [i for i in range(len(kind.variants)) if i not in chosen]
    for i in [*chosen, *rest]:
        if i >= len(kind.variants) or (i not in chosen and out):
            continue
        c = write(kind.region, kind.variants[i], strides, constants, available)
        if isinstance(c, Refusal):
            refused = refused or c
        elif c.source.text not in texts:
            texts.add(c.source.text)
            out[i] = c
    return refused if refused is not None and not out else out


def _moved(
    found: dict[int, Candidate], kind: _Kind | None, region: Region, tensors: tuple[Tensor, ...]
) -> dict[int, Candidate]:
    if kind is None or kind.region is region:
        return found
    same = dict(zip(kind.region.tensors, region.tensors, strict=True))
    same |= dict(zip(kind.tensors, tensors, strict=True))
    return {i: c.moved(region, same) for i, c in found.items()}


def share_out(wishes: Mapping[str, int], weights: Mapping[str, float], most: int) -> dict[str, int]:
    """How many of its wishes each kind gets: one at least, `most` together beyond that only if
    there are more kinds. Apportioned by weight (D'Hondt), so heavy kinds get more."""
    given = {k: min(1, n) for k, n in wishes.items()}
    queue = [(-weights[k] / 2, n, k) for n, k in enumerate(wishes)]
    heapq.heapify(queue)
    left = most - sum(given.values())
    while queue and left > 0:
        _, n, k = heapq.heappop(queue)
        if given[k] < wishes[k]:
            given[k] += 1
            left -= 1
            heapq.heappush(queue, (-weights[k] / (given[k] + 1), n, k))
    return given


def work(region: Region) -> float:
    """A region's cost in no unit, to compare it with others of the same program."""
    bytes_moved = sum(t.nbytes for t in (*region.inputs, *region.outputs))
    return bytes_moved + sum(flops(t) for t in region.tensors) / FLOPS_PER_BYTE


def _launches_nothing(group: Group) -> bool:
    return all(is_view(n.call.target) for n in group.nodes)


def have_compiler() -> bool:
    try:
        find_compiler()
    except CompilerError:
        return False
    return True


def _key(text: str, machine: Machine) -> str:
    parts = [text, repr(machine), torch.__version__, _code_version()]
    if have_compiler():
        parts += [compiler_version(), *sorted(target_macros())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _code_version() -> str:
    """Hash of the sources that decide what candidates there are."""
    h = hashlib.sha256()
    root = Path(onchip.__file__).parent
    for folder in ("ir", "ops", "fusion", "backends", "planning"):
        for f in sorted((root / folder).rglob("*")):
            if f.suffix in (".py", ".h"):
                h.update(f.read_bytes())
    return h.hexdigest()
