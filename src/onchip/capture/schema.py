"""What PyTorch's operator schemas say: aliasing, randomness, effects."""

from __future__ import annotations

import functools
from typing import Any

import torch

from onchip.ir.expr import Tensor
from onchip.ir.graph import LibraryCall

# Functional by schema, but they may hand their argument back.
_MAY_RETURN_ARGUMENT = frozenset(
    [
        "aten.contiguous.default",
        "aten.reshape.default",
        "aten.to.dtype",
        "aten.to.device",
        "aten.to.other",
        "aten.to.dtype_layout",
        "aten.flatten.using_ints",
        "aten._reshape_alias.default",
        "aten.dropout.default",
        "aten.expand_as.default",
        "aten.view_as.default",
        "aten.resolve_conj.default",
        "aten.resolve_neg.default",
        "aten.type_as.default",
        "aten.atleast_1d.default",
        "aten.atleast_2d.default",
        "aten.atleast_3d.default",
        "aten.meshgrid.default",
        "aten.lift_fresh.default",
        "aten.real.default",
        "aten.feature_dropout.default",
        "aten.alpha_dropout.default",
        "aten.rrelu.default",
        "aten.pin_memory.default",
        "aten.reshape_as.default",
        "aten.ravel.default",
        "aten.to_dense.default",
        "aten.conj.default",
        "aten.movedim.int",
        "aten.movedim.intlist",
        "aten.swapaxes.default",
        "aten.narrow.default",
        "aten.tensor_split.sections",
        "aten.chunk.default",
        "aten.pad.default",
        "aten.constant_pad_nd.default",
    ]
)


@functools.cache
def overload(target: str) -> Any:
    """The torch operator of "aten.conv2d.default". Raises AttributeError if there is none."""
    namespace, name, kind = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), kind)


@functools.cache
def aliases(target: str) -> bool:
    """Whether a result may share storage with an argument."""
    if target in _MAY_RETURN_ARGUMENT:
        return True
    return any(r.alias_info is not None for r in overload(target)._schema.returns)


@functools.cache
def is_random(target: str) -> bool:
    """Whether two equal calls may give different values."""
    return torch.Tag.nondeterministic_seeded in overload(target).tags or "empty" in target


def draws(call: LibraryCall) -> bool:
    """Whether a call takes random numbers. Attention does not without dropout, though its operator
    may."""
    if not is_random(call.target) or "empty" in call.target:
        return False
    names = [a.name for a in overload(call.target)._schema.arguments]
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")
    p = call.args[at] if at < len(call.args) else call.kwargs.get("dropout_p", 0.0)
    return p != 0


@functools.cache
def has_effect(target: str) -> bool:
    """Whether a call matters although nobody reads its results (assertions, writes)."""
    op = overload(target)
    return op._schema.is_mutable or not op._schema.returns or "_assert" in target


def fill(call: LibraryCall, values: dict[Tensor, torch.Tensor]) -> tuple[tuple, dict]:
    """The call's arguments with torch tensors in place of ours."""
    return _fill(call.args, values), _fill(call.kwargs, values)


def _fill(x: Any, values: dict[Tensor, torch.Tensor]) -> Any:
    match x:
        case Tensor():
            return values[x]
        case tuple() | list():
            return type(x)(_fill(y, values) for y in x)
        case dict():
            return {k: _fill(v, values) for k, v in x.items()}
    return x


def flat_results(result: Any) -> list[Any]:
    """Results of a call in the order of Node.outputs."""
    if isinstance(result, (tuple, list)):
        return [z for y in result for z in flat_results(y)]
    return [result]


def call(c: LibraryCall, values: dict[Tensor, torch.Tensor]) -> list[Any]:
    """Run the call; its results in the order of Node.outputs."""
    args, kwargs = fill(c, values)
    return flat_results(overload(c.target)(*args, **kwargs))


@functools.cache
def is_view(target: str) -> bool:
    """Whether a call only describes memory that exists already, and launches nothing."""
    returns = overload(target)._schema.returns
    shared = [r.alias_info for r in returns]
    return bool(shared) and all(a is not None and not a.is_write for a in shared)


@functools.cache
def returns_list(target: str) -> bool:
    """Whether a call gives something else than one tensor."""
    returns = overload(target)._schema.returns
    return len(returns) != 1 or "List" in str(returns[0].type)


@functools.cache
def never_copies(target: str) -> bool:
    """Whether a call launches nothing whatever its arguments are: reshape and the like copy what
    can't be viewed."""
    return is_view(target) and target not in _MAY_RETURN_ARGUMENT
