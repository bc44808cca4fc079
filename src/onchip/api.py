"""What `import onchip` offers."""

from __future__ import annotations

import functools
import math
import platform
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from onchip.algebra import in_force, simplify
from onchip.analysis.roofline import Ceilings, datasheet
from onchip.analysis.summary import Analysis
from onchip.analysis.summary import analyze as summarise
from onchip.capture import Captured, Templates, capture
from onchip.capture.capture import as_module
from onchip.capture.devices import check_devices, device_of
from onchip.errors import CompilerError, InputError, OnchipError
from onchip.models import resolve
from onchip.models.model import Model
from onchip.models.resolve import moved
from onchip.planning import assess, machine
from onchip.planning.assess import EAGER, FUSED, LIBRARY, Compiled, Measured, Outcome
from onchip.planning.doctor import version
from onchip.planning.forms import form_of, graph_inputs, library_plan, measure
from onchip.planning.generators import generator_for
from onchip.planning.lock import Lock, relevant
from onchip.planning.peers import quiet
from onchip.planning.plan import Plan
from onchip.planning.planner import Planned, Progress, plan
from onchip.planning.precision import mark_exact, tf32_allowed
from onchip.planning.relayout import with_channels_last
from onchip.planning.relayout_results import with_channels_first_results
from onchip.planning.units import code_version
from onchip.report import Report
from onchip.report.build import Facts, build_report
from onchip.runtime.background import Begun, leaves_no_trace
from onchip.runtime.program import Begin, Program
from onchip.runtime.verify import Verification, verify
from onchip.settings import Settings

# A program's error may not exceed eager's by more than roundings in another order explain.
ERROR_FACTOR = 4.0


def _silent(what: str, done: int, total: int) -> None:
    """No progress display."""


def compile(
    model: torch.nn.Module | Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    settings: Settings = Settings(),
    *,
    name: str = "",
    progress: Progress = _silent,
) -> Program:
    """A program with the model's own signature and outputs, specialised for these inputs (and,
    by itself, for others when they come). The model is never changed.

    Never slower: each specialisation is timed against the model as given before it ships (once:
    the outcome is cached). `program.report()` says what was fused, and which form ships.
    On an NVIDIA GPU the program runs as one CUDA graph where that is possible and pays.
    Raises CaptureError if the model can't be captured or its tensors are not all on the CPU or on
    one GPU, InputError if the arguments do not fit it, CacheError if the cache folder can't be
    written, LockError if `settings.lock` names a file that does not fit.
    """
    latest: list[Compiled] = []
    notes: list[str] = []
    lock = Lock(settings.lock) if settings.lock is not None else None

    begin = _beginner(settings, progress, lock, latest, notes)

    def build(
        module: torch.nn.Module, a: tuple[Any, ...], k: dict[str, Any], templates: Templates
    ) -> tuple[Captured, Plan]:
        return begin(module, a, k, templates).finish(a, k)

    in_force(settings)  # an unknown rule is an error now, not at the first call
    args, kwargs = tuple(args), dict(kwargs or {})
    module = as_module(model)
    program = Program(module, args, kwargs, build, settings, lock, begin, notes)
    title = name or type(module).__name__
    program.compiled = latest
    program.describe = lambda: _report(title, program)
    return program


def optimize(
    spec: str | Model,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    batch: int | None = None,
    peers: bool = False,
    settings: Settings = Settings(),
    progress: Progress | None = None,
) -> tuple[Program, Report]:
    """Analyse, fuse, verify against eager and float64, and measure a MODEL.

    `spec` is a MODEL as on the command line, or what onchip.models.resolve returned; `device` is
    "cpu", "cuda" or "cuda:1" (model and inputs are copied there). `peers` also measures other
    compilers. Raises UnknownModel, CaptureError and the like in one line, and
    VerificationError if the program's results are not as exact as eager's.
    """
    place = _find_device(device)
    step = progress or _silent
    step("loading the model", 0, 0)
    found = resolve(spec, batch=batch, dtype=dtype) if isinstance(spec, str) else spec
    found = moved(found, place)
    with torch.no_grad():
        step("capturing", 0, 0)
        program = compile(
            found.module, found.example_inputs, settings=settings, name=found.name, progress=step
        )
        program.wait()
        step("verifying against float64", 0, 0)
        with quiet():  # what the program would warn of stands in the report
            verified = verify(program, found.module, found.example_inputs)
        judge(verified, found.name)
        step("measuring", 0, 0)
        measured = measure(
            program, program.compiled[-1], found.module, found.example_inputs, place, peers
        )
        ceilings = machine.measure(str(place))
    notes = [found.note] if found.note else []
    if verified.reference != "float64":
        notes.append(f"no float64 reference: {verified.reference}")
    report = _full_report(found, program, verified, measured, ceilings, tuple(notes))
    program.describe = lambda: report
    return program, report


def analyze(
    model: str | torch.nn.Module | Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    batch: int | None = None,
) -> Analysis:
    """Facts only: every operator's bytes, FLOPs, roofline class and share of the time, and what
    fusion can gain at best. `device` is "h200", "a100" ... (data sheet) or "cpu" (measured here,
    the default). `model` is a MODEL as on the command line, or a module with its arguments."""
    if isinstance(model, str):
        found = resolve(model, batch=batch, dtype=dtype)
        model, args = found.module, found.example_inputs
    name = device or "cpu"
    known = name.partition(":")[0] in ("cpu", "cuda")
    ceilings = machine.measure(name) if known else datasheet(name)
    return summarise(capture(model, tuple(args), kwargs).graph, ceilings)


# ---- one specialisation ------------------------------------------------------------------------


def _beginner(
    settings: Settings,
    progress: Progress,
    lock: Lock | None,
    latest: list[Compiled],
    notes: list[str],
) -> Begin:
    """What captures a program, and plans it when that is asked for; its books go to `latest`."""

    def begin(
        module: torch.nn.Module, a: tuple[Any, ...], k: dict[str, Any], templates: Templates
    ) -> Begun:
        check_devices(module, a, k)
        start = time.perf_counter()
        original = capture(module, a, k, templates, "computed_once" in in_force(settings))

        def finish(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Captured, Plan]:
            compiled = _finish(module, args, kwargs, original, settings, progress, start, lock)
            latest[:] = [compiled]
            notes.extend(n for n in compiled.notes if n not in notes)
            return form_of(compiled)

        return Begun(original, finish)

    return begin


def _finish(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    original: Captured,
    settings: Settings,
    progress: Progress,
    start: float,
    lock: Lock | None,
) -> Compiled:
    """Plan what was captured, and decide which form ships."""
    if lock is None:
        return _decide(module, args, kwargs, original, settings, progress, start)
    device = device_of(original, graph_inputs(original, args, kwargs))
    with lock.deciding(original, _made_with(device, settings)):
        return _decide(module, args, kwargs, original, settings, progress, start, lock)


def _made_with(device: torch.device, settings: Settings) -> dict[str, Any]:
    """What choices depend on, as a lock file names it."""
    on_gpu = device.type == "cuda"
    unused = ("python", "compiler") if on_gpu else ("python",)
    found: dict[str, Any] = {k: v for k, v in versions().items() if k not in unused}
    if on_gpu:
        found |= {
            k: version(k) or "none" for k in ("triton", "cuda-bindings", "nvidia-cudnn-frontend")
        }
        found |= {"cudnn": str(torch.backends.cudnn.version())}
        found |= {"driver": machine.driver_version(str(device)), "tf32": str(tf32_allowed())}
    found |= {"code": code_version()[:16], "device": machine.device_name(str(device))}
    return {**found, "settings": relevant(settings)}


def _decide(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    original: Captured,
    settings: Settings,
    progress: Progress,
    start: float,
    lock: Lock | None = None,
) -> Compiled:
    captured = simplify(original, settings)
    inputs = graph_inputs(captured, args, kwargs)
    mark_exact(captured.graph, device_of(captured, inputs))
    if generator_for(device_of(captured, inputs), settings).pads_operands:  # the engine's copies
        captured = with_channels_first_results(with_channels_last(captured))
    planned = plan(captured, inputs, settings, progress)
    if lock is not None:
        lock.settle(planned)
    notes = ()
    if planned.problem:
        notes = (f"{planned.problem}, so the library runs every operator: see onchip doctor",)
        warnings.warn(f"onchip: {notes[0]}", stacklevel=8)
    progress("comparing with eager", 0, 0)
    outcome = _settle(module, args, kwargs, original, captured, planned, settings)
    notes = (*notes, *planned.notes)
    return Compiled(original, captured, planned, outcome, time.perf_counter() - start, notes)


def _settle(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    original: Captured,
    captured: Captured,
    planned: Planned,
    settings: Settings,
) -> Outcome:
    """Which form ships. A model that changes its own attributes runs eagerly in any case."""
    if captured.python_state:
        return Outcome(EAGER, {}, "forward() changes Python attributes of the model")
    form = FUSED if assess.fuses(planned.plan) else LIBRARY
    if not planned.timed:
        return Outcome(form, {}, "nothing was timed: kernels run under Triton's interpreter")
    a, k = assess.copied(args, kwargs)
    inputs = graph_inputs(captured, a, k)
    device = device_of(captured, inputs)
    name = str(device)
    where = f"{machine.device_name(name)} {machine.driver_version(name)} {settings.cuda_graph}"

    def trial(p: Plan) -> Callable[[], object]:
        # made when it is first called: a known outcome needs no second program, weights and all
        program = functools.cache(lambda: Program(module, a, k, lambda *_: (captured, p), settings))
        return lambda: program()(*a, **k)

    beside_calls = settings.start == "eager" and leaves_no_trace(original)
    with assess.undisturbed(module, inputs, beside_calls):
        found = assess.settle(
            assess.program_key(original, planned, where),
            lambda: module(*a, **k),
            trial(planned.plan),
            lambda: trial(library_plan(captured)),
            clock=assess.caller_clock(device),
        )
    if found.form == FUSED and form == LIBRARY:
        names = {FUSED: LIBRARY}
        times = {names.get(k, k): us for k, us in found.times_us.items()}
        return Outcome(LIBRARY, times, ratios={names[k]: r for k, r in found.ratios.items()})
    return found


def _find_device(name: str) -> torch.device:
    """The device with this name, its number included. Raises OnchipError if it is not here."""
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise OnchipError(
            f"device {name}: programs are compiled for cpu and cuda (onchip analyze --device h200 "
            "and the like say what fusion could gain elsewhere)"
        )
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise OnchipError(f"device {name}: torch {torch.__version__} sees no GPU: onchip doctor")
    number = torch.device(name).index
    number = torch.cuda.current_device() if number is None else number
    if number >= torch.cuda.device_count():
        raise OnchipError(f"device {name}: there are {torch.cuda.device_count()} GPUs, from cuda:0")
    return torch.device("cuda", number)


# ---- verifying, measuring, reporting -----------------------------------------------------------


def judge(verified: Verification, name: str) -> None:
    """Raise VerificationError if the program is less exact than eager mode allows for."""
    from onchip.errors import VerificationError

    for c in verified.comparisons:
        if math.isnan(c.error):
            limit, size = 1e-3, c.difference
        else:
            limit, size = ERROR_FACTOR * max(c.eager_error, 1e-7), c.error
        if not size <= limit:
            raise VerificationError(
                f"{name}: {c.what} has relative error {size:.1e}, eager {c.eager_error:.1e}: "
                "report this"
            )


def _full_report(
    found: Model,
    program: Program,
    verified: Verification,
    measured: Measured,
    ceilings: Ceilings,
    notes: tuple[str, ...],
) -> Report:
    compiled: Compiled = program.compiled[-1]
    facts = Facts(
        found.name,
        ceilings.device,
        input_type(compiled.original),
        versions(),
        _known(verified.error),
        _known(verified.eager_error),
        ceilings,
        notes,
        program.graph_coverage,
    )
    return build_report(facts, compiled, measured)


def _report(name: str, program: Program) -> Report:
    """The report of the latest specialisation, from what compiling found out."""
    if not program.compiled:
        raise InputError("this model runs in eager mode (see program.notes): nothing to report")
    compiled: Compiled = program.compiled[-1]
    device = device_of(compiled.original, ())
    ceilings = machine.measure(str(device))
    facts = Facts(
        name,
        ceilings.device,
        input_type(compiled.original),
        versions(),
        ceilings=ceilings,
        coverage=program.graph_coverage,
    )
    return build_report(facts, compiled, None)


def _known(x: float) -> float | None:
    return None if math.isnan(x) else x


def input_type(captured: Captured) -> str:
    """The element type of the first floating input, parameter or result: "float32"."""
    tensors = (*captured.graph.inputs, *captured.graph.constants, *captured.graph.output_tensors)
    floats = [t.dtype.label for t in tensors if t.dtype.is_float]
    return floats[0] if floats else next((t.dtype.label for t in tensors), "none")


def versions() -> dict[str, str]:
    """What the figures of a report depend on."""
    from onchip import __version__
    from onchip.backends.cpp.compiler import compiler_version

    found = {"onchip": __version__, "torch": torch.__version__, "python": platform.python_version()}
    try:
        found["compiler"] = compiler_version().partition(" ")[2]  # its name stands twice
    except CompilerError:
        found["compiler"] = "none"
    found["threads"] = str(torch.get_num_threads())
    return found
