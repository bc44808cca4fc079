"""Built-in pipelines: the operator sequences that fusion is about, small enough to read whole.

`pipeline:NAME` has a default shape; `pipeline:NAME:1x3x224x224` sets another, and
`pipeline:chain:N` (or `pipeline:chain N`) is a pointwise chain of N operators.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onchip.errors import UnknownModel
from onchip.models import weights
from onchip.models.model import Model, unknown

IMAGES = (16, 64, 56, 56)


class Stages(nn.Sequential):
    """Modules by name, one after the other."""

    def __init__(self, **stages: nn.Module) -> None:
        super().__init__()
        for name, stage in stages.items():
            self.add_module(name, stage)


def _conv(shape: tuple[int, ...], outside: int = 64) -> nn.Conv2d:
    return nn.Conv2d(shape[1], outside, 3, padding=1)


def conv_relu_bn_pool(shape: tuple[int, ...]) -> nn.Module:
    """[n, c, h, w] → [n, 64, h/2, w/2], the mission's four operators."""
    return Stages(conv=_conv(shape), relu=nn.ReLU(), bn=nn.BatchNorm2d(64), pool=nn.MaxPool2d(2))


def conv_bn_relu(shape: tuple[int, ...]) -> nn.Module:
    """[n, c, h, w] → [n, 64, h, w]."""
    return Stages(conv=_conv(shape), bn=nn.BatchNorm2d(64), relu=nn.ReLU())


def conv_bn_relu_pool(shape: tuple[int, ...]) -> nn.Module:
    """[n, c, h, w] → [n, 64, h/2, w/2]."""
    return Stages(conv=_conv(shape), bn=nn.BatchNorm2d(64), relu=nn.ReLU(), pool=nn.MaxPool2d(2))


def conv_relu_bn_pool3(shape: tuple[int, ...]) -> nn.Module:
    """[n, c, h, w] → [n, 64, h/2, w/2] with overlapping 3×3 windows, stride 2, padding 1."""
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return Stages(conv=_conv(shape), relu=nn.ReLU(), bn=nn.BatchNorm2d(64), pool=pool)


class Residual(nn.Module):
    """relu(bn(conv(x)) + x): [n, c, h, w] → the same."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.conv = _conv(shape, shape[1])
        self.bn = nn.BatchNorm2d(shape[1])

    def forward(self, x: Tensor) -> Tensor:
        """Convolution, BatchNorm, the shortcut, ReLU."""
        return torch.relu(self.bn(self.conv(x)) + x)


class AddMul(nn.Module):
    """A = B + C; D = A * 2: two inputs of any shape."""

    def forward(self, b: Tensor, c: Tensor) -> Tensor:
        """Five accesses written one kernel an operator, three when fused."""
        return (b + c) * 2


class Chain7(nn.Module):
    """Seven operators, a convolution and two reductions among them: [n, c, h, w] → [n, h, w].

    The mean over the image is a global synchronisation: its result gates every pixel it came from.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.conv = _conv(shape)
        self.bn = nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        """Convolution, BatchNorm, ReLU, mean, sigmoid, gate, largest channel."""
        x = torch.relu(self.bn(self.conv(x)))
        gate = torch.sigmoid(x.mean(dim=(2, 3), keepdim=True))
        return (x * gate).amax(dim=1)


class Chain(nn.Module):
    """N pointwise operators, each reading the last value and half of them one from far back too.

    So about eight values are live at any place of a long chain, which is what fills registers.
    """

    REACH = 15  # steps back; odd, so that subtract meets tanh and multiply meets cosine: no growth

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Subtract, tanh, multiply, cosine, again and again; values stay within ±2."""
        values = [torch.tanh(x), y]
        for step in range(1, self.length):
            last, back = values[-1], values[max(0, step - self.REACH)]
            match step % 4:
                case 1:
                    values.append(last - back)
                case 2:
                    values.append(torch.tanh(last))
                case 3:
                    values.append(last * back)
                case _:
                    values.append(torch.cos(last))
        return values[-1] if self.length > 1 else values[0]  # one operator: y is not read


def layernorm(shape: tuple[int, ...]) -> nn.Module:
    """Layer norm with scale and shift over the last axis."""
    return nn.LayerNorm(shape[-1])


def mlp(shape: tuple[int, ...]) -> nn.Module:
    """Linear to four times the width, GELU, Linear back."""
    width = shape[-1]
    return Stages(up=nn.Linear(width, 4 * width), act=nn.GELU(), down=nn.Linear(4 * width, width))


@dataclass(frozen=True)
class Pipeline:
    """How to build a pipeline for a shape, its default shape, and how many inputs it takes."""

    build: Callable[[tuple[int, ...]], nn.Module]
    shape: tuple[int, ...]
    inputs: int = 1
    images: bool = False  # takes [n, c, h, w] only


PIPELINES = {
    "conv-relu-bn-pool": Pipeline(conv_relu_bn_pool, IMAGES, images=True),
    "conv-bn-relu": Pipeline(conv_bn_relu, IMAGES, images=True),
    "conv-bn-relu-pool": Pipeline(conv_bn_relu_pool, IMAGES, images=True),
    "conv-relu-bn-pool3": Pipeline(conv_relu_bn_pool3, IMAGES, images=True),
    "residual": Pipeline(Residual, IMAGES, images=True),
    "add-mul": Pipeline(lambda shape: AddMul(), (2**26,), inputs=2),
    "softmax": Pipeline(lambda shape: nn.Softmax(dim=-1), (8192, 1024)),
    "layernorm": Pipeline(layernorm, (8192, 1024)),
    "mlp": Pipeline(mlp, (512, 1024)),
    "chain7": Pipeline(Chain7, IMAGES, images=True),
}
CHAIN = re.compile(r"chain[: ]\s*(\d+)(?::(.+))?")


def names() -> list[str]:
    """Every pipeline name."""
    return [*PIPELINES, "chain:N"]


def load(name: str, batch: int | None) -> Model:
    """`pipeline:NAME[:SHAPE]`; `batch` replaces the first axis of shapes that have several."""
    if found := CHAIN.fullmatch(name):
        length = int(found[1])
        if length < 1:
            raise UnknownModel(f"pipeline:{name}: a chain has at least one operator")
        pipeline, text = Pipeline(lambda shape: Chain(length), IMAGES, inputs=2), found[2]
    else:
        key, _, text = name.partition(":")
        if key not in PIPELINES:
            raise unknown("pipeline", key, names(), f"choose from {', '.join(names())}")
        pipeline = PIPELINES[key]
    shape = _shape(name, text) if text else pipeline.shape
    if pipeline.images and len(shape) != 4:
        raise UnknownModel(f"pipeline:{name}: it takes [n, c, h, w], such as 16x64x56x56")
    if batch is not None:
        if len(shape) == 1:
            advice = "give its size instead, as pipeline:add-mul:2^20"
            raise UnknownModel(f"pipeline:{name} has no batch axis; {advice}")
        shape = (batch, *shape[1:])
    module = pipeline.build(shape).eval()
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(torch.randn(shape, generator=generator) for _ in range(pipeline.inputs))
    weights.unsettle(module, inputs)
    note = "built-in pipeline, random parameters (seed 0) and normal inputs of both signs"
    return Model(f"pipeline:{name}", module, inputs, note, "Apache-2.0")


def _shape(name: str, text: str) -> tuple[int, ...]:
    """1x3x224x224 or 2^20 → a tuple of sizes."""
    sizes = re.fullmatch(r"\d+(\^\d+)?(x\d+(\^\d+)?)*", text)
    if not sizes:
        raise UnknownModel(
            f"pipeline:{name}: {text!r} is no shape; write it as 16x64x56x56 or 2^24"
        )
    parts = [[int(number) for number in size.split("^")] for size in text.split("x")]
    shape = tuple(part[0] ** math.prod(part[1:]) for part in parts)
    return shape
