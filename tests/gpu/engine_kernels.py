"""Engine kernels of engine_cases.py on memory with margins of NaN: built side by side, launched,
and compared with ATen in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from tests.backends.triton_jobs import POISON, poisoned
from tests.gpu.engine_cases import GENERATOR, TOLERANCE, Prepared, integers, normal, odd

from onchip.backends.nvidia.build import Built
from onchip.backends.nvidia.launcher import early_starts
from onchip.fusion.refusal import Refusal
from onchip.ir.expr import Tensor
from onchip.planning.candidates import Candidate
from onchip.planning.values import torch_dtype

FLUSH = 256 << 20  # bytes: more than the last cache
SUMMED = 1e-4  # of the largest result: an error of sums in float32 of values that are no integers

Held = tuple[torch.Tensor, torch.Tensor]  # memory with margins, the tensor inside


@dataclass(eq=False)
class Ready:
    """A case's kernels, with what building them gave."""

    case: Prepared
    candidates: list[Candidate]
    built: list[object]
    derived: dict[str, torch.Tensor] = field(default_factory=dict)
    given: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=dict)

    def values(self, make: Callable[[Prepared], list[torch.Tensor]]):
        """(inputs, results in float64), computed once."""
        if make.__name__ not in self.given:
            given = make(self.case)
            self.given[make.__name__] = given, self.case.truth(given)
        return self.given[make.__name__]

    def weights(self, c: Candidate) -> list[torch.Tensor]:
        """What the kernel reads that is derived from constants."""
        out = []
        for d in c.derived:
            key = f"{d.name} {c.strides.get(c.source.inputs[len(c.inputs) + len(out)])}"
            key += f" {c.source.inputs[len(c.inputs) + len(out)].shape}"
            if key not in self.derived:
                self.derived[key] = d.compute([self.case.held[t] for t in d.sources])
            out.append(self.derived[key])
        return out


def ready(prepared: Sequence[Prepared], above: str = "") -> dict[str, Ready]:
    """All configurations of all cases, compiled in one call; `above`: text before each."""
    found = [Ready(p, [headed(p.candidate(c), above) for c in p.configs], []) for p in prepared]
    built = iter(GENERATOR.build_all([c for r in found for c in r.candidates]))
    for r in found:
        r.built = [next(built) for _ in r.candidates]
    return {r.case.case.name: r for r in found}


def headed(c: Candidate, above: str) -> Candidate:
    return replace(c, source=replace(c.source, text=above + c.source.text))


@dataclass(eq=False)
class Memory:
    """A kernel's tensors on the GPU."""

    given: list[Held]
    fixed: list[Held]
    made: list[Held]
    handed: list[Held]  # from launch to launch

    @classmethod
    def of(cls, r: Ready, c: Candidate, given: Sequence[torch.Tensor], device: str) -> Memory:
        values = {**r.case.held, **dict(zip(r.case.inputs, given, strict=True))}

        def held(x: torch.Tensor, strides: Sequence[int]) -> Held:
            memory, view = poisoned(x.dtype, x.shape, strides, device)
            view.copy_(x)
            return memory, view

        return cls(
            [held(values[t], c.strides[t]) for t in c.inputs],
            [held(x, x.stride()) for x in r.weights(c)],
            [poisoned(torch_dtype(t), t.shape, c.strides[t], device) for t in c.outputs],
            [poisoned(torch.float32, (w.nbytes // 4,), (1,), device) for w in c.workspace],
        )

    def poison(self) -> None:
        for memory, _ in (*self.made, *self.handed):
            memory.fill_(POISON)

    @property
    def pointers(self) -> list[int]:
        return [x.data_ptr() for _, x in (*self.given, *self.fixed, *self.made, *self.handed)]

    def bits(self) -> list[torch.Tensor]:
        return [memory.clone() for memory, _ in self.made]

    def outside(self) -> str:
        """What was written beside the results; they are lost."""
        for memory, view in (*self.made, *self.handed):
            view.view({2: torch.int16, 4: torch.int32}[view.element_size()]).fill_(-1)
            if not bool((memory == POISON).all()):
                return "it wrote outside of a result"
        return ""


def problems(
    r: Ready,
    n: int,
    launch: Callable[[Built, Memory], None],
    device: str,
    makes: Sequence[Callable[[Prepared], list[torch.Tensor]]] = (integers, odd, normal),
) -> list[str]:
    """What is wrong with the n-th kernel of a case, on these inputs."""
    c, built = r.candidates[n], r.built[n]
    if isinstance(built, Refusal) and n >= len(r.case.case.configs):
        return []  # this compiler has no registers for a choice of the model's: there are others
    if not isinstance(built, Built):
        return [f"it was not built: {built}"]
    wrong = []
    for make in makes:
        exact = r.case.case.exact and make is not normal
        given, want = r.values(make)
        m = Memory.of(r, c, given, device)
        before = [memory.clone() for memory, _ in (*m.given, *m.fixed)]
        m.poison()
        launch(built, m)
        first = m.bits()
        by_tensor = dict(zip(c.outputs, (x.cpu() for _, x in m.made), strict=True))
        for t, w in zip(r.case.results, want, strict=True):
            wrong += [f"{make.__name__}: {e}" for e in different(t, by_tensor[t], w, exact)]
        if make is normal:
            wrong += differs(m, first, built, launch)
        wrong += [f"{make.__name__}: {e}" for e in [m.outside()] if e]
        for (memory, _), old in zip((*m.given, *m.fixed), before, strict=True):
            if not torch.equal(memory, old):
                wrong.append(f"{make.__name__}: it wrote an input")
    return wrong


def different(t: Tensor, got: torch.Tensor, want: torch.Tensor, exact: bool) -> list[str]:
    """Every element: the rounded one if exact, else one close to it; NaN and infinities as they
    are."""
    finite = torch.isfinite(want)
    largest = float(want[finite].abs().max()) if bool(finite.any()) else 0.0
    rtol, atol = (0.0, 0.0) if exact else (TOLERANCE[got.dtype], SUMMED * largest)
    rounded = want.to(got.dtype) if exact else want
    try:
        torch.testing.assert_close(
            got.to(rounded.dtype), rounded, rtol=rtol, atol=atol, equal_nan=True
        )
    except AssertionError as error:
        return [f"{t.name}: {' '.join(str(error).split())}"]
    return []


def differs(
    m: Memory, first: list[torch.Tensor], built: Built, launch: Callable[[Built, Memory], None]
) -> list[str]:
    """The same launch with nothing in the last cache, and with everything; then twice, the second
    one as early as it may start."""

    def cold() -> None:
        torch.full((FLUSH,), 1, dtype=torch.uint8, device=m.made[0][0].device)
        launch(built, m)

    def early() -> None:
        with early_starts():
            launch(built, m)
            launch(built, m)

    wrong = []
    for name, run in (("cold", cold), ("warm", lambda: launch(built, m)), ("early", early)):
        m.poison()
        run()
        same = [torch.equal(a, b) for a, b in zip(first, m.bits(), strict=True)]
        if not all(same):
            wrong.append(f"other bits than before in a launch that is {name}")
    return wrong


def launch(built: Built, m: Memory) -> None:
    """On the current stream of the current GPU. What breaks there is a RuntimeError of the next
    call that waits."""
    built.run(m.pointers, torch.cuda.current_stream().cuda_stream)
