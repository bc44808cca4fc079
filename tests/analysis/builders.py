"""Expressions of common operators, written here by hand so that the analysis is tested alone."""

from __future__ import annotations

from collections.abc import Sequence

from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor, call, fold, given, tensor
from onchip.ir.graph import Graph, LibraryCall, Node

F32 = DType.F32


def conv2d(x: Tensor, w: Tensor, stride: int = 1, padding: int = 0, groups: int = 1) -> Tensor:
    n, _, h, wd = x.shape
    o, cg, kh, kw = w.shape
    shape = (n, o, (h + 2 * padding - kh) // stride + 1, (wd + 2 * padding - kw) // stride + 1)

    def element(b, c, y, z):
        first = 0 if groups == 1 else (c // (o // groups)) * cg
        return fold(
            "sum",
            (cg, kh, kw),
            lambda k, i, j: (
                x.padded(0.0)[b, k + first, y * stride + i - padding, z * stride + j - padding]
                * w[c, k, i, j]
            ),
        )

    return tensor(shape, x.dtype, element, "conv")


def max_pool(x: Tensor, k: int, s: int, p: int = 0, dilation: int = 1) -> Tensor:
    n, c, h, w = x.shape
    span = dilation * (k - 1) + 1
    shape = (n, c, (h + 2 * p - span) // s + 1, (w + 2 * p - span) // s + 1)
    return tensor(
        shape,
        x.dtype,
        lambda b, ch, y, z: fold(
            "max",
            (k, k),
            lambda i, j: x.padded(float("-inf"))[
                b, ch, y * s + i * dilation - p, z * s + j * dilation - p
            ],
        ),
        "pool",
    )


def relu(x: Tensor) -> Tensor:
    return tensor(x.shape, x.dtype, lambda *i: call("maximum", x[i], 0.0), "relu")


def batch_norm(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    def element(n, c, *i):
        scale = call("rsqrt", var[c] + 1e-5) * weight[c]
        return (x[(n, c, *i)] - mean[c]) * scale + bias[c]

    return tensor(x.shape, x.dtype, element, "bn")


def binary(fn: str, a: Tensor, b: Tensor | float) -> Tensor:
    return tensor(
        a.shape, a.dtype, lambda *i: call(fn, a[i], b[i] if isinstance(b, Tensor) else b), fn
    )


def matmul(a: Tensor, b: Tensor) -> Tensor:
    (m, k), (_, n) = a.shape, b.shape
    return tensor(
        (m, n), a.dtype, lambda i, j: fold("sum", (k,), lambda r: a[i, r] * b[r, j]), "mm"
    )


def node(target: str, args: Sequence[object], *outputs: Tensor, name: str = "") -> Node:
    opaque = "" if all(t.body is not None for t in outputs) else "no expression"
    tensors = () if opaque else tuple(outputs)
    call_ = LibraryCall(target, tuple(args))
    return Node(name or outputs[0].name, call_, tensors, tuple(outputs), opaque=opaque)


def graph(inputs: Sequence[Tensor], constants: Sequence[Tensor], nodes: Sequence[Node], *outs):
    return Graph(tuple(inputs), {t: t.name for t in constants}, tuple(nodes), tuple(outs))


def conv_relu_bn(dtype: DType = F32, pool: bool = False, n: int = 4, c: int = 8, h: int = 6):
    """The mission's pipeline as a graph of separate operators."""
    x, w = given((n, c, h, h), dtype), given((c, c, 3, 3), dtype, "w")
    stats = [given((c,), dtype, s) for s in ("mean", "var", "weight", "bias")]
    a = conv2d(x, w, padding=1)
    b = relu(a)
    d = batch_norm(b, *stats)
    nodes = [
        node("aten.conv2d.default", (x, w), a),
        node("aten.relu.default", (a,), b),
        node("aten.batch_norm.default", (b, *stats), d),
    ]
    if pool:
        e = max_pool(d, 2, 2)
        nodes.append(node("aten.max_pool2d.default", (d,), e))
    return graph([x], [w, *stats], nodes, nodes[-1].results[0])
