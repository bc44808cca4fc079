"""Activation functions, NaN passing through all of them as in ATen."""

from __future__ import annotations

import math
from collections.abc import Callable

from onchip.errors import InputError, OpaqueOperator
from onchip.ir.expr import Expr, Tensor, call, tensor, where
from onchip.ops.promotion import compare, element, normalize_dim, pointwise
from onchip.ops.registry import op

SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946


def _activation(name: str, x: Tensor, fn: Callable[[Expr], Expr]) -> Tensor:
    return pointwise(name, [x], fn, x.dtype)


def _clamped(a: Expr, low: float, high: float) -> Expr:
    return call("minimum", call("maximum", a, low), high)


@op("aten.relu.default")
def relu(x: Tensor) -> Tensor:
    return _activation("relu", x, lambda a: call("maximum", a, 0))


@op("aten.relu6.default")
def relu6(x: Tensor) -> Tensor:
    return _activation("relu6", x, lambda a: _clamped(a, 0, 6))


@op("aten.hardtanh.default")
def hardtanh(x: Tensor, min_val: float = -1, max_val: float = 1) -> Tensor:
    return _activation("hardtanh", x, lambda a: _clamped(a, min_val, max_val))


@op("aten.leaky_relu.default")
def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    return _activation(
        "leaky_relu", x, lambda a: where(compare("gt", a, 0.0), a, a * float(negative_slope))
    )


@op("aten.rrelu.default")
def rrelu(
    x: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: object = None,
) -> Tensor:
    """Evaluation form: the slope is the middle of the range."""
    if training:
        raise OpaqueOperator("rrelu in training draws random slopes")
    return leaky_relu(x, (lower + upper) / 2)


@op("aten.elu.default")
def elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    def body(a: Expr) -> Expr:
        negative = call("expm1", a * float(input_scale)) * float(alpha * scale)
        return where(compare("lt", a, 0.0), negative, a * float(scale))

    return _activation("elu", x, body)


@op("aten.selu.default")
def selu(x: Tensor) -> Tensor:
    return elu(x, SELU_ALPHA, SELU_SCALE)


@op("aten.celu.default")
def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return elu(x, alpha, 1.0, 1.0 / alpha)


@op("aten.gelu.default")
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x Phi(x), Phi by erf ("none") or by its tanh approximation ("tanh")."""

    def exact(a: Expr) -> Expr:
        return a * 0.5 * (call("erf", a * math.sqrt(0.5)) + 1.0)

    def by_tanh(a: Expr) -> Expr:
        inner = (a + a * a * a * 0.044715) * math.sqrt(2 / math.pi)
        return a * 0.5 * (call("tanh", inner) + 1.0)

    return _activation("gelu", x, by_tanh if approximate == "tanh" else exact)


@op("aten.silu.default")
def silu(x: Tensor) -> Tensor:
    return _activation("silu", x, lambda a: a * call("sigmoid", a))


@op("aten.mish.default")
def mish(x: Tensor) -> Tensor:
    return _activation("mish", x, lambda a: a * call("tanh", call("log1p", call("exp", a))))


@op("aten.softplus.default")
def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """log(1 + exp(beta x)) / beta, and x itself where beta x exceeds the threshold."""

    def body(a: Expr) -> Expr:
        z = a * float(beta)
        smooth = call("log1p", call("exp", z)) / float(beta)
        return where(compare("gt", z, float(threshold)), a, smooth)

    return _activation("softplus", x, body)


@op("aten.hardsigmoid.default")
def hardsigmoid(x: Tensor) -> Tensor:
    return _activation("hardsigmoid", x, lambda a: _clamped(a + 3.0, 0.0, 6.0) / 6.0)


@op("aten.hardswish.default")
def hardswish(x: Tensor) -> Tensor:
    return _activation("hardswish", x, lambda a: a * _clamped(a + 3.0, 0.0, 6.0) / 6.0)


@op("aten.hardshrink.default")
def hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    def body(a: Expr) -> Expr:
        inside = call(
            "logical_and", compare("ge", a, -float(lambd)), compare("le", a, float(lambd))
        )
        return where(inside, 0.0, a)

    return _activation("hardshrink", x, body)


@op("aten.softshrink.default")
def softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """x moved towards zero by lambd; a NaN stays (0 * NaN)."""

    def body(a: Expr) -> Expr:
        below = where(compare("lt", a, -float(lambd)), a + float(lambd), a * 0.0)
        return where(compare("gt", a, float(lambd)), a - float(lambd), below)

    return _activation("softshrink", x, body)


def _log_sigmoid(a: Expr) -> Expr:
    return call("minimum", a, 0.0) - call("log1p", call("exp", -call("abs", a)))


@op("aten.log_sigmoid.default")
def log_sigmoid(x: Tensor) -> Tensor:
    return _activation("log_sigmoid", x, _log_sigmoid)


@op("aten.log_sigmoid_forward.default")
def log_sigmoid_forward(x: Tensor) -> tuple[Tensor, None]:
    """The second result is a buffer for the backward pass, which nobody can read here."""
    return log_sigmoid(x), None


@op("aten.threshold.default")
def threshold(x: Tensor, threshold: float, value: float) -> Tensor:
    return _activation("threshold", x, lambda a: where(compare("le", a, threshold), value, a))


@op("aten.prelu.default")
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """x, times weight where negative; one weight in all, or one per channel (dimension 1)."""
    if weight.numel != 1 and (x.rank < 2 or weight.numel != x.shape[1]):
        raise InputError(f"prelu weight {weight} fits neither one nor the channels of {x}")
    zeros = (0,) * weight.rank

    def body(*i: Expr) -> Expr:
        slope = weight[zeros] if weight.numel == 1 else weight[i[1]]
        return _parametric(x[i], slope)

    return tensor(x.shape, x.dtype, body, "prelu")


@op("aten._prelu_kernel.default")
def prelu_kernel(x: Tensor, weight: Tensor) -> Tensor:
    return tensor(
        x.shape, x.dtype, lambda *i: _parametric(x[i], element(weight, i, x.shape)), "prelu"
    )


def _parametric(a: Expr, slope: Expr) -> Expr:
    return where(compare("gt", a, 0.0), a, slope * a)


@op("aten.glu.default")
def glu(x: Tensor, dim: int = -1) -> Tensor:
    """The first half along `dim` times the sigmoid of the second half."""
    d = normalize_dim(dim, x.rank)
    if x.rank == 0 or x.shape[d] % 2:
        raise InputError(f"glu halves dimension {dim} of {x}, whose size must be even")
    half = x.shape[d] // 2
    shape = (*x.shape[:d], half, *x.shape[d + 1 :])

    def body(*i: Expr) -> Expr:
        gate = x[(*i[:d], i[d] + half, *i[d + 1 :])]
        return x[i] * call("sigmoid", gate)

    return tensor(shape, x.dtype, body, "glu")
