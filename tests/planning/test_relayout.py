"""Copies to channels-last before convolutions: where they are, and that nothing else changes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onchip.capture import capture
from onchip.capture.schema import is_view
from onchip.errors import CompilerError
from onchip.fusion.layout import choose_layouts
from onchip.fusion.refusal import Rule
from onchip.planning import decide, planner
from onchip.planning.generators.cpp import CppGenerator
from onchip.planning.relayout import relayout_cut, with_channels_last
from onchip.planning.values import run_eagerly, same_strides
from onchip.runtime.program import Program
from onchip.settings import Settings


class Ways(nn.Module):
    def __init__(self, forward, *layers) -> None:
        super().__init__()
        self.layers, self.ways = nn.ModuleList(layers), forward

    def forward(self, x):
        return self.ways(x, *self.layers)


def cases():
    conv, wide = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
    return {
        "a picture": (Ways(lambda x, c: c(x).relu(), conv), (2, 6, 9, 7), ["input0"]),
        "two readers": (
            Ways(lambda x, c, d: c(x) + d(x), conv, nn.Conv2d(6, 8, 1)), (2, 6, 9, 7), ["input0"],
        ),
        "and a residual": (Ways(lambda x, c: c(x) + x, wide), (2, 16, 5, 7), ["input0"]),
        "and a result": (Ways(lambda x, c: (x, c(x)), wide), (2, 16, 5, 7), ["input0"]),
        "zeros around it": (
            Ways(lambda x, c: c(F.pad(x, (2, 0, 1, 3))), conv), (1, 6, 5, 7), ["input0"],
        ),
        "two in a row": (
            Ways(lambda x, c, d: d(c(x)), conv, nn.Conv2d(8, 8, 3)), (1, 6, 9, 7), ["input0"],
        ),
        "frames": (Ways(lambda x, c: c(x), nn.Conv1d(6, 8, 3)), (2, 6, 31), ["input0"]),
        "a volume of three channels": (
            Ways(lambda x, c: c(x), nn.Conv3d(3, 8, 3)), (1, 3, 5, 4, 7), ["input0"],
        ),
        "a volume": (Ways(lambda x, c: c(x), nn.Conv3d(6, 8, 3)), (1, 6, 5, 4, 7), ["input0"]),
        "transposed": (
            Ways(lambda x, c: c(x), nn.ConvTranspose2d(6, 8, 2, 2)), (1, 6, 5, 4), ["input0"],
        ),
        "transposed, one feature": (
            Ways(lambda x, c: c(x), nn.ConvTranspose2d(6, 1, 2, 2)), (1, 6, 5, 4), ["input0"],
        ),
        "transposed, groups": (
            Ways(lambda x, c: c(x), nn.ConvTranspose2d(6, 9, 2, 2, groups=3)), (1, 6, 5, 4),
            ["input0"],
        ),
        "transposed, groups of one feature": (
            Ways(lambda x, c: c(x), nn.ConvTranspose2d(6, 3, 2, 2, groups=3)), (1, 6, 5, 4),
            ["input0"],
        ),
        "transposed, depthwise": (
            Ways(lambda x, c: c(x), nn.ConvTranspose2d(6, 12, 2, 2, groups=6)), (1, 6, 5, 4), [],
        ),
        "by the flag": (
            Ways(lambda x, c: torch.convolution(
                x, c.weight, None, [2, 2], [0, 0], [1, 1], True, [0, 0], 6,
            ), nn.ConvTranspose2d(6, 12, 2, 2, groups=6)), (1, 6, 5, 4), [],
        ),
        "groups": (Ways(lambda x, c: c(x), nn.Conv2d(6, 8, 3, groups=2)), (1, 6, 5, 4), ["input0"]),
        "one channel": (Ways(lambda x, c: c(x), nn.Conv2d(1, 8, 3)), (2, 1, 9, 7), []),
        "depthwise": (Ways(lambda x, c: c(x), nn.Conv2d(6, 6, 3, groups=6)), (2, 6, 9, 7), []),
        "no batch": (Ways(lambda x, c: c(x), nn.Conv2d(6, 8, 3)), (6, 9, 7), []),
        "no convolution": (Ways(lambda x: x.relu()), (2, 6, 9, 7), []),
    }  # fmt: skip


CASES = cases()


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("name", CASES)
def test_what_is_copied(name) -> None:
    model, shape, copied = CASES[name]
    graph = with_channels_last(capture(model, (torch.randn(shape),))).graph
    made = [n for n in graph.nodes if n.op == "clone"]
    assert [n.call.args[0].name for n in made] == copied
    for n in made:
        readers = graph.users()[n.results[0]]
        assert readers
        assert all(r.op == "pad" or r.op.startswith("conv") for r in readers)
        # nobody who does not ask for it reads the copy, and no convolution the tensor itself
        rest = graph.users()[n.call.args[0]]
        assert not [r.op for r in rest if r.op.startswith("conv")]


def test_channels_that_lie_side_by_side_are_not_copied() -> None:
    x = torch.randn(2, 6, 9, 7).to(memory_format=torch.channels_last)
    captured = capture(CASES["a picture"][0], (x,))
    assert with_channels_last(captured) is captured


@pytest.mark.parametrize(
    ("layer", "shape", "dtype", "strides"),
    [
        (nn.Conv3d(3, 8, 3), (2, 3, 5, 4, 7), torch.float32, (560, 1, 112, 28, 4)),
        (nn.ConvTranspose2d(3, 8, 3, 2), (2, 3, 5, 4), torch.bfloat16, (160, 1, 32, 8)),
        (nn.Conv3d(6, 8, 3), (1, 6, 5, 4, 7), torch.float32, (1120, 1, 224, 56, 8)),
        (nn.Conv2d(3, 8, 3), (2, 3, 5, 4), torch.float32, (60, 1, 12, 3)),  # packed
    ],
)
def test_few_channels_are_16_bytes_apart_where_no_packed_form_reads_them(
    layer, shape, dtype, strides
) -> None:
    layer, x = layer.to(dtype), torch.randn(shape, dtype=dtype)
    captured = with_channels_last(capture(layer, (x,)))
    layouts = choose_layouts(captured.graph, lambda n: is_view(n.call.target))
    (copy,) = [n.results[0] for n in captured.graph.nodes if n.op == "clone"]
    assert layouts[copy] == strides
    values = run_eagerly(captured, [x], layouts)
    assert values[copy].stride() == strides
    least = 1e-5 if dtype is torch.float32 else 2**-7
    got = values[captured.graph.outputs[0]]
    torch.testing.assert_close(got, layer(x), rtol=least, atol=least)


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c[2]])
def test_the_operators_compute_the_same(name) -> None:
    model, shape, _ = CASES[name]
    x = torch.randn(shape)
    captured = with_channels_last(capture(model, (x,)))
    layouts = choose_layouts(captured.graph, lambda n: is_view(n.call.target))
    values = run_eagerly(captured, [x], layouts)
    eager = model(x)
    wanted = eager if isinstance(eager, tuple) else (eager,)
    for t, want in zip(captured.graph.outputs, wanted, strict=True):
        torch.testing.assert_close(values[t], want)
        assert same_strides(values[t], want.stride())


@pytest.mark.parametrize("name", ["and a result", "zeros around it", "a volume of three channels"])
def test_the_program_computes_the_same(name) -> None:
    model, shape, _ = CASES[name]
    x = torch.randn(shape)
    captured = with_channels_last(capture(model, (x,)))
    planned = planner.plan(captured, [x], Settings(budget_s=60.0))
    program = Program(model, (x,), {}, lambda *_: (captured, planned.plan), Settings())
    other = torch.randn(shape)
    got, eager, want = program(other), model(other), model.double()(other.double())
    model.float()
    several = (x if isinstance(x, tuple) else (x,) for x in (got, eager, want))
    for a, b, c in zip(*several, strict=True):
        assert (a.double() - c).norm() <= 1e-6 * c.norm()
        assert a.stride() == b.stride()


def test_the_cut_lies_behind_the_copy() -> None:
    model, shape, _ = CASES["a picture"]
    nodes = with_channels_last(capture(model, (torch.randn(shape),))).graph.nodes
    cut = relayout_cut(nodes)
    assert cut is not None
    assert [nodes[i].op for i in cut.first] == ["clone"]
    assert cut.nbytes == 2 * 4 * 2 * 6 * 9 * 7
    assert relayout_cut(nodes[1:]) is None
    assert relayout_cut(nodes[:1]) is None  # by itself: nothing to cut


def test_a_copy_that_no_kernel_takes_along_is_apart_with_the_reason(monkeypatch) -> None:
    def build_all(self, candidates):
        found = build(self, candidates)
        why = CompilerError("more registers than there are")
        pairs = zip(candidates, found, strict=True)
        return [why if len(c.region.nodes) > 1 else b for c, b in pairs]

    build = CppGenerator.build_all
    monkeypatch.setattr(CppGenerator, "build_all", build_all)
    monkeypatch.setattr(decide, "onednn_steps", lambda *_: ())  # as on a GPU
    model, shape, _ = CASES["a picture"]
    x = torch.randn(shape)
    captured = with_channels_last(capture(model, (x,)))
    planned = planner.plan(captured, [x], Settings(budget_s=60.0))
    (first,) = (d for d in planned.decisions if d.edge[0] == "input0_channels_last")
    assert not first.fused
    assert first.rule == Rule.NOT_WHOLE.name
    assert "more registers than there are" in first.text
