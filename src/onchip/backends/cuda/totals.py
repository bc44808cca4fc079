"""Totals over positions: what tiles hand on, and the second launch of a kernel, which folds it: its
text and its size (include/onchip/totals.cuh)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, prod

from onchip.backends.cuda.epilogue import finals_text
from onchip.backends.cuda.geometry import Geometry
from onchip.backends.cuda.problem import Problem, Result
from onchip.backends.cuda.source import Strides
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor

LANES = 32  # features of a program
MOST_WARPS = 16
EACH = 4  # tiles that a warp folds, at least, before there are more warps

FOLDS = {"max": "'M'", "min": "'m'", "sum": "'s'", "": "0"}  # as device code calls them


def kept(g: Geometry) -> int:
    """Positions that have totals of their own."""
    return prod(n for n, line in zip(g.tiles, g.problem.lines, strict=True) if line.apart)


def folded_tiles(g: Geometry) -> int:
    """Tiles of positions that a total is folded from."""
    return g.position_tiles // kept(g)


def workspace_bytes(g: Geometry) -> int:
    """What tiles have of all totals."""
    p = g.problem
    return 4 * len(p.totals) * p.batch * g.position_tiles * p.features


def warps(g: Geometry) -> int:
    """Of a program."""
    return max(min(folded_tiles(g) // EACH, MOST_WARPS), 1)


def programs(g: Geometry) -> int:
    return ceil(g.problem.features / LANES) * kept(g) * g.problem.batch


def sizes(g: Geometry) -> dict[str, int]:
    """Sizes that both launches have."""
    return {
        "TOTALS": len(g.problem.totals), "KEPT": kept(g), "FOLDED_TILES": folded_tiles(g),
        "TOTAL_WARPS": warps(g),
    }  # fmt: skip


def text(
    p: Problem, name: str, pointer: Callable[[Tensor], str], strides: Mapping[Tensor, Strides],
    taken: Sequence[str], fields: Sequence[str],
) -> str:  # fmt: skip
    """What the second launch is compiled from, behind Args and Place. taken: its parameters, which
    are `fields` of Args."""
    stores = [f"    {_stored(n, r, len(p.results), pointer)}" for n, r in enumerate(p.finals)]
    given = f"const Args& a, const float (&total)[{len(p.totals)}], const Place& at"
    return "\n\n".join(
        [
            finals_text(p, pointer, strides),
            f"DEVICE void finish({given}) {{\n" + "\n".join(stores) + "\n}",
            "#include <onchip/totals.cuh>",
            f'extern "C" __global__ void {name}(\n    {", ".join(taken)}) {{\n'
            f"    const Args a = {{{', '.join(fields)}}};\n    totals::run(a);\n}}",
        ]
    )


def _stored(n: int, r: Result, before: int, pointer: Callable[[Tensor], str]) -> str:
    value = f"final{n}(a, total, at)"
    if r.tensor.dtype is not DType.F32:
        half = "bf16" if r.tensor.dtype is DType.BF16 else "fp16"
        value = f"onchip::to_{half}({value})"
    return f"a.{pointer(r.tensor)}[element{before + n}(at)] = {value};"
