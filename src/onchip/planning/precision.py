"""How exact PyTorch's own float32 products on a GPU are: what generated ones are held to."""

from __future__ import annotations

import torch

from onchip.fusion.contraction import as_contraction
from onchip.fusion.region import Region
from onchip.ir.dtype import DType
from onchip.ir.expr import loads, reduces
from onchip.ir.graph import Node

# Rounding to 11 bits: what two TF32 results may differ by.
TF32_TOLERANCE = 2e-3


# What PyTorch starts with; see tf32_allowed.
TF32_DEFAULT = (False, True)


def tf32_allowed() -> tuple[bool, bool]:
    """Whether PyTorch may round the operands of float32 products on a GPU to TF32: of matrix
    products, and of convolutions. (Its `allow_tf32` raises an error where the newer flags were set,
    and `fp32_precision` takes ten times as long, in each call of a program.)"""
    precision = torch._C._get_fp32_precision_getter
    return precision("cuda", "matmul") == "tf32", precision("cuda", "conv") == "tf32"


def has_float32_product(region: Region) -> bool:
    """Whether a matrix product of two float32 operands is among what the region computes. (One
    half-precision operand is exact in TF32, and PyTorch rounds the other one to its type.)"""
    return any(
        all(ld.src.dtype is DType.F32 for ld in loads(r.body))
        for t in region.tensors
        if t.body is not None
        for r in reduces(t.body)
        if as_contraction(r, t.axes) is not None
    )


def has_product(region: Region) -> bool:
    """Whether a matrix product is among what the region computes."""
    return any(map(multiplies, region.nodes))


def precisions(region: Region, allowed: tuple[bool, bool]) -> tuple[str, ...]:
    """Ways to compute the region's float32 products that are as exact as PyTorch's, fastest first:
    "tf32" only where PyTorch may use it (`allowed`: see tf32_allowed), else three TF32 products
    ("tf32x3"), and for what cuBLAS computes also "ieee". ("",) if the region has none."""
    if not has_float32_product(region):
        return ("",)
    convolution = any("conv" in n.op for n in region.nodes)
    matrix = any("conv" not in n.op and multiplies(n) for n in region.nodes)
    if (allowed[0] or not matrix) and (allowed[1] or not convolution):
        return ("tf32",)
    return ("tf32x3", "ieee") if matrix else ("tf32x3",)


def multiplies(node: Node) -> bool:
    return any(
        as_contraction(r, t.axes) is not None
        for t in node.tensors
        if t.body is not None
        for r in reduces(t.body)
    )
