"""`onchip bench SUITE --verify`: no shipped kernel is slower than its unfused operators.

Each case is compiled, from the cache where it is known, and every fused kernel that ships measured
again, in turn with its operators as library calls. Rows are printed as they come."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from onchip.errors import OnchipError
from onchip.models import resolve
from onchip.planning.forms import graph_inputs
from onchip.planning.intervals import words
from onchip.planning.remeasure import Again, remeasure
from onchip.report.bench import device_bench
from onchip.report.bench_suites import Case
from onchip.report.contests import SHOWN
from onchip.report.text import time
from onchip.settings import Settings

Made = tuple[torch.nn.Module, tuple[torch.Tensor, ...], Settings]


def verify_cases(cases: Sequence[Case], show: Callable[[str], None]) -> int:
    """How many kernels of the cases are slower than their operators, beyond noise; a case that
    can't be measured counts as one. `show` gets each line."""
    kernels = losers = failed = 0
    show(HEAD)
    made = _on_gpu(cases[0].protocol) if cases[0].device == "cuda" else _on_cpu
    for case in cases:
        try:
            rows = _rows(case, made)
        except (OnchipError, RuntimeError) as error:  # the other cases have rows
            show(f"{case.name}: {type(error).__name__}: {' '.join(str(error).split())}")
            failed += 1
            continue
        finally:
            gc.collect()
            if case.device == "cuda":
                torch.cuda.empty_cache()
        label = f"{case.name} {str(case.dtype or '').removeprefix('torch.')}".strip()
        show(label if rows else f"{label}: no fused kernel ships")
        for r in rows:
            show(line(r))
        kernels, losers = kernels + len(rows), losers + sum(r.slower for r in rows)
    without = f", {failed} cases could not be measured" if failed else ""
    show(f"{kernels} kernels of {len(cases)} cases: {losers} slower than unfused{without}")
    return losers + failed


HEAD = f"{'chosen at':>11}{'fused':>11}{'unfused':>11}  fused over unfused, places, operators"


def line(r: Again) -> str:
    ops = r.ops if len(r.ops) <= SHOWN else (*r.ops[:SHOWN], f"… {len(r.ops) - SHOWN} more")
    flag = "SLOWER: " if r.slower else ""
    times = "".join(f"{time(t):>11}" for t in (r.then_us, r.fused_us, r.unfused_us))
    return f"{times}  {flag}{words(r.ratio)}, ×{r.places}, {' + '.join(ops)} [{r.how}]"


@torch.no_grad()
def _rows(case: Case, made: Callable[[Case], Made]) -> list[Again]:
    from onchip import api

    module, inputs, settings = made(case)
    program = api.compile(module, inputs, settings=settings, name=case.name)
    if not program.compiled:
        return []
    compiled = program.compiled[-1]
    return remeasure(compiled, graph_inputs(compiled.captured, inputs, {}))


def _on_cpu(case: Case) -> Made:
    found = resolve(case.model, batch=case.batch, dtype=case.dtype)
    return found.module, found.example_inputs, Settings()


def _on_gpu(protocol: str) -> Callable[[Case], Made]:
    """The models and settings of the suites' own rows."""
    runner = device_bench(protocol)(False)
    return lambda case: (*runner.model(case), runner.settings)
