"""On a GPU: compiled programs behave as their models do. `PYTHONPATH=src python
bench/gpu/runtime_check.py [PATTERN]` prints one line a check; the exit code says whether all held.

Each check compares with eager mode on the same inputs; where it matters, with and without CUDA
graphs, across streams, threads, changed weights and results that are kept.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn

import onchip
from onchip.capture.capture import as_module
from onchip.planning.forms import library_plan
from onchip.planning.plan import Plan
from onchip.planning.recording import Recording, Streams, record
from onchip.report.report import Report
from onchip.runtime import branched, executable, graphs
from onchip.runtime.branches import branches_of
from onchip.runtime.program import Program
from onchip.runtime.specialisation import Specialisation
from onchip.runtime.weights import Weights
from onchip.settings import Settings

DEVICE = os.environ.get("ONCHIP_CHECK_DEVICE", "cuda")  # cpu: the checks without streams
FORMS = [Settings(cuda_graph="off", budget_s=20), Settings(budget_s=20)]
TOLERANCE = {torch.float32: 3e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(32), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(64, 128), nn.Linear(128, 64), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x + self.b(self.drop(nn.functional.gelu(self.a(x)))), -1)


class Running(nn.Module):
    """Batch norm in training: each call writes the running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.bn(x))


class Many(nn.Module):
    """Small operators, one after the other: what launches cost, and aliases among the results."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x
        for _ in range(6):
            z = torch.cumsum(torch.sin(z + y), 0)
        w = z.sort(-1).values
        return w, w[1:], x, z * 2


class Writes(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2).add_(y)
        return torch.cumsum(x, 0) + y


class Inception(nn.Module):
    """Three branches that join, twice."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        n = channels
        self.first = nn.Conv2d(n, n, 3, padding=1)
        self.one = nn.ModuleList(nn.Conv2d(n, n // 4, 1) for _ in range(2))
        self.three = nn.ModuleList(nn.Conv2d(n, n // 2, 3, padding=1) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Conv2d(n, n // 4, 1) for _ in range(2))
        self.five = nn.ModuleList(nn.Conv2d(n // 4, n // 4, 5, padding=2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        for one, three, narrow, five in zip(
            self.one, self.three, self.narrow, self.five, strict=True
        ):
            parts = (one(x), three(x), five(torch.relu(narrow(x))))
            x = torch.relu(torch.cat(parts, 1))
        return x


class Heads(nn.Module):
    """Three products of one input, and attention."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Reused(nn.Module):
    """Results and views of them that one branch reads slowly while another goes on allocating."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.cumsum(x, 0)
        b = torch.cumsum(a, 1)
        c, side, part = torch.sin(b), torch.sort(a, 0).values, torch.sort(b[1:], 1).values
        for k in range(12):
            c = torch.cumsum(torch.tanh(c), k % 2)
        return c, torch.cumsum(side, 0), part


class WritingBranch(nn.Module):
    """One branch writes in place: to a copy, to the input and to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine = torch.cumsum(x, 0)
        other = torch.sort(x, 1).values
        mine[:, 1:].mul_(2).add_(1)
        self.total.add_(other.sum(0))
        x.mul_(0.5)
        return torch.relu(mine) + torch.cumsum(other, 1) + x


@contextlib.contextmanager
def forced() -> Iterator[None]:
    """Branches run at once, and everything as graphs, whether that is faster or not."""
    least, graphs.LEAST_GAIN = graphs.LEAST_GAIN, -1e9
    try:
        yield
    finally:
        graphs.LEAST_GAIN = least


def at_once(program: Program, settings: Settings) -> None:
    """Assert that the program was compiled with branches at once."""
    cover = program.graph_coverage
    eager = program.compiled[-1].outcome.form == "eager"  # then the line says so
    if settings.cuda_graph == "auto" and DEVICE != "cpu" and not eager:
        assert cover is not None
        assert cover.graphed, cover
        assert (cover.branches or 1) > 1, cover


def wait() -> None:
    if DEVICE != "cpu":
        torch.cuda.synchronize()


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.stride() == want.stride(), (got.stride(), want.stride())
    assert got.dtype is want.dtype
    assert got.device == want.device
    a, b = got.double(), want.double()
    error = float((a - b).norm() / b.norm().clamp_min(1e-30))
    assert error < TOLERANCE.get(want.dtype, 1e-6), f"relative error {error:.1e}"


def same(got: object, want: object) -> None:
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        near(got, want)
        return
    assert isinstance(got, tuple)
    assert isinstance(want, tuple)
    for a, b in zip(got, want, strict=True):
        same(a, b)


def compiled(model: nn.Module, args: tuple[torch.Tensor, ...], settings: Settings) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return onchip.compile(model, args, settings=settings)


def about(program: Program) -> str:
    cover = program.graph_coverage
    form = program.compiled[-1].outcome.form if program.compiled else "eager"
    return f"{form}, {program.launches} launches, {cover.text if cover else 'no program'}"


# ---- the checks: each returns what its line says -----------------------------------------------


def conv_net(settings: Settings) -> str:
    model = ConvNet().eval().to(DEVICE)
    x = torch.randn(4, 3, 32, 32, device=DEVICE)
    program = compiled(model, (x,), settings)
    for _ in range(5):
        same(program(x), model(x))
        other = torch.randn_like(x)
        same(program(other), model(other))
    return about(program)


def conv_net_half(settings: Settings) -> str:
    model = ConvNet().eval().to(DEVICE, torch.bfloat16)
    x = torch.randn(8, 3, 64, 64, device=DEVICE, dtype=torch.bfloat16)
    program = compiled(model, (x,), settings)
    for _ in range(3):
        same(program(x), model(x))
    return about(program)


def mlp_eval(settings: Settings) -> str:
    model = Mlp().eval().to(DEVICE)
    x = torch.randn(32, 64, device=DEVICE)
    program = compiled(model, (x,), settings)
    for _ in range(4):
        same(program(x), model(x))
    return about(program)


def mlp_dropout(settings: Settings) -> str:
    """In training, the same random numbers as eager mode draws."""
    model = Mlp().train().to(DEVICE)
    x = torch.randn(32, 64, device=DEVICE)
    program = compiled(model, (x,), settings)
    for seed in range(3):
        torch.manual_seed(seed)
        want = model(x)
        torch.manual_seed(seed)
        same(program(x), want)
    cover = program.graph_coverage
    if settings.cuda_graph == "auto" and cover is not None:
        assert any("random" in b.reason for b in cover.blockers), cover
    return about(program)


def batch_norm_training(settings: Settings) -> str:
    model = Running().train().to(DEVICE)
    mirror = copy.deepcopy(model)
    x = torch.randn(4, 8, 16, 16, device=DEVICE)
    program = compiled(model, (x,), settings)
    same(model.bn.running_mean, mirror.bn.running_mean)  # compiling has changed nothing
    for k in range(6):
        given = x if k % 2 else torch.randn_like(x)
        same(program(given), mirror(given))
        for a, b in zip(model.buffers(), mirror.buffers(), strict=True):
            near(a, b)
    model.eval()
    mirror.eval()
    same(program(x), mirror(x))  # folded anew from what training wrote
    return about(program)


def two_shapes(settings: Settings) -> str:
    model = Mlp().eval().to(DEVICE)
    xs = [torch.randn(n, 64, device=DEVICE) for n in (16, 33)]
    program = compiled(model, (xs[0],), settings)
    for _ in range(3):
        for x in xs:
            same(program(x), model(x))
    return about(program)


def kept_results(settings: Settings) -> str:
    model = Many().to(DEVICE)
    x, y = torch.randn(2, 64, 64, device=DEVICE)
    program = compiled(model, (x, y), settings)
    kept, wanted = [], []
    for k in range(12):
        given = x if k % 3 else torch.randn_like(x)
        kept.append(program(given, y))
        wanted.append([t.clone() for t in model(given, y)])
        assert kept[-1][2] is given
        assert kept[-1][1].data_ptr() == kept[-1][0][1:].data_ptr()
        if k % 4 == 3:
            del kept[0], wanted[0]
            gc.collect()
        for got, want in zip(kept, wanted, strict=True):
            same(tuple(got), tuple(want))
    return about(program)


def written_inputs(settings: Settings) -> str:
    model = Writes().to(DEVICE)
    x, y = torch.randn(2, 128, device=DEVICE)
    program = compiled(model, (x.clone(), y), settings)
    fixed = x.clone()
    for k in range(6):
        mine = fixed if k % 2 else torch.randn_like(x)
        other = mine.clone()
        version = mine._version
        same(program(mine, y), model(other, y))
        near(mine, other)
        assert mine._version > version, "a write that PyTorch does not know of"
    return about(program)


def changed_weights(settings: Settings) -> str:
    model = ConvNet().eval().to(DEVICE)
    x = torch.randn(4, 3, 32, 32, device=DEVICE)
    first = model.body[0]
    assert isinstance(first, nn.Conv2d)
    program = compiled(model, (x,), settings)
    for step in range(4):
        for _ in range(2):
            same(program(x), model(x))
        with torch.no_grad():
            if step % 2:
                for p in model.parameters():
                    p.mul_(0.9)
            else:
                model.head.weight = nn.Parameter(model.head.weight * 1.1)
                first.weight.add_(0.01)
    first.weight.data.mul_(2.0)  # uncounted: takes refresh()
    program.refresh()
    same(program(x), model(x))
    return about(program)


def askew_inputs(settings: Settings) -> str:
    """Views whose first element is not at a multiple of 16 bytes, strided and expanded ones."""
    model = Mlp().eval().to(DEVICE)
    flat = torch.randn(32 * 64 + 1, device=DEVICE)
    forms = [
        flat[1:].view(32, 64),
        flat[:-1].view(64, 32).t(),
        torch.randn(1, 64, device=DEVICE).expand(32, 64),
    ]
    program = compiled(model, (forms[0],), settings)
    for x in (*forms, *forms):
        same(program(x), model(x))
    aligned = flat[:-1].view(32, 64)
    same(program(aligned), model(aligned))
    return about(program)


def streams(settings: Settings) -> str:
    """Calls on several streams at once give each its own result."""
    model = Many().to(DEVICE)
    y = torch.randn(256, 256, device=DEVICE)
    program = compiled(model, (y, y.clone()), settings)
    own = [torch.cuda.Stream() for _ in range(3)]
    inputs = [torch.randn(256, 256, device=DEVICE) for _ in own]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[] for _ in own]
    for _ in range(8):
        for s, x, mine in zip(own, inputs, found, strict=True):
            with torch.cuda.stream(s):
                mine.append(program(x, y)[3])
    torch.cuda.synchronize()
    for x, mine in zip(inputs, found, strict=True):
        want = model(x, y)[3]
        for got in mine:
            near(got, want)
    return about(program)


def threads(settings: Settings) -> str:
    model = ConvNet().eval().to(DEVICE)
    x = torch.randn(4, 3, 32, 32, device=DEVICE)
    program = compiled(model, (x,), settings)

    def work(n: int) -> None:
        # drawn on the CPU: PyTorch's generator of the GPU raises an error in a thread that draws
        # while another one records a graph
        draw = torch.Generator().manual_seed(n)
        for _ in range(20):
            mine = torch.randn(4, 3, 32, 32, generator=draw).to(DEVICE)
            same(program(mine), model(mine))

    on_threads(work)
    return about(program)


def on_threads(work: Callable[[int], None], count: int = 3) -> None:
    """Runs `work(n)` on so many threads at a time, each on a stream of its own."""
    failed: list[str] = []

    def run(n: int) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                work(n)
        except Exception:
            failed.append(traceback.format_exc(limit=3))

    started = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for t in started:
        t.start()
    for t in started:
        t.join()
    assert not failed, failed[0]


def callers_own_graph(settings: Settings) -> str:
    """A program inside a CUDA graph that the caller records."""
    model = ConvNet().eval().to(DEVICE)
    x = torch.randn(4, 3, 32, 32, device=DEVICE)
    program = compiled(model, (x,), settings)
    for _ in range(3):
        program(x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = program(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        want = model(x)
        near(out, want)
        same(program(x), want)
    return about(program)


def branches_join(settings: Settings) -> str:
    """Results are eager's under repeated calls, also while they are kept."""
    model = Inception().eval().to(DEVICE)
    x = torch.randn(1, 32, 28, 28, device=DEVICE)
    with forced():
        program = compiled(model, (x,), settings)
        at_once(program, settings)
        kept, wanted = [], []
        for k in range(40):
            given = x.normal_() if k % 3 else torch.randn_like(x)
            kept.append(program(given))
            wanted.append(model(given))
            del kept[:-3], wanted[:-3]
            for got, want in zip(kept, wanted, strict=True):
                same(got, want)
    return about(program)


def branches_write(settings: Settings) -> str:
    model = WritingBranch().to(DEVICE)
    mirror = copy.deepcopy(model)
    x = torch.randn(256, 64, device=DEVICE)
    with forced():
        program = compiled(model, (x.clone(),), settings)
        at_once(program, settings)
        for k in range(20):
            mine = x if k % 2 else torch.randn_like(x)
            other = mine.clone()
            same(program(mine), mirror(other))
            near(mine, other)
            near(model.total, mirror.total)
    return about(program)


def branches_on_threads(settings: Settings) -> str:
    """Threads on streams of their own, which record and replay side by side."""
    model = Inception().eval().to(DEVICE)
    inputs = [torch.randn(1, 32, n, n, device=DEVICE) for n in (28, 28, 24)]
    wanted = [model(x) for x in inputs]
    with forced():
        program = compiled(model, (inputs[0],), settings)
        near(program(inputs[2]), wanted[2])
        at_once(program, settings)

        def work(n: int) -> None:
            for _ in range(60):
                near(program(inputs[n]), wanted[n])

        wait()
        on_threads(work)
    return about(program)


def branches_that_fail(settings: Settings) -> str:
    """A recording that breaks off on another stream than its first leaves nothing behind."""
    if settings.cuda_graph == "off":
        return "see the other"
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(1 << 16, device=DEVICE)
    x.sum().item()
    before = torch.cuda.current_stream()

    def run(last: Callable[[torch.Tensor], object]) -> torch.Tensor:
        with Streams(3, device) as streams:
            start = streams.mark()
            streams.go(1, start)
            y = x * 2
            streams.go(2, start)
            z = x * 3
            streams.go(1)
            last(y)
            done = streams.mark()
            streams.go(2, done)
            total = y + z
            streams.go(0, streams.mark())
            return total

    def breaks_off(y: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    for last in (torch.Tensor.item, breaks_off):
        try:
            record(lambda last=last: run(lambda y: last(y.sum())), device)
        except RuntimeError:
            pass
        else:
            raise AssertionError("it can't be recorded")
        assert torch.cuda.current_stream() == before
        assert not torch.cuda.is_current_stream_capturing()
        mine = record(lambda: run(lambda y: y), device)
        x.normal_()
        mine.replay()
        near(mine.result, x * 5)
    return "recorded afterwards"


def branches_bitwise(settings: Settings) -> str:
    """Recorded with branches at once, a program gives the bits that it gives in a row: with
    kernels where they were chosen, and with the library's calls alone."""
    if settings.cuda_graph == "off":
        return "see the other"
    told = []
    for model, shape, dtype in (
        (Inception(), (1, 32, 28, 28), torch.float32),
        (Inception(128), (2, 128, 56, 56), torch.bfloat16),
        (Heads(), (2, 128, 256), torch.float32),
        (Heads(1024), (1, 512, 1024), torch.bfloat16),
        (Reused(), (1024, 1024), torch.float32),
    ):
        module = model.eval().to(DEVICE, dtype)
        x = torch.randn(shape, device=DEVICE, dtype=dtype)
        entry = compiled(module, (x,), settings).latest
        assert entry is not None
        for plan in (entry.plan, library_plan(entry.captured)):
            told.append(f"{type(model).__name__} {compare_forms(entry, plan, x)}")
    return "; ".join(told)


def compare_forms(entry: Specialisation, plan: Plan, x: torch.Tensor) -> str:
    """Raises AssertionError where the two differ in a bit; what each takes, in a row first."""
    found = branches_of(plan)
    forms = [executable.write(entry.captured, plan, entry.device)]
    if found.count > 1:
        forms.append(branched.write(entry.captured, plan, entry.device, found))
    now = Weights(entry.captured.slots, entry.captured.prepare, forms[0].derived).current()
    recordings: list[Recording] = []
    taken = []
    for form in forms:
        arena = form.arenas.new() if form.arenas is not None else None

        def run(form=form, arena=arena):
            given = ([x], now.tensors, now.pointers, now.derived, now.derived_pointers, arena)
            if form.streams == 1:
                return form.run(*given)
            with Streams(form.streams, entry.device) as streams:
                return form.run(*given, streams)

        if form.streams == 1:
            run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        recordings.append(record(run, entry.device))
        taken.append(torch.cuda.memory_reserved() - before)
    for _ in range(30 if found.count > 1 else 0):
        x.normal_()
        for r in recordings:
            r.replay()
        for a, b in zip(*(r.result for r in recordings), strict=True):
            assert torch.equal(a, b), f"differs by {(a.double() - b.double()).abs().max():.1e}"
    sizes = [f.arenas.nbytes >> 10 if f.arenas is not None else 0 for f in forms]
    times = graphs._medians([r.replay for r in recordings], entry.device, 4)
    return (
        f"{found.count} streams, {' -> '.join(f'{t:.0f}' for t in times)} µs, "
        f"arena {' -> '.join(map(str, sizes))} KiB, "
        f"pool {' -> '.join(str(n >> 20) for n in taken)} MiB"
    )


def scalar_on_cpu(settings: Settings) -> str:
    """A number as a tensor on the CPU, as eager mode allows."""
    factor = torch.tensor(1.5)
    model = as_module(lambda x: torch.relu(x * factor + 1) * 2)
    x = torch.randn(64, 64, device=DEVICE)
    program = compiled(model, (x,), settings)
    same(program(x), model(x))
    return about(program)


def waits_for_the_gpu(settings: Settings) -> str:
    """An operator that can't be recorded is named."""
    model = as_module(lambda x: torch.linalg.inv(x + 4 * torch.eye(16, device=DEVICE)).relu())
    x = torch.randn(8, 16, 16, device=DEVICE)
    program = compiled(model, (x,), settings)
    for _ in range(3):
        same(program(x), model(x))
    torch.manual_seed(1)
    torch.randn(3, device=DEVICE)  # the generator is well after a recording that failed
    return about(program)


def latency(settings: Settings) -> str:
    """Not slower than eager, by the clock of a caller; figures only, no assertion."""
    model = ConvNet().eval().to(DEVICE, torch.bfloat16)
    x = torch.randn(1, 3, 64, 64, device=DEVICE, dtype=torch.bfloat16)
    program = compiled(model, (x,), settings)
    times = []
    for call in (model, program):
        for _ in range(20):
            call(x)
        wait()
        start = time.perf_counter()
        for _ in range(200):
            call(x)
        wait()
        times.append((time.perf_counter() - start) / 200 * 1e6)
    return f"eager {times[0]:.0f} µs, onchip {times[1]:.0f} µs a call; {about(program)}"


def report(settings: Settings) -> str:
    _, found = onchip.optimize("pipeline:conv-relu-bn-pool", device=DEVICE, settings=settings)
    assert Report.from_json(found.to_json()) == found
    assert found.cuda_graph.graphed is not None
    figures = {k: round(v, 1) for k, v in found.baselines.items() if v is not None}
    before, after = found.unfused.latency_us, found.fused.latency_us
    return f"{found.device}: {before:.0f} -> {after:.0f} µs, {figures}"


CHECKS: list[Callable[[Settings], str]] = [
    conv_net, conv_net_half, mlp_eval, mlp_dropout, batch_norm_training, two_shapes, kept_results,
    written_inputs, changed_weights, askew_inputs, streams, threads, callers_own_graph,
    branches_join, branches_write, branches_on_threads, branches_that_fail, branches_bitwise,
    scalar_on_cpu, waits_for_the_gpu, latency, report,
]  # fmt: skip


def main() -> int:
    wanted = re.compile(sys.argv[1] if len(sys.argv) > 1 else "")
    failures = 0
    for check in CHECKS:
        for settings in FORMS:
            name = f"{check.__name__}, graphs {settings.cuda_graph}"
            if not wanted.search(name):
                continue
            torch.manual_seed(0)
            start = time.perf_counter()
            try:
                with torch.no_grad():
                    text, word = check(settings), "ok"
                    wait()
            except Exception as error:
                failures, word = failures + 1, "FAILED"
                place = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} "
                text += f"({place.filename.rpartition('/')[2]}:{place.lineno})"
            print(f"{word:6} {name}: {text} [{time.perf_counter() - start:.1f} s]", flush=True)
    print(f"{failures} failed")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
