"""Random parameters that show bugs: nothing constant, nothing that a fold could drop unseen.

A freshly built network has BatchNorm mean 0 and variance 1, biases 0, scales 1: folding any of
them wrongly gives right results. `unsettle` replaces them by seeded non-trivial values.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def unsettle(module: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    """Make constant parameters and BatchNorm statistics non-trivial, in place; say what was done.

    BatchNorm statistics are those of the layer's own input (so that activations keep a sane scale
    through any depth), the mean shifted by normal numbers of a tenth of its standard deviation, the
    variance multiplied by uniform numbers from 0.5 to 1.5.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        _vary(parameter, generator)
    note = "random weights (seed 0)"
    norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
    if not norms:
        return note

    def fit(norm: Any, args: tuple[Tensor, ...]) -> None:
        _fit(norm, args[0], generator)

    hooks = [each.register_forward_pre_hook(fit) for each in norms]
    try:
        module(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return f"{note}, BatchNorm statistics fitted to the input, then perturbed"


def _vary(parameter: Tensor, generator: torch.Generator) -> None:
    """Replace a parameter whose elements are all equal (bias 0, scale 1, layer scale 1e-6)."""
    if parameter.numel() < 2 or not parameter.is_floating_point():
        return
    value = parameter.flatten()[0].item()
    if not (parameter == value).all():
        return
    if value == 0:
        parameter.normal_(0, 0.1 if parameter.dim() == 1 else 0.02, generator=generator)
    elif abs(value) < 1e-2:
        parameter.uniform_(0.1, 0.3, generator=generator)
    else:
        parameter.uniform_(0.5, 1.5, generator=generator).mul_(value)


def _fit(norm: _BatchNorm, x: Tensor, generator: torch.Generator) -> None:
    if norm.running_mean is None or norm.running_var is None:
        return
    axes = [axis for axis in range(x.dim()) if axis != 1]
    variance, mean = torch.var_mean(x, dim=axes, correction=0)
    if x.numel() == x.shape[1] or variance.mean() == 0:  # one value a channel: no statistics
        variance, mean = torch.ones_like(variance), torch.zeros_like(mean)
    variance = variance.clamp_min(0.01 * variance.mean())  # a dead channel must not be amplified
    shift = torch.empty_like(mean).normal_(0, 0.1, generator=generator)
    scale = torch.empty_like(mean).uniform_(0.5, 1.5, generator=generator)
    norm.running_mean.copy_(mean + shift * variance.sqrt())
    norm.running_var.copy_(variance * scale)
