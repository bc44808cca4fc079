"""Operators: one function each, from tensors to the expressions of their results.

    @op("aten.relu.default")
    def relu(x):
        return tensor(x.shape, x.dtype, lambda *i: call("maximum", x[i], 0.0))

The function receives the ATen call's arguments (Tensor for tensors, Python values otherwise,
dtypes as DType) and returns a Tensor, or a tuple of Tensor | None when the call has several
results. Composite operators build intermediate tensors on the way; they are found again from
the results. A use that cannot be an expression raises OpaqueOperator(reason).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OPERATORS: dict[str, Callable[..., Any]] = {}


def op(*targets: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the function as the meaning of these ATen overloads ("aten.add.Tensor")."""

    def declare(fn: Callable[..., Any]) -> Callable[..., Any]:
        for t in targets:
            assert t not in OPERATORS, f"{t} declared twice"
            OPERATORS[t] = fn
        return fn

    return declare
