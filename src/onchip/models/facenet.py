"""MTCNN's three face networks (Zhang, Zhang, Li and Qiao, 2016).

Weights: the facenet-pytorch distribution (MIT), `data/{pnet,rnet,onet}.pt`; the package is not
imported (it pins torch < 2.3). Images are RGB, (pixel - 127.5) / 128.
"""

import torch
from torch import Tensor, nn

from onchip.models.inputs import cover, photograph, photographs, resize
from onchip.models.model import Model, installed_file, unknown

FACE = (176, 72, 96, 128)  # left, top, width, height of the astronaut's face in her photograph


class Stem(nn.Sequential):
    """Convolution → PReLU, and a max-pool in ceil mode where `pool` names its window."""

    def __init__(self, inside: int, outside: int, kernel: int, pool: int | None = None) -> None:
        layers: list[nn.Module] = [nn.Conv2d(inside, outside, kernel), nn.PReLU(outside)]
        if pool:
            layers.append(nn.MaxPool2d(pool, 2, ceil_mode=True))
        super().__init__(*layers)


class PNet(nn.Module):
    """Proposals: [n, 3, h, w] → boxes [n, 4, h', w'] and face probability [n, 2, h', w']."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = Stem(3, 10, 3, pool=2)
        self.layer2 = Stem(10, 16, 3)
        self.layer3 = Stem(16, 32, 3)
        self.score = nn.Conv2d(32, 2, 1)
        self.box = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Box offsets and softmax over (no face, face)."""
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.box(x), self.score(x).softmax(dim=1)


class RNet(nn.Module):
    """Refinement: candidates [n, 3, 24, 24] → boxes [n, 4] and face probability [n, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = Stem(3, 28, 3, pool=3)
        self.layer2 = Stem(28, 48, 3, pool=3)
        self.layer3 = Stem(48, 64, 2)
        self.dense = nn.Linear(576, 128)
        self.prelu = nn.PReLU(128)
        self.score = nn.Linear(128, 2)
        self.box = nn.Linear(128, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Box offsets and softmax over (no face, face)."""
        x = self.layer3(self.layer2(self.layer1(x)))
        x = self.prelu(self.dense(x.permute(0, 3, 2, 1).flatten(1)))
        return self.box(x), self.score(x).softmax(dim=1)


class ONet(nn.Module):
    """Output: candidates [n, 3, 48, 48] → boxes [n, 4], landmarks [n, 10], probability [n, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = Stem(3, 32, 3, pool=3)
        self.layer2 = Stem(32, 64, 3, pool=3)
        self.layer3 = Stem(64, 64, 3, pool=2)
        self.layer4 = Stem(64, 128, 2)
        self.dense = nn.Linear(1152, 256)
        self.prelu = nn.PReLU(256)
        self.score = nn.Linear(256, 2)
        self.box = nn.Linear(256, 4)
        self.landmarks = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Box offsets, five landmarks and softmax over (no face, face)."""
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = self.prelu(self.dense(x.permute(0, 3, 2, 1).flatten(1)))
        return self.box(x), self.landmarks(x), self.score(x).softmax(dim=1)


NETS = {"pnet": PNet, "rnet": RNet, "onet": ONet}

# The names of the parameters in the files, by network: what differs from ours beside the layers.
_HEADS = {
    "pnet": {"conv4_1": "score", "conv4_2": "box"},
    "rnet": {"dense4": "dense", "prelu4": "prelu", "dense5_1": "score", "dense5_2": "box"},
    "onet": {
        "dense5": "dense",
        "prelu5": "prelu",
        "dense6_1": "score",
        "dense6_2": "box",
        "dense6_3": "landmarks",
    },
}


def pretrained(name: str) -> nn.Module:
    """One of NETS with the weights that facenet-pytorch ships."""
    path = installed_file("facenet-pytorch", f"data/{name}.pt")
    state = torch.load(path, weights_only=True, map_location="cpu")
    module = NETS[name]()
    module.load_state_dict({_renamed(key, _HEADS[name]): value for key, value in state.items()})
    return module.eval()


def _renamed(key: str, heads: dict[str, str]) -> str:
    """conv2.weight → layer2.0.weight, prelu2.weight → layer2.1.weight, dense4 → dense."""
    owner, leaf = key.split(".")
    if owner in heads:
        return f"{heads[owner]}.{leaf}"
    return f"layer{owner[-1]}.{0 if owner.startswith('conv') else 1}.{leaf}"


def candidates(count: int, size: int) -> Tensor:
    """[count, 3, size, size] in 0..1: jittered boxes around a face, every third one anywhere."""
    photo = photograph(0)
    if photo is None:
        return photographs(count, size, size)[0]
    generator = torch.Generator().manual_seed(0)
    left, top, width, height = FACE
    crops = []
    for i in range(count):
        draw = torch.rand(3, generator=generator).tolist()
        side = round(max(width, height) * (0.9 + 0.4 * draw[0]))
        if i % 3 == 2:
            x, y = (round(draw[1] * (512 - side)), round(draw[2] * (512 - side)))
        else:
            x = round(left + width / 2 - side / 2 + (draw[1] - 0.5) * 16)
            y = round(top + height / 2 - side / 2 + (draw[2] - 0.5) * 16)
        crops.append(resize(photo[:, max(y, 0) : y + side, max(x, 0) : x + side], [size, size]))
    return torch.stack(crops)


def load(name: str, batch: int | None) -> Model:
    """`facenet:pnet`, `facenet:rnet` or `facenet:onet` at the sizes that MTCNN runs them at."""
    if name not in NETS:
        raise unknown("facenet", name, NETS, "write facenet:pnet, facenet:rnet or facenet:onet")
    if name == "pnet":
        images = _pyramid(batch or 1)
    else:
        images = candidates(batch or {"rnet": 64, "onet": 32}[name], 24 if name == "rnet" else 48)
    note = "MTCNN with facenet-pytorch's weights; input: a photograph with a face (scikit-image)"
    inputs = ((images * 255 - 127.5) / 128,)
    return Model(f"facenet:{name}", pretrained(name), inputs, note, "MIT")


def _pyramid(count: int) -> Tensor:
    """[count, 3, 120, 160]: photographs, the first tiled so small that a face fits."""
    images = photographs(count, 120, 160)[0]
    photo = photograph(0)
    if photo is not None:
        small = resize(photo, [64, 64])
        images[0] = cover(small.repeat(1, 2, 3)[:, :120, :160], 120, 160)
    return images
