"""Scaled dot-product attention: composed of tensors, and the same as one stream.

The operator is composed (scores, top, weights, total, output); fusion/ turns the chain into one
pass. `attention_stream` is that pass written by hand: the state of an online softmax carried
over the keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from onchip.errors import OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Const,
    Expr,
    Reduce,
    Stream,
    Tensor,
    Var,
    axis,
    call,
    cast,
    fold,
    lift,
    tensor,
    where,
)
from onchip.ops.geometry import NEGATIVE_INFINITY, broadcast, require_float, require_same_type
from onchip.ops.promotion import broadcast_shape, compare
from onchip.ops.registry import op


@dataclass(frozen=True, slots=True)
class Attention:
    """q [..., L, E], k [..., S, E], v [..., S, V]; leading axes broadcast, and with `grouped`
    the heads (axis -3) of k and v each serve several heads of q. `mask` broadcasts to
    [..., L, S]: booleans keep, numbers are added. `causal`: query l sees keys 0..l."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    causal: bool = False
    scale: float | None = None
    grouped: bool = False

    @property
    def batch(self) -> tuple[int, ...]:
        if self.grouped:
            return self.q.shape[:-2]
        return broadcast_shape(*(t.shape[:-2] for t in (self.q, self.k, self.v)))

    @property
    def queries(self) -> int:
        return self.q.shape[-2]

    @property
    def keys(self) -> int:
        return self.k.shape[-2]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.batch, self.queries, self.v.shape[-1])

    @property
    def compute(self) -> DType:
        return self.q.dtype.compute

    def read(self, x: Tensor, b: tuple[Expr, ...], row: Expr, column: Expr) -> Expr:
        """x at batch position b of the output; a head of k or v may serve several of q."""
        lead = x.shape[:-2]
        own = list(b[len(b) - len(lead) :])
        if self.grouped and lead[-1] != self.batch[-1]:
            own[-1] = own[-1] // (self.batch[-1] // lead[-1])
        at = [Const(0, DType.I64) if n == 1 else i for n, i in zip(lead, own, strict=True)]
        return x[(*at, row, column)]

    def score(self, b: tuple[Expr, ...], row: Expr, column: Expr) -> Expr:
        """Scaled, masked product of one query and one key."""
        width = self.q.shape[-1]
        scale = 1.0 / math.sqrt(width) if self.scale is None else self.scale
        value: Expr = fold(
            "sum",
            (width,),
            lambda e: self.read(self.q, b, row, e) * self.read(self.k, b, column, e),
        )
        value = value * lift(float(scale), self.compute)
        if self.causal:
            value = where(compare("le", column, row), value, NEGATIVE_INFINITY)
        if self.mask is None:
            return value
        mask = broadcast(self.mask, (*b, row, column))
        if self.mask.dtype is DType.BOOL:
            return where(mask, value, NEGATIVE_INFINITY)
        return value + cast(mask, self.compute)


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of a composed attention."""

    top: Tensor
    weights: Tensor
    total: Tensor
    output: Tensor


def attention_parts(a: Attention) -> Parts:
    """Scores, their top, exp(score - top), its total over the keys, and the output. A query that
    sees no key gives zeros, as in ATen: a top of minus infinity counts as 0, a total of 0 as 1."""
    kind, rows, masked = a.compute, (*a.batch, a.queries), a.causal or a.mask is not None
    scores = tensor((*rows, a.keys), kind, lambda *i: a.score(i[:-2], i[-2], i[-1]), "scores")

    def top_of(*i: Expr) -> Expr:
        value = fold("max", (a.keys,), lambda s: scores[(*i, s)])
        if not masked:
            return value
        return where(compare("eq", value, NEGATIVE_INFINITY), 0.0, value)

    top = tensor(rows, kind, top_of, "top")
    weights = tensor(
        (*rows, a.keys), kind, lambda *i: call("exp", scores[i] - top[i[:-1]]), "weights"
    )

    def total_of(*i: Expr) -> Expr:
        value = fold("sum", (a.keys,), lambda s: weights[(*i, s)])
        return where(compare("eq", value, 0.0), 1.0, value) if masked else value

    total = tensor(rows, kind, total_of, "total")

    def output_of(*i: Expr) -> Expr:
        product = fold(
            "sum", (a.keys,), lambda s: weights[(*i[:-1], s)] * a.read(a.v, i[:-2], s, i[-1])
        )
        return product / total[i[:-1]]

    return Parts(top, weights, total, tensor(a.out_shape, a.q.dtype, output_of, "attention"))


def attention_stream(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False,
    scale: float | None = None, grouped: bool = False,
) -> Tensor:  # fmt: skip
    """The same attention as one stream over the keys: state (top, total, weighted sum of v)."""
    a = Attention(q, k, v, mask, causal, scale, grouped)

    def element(*i: Expr) -> Expr:
        return _stream(a, i[:-2], i[-2], i[-1])

    return tensor(a.out_shape, q.dtype, element, "attention_stream")


def _stream(a: Attention, b: tuple[Expr, ...], row: Expr, column: Expr) -> Stream:
    kind, s = a.compute, axis(a.keys, "s")
    top, total, mix = (Var(name, kind) for name in ("top", "total", "mix"))
    score = a.score(b, row, s)
    new_top = call("maximum", top, _over(s, "max", score))
    # what the exponents are taken from: 0 while every score so far is minus infinity
    base = where(compare("eq", new_top, NEGATIVE_INFINITY), 0.0, new_top)
    weight, decay = call("exp", score - base), call("exp", top - base)
    step = (
        new_top,
        total * decay + _over(s, "sum", weight),
        mix * decay + _over(s, "sum", weight * a.read(a.v, b, s, column)),
    )
    start = (lift(NEGATIVE_INFINITY, kind), lift(0.0, kind), lift(0.0, kind))
    finish = mix / where(compare("eq", total, 0.0), 1.0, total)
    return Stream(s, (top, total, mix), start, step, finish)


def _over(s: Axis, monoid: str, body: Expr) -> Reduce:
    return Reduce(monoid, (s,), body)


# ---- the operator's forms ----------------------------------------------------------------------


def _core(a: Attention, dropout: float) -> Attention:
    """The forms beneath the public one add their mask, whatever its type."""
    if a.mask is not None and not a.mask.dtype.is_float:
        raise OpaqueOperator(f"a core form of attention with a mask of {a.mask.dtype.label}")
    return _checked(a, dropout)


def _checked(a: Attention, dropout: float) -> Attention:
    if dropout:
        raise OpaqueOperator("attention with dropout draws random numbers")
    for t in (a.q, a.k, a.v):
        require_float(t, "attention")
    require_same_type("attention", a.q, a.k, a.v)
    if a.mask is not None and not (a.mask.dtype is DType.BOOL or a.mask.dtype.is_float):
        raise OpaqueOperator(f"attention with a mask of {a.mask.dtype.label}")
    if a.causal and a.mask is not None:
        raise OpaqueOperator("attention that is causal and has a mask")
    return a


@op("aten.scaled_dot_product_attention.default")
def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """softmax(q k' * scale + mask) v; see Attention for shapes and masks."""
    a = Attention(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    return attention_parts(_checked(a, dropout_p)).output


@op("aten._scaled_dot_product_attention_math.default")
def attention_math(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, dropout_mask: Tensor | None = None, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, attention probabilities)."""
    if dropout_mask is not None:
        raise OpaqueOperator("attention with a dropout mask")
    a = _core(Attention(q, k, v, attn_mask, is_causal, scale, enable_gqa), dropout_p)
    parts = attention_parts(a)
    probabilities = tensor(
        parts.weights.shape, q.dtype, lambda *i: parts.weights[i] / parts.total[i[:-1]]
    )
    return parts.output, probabilities


@op("aten._scaled_dot_product_flash_attention_for_cpu.default")
def attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, logarithm of the sum of exponentials of each query's scores)."""
    parts = attention_parts(_core(Attention(q, k, v, attn_mask, is_causal, scale), dropout_p))
    log_total = tensor(
        parts.top.shape, parts.top.dtype, lambda *i: parts.top[i] + call("log", parts.total[i])
    )
    return parts.output, log_total


@op("aten._scaled_dot_product_flash_attention.default")
def attention_flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The output; what the backward pass would need is not given."""
    parts = attention_parts(_core(Attention(q, k, v, None, is_causal, scale), dropout_p))
    return parts.output, *([None] * 8)


@op("aten._scaled_dot_product_efficient_attention.default")
def attention_efficient(
    q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The output; what the backward pass would need is not given."""
    parts = attention_parts(_core(Attention(q, k, v, attn_bias, is_causal, scale), dropout_p))
    return parts.output, None, None, None


@op("aten._scaled_dot_product_cudnn_attention.default")
def attention_cudnn(
    q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The output; what the backward pass would need is not given."""
    parts = attention_parts(_core(Attention(q, k, v, attn_bias, is_causal, scale), dropout_p))
    return parts.output, *([None] * 8)
