"""Random inputs, quickly where they are large."""

import math
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

# PyTorch draws on one thread (some 100 million numbers a second): more than this is drawn in
# pieces, each from a generator of its own, so that the numbers don't depend on the threads.
PIECE = 1 << 24


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """float32 normal numbers on the CPU, the same for the same state of the generator."""
    size = math.prod(shape)
    if size <= PIECE:
        return torch.randn(shape, generator=generator)
    out = torch.empty(size)
    seed = int(torch.randint(0, 1 << 62, (), generator=generator))

    def fill(n: int) -> None:
        own = torch.Generator().manual_seed(seed + n)
        out[n * PIECE : (n + 1) * PIECE].normal_(generator=own)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, range(-(-size // PIECE))))
    return out.view(shape)
