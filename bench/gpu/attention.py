"""Attention as one generated walk over the keys: every variant's error and time, beside ATen's.

    PYTHONPATH=src python bench/gpu/attention.py [CASE ...]     a case is B,H,HK,L,S,D,kind[,causal]

The error is the largest difference from float64, over the largest value. Exit code 1: a variant was
not built, or its error is above ATen's own by more than a factor of four.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from onchip.backends.cpp.run import region_for
from onchip.backends.nvidia.build import Built
from onchip.backends.triton.build import build_all
from onchip.backends.triton.kernel import emit_kernel
from onchip.backends.triton.source import Options, TritonSource, Variant
from onchip.backends.triton.tiles import variants
from onchip.errors import CompilerError
from onchip.fusion.layout import contiguous
from onchip.fusion.refusal import Refusal
from onchip.fusion.staging import stage
from onchip.ir.dtype import BY_LABEL
from onchip.ir.expr import Tensor, given
from onchip.ops import OPERATORS
from onchip.planning.generators.triton import gpu_of

CASES = (
    "2,16,16,4096,4096,128,bfloat16",
    "2,16,16,4096,4096,128,bfloat16,causal",
    "4,16,16,2048,2048,64,bfloat16,causal",
    "2,32,8,2000,2000,80,float16,causal",
    "2,16,16,1024,1024,64,float32",
    "16,32,8,1,4096,128,bfloat16",
)
GPU = torch.device("cuda", 0)
LOOSE = 4.0  # times ATen's own error


def microseconds(call: Callable[[], object]) -> float:
    """The fastest of five runs of ten calls."""
    for _ in range(3):
        call()
    best = float("inf")
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            call()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 100)
    return best


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    difference = (got.double() - want).abs().max() / want.abs().max()
    return float("inf") if bool(difference.isnan()) else float(difference)


def proposed(
    shapes: list[tuple[int, ...]], kind: str, causal: bool
) -> tuple[list[tuple[Variant, TritonSource]], tuple[Tensor, ...]]:
    """Written variants, and their inputs q, k, v."""
    q, k, v = (given(s, BY_LABEL[kind]) for s in shapes)
    operator = OPERATORS["aten.scaled_dot_product_attention.default"]
    out = operator(q, k, v, None, 0.0, causal, enable_gqa=q.shape[1] != k.shape[1])
    staged = stage(region_for([out], [q, k, v]))
    assert not isinstance(staged, Refusal), staged
    strides = {t: contiguous(t.shape) for t in (q, k, v, out, *(s.tensor for s in staged))}
    found = []
    for precision in ("ieee", "tf32x3") if kind == "float32" else ("ieee",):
        some = variants(staged, strides, gpu_of(GPU), Options(precision=precision))
        assert not isinstance(some, Refusal), some
        for one in (x for x in some if x.options.stream):
            source = emit_kernel(one.nest, strides, one.options)
            assert isinstance(source, TritonSource), source
            found.append((one, source))
    return found, (q, k, v)


def check(case: str) -> bool:
    *numbers, kind, causal = case.split(",") if case.count(",") == 7 else [*case.split(","), ""]
    b, h, hk, n, s, d = map(int, numbers)
    shapes = [(b, h, n, d), (b, hk, s, d), (b, hk, s, d)]
    data = [torch.randn(x, device=GPU, dtype=getattr(torch, kind)) for x in shapes]

    def aten(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=bool(causal), enable_gqa=h != hk)

    q, k, v = data
    want = aten(q[:1].double(), k[:1].double(), v[:1].double())
    flops = 4 * b * h * n * s * d / (2 if causal else 1)
    theirs, us = error(aten(q, k, v)[:1], want), microseconds(lambda: aten(q, k, v))
    print(f"{case}\n  {us:9.1f} us {flops / us / 1e6:6.1f} TFLOPS  error {theirs:.1e}  ATen")
    written, inputs = proposed(shapes, kind, bool(causal))
    good = True
    made = build_all([source for _, source in written], gpu_of(GPU))
    for (variant, source), built in zip(written, made, strict=True):
        good &= row(
            variant, source, built, dict(zip(inputs, data, strict=True)), want, theirs, flops
        )
    return good


def row(
    v: Variant, source: TritonSource, built: Built | CompilerError,
    data: dict[Tensor, torch.Tensor], want: torch.Tensor, theirs: float, flops: float,
) -> bool:  # fmt: skip
    if isinstance(built, CompilerError):
        print(f"  {v.label}: {str(built)[:200]}")
        return False
    (shape,) = (t.shape for t in source.outputs)
    some = next(iter(data.values()))
    out = torch.full(shape, float("nan"), device=GPU, dtype=some.dtype)
    pointers = [*(data[t].data_ptr() for t in source.inputs), out.data_ptr()]
    stream, launcher = torch.cuda.current_stream().cuda_stream, built.launcher()
    us = microseconds(lambda: launcher.run(pointers, stream))
    mine = error(out[:1], want)
    r = built.resources[0]
    good = mine <= LOOSE * theirs and not bool(out.isnan().any())
    print(
        f"  {us:9.1f} us {flops / us / 1e6:6.1f} TFLOPS  error {mine:.1e}{'' if good else ' BAD'}  "
        f"{v.label}  ({r.registers} registers, {r.spills} spills, {r.shared_bytes >> 10} KiB)",
        flush=True,
    )
    return good


if __name__ == "__main__":
    results = [check(case) for case in sys.argv[1:] or CASES]
    sys.exit(0 if all(results) else 1)
