"""A contraction as the tensor-core engine sees it, and the choices of one kernel for it.

    D[f, p] = sum over taps t and channels c of  W[f, t, c] * X[p * stride + t * dilation - pad, c]

`f` are features (rows of the matrix unit), `p` positions (its columns). A linear layer or a matrix
product has one tap; a convolution has one for each element of its filter. What the caller wants of
D is an epilogue: values of positions, perhaps folded over windows of them (pooling), stored; or
folded over all positions of some lines, more than a tile has (a global mean, batch statistics).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Expr, Load, Tensor, Var

# What the accumulator, or a pooled cell, is called in the expressions of an epilogue.
ACC = Var("acc", DType.F32)


@dataclass(frozen=True, slots=True)
class Line:
    """A direction in which positions lie.

    size       of the input along it; step: elements of memory between two of them
    positions  of the product along it. Position p and tap t read element
               stride * p + dilation * t - pad, which is zero outside of the input
    cells      what is left of the positions: cell q folds the positions hop * q + i - lead,
               i < window, that exist
    shifts     where the input that is read depends on a class (transposed convolutions: a result's
               position modulo the stride): elements further on, for each class; else empty
    skips      for each class, of its taps the first ones that it does not have
    lengths    for each class, how many of the positions it has, if some have fewer; else empty
    apart      a total is of one position along it, and so is a tile: others fold over all of it
    """

    size: int
    step: int
    positions: int
    stride: int = 1
    taps: int = 1
    dilation: int = 1
    pad: int = 0
    cells: int = 0
    window: int = 1
    hop: int = 1
    lead: int = 0
    shifts: tuple[int, ...] = ()
    skips: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    apart: bool = False

    @property
    def classes(self) -> int:
        return max(len(self.shifts), 1)

    @property
    def pools(self) -> bool:
        return (self.window, self.hop, self.lead) != (1, 1, 0)


@dataclass(frozen=True, eq=False, slots=True)
class Read:
    """A load of the epilogue. kind: "feature" (it depends on features and batch alone), "tile" (its
    elements lie as the tile of results does, features innermost: the copy engine fetches it; of
    cells, where there are some) or "direct" (each element by its address)."""

    tensor: Tensor
    index: tuple[Expr, ...]
    pad: int | float | bool | None
    kind: str


@dataclass(frozen=True, eq=False, slots=True)
class Result:
    """A tensor that is stored: its element at (batch, cell or position, feature) is `value`, in
    ACC and the reads of the epilogue. pooled: ACC is a cell, and the index is over cells.
    tile: features lie innermost, so that the copy engine can store it. side: of another one, how
    many neighbours along the first line, the first one even, lie side by side so that one store
    takes them: 2, or 1; 0: neighbours lie apart."""

    tensor: Tensor
    index: tuple[Expr, ...]
    value: Expr
    pooled: bool
    tile: bool
    side: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Total:
    """A fold over all positions of the lines that are not `apart`: a tile folds its own in float32,
    a second launch what tiles have, in float64 and in their order.

    var    what the expressions of results call it; fold: "sum", "max" or "min"
    value  of a position, in ACC and the reads of the epilogue
    """

    var: Var
    fold: str
    value: Expr


@dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """One contraction with its epilogue.

    kind        "bf16", "fp16", "tf32" or "tf32x3": the type of the matrix unit's operands
    x, w        the tensors that hold positions and features
    channels    summed for each tap (of a group); lines: innermost in memory first, at most four
    features    of a group; batch: groups of a convolution, or matrices, or classes: those of each
                line as digits of one number, the first line's fastest
    x_offset    elements before the first that is read; x_batch: elements between two batches
    w_constant  the weights are laid out at load (`packed`); else w is read as it lies, one tap, its
                channels innermost: w_step elements between two features, w_batch between batches
    w_features_inner   w, no constant, has its features innermost instead of its channels: w_step
                elements lie between two channels. Only operands of 16 bits can be multiplied so
    packed      [batch, taps, chunks, features, channels of a chunk]: see weights.py
    w_element   the element of w for a feature, batch, tap along each line and channel, over
                feature_axis, batch_axis, tap_axes and channel_axis
    w_offset    elements before the first one of w that is read, where w is not constant
    axes        what the epilogue's expressions are over: feature, batch, positions, cells (of each
                line, as `lines` are ordered)
    before      a position's value, in ACC; fold: "max", "min", "sum" or "" over windows of
                positions
    results     of positions and cells; reads: of all expressions, each once
    totals      over positions, if nothing is pooled; finals: results of them, whose values and
                indices are over features, batch and the positions of lines that are `apart`. There
                is a result or a final
    """

    kind: str
    x: Tensor
    w: Tensor
    channels: int
    lines: tuple[Line, ...]
    features: int
    batch: int
    x_offset: int
    x_batch: int
    w_constant: bool
    w_step: int
    w_batch: int
    feature_axis: Axis
    batch_axis: Axis
    position_axes: tuple[Axis, ...]
    cell_axes: tuple[Axis, ...]
    before: Expr
    fold: str
    results: tuple[Result, ...]
    reads: tuple[Read, ...]
    w_element: Load | None = None
    tap_axes: tuple[Axis, ...] = ()
    channel_axis: Axis | None = None
    w_offset: int = 0
    w_features_inner: bool = False
    totals: tuple[Total, ...] = ()
    finals: tuple[Result, ...] = ()

    @property
    def subject(self) -> str:
        """Whom a refusal is about: the first of what is stored."""
        return (*self.results, *self.finals)[0].tensor.name

    @property
    def size(self) -> int:
        """Bytes of an element of an operand."""
        return 4 if self.kind.startswith("tf32") else 2

    @property
    def splits(self) -> bool:
        """Operands are split into a high and a low part, of TF32 each."""
        return self.kind == "tf32x3"

    @property
    def taps(self) -> int:
        return prod(line.taps for line in self.lines)

    @property
    def pools(self) -> bool:
        return any(line.pools for line in self.lines)

    @property
    def classes(self) -> int:
        """Batches that differ in where their input starts, and in which taps they have."""
        return prod(line.classes for line in self.lines)

    @property
    def matrices(self) -> int:
        """Batches of which each has an input and results of its own."""
        return self.batch // self.classes

    @property
    def unlike(self) -> bool:
        """Classes have different numbers of taps."""
        return any(any(line.skips) for line in self.lines)

    @property
    def uneven(self) -> bool:
        """Classes have different numbers of positions."""
        return any(line.lengths for line in self.lines)

    def lengths_of(self, batch: int) -> tuple[int, ...]:
        """Positions along each line that a batch's class has."""
        own = zip(self.lines, self.class_of(batch), strict=True)
        return tuple(x.lengths[c] if x.lengths else x.positions for x, c in own)

    def class_of(self, batch: int) -> tuple[int, ...]:
        """A batch's class along each line."""
        digits = []
        for line in self.lines:
            digits.append(batch % line.classes)
            batch //= line.classes
        return tuple(digits)


@dataclass(frozen=True, slots=True)
class Config:
    """The choices of one kernel.

    patch      positions of a tile along each line; the first a multiple of 8
    along      the line along which the matrix unit's groups of 8 positions follow each other in
               one instruction (0: through the row; 1: down the rows)
    blocks     of 64 features that a warpgroup computes
    split      warpgroups of a team, each with features of its own, the same positions
    teams      that take turns at tiles: one's epilogue hides behind another's products
    row_bytes  of a chunk of channels: 128, 64 or 32
    x_stages   chunks of input on their way; w_stages: tiles of weights, 0: all of them stay
    r_stages   tiles of what the epilogue reads on their way
    k_split    programs of a cluster that share the channels and taps of a tile, and add up
    x_shared   programs of a cluster that multiply the same input, by features of their own;
               w_shared: the same weights, at positions of their own; fetched once for all
    """

    patch: tuple[int, ...]
    along: int
    blocks: int = 1
    split: int = 1
    teams: int = 1
    row_bytes: int = 128
    x_stages: int = 3
    w_stages: int = 0
    r_stages: int = 2
    k_split: int = 1
    x_shared: int = 1
    w_shared: int = 1

    @property
    def label(self) -> str:
        text = f"patch {'x'.join(map(str, self.patch))} along {self.along}"
        text += f", {self.teams} teams of {self.split} by {64 * self.blocks} features"
        weights = f"{self.w_stages} tiles of weights" if self.w_stages else "weights stay"
        text += f", {self.x_stages} chunks of {self.row_bytes} bytes, {weights}"
        text += f", input shared by {self.x_shared}" * (self.x_shared > 1)
        text += f", weights shared by {self.w_shared}" * (self.w_shared > 1)
        return text + f", K split in {self.k_split}" * (self.k_split > 1)

    @property
    def cluster(self) -> int:
        """Programs that run together."""
        return self.k_split * self.x_shared * self.w_shared
