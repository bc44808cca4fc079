"""oneDNN's fused calls: what is recognised, and that results are right, against float64."""

import pytest
import torch
import torch.nn.functional as F
from tests.modules import Follow
from tests.runtime.library import compile_library
from torch import nn

from onchip.backends.library import onednn
from onchip.capture.schema import is_view
from onchip.fusion.region import region_of
from onchip.planning.library import onednn_steps
from onchip.planning.plan import CallStep, LibraryStep, Plan

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN"
)


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def whole_plan(captured):
    """The whole graph as one region; operators that oneDNN does not take are ATen calls."""
    graph = captured.graph
    position = {n: i for i, n in enumerate(graph.nodes)}
    weights = frozenset(graph.constants)
    region = region_of(graph.nodes, graph, weights, position)
    return Plan(onednn_steps(region, weights) or tuple(LibraryStep(n) for n in graph.nodes))


def build(model, *inputs):
    """The program and its steps, each as the operators that it computes."""
    program = compile_library(model.eval(), inputs, plan=whole_plan)
    program(*inputs)
    assert program.latest is not None
    steps = [
        ("+".join(n.op for n in s.nodes), isinstance(s, CallStep))
        for s in program.latest.plan.steps
    ]
    return program, steps


def check(model, *inputs, fused, tolerance=1e-5):
    """`fused`: the operators of each oneDNN call, in order. The rest is ATen's."""
    program, steps = build(model, *inputs)
    assert [name for name, call in steps if call] == fused
    got, eager = program(*inputs), model(*inputs)
    want = model.double()(*(x.double() for x in inputs))
    model.float()
    assert got.stride() == eager.stride()
    error = (got.double() - want).norm() / want.norm()
    assert error < tolerance
    return program


POST = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda y: F.gelu(y, approximate="tanh"),
    "hardswish": F.hardswish,
    "leaky_relu": lambda y: F.leaky_relu(y, 0.2),
}
# What oneDNN's instructions get wrong for NaN stays ATen's, in place: see onednn.py.
CLAMPS = {
    "relu": torch.relu,
    "hardtanh": lambda y: F.hardtanh(y, -0.5, 1.5),
    "relu6": F.relu6,
    "clamp": lambda y: y.clamp(-1, 0.7),
    "leaky_relu 0": lambda y: F.leaky_relu(y, 0.0),
    "hardsigmoid": F.hardsigmoid,
}


def images(*shape):
    return torch.randn(shape).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", POST)
def test_post_ops(name):
    op = name.split()[0]
    conv = Follow(nn.Conv2d(7, 13, 3, padding=1), POST[name])
    check(conv, images(2, 7, 11, 5), fused=[f"conv2d+{op}"])
    check(Follow(nn.Linear(13, 17), POST[name]), torch.randn(3, 5, 13), fused=[f"linear+{op}"])


@pytest.mark.parametrize("name", CLAMPS)
def test_clamps_are_calls_of_their_own(name):
    conv = Follow(nn.Conv2d(7, 13, 3, padding=1), CLAMPS[name])
    check(conv, images(2, 7, 11, 5), fused=["conv2d"])


@pytest.mark.parametrize("name", {**POST, **CLAMPS})
def test_nan_and_infinities_stay(name):
    f = {**POST, **CLAMPS}[name]
    for layer, x in (
        (nn.Conv2d(16, 16, 3, padding=1), images(2, 16, 9, 11)),
        (nn.Linear(16, 24), torch.randn(9, 16)),
    ):
        model = Follow(layer, f)
        x.select(0, 1)[3] = float("nan")
        x[0, 0] = float("inf")
        got, want = build(model, x)[0](x), model(x)
        assert got.isnan().any()
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(6, 10, (3, 2), stride=(2, 1), padding=(2, 0), dilation=(1, 3)), (1, 6, 13, 9)),
        (nn.Conv2d(8, 8, 3, groups=8, bias=False), (2, 8, 7, 7)),
        (nn.Conv2d(8, 12, 1, groups=4), (3, 8, 5, 1)),
        (nn.Conv2d(5, 7, 3, padding="same", dilation=2), (1, 5, 8, 9)),
        (nn.Conv2d(5, 7, 3, padding="valid"), (1, 5, 8, 9)),
        (nn.Conv3d(3, 5, 3, padding=1, stride=(1, 2, 1)), (2, 3, 4, 7, 5)),
    ],
)
def test_geometry(layer, shape):
    op = "conv3d" if len(shape) == 5 else "conv2d"
    check(Follow(layer, F.silu), torch.randn(shape), fused=[f"{op}+silu"])


def test_layouts_of_inputs_and_weights():
    layer = nn.Conv2d(6, 8, 3, padding=1)
    x = images(2, 6, 9, 7)
    strided, expanded = torch.randn(2, 12, 9, 7)[:, ::2], torch.randn(1, 6, 9, 1).expand(2, 6, 9, 7)
    for y in (x, x.contiguous(), strided, expanded, x.transpose(2, 3).contiguous().transpose(2, 3)):
        check(Follow(layer, torch.tanh), y, fused=["conv2d+tanh"])
    layer.to(memory_format=torch.channels_last)
    check(Follow(layer, torch.tanh), x, fused=["conv2d+tanh"])
    linear = Follow(nn.Linear(5, 3, bias=False), F.gelu)
    check(linear, torch.randn(5, 7).t(), fused=["linear+gelu"])
    check(linear, torch.randn(7, 1, 5).expand(7, 4, 5), fused=["linear+gelu"])


class Shortcut(nn.Module):
    def __init__(self, layer, f):
        super().__init__()
        self.layer, self.f = layer, f

    def forward(self, x):
        return self.f(self.layer(x), x)


@pytest.mark.parametrize(
    ("f", "after"),
    [
        (lambda y, x: y + x, "add"),
        (lambda y, x: x + y, "add"),
        (lambda y, x: y * x, "mul"),
        (lambda y, x: torch.relu(y + x), "add"),
    ],
)
def test_a_residual_of_the_same_shape(f, after):
    x = images(2, 6, 5, 7)
    check(Shortcut(nn.Conv2d(6, 6, 3, padding=1), f), x, fused=[f"conv2d+{after}"])
    check(Shortcut(nn.Conv2d(6, 6, 3, padding=1), f), x.contiguous(), fused=[f"conv2d+{after}"])
    check(Shortcut(nn.Linear(7, 7), f), torch.randn(3, 7), fused=[f"linear+{after}"])


@pytest.mark.parametrize(
    "f",
    [
        lambda y, x: torch.add(y, x, alpha=2),
        lambda y, x: y + x[:, :1],
        lambda y, x: y + 1.5,
        lambda y, x: y + y,
        lambda y, x: torch.relu(y) + y,
        lambda y, x: y - x,
    ],
)
def test_what_a_post_op_can_not_say(f):
    check(Shortcut(nn.Conv2d(6, 6, 3, padding=1), f), images(2, 6, 5, 7), fused=["conv2d"])


class Both(nn.Module):
    """The convolution's own result is a result too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(6, 6, 3)

    def forward(self, x):
        y = self.layer(x)
        return y, torch.sigmoid(y), torch.relu(y)


def test_a_result_that_others_read_is_kept():
    x, model = images(1, 6, 5, 7), Both()
    program, steps = build(model, x)
    assert [s for s, call in steps if call] == ["conv2d"]
    for got, want in zip(program(x), model(x), strict=True):
        torch.testing.assert_close(got, want)


class TwoLayers(nn.Module):
    """Two convolutions that one addition joins: it can follow one of them only."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1)

    def forward(self, x):
        return torch.tanh(self.a(x) + self.b(x))


def test_one_operator_follows_one_layer():
    check(TwoLayers(), images(2, 6, 5, 7), fused=["conv2d", "conv2d+add"])


class Pooled(nn.Module):
    """conv -> relu -> pool -> linear -> gelu: the pool and the ReLU stay ATen's."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 3 * 4, 5)

    def forward(self, x):
        y = F.avg_pool2d(torch.relu(self.conv(x)), 2)  # which no rule puts before the ReLU
        return F.gelu(self.linear(y.flatten(1)))


def test_other_operators_stay_calls_and_a_clamp_needs_no_memory():
    x = torch.randn(2, 3, 6, 8)
    program = check(Pooled(), x, fused=["conv2d", "linear+gelu"])
    assert "aten.relu_" in str([s.node.call.target for s in library_steps(program)])
    # it works, though what it returns is its argument; a view only describes memory
    assert not is_view("aten.relu_.default")
    assert is_view("aten.view.default")
    # convolution, ReLU, pool, (a view), linear layer with GELU
    assert program.launches == 4


def library_steps(program):
    return [s for s in program.latest.plan.steps if isinstance(s, LibraryStep)]


def test_changed_weights_are_packed_again():
    model, x = Follow(nn.Conv2d(4, 6, 3), F.silu), images(1, 4, 6, 6)
    program, _ = build(model, x)
    model.layer.weight.mul_(-2)
    torch.testing.assert_close(program(x), model(x))
    model.layer.load_state_dict(nn.Conv2d(4, 6, 3).state_dict())
    torch.testing.assert_close(program(x), model(x))


def test_not_for_other_types_weights_and_sizes():
    class Computed(nn.Module):
        def forward(self, x, w):
            return torch.tanh(F.conv2d(x, w))

    x = images(1, 4, 6, 6)
    assert not any(call for _, call in build(Computed(), x, torch.randn(3, 4, 3, 3))[1])
    model = Follow(nn.Conv2d(4, 3, 3), torch.tanh)
    assert not any(call for _, call in build(model, images(0, 4, 6, 6))[1])
    assert not any(call for _, call in build(model.double(), x.double())[1])
    uneven = Follow(nn.Conv2d(4, 3, 2, padding="same"), torch.tanh)  # one side gets more padding
    assert not any(call for _, call in build(uneven, x)[1])
    one = Follow(nn.Conv1d(4, 3, 3), torch.tanh)
    assert not any(call for _, call in build(one, torch.randn(1, 4, 6))[1])


def test_bfloat16_where_the_cpu_has_it():
    model = Follow(nn.Conv2d(8, 8, 3, padding=1), torch.sigmoid).bfloat16()
    x = images(2, 8, 6, 5).bfloat16()
    program, steps = build(model, x)
    has = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert any(call for _, call in steps) == has
    got, want = program(x), model.double()(x.double())
    assert (got.double() - want).norm() / want.norm() < 1e-2


def test_nothing_where_onednn_is_switched_off_or_lacks_an_operator(monkeypatch):
    model, x = Follow(nn.Conv2d(4, 6, 3), F.silu), images(1, 4, 6, 6)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not any(call for _, call in build(model, x)[1])
    # none of that name, and one that takes other arguments
    for other in ("mkldnn._no_such_operator.default", onednn.CONV):
        monkeypatch.setattr(onednn, "CONV_BINARY", other)
        onednn._has_operators.cache_clear()
        try:
            assert not any(call for _, call in build(model, x)[1])
        finally:
            onednn._has_operators.cache_clear()
