"""A canonical description of a region: equal for isomorphic regions, whatever their names."""

from __future__ import annotations

from typing import Any

from onchip.fusion.region import Region
from onchip.ir.expr import Tensor

Strides = tuple[int, ...]

# A tag of a product's result: PyTorch computes it in float32, so that TF32 would be less exact.
EXACT = "float32 in PyTorch"


def signature(region: Region, strides: dict[Tensor, Strides], constants: frozenset[Tensor]) -> str:
    """Operators with their arguments, shapes, types, strides and connections. Two regions with the
    same signature have the same candidates and the same cost."""
    return numbered(region, strides, constants)[0]


def numbered(
    region: Region, strides: dict[Tensor, Strides], constants: frozenset[Tensor]
) -> tuple[str, tuple[Tensor, ...]]:
    """The signature, and the tensors in the order in which it names them: two regions with the
    same signature do the same with the tensors at the same place."""
    number: dict[Tensor, int] = {}

    def tensor(t: Tensor) -> str:
        if t in number:
            return f"t{number[t]}"
        number[t] = len(number)
        kind = "w" if t in constants else "t"
        return f"{kind}{number[t]}:{t.dtype.label}{list(t.shape)}{list(strides.get(t, ()))}"

    def value(x: Any) -> str:
        if isinstance(x, Tensor):
            return tensor(x)
        if isinstance(x, (tuple, list)):
            return "[" + ",".join(value(y) for y in x) + "]"
        if isinstance(x, dict):
            return "{" + ",".join(f"{k}={value(v)}" for k, v in sorted(x.items())) + "}"
        return repr(x)

    lines = []
    outputs = set(region.outputs)
    for n in region.nodes:
        call = f"{n.call.target}({value(n.call.args)},{value(n.call.kwargs)})"
        results = ",".join(
            ("!" if t in outputs else "") + tensor(t) if t is not None else "-" for t in n.outputs
        )
        exact = "exact " * any(t is not None and EXACT in t.tag for t in n.outputs)
        lines.append(f"{results}={exact}{call}")
    return ";".join(lines), tuple(number)
