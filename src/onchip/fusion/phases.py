"""The nests of a region: one, or several that run one after the other in one kernel.

A tensor that another stage reads across tiles (a column's mean, the partial results of a fold that
was cut) is complete only when every tile of its nest is done. Such stages get a nest of their own,
a phase; between two phases stands a barrier, and what is handed on lies in a workspace that all
threads see. So batch statistics, normalisation and activation are one launch of three phases:
partial statistics | their combination, by one thread | the normalised tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TypeVar

from onchip.fusion.chunks import CPU, Cutting
from onchip.fusion.contraction import as_contraction
from onchip.fusion.layout import contiguous
from onchip.fusion.machine import Machine
from onchip.fusion.nest import Nest
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.split import shared, split_folds
from onchip.fusion.staging import Staged
from onchip.fusion.tiling import fold_length, single_nests, single_root
from onchip.ir.expr import Axis, Expr, Load, Tensor, loads, reduces, substitute
from onchip.ir.index import structural_key

Strides = tuple[int, ...]
T = TypeVar("T")

# What the phases of one kernel hand on to each other, in bytes: it should stay in the caches.
WORKSPACE_BUDGET = 8 << 20
# A phase of fewer folded elements is one thread's work: handing it out would cost more.
ONE_THREAD = 1 << 14


def nests_for(
    staged: tuple[Staged, ...], strides: dict[Tensor, Strides], machine: Machine
) -> list[Nest] | Refusal:
    """Nests for a region, best guess first; a Refusal names what none of them satisfies."""
    whole = single_nests(staged, strides, machine)
    parts = phased(staged, strides, machine, needed=isinstance(whole, Refusal))
    if not isinstance(parts, Nest):
        return whole
    if isinstance(whole, Refusal):
        return [parts]
    first, *others = whole
    return [parts, *whole] if first.tiles < CPU.tiles else [first, parts, *others]


def nest_root(
    staged: tuple[Staged, ...], strides: dict[Tensor, Strides], machine: Machine
) -> Tensor | Refusal | None:
    """Whether `nests_for` finds a nest: the root of a single one, None if it takes several, or the
    refusal. Cheaper, as no tiles are compared."""
    whole = single_root(staged, strides, machine)
    if isinstance(whole, Refusal) and isinstance(phased(staged, strides, machine), Nest):
        return None
    return whole


def phased(
    staged: tuple[Staged, ...],
    strides: dict[Tensor, Strides],
    machine: Machine,
    needed: bool = False,
) -> Nest | Refusal | None:
    """The last phase, with those before it. None if no fold is worth cutting, unless phases are
    `needed`, and no fold is there at all if they are."""
    groups = phase_groups(staged, strides, needed)
    if not isinstance(groups, list):
        return groups
    shared = (s.tensor for g in groups for s in g if s.shared)
    strides = strides | {t: contiguous(t.shape) for t in shared}
    nests: list[Nest] = []
    for group in groups:
        made = _nests_of(group, strides, machine)
        if isinstance(made, Refusal):
            return made
        nests += made
    return replace(nests[-1], before=tuple(nests[:-1]))


def phase_groups(
    staged: tuple[Staged, ...],
    strides: dict[Tensor, Strides],
    needed: bool,
    how: Cutting = CPU,
    budget: int = WORKSPACE_BUDGET,
) -> list[tuple[Staged, ...]] | Refusal | None:
    """The stages of each phase, their large folds cut; None as in `phased`. budget: bytes that
    the phases may hand on."""
    cut = split_folds(staged, strides, how)
    if len(cut) == len(staged):
        folded = {s.tensor for s in staged if reduces(s.body) and not s.is_output}
        if not needed or not folded:
            return None
        cut = _handed_on(staged, folded)
    for s in staged:
        if any(as_contraction(r, s.loops) is not None for r in reduces(s.body)):
            return Refusal(Rule.SPLIT_PRODUCT, s.tensor.name)
    cut = _handed_on(cut, _folded_twice(_groups(cut)))
    workspace = sum(s.tensor.nbytes for s in cut if s.shared)
    if workspace > budget:
        text = f"{workspace // 1024} KiB of {budget // 1024}"
        return Refusal(Rule.WORKSPACE, staged[-1].tensor.name, text, {"workspace_bytes": workspace})
    return _groups(cut)


def _handed_on(staged: tuple[Staged, ...], tensors: set[Tensor]) -> tuple[Staged, ...]:
    return tuple(shared(s) if s.tensor in tensors else s for s in staged)


def _groups(staged: tuple[Staged, ...]) -> list[tuple[Staged, ...]]:
    """The stages of each phase: stored tensors of one shape, and the scratch that they read."""
    level = _levels(staged)
    found: dict[tuple[int, tuple[int, ...]], list[Staged]] = {}
    for s in staged:
        if s.is_output:
            found.setdefault((level[s.tensor], s.tensor.shape), []).append(s)
    return [with_scratch(found[k], staged) for k in sorted(found, key=lambda k: k[0])]


def _levels(staged: tuple[Staged, ...]) -> dict[Tensor, int]:
    """How many barriers stand before each stage."""
    made = {s.tensor: s for s in staged}
    level: dict[Tensor, int] = {}
    for s in staged:
        before = [(made[ld.src], ld) for ld in loads(s.body) if ld.src in made]
        level[s.tensor] = max(
            (level[t.tensor] + (t.is_output and not _in_step(ld, s, t)) for t, ld in before),
            default=0,
        )
    return level


def _in_step(ld: Load, reader: Staged, made: Staged) -> bool:
    """`reader` reads of `made` the element that it computes itself, over the same loops."""
    if not reader.is_output or reader.tensor.shape != made.tensor.shape:
        return False
    if [a.extent for a in reader.loops] != [a.extent for a in made.loops]:
        return False
    own: dict[Axis, Expr] = dict(zip(made.loops, reader.loops, strict=True))
    return all(
        structural_key(i) == structural_key(substitute(at, own))
        for i, at in zip(ld.index, made.store, strict=True)
    )


def with_scratch(stored: list[Staged], staged: tuple[Staged, ...]) -> tuple[Staged, ...]:
    """`stored` and the stages that only live inside a tile of it, in order."""
    made = {s.tensor: s for s in staged}
    wanted = {s.tensor for s in stored}
    for s in reversed(staged):
        if s.tensor in wanted:
            wanted |= {
                ld.src for ld in loads(s.body) if ld.src in made and not made[ld.src].is_output
            }
    return tuple(s for s in staged if s.tensor in wanted)


def _folded_twice(groups: list[tuple[Staged, ...]]) -> set[Tensor]:
    """Folds that live inside tiles of two phases: they are handed on instead."""
    count = Counter(s.tensor for g in groups for s in g if reduces(s.body))
    return {t for t, n in count.items() if n > 1}


def _nests_of(
    group: tuple[Staged, ...], strides: dict[Tensor, Strides], machine: Machine
) -> list[Nest] | Refusal:
    return together_or_each(group, lambda g: _nest_of(g, strides, machine))


def together_or_each(
    group: tuple[Staged, ...], make: Callable[[tuple[Staged, ...]], T | Refusal]
) -> list[T] | Refusal:
    """What `make` gives for all that a phase stores, or, with no tile in common, for each."""
    found = make(group)
    if not isinstance(found, Refusal):
        return [found]
    stored = [s for s in group if s.is_output]
    if len(stored) == 1:
        return found
    out: list[T] = []
    for s in stored:
        one = make(with_scratch([s], group))
        if isinstance(one, Refusal):
            return one
        out.append(one)
    return out


def _nest_of(
    group: tuple[Staged, ...], strides: dict[Tensor, Strides], machine: Machine
) -> Nest | Refusal:
    found = single_nests(group, strides, machine)
    if isinstance(found, Refusal):
        return found
    work = prod(max(a.extent, 1) for a in found[0].root.loops) * fold_length(group)
    return found[-1] if work <= ONE_THREAD else found[0]
