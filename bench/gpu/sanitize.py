"""Small kernels of each kind, launched once each, for compute-sanitizer (sanitize.sh).

    PYTHONPATH=src python3 bench/gpu/sanitize.py [REGEX]     of the kinds' names

Sizes are odd on purpose: the last tile of each axis is cut. Kinds of the tensor-core engine begin
with "engine" (Hopper GPUs only): kernels of tests/gpu/engine_cases.py. Exit code 1: a result is
wrong, a kind has no kernel, or none matches; what the sanitizer finds, it reports itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from bench.gpu import region  # noqa: E402
from tests.gpu import engine_cases, engine_kernels  # noqa: E402

from onchip.backends.nvidia.build import Built  # noqa: E402
from onchip.backends.triton.build import build_all  # noqa: E402
from onchip.errors import OnchipError  # noqa: E402
from onchip.fusion.machine import HOPPER  # noqa: E402
from onchip.planning.generators import triton  # noqa: E402
from onchip.report.bench_suites import Case  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
CASES = (
    Case("pipeline:add-mul:10007", dtype=FP32),
    Case("pipeline:softmax:37x1000", dtype=BF16),
    Case("pipeline:softmax:3x70001", dtype=BF16),
    Case("pipeline:softmax:3x131072", dtype=BF16),  # a cluster a row
    Case("pipeline:layernorm:37x1000", dtype=BF16),
    Case("pipeline:rmsnorm-gelu:19x300", dtype=FP32),
    Case("pipeline:groupnorm-silu:2x64x33x31", dtype=BF16),
    Case("pipeline:transpose-add:130x67", dtype=BF16),
    Case("pipeline:column-sum:5003x67", dtype=BF16),
    Case("pipeline:max-pool:2x24x33x31:channels-last", dtype=BF16),
    Case("pipeline:cross-entropy:33x5001", dtype=FP32),
    Case("pipeline:depthwise-layernorm:2x24x15x17:channels-last", dtype=BF16),
    Case("pipeline:conv-relu-bn-pool:2x24x18x22:channels-last", dtype=BF16),
    Case("pipeline:stem:1x3x61x67:channels-last", dtype=BF16),
    Case("pipeline:linear-gelu-residual:70x200", dtype=FP32),
    Case("pipeline:upsample:1x40x7x9:channels-last", dtype=BF16),
    Case("pipeline:upsample-3-taps:1x40x7x9:channels-last", dtype=BF16),
)
# (case, which of its configurations)
ENGINE = {
    "engine, teams without turns": ("pooled", 0),
    "engine, teams in turns": ("pooled", 1),
    "engine, teams, weights come by": ("pooled", 2),
    "engine, two teams of two": ("features_256", 0),
    "engine, K split in 2": ("features_256", 4),
    "engine, K split in 8": ("features_256", 6),
    "engine, input shared": ("features_256", 7),
    "engine, weights shared": ("features_256", 9),
    "engine, stride": ("strided", 0),
    "engine, groups": ("groups", 0),
    "engine, tf32": ("single", 0),
    "engine, windows from shared memory": ("overlapping_pool", 0),
    "engine, residual in place": ("residual", 0),
    "engine, two results and a residual": ("two_results_and_a_residual", 0),
    "engine, element by element": ("element_by_element", 0),
    "engine, batches": ("batched", 0),
    "engine, K split in 16": ("features_256", 13),
    "engine, totals": ("statistics", 0),
    "engine, totals of pictures": ("mean_of_pictures", 0),
    "engine, classes": ("transposed_4", 0),
    "engine, classes and a residual": ("transposed_3_residual", 0),
    "engine, few channels": ("stem", 0),
    "engine, few channels, tf32": ("stem_single", 0),
}
PATIENT = "#define PATIENT\n"  # under a tool a wait may take long
VARIANTS = 2  # of each case: the sanitizer makes a kernel some hundred times slower


def main(pattern: str = "") -> int:
    """Prints one line a kind whose name matches."""
    generator = triton.for_device(torch.device("cuda"))
    checks: dict[str, Callable[[], str]] = {c.name: partial(check, c, generator) for c in CASES}
    if generator.gpu.capability == HOPPER:
        names = [name for name in ENGINE if re.search(pattern, name)]
        engine = cache(partial(built, names))
        checks |= {name: partial(check_engine, name, engine) for name in ENGINE}
    bad = seen = 0
    for name, run in checks.items():
        if not re.search(pattern, name):
            continue
        seen += 1
        try:
            text = run()
        except (OnchipError, RuntimeError, AssertionError) as error:
            text, bad = f"{type(error).__name__}: {error}", bad + 1
        print(f"{name}: {text}", flush=True)
    if not seen:
        print(f"no kind matches {pattern!r}: {', '.join(checks)}")
    return 1 if bad or not seen else 0


def built(names: Sequence[str]) -> dict[str, engine_kernels.Ready]:
    """The engine's kinds, each with its one kernel, compiled in one call."""
    found = []
    for name in names:
        case, n = ENGINE[name]
        whole = engine_cases.CASES[case]
        found.append(replace(whole, name=name, configs=whole.configs[n : n + 1], first=0))
    return engine_kernels.ready([engine_cases.prepare(c) for c in found], PATIENT)


def check_engine(name: str, engine: Callable[[], dict[str, engine_kernels.Ready]]) -> str:
    """Runs one kernel of the engine; RuntimeError if a result is wrong."""
    wrong = engine_kernels.problems(
        engine()[name], 0, engine_kernels.launch, "cuda", [engine_cases.integers]
    )
    if wrong:
        raise RuntimeError("; ".join(wrong))
    return "1 right"


def check(case: Case, generator: triton.TritonGenerator) -> str:
    """Runs the first variants of a case; RuntimeError if a result is wrong."""
    s = region.prepare(case, generator, region.Sweep())
    chosen = list(s.candidates.items())[:VARIANTS]
    if not chosen:
        raise RuntimeError(f"no kernel: {'; '.join(s.refused.values())}")
    sets = region.on_device(s, "cuda", 1)
    expected = region.truth(sets)
    made = build_all([c.source for _, c in chosen], generator.gpu)
    for (label, c), built in zip(chosen, made, strict=True):
        if not isinstance(built, Built):
            raise RuntimeError(f"{label}: {built}")
        memory = region.memory_of(c, sets)
        for g in sets.outputs[0].values():
            g.poison()
        tensors = region.tensors_of(c, memory, sets, 0)
        generator.kernel(c, built).run([t.data_ptr() for t in tensors])
        torch.cuda.synchronize()
        _, wrong = region.fault(sets, expected, 0)
        if wrong:
            raise RuntimeError(f"{label}: {wrong}")
    return f"{len(chosen)} right"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
