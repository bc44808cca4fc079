"""Boxes of tensors that the copy engine fetches by the launcher's tensor maps, on this machine's
Hopper GPU."""

from __future__ import annotations

import pytest
import torch
from tests.backends import cuda_copy

from onchip.backends.cuda.build import build_all
from onchip.backends.nvidia.build import Built
from onchip.fusion.machine import HOPPER
from onchip.planning.generators.triton import gpu_of


def hopper() -> bool:
    return torch.cuda.is_available() and gpu_of(torch.device("cuda")).capability == HOPPER


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper(), reason="there is no NVIDIA GPU with sm_90 here"),
]


def copying(swizzle: int) -> Built:
    (built,) = build_all([cuda_copy.source(swizzle)], gpu_of(torch.device("cuda")))
    assert isinstance(built, Built), built
    return built


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(cuda_copy.SHAPE, device="cuda").bfloat16()
    return torch.full((cuda_copy.COUNT,), float("nan"), device="cuda").bfloat16(), x


@pytest.mark.parametrize("swizzle", [0, 128])
def test_a_box_is_what_the_map_says(swizzle: int) -> None:
    run = copying(swizzle).run
    for _ in range(3):  # at another address each time
        out, x = tensors()
        run([out.data_ptr(), x.data_ptr()], torch.cuda.current_stream().cuda_stream)
        wanted = cuda_copy.expected(x.cpu(), swizzle)
        assert torch.equal(out.cpu().view(wanted.shape), wanted)


def test_a_graph_keeps_the_map_of_its_own_launch() -> None:
    built = copying(0)
    (first, x), (second, y) = tensors(), tensors()
    built.launcher()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        built.run([first.data_ptr(), x.data_ptr()], torch.cuda.current_stream().cuda_stream)
    built.run([second.data_ptr(), y.data_ptr()], torch.cuda.current_stream().cuda_stream)
    first.fill_(float("nan"))
    graph.replay()
    for out, given in ((first, x), (second, y)):
        wanted = cuda_copy.expected(given.cpu())
        assert torch.equal(out.cpu().view(wanted.shape), wanted)
