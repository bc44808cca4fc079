"""A lock file: all that was decided for a program, so that compiling it again decides nothing.

The compilation that finds no file writes it; one that finds it takes every choice from there, the
cache's are not looked at, and raises LockError rather than measure. JSON, to be read, compared and
kept under version control:

    format     of the file
    made_with  what choices depend on: versions, device, settings
    programs   for each specialisation, by the hash of its graph: `inputs`, the `outcome` (which
               form ships), `graph` (what runs as a CUDA graph; null on a CPU), and its `steps`,
               each kernel with its variant and the hash of its source
    choices    the record (records.py) of each kind of region, by its key

Of the same file, the same model, device and versions follow the same sources and the same plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onchip.backends.nvidia.build import code_of
from onchip.capture.captured import Captured
from onchip.errors import LockError
from onchip.planning.plan import KernelStep, LibraryStep
from onchip.planning.planner import Planned
from onchip.planning.records import Record, kept_in
from onchip.settings import Settings

FORMAT = 1
OUTCOME = "program-"  # begins the keys of outcomes (assess.program_key)
ADVICE = "delete the file to decide anew, or pass another one"
# Settings that change no choice, only how long it may take and when it is made.
_INDIFFERENT = (
    "budget_s", "uncapturable", "specialisations", "compiled_at_once", "eager_calls", "lock",
    "start",
)  # fmt: skip


class Lock:
    """One lock file, for one program. `reading`: it was there, and decides.

    A Book (records.py) while a specialisation is decided, in the thread that decides it.
    Raises LockError: from the constructor if the file is no lock file, else where it does not fit.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.reading = self.path.exists()
        self.held = _read(self.path) if self.reading else _empty()
        self._mine = threading.local()  # current: this thread's specialisation in "programs"
        self._mutex = threading.RLock()

    @contextmanager
    def deciding(self, original: Captured, made_with: Mapping[str, Any]) -> Iterator[None]:
        """Inside, the captured program is decided; then the file is written. `made_with`: see
        there."""
        made_with = json.loads(json.dumps(made_with))
        key, inputs = key_of(original), inputs_of(original)
        self._mine.current = key
        if self.reading:
            self._check(made_with, inputs)
            with kept_in(self):
                yield
            return
        self._mine.program = {"inputs": inputs, "outcome": {}, "graph": None, "steps": []}
        with kept_in(self):
            yield
        with self._mutex:
            self.held["made_with"] = made_with
            self.held["programs"][key] = self._mine.program
            self._write()

    def _check(self, made_with: Mapping[str, Any], inputs: str) -> None:
        then, now = _flat(self.held["made_with"]), _flat(made_with)
        other = [k for k in sorted(then.keys() | now.keys()) if then.get(k) != now.get(k)]
        if other:
            texts = [f"{k} {then.get(k, 'unknown')} (here {now.get(k, 'unknown')})" for k in other]
            self._fail(f"was made with {', '.join(texts)}")
        if self._mine.current not in self.held["programs"]:
            known = sorted(p["inputs"] for p in self.held["programs"].values())
            if inputs in known:
                self._fail(f"holds the choices of another model with the inputs {inputs}")
            self._fail(f"has no choices for the inputs {inputs}, only for {'; '.join(known)}")

    def _fail(self, problem: str) -> None:
        raise LockError(f"the lock file {self.path} {problem}: {ADVICE}")

    # -- a Book

    def load(self, key: str, cached: Record | None) -> Record | None:
        if not self.reading:
            return cached
        if key.startswith(OUTCOME):
            outcome = self._program["outcome"]
            return outcome.get("record") if outcome.get("key") == key else None
        return self.held["choices"].get(key, {}).get("record")

    def note(self, key: str, record: Record) -> None:
        if self.reading:
            return
        if key.startswith(OUTCOME):
            self._program["outcome"] = {"key": key, "record": record}
            return
        with self._mutex:
            self.held["choices"].setdefault(key, {"operators": ""})["record"] = record

    def describe(self, key: str, operators: str) -> None:
        if not self.reading:
            with self._mutex:
                self.held["choices"].setdefault(key, {})["operators"] = operators

    def measured(self, what: str) -> None:
        if self.reading:
            self._fail(f"does not decide {what}")

    # -- what came out

    @property
    def _program(self) -> dict[str, Any]:
        return self.held["programs"][self._mine.current] if self.reading else self._mine.program

    def settle(self, planned: Planned) -> None:
        """The specialisation is planned: note that, or compare it with the file."""
        steps = steps_of(planned)
        if not self.reading:
            self._program["steps"] = steps
            return
        then = self._program["steps"]
        for i, (old, new) in enumerate(zip(then, steps, strict=False)):
            if old != new:
                other = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
                texts = [f"{k} {old.get(k)!r} (here {new.get(k)!r})" for k in other]
                self._fail(f"has as step {i} of {self._program['inputs']} {', '.join(texts)}")
        if len(then) != len(steps):
            self._fail(f"has {len(then)} steps, and {len(steps)} were planned")

    @property
    def graph(self) -> dict[str, Any] | None:
        """What was decided about CUDA graphs (runtime/graph_choice.py); None: nothing yet."""
        return self._program["graph"] if self.reading else None

    def settle_graph(self, found: dict[str, Any]) -> None:
        """What was decided about them now, or done by what the file says."""
        if not self.reading:
            self._program["graph"] = found
            with self._mutex:
                self._write()
        elif self._program["graph"] is None:
            self._fail("does not decide what runs as a CUDA graph")
        elif self._program["graph"] != found:
            self._fail(f"decides on CUDA graphs what can't be repeated ({found['text']})")

    def _write(self) -> None:
        """Whole or not at all. Choices that no record was made for are left out."""
        choices = {k: c for k, c in self.held["choices"].items() if "record" in c}
        text = json.dumps({**self.held, "choices": choices}, indent=1, sort_keys=True)
        try:
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=".lock-")
            with os.fdopen(handle, "w") as f:
                f.write(text + "\n")
            os.chmod(temporary, 0o644)  # it is meant for others, too
            os.replace(temporary, self.path)
        except OSError as error:
            raise LockError(
                f"the lock file {self.path} can't be written ({error.strerror}): name one in a "
                "folder that you can write to"
            ) from error


def _empty() -> dict[str, Any]:
    return {"format": FORMAT, "made_with": {}, "programs": {}, "choices": {}}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LockError(f"the lock file {path} can't be read ({error}): {ADVICE}") from error
    sound = isinstance(found, dict) and found.keys() == _empty().keys()
    if not sound or found["format"] != FORMAT:
        raise LockError(f"{path} is not a lock file of this version of onchip: {ADVICE}")
    return found


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for k, v in facts.items():
        out |= {f"{k}.{n}": x for n, x in v.items()} if isinstance(v, dict) else {k: v}
    return out


# ---- what a lock file says of a program --------------------------------------------------------


def relevant(settings: Settings) -> dict[str, Any]:
    """The settings that choices depend on."""
    given = {k: v for k, v in asdict(settings).items() if k not in _INDIFFERENT}
    return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in given.items()}


def key_of(original: Captured) -> str:
    """A hash of the captured program: operators, arguments, shapes, types, strides and names."""
    graph = original.graph
    lines = [f"{t!r} {t.tag.get('strides')}" for t in (*graph.inputs, *graph.constants)]
    lines += [f"{n.name} {n.call!r} {n.results!r}" for n in graph.nodes]
    lines += [repr(graph.outputs), repr(original.output_constants), repr(original.results)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def inputs_of(original: Captured) -> str:
    """ "1x3x224x224 float32, 1x10 int64" """
    texts = [f"{'x'.join(map(str, t.shape))} {t.dtype.label}" for t in original.graph.inputs]
    return ", ".join(texts)


def steps_of(planned: Planned) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for step, unit, verdict, _ in planned.steps_of:
        mine: dict[str, Any] = {"operators": [n.name for n in step.nodes]}
        if isinstance(step, KernelStep):
            assert verdict is not None
            mine |= {"choice": unit.candidates[verdict.index].choice, "region": unit.key}
            mine |= {"kernel": step.name, "source": source_hash(step.text)}
        else:
            call = step.node.call if isinstance(step, LibraryStep) else step.call
            mine["call"] = call.target
        out.append(mine)
    return out


def source_hash(text: str) -> str:
    """Without comments, which name places of the model's own files."""
    code = code_of(text, "#" if "@triton.jit" in text else "//")
    return hashlib.sha256(code.encode()).hexdigest()[:32]
