"""A program whose branches run at once, each on a stream: what is recorded as a CUDA graph.

PyTorch's allocator takes memory for the stream that is current then, in a graph's own pool as
anywhere, and gives what was freed to later calls on the same stream at once, whatever other streams
still do with it. (`record_stream` would keep it until the recording ends.) So a library's result is
dropped when the stream that it was taken on has come to a step behind all of its uses, or else when
all streams have joined; and what a step takes for itself is taken and dropped on its own stream.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from onchip.capture.captured import Captured
from onchip.ir.expr import Tensor
from onchip.planning.plan import KernelStep, Plan
from onchip.runtime.arena import Buffer
from onchip.runtime.branches import START, Branches
from onchip.runtime.executable import Executable, Writer


class _Branched(Writer):
    parameters = f"{Writer.parameters}, streams"

    def __init__(
        self, captured: Captured, plan: Plan, device: torch.device, branches: Branches
    ) -> None:
        super().__init__(captured, plan, device)
        self.branches = branches
        self.makers = {t: k for k, s in enumerate(plan.steps) for t in s.outputs}
        self.stream = 0  # the current one
        self.tails: dict[int, int] = {}  # the last step of each
        self.held: list[Tensor] = []  # nobody reads them any more, but other streams may be at it

    def begin(self, k: int) -> None:
        """Go on with the step's stream, behind the steps of others that it waits for."""
        self.addresses.clear()  # a step's own copies, on its own stream
        if k == 0:
            self.mark(START)
        stream, waits = self.branches.streams[k], self.branches.waits[k]
        if stream is None:
            return
        if stream != self.stream or waits:
            self.lines.append(f"streams.go({', '.join([str(stream), *map(_event, waits)])})")
            self.lines += [self.ask_stream] if self.on_gpu else []
        self.stream, self.tails[stream] = stream, k

    def mark(self, k: int) -> None:
        """Note where the stream is, behind step `k`, if another one waits for that."""
        if k in self.branches.awaited:
            self.lines.append(f"{_event(k)} = streams.mark()")

    def end(self, k: int) -> None:
        self.mark(k)
        unread = [*self.held, *self.unread_after(k)]
        self.held = [t for t in unread if not self.is_over(t)]
        self.drop([t for t in unread if t not in self.held])

    def is_over(self, t: Tensor) -> bool:
        """Whether all uses of a value lie before what comes next on the streams that its memory may
        have been taken on: its own step's, or that of what it may be a view of."""
        owners = {t, *self.memory.roots.get(t, ())}
        homes = {self.branches.streams[self.makers[x]] for x in owners if x in self.makers}
        tails = [self.tails[s] for s in homes if s is not None]
        return all(self.branches.over(self.uses[t], k) for k in tails)

    def meet(self, a: Buffer, b: Buffer) -> bool:
        return self.branches.together(a, b)

    def lay_out(self, step: KernelStep) -> dict[Tensor, str]:
        """A copy in place of the result would be another stream's memory, and too early for its
        other readers."""
        own: dict[Tensor, str] = {}
        for t in step.inputs:
            if t not in own and self.is_librarys(t):
                own[t] = self.fresh()
                self.lines.append(f"{own[t]} = restride({self.names[t]}, {self.strides(t)!r})")
        return own

    def finish(self) -> None:
        self.begin(len(self.plan.steps))
        super().finish()


def _event(k: int) -> str:
    return "start" if k == START else f"e{k}"


def write(captured: Captured, plan: Plan, device: torch.device, branches: Branches) -> Executable:
    """The plan as a function, on the streams of `branches_of(plan)`."""
    written = _Branched(captured, plan, device, branches).write()
    return replace(written, streams=branches.count)
