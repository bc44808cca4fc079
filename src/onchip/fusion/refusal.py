"""Why something is not done: the verdict and its reason are the same object."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Family(Enum):
    ILLEGAL = "illegal"
    UNSUPPORTED = "unsupported"
    UNPROFITABLE = "unprofitable"
    OVER_BUDGET = "over-budget"
    FAILED = "failed"


class Rule(Enum):
    """Every reason there is; the value is (family, the sentence shown to people)."""

    OPAQUE = (Family.UNSUPPORTED, "the operator has no expression, so only the library can run it")
    ADDRESSED = (
        Family.ILLEGAL,
        "as_strided reads memory by address, so what it reads must lie exactly as in PyTorch",
    )
    CYCLE = (
        Family.ILLEGAL,
        "another kernel would have to run between the two: fusing makes a cycle",
    )
    NOT_CONNECTED = (Family.UNPROFITABLE, "they share no tensor, so fusing saves no memory traffic")
    SECOND_OUTPUT = (
        Family.UNSUPPORTED,
        "an intermediate that others need would be computed by several tiles",
    )
    RECOMPUTE = (Family.UNPROFITABLE, "the intermediate would be computed again for every tile")
    SCRATCH = (Family.OVER_BUDGET, "one tile's intermediates do not fit the on-chip memory budget")
    SPLIT_PRODUCT = (
        Family.UNSUPPORTED,
        "a fold of many elements behind a matrix product is not handed out in chunks",
    )
    WORKSPACE = (Family.OVER_BUDGET, "the partial results of a fold take too much memory")
    MUTATED = (Family.ILLEGAL, "the tensor is overwritten in place between the two")
    NOT_VECTORISABLE = (Family.UNSUPPORTED, "no loop order gives contiguous accesses")
    UNSUPPORTED_DTYPE = (Family.UNSUPPORTED, "the element type has no generated code")
    UNSUPPORTED_EXPRESSION = (Family.UNSUPPORTED, "its expression has no generated code")
    CONTRACTION_FORM = (Family.UNSUPPORTED, "the product's operands have no matrix form")
    CUDNN_FORM = (Family.UNSUPPORTED, "cuDNN's graphs don't have its form")
    NOT_WHOLE = (Family.UNSUPPORTED, "no kernel runs the group as a whole, so it is cut")
    SLOWER = (Family.UNPROFITABLE, "measured: the separate kernels are faster")
    LIBRARY_BETTER = (Family.UNPROFITABLE, "measured: a library call takes less time")
    NO_GAIN = (
        Family.UNPROFITABLE,
        "measured: fused it takes no less time than the library's calls",
    )
    NOT_CHOSEN = (
        Family.UNPROFITABLE,
        "the search kept them apart: as one kernel they are not predicted to save noticeably",
    )
    FUEL = (Family.UNPROFITABLE, "the fuel setting stopped fusion before this one")
    SWITCHED_OFF = (Family.UNPROFITABLE, "fusion is switched off here by the settings")
    WRONG = (Family.FAILED, "the candidate's result differs from the reference")
    CRASHES = (
        Family.FAILED,
        "the candidate broke the process that ran it for the first time",
    )
    COMPILER = (Family.FAILED, "the compiler refused the generated source")
    SPILLS = (Family.OVER_BUDGET, "the kernel needs more registers than a program can have")
    SHARED_MEMORY = (Family.OVER_BUDGET, "the kernel needs more shared memory than there is")
    SERIALISED = (
        Family.OVER_BUDGET,
        "the compiler makes the kernel's matrix products wait for each other",
    )
    NO_TIME = (Family.OVER_BUDGET, "Settings.budget_s left no time to measure a kernel")
    TOO_LARGE = (Family.OVER_BUDGET, "the kernel would be too long to compile and to cache")

    @property
    def family(self) -> Family:
        return self.value[0]

    @property
    def sentence(self) -> str:
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Refusal:
    """rule: which; subject: what it is about (tensor or operator names); text: this case's facts;
    costs: figures (bytes, microseconds) by name."""

    rule: Rule
    subject: str = ""
    text: str = ""
    costs: dict[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> Family:
        return self.rule.family

    def __str__(self) -> str:
        about = f"{self.subject}: " if self.subject else ""
        return f"{about}{self.rule.sentence}" + (f" ({self.text})" if self.text else "")
