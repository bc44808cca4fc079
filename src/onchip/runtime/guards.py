"""What a specialised program relies on, checked on every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from onchip.planning.precision import TF32_DEFAULT, tf32_allowed

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_SIMPLE = (int, float, bool, str, type(None), torch.dtype)


def input_key(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """A hashable key of flat inputs: layouts of tensors, types and values of constants, and
    which tensors are the same object."""
    key: list[Any] = []
    ids: list[int] = []
    for x in leaves:
        if isinstance(x, torch.Tensor):
            key.append((x.shape, x.stride(), x.dtype, x.device))
            ids.append(id(x))
        else:
            key.append((type(x), x if _hashable(x) else repr(x)))
    if len(ids) > 1 and len(set(ids)) != len(ids):
        key.append(tuple(ids.index(i) for i in ids))
    return tuple(key)


def _hashable(x: Any) -> bool:
    return not isinstance(x, slice) and (not isinstance(x, float) or x == x)


def ambient_key() -> tuple[Any, ...]:
    """State outside the model that changes what operators compute."""
    key: tuple[Any, ...] = ()
    if torch._C._is_any_autocast_enabled():
        key = tuple(
            (d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in ("cpu", "cuda")
        )
    # float32 products on a GPU; the default adds nothing, so that a program on the CPU is the same
    # before and after another one has initialised CUDA
    if torch.cuda.is_initialized() and (allowed := tf32_allowed()) != TF32_DEFAULT:
        key = (*key, ("tf32", *allowed))
    return key


class StateGuard:
    """The model's Python state: training flags, simple attributes, submodules, hooks."""

    def __init__(self, module: torch.nn.Module) -> None:
        modules = list(module.modules())
        self.attributes = [(m.__dict__, *_simple(m)) for m in modules]
        self.children = [(m._modules, tuple(m._modules.values())) for m in modules if m._modules]
        hooks = [getattr(m, h) for m in modules for h in _HOOKS]
        hooks += [nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks]
        self.no_hooks = [h for h in hooks if not h]
        self.hooks = [(h, tuple(h.items())) for h in hooks if h]

    def holds(self) -> bool:
        try:
            for state, get, expected in self.attributes:
                if get(state) != expected:
                    return False
        except KeyError:
            return False
        for children, expected in self.children:
            if tuple(children.values()) != expected:
                return False
        for h in self.no_hooks:
            if h:
                return False
        return all(tuple(h.items()) == expected for h, expected in self.hooks)


def _simple(m: torch.nn.Module) -> tuple[Any, Any]:
    names = [k for k, v in m.__dict__.items() if isinstance(v, _SIMPLE) or _numbers(v)]
    get = itemgetter(*names)
    return get, get(m.__dict__)


def _numbers(v: Any) -> bool:
    return isinstance(v, tuple) and all(isinstance(x, _SIMPLE) for x in v)


def overlaps(
    inputs: Sequence[torch.Tensor],
    mutated: Sequence[int],
    constants: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
) -> bool:
    """Whether a tensor that is written (inputs at positions `mutated`, constants `written`)
    shares storage with another input or constant."""
    storages = Counter(t.untyped_storage().data_ptr() for t in (*inputs, *constants))
    targets = [*(inputs[i] for i in mutated), *written]
    pointers = (t.untyped_storage().data_ptr() for t in targets)
    return any(p and storages[p] > 1 for p in pointers)
