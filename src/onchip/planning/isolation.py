"""Generated GPU kernels run for the first time in a process of their own.

An address outside of all memory, or a barrier that nobody reaches, ends all work of a process on
a GPU. So a kernel is launched once by a child process (backends/nvidia/first_run.py), on memory of
the right size with values of its own, before it is checked and timed here. A child that dies, hangs
or reports an error costs the candidate; the next one gets a new child.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from onchip.backends.cudnn.build import Plan
from onchip.backends.nvidia import pool
from onchip.backends.nvidia.build import Built
from onchip.errors import CompilerError
from onchip.fusion.refusal import Refusal, Rule

CHILD = pool.Compiler("the process that tries kernels", "onchip.backends.nvidia.first_run")
LIMIT_S = 6.0  # of processor time (waiting for a GPU spins); pool.WAITS times as long by the clock
# A child needs as much memory again as the kernel's tensors; above this share of what is free, the
# kernel is tried where it is.
SHARE_OF_FREE = 0.5

Spec = tuple[str, int, str]  # element type, bytes, filling ("values", "zeros" or "poison")


@dataclass(eq=False, slots=True)
class Isolation:
    """First runs for one GPU. notes: kernels that could not be tried here, and why, each once."""

    device: int
    child: pool.Compiler = CHILD
    free_bytes: Callable[[int], int] = lambda device: torch.cuda.mem_get_info(device)[0]
    notes: list[str] = field(default_factory=list)
    _usable: bool = True

    def prepare(self) -> None:
        """Start the child, which takes seconds, while kernels are being compiled."""
        pool.prepare(self.child)

    def first_run(self, name: str, built: Built | Plan, tensors: Sequence[Spec]) -> Refusal | None:
        """Why the kernel must not run in this process; None if it ran."""
        if not self._usable:
            return None
        if sum(n for _, n, _ in tensors) > SHARE_OF_FREE * self.free_bytes(self.device):
            self._note(f"{name}: too large to be tried in a process of its own")
            return None
        job = {
            "name": name,
            "source": str(built.path),
            "what": f"running {name} ({built.path.name})",
            "built": base64.b64encode(pickle.dumps(built)).decode(),
            "device": self.device,
            "tensors": [list(t) for t in tensors],
        }
        try:
            answer = pool.ask(self.child, job, LIMIT_S)
        except pool.NotStarted as error:
            self._usable = False
            self._note(f"kernels ran in this process the first time, too: {error}")
            return None
        except CompilerError as error:
            return Refusal(Rule.CRASHES, name, str(error))
        problem = answer.get("error") or answer["problem"]
        return Refusal(Rule.CRASHES, name, problem) if problem else None

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
