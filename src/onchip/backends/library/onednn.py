"""oneDNN's convolution and linear on weights in its own layout, with what follows applied to the
sums before they are stored (its post-ops).

PyTorch has them as private operators, made for its own compiler: where this build of PyTorch or
this CPU lacks one, nothing is proposed. A ReLU or another clamp is left to a call of its own:
oneDNN applies it with the CPU's max instruction, which turns NaN into a number where PyTorch keeps
it. Inductor's conventions of calling (torch/_inductor/fx_passes/mkldnn_fusion.py) are followed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onchip.capture.schema import overload
from onchip.fusion.region import Region
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor
from onchip.ir.graph import LibraryCall, Node
from onchip.ops.geometry import per_dimension

CONV, CONV_BINARY = "mkldnn._convolution_pointwise.default", "mkldnn._convolution_pointwise.binary"
LINEAR, LINEAR_BINARY = "mkldnn._linear_pointwise.default", "mkldnn._linear_pointwise.binary"
PACK_CONV = "mkldnn._reorder_convolution_weight.default"
PACK_LINEAR = "mkldnn._reorder_linear_weight.default"

PostOp = tuple[str, list[float], str]  # attr, scalars, algorithm of the operators' schemas
NOTHING: PostOp = ("none", [], "")


@dataclass(frozen=True, eq=False, slots=True)
class Packed:
    """A weight in oneDNN's layout. `compute` takes the weight; its result has no data pointer."""

    weight: Tensor
    compute: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Fused:
    """One call that computes `nodes` (in execution order); its arguments hold Tensors, and one
    Packed. The result is `output`, in fresh memory."""

    nodes: tuple[Node, ...]
    call: LibraryCall
    output: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class _Anchor:
    """A convolution or linear layer. geometry: what its call has behind the bias."""

    node: Node
    x: Tensor
    weight: Packed
    bias: Tensor | None
    geometry: tuple[Any, ...] | None  # None: linear

    def call(self, post: PostOp) -> LibraryCall:
        args = (self.x, self.weight, self.bias)
        if self.geometry is None:
            return LibraryCall(LINEAR, (*args, *post))
        return LibraryCall(CONV, (*args, *self.geometry, *post))

    def binary(self, other: Tensor, op: str) -> LibraryCall:
        args = (self.x, other, self.weight, self.bias)
        if self.geometry is None:
            return LibraryCall(LINEAR_BINARY, (*args, op))
        return LibraryCall(CONV_BINARY, (*args, *self.geometry, op, 1.0, None, [], ""))


def fused_calls(region: Region, weights: frozenset[Tensor]) -> list[Fused]:
    """A call for each convolution and linear layer of the region with a weight among `weights`
    (tensors that are there when the program is loaded), with the one operator that follows it if
    oneDNN can apply it. Empty if oneDNN can't be used."""
    if not _available():
        return []
    out: list[Fused] = []
    taken: set[Node] = set()
    for n in region.nodes:
        anchor = _anchor(n, weights)
        if anchor is None:
            continue
        after = _only_reader(n.results[0], region)
        call = None if after is None or after in taken else _with_post_op(anchor, after)
        if after is None or call is None:
            out.append(Fused((n,), anchor.call(NOTHING), n.results[0]))
        else:
            taken.add(after)
            out.append(Fused((n, after), call, after.results[0]))
    return out


def _available() -> bool:
    mkldnn = torch.backends.mkldnn
    return mkldnn.is_available() and bool(getattr(mkldnn, "enabled", True)) and _has_operators()


@functools.cache
def _has_operators() -> bool:
    """Whether all operators are there, with as many arguments as the calls here give them."""
    expected = {
        CONV: 10, CONV_BINARY: 13, LINEAR: 6, LINEAR_BINARY: 5, PACK_CONV: 6, PACK_LINEAR: 2,
    }  # fmt: skip
    try:
        return all(len(overload(t)._schema.arguments) == n for t, n in expected.items())
    except AttributeError:
        return False


@functools.cache
def _takes(dtype: DType) -> bool:
    if dtype is DType.BF16:
        found = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
        return found is not None and bool(found())
    return dtype is DType.F32


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a node's call by the names of its schema, defaults filled in."""
    given = node.call.args
    out: dict[str, Any] = {}
    for i, a in enumerate(overload(node.call.target)._schema.arguments):
        out[a.name] = given[i] if i < len(given) else node.call.kwargs.get(a.name, a.default_value)
    return out


def _only_reader(t: Tensor, region: Region) -> Node | None:
    readers = [n for n in region.nodes if t in n.inputs]
    return readers[0] if len(readers) == 1 and t not in region.outputs else None


# ---- the layers --------------------------------------------------------------------------------


def _anchor(node: Node, weights: frozenset[Tensor]) -> _Anchor | None:
    match node.call.target.split("."):
        case ["aten", "conv2d" | "conv3d" | "convolution", "default" | "padding"]:
            find = _convolution
        case ["aten", "linear", "default"]:
            find = _linear
        case _:
            return None
    args = arguments(node)
    x, weight, bias = args["input"], args["weight"], args["bias"]
    tensors = [t for t in (x, weight, bias, *node.results) if t is not None]
    if any(t.dtype is not x.dtype or 0 in t.shape for t in tensors) or not _takes(x.dtype):
        return None
    if weight not in weights or not (bias is None or bias in weights):
        return None
    return find(node, args, x, weight, bias)


def _convolution(
    node: Node, args: dict[str, Any], x: Tensor, weight: Tensor, bias: Tensor | None
) -> _Anchor | None:
    n = weight.rank - 2
    if n not in (2, 3) or x.rank != weight.rank or args.get("transposed"):
        return None
    stride, dilation = (list(per_dimension(args[k], n)) for k in ("stride", "dilation"))
    padding = padding_of(args["padding"], weight.shape[2:], dilation)
    if padding is None:
        return None
    groups, shape = args["groups"], list(x.shape)

    def compute(w: torch.Tensor) -> torch.Tensor:
        pack = overload(PACK_CONV)
        return pack(w.detach(), padding, stride, dilation, groups, shape)

    packed = Packed(weight, compute)
    return _Anchor(node, x, packed, bias, (padding, stride, dilation, groups))


def padding_of(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[int] | None:
    """The same number of elements at both ends of each dimension; None if they differ."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return None if any(t % 2 for t in total) else [t // 2 for t in total]
    return list(per_dimension(padding, len(kernel)))


def _linear(
    node: Node, args: dict[str, Any], x: Tensor, weight: Tensor, bias: Tensor | None
) -> _Anchor | None:
    if x.rank < 2 or weight.rank != 2:
        return None
    rows = x.numel // x.shape[-1]
    packed = Packed(weight, lambda w: overload(PACK_LINEAR)(w.detach(), rows))
    return _Anchor(node, x, packed, bias, None)


# ---- what follows them -------------------------------------------------------------------------


def _with_post_op(anchor: _Anchor, after: Node) -> LibraryCall | None:
    """The call that also applies `after`; None if oneDNN can't."""
    done = anchor.node.results[0]
    if len(after.outputs) != 1 or not after.results:
        return None
    result = after.results[0]
    if result.dtype is not done.dtype or result.shape != done.shape:
        return None
    post = _unary(after)
    if post is not None:
        return anchor.call(post)
    other = _other_operand(after, done)
    return None if other is None else anchor.binary(other, after.op)


def _unary(node: Node) -> PostOp | None:
    match node.call.target.split(".")[1:]:
        case ["sigmoid" | "tanh" | "hardswish" as name, "default"]:
            return (name, [], "")
        case ["silu", "default"]:
            return ("swish", [], "")
        case ["gelu", "default"]:
            return ("gelu", [], arguments(node)["approximate"])
        case ["leaky_relu", "default"] if slope := arguments(node)["negative_slope"]:
            return ("leaky_relu", [float(slope)], "")  # a slope of 0 is a ReLU: see above
    return None


def _other_operand(node: Node, done: Tensor) -> Tensor | None:
    """What is added to, or multiplied with, `done`: a tensor of its shape and type."""
    if node.call.target not in ("aten.add.Tensor", "aten.mul.Tensor"):
        return None
    args = arguments(node)
    a, b = args["self"], args["other"]
    other = b if a is done else a
    if not isinstance(other, Tensor) or other is done or args.get("alpha", 1) != 1:
        return None
    return other if other.shape == done.shape and other.dtype is done.dtype else None
