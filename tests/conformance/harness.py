"""Conformance: an operator's expressions, evaluated by a backend, against ATen.

    check("aten.add.Tensor", [a, b], {"alpha": 2})

compares the number of results, their shapes and element types with ATen's; the values in the
element types themselves with ATen in float64 (integers and bools exactly); and, for floating-point
arguments, the values without any rounding with ATen in float64 to eleven digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tests.conformance import compiled, generated_triton

from onchip.backends.interpreter import evaluate
from onchip.ir.dtype import BY_LABEL, DType
from onchip.ir.expr import Tensor, given
from onchip.ops import OPERATORS

Evaluate = Callable[[Sequence[Tensor], dict[Tensor, np.ndarray]], list[np.ndarray]]

# name -> how it evaluates outputs, given the values of the given tensors (bfloat16 as float32)
BACKENDS: dict[str, Evaluate] = {"interpreter": evaluate}

# relative, and absolute for values near zero
TOLERANCES = {
    torch.float64: (1e-11, 1e-11),
    torch.float32: (2e-5, 1e-5),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 8e-3),
}
EXACT = (1e-11, 1e-11)


def aten(target: str) -> Any:
    """The ATen overload that a target names."""
    space, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload)


def dtype_of(dtype: torch.dtype) -> DType | None:
    return BY_LABEL.get(str(dtype).removeprefix("torch."))


def mapped(x: Any, fn: Callable[[Any], Any]) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(mapped(y, fn) for y in x)
    return {k: mapped(v, fn) for k, v in x.items()} if isinstance(x, dict) else fn(x)


def results_of(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (tuple, list)) else [x]


def array(x: torch.Tensor) -> np.ndarray:
    wide = x.detach().float() if x.dtype is torch.bfloat16 else x.detach()
    return wide.contiguous().numpy()


def express(
    target: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> tuple[list[Tensor | None], dict[Tensor, np.ndarray]]:
    """The operator's results for ATen arguments, and the values of the tensors it reads."""
    known: dict[int, Tensor] = {}
    values: dict[Tensor, np.ndarray] = {}

    def lower(x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return dtype_of(x) or x
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in known:
            dtype = dtype_of(x.dtype)
            assert dtype is not None
            known[id(x)] = given(tuple(x.shape), dtype)
            values[known[id(x)]] = array(x)
        return known[id(x)]

    out = OPERATORS[target](*mapped(list(args), lower), **mapped(kwargs or {}, lower))
    return results_of(out), values


def widened(x: Any) -> Any:
    """Floating-point tensors in float64."""
    floating = isinstance(x, torch.Tensor) and x.is_floating_point()
    return x.double() if floating else x


def check(
    target: str,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    tol: tuple[float, float] | None = None,
    backend: str = "interpreter",
    exact: bool = True,
    reference: str = "float64",
) -> None:
    """Assert that `target` on these torch arguments means what ATen does (see the module's head).

    tol        (relative, absolute) tolerance in the element types; default by result type
    exact      also compare unrounded with float64 (the interpreter only; no `dtype` argument)
    reference  "own": compare with ATen in the arguments' own types (functions with jumps, where
               a rounded operand lies on the other side)
    """
    kwargs = kwargs or {}
    like = results_of(_own(target, args, kwargs))
    wide_args, wide_kwargs = (
        (mapped(list(args), widened), mapped(kwargs, widened))
        if reference == "float64"
        else (args, kwargs)
    )
    want = results_of(aten(target)(*wide_args, **wide_kwargs))
    results, values = express(target, args, kwargs)
    assert len(results) == len(like), f"{target} has {len(like)} results"
    compared = [(r, a, w) for r, a, w in zip(results, like, want, strict=True) if r is not None]
    for mine, eager, _ in compared:
        assert mine.shape == tuple(eager.shape), f"{target}: {mine}, ATen {eager.shape}"
        assert mine.dtype is dtype_of(eager.dtype), f"{target}: {mine}, ATen {eager.dtype}"
    outputs = [r for r, _, _ in compared]
    rounded = [w.to(eager.dtype) for _, eager, w in compared]
    tolerances = [tol or TOLERANCES.get(eager.dtype) for _, eager, _ in compared]
    for got, w, t in zip(BACKENDS[backend](outputs, values), rounded, tolerances, strict=True):
        compare(target, got, w, t)
    case = compiled.Case(target, outputs, values, rounded, tolerances, compare)
    compiled.PENDING.append(case)
    generated_triton.OFFERED.append(case)
    floating = any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in _leaves(args))
    if exact and floating and reference == "float64" and kwargs.get("dtype") is None:
        for got, (_, _, w) in zip(evaluate(outputs, values, exact=True), compared, strict=True):
            if w.dtype is torch.float64:
                compare(f"{target} (exact)", got, w, EXACT)


def compare(
    what: str, got: np.ndarray, want: torch.Tensor, tol: tuple[float, float] | None
) -> None:
    expected = array(want)
    assert got.shape == expected.shape, f"{what}: value of shape {got.shape}"
    if tol is None:
        assert got.dtype == expected.dtype, f"{what}: value of type {got.dtype}"
        np.testing.assert_array_equal(got, expected, err_msg=what)
        return
    np.testing.assert_allclose(
        got.astype(np.float64), expected.astype(np.float64), rtol=tol[0], atol=tol[1],
        equal_nan=True, err_msg=what,
    )  # fmt: skip


def _own(target: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """ATen in the arguments' own types; on the meta device where the CPU has no kernel."""
    try:
        return aten(target)(*args, **kwargs)
    except RuntimeError as error:
        if "not implemented for" not in str(error):
            raise

    def bare(x: Any) -> Any:
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    return aten(target)(*mapped(list(args), bare), **mapped(kwargs, bare))


def _leaves(x: Any) -> list[Any]:
    if isinstance(x, (list, tuple)):
        return [leaf for y in x for leaf in _leaves(y)]
    return [x]


FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def sample(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.5
) -> torch.Tensor:
    """Signed values of any type: normal with deviation `scale`, integers in -6...6 (uint8 0...6),
    bools. Deterministic in shape and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + 31 * len(shape) + sum(shape))
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    if dtype.is_floating_point:
        return (torch.randn(tuple(shape), generator=generator) * scale).to(dtype)
    low = 0 if dtype is torch.uint8 else -6
    return torch.randint(low, 7, tuple(shape), generator=generator).to(dtype)


def specials(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """NaN, infinities, signed zeros, ties and both sides of the activations' corners."""
    inf, nan = float("inf"), float("nan")
    corners = [nan, inf, -inf, 0.0, -0.0, 0.5, -0.5, 1.5, 2.5, 1.0, -1.0, 3.0, -3.0, 6.0, 7.0, 30.0]
    return torch.tensor(corners, dtype=dtype)


def declared_in(*modules: Any) -> set[str]:
    """The targets whose operators these modules declare."""
    names = {m.__name__ for m in modules}
    return {target for target, fn in OPERATORS.items() if fn.__module__ in names}
