"""One case of bench/gpu/kernels.py: a MODEL as one region, its generated variants, their memory.

No planner takes part: the whole graph is one region, or the case says why it can't be.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from onchip.algebra import simplify
from onchip.backends.cuda import build as engine_build
from onchip.backends.cuda.problem import Config
from onchip.backends.cuda.source import CudaSource
from onchip.backends.nvidia.build import Built
from onchip.backends.triton import build as triton_build
from onchip.backends.triton.source import Options, Variant
from onchip.capture import Captured, capture, constant_tensors
from onchip.capture.containers import flatten
from onchip.capture.schema import is_view
from onchip.errors import CompilerError, OnchipError
from onchip.fusion.layout import choose_layouts, extent
from onchip.fusion.machine import Gpu
from onchip.fusion.nest import build_nest
from onchip.fusion.refusal import Refusal
from onchip.fusion.region import Region, region_of
from onchip.ir.expr import Tensor
from onchip.models import resolve
from onchip.planning.candidates import Candidate, Context
from onchip.planning.generators import cuda
from onchip.planning.generators.triton import TritonGenerator
from onchip.planning.values import torch_dtype
from onchip.report import bench_replay as replay
from onchip.report.bench_suites import Case
from onchip.runtime.verify import relative_error

GUARD = 4096  # bytes before and behind each output that must stay as they are
POISON = 0xFF  # NaN in every floating-point type
# fields that every label of a variant has
LABELLED = {Options: {"lanes", "warps"}, Config: {f.name for f in fields(Config)} - {"r_stages"}}

Generator = TritonGenerator | cuda.CudaGenerator
AnyVariant = Variant | cuda.Variant | cuda.NoVariant


def _extents(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def _yes(text: str) -> bool:
    return text.lower() in ("1", "true")


def _fields() -> dict[str, Callable[[str], Any]]:
    """What can be swept, and how a value is read."""
    found: dict[str, Callable[[str], Any]] = {f.name: int for f in fields(Config)}
    for name in Options.__dataclass_fields__:
        kind = type(getattr(Options(), name))
        if kind in (bool, int, str):
            found[name] = _yes if kind is bool else kind
    return found | {"patch": _extents, "strip": int}


FIELDS = _fields()


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to try in place of the proposed variants' choices: tiles of the root (of Triton's
    variants), and values for fields of Options or of the engine's Config; a variant that has no
    such field stays as it is. Empty: what the proposals have."""

    tiles: tuple[tuple[int, ...], ...] = ()
    fields: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def variants(self, base: AnyVariant) -> Iterator[tuple[str, AnyVariant | Refusal]]:
        """What comes of one proposal, by label."""
        match base:
            case cuda.NoVariant():
                yield base.label, base
            case cuda.Variant():
                for label, config in self._chosen(base.config):
                    v = replace(base, config=config)
                    yield v.label + label, v
            case Variant():
                yield from self._nests(base)

    def _nests(self, base: Variant) -> Iterator[tuple[str, Variant | Refusal]]:
        staged = tuple(st.staged for st in base.nest.stages)
        for tile in self.tiles or (base.nest.tile,):
            nest = base.nest
            if tile != nest.tile:
                built = build_nest(staged, nest.root, tile)
                if isinstance(built, Refusal):
                    yield f"tile {tile}", built
                    continue
                nest = replace(built, before=nest.before)
            for label, options in self._chosen(base.options):
                v = Variant(nest, options)
                yield v.label + label, v

    def _chosen(self, base: Any) -> Iterator[tuple[str, Any]]:
        """Choices with all combinations of the fields that they have, and what their labels would
        not show."""
        kind = type(base)
        own = [(n, v) for n, v in self.fields if n in kind.__dataclass_fields__]
        for chosen in itertools.product(*(values for _, values in own)):
            more = dict(zip((name for name, _ in own), chosen, strict=True))
            unseen = "".join(f", {k}={x}" for k, x in more.items() if k not in LABELLED[kind])
            yield unseen, replace(base, **more)


def build_all(candidates: Sequence[Candidate], gpu: Gpu) -> list[Built | CompilerError]:
    """Every candidate, whatever it is written in; those that the planner would not time (spills),
    too."""
    made: dict[Candidate, Built | CompilerError] = {}
    for build, engine in ((engine_build.build_all, True), (triton_build.build_all, False)):
        some = [c for c in candidates if isinstance(c.source, CudaSource) is engine]
        if some:
            made |= zip(some, build([c.source for c in some], gpu), strict=True)
    return [made[c] for c in candidates]


@dataclass(eq=False)
class Subject:
    """A case, captured on the CPU. candidates by label; refused: variants that the emitter can't
    write, and why."""

    case: Case
    module: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]
    captured: Captured
    region: Region
    context: Context
    candidates: dict[str, Candidate]
    refused: dict[str, str]

    @property
    def nbytes(self) -> int:
        """What any program must move: inputs, weights and results, each once."""
        return sum(t.nbytes for t in (*self.region.inputs, *self.region.outputs))


def prepare(case: Case, generator: Generator, sweep: Sweep) -> Subject:
    """Capture a case and write its variants. Raises OnchipError if it is no one region."""
    found = resolve(case.model, batch=case.batch, dtype=case.dtype)
    with torch.no_grad():
        captured = simplify(capture(found.module, found.example_inputs))
    graph = captured.graph
    for n in graph.nodes:
        if n.opaque:
            raise OnchipError(f"{case.name}: {n.name} is the library's: {n.opaque}")
    constants = frozenset(constant_tensors(graph)) | frozenset(graph.constants)
    region = region_of(graph.nodes, graph, constants, {n: i for i, n in enumerate(graph.nodes)})
    context = Context(
        choose_layouts(graph, lambda n: is_view(n.call.target)),
        constants,
        frozenset({*graph.inputs, *graph.constants, *(t for n in graph.nodes for t in n.results)}),
    )
    proposed = generator.variants(region, context)
    if isinstance(proposed, Refusal):
        raise OnchipError(f"{case.name}: {proposed}")
    write: Callable[..., Candidate | Refusal] = generator.write  # it knows its own variants
    s = Subject(case, found.module, found.example_inputs, captured, region, context, {}, {})
    for base in proposed:
        for label, v in sweep.variants(base):
            if label in s.candidates or label in s.refused:
                continue
            made = v if isinstance(v, Refusal) else write(s.region, v, s.context)
            if isinstance(made, Refusal):
                s.refused[label] = str(made)
            else:
                s.candidates[label] = made
    return s


# ---- memory ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Guarded:
    """A tensor inside poisoned memory."""

    raw: torch.Tensor
    tensor: torch.Tensor

    def poison(self) -> None:
        self.raw.fill_(POISON)

    def intact(self) -> bool:
        """Nothing was written outside of the tensor's memory."""
        ends = torch.cat([self.raw[:GUARD], self.raw[-GUARD:]])
        return bool((ends == POISON).all())


def guarded(t: Tensor, strides: tuple[int, ...], device: str) -> Guarded:
    """Poisoned memory for a tensor of the graph."""
    dtype = torch_dtype(t)
    nbytes = extent(t.shape, strides) * dtype.itemsize
    raw = torch.full((2 * GUARD + nbytes,), POISON, dtype=torch.uint8, device=device)
    whole = raw[GUARD : GUARD + nbytes].view(dtype)
    return Guarded(raw, whole.as_strided(t.shape, strides))


@dataclass(frozen=True, eq=False, slots=True)
class Sets:
    """A subject's tensors on a device, several sets of them.

    inputs      the module's, by set
    values      of the graph's inputs and constants, by set
    outputs     the region's, by set
    """

    subject: Subject
    device: str
    inputs: list[tuple[torch.Tensor, ...]]
    values: list[dict[Tensor, torch.Tensor]]
    outputs: list[dict[Tensor, Guarded]]


def on_device(s: Subject, device: str, count: int) -> Sets:
    """`count` sets; the subject's module moves to the device."""
    s.module = s.module.to(device)
    given = replay.rotated([x.to(device) for x in s.inputs], count)
    fixed = {t: slot.fetch().detach() for t, slot in s.captured.slots.items()}
    with torch.no_grad():
        for p in s.captured.prepare:
            fixed |= zip(p.outputs, p.compute([fixed[x] for x in p.sources]), strict=True)
    values = [fixed | dict(zip(s.captured.graph.inputs, x, strict=True)) for x in given]
    strides = s.context.strides
    outputs = [{t: guarded(t, strides[t], device) for t in s.region.outputs} for _ in given]
    return Sets(s, device, given, values, outputs)


@dataclass(frozen=True, eq=False, slots=True)
class Memory:
    """A candidate's own tensors, the same for every set."""

    derived: list[torch.Tensor]
    workspace: list[torch.Tensor]

    def disturbed(self, c: Candidate) -> bool:
        """A workspace that must be left full of zeros is not."""
        pairs = zip(c.workspace, self.workspace, strict=True)
        return any(bool(t.any()) for w, t in pairs if w.zeroed)


def memory_of(c: Candidate, sets: Sets) -> Memory:
    """Derived values; workspaces poisoned, or zeros where the kernel wants them."""
    first = sets.values[0]
    derived = [d.compute([first[t] for t in d.sources]).to(sets.device) for d in c.derived]
    workspace = [
        torch.full((w.nbytes,), 0 if w.zeroed else POISON, dtype=torch.uint8, device=sets.device)
        for w in c.workspace
    ]
    return Memory(derived, workspace)


def tensors_of(c: Candidate, m: Memory, sets: Sets, n: int) -> list[torch.Tensor]:
    """The kernel's tensors for set `n`, in the order of its pointers."""
    read = (sets.values[n][t] for t in c.inputs)
    return [*read, *m.derived, *(sets.outputs[n][t].tensor for t in c.outputs), *m.workspace]


# ---- what is right -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Truth:
    """Float64's results by tensor of the graph, and eager's distance from them."""

    exact: dict[Tensor, Any]
    eager_error: float


def truth(sets: Sets) -> Truth:
    """Run the module as given and in float64, on the first set."""
    s = sets.subject
    with torch.no_grad():
        eager, _ = flatten(s.module(*sets.inputs[0]))
        double = copy.deepcopy(s.module).double()
        wide = [x.double() if x.is_floating_point() else x for x in sets.inputs[0]]
        exact, _ = flatten(double(*wide))
    error = max(relative_error(a, b) for a, b in zip(eager, exact, strict=True))
    return Truth(dict(zip(s.captured.graph.output_tensors, exact, strict=True)), error)


def fault(sets: Sets, expected: Truth, n: int) -> tuple[float, str]:
    """(relative error against float64, what is wrong or "") of the outputs of a set."""
    worst = 0.0
    for t, g in sets.outputs[n].items():
        if not g.intact():
            return float("inf"), f"it wrote outside of {t.name}"
        if t not in expected.exact:
            return float("inf"), f"{t.name} is no result of the module"
        worst = max(worst, relative_error(g.tensor, expected.exact[t]))
    limit = max(4 * expected.eager_error, 2e-6)
    wrong = f"error {worst:.1e}, eager's {expected.eager_error:.1e}"
    return worst, "" if worst <= limit else wrong
