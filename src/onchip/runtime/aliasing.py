"""Which tensors share storage in a plan, and what each result must do about it."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.capture import schema
from onchip.capture.captured import Captured, Result
from onchip.fusion.layout import extent
from onchip.ir.expr import Tensor
from onchip.planning.plan import CallStep, KernelStep, LibraryStep, Plan


@dataclass(frozen=True, eq=False, slots=True)
class Memory:
    """Facts about storage.

    written           tensors that kernels write -> the step that does
    uses              ... -> that step, and those that read it or a view of it (len(steps): what
                      writes the call's mutations)
    roots             tensors -> those whose storage they may share
    escaping          ... that a caller may hold afterwards: never in the arena
    results           per graph output: "computed" by a step, or "alias" of something that exists
    copies            per graph output: computed on storage that eager's would not share: copy it
    copied_mutations  per mutation: the value reads a tensor that an earlier write changes
    """

    written: dict[Tensor, int]
    uses: dict[Tensor, tuple[int, ...]]
    roots: dict[Tensor, set[Tensor]]
    escaping: set[Tensor]
    results: list[str]
    copies: list[bool]
    copied_mutations: list[bool]


def analyse(captured: Captured, plan: Plan) -> Memory:
    graph = captured.graph
    roots = storage_roots(plan)
    written = {
        t: k for k, s in enumerate(plan.steps) if isinstance(s, KernelStep) for t in s.outputs
    }
    results = ["alias" if _reproducible(captured, r) else "computed" for r in captured.results]
    computed = [t for t, r in zip(graph.outputs, results, strict=True) if r == "computed"]
    escaping = {x for t in computed for x in roots.get(t, {t})} & set(written)
    uses: dict[Tensor, tuple[int, ...]] = {t: (k,) for t, k in written.items()}
    reads = [(k, t) for k, s in enumerate(plan.steps) for t in s.inputs]
    reads += [(len(plan.steps), m.value) for m in graph.mutations]
    for k, t in reads:
        uses.update((x, (*uses[x], k)) for x in roots.get(t, {t}) if x in uses)
    outside = set(graph.inputs) | set(graph.constants)
    copies = _copies(captured, roots, results, outside)
    targets = [m.target for m in graph.mutations]
    late = [
        bool(roots.get(m.value, {m.value}) & set(targets)) and len(targets) > 0
        for m in graph.mutations
    ]
    return Memory(written, uses, roots, escaping, results, copies, late)


def storage_roots(plan: Plan) -> dict[Tensor, set[Tensor]]:
    """Tensor -> tensors whose storage it may share (itself, unless it is a view)."""
    roots: dict[Tensor, set[Tensor]] = {}
    for step in plan.steps:
        match step:
            case KernelStep() | CallStep():
                roots.update((t, {t}) for t in step.outputs)
            case LibraryStep(node=node):
                shared = {node.results[0]} if node.results else set()
                if schema.aliases(node.call.target):
                    shared = {x for t in node.inputs for x in roots.get(t, {t})}
                for t in node.results:
                    own = shared if schema.aliases(node.call.target) else {t}
                    roots[t] = set(own)
    return roots


def _reproducible(captured: Captured, r: Result) -> bool:
    """Whether the result is a view of something that exists when the program ends."""
    match r.alias:
        case None:
            return False
        case ("output", j):
            base = captured.results[j]
            return r.same or (r.dtype == base.dtype and _dense(base) and _inside(r, base))
    return True


def _span(r: Result) -> tuple[int, int]:
    return r.offset, r.offset + extent(r.shape, r.strides)


def _dense(r: Result) -> bool:
    n = 1
    for s in r.shape:
        n *= s
    start, end = _span(r)
    return end - start == n


def _inside(r: Result, base: Result) -> bool:
    (a, b), (c, d) = _span(r), _span(base)
    return c <= a and b <= d


def _copies(
    captured: Captured, roots: dict[Tensor, set[Tensor]], results: list[str], outside: set[Tensor]
) -> list[bool]:
    """A computed result gets its own copy if its storage is an input's or a constant's, or an
    earlier result's that eager keeps apart."""
    copies: list[bool] = []
    seen: dict[Tensor, int] = {}
    for i, (t, r) in enumerate(zip(captured.graph.outputs, captured.results, strict=True)):
        if results[i] != "computed":
            copies.append(False)
            continue
        own = roots.get(t, {t})
        shared_with = {seen[x] for x in own if x in seen}
        partner = r.alias[1] if r.alias is not None and r.alias[0] == "output" else None
        copies.append(bool(own & outside) or bool(shared_with - {partner}))
        if not copies[-1]:
            seen.update((x, i) for x in own)
    return copies
