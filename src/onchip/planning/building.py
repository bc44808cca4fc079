"""Compiling candidates as far as the budget goes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from onchip.planning.candidates import Candidate
from onchip.planning.generators import Built, Failure, Generator

K = TypeVar("K")
Wanted = Sequence[tuple[K, Candidate]]

# The part of the budget after which no further candidate is compiled.
BUILD_SHARE = 0.6
# Candidates for each core that are handed to the compiler at once: enough to keep the cores busy,
# few enough to stop in time.
AT_ONCE = 4


def build_within(
    generator: Generator,
    must: Wanted[K],
    may: Wanted[K],
    end: float,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> dict[K, Built | Failure]:
    """Compile candidates, by what they are called: all of `must`, and of `may`, in this order, as
    many as can be begun before `end` (by time.perf_counter), one slice at least. What is missing
    in the result was left out."""
    wanted, out = [*must, *may], {}
    step = AT_ONCE * (os.cpu_count() or 1)
    for n in range(0, len(wanted), step):
        if n and n >= len(must) and time.perf_counter() > end:
            break
        progress(n, len(wanted))
        some = wanted[n : n + step]
        built = generator.build_all([c for _, c in some])
        out |= zip([k for k, _ in some], built, strict=True)
    return out
