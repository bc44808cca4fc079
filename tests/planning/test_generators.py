"""Code generators behind the planner: whole programs of Triton kernels (under its interpreter),
what a verdict depends on, how exact products must be, and what is done with kernels that fail."""

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onchip.backends.library import aten
from onchip.backends.nvidia.source import Workspace
from onchip.capture import capture
from onchip.errors import CompilerError, DeviceError, InputError
from onchip.fusion.machine import GPUS, Machine
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.region import region_of
from onchip.fusion.signature import EXACT, signature
from onchip.planning import decide, planner, timing, units
from onchip.planning.candidates import Candidate, Context
from onchip.planning.derive import to_tf32
from onchip.planning.generators import generator_for
from onchip.planning.generators.cpp import CppGenerator
from onchip.planning.generators.triton import TritonGenerator, for_gpu
from onchip.planning.plan import KernelStep
from onchip.planning.precision import precisions, tf32_allowed
from onchip.planning.tuner import Verdict, tune
from onchip.planning.values import run_eagerly
from onchip.runtime.guards import ambient_key
from onchip.runtime.program import Program
from onchip.settings import Settings

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the triton package is not installed (torch brings it on Linux)",
)


# ---- whole programs, under Triton's interpreter -------------------------------------------------


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What generators_child.py found out."""
    folder = tmp_path_factory.mktemp("generators")
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "ONCHIP_CACHE": str(folder), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.planning.generators_child", str(folder / "told.json")],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "told.json").read_text())


# The operators of one kernel: of the whole program but for the batch norm's count of its calls.
ONE_KERNEL = {
    "softmax": ["add", "mul", "softmax", "relu", "mul"],
    "broadcast": ["add", "mul", "softmax", "relu", "mul"],
    "bfloat16": ["add", "mul", "softmax", "relu", "mul"],
    "residual": ["add", "layer_norm"],
    "pipeline": ["conv2d", "relu", "_native_batch_norm_legit_no_training", "max_pool2d"],
    "channels last": ["conv2d", "relu", "_native_batch_norm_legit_no_training", "max_pool2d"],
    "batch norm": ["_native_batch_norm_legit_functional"],
    "transposed": ["t", "mul", "slice", "add"],
    "columns": ["mul", "sum", "amax", "sub"],
    "empty": ["relu", "add"],
}


@needs_triton
def test_programs_of_triton_kernels_agree_with_float64(told):
    for name, found in told["first"].items():
        limit = 2e-2 if name == "bfloat16" else 2e-6
        assert max(found["errors"]) < limit, (name, found["errors"])
        assert found["generator"] == "triton"
        assert [r for some in found["refused"] for r in some] == [], name
        assert found["form"] == "fused"
        assert "triton" in found["backends"]
        assert found["sources"]
        for text in found["sources"]:
            assert "@triton.jit" in text


@needs_triton
@pytest.mark.parametrize("name", ONE_KERNEL)
def test_a_pipeline_is_one_triton_kernel(told, name):
    assert ["KernelStep", *ONE_KERNEL[name]] in told["first"][name]["steps"]


@needs_triton
def test_kernels_get_derived_weights_and_workspaces(told):
    assert told["first"]["pipeline"]["derived"] > 0  # the batch norm's scale
    assert told["first"]["batch norm"]["workspace"] > 0  # partial statistics
    kinds = [kind for kind, *_ in told["first"]["mlp"]["steps"]]
    assert kinds == ["KernelStep", "KernelStep"]


@needs_triton
def test_three_tf32_products_stand_in_the_ledger(told):
    """PyTorch allows TF32 in convolutions, and not in matrix products, if nothing is set."""
    assert told["first"]["mlp"]["ledger"].count("tf32x3") == 2
    assert "tf32x3" not in told["first"]["pipeline"]["ledger"]


@needs_triton
def test_under_the_interpreter_nothing_is_timed_and_verdicts_are_kept(told):
    assert {t for f in told["first"].values() for t in f["times"]} == {None}
    for name, steps in told["again"].items():
        assert steps == told["first"][name]["steps"]


# ---- which generator ----------------------------------------------------------------------------


def test_the_device_decides_which_generator_writes(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert isinstance(generator_for(CPU, Settings()), CppGenerator)
    with pytest.raises(InputError, match="TRITON_INTERPRET=1"):
        generator_for(CPU, Settings(generator="triton"))
    with pytest.raises(InputError, match='use generator="auto"'):
        generator_for(torch.device("cuda"), Settings(generator="cpp"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = generator_for(CPU, Settings(generator="triton"))
    assert isinstance(found, TritonGenerator)
    assert found.interpret
    assert not found.timed


def triton_for(name="h200", allowed=(False, True), interpret=False):
    return TritonGenerator(Machine(1, 16, GPUS[name]), CPU, allowed, interpret)


def test_a_verdict_is_known_by_everything_that_it_depends_on():
    different = [
        CppGenerator(Machine(2, 16)),
        CppGenerator(Machine(2, 16), fewer_products=False),
        CppGenerator(Machine(3, 16)),
        triton_for(),
        triton_for("a100"),
        triton_for(allowed=(True, True)),
        triton_for(allowed=(False, False)),
        triton_for(interpret=True),
    ]
    keys = {units._key("t0=relu(t1)", g) for g in different}
    assert len(keys) == len(different)
    assert units._key("t0=relu(t1)", triton_for()) in keys
    assert units._key("t0=relu(t2)", triton_for()) not in keys


# ---- how exact products are ---------------------------------------------------------------------


def whole_region(model, *inputs):
    """The region of all operators, and every tensor's value."""
    captured = capture(model, inputs)
    graph = captured.graph
    position = {n: i for i, n in enumerate(graph.nodes)}
    region = region_of(graph.nodes, graph, frozenset(graph.constants), position)
    return region, run_eagerly(captured, list(inputs), {})


MATRIX = lambda: whole_region(nn.Linear(5, 7), torch.randn(3, 5))[0]  # noqa: E731
CONVOLUTION = lambda: whole_region(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 5, 5))[0]  # noqa: E731


@pytest.mark.parametrize(
    ("region", "matrix", "convolution", "expected"),
    [
        (MATRIX, False, True, ("tf32x3", "ieee")),
        (MATRIX, True, False, ("tf32",)),
        (CONVOLUTION, False, True, ("tf32",)),
        (CONVOLUTION, True, False, ("tf32x3",)),
    ],
)
def test_products_are_as_exact_as_pytorch_is_told_to_be(region, matrix, convolution, expected):
    assert precisions(region(), (matrix, convolution)) == expected


def test_without_a_float32_product_there_is_no_choice():
    half = whole_region(nn.Linear(5, 7).bfloat16(), torch.randn(3, 5).bfloat16())[0]
    pointwise = whole_region(lambda x: torch.relu(x) * 2, torch.randn(3, 5))[0]
    assert precisions(half, (False, False)) == precisions(pointwise, (False, False)) == ("",)


def test_both_kinds_of_products_are_as_exact_as_the_stricter():
    def model(x, w, m):
        return F.conv2d(x, w).flatten(1) @ m

    inputs = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3), torch.randn(27, 4)
    region = whole_region(model, *inputs)[0]
    assert precisions(region, (False, True)) == ("tf32x3", "ieee")
    assert precisions(region, (True, True)) == ("tf32",)


def test_a_convolution_that_the_library_computes_in_float32_is_as_exact():
    region = CONVOLUTION()
    assert precisions(region, (False, True)) == ("tf32",)
    before = signature(region, {}, frozenset())
    region.nodes[-1].results[0].tag[EXACT] = True
    assert precisions(region, (False, True)) == ("tf32x3",)
    assert signature(region, {}, frozenset()) != before  # another verdict


def test_such_a_convolution_is_float32_in_any_layout(monkeypatch):
    def conv2d(x, *_):
        flags.append(tf32_allowed()[1])
        if x is None:
            raise RuntimeError("no memory")
        return x

    flags: list[bool] = []
    (node,) = CONVOLUTION().nodes
    monkeypatch.setattr(aten, "overload", lambda target: conv2d)
    assert aten.operator(node)(1) == 1
    node.results[0].tag[EXACT] = True
    assert aten.operator(node)(2) == 2
    with pytest.raises(RuntimeError):
        aten.operator(node)(None)
    assert flags == [True, False, False]
    assert tf32_allowed() == (False, True)


@needs_triton
def test_operands_are_rounded_to_tf32_constants_beforehand():
    conv = nn.Conv2d(16, 32, 3)
    _, made = planned_for_h200(conv, torch.randn(2, 16, 20, 20))
    texts = [c.source.text for c in made]
    assert all("tl.dot(to_tf32(x" in t and t.count("to_tf32(") == 2 for t in texts)  # and its def
    for c in made:
        (t,) = c.source.rounded
        assert t.name == "weight"
        got = c.derived[-1].compute([conv.weight])
        assert torch.equal(got, to_tf32(conv.weight.detach().clone()))
        assert got.stride() == c.strides[t]


@needs_triton
def test_a_constant_that_is_read_twice_is_rounded_in_the_kernel():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16, 1, 1))

        def forward(self, x):
            return F.conv2d(x, self.weight) * self.weight

    _, made = planned_for_h200(Twice(), torch.randn(16, 16, 20, 20))
    found = [c for c in made if isinstance(c, Candidate)]
    assert found
    for c in found:
        assert not c.source.rounded
        assert c.source.text.count("to_tf32(") == 3


@needs_triton
def test_a_product_is_written_in_each_precision_that_is_allowed():
    p, _ = planned_for_h200(nn.Linear(64, 48), torch.randn(32, 64))
    assert {v.options.precision for v in p} == {"tf32x3", "ieee"}


def planned_for_h200(model, *inputs):
    """The variants and candidates of a whole model on an H200 that is not here."""
    from onchip.planning.candidates import Context

    region, values = whole_region(model, *inputs)
    strides = {t: x.stride() for t, x in values.tensors.items()}
    constants = frozenset(t for t in region.inputs if t.name in ("weight", "bias"))
    context = Context(strides, constants, frozenset(values.tensors))
    generator = for_gpu(GPUS["h200"])
    found = generator.variants(region, context)
    assert not isinstance(found, Refusal), found
    return found, [generator.write(region, v, context) for v in found]


@needs_triton
def test_candidates_for_a_gpu_that_is_not_here_are_written():
    ways, made = planned_for_h200(nn.Linear(64, 48), torch.randn(32, 64))
    assert len(ways) > 1
    for way, c in zip(ways, made, strict=True):
        assert isinstance(c, Candidate), c
        assert (c.precision, c.choice) == (way.options.precision, way.label)
        assert "def linear(" in c.source.text


def test_flags_for_precision_are_pytorchs(monkeypatch):
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.backends.cudnn.conv.fp32_precision = "tf32"
        assert tf32_allowed() == (False, True)
        assert ambient_key() == ()
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert tf32_allowed() == (True, True)
        other = ambient_key()
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        assert tf32_allowed() == (True, False)
        assert len({(), other, ambient_key()}) == 3
    finally:
        torch.backends.cuda.matmul.fp32_precision = before[0]
        torch.backends.cudnn.conv.fp32_precision = before[1]


# ---- kernels that fail --------------------------------------------------------------------------


@dataclass
class Source:
    outputs: tuple
    text: str = ""
    inputs: tuple = ()
    laid_out: dict = field(default_factory=dict)


@dataclass
class Copying:
    """A kernel that writes `result` (its first `parts` hundredths) to its output."""

    result: torch.Tensor
    parts: int = 100
    before: object = lambda pointers: None

    def run(self, pointers):
        self.before(pointers)
        nbytes = self.result.nbytes * self.parts // 100
        ctypes.memmove(pointers[0], self.result.data_ptr(), nbytes)
        return 0


def fail(_):
    raise DeviceError("launching kernel failed: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")


def write_ones(pointers):
    ctypes.memset(pointers[1], 1, 8)


@pytest.fixture
def add_one():
    region, values = whole_region(lambda x: x + 1.0, torch.randn(10, 20))
    (t,) = region.outputs
    candidate = Candidate(region, Source((t,)), frozenset(), "one", (), (), {})
    return region, values, t, candidate


def verdict_of(add_one, kernel, clock=None, **changes):
    region, values, _, candidate = add_one
    candidate = replace(candidate, **changes)
    return tune(region, {3: candidate}, {3: kernel}, (), frozenset(), values, 0.01, clock)


@pytest.mark.parametrize(
    ("make", "changes", "why"),
    [
        (lambda y: CompilerError("ptxas died"), {}, "ptxas died"),
        (lambda y: Refusal(Rule.SCRATCH, "h200", "9 bytes"), {}, "9 bytes"),
        (lambda y: Copying(y, before=fail), {}, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
        (lambda y: Copying(y, parts=99), {}, "NaN or inf at other places"),
        (lambda y: Copying(y * 1.001), {}, "relative error 1.0e-03"),
        (
            lambda y: Copying(y, before=write_ones),
            {"workspace": (Workspace(16, zeroed=True),)},
            "other values than zeros",
        ),
    ],
)
def test_a_kernel_that_fails_is_refused_with_the_reason(add_one, make, changes, why):
    _, values, t, _ = add_one
    found = verdict_of(add_one, make(values[t]), **changes)
    assert (found.kind, found.kernel_us) == ("library", None)
    assert why in found.refused[0][1]


def test_what_a_kernel_finds_in_its_workspace(add_one):
    _, values, t, _ = add_one
    seen = []
    kernel = Copying(values[t], before=lambda p: seen.extend(map(read, p[1:])))
    spaces = (Workspace(8), Workspace(16, zeroed=True))
    assert verdict_of(add_one, kernel, workspace=spaces).kind == "kernel"
    assert torch.tensor(seen[0]).isnan(), "what nobody wrote is poison"
    assert seen[1] == 0.0


def read(pointer):
    return ctypes.c_float.from_address(pointer).value


def test_tf32_is_compared_with_its_own_tolerance(add_one):
    _, values, t, _ = add_one
    rough = Copying(values[t] * 1.001)
    assert verdict_of(add_one, rough, precision="tf32").kind == "kernel"
    assert verdict_of(add_one, rough, precision="tf32x3").kind == "library"
    assert verdict_of(add_one, Copying(values[t] * 1.01), precision="tf32").kind == "library"


def test_without_a_clock_the_first_correct_kernel_is_chosen(add_one):
    region, values, t, candidate = add_one
    kernels = {n: Copying(values[t], parts=p) for n, p in ((1, 50), (4, 100), (5, 100))}
    candidates = dict.fromkeys(kernels, candidate)
    found = tune(region, candidates, kernels, (), frozenset(), values, 0.01, None)
    assert (found.kind, found.index, found.best_us) == ("kernel", 4, None)
    assert len(found.refused) == 1


# ---- timing -------------------------------------------------------------------------------------


@dataclass
class Told:
    """A clock that is told what each function takes, and counts how often it is asked."""

    seconds: dict
    log: list = field(default_factory=list)

    def ready(self, function):
        self.log.append(("ready", function))

        def timed():
            self.log.append(("timed", function))
            return self.seconds[function]

        return timed


def test_functions_are_timed_in_turn_by_the_clock_given():
    clock = Told({"a": 1.0, "b": 2.0, "c": 1.2})
    assert timing.fastest(["a", "b", "c"], 0.0, clock=clock) == [1.0, 2.0, 1.2]
    assert clock.log[:3] == [("ready", x) for x in "abc"]
    rounds = [x for what, x in clock.log if what == "timed"]
    assert rounds[:9] == ["a", "b", "c"] * 3
    assert set(rounds[9:]) == {"a", "c"}, "what is clearly slower is not timed again"
    assert len(clock.log) == 3 + len(rounds), "each function is made ready once"


def test_the_clock_of_a_device():
    assert timing.clock_for(CPU) is timing.HOST
    assert isinstance(timing.clock_for(torch.device("cuda", 1)), timing.DeviceClock)


# ---- a group that can't be written --------------------------------------------------------------


@pytest.mark.parametrize("when", ["written", "tried"])
def test_a_group_of_which_no_kernel_runs_is_cut(tmp_path, monkeypatch, when):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    original = CppGenerator.write

    def refusing(self, region, *rest):
        if len(region.nodes) > 2 and when == "written":
            return Refusal(Rule.UNSUPPORTED_EXPRESSION, region.name, "more than two operators")
        return original(self, region, *rest)

    def tuned(region, candidates, *_):
        if len(region.nodes) > 2:
            return Verdict("library", refused=(("tile 9", "more than two operators"),))
        return Verdict("kernel", next(iter(candidates)))

    monkeypatch.setattr(CppGenerator, "write", refusing)
    monkeypatch.setattr(decide, "tune", tuned)

    class Chain(nn.Module):
        def forward(self, x):
            return torch.tanh(torch.sigmoid(torch.relu(x) + 1) * 3)

    model = Chain()
    x = torch.randn(7, 33)
    captured = capture(model, (x,))

    def run():
        planned = planner.plan(captured, [x], Settings(budget_s=600.0))
        steps = planned.plan.steps
        assert all(isinstance(s, KernelStep) for s in steps)
        assert sorted(len(s.nodes) for s in steps) in ([1, 2, 2], [1, 1, 1, 2])
        program = Program(model, (x,), {}, lambda *_: (captured, planned.plan), Settings())
        torch.testing.assert_close(program(x), model(x))
        cuts = [d for d in planned.decisions if d.rule == "NOT_WHOLE"]
        assert len(cuts) == len(steps) - 1
        assert all("more than two operators" in d.text for d in cuts)
        return planned

    assert run().decisions == run().decisions


# ---- a known verdict's variant, without others ---------------------------------------------------

MODELS = {
    "winograd and pool": (
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)), (2, 8, 20, 12)
    ),
    "softmax": (nn.Softmax(-1), (40, 300)),
    "linear": (nn.Sequential(nn.Linear(64, 48), nn.GELU()), (70, 64)),
    "streamed": (nn.Sequential(nn.ReLU(), nn.Sigmoid()), (1 << 20, 3)),
    "transposed": (nn.ConvTranspose2d(6, 5, 3, stride=2), (2, 6, 9, 7)),
    "batch statistics": (nn.BatchNorm2d(8).train(), (4, 8, 40, 40)),
    "two results": (lambda x: (torch.relu(x), torch.tanh(x)), (30, 70)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_cpp_variant_is_made_again_from_its_token(name):
    """The same text as among all variants; phases have no token, and are looked for."""
    model, shape = MODELS[name]
    graph = capture(model, (torch.randn(shape),)).graph
    constants = frozenset(graph.constants)
    nodes = [n for n in graph.nodes if not n.opaque]
    region = region_of(nodes, graph, constants, {n: i for i, n in enumerate(graph.nodes)})
    strides = planner.choose_layouts(graph, lambda n: False)
    made = frozenset({*graph.inputs, *constants, *(t for n in graph.nodes for t in n.results)})
    context, generator = Context(strides, constants, made), CppGenerator(Machine(2, 16))
    variants = generator.variants(region, context)
    assert variants
    for v in variants:
        c = generator.write(region, v, context)
        token = json.loads(json.dumps(c.token))
        again = generator.again(region, token, context)
        if v.nest.before:
            assert again is None
            continue
        same = generator.write(region, again, context)
        assert (same.source.text, same.choice, same.token) == (c.source.text, c.choice, c.token)
        assert [d.name for d in same.derived] == [d.name for d in c.derived]
