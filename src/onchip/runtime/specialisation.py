"""A program for one set of layouts, Python values and model state, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onchip.analysis.record import GraphCoverage
from onchip.capture.captured import TENSOR, Captured
from onchip.capture.containers import rebuild
from onchip.capture.devices import device_of
from onchip.ir.expr import Tensor
from onchip.planning.lock import Lock
from onchip.planning.plan import Plan
from onchip.runtime.executable import Executable, write
from onchip.runtime.graphs import Graphs
from onchip.runtime.guards import StateGuard
from onchip.runtime.weights import Snapshot, Weights


@dataclass(eq=False)
class Specialisation:
    """See the file. graphs: on a GPU, once they are wanted."""

    captured: Captured
    plan: Plan
    executable: Executable
    weights: Weights
    state: StateGuard
    ambient: tuple[Any, ...]
    device: torch.device
    positions: list[int] | None  # flat leaf of each graph input; None: leaves are the inputs
    mutated: list[int]  # graph inputs that are written
    mutated_constants: list[Tensor]
    graphs: Graphs | None = None
    used: int = 0
    # weights that a caller's CUDA graph reads: it may be replayed as long as this exists
    pinned: list[Snapshot] = field(default_factory=list)
    gpu: int | None = field(init=False)  # its index

    def __post_init__(self) -> None:
        self.gpu = self.device.index if self.device.type == "cuda" else None

    @property
    def writes(self) -> bool:
        return bool(self.mutated or self.mutated_constants)

    @property
    def coverage(self) -> GraphCoverage | None:
        """What runs as a CUDA graph; None on a CPU."""
        if self.gpu is None:
            return None
        if self.graphs is None:
            return GraphCoverage(False, 'no CUDA graph: Settings(cuda_graph="off")')
        return self.graphs.coverage

    def inputs(self, leaves: Sequence[Any]) -> Sequence[torch.Tensor]:
        return leaves if self.positions is None else [leaves[i] for i in self.positions]

    def prepare_graphs(self, inputs: Sequence[torch.Tensor], lock: Lock | None = None) -> None:
        """On a GPU: find out whether CUDA graphs pay, or do what the lock file says. Neither
        inputs nor buffers change."""
        if self.gpu is None:
            return
        self.graphs = Graphs(
            self.captured, self.plan, self.executable, self.device, self.mutated,
            self.mutated_constants,
        )  # fmt: skip
        with torch.cuda.device(self.device):
            if not torch.cuda.is_current_stream_capturing():
                now = self.weights.current()
                now.used_on(torch.cuda.current_stream().cuda_stream)
                self.graphs.prepare(inputs, now, lock.graph if lock is not None else None)
                if lock is not None:
                    lock.settle_graph(self.graphs.choice)

    def run(self, leaves: Sequence[Any]) -> Any:
        inputs = self.inputs(leaves)
        if self.gpu is None:
            now = self.weights.current()
            return self.rebuild(self._launch(inputs, now, 0))
        if torch._C._cuda_getDevice() == self.gpu:
            return self._run_on_gpu(inputs, self.gpu)
        with torch.cuda.device(self.device):
            return self._run_on_gpu(inputs, self.gpu)

    def _run_on_gpu(self, inputs: Sequence[torch.Tensor], gpu: int) -> Any:
        """Enqueue the call on the current stream."""
        now = self.weights.current()
        if torch.cuda.is_current_stream_capturing():
            return self.rebuild(self._be_captured(inputs, now))
        stream = torch._C._cuda_getCurrentRawStream(gpu)
        now.used_on(stream)
        flat = self.graphs.run(inputs, now, stream) if self.graphs is not None else None
        return self.rebuild(self._launch(inputs, now, stream) if flat is None else flat)

    def _be_captured(self, inputs: Sequence[torch.Tensor], now: Snapshot) -> list[torch.Tensor]:
        """Become part of a graph that the caller records: the arena is memory of that graph."""
        if not any(s is now for s in self.pinned):
            self.pinned.append(now)
        early = self.graphs is not None and self.graphs.executable.early
        form = replace(self.executable, early=early)
        return form.call(inputs, now, form.arenas.new() if form.arenas is not None else None)

    def _launch(
        self, inputs: Sequence[torch.Tensor], now: Snapshot, stream: int
    ) -> list[torch.Tensor]:
        pool = self.executable.arenas
        if pool is None:
            return self.executable.call(inputs, now, None)
        arena = pool.take(stream)
        try:
            return self.executable.call(inputs, now, arena)
        finally:
            pool.give(arena, stream)

    def rebuild(self, flat: list[torch.Tensor]) -> Any:
        spec = self.captured.output_spec
        if spec.how == "leaf" and flat:
            return flat[0]
        tensors = iter(flat)
        leaves = [next(tensors) if c is TENSOR else c for c in self.captured.output_constants]
        return rebuild(spec, leaves)


def make(
    captured: Captured, plan: Plan, state: StateGuard, ambient: tuple[Any, ...],
    leaves: Sequence[Any],
) -> Specialisation:  # fmt: skip
    device = device_of(captured, [x for x in leaves if isinstance(x, torch.Tensor)])
    executable = write(captured, plan, device)
    weights = Weights(captured.slots, captured.prepare, executable.derived)
    first: dict[int, int] = {}
    for i, leaf in enumerate(captured.leaves):
        if leaf.tensor is not None:
            first.setdefault(leaf.tensor, i)
    positions = [first[i] for i in range(len(first))]
    plain = positions == list(range(len(captured.leaves)))
    place = {t: i for i, t in enumerate(captured.graph.inputs)}
    mutated = [place[m.target] for m in captured.graph.mutations if m.target in place]
    constants = [m.target for m in captured.graph.mutations if m.target not in place]
    return Specialisation(
        captured, plan, executable, weights, state, ambient, device,
        None if plain else positions, mutated, constants,
    )  # fmt: skip
