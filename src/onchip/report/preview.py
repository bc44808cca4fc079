"""The kernels of a model on a GPU that need not be here: written, compiled, examined, not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onchip.analysis.cost import Pricer
from onchip.analysis.record import KernelRow
from onchip.analysis.roofline import Ceilings
from onchip.analysis.traffic import Ledger
from onchip.backends.nvidia.build import Built
from onchip.backends.triton.build import triton_version
from onchip.capture.captured import Captured
from onchip.capture.cleanup import constant_tensors
from onchip.capture.schema import is_view
from onchip.errors import CompilerError, OnchipError
from onchip.fusion.layout import choose_layouts
from onchip.fusion.machine import GPUS, Gpu
from onchip.fusion.partition import Group, Partitioner
from onchip.fusion.refusal import Refusal
from onchip.fusion.region import Region
from onchip.fusion.signature import signature
from onchip.planning.candidates import Candidate, Context
from onchip.planning.cut import cut_in_two
from onchip.planning.generators import Generator, generator_for_gpu
from onchip.planning.planner import copying_views
from onchip.planning.relayout import relayout_cut, with_channels_last
from onchip.report.build import built_figures, kernel_row, launched

Progress = Callable[[str, int, int], None]

MOST_TRIED = 4  # variants of one kind of region that are compiled until one is within budget


@dataclass(frozen=True, eq=False, slots=True)
class Preview:
    """One launch of the program. row: its figures, measured time unknown; text: its source, "" of
    a library call; refused: (variant, why) of what was tried before, and why there is no kernel."""

    row: KernelRow
    text: str = ""
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(eq=False)
class _Kind:
    """Isomorphic regions, by the first of them, and what became of its variants."""

    region: Region
    variants: list[Any]
    refused: list[tuple[str, str]] = field(default_factory=list)
    chosen: tuple[Candidate, Built] | None = None


def gpu_named(device: str) -> Gpu:
    """A GPU that kernels can be written for without having it; OnchipError names those."""
    key = device.lower().replace("-", "").replace("_", "").replace("nvidia ", "")
    if key not in GPUS:
        known = ", ".join(GPUS)
        raise OnchipError(f"no kernels are generated for device {device!r}: use cpu, cuda, {known}")
    return GPUS[key]


def preview(
    captured: Captured, gpu: Gpu, ceilings: Ceilings, progress: Progress = lambda *_: None
) -> tuple[Preview, ...]:
    """Partition a captured model for the GPU and compile each group's most promising variant (the
    next one, where that can't be compiled or is over budget). Times are the cost model's,
    launches priced as nodes of a CUDA graph. CompilerError if Triton is not installed."""
    triton_version()
    generator = generator_for_gpu(gpu)
    if generator.pads_operands:
        captured = with_channels_last(captured)
    layouts = choose_layouts(captured.graph, lambda n: is_view(n.call.target))
    graph = copying_views(captured.graph, layouts)
    constants = frozenset(constant_tensors(graph)) | frozenset(graph.constants)
    results = (t for n in graph.nodes for t in n.results)
    context = Context(layouts, constants, frozenset({*graph.inputs, *graph.constants, *results}))
    progress("partitioning", 0, 0)
    partitioner = Partitioner(
        graph, layouts, constants, generator.root_of, pads_operands=generator.pads_operands
    )
    groups = _apart(partitioner.run().groups, partitioner)
    regions = [partitioner.region(g.nodes) for g in groups]
    keys = [signature(r, layouts, constants) for r in regions]
    kinds = _kinds(groups, regions, keys, generator, context)
    for n in range(MOST_TRIED):
        _compile(kinds, n, generator, context, progress)
    pricer = Pricer(Ledger(graph, layouts), ceilings)
    out: list[Preview] = []
    for group, region, key in zip(groups, regions, keys, strict=True):
        kind = None if group.opaque else kinds.get(key)
        refused = [("", str(partitioner.own_refusal(group.nodes[0])))] if group.opaque else []
        out += _shown(region, kind, refused, pricer)
    return tuple(out)


def _apart(groups: Sequence[Group], partitioner: Partitioner) -> tuple[Group, ...]:
    """The groups, copies to channels-last by themselves: here nothing is measured."""
    out: list[Group] = []
    for g in groups:
        region = partitioner.region(g.nodes)
        cut = None if g.opaque else relayout_cut(region.nodes)
        out += [g] if cut is None else cut_in_two(g, region, cut.first)
    return tuple(out)


def _kinds(
    groups: tuple[Group, ...],
    regions: list[Region],
    keys: list[str],
    generator: Generator,
    context: Context,
) -> dict[str, _Kind]:
    """One for each kind of region that launches something and might be a kernel."""
    kinds: dict[str, _Kind] = {}
    for group, region, key in zip(groups, regions, keys, strict=True):
        views = all(is_view(n.call.target) for n in group.nodes)
        if key in kinds or group.opaque or views:
            continue
        found = generator.variants(region, context)
        if isinstance(found, Refusal):
            kinds[key] = _Kind(region, [], [("", str(found))])
        else:
            kinds[key] = _Kind(region, list(found))
    return kinds


def _compile(
    kinds: Mapping[str, _Kind],
    n: int,
    generator: Generator,
    context: Context,
    progress: Progress,
) -> None:
    """Variant `n` of each kind that has no kernel yet."""
    todo: list[tuple[_Kind, Candidate]] = []
    for kind in kinds.values():
        if kind.chosen is not None or n >= len(kind.variants):
            continue
        written = generator.write(kind.region, kind.variants[n], context)
        if isinstance(written, Refusal):
            kind.refused.append((kind.variants[n].label, str(written)))
        else:
            todo.append((kind, written))
    progress("compiling kernels", 0, len(todo))
    built = generator.build_all([c for _, c in todo])
    for (kind, candidate), made in zip(todo, built, strict=True):
        match made:
            case CompilerError() | Refusal():
                kind.refused.append((candidate.choice, str(made)))
            case _:
                kind.chosen = (candidate, made)


def _shown(
    region: Region,
    kind: _Kind | None,
    refused: list[tuple[str, str]],
    pricer: Pricer,
) -> list[Preview]:
    """A group's kernel; without one, a library call for each of its operators."""
    ledger = pricer.ledger
    own = {n.name: n for n in ledger.graph.nodes}
    nodes = tuple(own[n.name] for n in region.nodes)
    if kind is not None and kind.chosen is not None:
        candidate, built = kind.chosen
        traffic = launched(ledger.kernel(nodes), built)
        row = kernel_row(region.name, nodes, traffic, ledger, {}, pricer)
        row = replace(row, backend=built.backend, choice=candidate.choice, **built_figures(built))
        return [Preview(row, candidate.source.text, tuple(kind.refused))]
    reasons = tuple(refused if kind is None else kind.refused)
    return [
        Preview(
            replace(
                kernel_row(n.name, (n,), ledger.operator(n), ledger, {}, None),
                choice=n.call.target,
                predicted_us=pricer.call_us(n),
            ),
            refused=reasons,
        )
        for n in nodes
        if not ledger.is_free(n)
    ]
