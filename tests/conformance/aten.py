"""The harness as these tests call it: `check("aten.mm.default", a, b)`, and their test data."""

from __future__ import annotations

from typing import Any

import torch
from tests.conformance import harness
from tests.conformance.harness import dtype_of, express

__all__ = ["check", "dtype_of", "express", "randn"]


def check(target: str, *args: Any, tol: tuple[float, float] | None = None, **kwargs: Any) -> None:
    """The operator's results are ATen's: shapes, types, values rounded and unrounded."""
    harness.check(target, args, kwargs, tol=tol)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Signed values, mostly below zero: a pad of zero shows in a maximum, a pad of minus infinity
    in a mean."""
    generator = torch.Generator().manual_seed(seed + sum(shape) + len(shape))
    return (torch.randn(shape, generator=generator) * 2 - 1.5).to(dtype)
