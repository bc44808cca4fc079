"""transformers' architectures from a configuration: random weights, plain tensors in and out."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from onchip.errors import UnknownModel
from onchip.models import weights
from onchip.models.inputs import normalise, photographs
from onchip.models.model import Model, need, unknown

# Each of these resolves and runs (tests/models) and goes through torch.export (tried by hand with
# transformers 5.24). Any other model_type is tried all the same.
# fmt: off
CHECKED = (
    "bert", "distilbert", "roberta", "electra", "albert", "modernbert", "gpt2", "gpt_neox", "opt",
    "phi", "llama", "qwen2", "qwen3", "mistral", "gemma", "t5", "bart", "whisper", "wav2vec2",
    "vit", "deit", "dinov2", "clip_vision_model", "siglip_vision_model", "convnext", "swin",
    "segformer", "resnet",
)
# fmt: on
# Models of two towers, by the tower that stands for them here.
TOWERS = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
# Small sizes, applied where a configuration has the field. Hierarchical vision models (convnext,
# swin, segformer, resnet) keep their default widths and get at most two blocks a stage.
SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "embedding_size": 128,
    "word_embed_proj_dim": 256,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 1024,
    "decoder_ffn_dim": 1024,
    "d_model": 256,
    "d_ff": 1024,
    "vocab_size": 1024,
    "max_source_positions": 256,
}
TOKENS = 64
LARGEST = 2_000_000_000  # parameters: 8 GB in float32


class Text(nn.Module):
    """Token ids and mask [n, t] → last hidden state [n, t, hidden] (a tuple if there is more)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The model's tensor outputs, without caches and containers."""
        return _tensors(self.model(input_ids=input_ids, attention_mask=attention_mask))


class Image(nn.Module):
    """Pixels [n, 3, h, w] → last hidden state, and the pooled one where there is one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The model's tensor outputs, without containers."""
        return _tensors(self.model(pixel_values=pixel_values))


class Sound(nn.Module):
    """Mel spectrogram [n, mels, t] or waveform [n, samples] → last hidden state [n, t', hidden]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sound: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The model's tensor outputs, without containers."""
        return _tensors(self.model(sound))


def _tensors(output: dict) -> Tensor | tuple[Tensor, ...]:
    found = tuple(value for value in output.values() if isinstance(value, Tensor))
    return found[0] if len(found) == 1 else found


def names() -> list[str]:
    """Every model_type that has a base model; CHECKED lists those that are tested."""
    need("transformers")
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def load(name: str, batch: int | None) -> Model:
    """`transformers:NAME` in small sizes, `transformers:NAME:default` in the library's own.

    NAME is a model_type (bert, gpt2, llama, vit…). Of an encoder-decoder (t5, bart, whisper) it is
    the encoder, of clip and siglip the vision tower.
    """
    kind, _, size = name.partition(":")
    kind = kind.replace("-", "_")
    kind = TOWERS.get(kind, kind)
    if size not in ("", "default"):
        raise UnknownModel(f"transformers:{name}: after the name only :default may stand")
    known = names()
    if kind not in known and kind.replace("_", "-") in known:
        kind = kind.replace("_", "-")
    if kind not in known:
        raise unknown("transformers", kind, known, "pip install -U transformers for newer ones")
    try:
        core, config = _build(kind, small=not size)
    except UnknownModel:
        raise
    except Exception as error:  # configurations fail in many ways; one line says which
        reason = str(error).partition("\n")[0]
        raise UnknownModel(
            f"transformers:{name} can't be built from its config: {reason}"
        ) from error
    module, inputs, origin = _with_inputs(name, core, config, batch or 1)
    origin = f"{weights.unsettle(module, inputs)}; input: {origin}"
    note = f"{size or 'small'} configuration, {origin}"
    return Model(f"transformers:{name}", module.eval(), inputs, note, "Apache-2.0")


def _build(kind: str, *, small: bool) -> tuple[nn.Module, object]:
    transformers = need("transformers")
    with _quiet():
        config = transformers.AutoConfig.for_model(kind)
        if small:
            config = transformers.AutoConfig.for_model(kind, **_small(config))
    config.use_cache = False
    config.return_dict = True
    with torch.device("meta"), _quiet():
        meta = transformers.AutoModel.from_config(config)
    count = sum(each.numel() for each in meta.parameters())
    if count > LARGEST:
        text = f"transformers:{kind} has {count / 1e9:.1f} billion parameters in its default sizes"
        raise UnknownModel(f"{text}; write transformers:{kind} for a small one")
    with _quiet():
        model = transformers.AutoModel.from_config(config).eval()
    return (model.get_encoder() if config.is_encoder_decoder else model), config


def _small(config: Any) -> dict[str, Any]:
    """Small values for those fields that the configuration has, as scalars."""
    chosen: dict[str, Any] = {
        key: value
        for key, value in SMALL.items()
        if isinstance(getattr(config, key, None), int) and not _hierarchical(config)
    }
    if isinstance(depths := getattr(config, "depths", None), list | tuple):
        chosen["depths"] = type(depths)(min(depth, 2) for depth in depths)
    vocabulary = chosen.get("vocab_size", 0)
    if vocabulary and config.vocab_size < vocabulary:
        chosen["vocab_size"] = vocabulary = config.vocab_size
    for key, value in vars(config).items():  # pad_token_id and its like must lie in the vocabulary
        if vocabulary and key.endswith("token_id") and isinstance(value, int):
            chosen[key] = value % vocabulary
    return chosen


def _hierarchical(config: object) -> bool:
    return hasattr(config, "hidden_sizes") or hasattr(config, "embed_dim")


@contextlib.contextmanager
def _quiet():
    """transformers logs advice about configurations; it is not the user's concern here."""
    logging = need("transformers").logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _with_inputs(
    name: str, core: nn.Module, config: object, batch: int
) -> tuple[nn.Module, tuple[Tensor, ...], str]:
    generator = torch.Generator().manual_seed(0)
    match core.main_input_name:
        case "input_ids":
            ids = torch.randint(3, config.vocab_size, (batch, TOKENS), generator=generator)
            mask = torch.ones_like(ids)
            mask[-1, -TOKENS // 8 :] = 0  # the last row is padded
            return Text(core), (ids, mask), "random tokens, the last row padded"
        case "pixel_values":
            size = getattr(config, "image_size", None) or 224
            height, width = (size, size) if isinstance(size, int) else size
            images, origin = photographs(batch, height, width)
            return Image(core), (normalise(images, (0.5,) * 3, (0.5,) * 3),), origin
        case "input_features" if hasattr(config, "max_source_positions"):
            shape = (batch, config.num_mel_bins, 2 * config.max_source_positions)
            return Sound(core), (torch.randn(shape, generator=generator),), "random mel spectrogram"
        case "input_values":
            from onchip.models import audio

            clip = torch.from_numpy(audio.sung_tone(1.0)[0])
            clip = ((clip - clip.mean()) / clip.std()).repeat(batch, 1)
            return Sound(core), (clip,), "one second of a synthetic sung tone"
        case other:
            text = f"transformers:{name} takes {other}, for which there is no example input here"
            raise UnknownModel(f"{text}; write a file.py:Class with example_inputs()")
