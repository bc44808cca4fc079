"""From MODEL on the command line to a module with inputs."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from onchip.errors import OnchipError, UnknownModel
from onchip.models import crepe, facenet, files, language, layers, minilm, pipelines, vision
from onchip.models.model import Model, nearest

FAMILIES: dict[str, Callable[[str, int | None], Model]] = {
    "torchvision": vision.load_torchvision,
    "timm": vision.load_timm,
    "transformers": language.load,
    "torchcrepe": crepe.load,
    "facenet": facenet.load,
    "pipeline": pipelines.load,
    "layer": layers.load,
}
# A few of the large families' names, for help texts (the full lists need their packages).
EXAMPLES = {
    "torchvision": ["resnet18", "resnet50", "mobilenet_v3_small", "efficientnet_b0", "vit_b_16"],
    "timm": ["resnet50", "convnext_tiny", "efficientnet_b0", "vit_tiny_patch16_224"],
    "transformers": list(language.CHECKED),
}
FORMS = (
    "torchvision:, timm:, transformers:, torchcrepe:, facenet:, minilm, pipeline:, layer:, "
    "file.py:, .pt2"
)


def resolve(spec: str, *, batch: int | None = None, dtype: torch.dtype | None = None) -> Model:
    """The model that `spec` names, in eval mode on the CPU, with example inputs.

    `batch` sets the leading axis of the inputs, `dtype` the floating type of parameters and inputs.
    The same spec gives the same numbers every time; the global random state is left as it was.
    Raises UnknownModel, in one line that says what was not found and what to do.
    """
    if batch is not None and batch < 1:
        raise OnchipError(f"batch is {batch}; it must be at least 1")
    with _seeded():
        model = _load(spec.strip(), batch)
    return model if dtype is None else _as(model, dtype)


def moved(model: Model, device: torch.device) -> Model:
    """The model on another device: a copy of module and inputs, or itself if it is there. Raises
    OnchipError for an exported program that has another device written into it."""
    tensors = (*model.module.parameters(), *model.module.buffers(), *model.example_inputs)
    if all(t.device == device for t in tensors):
        return model
    if model.name.endswith(".pt2"):
        place = next(t.device for t in tensors if t.device != device)
        raise OnchipError(f"{model.name} was exported on {place}; export it again on {device}")
    inputs = tuple(x.to(device) for x in model.example_inputs)
    return replace(model, module=copy.deepcopy(model.module).to(device), example_inputs=inputs)


def available(family: str | None = None) -> dict[str, list[str]]:
    """Names by family, for help texts: examples of the large families, everything of the others.

    With a family, all its names (importing torchvision, timm or transformers to ask).
    """
    match family:
        case None:
            own = {
                "torchcrepe": crepe.names(),
                "facenet": list(facenet.NETS),
                "minilm": ["minilm"],
                "pipeline": pipelines.names(),
                "layer": list(layers.EXAMPLES),
            }
            return {**{name: list(some) for name, some in EXAMPLES.items()}, **own}
        case "torchvision":
            return {family: vision.torchvision_names()}
        case "timm":
            return {family: vision.timm_names()}
        case "transformers":
            return {family: language.names()}
        case _ if family in (own := available()):
            return {family: own[family]}
        case _:
            raise UnknownModel(f"no family {family!r}; there are {', '.join(available())}")


def _load(spec: str, batch: int | None) -> Model:
    family, _, name = spec.partition(":")
    if spec == "minilm":
        return minilm.load(batch)
    if family in FAMILIES:
        if not name:
            some = ", ".join(available()[family][:6])
            raise UnknownModel(f"{family}: needs a name after it, such as {some}")
        return FAMILIES[family](name, batch)
    if spec.endswith(".onnx"):
        advice = "export the PyTorch model with torch.export.save and give the .pt2"
        raise UnknownModel(f"{spec}: ONNX import is not built yet; {advice}")
    if spec.endswith(".pt2"):
        return files.load_pt2(spec, batch)
    if spec.endswith(".py") or ".py:" in spec:
        return files.load_python(spec, batch)
    raise _nothing(spec)


def _nothing(spec: str) -> UnknownModel:
    """What could have been meant: a bare name, or a family spelled otherwise."""
    family, _, name = spec.rpartition(":")
    close = [f"{each}:{name}" for each in nearest(family, FAMILIES, 1)] if family else []
    for each, names in _known().items():
        if spec and spec.lower() in each:
            close.append(f"{each}:{names[0]}")
        close += [n if n == each else f"{each}:{n}" for n in nearest(name, names, 1)]
    hint = f"; nearest: {', '.join(dict.fromkeys(close))}" if close else ""
    return UnknownModel(f"no model {spec!r}{hint}; MODEL is one of {FORMS}")


def _known() -> dict[str, list[str]]:
    """Names by family, with torchvision's full list where it is installed."""
    try:
        return {**available(), **available("torchvision")}
    except UnknownModel:
        return available()


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed the CPU generator, on which everything here draws, and put it back afterwards."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _as(model: Model, dtype: torch.dtype) -> Model:
    if not dtype.is_floating_point:
        raise OnchipError(f"dtype is {dtype}; parameters and inputs need a floating type")
    held = {each.dtype for each in (*model.module.parameters(), *model.example_inputs)}
    if model.name.endswith(".pt2"):
        if any(each.is_floating_point and each != dtype for each in held):
            advice = "export it again in that type"
            raise OnchipError(f"{model.name} has its types fixed by its export; {advice}")
        return model
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in model.example_inputs)
    return replace(model, module=model.module.to(dtype), example_inputs=inputs)
