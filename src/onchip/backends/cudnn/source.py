"""A graph of cuDNN's as text: a JSON object a line, comments between them.

    {"tensor": 1, "dim": [...], "stride": [...], "type": "bfloat16"}    what it reads
    {"value": 0, "op": "conv_fprop", "of": ["t1", "t2"], "padding": [1, 1], ...}
    {"value": 1, "op": "add", "of": ["v0", "t3"]}
    {"result": 4, "of": "v1", "dim": [...], "stride": [...], "type": "bfloat16"}
    {"plan": 0}                                                          place among its heuristics'

Tensors are numbered as a kernel's pointers are, from 1. Values are float32 until they are stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onchip.ir.expr import Tensor

Strides = tuple[int, ...]
COMMENT = "//"


@dataclass(frozen=True, eq=False, slots=True)
class GraphSource:
    """The text, and what its plan is run with (candidates.Source): pointers of `inputs`, then of
    memory that holds one float32 for each of `scalars`, then of `outputs`, then a workspace."""

    text: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    scalars: tuple[float, ...] = ()
    laid_out: dict[Tensor, Strides] = field(default_factory=dict)


def text_of(lines: Sequence[Mapping[str, Any]], comment: str = "") -> str:
    """One object a line, below the comment."""
    above = [f"{COMMENT} {c}" for c in comment.splitlines()]
    return "\n".join([*above, *(json.dumps(line) for line in lines)]) + "\n"


def lines_of(text: str) -> list[dict[str, Any]]:
    """The objects of a text."""
    return [json.loads(x) for x in text.splitlines() if x and not x.startswith(COMMENT)]
