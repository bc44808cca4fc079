"""Compiled programs whose work the rules have shortened: results, live weights, the report."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algebra.test_rules import compare, error, flat
from tests.modules import Fn, interpret
from torch import nn

import onchip
from onchip.algebra import simplify
from onchip.capture import capture
from onchip.errors import OnchipError
from onchip.settings import Settings


def parameter(*shape):
    return nn.Parameter(torch.randn(shape))


MODELS = {
    "mean_into_layer": (
        Fn(lambda s, x: torch.logsumexp(s.c(x).mul(0.5).mean((2, 3), keepdim=True) + s.b, 1),
           c=nn.ConvTranspose2d(5, 24, 3, 2, 1, 1), b=parameter(24, 1, 1)),
        (3, 5, 13, 11)),
    "affine_folded": (
        Fn(lambda s, x: (F.avg_pool2d(s.c(x) * s.a, 2) + s.b) * 2,
           c=nn.ConvTranspose2d(3, 7, 3, 2, 1), a=parameter(1), b=parameter(7, 1, 1)),
        (2, 3, 9, 8)),
    "max_before_curves": (
        Fn(lambda s, x: F.max_pool2d(torch.tanh(s.c(x)) * 2 + s.b, 3, 2, 1),
           c=nn.Conv2d(5, 6, 3), b=parameter(6, 1, 1)),
        (2, 5, 13, 11)),
    "bias_cancelled": (
        Fn(lambda s, x: F.instance_norm(s.c(x)).relu(), c=nn.Conv2d(5, 6, 3)), (2, 5, 13, 11)),
}  # fmt: skip


@pytest.mark.parametrize("rule", MODELS)
@torch.no_grad()
def test_a_program_follows_its_weights_and_reports_the_rule(rule):
    model, shape = copy.deepcopy(MODELS[rule][0]), MODELS[rule][1]
    x = torch.randn(shape)
    program = onchip.compile(model, (x,))
    for changed in (False, True):
        for p in model.parameters() if changed else ():
            p.add_(torch.randn_like(p) * 0.3)
        exact = copy.deepcopy(model).double()(x.double())
        assert error(program(x), exact) <= max(5e-7, 4 * error(model(x), exact))
    report = program.report()
    assert rule in {e.kind for e in report.numerics.ledger}
    assert rule in report.text()


def test_an_unknown_rule_is_refused_when_the_program_is_made():
    with pytest.raises(OnchipError, match="no rule is named relu_first; the rules are affine_f"):
        onchip.compile(
            nn.ReLU(), (torch.ones(2),), settings=Settings(without=frozenset(["relu_first"]))
        )


@given(st.data())
@settings(max_examples=25, deadline=None)
@torch.no_grad()
def test_any_convolution_and_mean_agree_with_float64(data):
    """Whatever the sizes are: the rules apply or not, and the result is the same."""
    draw = data.draw
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(2))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(2))
    groups, transposed = draw(st.sampled_from([1, 1, 2])), draw(st.booleans())
    options = {"stride": stride, "groups": groups, "bias": draw(st.booleans())}
    if transposed:
        options["output_padding"] = tuple(draw(st.integers(0, s - 1)) for s in stride)
    else:
        options["dilation"] = draw(st.integers(1, 2))
    options["padding"] = tuple(draw(st.integers(0, k - 1)) for k in kernel)
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(4, 16, kernel, **options)
    x = torch.randn(2, 4, draw(st.integers(12, 17)), draw(st.integers(12, 17))) + 0.2
    pool = tuple(draw(st.integers(1, 2)) * (s if transposed else 1) for s in stride)
    over = draw(st.sampled_from([
        lambda y: y.mean((2, 3)), lambda y: y.sum(2), lambda y: y.mean(1),
        lambda y: F.avg_pool2d(y, pool), lambda y: F.max_pool2d(F.relu(y), 2) * 2,
    ]))  # fmt: skip
    model = Fn(lambda s, x: over(s.c(x) * s.a) - s.b, c=layer, a=parameter(1), b=parameter(1))
    got = interpret(simplify(capture(model, (x,))), [x])
    compare(got, flat(model(x)), flat(copy.deepcopy(model).double()(x.double())), 1e-6)
