"""Copies behind transposed convolutions: where they are, and that nothing else changes."""

import pytest
import torch
from tests.modules import Fn
from torch import nn

from onchip.capture import capture
from onchip.capture.schema import is_view
from onchip.fusion.layout import channels_last, choose_layouts
from onchip.planning import planner
from onchip.planning.relayout_results import results_cut, with_channels_first_results
from onchip.planning.values import run_eagerly
from onchip.runtime.program import Program
from onchip.settings import Settings


def up(features: int = 8, stride: int = 2) -> nn.Module:
    return nn.ConvTranspose2d(16, features, 3, stride, 1)


CASES = {
    "alone": (lambda: up(), 1),
    "with operators behind it": (lambda: Fn(lambda s, x: s.c(x).tanh() * 2 + s.c(x), c=up()), 1),
    "two results": (lambda: Fn(lambda s, x: (s.c(x), s.d(x).relu()), c=up(), d=up(12)), 2),
    "without a stride": (lambda: up(stride=1), 0),
    "few features": (lambda: up(4), 0),
    "features that are no rows": (lambda: up(9), 0),
    "a norm behind it": (lambda: nn.Sequential(up(), nn.GroupNorm(2, 8)), 0),
    "read again": (lambda: Fn(lambda s, x: (y := s.c(x), y.sum(1)), c=up()), 0),
    "no convolution": (lambda: Fn(lambda s, x: x * 2), 0),
}


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("name", CASES)
def test_what_is_copied(name: str) -> None:
    make, count = CASES[name]
    model, x = make().eval(), torch.randn(2, 16, 5, 6)
    before = capture(model, (x,))
    captured = with_channels_first_results(before)
    copies = [n for n in captured.graph.nodes if n.op == "clone"]
    assert len(copies) == count
    assert (captured is before) == (count == 0)
    layouts = choose_layouts(captured.graph, lambda n: is_view(n.call.target))
    for n in copies:
        assert layouts[n.inputs[0]] == channels_last(n.inputs[0].shape)
        assert n.results[0] in captured.graph.outputs
    values = run_eagerly(captured, [x], layouts)
    eager = model(x)
    wanted = eager if isinstance(eager, tuple) else (eager,)
    for t, want in zip(captured.graph.outputs, wanted, strict=True):
        torch.testing.assert_close(values[t], want)
        assert values[t].stride() == want.stride()


def test_the_cut_lies_in_front_of_the_copy() -> None:
    model, x = nn.Sequential(up(), nn.Tanh()), torch.randn(2, 16, 5, 6)
    nodes = with_channels_first_results(capture(model, (x,))).graph.nodes
    cut = results_cut(nodes)
    assert cut is not None
    assert [nodes[i].op for i in cut.first] == ["conv_transpose2d", "tanh"]
    assert cut.nbytes == 2 * 4 * 2 * 8 * 9 * 11
    assert results_cut(nodes[:-1]) is None
    assert results_cut(nodes[-1:]) is None  # by itself: nothing to cut


def test_the_program_computes_the_same() -> None:
    model, x = nn.Sequential(up(), nn.Tanh()).eval(), torch.randn(2, 16, 5, 6)
    captured = with_channels_first_results(capture(model, (x,)))
    planned = planner.plan(captured, [x], Settings(budget_s=60.0))
    program = Program(model, (x,), {}, lambda *_: (captured, planned.plan), Settings())
    other = torch.randn(2, 16, 5, 6)
    got, want = program(other), model.double()(other.double())
    assert (got.double() - want).norm() <= 1e-6 * want.norm()
    assert got.stride() == want.stride()
