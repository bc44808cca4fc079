"""Writes to intermediates become new names without a second trace; everything else is left to
run_decompositions. The oracle is eager mode."""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from tests.modules import Fn, interpret, targets
from torch import nn

from onchip.capture import capture, schema

module = importlib.import_module("onchip.capture.functional")


@pytest.fixture
def decompositions(monkeypatch):
    """The programs that PyTorch traced again."""
    seen, original = [], module.run_decompositions

    def watched(program):
        seen.append(program)
        return original(program)

    monkeypatch.setattr(module, "run_decompositions", watched)
    return seen


def agrees(f, *inputs, **parts):
    """The captured graph gives eager's results, and writes nothing itself."""
    m = Fn(f, **parts)
    c = capture(m, inputs)
    assert not any(schema.overload(t)._schema.is_mutable for t in targets(c))
    got = interpret(c, [x.clone() for x in inputs])
    with torch.no_grad():
        want = copy.deepcopy(m)(*[x.clone() for x in inputs])
    want = want if isinstance(want, tuple) else (want,)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    return c


X = torch.randn(3, 5, 7) - 0.2


def relu_and_read_later(s, x):
    y = x * 2
    z = y.relu_()
    return y + z, y


def chain(s, x):
    y = x + 1
    y.mul_(3).sub_(x)
    y += x
    return y.sigmoid(), y


def read_before(s, x):
    y = x - 1
    before = y.exp()
    y.neg_()
    return before, y


def view_after(s, x):
    y = x - 1
    y.neg_()
    return y.transpose(0, 1) + 1, y[1]


def functional_batch_norm(s, x):
    return F.relu(F.batch_norm(x, s.mean, s.var, None, s.bias), inplace=True)


def composites(s, x):
    y = F.dropout(x.permute(2, 0, 1).reshape(7, -1), 0.5, training=False)
    a, b = y.chunk(2, 1)
    return (
        y.flatten().contiguous() * 2,
        a[:, :7].matmul(b.expand_as(y[:, :7]).mT),
        y.to(torch.float64),
    )


SIMPLE = [relu_and_read_later, chain, read_before, view_after, functional_batch_norm, composites]


@pytest.mark.parametrize("f", SIMPLE, ids=lambda f: f.__name__)
def test_writes_to_intermediates_need_no_second_trace(f, decompositions):
    agrees(f, X, mean=torch.randn(5), var=torch.rand(5) + 0.5, bias=torch.randn(5))
    assert not decompositions


def view_before(s, x):
    y = x * 2
    v = y[1]
    y.relu_()
    return v + 1, y


def view_of_a_name(s, x):
    y = x * 2
    v = y.neg_().transpose(0, 1)
    y.relu_()
    return v + 1, y


def through_a_view(s, x):
    y = x * 2
    y[:, 1].neg_()
    return y


def a_maybe_view(s, x):
    y = x * 2
    z = y.reshape(3, 35)
    y.add_(1)
    return z * 2, y


def dropped(s, x):
    y = F.dropout(x, 0.5, training=False)
    y.mul_(2)
    return y, x + 1


def to_input(s, x):
    x.mul_(2)
    return x + 1


def to_buffer(s, x):
    s.mean.add_(1)
    return x.sum(1) + s.mean[0]


def training(s, x):
    return F.batch_norm(x, s.mean, s.var, training=True)


def random(s, x):
    y = x * 2
    return y.bernoulli_(1.0), y


def another_type(s, x):
    y = x.half() * 2
    y += torch.full((7,), 0.1)
    return y


OTHERS = [
    *(view_before, view_of_a_name, through_a_view, a_maybe_view, dropped, to_input, to_buffer),
    *(training, random, another_type),
]


@pytest.mark.parametrize("f", OTHERS, ids=lambda f: f.__name__)
def test_everything_else_is_left_to_pytorch(f, decompositions):
    agrees(f, X, mean=torch.randn(5), var=torch.rand(5) + 0.5)
    assert len(decompositions) == 1


def test_autocast_is_left_to_pytorch(decompositions):
    with torch.autocast("cpu", torch.bfloat16):
        capture(nn.Linear(7, 4), (X,))
    assert len(decompositions) == 1


def test_a_composite_that_can_not_be_split_here_falls_back(decompositions, monkeypatch):
    """A program that is half rewritten is still the same program."""

    def refuse(graph, n):
        raise module._NotSimple("a test")

    monkeypatch.setattr(module, "_decomposed", refuse)
    agrees(lambda s, x: F.relu(x + 1, inplace=True).reshape(5, 21) * 2, X)
    assert len(decompositions) == 1


def test_graph_is_the_same_as_by_decompositions(monkeypatch):
    """Targets, names and places of a small network do not depend on who made it functional."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(), nn.Linear(36, 5), nn.Hardtanh(inplace=True),
    ).eval()  # fmt: skip
    x = (torch.randn(2, 3, 8, 8),)

    def described():
        return [(n.call.target, n.name, n.origin) for n in capture(net, x).graph.nodes]

    mine = described()
    monkeypatch.setattr(module, "_refusal", lambda program: "a test")
    assert mine == described()
