"""One product and what follows it, from a short description: the layers of networks.

`layer:3x3/2+bn+relu:32x128x56x56-256:channels-last` is a convolution of [32, 128, 56, 56] to 256
features, stride 2, with batch norm and ReLU. A description is a PRODUCT and STEPS, joined by "+":

PRODUCT  1x1, 3x3, 9, 3x3x3: a convolution of so many axes with padding that keeps the size; then
         /2: stride, d2: dilation, g32: groups, in this order. linear. bmm: [b, n, k] times
         [b, k, features]
STEP     bn, relu, gelu, residual (plus an input of the same shape), pool (2), pool3 (3, stride 2,
         padding 1)
"""

import copy
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onchip.errors import UnknownModel
from onchip.models import weights
from onchip.models.draw import normal
from onchip.models.model import Model

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
POOLS = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
STEPS = ("bn", "relu", "gelu", "residual", "pool", "pool3")
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
FORM = "write PRODUCT[+STEP...]:SHAPE-FEATURES, such as 3x3/2+bn+relu:32x128x56x56-256"
EXAMPLES = ("3x3+bn+relu:32x64x56x56-64:channels-last", "linear+gelu:4096x4096-4096")

_SPEC = re.compile(r"([^:]+):(\d+(?:x\d+)+)-(\d+)(:channels-last)?")
_CONVOLUTION = re.compile(r"(\d+(?:x\d+)*)(?:/(\d+))?(?:d(\d+))?(?:g(\d+))?")


class Plus(nn.Module):
    """x + y of one shape."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The shortcut of a residual block."""
        return x + y


class Bmm(nn.Module):
    """[b, n, k] times [b, k, m]."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """A batch of matrix products of two inputs."""
        return torch.bmm(x, y)


class Layer(nn.Sequential):
    """Stages one after the other; those of two operands take the next of the further inputs."""

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """What the last stage gives."""
        rest = iter(others)
        for stage in self:
            x = stage(x, next(rest)) if isinstance(stage, (Plus, Bmm)) else stage(x)
        return x


@dataclass(frozen=True)
class _Spec:
    text: str
    product: str
    steps: tuple[str, ...]
    shape: tuple[int, ...]
    features: int
    channels_last: bool

    def wrong(self, why: str) -> UnknownModel:
        return UnknownModel(f"layer:{self.text}: {why}; {FORM}")


def load(name: str, batch: int | None) -> Model:
    """`layer:PRODUCT[+STEP...]:SHAPE-FEATURES[:channels-last]`; `batch` replaces the first axis."""
    found = _SPEC.fullmatch(name)
    if not found:
        raise UnknownModel(f"layer:{name} is no layer; {FORM}")
    product, *steps = found[1].split("+")
    shape = tuple(int(size) for size in found[2].split("x"))
    if batch is not None:
        shape = (batch, *shape[1:])
    spec = _Spec(name, product, tuple(steps), shape, int(found[3]), bool(found[4]))
    if spec.channels_last and len(shape) not in FORMATS:
        raise spec.wrong("only images and volumes can be channels-last")
    module = _module(spec).eval()
    inputs = _inputs(spec, module)
    weights.unsettle(module, inputs)
    if spec.channels_last:
        form = FORMATS[len(shape)]
        module.to(memory_format=form)  # type: ignore[call-overload]
        inputs = tuple(x.contiguous(memory_format=form) for x in inputs)
    note = "one layer, random parameters (seed 0) and normal inputs of both signs"
    return Model(f"layer:{name}", module, inputs, note, "Apache-2.0")


def _module(spec: _Spec) -> Layer:
    product = _product(spec)
    stages = {"product": product}
    axes = len(spec.shape) - 2 if isinstance(product, tuple(CONVOLUTIONS.values())) else 0
    for n, step in enumerate(spec.steps):
        stages[f"{step}{n}" if step in stages else step] = _step(spec, step, axes)
    layer = Layer()
    for key, stage in stages.items():
        layer.add_module(key, stage)
    return layer


def _product(spec: _Spec) -> nn.Module:
    inside = spec.shape[-1]
    match spec.product:
        case "linear":
            return nn.Linear(inside, spec.features)
        case "bmm":
            if len(spec.shape) != 3:
                raise spec.wrong("bmm takes [b, n, k]")
            return Bmm()
    found = _CONVOLUTION.fullmatch(spec.product)
    if not found:
        raise spec.wrong(f"{spec.product!r} is no product")
    kernel = tuple(int(size) for size in found[1].split("x"))
    stride, dilation, groups = (int(text or 1) for text in found.groups()[1:])
    if len(kernel) != len(spec.shape) - 2 or len(kernel) not in CONVOLUTIONS:
        raise spec.wrong(f"a {found[1]} filter takes [n, c] and {len(kernel)} more axes")
    if 0 in (*kernel, stride, dilation, groups) or spec.shape[1] % groups or spec.features % groups:
        raise spec.wrong(f"{spec.shape[1]} channels, {spec.features} features do not fit it")
    padding = tuple(dilation * (size - 1) // 2 for size in kernel)
    bias = spec.steps[:1] != ("bn",)  # which has a bias of its own
    build = CONVOLUTIONS[len(kernel)]
    return build(spec.shape[1], spec.features, kernel, stride, padding, dilation, groups, bias)


def _step(spec: _Spec, step: str, axes: int) -> nn.Module:
    if step not in STEPS:
        raise spec.wrong(f"{step!r} is no step: there are {', '.join(STEPS)}")
    if step in ("bn", "pool", "pool3") and not axes:
        raise spec.wrong(f"{step} follows convolutions only")
    match step:
        case "bn":
            return NORMS[axes](spec.features)
        case "relu":
            return nn.ReLU()
        case "gelu":
            return nn.GELU()
        case "residual":
            return Plus()
        case "pool":
            return POOLS[axes](2)
    return POOLS[axes](3, 2, 1)


def _inputs(spec: _Spec, module: Layer) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    given = [normal(spec.shape, generator)]
    x = torch.empty(spec.shape, device="meta")  # sizes without data, from stage to stage
    for stage in copy.deepcopy(module).to("meta"):
        if isinstance(stage, Bmm):
            given.append(normal((spec.shape[0], spec.shape[2], spec.features), generator))
            x = torch.empty((*spec.shape[:2], spec.features), device="meta")
        elif isinstance(stage, Plus):
            given.append(normal(tuple(x.shape), generator))
        else:
            x = stage(x)
    return tuple(given)
