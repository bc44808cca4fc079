"""From a region to a graph of cuDNN's: a convolution and the pointwise operators behind it.

What its engines that fuse take (cuDNN's documentation, "Runtime Fusion Engine"): one forward
convolution of channels-last tensors, then a graph of pointwise operators in float32 whose other
operands are of the result's shape or broadcast to it. What a region has beyond that is a Refusal;
what cuDNN's engines refuse of the rest, they say when a plan is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onchip.backends.cudnn.source import GraphSource, Strides, text_of
from onchip.backends.library.onednn import arguments, padding_of
from onchip.fusion.layout import channels_last, is_convolution
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.region import Region
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor
from onchip.ir.graph import Node
from onchip.ops.geometry import per_dimension

TYPES = (DType.BF16, DType.F16, DType.F32)

# Operators that are one of cuDNN's pointwise modes, by the mode's name.
UNARY = {
    "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh", "silu": "swish", "exp": "exp",
    "abs": "abs", "neg": "neg", "sqrt": "sqrt", "rsqrt": "rsqrt", "log": "log", "erf": "erf",
    "sin": "sin", "cos": "cos", "reciprocal": "reciprocal",
}  # fmt: skip
# Its max and min are no maximum and minimum: they drop NaN (FMNMX, in the code of cuDNN 9.24).
BINARY = ("add", "sub", "mul", "div")
SWAPS = ("add", "mul")

Ref = int | Tensor | float  # the value of an operation, a tensor, a number


class _Unfit(Exception):
    """What cuDNN has no form for."""


@dataclass(frozen=True, slots=True)
class _Op:
    mode: str
    of: tuple[Ref, ...]
    options: Mapping[str, Any]


@dataclass(eq=False, slots=True)
class _Ops:
    """Operations in order; values: what the region's tensors are among them; bias: the
    convolution's, a value a channel."""

    found: list[_Op] = field(default_factory=list)
    values: dict[Tensor, int] = field(default_factory=dict)
    bias: Tensor | None = None

    def add(self, mode: str, *of: Ref, **options: Any) -> int:
        self.found.append(_Op(mode, of, options))
        return len(self.found) - 1


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """A region as operations of cuDNN's. tensors: what they read, the input and the weights first;
    bias: that among them which has a value a channel; laid_out: the weights, if they are to be
    stored in another order."""

    ops: tuple[_Op, ...]
    tensors: tuple[Tensor, ...]
    bias: Tensor | None
    output: Tensor
    laid_out: dict[Tensor, Strides]


def form_of(
    region: Region, strides: Mapping[Tensor, Strides], constants: frozenset[Tensor]
) -> Form | Refusal | None:
    """The region as a graph of cuDNN's, why it can't be one, or None where it has no convolution.
    strides: in elements; constants: tensors that may be stored anew."""
    convolutions = [n for n in region.nodes if is_convolution(n)]
    if not convolutions:
        return None
    try:
        if len(convolutions) > 1:
            raise _Unfit(f"{len(convolutions)} convolutions, and a graph has one")
        if len(region.outputs) > 1:
            raise _Unfit(f"{len(region.outputs)} results, and a graph has one")
        return _form(region, convolutions[0], strides, constants)
    except _Unfit as error:
        return Refusal(Rule.CUDNN_FORM, region.name, str(error))


def _form(
    region: Region, first: Node, strides: Mapping[Tensor, Strides], constants: frozenset[Tensor]
) -> Form:
    ops, (out,) = _Ops(), region.outputs
    weight = _convolution(first, ops)
    laid_out = {}
    if not _innermost(weight, strides[weight]):
        if weight not in constants:
            raise _Unfit(f"{weight.name}, its weights, is computed, with channels outermost")
        laid_out[weight] = channels_last(weight.shape)
    for n in region.nodes:
        if n is first:
            continue
        if not any(t in ops.values for t in n.inputs):
            raise _Unfit(f"{n.name} ({n.op}) does not follow the convolution")
        _pointwise(n, ops)
    if ops.values.get(out) != len(ops.found) - 1:
        raise _Unfit(f"{out.name} is not its last value")
    read = dict.fromkeys(t for op in ops.found for t in op.of if isinstance(t, Tensor))
    form = Form(tuple(ops.found), tuple(read), ops.bias, out, laid_out)
    for t in (*read, out):
        _check(t, laid_out.get(t) or strides[t], out)
    return form


def _check(t: Tensor, strides: Strides, out: Tensor) -> None:
    """Of a type and an order of elements that its engines know."""
    if t.dtype not in TYPES or 0 in t.shape:
        raise _Unfit(f"{t.name} is {t!r}")
    if t.rank > 2 and not _innermost(t, strides):
        raise _Unfit(f"{t.name} is channels-first, and its engines that fuse are for channels-last")


def _innermost(t: Tensor, strides: Strides) -> bool:
    """Channels side by side; one of several elements at a distance can't be."""
    return t.shape[1] == 1 or strides[1] == 1


# ---- the convolution ---------------------------------------------------------------------------


def _convolution(node: Node, ops: _Ops) -> Tensor:
    """Adds it and its bias; its weights."""
    kind, args = node.op, arguments(node)
    if "transpose" in kind or args.get("transposed"):
        raise _Unfit(f"{node.name} is transposed: its engines fuse forward convolutions")
    x, weight, bias = args["input"], args["weight"], args["bias"]
    n, (out,) = weight.rank - 2, node.results
    if x.rank != weight.rank:
        raise _Unfit(f"{node.name} has no batch axis")
    if len({x.dtype, weight.dtype, out.dtype}) > 1:
        raise _Unfit(f"{node.name} is of mixed types")
    step, apart = (list(per_dimension(args[k], n)) for k in ("stride", "dilation"))
    around = padding_of(args["padding"], weight.shape[2:], apart)
    if around is None:
        raise _Unfit(f"{node.name} has a wider padding at one end")
    if n == 1:  # rows of a picture that is one high
        around, step, apart = [0, *around], [1, *step], [1, *apart]
    v = ops.add("conv_fprop", x, weight, padding=around, stride=step, dilation=apart)
    ops.values[out], ops.bias = v if bias is None else ops.add("add", v, bias), bias
    return weight


# ---- what follows it ---------------------------------------------------------------------------


def _pointwise(node: Node, ops: _Ops) -> None:
    args = arguments(node)
    result = node.results[0] if len(node.outputs) == 1 and node.results else None
    given = args.get("self", args.get("input"))
    shape = next(iter(ops.values)).shape
    if result is None or node.opaque or result.shape != shape or not isinstance(given, Tensor):
        raise _unknown(node)
    if result.dtype not in TYPES or any(t.dtype not in TYPES for t in node.inputs):
        raise _Unfit(f"{node.name} ({node.op}) has types that its graphs don't")
    if node.op in BINARY:
        ops.values[result] = _binary(node, args, ops)
    elif given in ops.values:
        ops.values[result] = _unary(node, ops.values[given], args, ops)
    else:
        raise _unknown(node)


def _unknown(node: Node) -> _Unfit:
    return _Unfit(f"{node.name} ({node.op}) is no pointwise operator of its graphs")


def _binary(node: Node, args: Mapping[str, Any], ops: _Ops) -> int:
    mode, scale = node.op, args.get("alpha", 1)
    if args.get("rounding_mode"):
        raise _Unfit(f"{node.name} rounds a quotient")
    a, b = (_operand(x, node, ops) for x in (args["self"], args["other"]))
    if scale != 1:
        b = ops.add("mul", b, float(scale)) if isinstance(b, int) else _scaled(b, scale, node)
    if not isinstance(a, int) and mode in SWAPS:  # the first one has the result's shape
        a, b = b, a
    return ops.add(mode, a, b)


def _scaled(b: Ref, scale: float, node: Node) -> float:
    if isinstance(b, Tensor):
        raise _Unfit(f"{node.name} adds a multiple of a tensor")
    return float(b * scale)


def _operand(x: Any, node: Node, ops: _Ops) -> Ref:
    if not isinstance(x, Tensor):
        return float(x)
    if x in ops.values:
        return ops.values[x]
    if x is ops.bias:
        raise _Unfit(f"{node.name} reads {x.name}, which is the convolution's bias, too")
    shape = next(iter(ops.values)).shape
    own = (*[1] * (len(shape) - x.rank), *x.shape)
    if x.rank > len(shape) or any(n not in (1, m) for n, m in zip(own, shape, strict=True)):
        raise _Unfit(f"{node.name} broadcasts its result to {x.name}")
    if own[0] > 1 and any(n < m for n, m in zip(own, shape, strict=True)):
        # cuDNN 9.19's engine 7 on an H200: results are off by as much as they are
        raise _Unfit(f"{node.name} reads {x.name}, of each picture, which cuDNN computes wrong")
    return x


def _unary(node: Node, v: int, args: Mapping[str, Any], ops: _Ops) -> int:
    match node.op:
        case op if op in UNARY:
            return ops.add(UNARY[op], v)
        case "gelu":
            return ops.add("gelu" if args["approximate"] == "none" else "gelu_approx_tanh", v)
        case "leaky_relu":
            return ops.add("relu", v, negative_slope=float(args["negative_slope"]))
        case "relu6":
            return _clamped(v, 0.0, 6.0, ops)
        case "hardtanh":
            return _clamped(v, args["min_val"], args["max_val"], ops)
        case "clamp" | "clamp_min" if args["min"] is not None:
            return _clamped(v, args.get("min"), args.get("max"), ops)
        case "hardsigmoid":
            return _hard_sigmoid(v, ops)
        case "hardswish":
            return ops.add("mul", v, _hard_sigmoid(v, ops))
        case "elu" if args["alpha"] == args["scale"] == args["input_scale"] == 1:
            return ops.add("elu", v)
        case "softplus" if args["beta"] == 1:
            return ops.add("softplus", v)
        case "mish":
            return ops.add("mul", v, ops.add("tanh", ops.add("softplus", v)))
        case "_to_copy" if node.results[0].dtype is DType.F32:  # values are float32
            return v
    raise _unknown(node)


def _hard_sigmoid(v: int, ops: _Ops) -> int:
    return ops.add("mul", _clamped(ops.add("add", v, 3.0), 0.0, 6.0, ops), 1 / 6)


def _clamped(v: int, low: Any, high: Any, ops: _Ops) -> int:
    """max(v, low), then min of that and high (None: no limit): a ReLU has both."""
    if any(isinstance(x, Tensor) for x in (low, high)):
        raise _Unfit("a clamp's limits are tensors")
    if high is None:
        return ops.add("relu", v, lower_clip=float(low))
    # right behind a bias it is a pattern that only two slow engines know (cuDNN 9.24)
    v = ops.add("identity", v)
    return ops.add("relu", v, lower_clip=float(low), upper_clip=float(high))


# ---- text --------------------------------------------------------------------------------------


def written(
    form: Form, strides: Mapping[Tensor, Strides], late: frozenset[Tensor], plan: int, comment: str
) -> GraphSource:
    """The form as text. late: tensors that are computed at load, which come after the others;
    plan: place among the plans that cuDNN's heuristics propose, best first."""
    strides = {**strides, **form.laid_out}
    later = [t for t in form.tensors if t in late or t in form.laid_out]
    inputs = (*(t for t in form.tensors if t not in later), *later)
    scalars = tuple(dict.fromkeys(x for op in form.ops for x in op.of if isinstance(x, float)))
    place: dict[Ref, int] = {x: n + 1 for n, x in enumerate((*inputs, *scalars))}
    rank = form.output.rank
    one = {"dim": [1] * max(rank, 4), "stride": [1] * max(rank, 4), "type": DType.F32.label}
    lines: list[dict[str, Any]] = [
        {"tensor": place[t], **_lying(t, strides[t], rank, t is form.bias)} for t in inputs
    ]
    lines += [{"tensor": place[x], **one} for x in scalars]
    for n, op in enumerate(form.ops):
        of = [f"v{x}" if isinstance(x, int) else f"t{place[x]}" for x in op.of]
        lines.append({"value": n, "op": op.mode, "of": of, **op.options})
    out = _lying(form.output, strides[form.output], rank)
    lines.append({"result": len(place) + 1, "of": f"v{len(form.ops) - 1}", **out})
    lines.append({"plan": plan})
    return GraphSource(
        text_of(lines, comment), inputs, (form.output,), scalars, dict(form.laid_out)
    )


def _lying(t: Tensor, strides: Strides, rank: int, channels: bool = False) -> dict[str, Any]:
    """Its sizes and strides as a tensor of `rank` axes, or four: a signal is a picture one high.
    channels: its only axis is the second one, else those that it lacks come before its own. An axis
    of one element gets the stride that it has in a dense channels-last tensor, by which cuDNN tells
    the order of the axes."""
    before, behind = (1, rank - 2) if channels else (rank - t.rank, 0)
    shape = [*[1] * before, *t.shape, *[1] * behind]
    strides = (*[0] * before, *strides, *[0] * behind)
    if rank == 3:
        shape, strides = [*shape[:2], 1, shape[2]], (*strides[:2], 0, strides[2])
    dense = channels_last(tuple(shape))
    own = [d if n == 1 else s for n, s, d in zip(shape, strides, dense, strict=True)]
    return {"dim": shape, "stride": own, "type": t.dtype.label}
