"""Attention against ATen, composed and as one stream."""

import numpy as np
import pytest
import torch
from tests.conformance.aten import check, dtype_of, express, randn

from onchip.backends.interpreter import evaluate
from onchip.errors import OpaqueOperator
from onchip.ir.expr import Stream, given
from onchip.ops.attention import attention_stream

SDPA = "aten.scaled_dot_product_attention.default"


def inputs(batch=(2, 4), queries=5, keys=7, width=8, values=8, dtype=torch.float32):
    shapes = ((*batch, queries, width), (*batch, keys, width), (*batch, keys, values))
    return [randn(*s, seed=n, dtype=dtype) for n, s in enumerate(shapes)]


def masks(queries, keys):
    keep = torch.rand(queries, keys, generator=torch.Generator().manual_seed(1)) > 0.4
    keep[2] = False  # a query that sees nothing
    keep[:, :4] &= torch.arange(queries)[:, None] != 1  # and one that sees late keys only
    keep[1, 6] = True
    return keep, torch.zeros(queries, keys).masked_fill(~keep, -float("inf")), randn(queries, keys)


@pytest.mark.parametrize("batch", [(2, 4), (3,), (1, 1), (0, 2), ()])
def test_attention(batch):
    for scale in (None, 0.3):
        check(SDPA, *inputs(batch), scale=scale)
        check(SDPA, *inputs(batch, values=3), scale=scale)
        check(SDPA, *inputs(batch), is_causal=True, scale=scale)
        check(SDPA, *inputs(batch, queries=9), is_causal=True, scale=scale)
    for mask in masks(5, 7):
        check(SDPA, *inputs(batch), mask)


def test_masks_broadcast():
    q, k, v = inputs()
    for shape in [(2, 1, 5, 7), (4, 5, 7), (2, 4, 1, 7), (1, 1, 5, 1)]:
        check(SDPA, q, k, v, randn(*shape))
        check(SDPA, q, k, v, randn(*shape) > -4)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_grouped_queries(heads):
    q = inputs()[0]
    _, k, v = inputs((2, heads))
    check(SDPA, q, k, v, enable_gqa=True)
    check(SDPA, q, k, v, is_causal=True, enable_gqa=True)


def test_core_forms():
    q, k, v = inputs()
    added = masks(5, 7)[1]
    cpu = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    check(cpu, q, k, v)
    check(cpu, *inputs(keys=5), 0.0, True)
    check(cpu, q, k, v, attn_mask=added)
    math = "aten._scaled_dot_product_attention_math.default"
    check(math, q, k, v)
    check(math, q, k, v, added)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.2)
    for name, between, count in [("flash", (), 9), ("efficient", (None, False), 4),
                                 ("cudnn", (None, False), 9)]:  # fmt: skip
        target = f"aten._scaled_dot_product_{name}_attention.default"
        results, values = express(target, (q, k, v, *between), {"scale": 0.2})
        assert len(results) == count
        (got,) = evaluate([results[0]], values)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    check(SDPA, *inputs(dtype=dtype))


@pytest.mark.parametrize("block", [1, 3, 7, 64])
@pytest.mark.parametrize("kind", ["plain", "causal", "kept", "added", "bias", "grouped"])
def test_stream_equals_aten(kind, block):
    """One pass over the keys in blocks gives what ATen gives, whatever the block."""
    q, k, v = inputs()
    if kind == "grouped":
        _, k, v = inputs((2, 2))
    mask = dict(zip(("kept", "added", "bias"), masks(5, 7), strict=True)).get(kind)
    wide = [t.double() for t in (q, k, v)]
    mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    want = torch.nn.functional.scaled_dot_product_attention(
        *wide, mask, is_causal=kind == "causal", scale=0.4, enable_gqa=kind == "grouped"
    )
    arrays = [t for t in (*wide, mask) if t is not None]
    tensors = [given(t.shape, dtype_of(t.dtype)) for t in arrays]
    out = attention_stream(*tensors, causal=kind == "causal", scale=0.4, grouped=kind == "grouped")
    assert isinstance(out.body, Stream)
    values = {t: a.numpy() for t, a in zip(tensors, arrays, strict=True)}
    (got,) = evaluate([out], values, exact=True, block=block)
    torch.testing.assert_close(torch.from_numpy(got), want, rtol=1e-11, atol=1e-11)


def test_left_to_the_library():
    q, k, v = inputs()
    with pytest.raises(OpaqueOperator, match="dropout"):
        express(SDPA, (q, k, v, None, 0.5), {})
    core = "aten._scaled_dot_product_attention_math.default"
    with pytest.raises(OpaqueOperator, match="mask of bool"):
        express(core, (q, k, v, masks(5, 7)[0]), {})
    with pytest.raises(OpaqueOperator, match="mixed types"):
        express(SDPA, (q, k.double(), v), {})
