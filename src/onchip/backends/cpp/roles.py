"""A matrix product's roles: rows, columns, the order of K, and the constant operand's panels."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from onchip.backends.cpp.writer import Buffer, stride_along
from onchip.fusion.contraction import Contraction
from onchip.fusion.nest import Stage
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Const, Expr, Load, Tensor, axis, loads, mentioned, substitute


@dataclass(frozen=True, eq=False, slots=True)
class Panels:
    """The right operand as a matrix: element (batch..., k..., n) of `matrix`, to be packed as
    [batch][ceil(N / NR)][K][NR]. K runs over `matrix`'s axes in the order given."""

    matrix: Tensor
    batch: int
    k: int
    n: int
    packed: tuple[Load, ...]  # the loads of the stage's expression that the panels replace

    def floats(self, nr: int) -> int:
        return self.batch * self.k * (-(-self.n // nr) * nr)


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """A contraction with its roles fixed: rows m_axes, one column axis, K in memory order."""

    contraction: Contraction
    left: Expr
    right: Expr
    m_axes: tuple[Axis, ...]
    n_axis: Axis
    b_axes: tuple[Axis, ...]
    k_axes: tuple[Axis, ...]
    constant: bool
    swapped: bool  # the contraction's own left operand is the right one here

    @property
    def k(self) -> int:
        return prod(a.extent for a in self.k_axes)


def assign_roles(
    stage: Stage, target: Buffer, buffers: dict[Tensor, Buffer], constants: frozenset[Tensor]
) -> Product | None:
    """Columns are the constant operand's side, else the side along which the result is stored
    contiguously. None: no matrix form (several column axes, other element types)."""
    c = stage.contraction
    if c is None or c.reduce.dtype is not DType.F32:
        return None
    sides = [(c.left, c.right, c.m_axes, c.n_axes), (c.right, c.left, c.n_axes, c.m_axes)]
    best = None
    zero: Expr = Const(0, DType.I64)
    for left, right, rows, columns in sides:
        wide = [a for a in columns if a.extent > 1] or list(columns[:1])
        if len(wide) != 1:
            continue
        fixed = all(ld.src in constants for ld in loads(right))
        contiguous = stride_along(stage.staged.store, target.strides, wide[0]) == 1
        score = (fixed, contiguous, wide[0].extent)
        if best is None or score > best[0]:
            # rows are, besides: axes of extent 1 among the columns, which are all zero, and axes
            # that neither operand mentions
            ones = {a: zero for a in columns if a is not wide[0]}
            bound = {*c.m_axes, *c.n_axes, *c.b_axes}
            rest = tuple(a for a in stage.staged.loops if a not in bound)
            best = (
                score, left, substitute(right, ones), rows + tuple(ones) + rest, wide[0], fixed,
            )  # fmt: skip
    if best is None:
        return None
    _, left, right, rows, column, fixed = best
    k_axes = _k_order(c.k_axes, left, buffers)
    layout = sorted(
        rows, key=lambda a: -abs(stride_along(stage.staged.store, target.strides, a) or 0)
    )
    swapped = left is c.right
    return Product(c, left, right, tuple(layout), column, c.b_axes, k_axes, fixed, swapped)


def columns_aligned(stage: Stage, product: Product) -> bool:
    """Constant panels start every NR columns; a tile must not begin inside one. 32 is a multiple
    of NR for every vector width."""
    span = dict(zip(stage.staged.loops, stage.spans, strict=True))[product.n_axis]
    return not product.constant or not span.depends or span.extent % 32 == 0


def _k_order(k_axes: tuple[Axis, ...], left: Expr, buffers: dict[Tensor, Buffer]) -> tuple:
    """Slowest first in the left operand's memory, so that packing reads runs."""
    reads = loads(left)

    def stride(a: Axis) -> int:
        found = [stride_along(ld.index, buffers[ld.src].strides, a) for ld in reads]
        return max((abs(s) for s in found if s), default=0)

    return tuple(sorted(k_axes, key=lambda a: -stride(a)))


def panels_of(product: Product) -> Panels:
    """The constant right operand as a tensor over (batch, k, n), for packing at load time."""
    old = (*product.b_axes, *product.k_axes, product.n_axis)
    new = tuple(axis(a.extent) for a in old)
    body = substitute(product.right, dict(zip(old, new, strict=True)))
    zero = {a: Const(0, DType.I64) for a in mentioned(body) - set(new)}
    matrix = Tensor("panels", tuple(a.extent for a in new), DType.F32, new, substitute(body, zero))
    batch = prod(a.extent for a in product.b_axes)
    c = product.contraction
    packed = c.left if product.swapped else c.right
    return Panels(matrix, batch, product.k, product.n_axis.extent, tuple(loads(packed)))
