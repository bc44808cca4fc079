"""Compares an operator's expressions, evaluated by the interpreter, with ATen in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from onchip.backends.interpreter import evaluate
from onchip.ir.dtype import BY_LABEL, DType
from onchip.ir.expr import Tensor, given
from onchip.ops import OPERATORS


def dtype_of(d: torch.dtype) -> DType:
    return BY_LABEL[str(d).removeprefix("torch.")]


def aten(target: str) -> Any:
    space, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload)


def _map(x: Any, fn: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_map(y, fn) for y in x)
    return {k: _map(v, fn) for k, v in x.items()} if isinstance(x, dict) else fn(x)


def express(target: str, args: Any, kwargs: Any) -> tuple[tuple[Tensor | None, ...], dict]:
    """The operator's results for these ATen arguments, and the values of its inputs."""
    known: dict[int, Tensor] = {}
    values: dict[Tensor, np.ndarray] = {}

    def lower(x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return dtype_of(x)
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in known:
            known[id(x)] = given(x.shape, dtype_of(x.dtype))
            wide = x.double() if x.is_floating_point() else x
            values[known[id(x)]] = wide.detach().numpy()
        return known[id(x)]

    out = OPERATORS[target](*_map(args, lower), **_map(kwargs, lower))
    return (out if isinstance(out, tuple) else (out,)), values


def as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def check(
    target: str, *args: Any, tolerance: float = 1e-11, only: int | None = None, **kwargs: Any
):
    """Shapes and types as ATen's; values as ATen's in float64 on the same input values.

    A result that the operator leaves out (None) is not compared; `only` compares the first few.
    """
    eager = as_tuple(aten(target)(*args, **kwargs))

    def widen(x: Any) -> Any:
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    exact = as_tuple(aten(target)(*_map(args, widen), **_map(kwargs, widen)))
    results, values = express(target, args, kwargs)
    assert len(results) == len(eager)
    compared = 0
    for mine, like, reference in list(zip(results, eager, exact, strict=True))[:only]:
        if mine is None:
            continue
        assert mine.shape == tuple(like.shape), f"{target}: {mine.shape}, ATen {like.shape}"
        assert mine.dtype is dtype_of(like.dtype), f"{target}: {mine.dtype}, ATen {like.dtype}"
        (got,) = evaluate([mine], values, exact=True, block=3)
        torch.testing.assert_close(
            torch.from_numpy(np.array(got)),
            reference.detach(),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
        )
        compared += 1
    assert compared, f"{target} gave nothing to compare"


def check_rounded(target: str, *args: Any, only: int | None = None, **kwargs: Any) -> None:
    """In the arguments' own (low) precision: within two units of ATen's float64 result, rounded."""

    def widen(x: Any) -> Any:
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    exact = as_tuple(aten(target)(*_map(args, widen), **_map(kwargs, widen)))
    results, values = express(target, args, kwargs)
    for mine, reference in list(zip(results, exact, strict=True))[:only]:
        if mine is None or not reference.is_floating_point():
            continue
        (got,) = evaluate([mine], values)
        unit = torch.finfo(getattr(torch, mine.dtype.label)).eps
        torch.testing.assert_close(
            torch.from_numpy(np.array(got)).double(), reference, rtol=2 * unit, atol=4e-6 + unit / 8
        )


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Signed values, far enough from zero that a wrong pad would show."""
    generator = torch.Generator().manual_seed(seed + sum(shape) + len(shape))
    return (torch.randn(shape, generator=generator) * 2 - 1.5).to(dtype)
