"""Where regions are cut so that the tensor-core engine takes their product."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from tests.modules import Fn
from torch import nn
from torch.nn import functional as F

from onchip.capture import capture
from onchip.capture.cleanup import constant_tensors
from onchip.capture.schema import is_view
from onchip.fusion.layout import choose_layouts
from onchip.fusion.machine import GPUS
from onchip.fusion.partition import Partitioner
from onchip.planning.candidates import Context
from onchip.planning.cut import launches
from onchip.planning.engine_cut import MOST_ASKED, engine_cut
from onchip.planning.generators.cuda import for_gpu

needs_compilers = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("triton") is None,
    reason="cuda-bindings or triton is not installed: torch for CUDA brings both",
)


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


def cut_of(module: nn.Module, x: torch.Tensor, takes=None) -> tuple[list[str], list[str]] | None:
    """Operators of the two parts of a module's whole graph. takes: of names of operators, in place
    of the engine's own answer."""
    with torch.no_grad():
        graph = capture(module.eval(), (x,)).graph
    layouts = choose_layouts(graph, lambda n: is_view(n.call.target))
    constants = frozenset(constant_tensors(graph)) | frozenset(graph.constants)
    generator = for_gpu(GPUS["h200"], alone=True)
    context = Context(layouts, constants, frozenset(graph.constants))
    partitioner = Partitioner(graph, layouts, constants, generator.root_of)
    if takes is not None:
        generator = SimpleNamespace(engine_takes=lambda r, _: takes([n.op for n in r.nodes]))
    region = partitioner.region(list(graph.nodes))
    cut = engine_cut(region, partitioner, generator, context, launches)  # type: ignore[arg-type]
    if cut is None:
        return None
    names = [n.op for n in region.nodes]
    second = [n for i, n in enumerate(names) if i not in cut.first]
    return [names[i] for i in cut.first], second


def up(*a, **more) -> nn.Module:
    return nn.ConvTranspose2d(16, 24, 3, 2, 1, *a, **more)


CASES: dict[str, tuple[Callable, tuple[list[str], list[str]]]] = {
    "a fold over features that reads twice": (
        lambda: (Fn(lambda s, x: F.relu(s.c(x)).logsumexp(1) * 2, c=up()), image(2, 16, 5, 6)),
        (["conv_transpose2d", "relu"], ["logsumexp", "mul"]),
    ),
    "a pool across classes": (
        lambda: (nn.Sequential(up(), nn.Tanh(), nn.MaxPool2d(2)), image(2, 16, 5, 6)),
        (["conv_transpose2d", "tanh"], ["max_pool2d"]),
    ),
    "an operand that is computed": (
        lambda: (nn.Sequential(nn.AvgPool2d(2), up(), nn.Tanh()), image(2, 16, 10, 12)),
        (["avg_pool2d"], ["conv_transpose2d", "tanh"]),
    ),
    "a softmax": (
        lambda: (nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Softmax(1)), torch.randn(32, 64)),
        (["linear", "gelu"], ["softmax"]),
    ),
}


@needs_compilers
@pytest.mark.parametrize("name", CASES)
def test_the_engine_keeps_as_much_as_it_takes(name: str) -> None:
    make, wanted = CASES[name]
    assert cut_of(*make()) == wanted


@needs_compilers
def test_what_the_engine_takes_whole_or_not_at_all_is_not_cut() -> None:
    whole = nn.Sequential(up(), nn.Tanh())
    assert cut_of(whole, image(2, 16, 5, 6)) is None
    groups = nn.Sequential(up(groups=2), nn.Softmax(1))  # which it does not take alone, either
    assert cut_of(groups, image(2, 16, 5, 6)) is None
    assert cut_of(nn.Sequential(nn.Tanh(), nn.Softmax(1)), torch.randn(8, 8)) is None


def test_of_parts_as_large_the_cut_has_the_fewest_bytes() -> None:
    """What the layer reads is 32 times as much as what it makes."""
    module = Fn(lambda s, x: s.l(x.relu()).softmax(1), l=nn.Linear(64, 2))
    alone = ["linear"]
    found = cut_of(module, torch.randn(64, 64), lambda ops: len(ops) == 2 or ops == alone)
    assert found == (["relu", "linear"], ["softmax"])


def test_a_long_chain_is_asked_about_a_few_times() -> None:
    asked: list[int] = []

    def takes(ops: list[str]) -> bool:
        asked.append(len(ops))
        return ops == ["linear"]

    chain = [nn.Tanh() for _ in range(60)]
    assert cut_of(nn.Sequential(nn.Linear(16, 16), *chain), torch.randn(8, 16), takes) is None
    assert len(asked) <= MOST_ASKED + 2
