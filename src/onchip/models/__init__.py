"""Models by name: what MODEL on the command line may be.

`resolve("torchvision:resnet50")` gives a module in eval mode with inputs to run it on. Nothing is
downloaded: weights are random (and say so in `note`), or lie inside an installed package.
"""

from onchip.models.model import Model
from onchip.models.resolve import available, resolve

__all__ = ["Model", "available", "resolve"]
