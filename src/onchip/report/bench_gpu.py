"""Rows of a suite on an NVIDIA GPU: whole programs, timed by report.bench_replay.

onchip's program, eager PyTorch and Inductor run the same module on the same rotated inputs, each
inside CUDA graphs of ours, so that no form pays for its host and none finds its inputs in the
cache. Errors are those of onchip.runtime.verify, against float64.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from onchip.analysis.summary import program_bound_us
from onchip.errors import OnchipError
from onchip.ir.graph import Graph
from onchip.models import resolve
from onchip.planning import machine, peers
from onchip.planning.peers import quiet
from onchip.report import bench_replay as replay
from onchip.report.bench import failed, grouped
from onchip.report.bench_suites import Case
from onchip.report.build import predicted_us
from onchip.report.contests import one_or_two
from onchip.runtime.program import Program
from onchip.runtime.verify import Verification, verify
from onchip.settings import Settings

DEVICE = "cuda"


class DeviceBench:
    """Runs cases on the GPU at hand; `with_peers`: a case's peers, too, but those in `without`."""

    settings = Settings()

    def __init__(self, with_peers: bool, without: Sequence[str] = ()) -> None:
        self.with_peers, self.without = with_peers, without
        self.seconds: dict[str, float] = {}
        self.copy_gbs = replay.copy_gbs()
        # the floor of a row must not lie below what this run's own copy reaches
        found = machine.measure(DEVICE)
        self.ceilings = replace(found, copy_gbs=max(found.copy_gbs, self.copy_gbs))

    def rows(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """One row for each case; a failure is a row that says why."""
        return [self.row(c) for c in cases]

    def conditions(self) -> dict[str, Any]:
        """What else the result says of how its rows were measured."""
        return {}

    def row(self, case: Case) -> dict[str, Any]:
        try:
            with torch.no_grad(), _memory():
                return self._row(case)
        except Exception as error:  # whatever it is: the other cases have rows
            return failed(case, error)

    def _row(self, case: Case) -> dict[str, Any]:
        from onchip import api

        self.seconds = {}
        with self._stage("load"):
            module, inputs = self.model(case)
        with self._stage("compile"):
            program = api.compile(module, inputs, settings=self.settings, name=case.name)
        inputs = self._measured_on(inputs)
        with self._stage("verify"), quiet():
            verified = verify(program, module, inputs)
        self._judge(verified, case)
        graph = program.compiled[-1].original.graph
        nbytes = compulsory_bytes(graph)
        times, untimed = self._times(case, program, module, inputs, nbytes)
        if "onchip" not in times:
            raise OnchipError(f"the program can't be timed: {untimed['onchip']}")
        notes = [*program.notes, *(f"{k}: {why}" for k, why in untimed.items())]
        if case.contests:
            notes += one_or_two(program.compiled[-1].planned.contests)
        return self._figures(case, times, graph, verified) | {
            "launches": program.launches,
            "predicted_us": self._predicted_us(program),
            "peers": {k: times.get(k) for k in (*times, *untimed) if k != "onchip"},
            "notes": "; ".join(notes),
            "seconds": self.seconds,
        }

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Counts the seconds inside as the case's."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(time.perf_counter() - start, 2)

    def model(self, case: Case) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        """The case's module, and inputs to compile it on."""
        found = resolve(case.model, batch=case.batch, dtype=case.dtype)
        module, inputs = found.module.to(DEVICE), found.example_inputs
        if case.channels_last:
            form = torch.channels_last
            module = module.to(memory_format=form)  # type: ignore[call-overload]
            inputs = tuple(x.contiguous(memory_format=form) for x in inputs)
        return module, tuple(x.to(DEVICE) for x in inputs)

    def _judge(self, verified: Verification, case: Case) -> None:
        """VerificationError if the program is not exact enough."""
        from onchip import api

        api.judge(verified, case.name)

    def _predicted_us(self, program: Program) -> float | None:
        """By the cost model, nothing in the caches as when it is measured; None where the program
        runs in eager mode."""
        known = self.ceilings.costs
        cold = known and replace(known, copied=known.copied[-1:])
        ceilings = replace(self.ceilings, costs=cold)
        return predicted_us(program.compiled[-1], ceilings) if program.compiled else None

    def _measured_on(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The inputs that the program is verified and timed on, for those it was compiled on."""
        return inputs

    def _times(
        self,
        case: Case,
        program: Callable[..., Any],
        module: torch.nn.Module,
        inputs: tuple[torch.Tensor, ...],
        nbytes: int,
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Microseconds of a call of each form, and why others have none."""
        forms: dict[str, Callable[..., Any]] = {"onchip": program, "eager": module}
        with self._stage("peers"):
            names = tuple(p for p in case.peers if self._wants(p))
            made, broken = peers.compiled_forms(module, inputs, names)
        forms |= made
        sets = replay.rotated(inputs, replay.sets_for(nbytes, replay.cache_bytes(DEVICE)))
        calls = {k: [lambda f=f, x=x: f(*x) for x in sets] for k, f in forms.items()}
        with self._stage("time"):
            times, untimed = replay.medians(calls)
        return times, {**broken, **untimed}

    def _wants(self, peer: str) -> bool:
        return self.with_peers and peer not in self.without

    def _target_us(self, case: Case, times: dict[str, float], nbytes: int) -> float | None:
        """What the case promises, in microseconds."""
        if case.target_share:
            return nbytes / (case.target_share * self.copy_gbs) / 1e3
        if case.target_bare:
            return times["bare"] / case.target_bare if "bare" in times else None
        return case.target_us

    def _figures(
        self, case: Case, times: dict[str, float], graph: Graph, verified: Verification
    ) -> dict[str, Any]:
        own, nbytes = times["onchip"], compulsory_bytes(graph)
        return {
            "name": case.name,
            "dtype": str(case.dtype).removeprefix("torch."),
            "onchip_us": own,
            "floor_us": program_bound_us(graph, self.ceilings),
            "error": verified.error,
            "eager_error": verified.eager_error,
            **grouped(case),
            "bytes": nbytes,
            "share": nbytes / own / 1e3 / self.copy_gbs if case.memory_bound else None,
            "target_us": self._target_us(case, times, nbytes),
        }


def compulsory_bytes(graph: Graph) -> int:
    """What any program moves: inputs and constants that are read, and results, each once."""
    read = dict.fromkeys(t for n in graph.nodes for t in n.inputs)
    given = {*graph.inputs, *graph.constants}
    results = dict.fromkeys(graph.output_tensors)
    return sum(t.nbytes for t in read if t in given) + sum(t.nbytes for t in results)


@contextlib.contextmanager
def _memory() -> Iterator[None]:
    """The case's memory is free for the next one."""
    try:
        yield
    finally:
        replay.free()
