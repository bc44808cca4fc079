"""Weights laid out by torch indexing, against the interpreter's float64."""

import numpy as np
import pytest
import torch

from onchip.backends.interpreter import evaluate
from onchip.ir.dtype import DType
from onchip.ir.expr import Call, cast, given, lift, tensor, where
from onchip.planning import derive
from onchip.planning.derive import derived_tensor, to_numpy
from onchip.planning.gather import is_gather

TORCH = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}


def tiles(w, dtype, pad=0):
    """A filter [features, channels, 3, 3] as [taps, chunks, features, channels of a chunk], both
    padded to whole tiles."""
    return tensor(
        (9, 2, 16, 4), dtype, lambda t, k, f, c: w.padded(pad)[f, k * 4 + c, t // 3, t % 3], "w"
    )


def below(i, n):
    return Call("lt", (i, lift(n, DType.I64)), DType.BOOL)


W = (13, 7, 3, 3)

# name -> (shape of the weight, what it becomes)
CASES = {
    "tiles": (W, tiles),
    "tiles with infinities outside": (W, lambda w, d: tiles(w, d, float("-inf"))),
    "transposed": ((5, 7), lambda w, d: tensor((7, 5), d, lambda i, j: w[j, i], "m")),
    "broadcast": ((5,), lambda w, d: tensor((3, 5), d, lambda i, j: w[j], "m")),
    "one row": ((5, 7), lambda w, d: tensor((7,), d, lambda i: w[2, i], "m")),
    "one element": ((), lambda w, d: tensor((4,), d, lambda i: w[()], "m")),
    "reversed taps": (W, lambda w, d: tensor(W, d, lambda f, c, y, x: w[f, c, 2 - y, 2 - x], "m")),
    "two halves": (
        (6, 4),
        lambda w, d: tensor((12, 4), d, lambda i, j: where(below(i, 6), w.padded(0)[i, j], 1.0)),
    ),
    "rounded on the way": (
        (6, 4),
        lambda w, d: tensor((4, 6), d, lambda i, j: cast(w[j, i], DType.F32), "m"),
    ),
}


@pytest.mark.parametrize("kinds", [(DType.F32, DType.F32), (DType.F32, DType.BF16),
                                   (DType.BF16, DType.BF16), (DType.BF16, DType.F32),
                                   (DType.F16, DType.F16)], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_what_is_moved_is_moved_exactly(name, kinds, monkeypatch):
    shape, made = CASES[name]
    weight = given(shape, kinds[0], "weight")
    t = made(weight, kinds[1])
    values = torch.randn(shape).to(TORCH[kinds[0]])
    (expected,) = evaluate([t], {weight: to_numpy(values)}, exact=True)
    monkeypatch.setattr(derive, "evaluate", None)  # it is not asked
    got = derived_tensor(t, frozenset([weight])).compute([values])
    assert got.dtype is TORCH[kinds[1]]
    assert got.is_contiguous()
    assert got.shape == t.shape
    rounded = torch.from_numpy(np.array(expected)).to(got.dtype)
    assert torch.equal(got, rounded)


def test_what_is_computed_on_the_way_is_not_rounded_before_the_end():
    weight, scale = given(W, DType.F32, "weight"), given((13,), DType.F32, "scale")
    folded = tensor(W, DType.F32, lambda f, c, y, x: weight[f, c, y, x] * scale[f], "folded")
    t = tiles(folded, DType.BF16)
    plan = derived_tensor(t, frozenset([weight, scale]))
    values = {weight: torch.randn(W), scale: torch.rand(13) + 0.5}
    got = plan.compute([values[s] for s in plan.sources])
    exact = values[weight].double() * values[scale].double()[:, None, None, None]
    for tap, chunk, feature, channel in np.ndindex(9, 2, 16, 4):
        c = 4 * chunk + channel
        inside = feature < 13 and c < 7
        wanted = exact[feature, c, tap // 3, tap % 3].to(torch.bfloat16) if inside else 0
        assert got[tap, chunk, feature, channel] == wanted


def test_a_kernels_strides_are_kept():
    weight = given((5, 7), DType.F32, "weight")
    t = tensor((7, 5), DType.F32, lambda i, j: weight[j, i], "m")
    values = torch.randn(5, 7)
    got = derived_tensor(t, frozenset([weight]), (1, 8)).compute([values])
    assert got.stride() == (1, 8)
    assert torch.equal(got, values.T)


def test_the_interpreter_keeps_what_is_no_move():
    w, n = given((5, 7), DType.F32, "w"), given((5,), DType.I64, "n")
    for fn in (
        lambda i, j: w[i, j] * 2.0,
        lambda i, j: w[i, j] + w[i, j],
        lambda i, j: w[n[i], j],  # known when it runs
        lambda i, j: w[i + 1, j],  # an error there
        lambda i, j: w.padded(0.1)[i + 1, j],  # which bfloat16 does not have
        lambda i, j: cast(n[i], DType.F32),
        lambda i, j: Call("exp", (w[i, j],), DType.F32),
    ):
        assert not is_gather(tensor((5, 7), DType.BF16, fn))
    assert not is_gather(tensor((5,), DType.I64, lambda i: n[i]))
    assert not is_gather(w)
    assert is_gather(tensor((5, 7), DType.BF16, lambda i, j: w[i, j]))
