"""torchvision's and timm's architectures with random weights, on photographs where possible."""

import inspect
import warnings

import torch
from torch import Tensor, nn

from onchip.errors import UnknownModel
from onchip.models import weights
from onchip.models.inputs import IMAGENET_MEAN, IMAGENET_STD, normalise, photographs
from onchip.models.model import Model, need, unknown

# Input of torchvision's video models: frames and size ([n, 3, frames, size, size]).
VIDEO = {"mc3_18": 112, "r2plus1d_18": 112, "r3d_18": 112}
FRAMES = 16


def torchvision_names() -> list[str]:
    """Every architecture that `torchvision:NAME` takes."""
    models = need("torchvision.models", "torchvision")
    left_out = set(models.list_models(module=models.detection))
    left_out |= set(models.list_models(module=models.quantization))
    return [name for name in models.list_models() if name not in left_out]


def timm_names() -> list[str]:
    """Every architecture that `timm:NAME` takes (a pretrained tag, NAME.tag, is allowed)."""
    return need("timm").list_models()


def load_torchvision(name: str, batch: int | None) -> Model:
    """`torchvision:NAME`: its own input size, ImageNet normalisation."""
    models = need("torchvision.models", "torchvision")
    if name in models.list_models(module=models.detection):
        reason = "takes lists of images and has data-dependent shapes"
        raise UnknownModel(f"torchvision:{name} {reason}; wrap its backbone in a file.py:Class")
    known = torchvision_names()
    if name not in known:
        raise unknown("torchvision", name, known, "pip install -U torchvision for newer ones")
    options: dict[str, bool | None] = {"weights": None}
    builder = models.get_model_builder(name)
    if "weights_backbone" in inspect.signature(builder).parameters:
        options["weights_backbone"] = None  # its default would be downloaded
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # the truncated normal takes seconds
    module = builder(**options).eval()
    inputs, origin = _torchvision_inputs(name, module, batch or 1)
    note = f"{weights.unsettle(module, inputs)}; input: {origin}"
    return Model(f"torchvision:{name}", module, inputs, note, "BSD-3-Clause")


def _torchvision_inputs(name: str, module: nn.Module, batch: int) -> tuple[tuple[Tensor, ...], str]:
    models = need("torchvision.models", "torchvision")
    if name in models.list_models(module=models.video):
        size = VIDEO.get(name, 224)
        stills, origin = photographs(batch, size, size + FRAMES)
        shots = [normalise(stills[..., i : i + size]) for i in range(FRAMES)]
        return (torch.stack(shots, dim=2),), f"a pan over {origin}"
    if name in models.list_models(module=models.optical_flow):
        stills, origin = photographs(batch, 128, 168)
        pair = (2 * stills[..., :160] - 1, 2 * stills[..., 8:] - 1)
        return pair, f"a pan over {origin}"
    size = _torchvision_size(name, module)
    images, origin = photographs(batch, size, size)
    return (normalise(images),), origin


def _torchvision_size(name: str, module: nn.Module) -> int:
    """The crop that the architecture's published weights use (read from their description)."""
    models = need("torchvision.models", "torchvision")
    if isinstance(size := getattr(module, "image_size", None), int):  # vision transformers
        return size
    if name in models.list_models(module=models.segmentation):
        return 224
    published = list(models.get_model_weights(name))
    crop = getattr(published[0].transforms(), "crop_size", None) if published else None
    return crop[0] if crop else 224


def load_timm(name: str, batch: int | None) -> Model:
    """`timm:NAME`: input size and normalisation from its default configuration."""
    timm = need("timm")
    if not timm.is_model(name.split(".")[0]):
        raise unknown("timm", name, timm_names(), "pip install -U timm for newer ones")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = timm.create_model(name, pretrained=False).eval()
        except (RuntimeError, ValueError) as error:
            raise UnknownModel(f"timm:{name}: timm could not build it ({error})") from error
    described = module.pretrained_cfg
    channels, height, width = described.get("input_size", (3, 224, 224))
    images, origin = photographs(batch or 1, height, width)
    mean, std = described.get("mean", IMAGENET_MEAN), described.get("std", IMAGENET_STD)
    if channels == 3 == len(mean):
        images = normalise(images, tuple(mean), tuple(std))
    else:
        images = normalise(images).mean(dim=1, keepdim=True).repeat(1, channels, 1, 1)
    note = f"{weights.unsettle(module, (images,))}; input: {origin}"
    return Model(f"timm:{name}", module, (images,), note, "Apache-2.0")
