"""Shared by the operators that read windows: per-dimension arguments, sizes, guarded loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onchip.errors import OpaqueOperator
from onchip.ir.dtype import DType
from onchip.ir.expr import Call, Const, Expr, Load, Number, Operand, Tensor, lift
from onchip.ir.index import bounds
from onchip.ops.registry import op

NEGATIVE_INFINITY = float("-inf")


def per_dimension(value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """An ATen int[rank] argument: one number stands for every dimension."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * rank if len(values) == 1 else values


def require_float(x: Tensor, what: str) -> None:
    """Integer windows and products are device-dependent in ATen (some raise): the library's."""
    if not x.dtype.is_float:
        raise OpaqueOperator(f"{what} of {x.dtype.label} is left to the library")


def require_same_type(what: str, *tensors: Tensor | None) -> None:
    found = {t.dtype for t in tensors if t is not None}
    if len(found) > 1:
        labels = ", ".join(sorted(d.label for d in found))
        raise OpaqueOperator(f"{what} of mixed types ({labels}) is left to the library")


def guarded(x: Tensor, index: Sequence[Operand], pad: Number) -> Load:
    """x[index], with `pad` outside its bounds; unpadded where no index can leave them."""
    parts = tuple(lift(i, DType.I64) for i in index)
    inside = all(
        lo >= 0 and hi < n for (lo, hi), n in zip((bounds(i) for i in parts), x.shape, strict=True)
    )
    return x[parts] if inside else x.padded(pad)[parts]


def broadcast(x: Tensor, index: Sequence[Expr]) -> Load:
    """x read at the element that broadcasts to `index` (sizes 1 stay at 0)."""
    own = index[len(index) - x.rank :]
    at = [Const(0, DType.I64) if n == 1 else i for i, n in zip(own, x.shape, strict=True)]
    return x[tuple(at)]


def all_of(conditions: Sequence[Expr]) -> Expr | None:
    """The conjunction of boolean expressions (None for none)."""
    out: Expr | None = None
    for c in conditions:
        out = c if out is None else both(out, c)
    return out


def both(a: Expr, b: Expr) -> Expr:
    """a and b, of boolean expressions."""
    return Call("logical_and", (a, b), DType.BOOL)


def declare_opaque(reason: str, *targets: str) -> None:
    """These overloads have no expression, for a reason that `why` will show."""

    def refuse(*_args: object, **_kwargs: object) -> Callable[..., Tensor]:
        raise OpaqueOperator(reason)

    op(*targets)(refuse)
