"""What the rules know of operators: layers that are linear in their input, affine operators with
constants, means and sums, average pools."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from onchip.algebra.rewriting import Facts
from onchip.ir.expr import Number, Tensor
from onchip.ir.graph import Node
from onchip.ops.geometry import per_dimension
from onchip.ops.promotion import normalize_dims

# ---- layers ------------------------------------------------------------------------------------

_CONVOLUTIONS = {f"aten.conv{n}d.{o}" for n in (1, 2, 3) for o in ("default", "padding")}
_TRANSPOSED = {
    "aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input",
}  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Layer:
    """A linear layer or convolution whose weight and bias are constants that no call changes.

    kind      "linear" (weight [out, in]), "matmul" (weight [in, out], no bias), "conv" (weight
              [F, C/groups, *kernel]), "transposed" (weight [C, F/groups, *kernel])
    axis      of the features in the result
    padding   in front of each dimension; None where the two sides differ
    """

    node: Node
    kind: str
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    axis: int
    features: int
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | None = ()
    dilation: tuple[int, ...] = ()
    extra: tuple[int, ...] = ()  # output padding
    groups: int = 1

    @property
    def out(self) -> Tensor:
        return self.node.results[0]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight.shape[2:]

    @property
    def is_convolution(self) -> bool:
        return self.kind in ("conv", "transposed")


def layer(node: Node | None, facts: Facts) -> Layer | None:
    """The node as a layer, if it is one."""
    if node is None or node.opaque or node.call.kwargs or len(node.results) != 1:
        return None
    target, args, rank = node.call.target, node.call.args, node.results[0].rank
    if target == "aten.linear.default" and args[1].rank == 2:
        found = Layer(node, "linear", args[0], args[1], _at(args, 2), rank - 1, args[1].shape[0])
    elif target in ("aten.matmul.default", "aten.mm.default") and args[1].rank == 2 <= rank:
        found = Layer(node, "matmul", args[0], args[1], None, rank - 1, args[1].shape[1])
    elif target in _CONVOLUTIONS | _TRANSPOSED and args[0].rank == args[1].rank:
        found = _convolution(node, target in _TRANSPOSED)
    else:
        return None
    if any(p not in facts.fixed or p is found.x for p in found.parameters):
        return None
    return found if found.weight.dtype is found.out.dtype else None


def _at(args: tuple[Any, ...], i: int, otherwise: Any = None) -> Any:
    return args[i] if len(args) > i else otherwise


def _convolution(node: Node, transposed: bool) -> Layer:
    args, n = node.call.args, node.call.args[1].rank - 2
    x, weight, bias = args[0], args[1], _at(args, 2)
    stride, padding = per_dimension(_at(args, 3, 1), n), _at(args, 4, 0)
    spread = per_dimension(_at(args, 7 if transposed else 5, 1), n)
    groups = _at(args, 6, 1)
    if padding == "same":
        both = [d * (k - 1) for d, k in zip(spread, weight.shape[2:], strict=True)]
        pads = None if any(b % 2 for b in both) else tuple(b // 2 for b in both)
    else:
        pads = per_dimension(0 if padding == "valid" else padding, n)
    extra = per_dimension(_at(args, 5, 0), n) if transposed else (0,) * n
    kind = "transposed" if transposed else "conv"
    out = weight.shape[1] * groups if transposed else weight.shape[0]
    return Layer(node, kind, x, weight, bias, 1, out, stride, pads, spread, extra, groups)


def convolution_args(
    kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...],
    padding: tuple[int, ...], dilation: tuple[int, ...], extra: tuple[int, ...], groups: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Target and arguments of a convolution."""
    n = weight.rank - 2
    lists = [list(a) for a in (stride, padding, extra, dilation)]
    if kind == "conv":
        return (f"aten.conv{n}d.default", x, weight, bias, lists[0], lists[1], lists[3], groups)
    target = f"aten.conv_transpose{n}d.{'default' if n == 1 else 'input'}"
    return (target, x, weight, bias, lists[0], lists[1], lists[2], groups, lists[3])


# ---- affine operators --------------------------------------------------------------------------

_AFFINE = {"mul": "mul", "multiply": "mul", "div": "div", "divide": "div", "true_divide": "div",
           "add": "add", "sub": "sub", "subtract": "sub"}  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Affine:
    """x * c, x / c, x + factor * c (`factor` holds the sign of a difference too): `c` is a finite
    number, or a constant that no call changes and that broadcasts to x."""

    node: Node
    kind: str  # "mul", "div", "add"
    x: Tensor
    c: Tensor | Number
    factor: float = 1.0

    @property
    def scales(self) -> bool:
        return self.kind != "add"

    @property
    def sources(self) -> tuple[Tensor, ...]:
        return (self.c,) if isinstance(self.c, Tensor) else ()

    @property
    def varies(self) -> set[int]:
        """Axes of x along which the constant is not one value."""
        if not isinstance(self.c, Tensor):
            return set()
        first = self.x.rank - self.c.rank
        return {first + i for i, n in enumerate(self.c.shape) if n != 1}

    def on(self, x: Tensor, c: Tensor | Number) -> tuple[Any, ...]:
        """The call's arguments with others in place of x and c."""
        given = {self.x: x, self.c: c} if isinstance(self.c, Tensor) else {self.x: x}
        pair = [given.get(a, c) if isinstance(a, Tensor) else c for a in self.node.call.args[:2]]
        return (*pair, *self.node.call.args[2:])


def affine(node: Node | None, facts: Facts) -> Affine | None:
    """The node as an affine operator of the result's shape and type, if it is one."""
    if node is None or node.opaque or node.op not in _AFFINE or len(node.results) != 1:
        return None
    kind, args = _AFFINE[node.op], list(node.call.args)
    factor = node.call.kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    if set(node.call.kwargs) - {"alpha"} or isinstance(factor, str) or factor is None:
        return None
    x, c = args[0], args[1]
    if kind in ("mul", "add") and (not isinstance(x, Tensor) or x in facts.fixed) and factor == 1:
        x, c = c, x
    if not isinstance(x, Tensor) or x in facts.fixed or not x.dtype.is_float or x is c:
        return None
    constant = c in facts.fixed if isinstance(c, Tensor) else _finite(c)
    out = node.results[0]
    if not constant or out.shape != x.shape or out.dtype is not x.dtype:
        return None
    sign = -1.0 if kind == "sub" else 1.0
    return Affine(node, "add" if kind == "sub" else kind, x, c, sign * factor)


def _finite(c: Any) -> bool:
    return isinstance(c, (int, float)) and math.isfinite(c)


# ---- means and sums ----------------------------------------------------------------------------

_FOLDS = {"aten.mean.dim": "mean", "aten.sum.dim_IntList": "sum", "aten.mean.default": "mean",
          "aten.sum.default": "sum"}  # fmt: skip
_GLOBAL = {
    f"aten.{under}adaptive_avg_pool{n}d.default": n for n in (1, 2, 3) for under in ("", "_")
}


@dataclass(frozen=True, eq=False, slots=True)
class Fold:
    """The mean or sum of x over some axes (at least one, and of more than one element)."""

    node: Node
    kind: str  # "mean", "sum"
    x: Tensor
    dims: tuple[int, ...]
    keepdim: bool

    @property
    def count(self) -> int:
        return math.prod(self.x.shape[d] for d in self.dims)


def fold_of(node: Node) -> Fold | None:
    """The node as a mean or a sum in its input's type, an average pool to one element included."""
    target, args = node.call.target, node.call.args
    if node.opaque or not (target in _FOLDS or target in _GLOBAL) or node.call.kwargs:
        return None
    x = args[0]
    if node.results[0].dtype is not x.dtype or not x.dtype.is_float or x.rank == 0:
        return None
    if target in _GLOBAL:
        n = _GLOBAL[target]
        if any(size != 1 for size in per_dimension(args[1], n)):
            return None
        found = Fold(node, "mean", x, tuple(range(x.rank - n, x.rank)), True)
    else:
        dims = normalize_dims(_at(args, 1), x.rank)
        found = Fold(node, _FOLDS[target], x, tuple(sorted(dims)), bool(_at(args, 2, False)))
    return found if found.count > 1 else None


@dataclass(frozen=True, eq=False, slots=True)
class Pool:
    """An average pool; `whole`: each window has as many elements as it divides by, so that the
    mean of a constant is that constant."""

    node: Node
    x: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padded: bool  # windows may leave x
    whole: bool

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(range(self.x.rank - len(self.kernel), self.x.rank))


def pool_of(node: Node) -> Pool | None:
    """The node as an average pool, if it is one."""
    if node.opaque or not node.op.startswith("avg_pool") or node.call.kwargs:
        return None
    args, n = node.call.args, int(node.op[-2])
    kernel, padding = per_dimension(args[1], n), per_dimension(_at(args, 3, 0), n)
    stride = per_dimension(_at(args, 2) or kernel, n)
    hangs, includes, divisor = _at(args, 4, False), _at(args, 5, True), _at(args, 6)
    whole = divisor is None and (not any(padding) or not includes)
    return Pool(node, args[0], kernel, stride, any(padding) or bool(hangs), whole)
