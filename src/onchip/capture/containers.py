"""Containers in and out of a model: flattened to leaves, and rebuilt exactly as they were.

Known: tuple, list, dict and its subclasses, named tuples, dataclasses (Hugging Face's
ModelOutput among them), and whatever torch.utils._pytree knows. Everything else is a leaf.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

TENSOR_TYPES = (torch.Tensor,)
CONSTANTS = (
    int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
    torch.memory_format, enum.Enum, type, slice, type(Ellipsis), range,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape of a nest of containers. Equal specs rebuild equal containers.

    kind      the container's type, or None for a leaf
    how       "leaf" | "sequence" | "mapping" | "named" | "fields" | "pytree"
    context   keys, field names, or pytree's context
    children  specs of the parts
    """

    kind: Any
    how: str
    context: Any = None
    children: tuple[Spec, ...] = ()


LEAF = Spec(None, "leaf")


def flatten(obj: Any) -> tuple[list[Any], Spec]:
    """The leaves of `obj`, left to right, and how to put them together again."""
    leaves: list[Any] = []
    return leaves, _flatten(obj, leaves)


def _flatten(obj: Any, leaves: list[Any]) -> Spec:
    parts = _parts(obj)
    if parts is None:
        leaves.append(obj)
        return LEAF
    how, context, values = parts
    return Spec(type(obj), how, context, tuple(_flatten(v, leaves) for v in values))


def _parts(obj: Any) -> tuple[str, Any, Sequence[Any]] | None:
    kind = type(obj)
    if isinstance(obj, torch.Tensor) or kind in (int, float, bool, str, type(None)):
        return None
    if kind in (tuple, list):
        return "sequence", None, obj
    if isinstance(obj, tuple) and hasattr(kind, "_fields"):
        return "named", None, obj
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        names = tuple(f.name for f in dataclasses.fields(obj))
        return "fields", names, [getattr(obj, n) for n in names]
    if isinstance(obj, dict) and kind in (dict, OrderedDict):
        return "mapping", tuple(obj), list(obj.values())
    if isinstance(obj, defaultdict) and kind is defaultdict:
        return "mapping", (obj.default_factory, *obj), list(obj.values())
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        values, context = node.flatten_fn(obj)
        return "pytree", _Context(context), values
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Context:
    """pytree's context: compared with ==, hashed by nothing (contexts may be lists)."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and self.value == other.value

    def __hash__(self) -> int:
        return 0


def rebuild(spec: Spec, leaves: Sequence[Any]) -> Any:
    """The container that `flatten` took apart, with these leaves."""
    return _rebuild(spec, iter(leaves))


def _rebuild(spec: Spec, leaves: Any) -> Any:
    if spec.how == "leaf":
        return next(leaves)
    values = [_rebuild(c, leaves) for c in spec.children]
    match spec.how:
        case "sequence":
            return spec.kind(values)
        case "named":
            return spec.kind(*values)
        case "mapping" if spec.kind is defaultdict:
            return defaultdict(spec.context[0], zip(spec.context[1:], values, strict=True))
        case "mapping":
            return spec.kind(zip(spec.context, values, strict=True))
        case "fields":
            return _dataclass(spec.kind, dict(zip(spec.context, values, strict=True)))
    return pytree.SUPPORTED_NODES[spec.kind].unflatten_fn(values, spec.context.value)


def _dataclass(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass with these field values. A mapping (ModelOutput) fills itself in __init__;
    others are filled directly, since __post_init__ already ran in the model."""
    if issubclass(kind, dict):
        return kind(**values)
    obj = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(obj, name, value)
    return obj


def is_constant(leaf: Any) -> bool:
    """Whether a leaf can stand for itself (a number, a string, a dtype...)."""
    return isinstance(leaf, CONSTANTS) and not isinstance(leaf, torch.SymInt)
