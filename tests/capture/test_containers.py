"""Containers come back as what they were: type, order, keys, constants."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch

from onchip.capture.containers import flatten, is_constant, rebuild

Pair = namedtuple("Pair", "a b")


@dataclass
class Output:
    logits: torch.Tensor
    aux: object = None
    built: list = field(default_factory=list)

    def __post_init__(self):
        if isinstance(self.aux, str):  # a rebuilt object must not be processed again
            raise AssertionError("__post_init__ ran twice")


class ModelOutput(OrderedDict):
    """As Hugging Face's: a dictionary with attributes."""


T = torch.arange(3)

CASES = [
    T,
    None,
    3,
    (),
    [],
    {},
    (T,),
    [T, (T, {"b": T, "a": None}), 2.5, "text"],
    Pair(T, 3),
    OrderedDict(z=T, a=(1, T)),
    {"nested": Pair([T], {"k": OrderedDict(x=None)})},
]


@pytest.mark.parametrize("obj", CASES, ids=repr)
def test_round_trip(obj):
    leaves, spec = flatten(obj)
    again = rebuild(spec, leaves)
    assert type(again) is type(obj)
    assert repr(again) == repr(obj)
    assert flatten(again)[1] == spec
    assert hash(flatten(again)[1]) == hash(spec)


def test_leaves_are_the_same_objects_in_reading_order():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    leaves, _ = flatten({"z": a, "a": [b, (c, 7)]})
    assert leaves[0] is a
    assert leaves[1] is b
    assert leaves[2] is c
    assert leaves[3] == 7


def test_dataclass_is_rebuilt_without_post_init():
    out = Output(T)
    out.aux = "set later"
    leaves, spec = flatten(out)
    again = rebuild(spec, leaves)
    assert type(again) is Output
    assert again.logits is T
    assert again.aux == "set later"


def test_defaultdict_keeps_its_factory():
    d = defaultdict(list, a=T)
    again = rebuild(*reversed(flatten(d)))
    assert type(again) is defaultdict
    assert again["new"] == []
    assert again["a"] is T


def test_dict_order_is_part_of_the_structure():
    assert flatten({"a": 1, "b": 2})[1] != flatten({"b": 2, "a": 1})[1]


def test_objects_are_no_constants():
    assert is_constant(None)
    assert is_constant(torch.float16)
    assert not is_constant(object())
    assert not is_constant(T)
