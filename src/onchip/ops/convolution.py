"""Convolutions: sums of products of a padded input and a weight indexed by axes only.

Channels are split into (group, channel of the group) where there are several groups, so that
every index stays affine; the split is undone by a view. A transposed convolution is written as
gathers, one for each group of output phases that read the same number of taps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from onchip.errors import OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Const, Expr, Tensor, fold, lift, tensor, where
from onchip.ops.geometry import guarded, per_dimension, require_float, require_same_type
from onchip.ops.promotion import compare
from onchip.ops.registry import op

Ints = int | Sequence[int]


@op("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default")
@op("aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding")
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """x [N?, C, *space] with weight [F, C/groups, *kernel]: [N?, F, *out]. `padding` is a number
    for each dimension, "valid", or "same" (the odd element goes to the right)."""
    _check("convolution", x, weight, bias)
    n = weight.rank - 2
    steps, spread = per_dimension(stride, n), per_dimension(dilation, n)
    space, kernel = x.shape[x.rank - n :], weight.shape[2:]
    before, total = _padding(padding, kernel, spread)
    out = tuple(
        (size + pad - d * (k - 1) - 1) // s + 1
        for size, pad, d, k, s in zip(space, total, spread, kernel, steps, strict=True)
    )

    def source(at: Sequence[Expr], tap: Sequence[Expr]) -> list[Expr]:
        return [
            y * s + i * d - p for y, s, i, d, p in zip(at, steps, tap, spread, before, strict=True)
        ]

    return _grouped(_lead(x, n), x, weight, bias, groups, out, source)


def _grouped(lead, x, weight, bias, groups, out, source) -> Tensor:
    """Output [*lead, F, *out]; `source(at, tap)` is the input position that a tap reads."""
    features, depth, *kernel = weight.shape
    width = features // groups

    def total(n: Sequence[Expr], g: Expr | int, f: Expr, at: Sequence[Expr]) -> Expr:
        if depth == 1:
            zero = Const(0, DType.I64)
            value: Expr = fold(
                "sum",
                kernel,
                lambda *t: guarded(x, (*n, g, *source(at, t)), 0.0) * weight[(f, zero, *t)],
            )
        else:
            value = fold(
                "sum",
                (depth, *kernel),
                lambda c, *t: (
                    guarded(x, (*n, lift(g, DType.I64) * depth + c, *source(at, t)), 0.0)
                    * weight[(f, c, *t)]
                ),
            )
        return value if bias is None else value + bias[f]

    k = len(lead)
    if groups == 1:
        return tensor(
            (*lead, features, *out), x.dtype, lambda *i: total(i[:k], 0, i[k], i[k + 1 :]), "conv"
        )
    if width == 1:
        return tensor(
            (*lead, features, *out),
            x.dtype,
            lambda *i: total(i[:k], i[k], i[k], i[k + 1 :]),
            "conv",
        )
    split = tensor(
        (*lead, groups, width, *out),
        x.dtype,
        lambda *i: total(i[:k], i[k], i[k] * width + i[k + 1], i[k + 2 :]),
        "conv_grouped",
    )
    return tensor(
        (*lead, features, *out),
        x.dtype,
        lambda *i: split[(*i[:k], i[k] // width, i[k] % width, *i[k + 1 :])],
        "conv",
    )


@op("aten.convolution.default")
def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> Tensor:
    """Either kind of convolution, by the flag `transposed`."""
    if transposed:
        return conv_transpose(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(x, weight, bias, stride, padding, dilation, groups)


@dataclass(frozen=True, slots=True)
class Phases:
    """Along one dimension of a transposed convolution: the outputs y with
    first <= (y + padding) % stride < first + count, which read `taps` taps each.

    With q = (y + padding) // stride, tap t of a phase (see tap_of) multiplies
    input[q + offset - reach * t].
    """

    first: int
    count: int
    taps: int
    reach: int
    offset: int


def phases(kernel: int, stride: int, dilation: int) -> list[Phases]:
    """The groups of output phases of one dimension, covering 0..stride-1 in order."""
    if stride == 1:
        return [Phases(0, 1, kernel, dilation, 0)]
    if dilation == 1:
        short = kernel % stride
        groups = [
            Phases(0, short, kernel // stride + 1, 1, 0),
            Phases(short, stride - short, kernel // stride, 1, 0),
        ]
        return [g for g in groups if g.count]
    reach = dilation // math.gcd(stride, dilation)
    out = []
    for r in range(stride):
        taps = [k for k in range(kernel) if (r - k * dilation) % stride == 0]
        start = taps[0] if taps else 0
        out.append(Phases(r, 1, len(taps), reach, (r - start * dilation) // stride))
    return out


def tap_of(phase: Expr, t: Expr, stride: int, dilation: int) -> Expr:
    """Which element of the kernel is tap t of a phase (that has any): those k with
    k * dilation % stride == phase, in order."""
    common = math.gcd(stride, dilation)
    step = stride // common
    inverse = pow(dilation // common, -1, step)
    return phase // common * inverse % step + t * step


@op("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """x [N?, C, *space] with weight [C, F/groups, *kernel]: [N?, F, *out], where
    out = (space - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1."""
    _check("transposed convolution", x, weight, bias)
    n = weight.rank - 2
    steps, pads = per_dimension(stride, n), per_dimension(padding, n)
    spread, extra = per_dimension(dilation, n), per_dimension(output_padding, n)
    space, kernel = x.shape[x.rank - n :], weight.shape[2:]
    out = tuple(
        (size - 1) * s - 2 * p + d * (k - 1) + e + 1
        for size, s, p, d, k, e in zip(space, steps, pads, spread, kernel, extra, strict=True)
    )
    gather = Gather(x, weight, bias, groups, out, steps, pads, spread)
    choices = [phases(*a) for a in zip(kernel, steps, spread, strict=True)]
    parts = {c: gather.part(c) for c in itertools.product(*choices)}
    if len(parts) == 1 and groups == 1 and all(s == 1 for s in steps):
        return next(iter(parts.values()))
    return gather.interleave(parts)


@dataclass(frozen=True, eq=False)
class Gather:
    """The output positions of a transposed convolution, computed phase group by phase group."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    groups: int
    out: tuple[int, ...]
    steps: tuple[int, ...]
    pads: tuple[int, ...]
    spread: tuple[int, ...]

    @property
    def lead(self) -> tuple[int, ...]:
        return _lead(self.x, len(self.out))

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    def part(self, combo: Sequence[Phases]) -> Tensor:
        """[*lead, groups, width, (positions, phases) of each dimension] of one phase group."""
        spans = [
            (p % s + size - 1) // s + 1
            for p, s, size in zip(self.pads, self.steps, self.out, strict=True)
        ]
        dims = [e for span, c in zip(spans, combo, strict=True) for e in self._pair(span, c)]
        split = (self.groups,) if self.groups > 1 else ()
        shape = (*self.lead, *split, self.width, *dims)

        def element(*i: Expr) -> Expr:
            k = len(self.lead)
            g = i[k] if split else Const(0, DType.I64)
            f, rest = i[k + len(split)], list(i[k + len(split) + 1 :])
            at, phase = [], []
            for c in combo:
                at.append(rest.pop(0))
                phase.append([rest.pop(0)] if c.count > 1 else [])
            value = self._sum(combo, i[:k], g, f, at, phase)
            return value if self.bias is None else value + self.bias[g * self.width + f]

        return tensor(shape, self.x.dtype, element, "conv_transpose")

    @staticmethod
    def _pair(span: int, c: Phases) -> tuple[int, ...]:
        return (span, c.count) if c.count > 1 else (span,)

    @cached_property
    def taps(self) -> Tensor:
        """The weight as [C, width, (phase, tap) of each dimension with a stride]: a parameter,
        reindexed; zeros where a phase has fewer taps than others."""
        if all(s == 1 for s in self.steps):
            return self.weight
        dims: list[int] = []
        for k, s, d in zip(self.weight.shape[2:], self.steps, self.spread, strict=True):
            dims += [k] if s == 1 else [s, max(p.taps for p in phases(k, s, d))]

        def element(c: Expr, f: Expr, *i: Expr) -> Expr:
            rest, at = list(i), []
            for s, d in zip(self.steps, self.spread, strict=True):
                first = rest.pop(0)
                at.append(first if s == 1 else tap_of(first, rest.pop(0), s, d))
            return guarded(self.weight, (c, f, *at), 0.0)

        return tensor((*self.weight.shape[:2], *dims), self.weight.dtype, element, "taps")

    def _sum(self, combo, n, g, f, at, phase) -> Expr:
        depth = self.x.shape[len(self.lead)] // self.groups
        if any(c.taps == 0 for c in combo):
            return Const(0.0, self.x.dtype.compute)
        starts = [p // s for p, s in zip(self.pads, self.steps, strict=True)]

        def term(c: Expr, *t: Expr) -> Expr:
            channel = g * depth + c
            read = [
                q + (start + p.offset) - i * p.reach
                for q, start, p, i in zip(at, starts, combo, t, strict=True)
            ]
            tap: list[Expr] = []
            for s, p, r, i in zip(self.steps, combo, phase, t, strict=True):
                tap += [i] if s == 1 else [sum(r, Const(p.first, DType.I64)), i]
            return guarded(self.x, (*n, channel, *read), 0.0) * self.taps[(channel, f, *tap)]

        taps = [c.taps for c in combo]
        if depth == 1:
            return fold("sum", taps, lambda *t: term(Const(0, DType.I64), *t))
        return fold("sum", (depth, *taps), term)

    def interleave(self, parts: dict[tuple[Phases, ...], Tensor]) -> Tensor:
        """Each output position read from the phase group that holds it."""
        k, features = len(self.lead), self.groups * self.width
        choices = [list(dict.fromkeys(c)) for c in zip(*parts, strict=True)]

        def element(*i: Expr) -> Expr:
            shifted = [y + p % s for y, p, s in zip(i[k + 1 :], self.pads, self.steps, strict=True)]
            split = (i[k] // self.width, i[k] % self.width) if self.groups > 1 else (i[k],)

            def chosen(combo: tuple[Phases, ...]) -> Expr:
                """What the position reads, its phase groups along the first dimensions known."""
                if len(combo) == len(shifted):
                    at: list[Expr] = []
                    for z, s, c in zip(shifted, self.steps, combo, strict=True):
                        at += [z // s, z % s - c.first] if c.count > 1 else [z // s]
                    return guarded(parts[combo], (*i[:k], *split, *at), 0.0)
                phase = shifted[len(combo)] % self.steps[len(combo)]
                *some, last = choices[len(combo)]
                value = chosen((*combo, last))
                for c in reversed(some):
                    test = compare("lt", phase, c.first + c.count)
                    value = where(test, chosen((*combo, c)), value)
                return value

            return chosen(())

        return tensor((*self.lead, features, *self.out), self.x.dtype, element, "conv_transpose")


def _check(what: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for t in (x, weight, bias):
        if t is not None:
            require_float(t, what)
    require_same_type(what, x, weight, bias)
    if x.rank - weight.rank not in (0, -1):
        raise OpaqueOperator(f"{what} of rank {x.rank} with a weight of rank {weight.rank}")


def _lead(x: Tensor, spatial: int) -> tuple[int, ...]:
    """The batch size, or nothing for an unbatched input."""
    return x.shape[: x.rank - spatial - 1]


def _padding(
    padding: Ints | str, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each dimension: elements padded before the first, and in all."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = tuple(d * (k - 1) for d, k in zip(dilation, kernel, strict=True))
        return tuple(t // 2 for t in total), total
    if isinstance(padding, str):
        raise OpaqueOperator(f"convolution with padding {padding!r}")
    before = per_dimension(padding, len(kernel))
    return before, tuple(2 * p for p in before)
