"""Example inputs: photographs that installed packages ship, and batches of any size from them."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from onchip.errors import UnknownModel
from onchip.models.model import installed_file

# scikit-image's are public domain or CC0 (skimage/data/_fetchers.py), scikit-learn's
# CC BY 2.0 (sklearn/datasets/images/README.txt).
PHOTOGRAPHS = (
    ("scikit-image", "skimage/data/astronaut.png"),
    ("scikit-learn", "sklearn/datasets/images/china.jpg"),
    ("scikit-image", "skimage/data/chelsea.png"),
    ("scikit-image", "skimage/data/coffee.png"),
    ("scikit-learn", "sklearn/datasets/images/flower.jpg"),
)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def photograph(index: int) -> Tensor | None:
    """One of PHOTOGRAPHS as [3, height, width] in 0..1, or None where its package is absent."""
    try:
        from PIL import Image

        path = installed_file(*PHOTOGRAPHS[index])
    except (ImportError, UnknownModel):
        return None
    with Image.open(path) as image:
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def photographs(count: int, height: int, width: int) -> tuple[Tensor, str]:
    """[count, 3, height, width] in 0..1 and a note saying what they are.

    Each is scaled to cover the size and cropped at its centre; a second round is mirrored.
    """
    found = [photo for i in range(len(PHOTOGRAPHS)) if (photo := photograph(i)) is not None]
    if not found:
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(count, 3, height, width, generator=generator)
        return noise, "random pixels (install scikit-image for photographs)"
    images = []
    for i in range(count):
        photo = cover(found[i % len(found)], height, width)
        images.append(photo.flip(-1) if (i // len(found)) % 2 else photo)
    return torch.stack(
        images
    ), f"{'a photograph' if count == 1 else 'photographs'} of scikit-image or -learn"


def cover(photo: Tensor, height: int, width: int) -> Tensor:
    """Scale so that the size is covered, then crop the centre."""
    scale = max(height / photo.shape[1], width / photo.shape[2])
    size = [max(height, round(photo.shape[1] * scale)), max(width, round(photo.shape[2] * scale))]
    photo = resize(photo, size)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return photo[:, top : top + height, left : left + width]


def resize(photo: Tensor, size: list[int]) -> Tensor:
    """Bilinear with antialiasing, as torchvision's Resize."""
    scaled = F.interpolate(photo[None], size=size, mode="bilinear", antialias=True)
    return scaled[0].clamp(0, 1)


def normalise(images: Tensor, mean: tuple = IMAGENET_MEAN, std: tuple = IMAGENET_STD) -> Tensor:
    """Subtract the mean and divide by the standard deviation of each colour channel."""
    shape = (1, len(mean), 1, 1)
    return (images - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)


def with_batch(inputs: tuple[Tensor, ...], batch: int | None) -> tuple[Tensor, ...]:
    """Repeat or crop the leading axis to `batch`, in every input that shares the first one's."""
    if batch is None or not inputs or inputs[0].dim() == 0:
        return inputs
    size = inputs[0].shape[0]
    rows = torch.arange(batch) % size
    return tuple(x[rows] if x.dim() and x.shape[0] == size else x for x in inputs)
