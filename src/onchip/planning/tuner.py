"""How to run one group of operators: candidates are built, checked against eager's values, and
timed; the fastest is chosen, unless the library's calls take no more beyond noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from onchip.analysis.record import Interval
from onchip.backends.nvidia.source import Workspace
from onchip.errors import CompilerError, InternalError, OnchipError
from onchip.fusion.layout import extent
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.region import Region
from onchip.ir.expr import Tensor
from onchip.planning.candidates import Candidate, runner
from onchip.planning.intervals import compare
from onchip.planning.isolation import Isolation, Spec
from onchip.planning.library import Step, aten_steps, planted, run_of
from onchip.planning.plan import CallStep, Kernel
from onchip.planning.precision import TF32_TOLERANCE
from onchip.planning.records import load_record, store_record
from onchip.planning.timing import HOST, Clock, Timed, fastest, shortlist
from onchip.planning.values import Values, in_layout

# A float32 result may differ from eager's by roundings in another order, not by more.
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-9, torch.bfloat16: 3e-2, torch.float16: 4e-3}

# Where a generated kernel is so many times as fast as oneDNN's form, its parts are not timed.
HOPELESS = 1.5
# So many times as long as candidates are timed, two forms are while noise hides which is faster.
UNDECIDED = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found for one kind of region.

    kind        "kernel" (candidate `index`), "library" (each operator its ATen call), "onednn"
                (oneDNN's calls and ATen's), or "split" (two regions, planned on their own)
    kernel_us   the fastest generated kernel's time; likewise library_us and onednn_us
    calls_us    oneDNN's calls alone, without ATen's between them
    library_ratio  the faster of kernel and oneDNN's calls over the library's
    split_us    the two parts' time, if a cut was tried; cut: places of the first part's operators;
                whole: the kind of what was measured beside them; split_ratio: whole over parts
    times_us    every generated kernel that was timed, by its choice
    refused     candidates that were not timed: (choice, why)
    token       of the fastest generated kernel (Candidate.token)
    left_out    variants for which the budget left no time
    """

    kind: str
    index: int = 0
    kernel_us: float | None = None
    library_us: float | None = None
    onednn_us: float | None = None
    calls_us: float | None = None
    split_us: float | None = None
    cut: tuple[int, ...] = ()
    times_us: dict[str, float] = field(default_factory=dict)
    refused: tuple[tuple[str, str], ...] = ()
    token: dict[str, Any] = field(default_factory=dict)
    left_out: int = 0
    library_ratio: Interval | None = None
    split_ratio: Interval | None = None
    whole: str = ""

    @property
    def fused_us(self) -> float | None:
        """The faster of kernel and oneDNN's calls, whatever was chosen."""
        return min((t for t in (self.kernel_us, self.onednn_us) if t is not None), default=None)

    @property
    def best_us(self) -> float | None:
        """The time of what was chosen."""
        return getattr(self, f"{self.kind}_us")

    @property
    def best_of_whole_us(self) -> float | None:
        """What stood beside a cut's parts."""
        return getattr(self, f"{self.whole}_us") if self.whole else None

    @property
    def costs(self) -> dict[str, float]:
        """What was measured, by name, for a decision."""
        names = ("kernel_us", "library_us", "onednn_us", "split_us")
        found = {n: t for n in names if (t := getattr(self, n)) is not None}
        for name in ("library_ratio", "split_ratio"):
            if (r := getattr(self, name)) is not None:
                found |= {name: r.median, f"{name}_low": r.low, f"{name}_high": r.high}
        return found


def tune(
    region: Region,
    candidates: Mapping[int, Candidate],
    kernels: Mapping[int, Kernel | CompilerError | Refusal],
    onednn: Sequence[Step],
    constants: frozenset[Tensor],
    values: Values,
    budget_s: float,
    clock: Clock | None = HOST,
    isolation: Isolation | None = None,
) -> Verdict:
    """Check and time the ways of running one region: its candidates (numbered, with their built
    kernels), its operators as ATen calls, and oneDNN's calls (`onednn`; empty: none). Without a
    clock nothing is timed, and the first candidate that is correct is chosen. `isolation`: where
    kernels run for the first time, if not here."""
    refused: list[tuple[str, str]] = []
    if clock is None:
        right = next(_checked(candidates, kernels, constants, values, refused, isolation), None)
        if right is None:
            return Verdict("library", refused=tuple(refused))
        return Verdict("kernel", right[0], refused=tuple(refused))
    mine = dict(_checked(candidates, kernels, constants, values, refused, isolation))
    runs: dict[str, Callable[[], object]] = {"library": run_of(aten_steps(region.nodes), values)}
    if onednn:
        problem = check_steps(onednn, region, constants, values)
        if problem:
            refused.append(("oneDNN", str(Refusal(Rule.WRONG, region.name, problem))))
        else:
            runs["onednn"] = run_of(onednn, values)
    if not mine and len(runs) == 1:
        return Verdict("library", refused=tuple(refused))
    ways = {k: clock.ready(f) for k, f in {**runs, **mine}.items()}
    taken = dict(zip(ways, shortlist(list(ways.values()), budget_s), strict=True))
    found = _fastest_of(taken, candidates, mine, tuple(refused))
    found = _against_library(found, ways, taken, budget_s)
    calls = [s for s in onednn if isinstance(s, CallStep)]
    if found.onednn_us is None or len(calls) == len(onednn):
        return found
    if found.kernel_us is not None and found.onednn_us > HOPELESS * found.kernel_us:
        return found
    only = fastest([run_of(calls, values)], budget_s / 4, clock=clock)[0]
    return replace(found, calls_us=only * 1e6)


def _fastest_of(
    taken: Mapping[str | int, Sequence[float]],
    candidates: Mapping[int, Candidate],
    kernels: Mapping[int, object],
    refused: tuple[tuple[str, str], ...],
) -> Verdict:
    """The verdict between the fused forms, by their best rounds; the library's calls if there is
    none."""
    times = {k: min(t) * 1e6 for k, t in taken.items()}
    index = min(kernels, key=lambda i: times[i], default=0)
    fused = {"kernel": times[index]} if kernels else {}  # first: it wins a tie
    fused |= {"onednn": times["onednn"]} if "onednn" in times else {}
    return Verdict(
        min(fused, key=lambda k: fused[k], default="library"),
        index,
        fused.get("kernel"),
        times["library"],
        fused.get("onednn"),
        times_us={candidates[i].choice: times[i] for i in kernels},
        refused=refused,
        token=dict(candidates[index].token) if kernels else {},
    )


def _against_library(
    found: Verdict,
    ways: Mapping[str | int, Timed],
    taken: Mapping[str | int, Sequence[float]],
    budget_s: float,
) -> Verdict:
    """The fused form that was found stands if it takes less than the library's calls beyond
    noise."""
    way = found.index if found.kind == "kernel" else found.kind
    n = min(len(taken[way]), len(taken["library"]))
    so_far = taken[way][:n], taken["library"][:n]
    duel = compare(ways[way], ways["library"], UNDECIDED * budget_s, so_far)
    kind = found.kind if duel.faster else "library"
    return replace(found, kind=kind, library_ratio=duel.ratio)


def _checked(
    candidates: Mapping[int, Candidate],
    kernels: Mapping[int, Kernel | CompilerError | Refusal],
    constants: frozenset[Tensor],
    values: Values,
    refused: list[tuple[str, str]],
    isolation: Isolation | None,
) -> Iterator[tuple[int, Callable[[], object]]]:
    """The candidates that write eager's values, ready to run; why not, for the others."""
    derived: dict[tuple[str, ...], list[torch.Tensor]] = {}
    odd: tuple[Values, Values] | None = None
    for i, c in candidates.items():
        k = kernels[i]
        if isinstance(k, CompilerError):
            k = Refusal(Rule.COMPILER, text=str(k))
        if isinstance(k, Refusal):
            refused.append((c.choice, str(k)))
            continue
        # siblings share their weights' packing
        key = tuple(d.name for d in c.derived)
        if key not in derived:
            derived[key] = [d.compute([values[s] for s in d.sources]) for d in c.derived]
        built = getattr(k, "built", None)  # a GPU's kernels have one
        if isolation is not None and built is not None:
            crash = isolation.first_run(c.region.name, built, memory_of(c, values, derived[key]))
            if crash is not None:
                refused.append((c.choice, str(crash)))
                continue
        trial = Trial.of(c, k, values, derived[key])
        problem = check(trial, values)
        if c.foreign and not problem:
            odd = odd or _odd(c.region, constants, values)
            problem = check(Trial.of(c, k, odd[0], derived[key]), odd[1])
            problem = f"with NaN and infinities among the inputs: {problem}" if problem else ""
        if problem:
            refused.append((c.choice, str(Refusal(Rule.WRONG, c.region.name, problem))))
        else:
            yield i, trial.run


def _odd(region: Region, constants: frozenset[Tensor], values: Values) -> tuple[Values, Values]:
    """Values with NaN and infinities among the inputs, and ATen's results of them."""
    odd = planted(region, constants, values)
    local = run_of(aten_steps(region.nodes), odd)()
    results = {t: in_layout(local[t], values[t].stride()) for t in region.outputs}
    return odd, Values({**odd.tensors, **results})


def memory_of(c: Candidate, values: Values, derived: Sequence[torch.Tensor]) -> list[Spec]:
    """What each of the candidate's pointers points to."""
    given = [*(values[t] for t in c.inputs), *derived]
    results = [values[t] for t in c.outputs]
    return [
        *((_label(x), _nbytes(x), "values") for x in given),
        *((_label(x), _nbytes(x), "poison") for x in results),
        *(("uint8", w.nbytes, "zeros" if w.zeroed else "poison") for w in c.workspace),
    ]


def _label(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _nbytes(x: torch.Tensor) -> int:
    """From a tensor's first element to behind its last one."""
    return x.itemsize * extent(tuple(x.shape), x.stride())


@dataclass(frozen=True, eq=False, slots=True)
class Trial:
    """A kernel that runs on the program's values, its results and workspace in memory of their
    own."""

    candidate: Candidate
    run: Callable[[], int]
    outputs: tuple[torch.Tensor, ...]
    workspace: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls, candidate: Candidate, kernel: Kernel, values: Values, derived: Sequence[torch.Tensor]
    ) -> Trial:
        outputs = tuple(_empty_like(values[t]) for t in candidate.outputs)
        workspace = tuple(_bytes(w, outputs[0].device) for w in candidate.workspace)
        run = runner(candidate, kernel, values.__getitem__, derived, outputs, workspace)
        return cls(candidate, run, outputs, workspace)


def _bytes(w: Workspace, device: torch.device) -> torch.Tensor:
    return torch.zeros(w.nbytes, dtype=torch.uint8, device=device)


def kernel_run(candidate: Candidate, kernel: Kernel, values: Values) -> Callable[[], object]:
    """A closure that runs one built kernel once, into memory of its own."""
    derived = [d.compute([values[s] for s in d.sources]) for d in candidate.derived]
    return Trial.of(candidate, kernel, values, derived).run


def check_steps(
    steps: Sequence[Step], region: Region, constants: frozenset[Tensor], values: Values
) -> str:
    """ "" if the steps give eager's values, and ATen's where an input holds NaN or an infinity;
    else what is wrong."""
    odd = planted(region, constants, values)
    expected_odd = run_of(aten_steps(region.nodes), odd)()
    try:
        got, got_odd = run_of(steps, values)(), run_of(steps, odd)()
    except RuntimeError as error:  # what oneDNN has no implementation of
        return str(error)
    for t in region.outputs:
        problem = difference(got[t], values[t])
        if problem:
            return f"{t.name}: {problem}"
        problem = difference(got_odd[t], expected_odd[t])
        if problem:
            return f"{t.name}, with NaN and infinities among the inputs: {problem}"
    return ""


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def poison(x: torch.Tensor) -> None:
    """A value no correct kernel leaves behind."""
    if x.dtype.is_floating_point:
        x.fill_(float("nan"))
    elif x.dtype is torch.bool:
        x.view(torch.uint8).fill_(77)
    else:
        x.fill_(77)


def check(trial: Trial, values: Values) -> str:
    """ "" if the kernel writes eager's values, else what is wrong."""
    spaces = list(zip(trial.candidate.workspace, trial.workspace, strict=True))
    for x in trial.outputs:
        poison(x)
    for w, x in spaces:
        if not w.zeroed:
            x.fill_(0xFF)  # NaN in every type of floating point
    try:
        status = trial.run()
        wait(trial.outputs)
    except (OnchipError, RuntimeError) as error:
        _still_usable(trial, error)
        return f"it could not be run: {error}"
    if status:
        return f"status {status}"
    least = TF32_TOLERANCE if trial.candidate.precision == "tf32" else 0.0
    for t, x in zip(trial.candidate.outputs, trial.outputs, strict=True):
        problem = difference(x, values[t], least)
        if problem:
            return f"{t.name}: {problem}"
    if any(w.zeroed and bool(x.any()) for w, x in spaces):
        return "it leaves other values than zeros in a workspace that the next call finds"
    return ""


def wait(tensors: Sequence[torch.Tensor]) -> None:
    """Until a GPU has computed them; errors of its kernels are raised here."""
    for x in tensors:
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
            return


def _still_usable(trial: Trial, error: Exception) -> None:
    """Raise InternalError if a kernel's error (a wrong address) has ended all work on the GPU."""
    try:
        wait(trial.outputs)
    except RuntimeError:
        raise InternalError(
            f"{trial.candidate.region.name}, {trial.candidate.choice}: the generated kernel ended "
            f"all work on the GPU ({error}); please report this, and start a new process"
        ) from error


def difference(got: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> str:
    """ "" if the tensors agree to the type's tolerance, or to `least` if that is more (NaN and inf
    at the same places)."""
    if not expected.dtype.is_floating_point:
        same = torch.equal(got, expected)
        return "" if same else f"{int((got != expected).sum())} elements differ"
    a, b = got.double(), expected.double()
    finite = torch.isfinite(b)
    if not torch.equal(finite, torch.isfinite(a)):
        return "NaN or inf at other places"
    if not torch.equal(torch.isnan(a), torch.isnan(b)):
        return "NaN at other places"
    d = torch.where(finite, a - b, torch.zeros_like(a)).norm().item()
    size = torch.where(finite, b, torch.zeros_like(b)).norm().item()
    limit = max(TOLERANCE.get(expected.dtype, 1e-3), least)
    if d <= limit * size or d <= 1e-6 * max(b.numel(), 1) ** 0.5:
        return ""
    return f"relative error {d / max(size, 1e-300):.1e}"


# ---- verdicts are kept between processes -------------------------------------------------------


def load_verdict(key: str) -> Verdict | None:
    """The stored verdict; None if there is none or it can't be read (it is measured again)."""
    raw = load_record(key)
    if raw is None:
        return None
    try:
        refused = tuple((str(choice), str(why)) for choice, why in raw["refused"])
        ratios = {k: r and Interval(**r) for k, r in raw.items() if k.endswith("_ratio")}
        found = Verdict(**{**raw, **ratios, "refused": refused, "cut": tuple(raw["cut"])})
    except (TypeError, KeyError, ValueError):
        return None
    known = hasattr(found, f"{found.kind}_us") and isinstance(found.index, int)
    return found if known else None


def store_verdict(key: str, verdict: Verdict, lasting: bool = True) -> None:
    store_record(key, asdict(verdict), lasting)
