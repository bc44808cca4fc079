"""The child process of kernels.py: prepares, builds, checks and times the variants of cases."""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench.gpu import region
from bench.gpu.region import Sets, Subject, Sweep

from onchip.backends.cuda.source import CudaSource
from onchip.fusion.machine import GPUS, HOPPER
from onchip.planning.candidates import Candidate
from onchip.planning.generators import cuda, triton
from onchip.planning.plan import Kernel
from onchip.report import bench_once
from onchip.report import bench_replay as replay
from onchip.report.bench_suites import Case

BEST = 3  # variants that are timed again beside the peers
QUICK = 5  # rounds for all of them
ONCE = 4  # times as many of single calls, each of which is one launch


class Lost(Exception):
    """A variant broke the CUDA context; its row says so."""


class Bench:
    """Cases in one process. What is done stands in the state file, so that another process can
    go on after a crash."""

    device = "cuda"

    def __init__(self, state: Path, options: argparse.Namespace, run: bool) -> None:
        self.state, self.options, self.run = state, options, run
        self.start = time.perf_counter()
        entries = [json.loads(line) for line in state.read_text().splitlines()]
        rows = [e["row"] for e in entries if "row" in e]
        self.done = {(r["case"], r["variant"]): r for r in rows}
        self.complete = {e["final"]["case"] for e in entries if "final" in e}
        self.generator = generator_of(options, run)
        self.built: dict[Candidate, Any] = {}
        self.gbs = 0.0

    def note(self, **entry: Any) -> None:
        """One line of the state; also the sign of life that the parent waits for."""
        with self.state.open("a") as f:
            f.write(json.dumps(entry | {"s": round(time.perf_counter() - self.start, 1)}) + "\n")

    def row(self, s: Subject, name: str, **figures: Any) -> dict[str, Any]:
        row = dict(case=title(s.case), variant=name, **figures)
        self.done[row["case"], name] = row
        self.note(row=row)
        return row

    def fail(self, s: Subject, text: str) -> None:
        self.note(final=dict(case=title(s.case), variant="(the case)", error=short(text)))

    # ---- before the GPU --------------------------------------------------------------------

    def prepare(self, cases: list[Case]) -> list[Subject]:
        """Cases that are one region; for the others a row that says why not."""
        out = []
        for case in cases:
            if title(case) in self.complete:
                continue
            self.note(preparing=title(case))
            try:
                s = region.prepare(case, self.generator, sweep(self.options))
            except Exception as error:
                text = short(f"{type(error).__name__}: {error}")
                self.note(final=dict(case=title(case), variant="(no region)", error=text))
                continue
            for name, why in s.refused.items():
                if (title(case), name) not in self.done:
                    self.row(s, name, error=f"refused: {why}")
            s.candidates = dict(list(s.candidates.items())[: self.options.limit])
            self._write(s)
            out.append(s)
        return out

    def _write(self, s: Subject) -> None:
        if self.options.sources is None:
            return
        self.options.sources.mkdir(parents=True, exist_ok=True)
        for label, c in s.candidates.items():
            safe = "".join(x if x.isalnum() else "_" for x in f"{title(s.case)} {label}")
            ending = "cu" if isinstance(c.source, CudaSource) else "py"
            (self.options.sources / f"{safe[:200]}.{ending}").write_text(c.source.text)

    def build(self, subjects: list[Subject]) -> None:
        """Everything in one call, so that all cores are busy; what can't be built is a row."""
        todo = [
            (s, label, c)
            for s in subjects
            for label, c in s.candidates.items()
            if not self.done.get((title(s.case), label), {}).get("error")
        ]
        self.note(building=len(todo))
        all_built = region.build_all([c for *_, c in todo], self.generator.gpu)
        for (s, label, c), made in zip(todo, all_built, strict=True):
            if isinstance(made, Exception):
                self.row(s, label, error=short(f"not built: {made}"))
                continue
            self.built[c] = made
            if not self.run:
                self.row(s, label, **figures(made))

    # ---- on the GPU ------------------------------------------------------------------------

    def facts(self) -> None:
        self.gbs = replay.copy_gbs()
        self.note(facts={
            "device": torch.cuda.get_device_name(), "copy GB/s": round(self.gbs),
            "graph node us": round(replay.node_us(), 2), "L2 MB": replay.cache_bytes() >> 20,
        })  # fmt: skip

    def measure(self, s: Subject) -> None:
        """Check every variant, then time those that are right beside the peers."""
        nbytes = s.nbytes
        count = replay.sets_for(nbytes, replay.cache_bytes())
        sets = region.on_device(s, self.device, count)
        expected = region.truth(sets)
        self.note(truth=title(s.case), eager_error=expected.eager_error)
        replay.free()
        calls = {}
        for label, c in s.candidates.items():
            if c not in self.built or self.done.get((title(s.case), label), {}).get("error"):
                continue
            self.note(begin=dict(case=title(s.case), variant=label))
            try:
                calls[label] = self._checked(sets, label, c, expected)
            except Exception as error:
                why = short(f"{type(error).__name__}: {error}")
                self.row(s, label, error=why, **figures(self.built[c]))
                if not alive():
                    raise Lost from error
        self._time(s, sets, calls)

    def _checked(self, sets: Sets, label: str, c: Candidate, expected: region.Truth) -> list[Any]:
        """The candidate's calls, one a set, if its results are right in the first and last set;
        none if they are not."""
        kernel = self.generator.kernel(c, self.built[c])
        m = region.memory_of(c, sets)
        runs = [
            partial(_launch, kernel, region.tensors_of(c, m, sets, n))
            for n in range(len(sets.inputs))
        ]
        error, problem = 0.0, ""
        for n in dict.fromkeys((0, len(runs) - 1)):
            for g in sets.outputs[n].values():
                g.poison()
            runs[n]()
            error, wrong = region.fault(sets, expected, n)
            problem = problem or wrong
        if m.disturbed(c):
            problem = problem or "its zeroed workspace is left with other values"
        found = {"error": problem} if problem else {}
        self.row(sets.subject, label, err=error, **found, **figures(self.built[c]))
        return [] if problem else runs

    def _time(self, s: Subject, sets: Sets, calls: dict[str, list[Any]]) -> None:
        name, nbytes = title(s.case), s.nbytes
        calls = {k: c for k, c in calls.items() if c}
        quick, failed = self._medians(calls, QUICK) if calls else ({}, {})
        for k, us in quick.items():
            self.note(row=dict(self.done[name, k], **self._speed(nbytes, us)))
        for k, why in failed.items():
            self.note(row=dict(self.done[name, k], error=f"not timed: {why}"))
        best = sorted(quick, key=quick.__getitem__)[:BEST]
        forms = {k: calls[k] for k in best} | self._peers(s, sets)
        final, failed = self._medians(forms)
        for k, us in final.items():
            first = self.done.get((name, k), dict(case=name, variant=k, peer=True))
            self.note(row=dict(first, **self._speed(nbytes, us)))
        for k, why in failed.items():
            self.note(row=dict(case=name, variant=k, peer=True, error=why))
        self.note(final=self._floor(s))

    def _medians(
        self, forms: dict[str, list[Any]], rounds: int | None = None
    ) -> tuple[dict[str, float], dict[str, str]]:
        if self.options.once:
            first = {k: calls[0] for k, calls in forms.items()}
            return bench_once.medians(first, rounds * ONCE if rounds else bench_once.ROUNDS)
        return replay.medians(forms, rounds or replay.ROUNDS)

    def _floor(self, s: Subject) -> dict[str, Any]:
        floor = s.nbytes / self.gbs / 1e3
        target = s.case.target_us or (floor / s.case.target_share if s.case.target_share else None)
        text = f"(bytes at the copy ceiling{f'; target {target:.1f} us' if target else ''})"
        return dict(case=title(s.case), variant=text, peer=True, **self._speed(s.nbytes, floor))

    def _speed(self, nbytes: int, us: float) -> dict[str, float]:
        gbs = nbytes / us / 1e3
        return dict(us=us, gbs=gbs, share=gbs / self.gbs)

    def _peers(self, s: Subject, sets: Sets) -> dict[str, list[Any]]:
        """Eager and Inductor on the same sets."""
        if self.options.peers == "none":
            return {}
        made: dict[str, Any] = {"eager": lambda *x: s.module(*x)}
        if self.options.peers == "all":
            self.note(peers=title(s.case))
            torch._dynamo.reset()
            made["inductor"] = torch.compile(s.module)
        forms = {}
        for k, f in made.items():
            with torch.no_grad():
                try:
                    f(*sets.inputs[0])
                except Exception as error:
                    why = short(f"{type(error).__name__}: {error}")
                    self.note(row=dict(case=title(s.case), variant=k, peer=True, error=why))
                    continue
            forms[k] = [partial(_quietly, f, x) for x in sets.inputs]
        return forms


def alive() -> bool:
    """Whether CUDA still works in this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _launch(kernel: Kernel, tensors: list[torch.Tensor]) -> None:
    """On the current stream. The tensors stay alive with this call's partial."""
    kernel.run([t.data_ptr() for t in tensors])


def _quietly(f: Any, inputs: tuple[Any, ...]) -> Any:
    with torch.no_grad():
        return f(*inputs)


def generator_of(options: argparse.Namespace, run: bool) -> region.Generator:
    """Whose variants are wanted, for the GPU of this machine or the one that is named. SystemExit
    if there is no such generator for it."""
    device = torch.device("cuda")
    gpu = triton.gpu_of(device) if run else GPUS[options.device]
    engine = gpu.capability == HOPPER
    if options.generator == "cuda" and not engine:
        raise SystemExit(f"the engine is for sm_{HOPPER}, and {gpu.name} is sm_{gpu.capability}")
    if options.generator == "triton" or not engine:
        return triton.for_device(device) if run else triton.for_gpu(gpu)
    alone = options.generator == "cuda"
    return cuda.for_device(device, alone) if run else cuda.for_gpu(gpu, alone)


def sweep(options: argparse.Namespace) -> Sweep:
    """SystemExit if a field is none of either kind of variant."""
    tiles = tuple(tuple(map(int, t.split("x"))) for t in options.tiles.split(",") if t)
    fields = []
    for text in options.set:
        name, _, values = text.partition("=")
        if name not in region.FIELDS:
            known = ", ".join(sorted(region.FIELDS))
            raise SystemExit(f"--set {text}: there is no field {name!r}; there are {known}")
        fields.append((name, tuple(map(region.FIELDS[name], values.split(",")))))
    return Sweep(tiles, tuple(fields))


def title(case: Case) -> str:
    return f"{case.name} {str(case.dtype).removeprefix('torch.')}"


def short(text: str) -> str:
    """One line: how it begins and how it ends."""
    line = " ".join(text.split())
    return line if len(line) <= 420 else f"{line[:200]} ... {line[-200:]}"


def figures(built: Any) -> dict[str, Any]:
    """The compiled launches' resources: the worst of each, the seconds of all."""
    found = list(getattr(built, "resources", ()))
    if not found:
        return {}
    return dict(
        regs=max(r.registers for r in found),
        spill=max(r.spills for r in found),
        shared=max(r.shared_bytes for r in found),
        occ=min(r.occupancy for r in found),
        sass=max(r.instructions for r in found),
        build_s=sum(r.seconds for r in found),
    )
