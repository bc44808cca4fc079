"""Means and sums over a convolution's positions, and average pools behind one.

Along each dimension, tap j of the kernel meets a set of input positions. So the sum over the
results is the sum over the taps of w[j] times the sum of the input over that set, and the
convolution is left with one position. An average pool behind a convolution is a convolution with a
wider kernel and a longer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from onchip.algebra.features import Made, of_features, of_rows, replaced, without_dims
from onchip.algebra.layers import Fold, Layer, Pool, convolution_args, fold_of, layer, pool_of
from onchip.algebra.rewriting import Facts, Rewrite, Values, again, derived, made, rewrite
from onchip.capture.captured import Captured, Prepare
from onchip.errors import OpaqueOperator
from onchip.ir.expr import Tensor
from onchip.ir.graph import Node

Rows = list[list[float]]  # a small matrix of numbers
_MUCH_LESS = 0.75  # share of the FLOPs below which convolution and pool become one convolution


def mean_into_layer(captured: Captured, _: frozenset[str]) -> Captured:
    """A mean, sum or average pool of a layer's results is taken of its weights or of its input,
    where that is fewer FLOPs and no more bytes."""
    finders = (of_features, of_rows, _of_positions, _of_windows)

    def find(facts: Facts, n: Node) -> Rewrite | None:
        r = fold_of(n) or pool_of(n)
        return next((w for f in finders if r and (w := f(facts, r))), None)

    return rewrite(captured, find)


# ---- over all positions of some dimensions -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Dimension:
    """One dimension of a convolution. `met[j]`: the input positions that tap j meets, 0 or 1
    each; `folded`: the mean or sum runs over it; `out`: its results."""

    met: tuple[tuple[bool, ...], ...]
    folded: bool
    out: int

    @property
    def whole(self) -> bool:
        """Every tap meets every position."""
        return all(all(row) for row in self.met)

    @property
    def read(self) -> bool:
        """Some tap meets each position: a NaN there is one in the result, too."""
        return all(any(column) for column in zip(*self.met, strict=True))

    @property
    def size(self) -> int:
        return len(self.met[0])


def _of_positions(facts: Facts, r: Fold | Pool) -> Rewrite | None:
    """(Not in half types: sums of the input would be rounded to as few bits as each result.)"""
    found = layer(facts.source(r.x, r.node), facts)
    if found is None or not found.is_convolution or isinstance(r, Pool) or found.padding is None:
        return None
    if min(r.dims) < 2 or 0 in r.x.shape or found.out.dtype.compute is not found.out.dtype:
        return None
    dims = _dimensions(found, r)
    if not all(one.read for one in dims if one.folded):
        return None
    try:
        made_ = _summed(found, r, dims)
    except OpaqueOperator:
        return None
    text = f"{r.node.name} is taken of what the taps of {found.node.name} read, not of its results"
    return replaced((found.node, r.node), r, (found.node.name, r.node.name), made_, text)


def _dimensions(found: Layer, r: Fold) -> list[_Dimension]:
    out = []
    for d, k in enumerate(found.kernel):
        size, results = found.x.shape[2 + d], found.out.shape[2 + d]
        s, p, spread = found.stride[d], (found.padding or ())[d], found.dilation[d]
        if found.kind == "conv":
            reads = [{y * s + j * spread - p for y in range(results)} for j in range(k)]
            met = tuple(tuple(i in row for i in range(size)) for row in reads)
        else:
            met = tuple(
                tuple(0 <= i * s + j * spread - p < results for i in range(size)) for j in range(k)
            )
        out.append(_Dimension(met, 2 + d in r.dims, results))
    return out


def _summed(found: Layer, r: Fold, dims: list[_Dimension]) -> Made:
    """Sums of the input over what each tap meets, then what is left of the convolution."""
    prepare: list[Prepare] = []
    new: list[Node] = []
    x, name = found.x, found.node.name
    alone = all(one.folded for one in dims) and found.groups == 1
    backwards = found.kind == "transposed" and not alone  # as it meets its input
    whole = [2 + d for d, one in enumerate(dims) if one.folded and one.whole]
    if whole:
        new.append(made(r.node, f"{name}.{r.node.name}.input", "aten.mean.dim", x, whole, True))
        x = new[-1].results[0]
    for d in reversed(range(len(dims))):
        if dims[d].folded and not dims[d].whole:
            nodes, step = _met_sums(found, r, x, d, dims[d], backwards)
            new += nodes
            prepare.append(step)
            x = new[-1].results[0]
    if alone:
        rest, steps = _as_linear(found, r, x, dims)
    else:
        rest, steps = _as_convolution(found, r, x, dims)
        rest = without_dims(r, rest)
    return (*new, *rest), (*prepare, *steps)


def _met_sums(
    found: Layer, r: Fold, x: Tensor, d: int, one: _Dimension, backwards: bool
) -> tuple[list[Node], Prepare]:
    """x with dimension d replaced by one position a tap: the sum over what it meets (over the
    number of results, for a mean), a product with a matrix of constants."""
    share = 1.0 / one.out if r.kind == "mean" else 1.0
    rows = [[share * m for m in row] for row in one.met]
    rows = rows[::-1] if backwards else rows
    last, name = 2 + d == x.rank - 1, f"{found.node.name}.{r.node.name}.input{d}"
    matrix, step = derived(
        f"{name}.taps", (one.size, len(rows)) if last else (len(rows), one.size), x.dtype,
        (found.weight,), lambda values: _matrix(rows, values[found.weight], last),
    )  # fmt: skip
    if last:
        return [made(r.node, name, "aten.matmul.default", x, matrix)], step
    shape = [*x.shape[: 2 + d], len(rows), *x.shape[3 + d :]]
    if x.rank == 4 + d:
        return [made(r.node, name, "aten.matmul.default", matrix, x)], step
    flat = [*x.shape[: 3 + d], math.prod(x.shape[3 + d :])]
    first = made(r.node, f"{name}.flat", "aten.reshape.default", x, flat)
    product = made(r.node, name, "aten.matmul.default", matrix, first.results[0])
    back = made(r.node, f"{name}.back", "aten.reshape.default", product.results[0], shape)
    return [first, product, back], step


def _matrix(rows: Rows, like: torch.Tensor, transposed: bool) -> torch.Tensor:
    m = torch.tensor(rows, dtype=torch.float64, device=like.device)
    return m.T if transposed else m


def _over_taps(w: torch.Tensor, r: Fold, dims: list[_Dimension]) -> torch.Tensor:
    """The weights (float64), summed over the taps of dimensions along which each tap meets
    everything, and scaled from the input's mean to the result's mean or sum."""
    for d, one in enumerate(dims):
        if one.folded and one.whole:
            share = one.size / one.out if r.kind == "mean" else float(one.size)
            w = w.sum(2 + d, keepdim=True) * share
    return w


def _left(found: Layer, dims: list[_Dimension]) -> tuple[int, ...]:
    """The kernel that is left."""
    sizes = zip(found.kernel, dims, strict=True)
    return tuple(1 if one.folded and one.whole else k for k, one in sizes)


def _as_linear(
    found: Layer, r: Fold, x: Tensor, dims: list[_Dimension]
) -> tuple[list[Node], list[Prepare]]:
    """What is left of a convolution with one position: a linear layer over (channel, tap), which
    is not rounded to TF32 where convolutions are."""
    w, name = found.weight, found.node.name
    size = math.prod(x.shape[1:])

    def compute(values: Values) -> torch.Tensor:
        left = _over_taps(values[w].double(), r, dims)
        return left.transpose(0, 1) if found.kind == "transposed" else left

    weight, step = derived(f"{w.name}*{r.node.name}", (found.features, size), w.dtype, (w,),
                           compute)  # fmt: skip
    bias, steps = _summed_bias(found, r)
    at = f"{name}.{r.node.name}"
    flat = made(r.node, f"{at}.flat", "aten.reshape.default", x, [x.shape[0], size])
    new = [flat, made(found.node, name, "aten.linear.default", flat.results[0], weight, bias)]
    if r.keepdim:
        shape = [x.shape[0], found.features, *[1] * len(dims)]
        new.append(made(r.node, f"{at}.shape", "aten.reshape.default", new[-1].results[0], shape))
    return new, [step, *steps]


def _as_convolution(
    found: Layer, r: Fold, x: Tensor, dims: list[_Dimension]
) -> tuple[list[Node], list[Prepare]]:
    """The convolution over what the taps of the folded dimensions meet: one result along each."""
    w, weight, steps = found.weight, found.weight, []
    left = _left(found, dims)
    if any(one.folded and one.whole for one in dims):
        weight, step = derived(
            f"{w.name}*{r.node.name}", (*w.shape[:2], *left), w.dtype, (w,),
            lambda values: _over_taps(values[w].double(), r, dims),
        )  # fmt: skip
        steps.append(step)
    bias, more = _summed_bias(found, r)

    def chosen(own: Sequence[int], otherwise: Callable[[int], int]) -> tuple[int, ...]:
        return tuple(
            otherwise(k) if one.folded else a for a, k, one in zip(own, left, dims, strict=True)
        )

    target, *args = convolution_args(
        found.kind, x, weight, bias, chosen(found.stride, lambda _: 1),
        chosen(found.padding or (), lambda k: k - 1 if found.kind == "transposed" else 0),
        chosen(found.dilation, lambda _: 1), chosen(found.extra, lambda _: 0), found.groups,
    )  # fmt: skip
    return [made(found.node, found.node.name, target, *args)], [*steps, *more]


def _summed_bias(found: Layer, r: Fold) -> tuple[Tensor | None, list[Prepare]]:
    """The bias of a mean; of a sum, as often as there are results."""
    given = found.bias
    if given is None or r.kind == "mean":
        return given, []
    bias, step = derived(
        f"{found.node.name}.bias*{r.node.name}", given.shape, given.dtype, (given,),
        lambda values: values[given].double() * r.count,
    )  # fmt: skip
    return bias, [step]


# ---- average pools -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Composed:
    """One dimension of convolution and pool as one convolution: its taps are `rows` times the
    convolution's."""

    rows: Rows
    stride: int
    padding: int


def _of_windows(facts: Facts, r: Fold | Pool) -> Rewrite | None:
    found = layer(facts.source(r.x, r.node), facts)
    if found is None or not found.is_convolution or not isinstance(r, Pool):
        return None
    if found.padding is None or len(r.kernel) != len(found.kernel):
        return None
    try:
        return _pooled_first(found, r) or (None if r.padded else _composed(found, r))
    except OpaqueOperator:
        return None


def _pooled_first(found: Layer, r: Pool) -> Rewrite | None:
    """A convolution of one tap, of the pooled input. (Not in half types: see means.)"""
    one = {*found.kernel, *found.stride} == {1} and not any((*(found.padding or ()), *found.extra))
    if not one or (found.bias is not None and not r.whole):
        return None
    if found.out.dtype.compute is not found.out.dtype:
        return None
    first = again(r.node, found.x, *r.node.call.args[1:])
    then = again(found.node, first.results[0], *found.node.call.args[1:])
    text = f"{r.node.name} is taken of what {found.node.name} reads, not of its results"
    return replaced((found.node, r.node), r, (r.node.name,), ((first, then), ()), text)


def _composed(found: Layer, r: Pool) -> Rewrite | None:
    """One convolution that is the convolution and the pool, if that is much less work: a kernel
    may do both at once, too."""
    compose = _behind_conv if found.kind == "conv" else _behind_transposed
    parts = [compose(found, r, d) for d in range(len(r.kernel))]
    known = [p for p in parts if p is not None and all(any(row) for row in p.rows)]
    if len(known) < len(parts) or not r.whole:
        return None  # (a tap of zeros would make NaN of an infinity that nobody reads now)
    weight, step = _composed_weight(found, r, known)
    n = len(known)
    target, *args = convolution_args(
        "conv", found.x, weight, found.bias, tuple(p.stride for p in known),
        tuple(p.padding for p in known), (1,) * n, (0,) * n, found.groups,
    )  # fmt: skip
    new = made(found.node, found.node.name, target, *args)
    new.results[0].tag["strides"] = r.node.results[0].tag.get("strides")
    text = f"{found.node.name} and {r.node.name} are one convolution of a wider kernel"
    names = (found.node.name, r.node.name)
    return replaced((found.node, r.node), r, names, ((new,), (step,)), text, _MUCH_LESS)


def _composed_weight(found: Layer, r: Pool, known: list[_Composed]) -> tuple[Tensor, Prepare]:
    w = found.weight

    def compute(values: Values) -> torch.Tensor:
        exact = values[w].double()
        if found.kind == "transposed":  # [C, F/g, *k] -> [F, C/g, *k]
            exact = exact.unflatten(0, (found.groups, -1)).transpose(1, 2).flatten(0, 1)
        for d, p in enumerate(known):
            m = _matrix(p.rows, exact, False)
            exact = torch.tensordot(m, exact.movedim(2 + d, 0), 1).movedim(0, 2 + d)
        return exact

    shape = (found.features, found.x.shape[1] // found.groups, *(len(p.rows) for p in known))
    return derived(f"{w.name}*{r.node.name}", shape, w.dtype, (w,), compute)


def _behind_conv(found: Layer, r: Pool, d: int) -> _Composed:
    """Tap u of the whole gathers the pairs of a pool's tap i and a convolution's tap j with
    i * stride + j * dilation = u."""
    wide, k = r.kernel[d], found.kernel[d]
    s, spread = found.stride[d], found.dilation[d]
    rows = [[0.0] * k for _ in range((wide - 1) * s + (k - 1) * spread + 1)]
    for i in range(wide):
        for j in range(k):
            rows[i * s + j * spread][j] += 1.0 / wide
    return _Composed(rows, s * r.stride[d], (found.padding or ())[d])


def _behind_transposed(found: Layer, r: Pool, d: int) -> _Composed | None:
    """Input t gives to result y by tap y + padding - t * stride. A pool whose stride is m of
    these strides reads, at z, input z * m - q by the taps q * stride + padding + (0 .. its
    kernel): a convolution of stride m, its taps in order of falling q."""
    k, s, p, wide = found.kernel[d], found.stride[d], (found.padding or ())[d], r.kernel[d]
    if r.stride[d] % s or found.dilation[d] != 1:
        return None
    m, results, size = r.stride[d] // s, r.node.results[0].shape[2 + d], found.x.shape[2 + d]
    low, high = -((wide - 1 + p) // s), (k - 1 - p) // s
    taps = high - low + 1
    if high < 0 or taps < 1 or (size + 2 * high - taps) // m + 1 != results:
        return None  # the padding of a convolution is the same on both sides
    rows = [
        [float(0 <= j - ((high - a) * s + p) < wide) / wide for j in range(k)] for a in range(taps)
    ]
    return _Composed(rows, m, high)
