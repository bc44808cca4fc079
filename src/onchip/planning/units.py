"""Groups of the partition with the kernels that could run them. Isomorphic groups share them: code
is written once for each kind of region, and for a kind whose verdict is known, only what was
chosen."""

from __future__ import annotations

import functools
import hashlib
import heapq
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import onchip
from onchip.analysis.work import flops
from onchip.capture.schema import is_view
from onchip.fusion.partition import Group, Partitioner
from onchip.fusion.refusal import Refusal
from onchip.fusion.region import Region
from onchip.fusion.signature import numbered
from onchip.ir.expr import Tensor
from onchip.planning.candidates import Candidate, Context, completed
from onchip.planning.generators import Generator
from onchip.planning.records import describe
from onchip.planning.tuner import Verdict, load_verdict
from onchip.settings import Settings

# The part of the budget that compiling may take.
COMPILE_SHARE = 0.15
# Floating-point operations in the time that one byte takes: only to compare kinds of regions.
FLOPS_PER_BYTE = 8


@dataclass(frozen=True, eq=False, slots=True)
class Unit:
    """One group of the partition. candidates: kernels that may run it, by the number that their
    verdict knows them by; refusal: why there can't be any; refused: variants that were chosen and
    could not be written, as a Verdict has them; left_out: variants beyond what is worth compiling.
    """

    group: Group
    region: Region
    key: str
    candidates: Mapping[int, Candidate]
    refusal: Refusal | None
    refused: tuple[tuple[str, str], ...] = ()
    left_out: int = 0

    def completed(self, index: int, built: object) -> Unit:
        """With what building one of its candidates has told of it."""
        found = completed(self.candidates[index], built)
        return replace(self, candidates={**self.candidates, index: found})


@dataclass(frozen=True, eq=False, slots=True)
class _Written:
    """See Unit."""

    candidates: Mapping[int, Candidate] = field(default_factory=dict)
    refusal: Refusal | None = None
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class _Kind:
    """A set of isomorphic regions, by the first of them."""

    region: Region
    tensors: tuple[Tensor, ...]
    variants: Mapping[int, Any]
    refusal: Refusal | None = None


def most_sources(settings: Settings, generator: Generator) -> int:
    """Kernels that may be compiled for one specialisation (each kind of region gets one)."""
    seconds = settings.budget_s * COMPILE_SHARE * (os.cpu_count() or 1)
    return int(seconds / generator.seconds_per_kernel)


def find_units(
    groups: Sequence[Group],
    partitioner: Partitioner,
    generator: Generator,
    context: Context,
    most: int,
) -> tuple[list[Unit], dict[str, Verdict]]:
    """Units in the groups' order, and the verdicts that are known already. `most`: sources worth
    compiling, beyond one for each kind."""
    places: list[tuple[Group, Region, str, tuple[Tensor, ...]]] = []
    for g in groups:
        region = partitioner.region(g.nodes)
        text, tensors = numbered(region, context.strides, context.constants)
        # an operator may be the library's for its place in the graph: another kind, then
        text = f"library only\n{text}" if g.opaque else text
        places.append((g, region, key := _key(text, generator), tensors))
        describe(key, region.name)
    kinds, known = _kinds(places, generator, context)
    limits = _limits(kinds, known, [key for _, _, key, _ in places], most)
    written: dict[str, _Written] = {}
    for k, kind in kinds.items():
        chosen = [known[k].index] if k in known else range(limits[k])
        written[k] = _write(kind, chosen, generator, context)
    units = []
    for g, region, k, tensors in places:
        if g.opaque:
            units.append(Unit(g, region, k, {}, partitioner.own_refusal(g.nodes[0])))
            continue
        found = written.get(k, _Written())
        moved = _moved(found.candidates, kinds.get(k), region, tensors)
        left_out = len(kinds[k].variants) - limits[k] if k in limits else 0
        units.append(Unit(g, region, k, moved, found.refusal, found.refused, left_out))
    return units, known


def _kinds(
    places: Sequence[tuple[Group, Region, str, tuple[Tensor, ...]]],
    generator: Generator,
    context: Context,
) -> tuple[dict[str, _Kind], dict[str, Verdict]]:
    """The first region of each kind that kernels might run, and the stored verdicts."""
    kinds: dict[str, _Kind] = {}
    known: dict[str, Verdict] = {}
    if generator.problem:
        return kinds, known
    for group, region, key, tensors in places:
        if key in kinds or group.opaque or _launches_nothing(group):
            continue
        verdict = load_verdict(key)
        if verdict is not None:
            known[key] = verdict
        if verdict is not None and verdict.kind != "kernel":
            kinds[key] = _Kind(region, tensors, {})
            continue
        if verdict is not None and verdict.token:
            chosen = generator.again(region, verdict.token, context)
            if chosen is not None:
                kinds[key] = _Kind(region, tensors, {verdict.index: chosen})
                continue
        match generator.variants(region, context):
            case Refusal() as refusal:
                kinds[key] = _Kind(region, tensors, {}, refusal)
            case ways:
                kinds[key] = _Kind(region, tensors, dict(enumerate(ways)))
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
    generator: Generator,
    context: Context,
) -> _Written:
    """The chosen variants' kernels, equal ones once; if none can be written, the first that can."""
    out: dict[int, Candidate] = {}
    texts: set[str] = set()
    first = kind.refusal
    refused: list[tuple[str, str]] = []
    rest = [i for i in kind.variants if i not in chosen]
    for i in [*chosen, *rest]:
        if i not in kind.variants or (i not in chosen and out):
            continue
        c = generator.write(kind.region, kind.variants[i], context)
        if isinstance(c, Refusal):
            first = first or c
            refused.append((kind.variants[i].label, str(c)))
        elif c.source.text not in texts:
            texts.add(c.source.text)
            out[i] = c
    return _Written(out, None if out else first, tuple(refused))


def _moved(
    found: Mapping[int, Candidate], kind: _Kind | None, region: Region, tensors: tuple[Tensor, ...]
) -> Mapping[int, Candidate]:
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


def by_turns(kinds: Mapping[str, Unit]) -> list[tuple[tuple[str, int], Candidate]]:
    """The first candidate of each kind of region, heaviest kinds first; then the second ones..."""
    turns = [
        (turn, -work(u.region), (k, i))
        for k, u in kinds.items()
        for turn, i in enumerate(u.candidates)
    ]
    return [((k, i), kinds[k].candidates[i]) for _, _, (k, i) in sorted(turns)]


def work(region: Region) -> float:
    """A region's cost in no unit, to compare it with others of the same program."""
    bytes_moved = sum(t.nbytes for t in (*region.inputs, *region.outputs))
    return bytes_moved + sum(flops(t) for t in region.tensors) / FLOPS_PER_BYTE


def _launches_nothing(group: Group) -> bool:
    return all(is_view(n.call.target) for n in group.nodes)


def _key(text: str, generator: Generator) -> str:
    machine = repr(generator.machine)
    parts = [text, machine, torch.__version__, code_version(), generator.name, *generator.key]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@functools.cache
def code_version() -> str:
    """Hash of the sources that decide what candidates there are."""
    h = hashlib.sha256()
    root = Path(onchip.__file__).parent
    for folder in ("ir", "ops", "analysis", "algebra", "fusion", "backends", "planning"):
        for f in sorted((root / folder).rglob("*")):
            if f.suffix in (".py", ".h", ".cuh"):
                h.update(f.read_bytes())
    return h.hexdigest()
