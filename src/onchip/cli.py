"""The command line: `onchip COMMAND`, also `python -m onchip COMMAND`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from onchip.errors import OnchipError

# heavy modules (torch, the compiler itself) are imported inside the commands: --help stays quick

app = typer.Typer(
    help="Operator fusion for PyTorch models: analyse first, fuse where it pays, prove it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Step = Callable[[str, int, int], None]  # what is going on, steps done, steps in all (0: unknown)

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="torchvision:resnet50, timm:NAME, transformers:NAME, file.py:Class, model.pt2, "
        "pipeline:conv-relu-bn-pool ...",
    ),
]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda")]
DtypeOption = Annotated[str | None, typer.Option(help="fp32, bf16, fp16 or fp64")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="leading axis of the inputs")]
JsonOption = Annotated[str | None, typer.Option("--json", help="write JSON there; - is stdout")]
LockOption = Annotated[
    str | None,
    typer.Option(help="a file of choices: written if it is not there, else nothing is measured"),
]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="only measure each shipped kernel again, against unfused")
]
PeersOption = Annotated[bool, typer.Option("--peers", help="measure other compilers as well")]

DTYPES = {
    "fp32": "float32", "f32": "float32", "float": "float32", "float32": "float32",
    "bf16": "bfloat16", "bfloat16": "bfloat16",
    "fp16": "float16", "f16": "float16", "half": "float16", "float16": "float16",
    "fp64": "float64", "f64": "float64", "double": "float64", "float64": "float64",
}  # fmt: skip


@app.command()
def optimize(
    model: ModelArgument,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    batch: BatchOption = None,
    report: Annotated[Path | None, typer.Option(help="write the report as one HTML page")] = None,
    json_path: JsonOption = None,
    peers: PeersOption = False,
    lock: LockOption = None,
) -> None:
    """Analyse, fuse, verify and measure a model; print the benefit table."""
    from onchip.report.text import renderable

    _, found = _optimized(model, device, dtype, batch, peers, lock)
    if json_path == "-":
        typer.echo(found.to_json(), nl=False)
    else:
        _print(renderable(found))
        if json_path is not None:
            found.to_json(json_path)
    if report is not None:
        found.to_html(report)


@app.command()
def analyze(
    model: ModelArgument,
    device: Annotated[
        str | None,
        typer.Option(help="a100, h100, h200, b200, l4, l40s, rtx4090; cpu or cuda: measured here"),
    ] = None,
    dtype: DtypeOption = None,
    batch: BatchOption = None,
    top: Annotated[int, typer.Option(min=1, help="operators to list")] = 30,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="price launches as nodes of a CUDA graph")
    ] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="also compile the kernels for the GPU (minutes)")
    ] = False,
) -> None:
    """Where the time goes, what limits it, and what fusion can gain at best. Needs no GPU."""
    from onchip.analysis.summary import analyze as summarise
    from onchip.report.analysis import analysis_view

    if kernels:
        _gpu(device or "cpu")
    ceilings = _ceilings(device)
    with _progress() as step:
        step(f"capturing {model}", 0, 0)
        captured = _captured(model, dtype, batch)
    _print(analysis_view(model, summarise(captured.graph, ceilings, graphs), top))
    if kernels:
        from onchip.report.text import preview_view

        _print(preview_view(_previews(captured, str(device)), str(device)))


@app.command()
def why(
    model: ModelArgument,
    a: Annotated[str, typer.Argument(metavar="A", help="an operator, or a module's path")],
    b: Annotated[str, typer.Argument(metavar="B", help="the other one")],
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    batch: BatchOption = None,
    lock: LockOption = None,
) -> None:
    """Why two operators are, or are not, in one kernel."""
    _, found = _optimized(model, device, dtype, batch, lock=lock)
    typer.echo(found.why(a, b))


@app.command()
def kernels(
    model: ModelArgument,
    out: Annotated[Path | None, typer.Option(help="write one file a kernel there")] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda; or a100, h100, h200, b200, which need not be here")
    ] = "cpu",
    dtype: DtypeOption = None,
    batch: BatchOption = None,
    lock: LockOption = None,
) -> None:
    """The generated sources; for a GPU that is not here with what they need of it."""
    if device.partition(":")[0] not in ("cpu", "cuda"):
        _print_previews(model, out, device, dtype, batch)
        return
    program, _ = _optimized(model, device, dtype, batch, lock=lock)
    sources: dict[str, str] = program.sources
    if not sources:
        typer.echo(f"{model}: no kernel was generated, the library runs every operator", err=True)
    for name, source in sources.items():
        if out is None:
            typer.echo(f"// ---- {name}\n{source}")
        else:
            typer.echo(_write_source(out, name, source))


@app.command()
def bench(
    suite: Annotated[
        str,
        typer.Argument(
            metavar="SUITE", help="cpu, resnet50, memory, gpu, engine, networks, kernelbench ..."
        ),
    ],
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="of kernelbench: a clone of KernelBench")
    ] = "",
    ids: Annotated[str, typer.Option(help="of kernelbench: problems, such as 1,4,7-9")] = "",
    every: Annotated[int, typer.Option(min=1, help="of kernelbench: each so many-th")] = 1,
    skip: Annotated[int, typer.Option(min=0, help="of kernelbench: leave so many out")] = 0,
    peers: PeersOption = False,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="PEER", help="leave a peer out (on a GPU): inductor ..."),
    ] = None,
    verify: VerifyOption = False,
    json_path: JsonOption = None,
) -> None:
    """Run a suite of benchmarks. With --verify, exit code 1 if a kernel is slower than unfused."""
    from onchip.report import bench as benches
    from onchip.report import schema

    chosen = dict(path=path, ids=ids, every=every, skip=skip)
    chosen = {} if chosen == dict(path="", ids="", every=1, skip=0) else chosen
    if verify:
        if peers or without or json_path is not None:
            raise OnchipError("--verify prints a table: leave --peers, --without and --json out")
        raise typer.Exit(1 if benches.verify(suite, typer.echo, **chosen) else 0)
    result: dict[str, Any] = benches.run(suite, peers, tuple(without or ()), **chosen)
    schema.check(result, schema.BENCH, "bench result")
    text = json.dumps(result, indent=2, allow_nan=False)
    if json_path is None or json_path == "-":
        typer.echo(text)
    else:
        _write(Path(json_path), text + "\n")


@app.command()
def doctor(
    refresh: Annotated[bool, typer.Option("--refresh", help="measure the ceilings again")] = False,
) -> None:
    """This machine: devices, measured ceilings, compilers, versions, and what is missing."""
    from onchip.planning import doctor as checks
    from onchip.report.analysis import ceilings_line, costs_line, doctor_view

    rows = checks.examine()
    with _progress() as step:
        step("measuring the ceilings", 0, 0)
        for c in checks.ceilings(refresh):
            rows.append(("ceilings", ceilings_line(c), ""))
            rows += [("cost model", costs_line(c.costs), "")] if c.costs is not None else []
    _print(doctor_view(rows))


cache_app = typer.Typer(help="The cache of compiled kernels and measured choices.")
app.add_typer(cache_app, name="cache")


@cache_app.callback(invoke_without_command=True)
def cache(context: typer.Context) -> None:
    """What the cache holds: entries and bytes by kind, oldest and newest use."""
    if context.invoked_subcommand is None:
        from onchip.backends.cache import cache_folder, entries
        from onchip.report.analysis import cache_view

        _print(cache_view(cache_folder(), entries()))


@cache_app.command()
def clear(
    older_than: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="only what was not used for so long")
    ] = 0.0,
) -> None:
    """Remove entries; what a process is just writing stays."""
    from onchip.backends.cache import cache_folder, entries
    from onchip.backends.cache import clear as remove

    gone = remove(older_than * 86400)
    size = sum(e.nbytes for e in gone) / 2**20
    left = len(entries())
    typer.echo(
        f"{cache_folder()}: removed {len(gone)} entries, {size:,.1f} MiB; {left} entries left"
    )


def main() -> None:
    """Entry point: errors made on purpose are one line on stderr and exit code 2."""
    try:
        app()
    except OnchipError as error:
        print(f"onchip: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


# ---- between the commands and the compiler -----------------------------------------------------


def _optimized(
    model: str,
    device: str,
    dtype: str | None,
    batch: int | None,
    peers: bool = False,
    lock: str | None = None,
) -> tuple[Any, Any]:
    """(Program, Report) of api.optimize, with a progress display."""
    import torch

    _check_device(device, torch.cuda.is_available())
    kind = _dtype(dtype)
    from onchip import api
    from onchip.settings import Settings

    with _progress() as step:
        return api.optimize(
            model, device=device, dtype=kind, batch=batch, peers=peers,
            settings=Settings(lock=lock), progress=step,
        )  # fmt: skip


def _check_device(device: str, gpu: bool) -> None:
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise OnchipError(f"--device {device}: use cpu or cuda (analyze also takes a100, h200 ...)")
    if kind == "cuda" and not gpu:
        raise OnchipError(f"--device {device}: torch sees no GPU here; run `onchip doctor`")


def _dtype(name: str | None) -> Any:
    """The torch dtype of a --dtype, or None."""
    import torch

    if name is None:
        return None
    if name.lower() not in DTYPES:
        raise OnchipError(f"--dtype {name}: use fp32, bf16, fp16 or fp64")
    return getattr(torch, DTYPES[name.lower()])


def _captured(model: str, dtype: str | None, batch: int | None) -> Any:
    """A captured MODEL."""
    from onchip.capture import capture
    from onchip.models import resolve

    found = resolve(model, batch=batch, dtype=_dtype(dtype))
    return capture(found.module, found.example_inputs)


def _gpu(device: str) -> Any:
    """The GPU of that name, for which kernels can be compiled here; an error without Triton."""
    from onchip.backends.triton.build import triton_version
    from onchip.report.preview import gpu_named

    gpu = gpu_named(device)
    triton_version()
    return gpu


def _previews(captured: Any, device: str) -> Any:
    """What a captured model's kernels would be on a GPU that need not be here."""
    from onchip.algebra import simplify
    from onchip.analysis.roofline import datasheet
    from onchip.report.preview import preview

    with _progress() as step:
        return preview(simplify(captured), _gpu(device), datasheet(device), step)


def _print_previews(
    model: str, out: Path | None, device: str, dtype: str | None, batch: int | None
) -> None:
    """The sources of a model's kernels for a GPU, then a table of what they need of it."""
    from onchip.report.text import preview_view

    _gpu(device)  # before the model is loaded
    found = _previews(_captured(model, dtype, batch), device)
    for p in found:
        if p.text and out is None:
            typer.echo(f"# ---- {p.row.name}\n{p.text}")
        elif p.text and out is not None:
            typer.echo(_write_source(out, p.row.name, p.text))
    _print(preview_view(found, device))


def _ceilings(device: str | None) -> Any:
    """Data-sheet ceilings of a named device, or measured ones of this machine."""
    import torch

    from onchip.analysis.roofline import datasheet
    from onchip.planning.machine import measure

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return measure(device) if device.partition(":")[0] in ("cpu", "cuda") else datasheet(device)


def _print(what: RenderableType) -> None:
    """To stdout, as wide as the terminal; 120 columns into a file or a pipe."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(what)


@contextmanager
def _progress() -> Iterator[Step]:
    """A display on stderr that leaves nothing behind; silent when stderr is no terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as p:
        task = p.add_task("starting", total=None)

        def step(what: str, done: int = 0, total: int = 0) -> None:
            p.update(task, description=what, completed=done, total=total or None)

        yield step


LONGEST_NAME = 80  # of a file; a number stands in front, so cut ones still differ


def _write_source(folder: Path, name: str, source: str) -> Path:
    suffix = ".py" if "@triton.jit" in source else ".cu" if "__global__" in source else ".cpp"
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
    path = folder / f"{safe[:LONGEST_NAME]}{suffix}"
    _write(path, source)
    return path


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OnchipError(f"{path} can't be written: {error.strerror}") from error
