"""Built-in pipelines: the operator sequences that fusion is about, small enough to read whole.

`pipeline:NAME` has a default shape; `pipeline:NAME:1x3x224x224` sets another, a further
`:channels-last` stores images and filters with the channels innermost, and `pipeline:chain:N` (or
`pipeline:chain N`) is a pointwise chain of N operators.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onchip.errors import UnknownModel
from onchip.models import weights
from onchip.models.draw import normal
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


def stem(shape: tuple[int, ...]) -> nn.Module:
    """ResNet's first operators: [n, c, h, w] → [n, 64, h/4, w/4]."""
    conv = nn.Conv2d(shape[1], 64, 7, stride=2, padding=3)
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return Stages(conv=conv, bn=nn.BatchNorm2d(64), relu=nn.ReLU(), pool=pool)


def rmsnorm_gelu(shape: tuple[int, ...]) -> nn.Module:
    """RMS norm with scale over the last axis, GELU."""
    return Stages(norm=nn.RMSNorm(shape[-1], eps=1e-6), act=nn.GELU())


def groupnorm_silu(shape: tuple[int, ...]) -> nn.Module:
    """Group norm in up to 32 groups of channels, SiLU: a diffusion model's block."""
    return Stages(norm=nn.GroupNorm(math.gcd(32, shape[1]), shape[1]), act=nn.SiLU())


def bn_relu(shape: tuple[int, ...]) -> nn.Module:
    """Inference BatchNorm that no convolution precedes, ReLU."""
    return Stages(bn=nn.BatchNorm2d(shape[1]), relu=nn.ReLU())


def upsample(shape: tuple[int, ...], kernel: int = 4, padding: int = 1) -> nn.Module:
    """A decoder's step: [n, c, h, w] → [n, c/2, 2h, 2w] by a transposed convolution, BatchNorm,
    ReLU."""
    more = 2 * padding + 2 - kernel
    features = max(shape[1] // 2, 1)
    conv = nn.ConvTranspose2d(shape[1], features, kernel, 2, padding, more)
    return Stages(conv=conv, bn=nn.BatchNorm2d(features), relu=nn.ReLU())


def vocoder(shape: tuple[int, ...]) -> nn.Module:
    """A vocoder's first step: [n, c, t] → [n, c/2, 8t], LeakyReLU on both sides."""
    conv = nn.ConvTranspose1d(shape[1], max(shape[1] // 2, 1), 16, 8, 4)
    return Stages(before=nn.LeakyReLU(0.1), conv=conv, after=nn.LeakyReLU(0.1))


class TransposeAdd(nn.Module):
    """x transposed + y: inputs [c, n] and [n, c]."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """One of the two is read against the grain of its memory."""
        return x.t() + y


class ColumnSum(nn.Module):
    """[n, c] → [c]."""

    def forward(self, x: Tensor) -> Tensor:
        """The sum over the slower axis."""
        return x.sum(0)


class BiasGeluResidualNorm(nn.Module):
    """layer norm(gelu(x + bias) + residual): two inputs [n, c] → [n, c]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(shape[-1]))
        self.norm = nn.LayerNorm(shape[-1])

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """What a transformer does between two products."""
        return self.norm(F.gelu(x + self.bias) + residual)


class CrossEntropy(nn.Module):
    """Mean loss of [n, classes] logits and [n] targets: a language model's last step."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Log-softmax, gather, mean."""
        return F.cross_entropy(logits, target)


class DepthwiseNorm(nn.Module):
    """ConvNeXt's first operators: [n, c, h, w] → [n, h, w, c]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        c = shape[1]
        self.conv = nn.Conv2d(c, c, 7, padding=3, groups=c)
        self.norm = nn.LayerNorm(c)

    def forward(self, x: Tensor) -> Tensor:
        """Depthwise 7×7 with bias, layer norm over the channels."""
        return self.norm(self.conv(x).permute(0, 2, 3, 1))


class LinearGeluResidual(nn.Module):
    """gelu(linear(x)) + residual: two inputs [n, c] → [n, c]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(shape[-1], shape[-1])

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """A product and its epilogue."""
        return F.gelu(self.linear(x)) + residual


def _logits(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    target = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    return normal(shape, generator), target


def _crossed(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    return normal(shape[::-1], generator), normal(shape, generator)


@dataclass(frozen=True)
class Pipeline:
    """How to build a pipeline for a shape, its default shape, and its inputs: so many normal ones
    of that shape, or what `draw` gives for the shape and a generator."""

    build: Callable[[tuple[int, ...]], nn.Module]
    shape: tuple[int, ...]
    inputs: int = 1
    rank: int | None = None  # of the shape; None: any
    draw: Callable[[tuple[int, ...], torch.Generator], tuple[Tensor, ...]] | None = None


PIPELINES = {
    "conv-relu-bn-pool": Pipeline(conv_relu_bn_pool, IMAGES, rank=4),
    "conv-bn-relu": Pipeline(conv_bn_relu, IMAGES, rank=4),
    "conv-bn-relu-pool": Pipeline(conv_bn_relu_pool, IMAGES, rank=4),
    "conv-relu-bn-pool3": Pipeline(conv_relu_bn_pool3, IMAGES, rank=4),
    "residual": Pipeline(Residual, IMAGES, rank=4),
    "add-mul": Pipeline(lambda shape: AddMul(), (2**26,), inputs=2),
    "softmax": Pipeline(lambda shape: nn.Softmax(dim=-1), (8192, 1024)),
    "layernorm": Pipeline(layernorm, (8192, 1024)),
    "mlp": Pipeline(mlp, (512, 1024)),
    "chain7": Pipeline(Chain7, IMAGES, rank=4),
    "stem": Pipeline(stem, (16, 3, 224, 224), rank=4),
    "rmsnorm-gelu": Pipeline(rmsnorm_gelu, (8192, 1024)),
    "groupnorm-silu": Pipeline(groupnorm_silu, (16, 256, 32, 32), rank=4),
    "bn-relu": Pipeline(bn_relu, IMAGES, rank=4),
    "max-pool": Pipeline(lambda shape: nn.MaxPool2d(3, stride=2, padding=1), IMAGES, rank=4),
    "upsample": Pipeline(upsample, (16, 256, 32, 32), rank=4),
    "upsample-2-taps": Pipeline(partial(upsample, kernel=2, padding=0), (16, 256, 32, 32), rank=4),
    "upsample-3-taps": Pipeline(partial(upsample, kernel=3), (16, 256, 32, 32), rank=4),
    "vocoder": Pipeline(vocoder, (16, 512, 256), rank=3),
    "transpose-add": Pipeline(lambda shape: TransposeAdd(), (2048, 2048), rank=2, draw=_crossed),
    "column-sum": Pipeline(lambda shape: ColumnSum(), (8192, 1024), rank=2),
    "bias-gelu-residual-layernorm": Pipeline(BiasGeluResidualNorm, (8192, 1024), inputs=2),
    "cross-entropy": Pipeline(lambda shape: CrossEntropy(), (1024, 8192), rank=2, draw=_logits),
    "depthwise-layernorm": Pipeline(DepthwiseNorm, (16, 96, 56, 56), rank=4),
    "linear-gelu-residual": Pipeline(LinearGeluResidual, (512, 1024), inputs=2),
}
CHAIN = re.compile(r"chain[: ]\s*(\d+)(?::(.+))?")


def names() -> list[str]:
    """Every pipeline name."""
    return [*PIPELINES, "chain:N"]


def load(name: str, batch: int | None) -> Model:
    """`pipeline:NAME[:SHAPE][:channels-last]`; `batch` replaces the first axis of shapes that have
    several."""
    plain = name.removesuffix(":channels-last")
    pipeline, text = _find(plain)
    shape = _shape(name, text) if text else pipeline.shape
    if pipeline.rank not in (None, len(shape)):
        forms = {4: "[n, c, h, w], such as 16x64x56x56", 3: "[n, c, t]"}
        form = forms.get(pipeline.rank or 0, "[n, c]")
        raise UnknownModel(f"pipeline:{name}: it takes {form}")
    if batch is not None:
        if len(shape) == 1:
            advice = "give its size instead, as pipeline:add-mul:2^20"
            raise UnknownModel(f"pipeline:{name} has no batch axis; {advice}")
        shape = (batch, *shape[1:])
    if plain != name and len(shape) != 4:
        raise UnknownModel(f"pipeline:{name}: only [n, c, h, w] can be channels-last")
    module = pipeline.build(shape).eval()
    inputs = _inputs(pipeline, shape)
    weights.unsettle(module, inputs)
    if plain != name:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = tuple(x.contiguous(memory_format=torch.channels_last) for x in inputs)
    note = "built-in pipeline, random parameters (seed 0) and normal inputs of both signs"
    return Model(f"pipeline:{name}", module, inputs, note, "Apache-2.0")


def _find(name: str) -> tuple[Pipeline, str | None]:
    """The pipeline of NAME[:SHAPE], and the text of the shape."""
    if found := CHAIN.fullmatch(name):
        length = int(found[1])
        if length < 1:
            raise UnknownModel(f"pipeline:{name}: a chain has at least one operator")
        return Pipeline(lambda shape: Chain(length), IMAGES, inputs=2), found[2]
    key, _, text = name.partition(":")
    if key not in PIPELINES:
        raise unknown("pipeline", key, names(), f"choose from {', '.join(names())}")
    return PIPELINES[key], text


def _inputs(pipeline: Pipeline, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    if pipeline.draw is not None:
        return pipeline.draw(shape, generator)
    return tuple(normal(shape, generator) for _ in range(pipeline.inputs))


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
