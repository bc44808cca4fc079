"""Programs of one launch side by side under Triton's interpreter, which runs one after the other:
programs that wait for each other would wait for ever.

Each program has a thread, of which one runs at a time; at every atomic operation, and while it
waits for its cluster, the turn goes to some program, drawn at random. Programs that wait for ever
fail the launch instead of hanging.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from triton.runtime import interpreter as ti

MOST_TURNS = 200_000  # of all programs of a launch

# What gives a program's values to its cluster and returns all programs', while they run together.
EXCHANGE: list[Callable[[tuple[float, ...]], list[tuple[float, ...]]]] = []


class _Turns:
    def __init__(self, programs: int) -> None:
        self.waiting = list(range(programs))  # the first one's turn it is
        self.draw = random.Random(programs)
        self.changed = threading.Condition()
        self.errors: list[BaseException] = []
        self.count = 0

    def wait(self, program: int) -> None:
        """Until it is this program's turn."""
        with self.changed:
            self.changed.wait_for(lambda: self.errors or self.waiting[0] == program)
            if self.errors:
                raise SystemExit
            ti.interpreter_builder.set_grid_idx(program, 0, 0)

    def give(self, again: bool) -> None:
        """The turn to any program; again: this one has not ended."""
        with self.changed:
            self.count += 1
            if self.count > MOST_TURNS:
                self.errors.append(TimeoutError(f"programs {self.waiting} wait for ever"))
            first = self.waiting.pop(0)
            self.waiting += [first] * again
            if self.waiting:
                chosen = self.draw.randrange(len(self.waiting))
                self.waiting.insert(0, self.waiting.pop(chosen))
            self.changed.notify_all()


def launch_together(function: Any, programs: int, tensors: Sequence[Any], cluster: int = 1) -> None:
    """Run `function[(programs,)](*tensors)` in clusters of so many programs."""
    body = function.rewrite()
    turns = _Turns(programs)
    atomic = ti.InterpreterBuilder.create_atomic_rmw

    def atomic_and_turn(self: Any, *args: Any) -> Any:
        value = atomic(self, *args)
        program = self.grid_idx[0]
        turns.give(again=True)
        turns.wait(program)
        return value

    given: dict[int, list[tuple[float, ...]]] = {n: [] for n in range(programs)}

    def exchange(values: tuple[float, ...]) -> list[tuple[float, ...]]:
        program = ti.interpreter_builder.grid_idx[0]
        first = program // cluster * cluster
        own = given[program]
        own.append(values)
        count = len(own)
        all_of_them = [given[n] for n in range(first, first + cluster)]
        while min(map(len, all_of_them)) < count:
            turns.give(again=True)
            turns.wait(program)
        return [one[count - 1] for one in all_of_them]

    def run(program: int) -> None:
        try:
            turns.wait(program)
            body(*values)
            turns.give(again=False)
        except BaseException as error:
            with turns.changed:
                turns.errors.append(error)
                turns.changed.notify_all()

    scope = ti._patch_lang(body)
    builder: Any = ti.InterpreterBuilder
    builder.create_atomic_rmw = atomic_and_turn
    EXCHANGE.append(exchange)
    try:
        values = [ti._implicit_cvt(t) for t in tensors]
        ti.interpreter_builder.set_grid_dim(programs, 1, 1)
        threads = [threading.Thread(target=run, args=(n,)) for n in range(programs)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        EXCHANGE.clear()
        builder.create_atomic_rmw = atomic
        scope.restore()
    if turns.errors:
        raise turns.errors[0]
