"""What a report is built from: plain facts with the names of the JSON contract.

They stand here because planning and runtime fill them and report shows them. None means unknown:
no value is ever invented.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Totals:
    """A program's, or one kernel's, cost. Bytes and FLOPs are a call's; latency in microseconds.

    launches    kernels started (views start none)
    accesses    reads and writes of whole activation tensors in global memory (no parameters)
    dram_bytes  bytes of each kernel's inputs, outputs and parameters, each once
    flops       None if an operator without expression takes part
    """

    launches: int | None = None
    accesses: int | None = None
    dram_bytes: int | None = None
    flops: int | None = None
    latency_us: float | None = None

    @property
    def intensity(self) -> float | None:
        """FLOP per byte of global memory traffic."""
        return None if self.flops is None or not self.dram_bytes else self.flops / self.dram_bytes

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            _plus(self.launches, other.launches),
            _plus(self.accesses, other.accesses),
            _plus(self.dram_bytes, other.dram_bytes),
            _plus(self.flops, other.flops),
            _plus(self.latency_us, other.latency_us),
        )


ZERO = Totals(0, 0, 0, 0, 0.0)


def total(parts: Iterable[Totals]) -> Totals:
    """The sum; a figure that one part does not know is unknown in the sum. Latency: unknown unless
    every part has one."""
    out = ZERO
    for p in parts:
        out = out + p
    return out


def _plus(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a + b


@dataclass(frozen=True, slots=True)
class Interval:
    """How many times as long one form took as another, in rounds in which they took turns: the
    median of the rounds' ratios, and the ends of its 95 % confidence interval."""

    median: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Contest:
    """A more fused form of some operators, measured against a less fused one.

    ops         names of the operators; first: those of the first of two kernels, else ()
    against     "operators" (each its library call), "two kernels" or "eager" (of a whole program)
    fused_us, unfused_us   what each takes in microseconds
    ratio       fused over unfused; None: too few rounds for an interval
    won         the more fused form ships
    """

    ops: tuple[str, ...]
    against: str
    fused_us: float
    unfused_us: float
    ratio: Interval | None
    won: bool
    first: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel of the fused program.

    ops      names of the operators that it computes, in execution order
    backend  "cpp", "triton", "cuda", "cudnn", "library"; choice: the variant chosen, readable
    occupancy  resident share of the multiprocessor's warps, 0..1
    unfused_us  its operators as library calls; ratio: its time over that
    """

    name: str
    ops: tuple[str, ...]
    backend: str
    choice: str = ""
    dram_bytes: int | None = None
    flops: int | None = None
    predicted_us: float | None = None
    measured_us: float | None = None
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    occupancy: float | None = None
    code_bytes: int | None = None
    compile_s: float | None = None
    unfused_us: float | None = None
    ratio: Interval | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Why a producer and a consumer are, or are not, in one kernel.

    edge    (producer's name, consumer's name)
    rule    name of the rule that decided ("" for a fused edge that needs no reason)
    family  illegal | unsupported | unprofitable | over-budget | failed | fused
    text    the sentence shown to people; costs: figures by name, units in the names
    """

    edge: tuple[str, str]
    fused: bool
    rule: str = ""
    family: str = ""
    text: str = ""
    costs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One deliberate difference from eager's arithmetic: a rounding removed, a fold, a trick.

    kind   "rounding_removed", "winograd", "tf32x3", ..., or the name of an algebra rule
    where  operator or edge; error: largest error against float64 that it causes, if known
    """

    kind: str
    where: str
    text: str
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Blocker:
    """What keeps a program from being one CUDA graph: the operator (or input), where it stands in
    the user's code, and why."""

    operator: str
    origin: str
    reason: str


@dataclass(frozen=True, slots=True)
class GraphCoverage:
    """Whether a program on a GPU runs as one CUDA graph.

    graphed      it does, where its inputs allow it; None: it does not run on a GPU
    text         one sentence: how, or why not
    blockers     operators that can't be part of a graph
    launched_us  a call that launches each kernel by itself, with its wait for the GPU
    replayed_us  the same as a graph; copied_us: with inputs copied in and results copied out
    branches     branches of the graph that run at once; 1: all operators run in a row
    row_us       a replay of the graph in a row, of several that follow each other; branched_us:
                 with its branches at once, and early_us: with kernels that start while the one
                 before ends, where a program has any
    """

    graphed: bool | None = None
    text: str = ""
    blockers: tuple[Blocker, ...] = ()
    launched_us: float | None = None
    replayed_us: float | None = None
    copied_us: float | None = None
    branches: int | None = None
    row_us: float | None = None
    branched_us: float | None = None
    early_us: float | None = None
