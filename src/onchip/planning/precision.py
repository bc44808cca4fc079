"""How exact PyTorch's own float32 products on a GPU are: what generated ones are held to."""

from __future__ import annotations

import torch

from onchip.backends.library import aten
from onchip.fusion.contraction import as_contraction
from onchip.fusion.layout import captured_strides, extent, is_convolution
from onchip.fusion.region import Region
from onchip.fusion.signature import EXACT
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor, loads, reduces
from onchip.ir.graph import Graph, LibraryCall, Node

# Rounding to 11 bits: what two TF32 results may differ by.
TF32_TOLERANCE = 2e-3
# Rounding both operands to TF32 moves a sum of random products by 3e-4 of it, another order of
# float32's additions by 1e-6.
TF32_SEEN = 2e-5


# What PyTorch starts with; see tf32_allowed.
TF32_DEFAULT = (False, True)


def tf32_allowed() -> tuple[bool, bool]:
    """Whether PyTorch may round the operands of float32 products on a GPU to TF32: of matrix
    products, and of convolutions. (Its `allow_tf32` raises an error where the newer flags were set,
    and `fp32_precision` takes ten times as long, in each call of a program.)"""
    precision = torch._C._get_fp32_precision_getter
    return precision("cuda", "matmul") == "tf32", precision("cuda", "conv") == "tf32"


def mark_exact(graph: Graph, device: torch.device) -> None:
    """Marks the float32 convolutions that PyTorch's library does not compute in TF32 although it
    may (cuDNN chooses by shape: those of few channels it does not), so that generated ones are as
    exact (`precisions`). It computes each of them on random numbers, with TF32 and without."""
    if device.type != "cuda" or not tf32_allowed()[1]:
        return
    known: dict[str, bool] = {}
    for n in graph.nodes:
        operands = n.inputs[:2]
        if n.opaque or not is_convolution(n) or any(t.dtype is not DType.F32 for t in operands):
            continue
        sizes = [(t.shape, captured_strides(t)) for t in n.inputs]
        rest = [x for x in n.call.args if not isinstance(x, Tensor)]
        kind = f"{n.call.target} {sizes} {rest}"
        if kind not in known:
            known[kind] = not _rounds(n.call, n.inputs, device)
        if known[kind]:
            for t in n.results:
                t.tag[EXACT] = True


@torch.no_grad()
def _rounds(call: LibraryCall, inputs: tuple[Tensor, ...], device: torch.device) -> bool:
    """Whether a float32 convolution's result depends on TF32 being allowed."""
    generator = torch.Generator(device).manual_seed(0)
    values: dict[Tensor, torch.Tensor] = {}
    for t in inputs:
        held = torch.empty(extent(t.shape, captured_strides(t)), device=device)
        values[t] = held.normal_(generator=generator).as_strided(t.shape, captured_strides(t))
    try:
        with aten.convolutions("tf32"):
            (allowed,) = aten.call(call, values)
        with aten.convolutions("ieee"):
            (exact,) = aten.call(call, values)
        return bool((allowed - exact).norm() > TF32_SEEN * exact.norm())
    except torch.cuda.OutOfMemoryError:
        return True  # nobody will miss what PyTorch could not compute either


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
    "tf32" only where PyTorch may use it (`allowed`: see tf32_allowed) and does (mark_exact), else
    three TF32 products ("tf32x3"), and for what cuBLAS computes also "ieee". ("",) if the region
    has none."""
    if not has_float32_product(region):
        return ("",)
    convolution = any("conv" in n.op for n in region.nodes)
    matrix = any("conv" not in n.op and multiplies(n) for n in region.nodes)
    exact = any(EXACT in t.tag for n in region.nodes for t in n.results)
    if (allowed[0] or not matrix) and (allowed[1] or not convolution) and not exact:
        return ("tf32",)
    return ("tf32x3", "ieee") if matrix else ("tf32x3",)


def multiplies(node: Node) -> bool:
    return any(
        as_contraction(r, t.axes) is not None
        for t in node.tensors
        if t.body is not None
        for r in reduces(t.body)
    )
