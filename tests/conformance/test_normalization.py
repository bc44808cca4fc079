"""Normalisations against ATen."""

import numpy as np
import pytest
import torch
from tests.conformance.aten import check, express, randn

from onchip.backends.interpreter import evaluate
from onchip.errors import OpaqueOperator
from onchip.ir.expr import reduces
from onchip.ir.graph import defined_by

SHAPES = [(2, 3, 5, 7), (4, 3), (1, 3, 4), (2, 3, 2, 3, 4)]
AFFINE = [(False, False), (True, False), (True, True)]


def parameters(size, with_weight, with_bias):
    return (randn(size) if with_weight else None, randn(size, seed=3) if with_bias else None)


@pytest.mark.parametrize("shape", [*SHAPES, (0, 3, 4)])
@pytest.mark.parametrize("affine", AFFINE)
def test_batch_norm_inference(shape, affine):
    x, wb, mean, var = randn(*shape), parameters(3, *affine), randn(3), randn(3).abs() + 0.1
    stats = (*wb, mean, var)
    check("aten._native_batch_norm_legit_no_training.default", x, *stats, 0.1, 1e-5)
    check("aten.batch_norm.default", x, *stats, False, 0.1, 1e-3, False)
    check("aten.native_batch_norm.default", x, *stats, False, 0.1, 1e-3)
    functional = "aten._native_batch_norm_legit_functional.default"
    if affine == (True, True):
        check(functional, x, *stats, False, 0.1, 1e-3)


def test_inference_scale_and_shift_depend_on_parameters_only():
    x, stats = randn(2, 3, 5, 7), (randn(3), randn(3), randn(3), randn(3).abs())
    target = "aten._native_batch_norm_legit_no_training.default"
    (out, *_), values = express(target, (x, *stats, 0.1, 1e-5), {})
    parameters_only = [t for t in values if t.rank == 1]
    (scale, shift, last) = defined_by([out], values)
    assert last is out
    assert scale.shape == shift.shape == (3,)
    known = {t: values[t] for t in parameters_only}
    evaluate([scale, shift], known)  # KeyError if they read x
    assert not reduces(out.body)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", AFFINE)
def test_batch_norm_of_the_batch(shape, affine):
    x, wb = randn(*shape) * 3 + 5, parameters(3, *affine)
    check("aten._native_batch_norm_legit.no_stats", x, *wb, True, 0.1, 1e-5)
    check("aten.native_batch_norm.default", x, *wb, None, None, True, 0.1, 1e-5)
    functional = "aten._native_batch_norm_legit_functional.default"
    for momentum in (0.1, 0.0, 1.0):
        check(functional, x, *wb, randn(3), randn(3).abs(), True, momentum, 1e-5)


@pytest.mark.parametrize(
    ("shape", "over"), [((2, 3, 5), [5]), ((4, 3, 5), [3, 5]), ((7,), [7]), ((0, 5), [5])]
)
@pytest.mark.parametrize("affine", AFFINE)
def test_layer_and_rms_norm(shape, over, affine):
    x = randn(*shape) * 3 + 5
    weight = randn(*over) if affine[0] else None
    bias = randn(*over, seed=3) if affine[1] else None
    check("aten.layer_norm.default", x, over, weight, bias, 1e-5)
    check("aten.native_layer_norm.default", x, over, weight, bias, 1e-5)
    check("aten.rms_norm.default", x, over, weight, 1e-3)
    check("aten._fused_rms_norm.default", x, over, weight, 1e-3)
    if shape[0]:
        check(
            "aten.rms_norm.default", x.double(), over, None if weight is None else weight.double()
        )


def test_rms_norm_without_eps_takes_that_of_the_compute_type():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.full((1, 4), 1e-4).to(dtype)
        (out,), values = express("aten.rms_norm.default", (x, [4]), {})
        (got,) = evaluate([out], values)
        np.testing.assert_allclose(got, torch.rms_norm(x, [4]).float().numpy(), rtol=5e-3)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("space", [(5, 7), (), (11,), (2, 3, 4)])
def test_group_norm(groups, space):
    x, w, b = randn(2, 6, *space) * 3 + 5, randn(6), randn(6, seed=3)
    area = int(np.prod(space))
    if groups == 6 and not space:
        pytest.skip("one value for each group")
    for pair in ((w, b), (None, None), (w, None)):
        check("aten.group_norm.default", x, groups, *pair, 1e-5)
        check("aten.native_group_norm.default", x, *pair, 2, 6, area, groups, 1e-5)


@pytest.mark.parametrize("affine", AFFINE)
def test_instance_norm(affine):
    wb = parameters(3, *affine)
    for shape in [(2, 3, 5, 7), (2, 3, 11)]:
        x = randn(*shape) + 5
        check("aten.instance_norm.default", x, *wb, None, None, True, 0.1, 1e-5, False)  # fmt: skip
        check("aten.instance_norm.default", x, *wb, randn(3), randn(3).abs(), False, 0.1, 1e-5,
              False)  # fmt: skip


def test_what_mutates_is_left_to_the_library():
    x, stats = randn(2, 3, 5), (None, None, randn(3), randn(3).abs())
    for target in ("batch_norm", "instance_norm"):
        with pytest.raises(OpaqueOperator, match="in place"):
            express(f"aten.{target}.default", (x, *stats, True, 0.1, 1e-5, False), {})
    with pytest.raises(OpaqueOperator, match="in place"):
        express("aten.native_batch_norm.default", (x, *stats, True, 0.1, 1e-5), {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    x, w, b = randn(2, 6, 31, dtype=dtype), randn(6, dtype=dtype), randn(6, seed=3, dtype=dtype)
    check("aten.group_norm.default", x, 3, w, b)
    check("aten.layer_norm.default", x, [31], None, None)
    check("aten.rms_norm.default", x, [31], None, 1e-5)
    var = randn(6).abs() + 0.1
    target = "aten._native_batch_norm_legit_no_training.default"
    check(target, x, w.float(), b.float(), b.float(), var, 0.1, 1e-5)


def test_variance_far_from_zero():
    """Two passes: a mean of ten thousand deviations costs no accuracy in float32."""
    x = randn(4, 257) + 1e4
    (out,), values = express("aten.layer_norm.default", (x, [257]), {})
    (got,) = evaluate([out], values)
    want = torch.layer_norm(x.double(), [257]).numpy()
    assert np.abs(got - want).max() < 2e-3  # x itself is only known to 1e-3
