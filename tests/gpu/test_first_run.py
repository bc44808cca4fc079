"""Kernels that would end all work of this process on the GPU are refused, and it goes on."""

from __future__ import annotations

import pytest
import torch

from onchip.backends.cuda import build
from onchip.backends.cuda.source import CudaSource, Pointer
from onchip.backends.nvidia import pool
from onchip.backends.nvidia.build import Built
from onchip.fusion.machine import GPUS
from onchip.fusion.refusal import Rule
from onchip.planning.isolation import Isolation

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hopper, reason="there is no Hopper GPU here"),
]
KERNELS = {
    "good": "y[threadIdx.x] = 2 * x[threadIdx.x];",
    "reads a wrong address": "y[threadIdx.x] = *(float*)(((unsigned long long)x) ^ (1ull << 46));",
    "traps": "if (threadIdx.x == 5) __trap();",
    "hangs": "while (((volatile float*)x)[0] == ((volatile float*)x)[0]) {}",
    "writes beyond": "y[threadIdx.x + 1] = x[threadIdx.x];",
}


@pytest.fixture(scope="module")
def made() -> dict[str, Built]:
    text = 'extern "C" __global__ void f(const float* x, float* y) {{ {} }}\n'
    sources = [
        CudaSource(text.format(body), "f", (Pointer(0), Pointer(1)), 1, 64, 0, (), ())
        for body in KERNELS.values()
    ]
    built = build.build_all(sources, GPUS["h200"])
    assert all(isinstance(b, Built) for b in built), built
    return dict(zip(KERNELS, built, strict=True))  # type: ignore[arg-type]


def test_each_is_tried_elsewhere(made) -> None:
    mine = Isolation(torch.cuda.current_device())
    specs = [("float32", 256, "values"), ("float32", 256, "poison")]
    found = {}
    for name in [*KERNELS, "good"]:
        found[name] = mine.first_run(name, made[name], specs)
        assert torch.ones(3, device="cuda").sum().item() == 3
    pool.end_idle()
    print({k: str(v) for k, v in found.items()})
    assert found.pop("good") is None
    assert not mine.notes
    assert all(r is not None and r.rule is Rule.CRASHES for r in found.values()), found
    assert "illegal" in found["reads a wrong address"].text  # type: ignore[union-attr]
    assert "beyond" in found["writes beyond"].text  # type: ignore[union-attr]
