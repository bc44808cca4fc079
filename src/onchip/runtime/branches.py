"""Branches of a plan: which steps may run at once, and on which streams of a GPU.

Steps keep the plan's order. A step goes on with the stream of one that it needs, if nobody has gone
on with it before; else it takes a stream whose work it needs anyway, or a new one. So a chain stays
on one stream, and streams wait for each other only where a branch leaves or joins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onchip.capture import schema
from onchip.ir.expr import Tensor
from onchip.planning.plan import KernelStep, LibraryStep, Plan, Step
from onchip.runtime.arena import Buffer

STREAMS = 4  # at most: each has memory of its own in the graph, its library's workspace included
START = -1  # in place of a step: the beginning of the call

Needs = Sequence[frozenset[int] | None]


@dataclass(frozen=True, slots=True)
class Branches:
    """The steps of a plan on streams; behind the steps' entries stands one for the end of the call,
    when everything is done. Stream 0 is the call's own.

    streams  of each step; None: it launches nothing
    waits    ... the steps on other streams (or START) that it must be told to wait for, without
             what follows from these and from its own stream's order
    before   ... all steps that are done when it starts, as bits
    """

    streams: tuple[int | None, ...]
    waits: tuple[tuple[int, ...], ...]
    before: tuple[int, ...]

    @property
    def count(self) -> int:
        return 1 + max(s for s in self.streams if s is not None)

    @property
    def awaited(self) -> frozenset[int]:
        return frozenset(d for waits in self.waits for d in waits)

    def over(self, steps: Iterable[int], k: int) -> bool:
        """Whether what comes behind step `k` on its stream comes after all of `steps`."""
        done = self.before[k] | 1 << k
        return all(done >> j & 1 for j in steps if self.streams[j] is not None)

    def together(self, a: Buffer, b: Buffer) -> bool:
        """Whether two buffers may be in use at once."""
        return not (self._precedes(a, b) or self._precedes(b, a))

    def _precedes(self, a: Buffer, b: Buffer) -> bool:
        done = self.before[b.steps[0]]
        return all(done >> j & 1 for j in a.steps if self.streams[j] is not None)


def branches_of(plan: Plan) -> Branches:
    return assign(dependencies(plan))


def assign(needs: Needs, most: int = STREAMS) -> Branches:
    """`needs`: for each step the earlier ones that it must follow; None: it launches nothing."""
    readers = Counter(d for need in needs for d in need or ())
    tails: list[int] = []  # the last step of each stream
    streams: list[int | None] = []
    waits: list[tuple[int, ...]] = []
    before: list[int] = []
    for k, need in enumerate(needs):
        if need is None:
            streams.append(None)
            waits.append(())
            before.append(0)
            continue
        s = _stream(need, tails, before, readers, most)
        readers.subtract(need)
        own = tails[s : s + 1]
        found, done = _reduced(need, own, before)
        streams.append(s)
        waits.append(found or (() if own or s == 0 else (START,)))
        before.append(done)
        tails[s : s + 1] = [k]
    launched = [k for k, need in enumerate(needs) if need is not None]
    found, done = _reduced(launched, tails[:1], before)
    return Branches((*streams, 0), (*waits, found), (*before, done))


def _stream(
    need: frozenset[int], tails: list[int], before: list[int], readers: Counter[int], most: int
) -> int:
    """The stream of a step; len(tails): a new one."""
    # the step that fewest others may want to go on with
    going_on = [(readers[d], s) for s, d in enumerate(tails) if d in need]
    if going_on:
        return min(going_on)[1]
    _, done = _reduced(need, [], before)
    free = [s for s, d in enumerate(tails) if done >> d & 1]
    if free:
        return free[0]
    if len(tails) < most:
        return len(tails)
    return tails.index(min(tails))  # waits for what it does not need, most likely done by then


def _reduced(
    need: Iterable[int], own: Sequence[int], before: list[int]
) -> tuple[tuple[int, ...], int]:
    """Those of `need` that follow neither from the step before on the stream (`own`) nor from the
    others, and all that is done then."""
    done = 0
    for d in own:
        done |= before[d] | 1 << d
    found = []
    for d in sorted(need, reverse=True):  # a later step may follow an earlier one, never precede it
        if not done >> d & 1:
            found.append(d)
            done |= before[d] | 1 << d
    return tuple(reversed(found)), done


# ---- what a plan's steps need --------------------------------------------------------------------


def dependencies(plan: Plan) -> list[frozenset[int] | None]:
    """What `assign` takes. Memory that steps share is no matter here: what kernels write is placed
    by this order (executable.py), and what the model writes is written at the end of a call."""
    makers: dict[Tensor, frozenset[int]] = {}
    needs: list[frozenset[int] | None] = []
    launched: set[int] = set()
    alone: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()
    for k, step in enumerate(plan.steps):
        need = alone.union(*(makers.get(t, frozenset()) for t in step.inputs))
        if not _launches(step):
            makers.update((t, need) for t in step.outputs)
            needs.append(None)
            continue
        if _alone(step):
            need, alone = frozenset(launched), frozenset([k])
        if _programs_wait(step):
            need |= waiting
            waiting = frozenset([k])
        needs.append(need)
        launched.add(k)
        makers.update((t, frozenset([k])) for t in step.outputs)
    return needs


def _launches(step: Step) -> bool:
    return not (isinstance(step, LibraryStep) and schema.never_copies(step.node.call.target))


def _alone(step: Step) -> bool:
    """Whether nobody says what else a call reads or writes than its arguments and results."""
    if not isinstance(step, LibraryStep):
        return False
    target = step.node.call.target
    known = target.startswith("aten.")
    return not known or schema.has_effect(target) or schema.draws(step.node.call)


def _programs_wait(step: Step) -> bool:
    """Two kernels whose programs wait for others of their own could keep those from starting."""
    return isinstance(step, KernelStep) and any(w.barrier for w in step.workspace)
