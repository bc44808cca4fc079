"""Small kernels of each kind, launched once each, for compute-sanitizer (sanitize.sh).

Sizes are odd on purpose: the last tile of each axis is cut. Exit code 1: a result is wrong or a
kind has no kernel; what the sanitizer finds, it reports itself.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from bench.gpu import region  # noqa: E402

from onchip.backends.nvidia.build import Built  # noqa: E402
from onchip.backends.triton.build import build_all  # noqa: E402
from onchip.errors import OnchipError  # noqa: E402
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
VARIANTS = 2  # of each case: the sanitizer makes a kernel some hundred times slower


def main(pattern: str = "") -> int:
    """Prints one line a case whose name matches."""
    generator = triton.for_device(torch.device("cuda"))
    bad = 0
    for case in CASES:
        if not re.search(pattern, case.name):
            continue
        try:
            text = check(case, generator)
        except (OnchipError, RuntimeError) as error:
            text, bad = f"{type(error).__name__}: {error}", bad + 1
        print(f"{case.name}: {text}", flush=True)
    return 1 if bad else 0


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
