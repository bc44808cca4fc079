"""How the copy engine sees a kernel's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onchip.backends.cuda.classes import steps_by_class
from onchip.backends.cuda.geometry import BLOCK, Geometry
from onchip.backends.cuda.packed import PackedGeometry
from onchip.backends.cuda.source import Strides, TensorMap
from onchip.ir.dtype import DType
from onchip.ir.expr import Expr, Tensor

OPERANDS = {"bf16": "bf16", "fp16": "fp16", "tf32": "tf32", "tf32x3": "fp32"}
KINDS = {DType.BF16: "bf16", DType.F16: "fp16", DType.F32: "fp32"}


@dataclass(frozen=True, eq=False, slots=True)
class Maps:
    """strides: elements, of every tensor; numbers: of the kernel's tensors."""

    g: Geometry
    strides: Mapping[Tensor, Strides]
    numbers: Mapping[Tensor, int]

    def x(self) -> TensorMap:
        """The input, by chunks of a patch and what its taps need."""
        p, g = self.g.problem, self.g
        several = p.matrices > 1
        return TensorMap(
            self.numbers[p.x],
            OPERANDS[p.kind],
            p.x_offset,
            (p.channels, *(x.size for x in p.lines), *[p.batch] * several),
            tuple(s * p.size for s in (*(x.step for x in p.lines), *[p.x_batch] * several)),
            (g.chunk, *g.x_box, *[1] * several),
            (1, *(x.stride for x in p.lines), *[1] * several),
            g.config.row_bytes,
        )

    def w(self, tensor: Tensor) -> TensorMap:
        """Weights, laid out or as they lie, by tiles."""
        p, g, shared = self.g.problem, self.g, self.g.config.w_shared
        if p.w_constant:
            tiles = g.w_tiles if isinstance(g, PackedGeometry) else p.batch * p.taps * g.chunks
            sizes, steps = (g.chunk, tiles * p.features), (g.chunk,)
        else:
            sizes, steps = (p.channels, p.features), (p.w_step,)
            if p.batch > 1:
                sizes, steps = (*sizes, p.batch), (*steps, p.w_batch)
        box = (g.chunk, g.tile_features // shared, 1)[: len(sizes)]
        if p.w_features_inner:
            sizes = (p.features, p.channels, *sizes[2:])
            box = (BLOCK, g.chunk // shared, *box[2:])
        return TensorMap(
            self.numbers[tensor],
            OPERANDS[p.kind],
            p.w_offset,
            sizes,
            tuple(s * p.size for s in steps),
            box,
            (1,) * len(sizes),
            g.w_row,
        )

    def tiles(self, t: Tensor, index: tuple[Expr, ...], pooled: bool) -> list[TensorMap]:
        """A result, or what the epilogue reads, by tiles: 128 bytes of features; one for each class
        of positions."""
        p, g = self.g.problem, self.g
        pooled = pooled and p.pools
        axes = list(p.cell_axes if pooled else p.position_axes)
        cells = [x.cells for x in p.lines]
        sizes = [cells if pooled else list(p.lengths_of(n)) for n in range(p.classes)]
        extents = list(g.cells if pooled else g.config.patch)
        if p.matrices > 1:
            axes, extents = [*axes, p.batch_axis], [*extents, 1]
            sizes = [[*own, p.batch] for own in sizes]
        size = t.dtype.size
        return [
            TensorMap(
                self.numbers[t],
                KINDS[t.dtype],
                steps.get(None, 0),
                (p.features, *own),
                tuple(steps.get(a, 0) * size for a in axes),
                (128 // size, *extents),
                (1,) * (1 + len(axes)),
                128,
            )
            for own, steps in zip(sizes, steps_by_class(p, t, index, self.strides), strict=True)
        ]
