"""Each rule against float64: it applies where it should, its ledger says so, its switch leaves it
out, and the result follows the live parameters."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.modules import Fn, interpret, same, targets
from torch import nn

from onchip.algebra import RULES, in_force, rewriting, simplify
from onchip.capture import capture
from onchip.errors import OnchipError
from onchip.settings import Settings

LAUNCHES = rewriting._launches  # which conftest.py leaves out


def parameter(*shape):
    return nn.Parameter(torch.randn(shape))


def error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


def kinds(captured):
    return [e.kind for e in captured.ledger]


@torch.no_grad()
def check(model, x, *expected, most=4e-7):
    """The simplified program against float64, before and after its parameters change; without
    each expected rule, the ledger does not name it. (What the model's results have in common is
    not merged, so that each is a case of its own.)"""
    model = model.eval()
    captured = simplify(capture(model, (x,), merge=False))
    for changed in (False, True):
        for p in model.parameters() if changed else ():
            p.copy_(torch.randn_like(p) + 0.1)
        eager, exact = flat(model(x)), flat(copy.deepcopy(model).double()(x.double()))
        compare(interpret(captured, [x]), eager, exact, most)
    for name in expected:
        assert kinds(captured).count(name) >= len(eager), captured.ledger
        left = simplify(capture(model, (x,), merge=False), Settings(without=frozenset([name])))
        assert name not in kinds(left)
        compare(interpret(left, [x]), eager, exact, most)
    return captured


def flat(results):
    return results if isinstance(results, (tuple, list)) else [results]


def compare(got, eager, exact, most):
    for g, e, x in zip(got, eager, exact, strict=True):
        assert g.shape == e.shape
        assert g.dtype is e.dtype
        assert error(g, x) <= max(most, 4 * error(e, x))


# ---- means of layers -----------------------------------------------------------------------------

CONV, ACROSS = nn.Conv2d, nn.ConvTranspose2d
LAYERS = [
    CONV(4, 32, 3),
    CONV(4, 32, 3, padding=1, bias=False),
    CONV(4, 32, 3, stride=2, padding=(1, 0)),
    CONV(4, 32, 3, dilation=2, padding=2),
    CONV(4, 32, 3, padding="same", groups=2),
    CONV(4, 32, 1),
    CONV(4, 32, (1, 5), padding=(0, 2)),
    ACROSS(4, 32, 3),
    ACROSS(4, 32, 3, stride=2, padding=1, output_padding=1),
    ACROSS(4, 32, (4, 3), stride=(3, 1), padding=(1, 2), dilation=(1, 2)),
    ACROSS(4, 32, 3, stride=2, groups=2),
    ACROSS(4, 32, (3, 2), stride=(1, 4), padding=(2, 0), groups=2, bias=False),
]
OVER = [
    lambda y: y.mean((2, 3), keepdim=True),
    lambda y: y.sum((-1, -2)),
    lambda y: F.adaptive_avg_pool2d(y, 1),
    lambda y: y.mean(2),
    lambda y: y.sum(3, keepdim=True),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_means_over_positions(layer):
    model = Fn(lambda s, x: [over(s.c(x)) for over in OVER], c=copy.deepcopy(layer))
    captured = check(model, torch.randn(3, 4, 21, 19) + 0.3, "mean_into_layer")
    assert captured.ledger[0].nodes[0] == "c"


def test_means_over_depth_and_one_dimension():
    check(Fn(lambda s, x: s.c(x).mean(2, keepdim=True), c=nn.ConvTranspose3d(3, 5, 3, padding=1)),
          torch.randn(2, 3, 5, 6, 7), "mean_into_layer")  # fmt: skip
    check(Fn(lambda s, x: s.c(x).sum((2, 4)), c=nn.Conv3d(3, 5, 3, padding=1, stride=(1, 2, 1))),
          torch.randn(2, 3, 5, 6, 7), "mean_into_layer")  # fmt: skip
    check(Fn(lambda s, x: s.c(x).mean(-1), c=nn.Conv1d(3, 5, 4, padding=2)),
          torch.randn(2, 3, 13), "mean_into_layer")  # fmt: skip


@pytest.mark.parametrize("keepdim", [False, True])
def test_means_over_features_and_rows(keepdim):
    def over(y, *choices):
        return [f(dim, keepdim=keepdim) for dim in choices for f in (y().sum, y().mean)]

    rows = torch.randn(3, 7, 5)
    for linear in (nn.Linear(5, 8), nn.Linear(5, 8, bias=False)):
        check(Fn(lambda s, x: over(lambda: s.l(x), -1, 2, 1, (0, 1)), l=linear), rows,
              "mean_into_layer")  # fmt: skip
    check(Fn(lambda s, x: over(lambda: x @ s.w, -1, 0), w=parameter(5, 8)), rows, "mean_into_layer")
    for layer in (CONV(4, 6, 3, groups=2), ACROSS(4, 6, 3, 2, groups=2), CONV(4, 6, 3, padding=1)):
        check(Fn(lambda s, x: over(lambda: s.c(x), 1), c=layer), torch.randn(2, 4, 7, 5),
              "mean_into_layer")  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2}, {"padding": 2}, {"ceil_mode": True},
     {"padding": 1, "count_include_pad": False}],
    ids=str,
)  # fmt: skip
def test_pools_over_features(options):
    def pooled(s, x):
        return F.avg_pool1d(s.l(x).unsqueeze(1), 4, **options).squeeze(1)

    check(Fn(pooled, l=nn.Linear(5, 15)), torch.randn(3, 5), "mean_into_layer")
    check(Fn(lambda s, x: F.avg_pool1d(s.l(x), 4, **options), l=nn.Linear(5, 15)),
          torch.randn(2, 3, 5), "mean_into_layer")  # fmt: skip


WINDOWS = [
    (CONV(4, 6, 3), 2, None),
    (CONV(4, 6, 3, padding=1, bias=False), (3, 2), (3, 2)),
    (CONV(4, 6, (2, 3), stride=(2, 1), groups=2), 2, 2),
    (CONV(4, 6, 2, dilation=(1, 2), padding=(1, 0)), 4, 3),
    (ACROSS(4, 6, 3, stride=2, padding=1), 2, None),
    (ACROSS(4, 6, 3, stride=2, padding=1, groups=2), 2, None),
    (ACROSS(4, 6, 4, stride=2, padding=1, bias=False), 2, None),
    (ACROSS(4, 6, (3, 5), stride=2, padding=(1, 2)), 4, 4),
    (ACROSS(4, 6, (3, 5), stride=(1, 2), padding=(0, 2)), (2, 4), (2, 4)),
]


@pytest.mark.parametrize(("layer", "size", "stride"), WINDOWS, ids=str)
def test_average_pools_of_convolutions(layer, size, stride):
    layer = copy.deepcopy(layer)
    captured = check(Fn(lambda s, x: F.avg_pool2d(s.c(x), size, stride), c=layer),
                     torch.randn(3, 4, 12, 11), "mean_into_layer")  # fmt: skip
    assert len(captured.graph.nodes) == 1


def test_a_convolution_of_one_tap_follows_the_pool():
    for layer, options in (
        (CONV(4, 9, 1), {"ceil_mode": True}),
        (CONV(4, 6, 1, groups=2), {"padding": 1, "count_include_pad": False}),
        (ACROSS(4, 6, 1, bias=False), {"padding": 1}),
    ):
        captured = check(Fn(lambda s, x, o=options: F.avg_pool2d(s.c(x), 3, **o), c=layer),
                         torch.randn(3, 4, 12, 11), "mean_into_layer")  # fmt: skip
        assert captured.graph.nodes[0].op == "avg_pool2d"
        assert not captured.prepare


@pytest.mark.parametrize(
    "f",
    [
        lambda s, x: (lambda y: (y.mean((2, 3)), y))(s.c(x)),  # the result is read elsewhere
        lambda s, x: F.relu(s.c(x)).mean((2, 3)),  # not linear
        lambda s, x: F.conv2d(x, x[:4, :, :3, :3]).mean((2, 3)),  # the weight is no constant
        lambda s, x: s.c(x).mean((2, 3), dtype=torch.float64),  # another type
        lambda s, x: F.avg_pool2d(s.c(x), 2, padding=1),  # padding of the convolution's results
        lambda s, x: F.avg_pool2d(s.c(x), 2, 1),  # more work than before
        lambda s, x: F.conv2d(x, s.one, stride=2).sum((2, 3)),  # positions that nobody reads
        lambda s, x: F.avg_pool2d(F.conv2d(x, s.one, stride=2), 2),
        lambda s, x: F.avg_pool2d(
            F.conv_transpose2d(x, s.c.weight, stride=2, padding=1, output_padding=1), 2
        ),
        lambda s, x: s.c(x).amax((2, 3)),
        lambda s, x: (lambda y: (y.mean((2, 3)), F.relu(y)))(s.c(x)),
        lambda s, x: F.avg_pool2d(F.conv2d(x, s.one, s.b), 2, padding=1),  # padded after the bias
    ],
)
def test_means_that_stay(f):
    model = Fn(f, c=CONV(4, 4, 3), one=parameter(16, 4, 1, 1), b=parameter(16))
    captured = simplify(capture(model, (torch.randn(4, 4, 9, 9),)))
    assert "mean_into_layer" not in kinds(captured)


@pytest.mark.parametrize(("size", "moved"), [(4, False), (56, True)])
def test_kernels_that_are_added_must_save_their_starts(size, moved, monkeypatch):
    """Two products and a linear layer for a convolution and a mean. Of 2 x 32 x 56 x 56 that moves
    a third of the bytes; of 4 x 4 pixels nothing is saved that is worth a start."""
    monkeypatch.setattr(rewriting, "_launches", LAUNCHES)
    monkeypatch.setattr(rewriting, "START_S", 1e-7)
    model = Fn(lambda s, x: s.c(x).mean((2, 3)), c=CONV(32, 32, 3, padding=1))
    captured = simplify(capture(model, (torch.randn(2, 32, size, size),)))
    assert ("mean_into_layer" in kinds(captured)) == moved


def test_half_types_keep_the_products_before_the_mean():
    model = Fn(lambda s, x: s.c(x).mean((2, 3)), c=CONV(4, 4, 3)).bfloat16()
    assert not simplify(capture(model, (torch.randn(2, 4, 9, 9).bfloat16(),))).ledger


# ---- constants -----------------------------------------------------------------------------------


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_constants_past_a_mean(kind, keepdim):
    x = torch.randn(3, 4, 5)
    parts = {"a": parameter(5), "b": parameter(4, 1), "c": parameter(3, 1, 1), "d": parameter()}
    for f in (
        lambda s, y: y + s.a,
        lambda s, y: y - s.b,
        lambda s, y: 2 * y / s.b,
        lambda s, y: torch.add(s.d * y, s.c, alpha=3),
        lambda s, y: y / 3 + 0.5,
        lambda s, y: torch.sub(y, 2, alpha=-1.5) * 0.25,
    ):

        def over(s, x, f=f):
            return getattr(f(s, torch.tanh(x)), kind)((0, 2), keepdim=keepdim)

        check(Fn(over, **parts), x, "mean_before_affine")
    varying = Fn(lambda s, x: getattr(torch.tanh(x) * s.a, kind)(-1), **parts)
    assert not simplify(capture(varying, (x,))).ledger


@pytest.mark.parametrize(
    ("options", "constant_too"),
    [({}, True), ({"padding": 1}, False), ({"padding": 1, "count_include_pad": False}, True),
     ({"ceil_mode": True}, True), ({"divisor_override": 3}, False)],
    ids=str,
)  # fmt: skip
def test_constants_past_an_average_pool(options, constant_too):
    x, b = torch.randn(2, 3, 7, 9), parameter(3, 1, 1)
    check(Fn(lambda s, x: F.avg_pool2d(torch.tanh(x) * s.b, 3, **options), b=b), x,
          "mean_before_affine")  # fmt: skip
    model = Fn(lambda s, x: F.avg_pool2d(torch.tanh(x) + s.b, 3, **options), b=b)
    if constant_too:
        check(model, x, "mean_before_affine")
    else:
        assert not simplify(capture(model, (x,))).ledger


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(CONV(4, 6, 3, groups=2), (2, 4, 7, 5)), (ACROSS(4, 6, 3, 2, groups=2), (2, 4, 7, 5)),
     (CONV(4, 6, 3, bias=False), (2, 4, 7, 5)), (nn.Linear(4, 6), (3, 4)),
     (nn.Linear(4, 6, bias=False), (2, 3, 4))],
    ids=str,
)  # fmt: skip
def test_constants_are_folded_into_a_layer(layer, shape):
    feature = (6, 1, 1) if len(shape) == 4 else (6,)
    parts = {"a": parameter(*feature), "b": parameter(*feature), "c": parameter()}
    x, one = torch.randn(shape), copy.deepcopy
    for f in (
        lambda s, y: y * s.a + s.b,
        lambda s, y: s.b - 0 + y / 2,
        lambda s, y: torch.sub(y / s.c, s.a, alpha=2) * 3,
    ):
        captured = check(Fn(lambda s, x, f=f: f(s, s.l(x)), l=one(layer), **parts), x,
                         "affine_folded")  # fmt: skip
        assert len(captured.graph.nodes) == 1


def test_a_chain_is_rounded_once_and_an_addition_leaves_the_weights_alone():
    model = Fn(lambda s, x: (s.n(s.c(x)) * s.a + s.b) / 3, c=CONV(3, 5, 3), n=nn.BatchNorm2d(5),
               a=parameter(5, 1, 1), b=parameter(1))  # fmt: skip
    model.n.running_var.uniform_(0.5, 2)
    captured = check(model, torch.randn(2, 3, 6, 5), "batch_norm_folded", "affine_folded")
    assert len(captured.graph.nodes) == 1
    assert captured.ledger[0].nodes == ("c", "n")
    added = capture(Fn(lambda s, x: s.c(x) + s.b, c=CONV(3, 5, 3), b=parameter(5, 1, 1)),
                    (torch.randn(2, 3, 6, 5),))  # fmt: skip
    (step,) = simplify(added).prepare
    assert [t.shape for t in step.outputs] == [(5,)]


def test_what_two_rules_derive_is_rounded_once():
    """A pool goes into the weights, and so does what stands behind it: one computation, no
    intermediate weights in memory, and the value of float64."""
    model = Fn(lambda s, x: F.avg_pool2d(s.c(x), 2) * s.a, c=CONV(3, 5, 3, bias=False),
               a=parameter(5, 1, 1))  # fmt: skip
    captured = simplify(capture(model, (torch.randn(2, 3, 8, 8),)))
    (step,) = captured.prepare
    live = {t: s.fetch().detach() for t, s in captured.slots.items()}
    (got,) = step.compute([live[s] for s in step.sources])
    w = model.c.weight.detach().double()
    wide = F.conv2d(w.reshape(15, 1, 3, 3), torch.full((1, 1, 2, 2), 0.25).double(), padding=1)
    exact = wide.reshape(5, 3, 4, 4) * model.a.detach().double()[..., None]
    same(got, exact.float())


@pytest.mark.parametrize(
    "f",
    [
        lambda s, x: s.c(x) * s.row,  # one value a column
        lambda s, x: s.c(x) + s.more,  # a larger result
        lambda s, x: F.relu(s.c(x)) * 2,
        lambda s, x: s.c(x) * x.mean(),  # no constant
        lambda s, x: s.c(x) * s.wide,  # another type
    ],
)
def test_constants_that_stay(f):
    parts = {"row": parameter(7), "more": parameter(3, 1, 1, 1, 1)}
    wide = nn.Parameter(torch.randn(4, 1, 1).double())
    captured = capture(Fn(f, c=CONV(4, 4, 3), wide=wide, **parts), (torch.randn(1, 4, 9, 9),))
    assert "affine_folded" not in kinds(simplify(captured))


# ---- maxima --------------------------------------------------------------------------------------

STEPS = [
    F.relu, F.relu6, F.hardtanh, F.hardsigmoid, lambda x: F.hardtanh(x, -0.3, 1.7),
    lambda x: F.leaky_relu(x, 0.2), lambda x: x.clamp(-0.5),
    lambda x: x.clamp(max=0.5), lambda x: x.clamp(-1, 0.3), lambda x: x.clamp_min(0.1),
    lambda x: x + 0.3, lambda x: x * 0.7, lambda x: 0.25 + x / 3, lambda x: x / 1e-30,
    lambda x: x - 1e30,
]  # fmt: skip
CURVES = [
    torch.sigmoid, torch.tanh, torch.exp, F.selu, F.softplus, lambda x: F.elu(x, 0.7),
    lambda x: F.celu(x, 1.3), lambda x: F.softplus(x, 0.5, 25.0),
]  # fmt: skip
POOLS = [
    lambda y: F.max_pool2d(y, 2),
    lambda y: F.max_pool2d(y, 3, 2, padding=1),
    lambda y: F.max_pool2d(y, 3, 2, padding=1, ceil_mode=True),
    lambda y: F.max_pool2d(y, (2, 3), (2, 2), dilation=(2, 1), ceil_mode=True),
    lambda y: F.max_pool2d(y, 2, return_indices=True)[0],
    lambda y: F.adaptive_max_pool2d(y, (3, 2)),
    lambda y: y.amax((1, 3)),
    lambda y: y.max(2, keepdim=True).values,
    lambda y: y.max(),
]


def odd():
    """Values of both signs, both infinities, zeros of both signs, NaN, denormals, large ones."""
    x = torch.randn(2, 3, 9, 11)
    inf, flat = float("inf"), x.view(-1)[::7]
    odd = torch.tensor([inf, -inf, 0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38, float("nan")])
    flat[:] = odd.repeat(12)[: len(flat)]
    x[0, 0, :4, :4] = -inf
    return x


@pytest.mark.parametrize("f", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_follow_a_maximum_bit_for_bit(f, dtype):
    model, x = Fn(lambda s, x: [pool(f(x)) for pool in POOLS]), odd().to(dtype)
    captured = simplify(capture(model, (x,), merge=False), Settings(numerics="eager"))
    assert kinds(captured).count("max_before_steps") >= len(POOLS)
    same(interpret(captured, [x]), model(x))
    left = simplify(capture(model, (x,), merge=False),
                    Settings(without=frozenset(["max_before_steps"])))  # fmt: skip
    assert not {"max_before_steps", "max_before_curves"} & set(kinds(left))


@pytest.mark.parametrize("f", CURVES)
def test_curves_follow_a_maximum(f):
    model, x = Fn(lambda s, x: [pool(f(x)) for pool in POOLS]), odd()
    captured = simplify(capture(model, (x,), merge=False))
    assert kinds(captured) == ["max_before_curves"] * len(POOLS)
    torch.testing.assert_close(interpret(captured, [x]), model(x), rtol=2e-7, atol=1e-44,
                               equal_nan=True)  # fmt: skip
    left = simplify(capture(model, (x,), merge=False), Settings(numerics="eager"))
    assert not left.ledger


def test_a_constant_a_channel_follows_a_pool_whatever_its_sign():
    model = Fn(lambda s, x: F.max_pool2d(torch.tanh(x) * 2 + s.b, 2), b=parameter(3, 1, 1))
    captured = check(model, torch.randn(2, 3, 8, 8), "max_before_steps", "max_before_curves")
    assert [n.op for n in captured.graph.nodes] == ["max_pool2d", "tanh", "mul", "add"]


@pytest.mark.parametrize(
    "f",
    [
        lambda s, x: F.max_pool2d(F.gelu(x), 2),
        lambda s, x: F.max_pool2d(F.silu(x), 2),
        lambda s, x: F.max_pool2d(x * s.b, 2),  # of either sign
        lambda s, x: F.max_pool2d(x * -2, 2),
        lambda s, x: F.max_pool2d(1 - x, 2),
        lambda s, x: F.max_pool2d(x + s.row, 2),  # differs in a window
        lambda s, x: (x + s.b).amax(1),  # along the maximum
        lambda s, x: F.leaky_relu(x, -0.1).amax(1),
        lambda s, x: F.softplus(x, 2.0, 3.0).amax(1),  # falls at its threshold
        lambda s, x: F.leaky_relu(x, 0.0).amax(1),  # NaN for minus infinity
        lambda s, x: F.max_pool2d(F.relu(x), 2, return_indices=True),  # positions are read
        lambda s, x: F.max_pool2d(F.relu(x), 3, 1, padding=1),  # as many results
        lambda s, x: F.max_pool2d(
            F.relu(x[..., :1]), (2, 2), (2, 1), (0, 1), (1, 2)
        ),  # padding only
        lambda s, x: (lambda y: (F.max_pool2d(y, 2), y))(F.relu(x)),
    ],
)
def test_maxima_that_stay(f):
    model, x = Fn(f, b=parameter(3, 1, 1), row=parameter(8)), torch.randn(2, 3, 8, 8)
    captured = simplify(capture(model, (x,)))
    assert not captured.ledger
    got, want = interpret(captured, [x]), model(x)
    same(got[0], want[0] if isinstance(want, tuple) else want)


# ---- norms, single elements, duplicates ----------------------------------------------------------

BEFORE_NORMS = [
    (CONV(4, 6, 3), lambda y: F.instance_norm(y)),
    (CONV(4, 6, 3), lambda y: F.group_norm(y, 6)),
    (CONV(4, 6, 3), lambda y: F.batch_norm(y, None, None, training=True)),
    (ACROSS(4, 6, 3, 2), lambda y: F.layer_norm(y, y.shape[-1:])),
    (ACROSS(4, 6, 3, 2), lambda y: F.layer_norm(y, y.shape[-2:])),
]


@pytest.mark.parametrize(("layer", "norm"), BEFORE_NORMS)
def test_a_bias_cancels_in_a_norm(layer, norm):
    x = torch.randn(3, 4, 7, 5)
    captured = check(Fn(lambda s, x: norm(s.c(x)), c=copy.deepcopy(layer)), x, "bias_cancelled")
    assert captured.graph.nodes[0].call.args[2] is None
    one = copy.deepcopy(layer)
    both = Fn(lambda s, x: norm(s.c(x) + s.b), c=one, b=parameter(6, 1, 1))
    captured = check(both, x, "bias_cancelled")
    assert len(captured.graph.nodes) == 2
    scalar = Fn(lambda s, x: norm(torch.tanh(s.c(x)) - s.b), c=one, b=parameter(1))
    assert len(check(scalar, x, "bias_cancelled").graph.nodes) == 3


@pytest.mark.parametrize(
    "f",
    [
        lambda s, x: F.group_norm(s.c(x), 3),
        lambda s, x: F.layer_norm(s.l(x), (6,)),
        lambda s, x: F.instance_norm(torch.tanh(s.c(x)) * s.b),
        lambda s, x: F.layer_norm(x + s.row, (5,)),
        lambda s, x: s.n(s.c(x)),  # updates a running mean
        lambda s, x: F.rms_norm(x + 1, (5,)),  # subtracts nothing
    ],
)
def test_biases_that_stay(f):
    model = Fn(f, c=CONV(4, 6, 3), l=nn.Linear(5, 6), n=nn.BatchNorm2d(6), b=parameter(6, 1, 1),
               row=parameter(5)).train()  # fmt: skip
    captured = simplify(capture(model, (torch.randn(3, 4, 7, 5),)))
    assert "bias_cancelled" not in kinds(captured)


def test_folds_of_one_element_are_views():
    def folds(s, x):
        y = torch.tanh(x)
        y = torch.logsumexp(y.amax(1, keepdim=True), 1, keepdim=True).mean((1, 2), keepdim=True)
        y = F.adaptive_avg_pool2d(F.adaptive_max_pool2d(y, 1), (1, 1))
        return y.max(1, keepdim=True).values.sum(2).prod(1) * 2

    x = torch.tensor([0.3, float("nan"), float("inf"), -float("inf"), -0.0]).reshape(5, 1, 1, 1)
    captured = simplify(capture(Fn(folds), (x,)), Settings(numerics="eager"))
    assert {e.kind for e in captured.ledger} == {"single_element"}
    assert [n.op for n in captured.graph.nodes] == ["tanh", "squeeze", "squeeze", "mul"]
    same(interpret(captured, [x])[0], Fn(folds)(x))
    left = simplify(capture(Fn(folds), (x,)), Settings(without=frozenset(["single_element"])))
    assert not left.ledger


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sum(1),  # the result would be the user's input
        lambda x: torch.tanh(x).sum(1, dtype=torch.float64),
        lambda x: torch.tanh(x).softmax(1),
        lambda x: torch.tanh(x).sum((1, 2)),
        lambda x: (lambda y: (y, y.sum(1)))(torch.tanh(x)),  # both are the user's
    ],
)
def test_folds_that_stay(f):
    captured = simplify(capture(Fn(lambda s, x: f(x)), (torch.randn(3, 1, 4),)))
    assert not captured.ledger


def test_an_adaptive_pool_of_single_elements_is_a_view_where_strides_agree():
    model = Fn(lambda s, x: F.adaptive_avg_pool2d(torch.tanh(x), (3, 5)).flatten(1))
    x = torch.randn(2, 4, 3, 5)
    captured = simplify(capture(model, (x,)))
    assert [n.op for n in captured.graph.nodes][:1] == ["tanh"]
    assert kinds(captured) == ["single_element"]
    same(interpret(captured, [x])[0], model(x))
    turned = Fn(lambda s, x: torch.tanh(x.transpose(1, 3)).sum(2).view(2, 20))
    x = torch.randn(2, 4, 1, 5)
    same(interpret(simplify(capture(turned, (x,))), [x])[0], turned(x))


def test_duplicates_are_computed_once_and_the_ledger_says_so():
    model = Fn(lambda s, x: torch.sin(x) + s.l(torch.sin(x)) * s.l(torch.sin(x)), l=nn.Linear(4, 4))
    x = torch.randn(3, 4)
    captured = capture(model, (x,))
    assert targets(captured).count("aten.sin.default") == 1
    assert [e.kind for e in captured.ledger] == ["computed_once"]
    twice = capture(model, (x,), merge=False)
    assert targets(twice).count("aten.sin.default") == 3
    assert not twice.ledger
    same(interpret(captured, [x])[0], interpret(twice, [x])[0])


# ---- settings ------------------------------------------------------------------------------------


def test_an_unknown_rule_is_an_error_that_lists_the_rules():
    with pytest.raises(OnchipError, match=r"no rule is named nonsense.*affine_folded.*single_ele"):
        in_force(Settings(without=frozenset(["nonsense"])))


def test_switches():
    names = {r.name for r in RULES}
    assert len(names) == len(RULES)
    assert in_force(Settings()) == names
    assert in_force(Settings(fold_batch_norm=False)) == names - {"batch_norm_folded"}
    assert in_force(Settings(numerics="eager")) == {r.name for r in RULES if not r.rounds}
    assert in_force(Settings(without=frozenset(names))) == set()
