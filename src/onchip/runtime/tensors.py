"""Copies and views of tensors that keep what they must: strides, storage, what they share."""

from __future__ import annotations

import torch

from onchip.planning.values import copied, same_strides


def restride(t: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same elements with these strides (a copy, unless only axes of size 1 differ)."""
    return t.as_strided(t.shape, strides) if same_strides(t, strides) else copied(t, strides)


def view_of(
    base: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...],
    shift: int,
) -> torch.Tensor:  # fmt: skip
    """A view of `base`'s storage that starts `shift` bytes after `base` does."""
    if base.dtype is dtype:
        return base.as_strided(shape, strides, base.storage_offset() + shift // base.itemsize)
    start = (base.storage_offset() * base.itemsize + shift) // dtype.itemsize
    out = torch.empty(0, dtype=dtype, device=base.device)
    return out.set_(base.untyped_storage(), start, shape, strides)


def again(t: torch.Tensor, copies: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """A copy of a tensor, on the copy of its storage that `copies` holds already, if any."""
    if t.is_conj() or t.is_neg():
        return t.clone()
    storage = t.untyped_storage()
    if storage._cdata not in copies:
        whole = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
        copies[storage._cdata] = whole.clone().untyped_storage()
    out = torch.empty(0, dtype=t.dtype, device=t.device)
    return out.set_(copies[storage._cdata], t.storage_offset(), t.shape, t.stride())


def copy_of(x: torch.Tensor) -> torch.Tensor:
    """The same elements with the same strides; an expanded tensor stays expanded."""
    with torch.inference_mode(False), torch.no_grad():  # calls in any mode write it later
        out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        distinct(out).copy_(distinct(x.detach()))
    return out


def distinct(x: torch.Tensor) -> torch.Tensor:
    """Each element of an expanded tensor once: a copy may not write one twice."""
    if 0 not in x.stride():
        return x
    shape = [min(n, 1) if s == 0 else n for n, s in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(shape, x.stride())
