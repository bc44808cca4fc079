"""Ways to run a region as several phases: large folds cut into chunks for many programs, what they
give combined, and what depends on the whole computed from that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from onchip.backends.triton.phases import handed_on_strides
from onchip.backends.triton.source import Options, Variant
from onchip.fusion.chunks import Cutting
from onchip.fusion.inline import inline
from onchip.fusion.machine import Gpu
from onchip.fusion.phases import phase_groups, together_or_each
from onchip.fusion.refusal import Refusal
from onchip.fusion.staging import Staged
from onchip.ir.expr import Expr, Tensor, reduces

Strides = tuple[int, ...]
Ways = Callable[[tuple[Staged, ...], dict[Tensor, Strides]], list[Variant] | Refusal]

# Elements of a chunk that is folded twice: it stays in one program's registers.
CHUNK = 8192
# Variants of a kernel of several phases.
MOST = 3


def cutting(gpu: Gpu, longest_row: int, chunk: int = CHUNK) -> Cutting:
    """How folds are cut for a GPU: several programs a multiprocessor, no strands."""
    return Cutting(
        elements=chunk,
        strands=1,
        smallest=1 << 12,
        tiles=4 * gpu.multiprocessors,
        longest=longest_row + 1,
        rows=64,
        items=8 * gpu.multiprocessors,
        columns=256,
        programs=8 * gpu.multiprocessors,
    )


def phased_variants(
    staged: tuple[Staged, ...],
    strides: dict[Tensor, Strides],
    gpu: Gpu,
    how: Cutting,
    needed: bool,
    ways: Ways,
) -> list[Variant] | Refusal | None:
    """One function a phase; None where no fold is worth cutting. needed: no single nest exists;
    ways: variants of a single nest."""
    groups = phase_groups(staged, strides, needed, how, gpu.l2_bytes // 2)
    if not isinstance(groups, list):
        return groups
    strides = strides | handed_on_strides((s for g in groups for s in g if s.shared), strides)
    phases: list[list[Variant]] = []
    for group in groups:
        found = together_or_each(group, lambda g: ways(g, strides))
        if isinstance(found, Refusal):
            return found
        phases += found
    most = min(max(map(len, phases)), MOST)
    return [in_turn([p[min(n, len(p) - 1)] for p in phases]) for n in range(most)]


def without_values_on_the_way(staged: tuple[Staged, ...]) -> tuple[Staged, ...]:
    """The stages without those that would only keep a row's elements for later ones (softmax's
    exponentials): no phase holds a row, so they are evaluated where they are read."""
    bodies: dict[Tensor, Expr] = {}
    out = []
    for s in staged:
        body = inline(s.body, bodies)
        if s.is_output or reduces(body) or s.store != s.tensor.axes:
            out.append(replace(s, body=body))
        else:
            bodies[s.tensor] = body
    return tuple(out)


def in_turn(phases: list[Variant]) -> Variant:
    """One kernel of several nests, one after the other."""
    *before, last = phases
    nest = replace(last.nest, before=tuple(v.nest for v in before))
    options: Options = replace(last.options, before=tuple(v.options for v in before))
    return Variant(nest, options)
