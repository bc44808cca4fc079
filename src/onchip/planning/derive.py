"""Values computed once from constants: packed weights, folded scales (Derived)."""

from __future__ import annotations

import numpy as np
import torch

from onchip.backends.cpp.roles import Panels
from onchip.backends.interpreter import evaluate
from onchip.ir.dtype import DType
from onchip.ir.expr import Load, Tensor, loads
from onchip.ir.graph import defined_by, reads
from onchip.ir.index import bounds, is_affine, linear
from onchip.planning.gather import gathered, is_gather
from onchip.planning.plan import Derived
from onchip.planning.values import copied, torch_dtype


def to_numpy(t: torch.Tensor) -> np.ndarray:
    """The values, half precision as float32 (what the interpreter takes)."""
    t = t.detach()
    return (t.float() if t.dtype in (torch.bfloat16, torch.float16) else t).cpu().numpy()


def derived_tensor(
    t: Tensor,
    available: frozenset[Tensor],
    strides: tuple[int, ...] | None = None,
    device: torch.device | str = "cpu",
    tf32: bool = False,
) -> Derived:
    """A tensor that depends on constants only, evaluated in float64 on the CPU (what is only moved:
    on `device`) and rounded once (tf32: from float32 to TF32, too); dense, or with the strides that
    a kernel asks for, on `device`."""
    name = f"{t.name} as {strides}{' in TF32' * tf32}"
    last = to_tf32 if tf32 else lambda x: x
    if t in available:
        return Derived(name, (t,), lambda v: last(_restrided(v[0].detach(), strides)))
    sources = _sources(t, available)

    def compute(values: list[torch.Tensor]) -> torch.Tensor:
        given = dict(zip(sources, values, strict=True))
        dense = _exact(t, given, device).to(torch_dtype(t)).contiguous()
        return last(_restrided(dense.to(device), strides))

    return Derived(name, sources, compute)


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32, in place, rounded to the nearest number of 11 bits (PTX ISA, cvt.rna.tf32: halves
    away from zero); infinities and NaN stay."""
    bits = x.view(torch.int32)
    nearest = (bits + (1 << 12)) & ~((1 << 13) - 1)
    bits.copy_(torch.where(x.isfinite(), nearest, bits))
    return x


def _exact(
    t: Tensor, given: dict[Tensor, torch.Tensor], device: torch.device | str
) -> torch.Tensor:
    """The tensor's value, not rounded yet where it is of floating point."""
    if is_gather(t):
        read = {s: given[s] if s in given else _exact(s, given, device) for s in reads(t)}
        return gathered(t, read, device)
    sources = _sources(t, frozenset(given))
    numbers = {s: to_numpy(given[s]) for s in sources}
    (out,) = evaluate([t], numbers, exact=t.dtype.is_float)
    return torch.from_numpy(np.array(out, copy=True))


def _restrided(x: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    return x.contiguous() if strides is None else copied(x, strides)


def _sources(t: Tensor, available: frozenset[Tensor]) -> tuple[Tensor, ...]:
    inside = defined_by([t], available)
    found = dict.fromkeys(s for x in inside for s in reads(x) if s not in set(inside))
    return tuple(found)


def packed(panels: Panels, width: int, available: frozenset[Tensor]) -> Derived:
    """The right operand of a product in the order contract.h reads it:
    [batch][ceil(N / width)][K][width], zeros beyond the last column, float32."""
    matrix = panels.matrix
    direct = _as_view(matrix, available)
    sources = (direct,) if direct is not None else _sources(matrix, available)

    def compute(values: list[torch.Tensor]) -> torch.Tensor:
        if direct is not None:
            dense = _strided_view(matrix, values[0])
        else:
            given = {s: to_numpy(v) for s, v in zip(sources, values, strict=True)}
            (out,) = evaluate([matrix], given, exact=True)
            dense = torch.from_numpy(np.ascontiguousarray(out, dtype=np.float32))
        return _panels(dense, panels, width)

    size = f"{panels.batch}x{panels.k}x{panels.n}"
    return Derived(f"panels {size} of {', '.join(s.name for s in sources)}", sources, compute)


def _panels(dense: torch.Tensor, panels: Panels, width: int) -> torch.Tensor:
    """[batch axes..., K axes..., N] as [batch][ceil(N / width)][K][width]. One matrix is copied
    along its own axes: merging (taps, channels) first would be a slow copy of its own."""
    apart = panels.batch == 1
    lead = tuple(dense.shape[:-1]) if apart else (panels.batch, panels.k)
    dense = dense.reshape(*lead, panels.n)
    count, whole = -(-panels.n // width), panels.n // width
    out = torch.empty(panels.batch, count, panels.k, width)
    rest = panels.n - whole * width
    if rest:
        out[:, whole] = 0
    target = out.movedim(1, 2)  # batch, K, panel, column
    target = target[0].unflatten(0, lead) if apart else target
    target[..., :whole, :] = dense[..., : whole * width].unflatten(-1, (whole, width))
    if rest:
        target[..., whole, :rest] = dense[..., whole * width :]
    return out


def _as_view(matrix: Tensor, available: frozenset[Tensor]) -> Tensor | None:
    """The weight that the matrix is a strided view of, if it is one."""
    body = matrix.body
    if not isinstance(body, Load) or body.src not in available or body.src.dtype is not DType.F32:
        return None
    for i, n in zip(body.index, body.src.shape, strict=True):
        lo, hi = bounds(i)
        if lo < 0 or hi >= n or not is_affine(i):
            return None
    return body.src


def _strided_view(matrix: Tensor, weight: torch.Tensor) -> torch.Tensor:
    body = matrix.body
    assert isinstance(body, Load)
    strides, offset = [], weight.storage_offset()
    forms = [linear(i) for i in body.index]
    for a in matrix.axes:
        steps = zip(forms, weight.stride(), strict=True)
        strides.append(sum(f.coefficient(a) * s for f, s in steps))
    offset += sum(f.constant * s for f, s in zip(forms, weight.stride(), strict=True))
    return weight.detach().as_strided(matrix.shape, strides, offset)


__all__ = ["derived_tensor", "loads", "packed", "to_numpy"]
