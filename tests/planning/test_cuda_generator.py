"""The generator that puts the tensor-core engine's kernels beside Triton's, with stand-ins for what
recognises a region, proposes choices and writes the text."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from onchip.backends.cuda.problem import ACC, Config, Line, Problem, Result
from onchip.backends.cuda.source import CudaSource, Pointer
from onchip.backends.cudnn import build as cudnn_plans
from onchip.backends.nvidia.build import Built
from onchip.backends.nvidia.source import TensorMap
from onchip.capture import capture
from onchip.errors import CompilerError, InputError
from onchip.fusion.machine import GPUS
from onchip.fusion.partition import Partitioner
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.region import region_of
from onchip.ir.dtype import DType
from onchip.ir.expr import axis, tensor
from onchip.planning import generators, units
from onchip.planning.candidates import Candidate, Context
from onchip.planning.generators import generator_for
from onchip.planning.generators import triton as triton_generator
from onchip.planning.generators.triton import TritonGenerator
from onchip.planning.values import run_eagerly
from onchip.settings import Settings

H200 = GPUS["h200"]
TEXT = 'extern "C" __global__ void linear(float* a, float* w, float* out) { out[0] = N; }\n'
needs_compilers = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("triton") is None,
    reason="cuda-bindings or triton is not installed: torch for CUDA brings both",
)


class Engine:
    """What the generator asks for, and what it has been asked."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []
        self.refusal: Refusal | None = None
        self.precision = ""
        self.maps: tuple[TensorMap, ...] = ()
        self.configs: list[Config] | Refusal = [
            Config((8, n), 0) for n in (1, 2, 3, 4)
        ]  # fmt: skip

    def problem_of(self, region, strides, constants, precision="tf32") -> Problem | Refusal:
        self.asked.append((region.name, precision, constants))
        if self.refusal is not None:
            return self.refusal
        x, w = region.inputs[:2]
        out = region.outputs[0]
        f, b, p, q = (axis(1) for _ in range(4))
        results = (Result(out, (p, f), ACC, False, True),)
        line = Line(1, 1, 1)
        return Problem(
            "tf32", x, w, 64, (line,), 48, 1, 0, 0, True, 64, 0, f, b, (p,), (q,), ACC, "", results,
            (),
        )  # fmt: skip

    def configurations(self, problem, gpu):
        assert gpu == H200
        return self.configs

    def emit(self, problem, config, gpu, strides, name, comment, late):
        assert gpu == H200
        assert problem.results[0].tensor in strides
        n = config.patch[1]
        if n == 3:
            return Refusal(Rule.SHARED_MEMORY, name, "three is too much")
        w = problem.w
        packed = tensor(
            (1, 2, 48, 32), w.dtype, lambda b, k, f, c: w.padded(0)[f, k * 32 + c], "packed"
        )
        pointers = tuple(Pointer(i) for i in range(3))
        return CudaSource(
            f"// {comment}\n" + TEXT.replace("N", str(n)), name, (*self.maps, *pointers), 1, 32, 0,
            (problem.x, packed), (problem.results[0].tensor,), waits=True,
        )  # fmt: skip


def _is_there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("onchip.backends.cuda."):
            return False
        raise
    return True


@pytest.fixture
def cuda(monkeypatch) -> Iterator[ModuleType]:
    """The module under test. Parts of the engine that are not there get an empty module."""
    parts = [f"onchip.backends.cuda.{name}" for name in ("form", "model", "kernel")]
    missing = [p for p in parts if not _is_there(p)]
    for p in missing:
        monkeypatch.setitem(sys.modules, p, ModuleType(p))
    yield importlib.import_module("onchip.planning.generators.cuda")
    if missing:
        del sys.modules["onchip.planning.generators.cuda"], generators.cuda


@pytest.fixture
def engine(cuda, monkeypatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(cuda.form, "problem_of", made.problem_of, raising=False)
    monkeypatch.setattr(cuda.model, "configurations", made.configurations, raising=False)
    monkeypatch.setattr(cuda.kernel, "emit", made.emit, raising=False)
    return made


class Program:
    """A captured model, and a generator's answers about all of its operators as one region."""

    def __init__(self, model, *inputs) -> None:
        self.captured = capture(model, inputs)
        self.graph = self.captured.graph
        position = {n: i for i, n in enumerate(self.graph.nodes)}
        self.constants = frozenset(self.graph.constants)
        self.region = region_of(self.graph.nodes, self.graph, self.constants, position)
        self.values = run_eagerly(self.captured, list(inputs), {})
        self.strides = {t: x.stride() for t, x in self.values.tensors.items()}
        self.context = Context(self.strides, self.constants, frozenset(self.values.tensors))

    def units(self, generator, most=100):
        root_of = generator.root_of
        partitioner = Partitioner(self.graph, self.strides, self.constants, root_of)
        groups = partitioner.run().groups
        return units.find_units(groups, partitioner, generator, self.context, most)[0]


@pytest.fixture
def linear() -> Program:
    return Program(nn.Linear(64, 48), torch.randn(32, 64))


# ---- variants -----------------------------------------------------------------------------------


def test_the_engines_favourites_come_before_tritons(cuda, engine, linear):
    alone = [
        v.label for v in cuda.for_gpu(H200, alone=True).variants(linear.region, linear.context)
    ]
    assert alone == [f"engine, {c.label}, tf32x3" for c in engine.configs]
    triton = [
        v.label
        for v in triton_generator.for_gpu(H200).variants(linear.region, linear.context)
    ]  # fmt: skip
    both = [v.label for v in cuda.for_gpu(H200).variants(linear.region, linear.context)]
    assert both == [*alone[:2], triton[0], alone[2], triton[1], alone[3], *triton[2:]]
    # TF32 is not allowed in matrix products, and "ieee" is Triton's alone
    assert {p for _, p, _ in engine.asked} == {"tf32x3"}
    assert engine.asked[0][2] == linear.constants


def test_precisions_follow_pytorchs(cuda, engine):
    conv = Program(nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8))
    half = Program(nn.Linear(64, 48).bfloat16(), torch.randn(8, 64).bfloat16())
    for program, asked, precision in ((conv, "tf32", "tf32"), (half, "tf32", "")):
        engine.asked.clear()
        found = cuda.for_gpu(H200, alone=True).variants(program.region, program.context)
        assert [p for _, p, _ in engine.asked] == [asked]
        assert {v.precision for v in found} == {precision}


def test_what_the_engine_refuses_is_tritons_and_the_reason_is_kept(
    cuda, engine, linear, monkeypatch, tmp_path
):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    engine.refusal = Refusal(Rule.CONTRACTION_FORM, "linear", "channels are not contiguous")
    generator = cuda.for_gpu(H200)
    found = generator.variants(linear.region, linear.context)
    triton = triton_generator.for_gpu(H200).variants(linear.region, linear.context)
    assert [v.label for v in found] == ["engine", *(v.label for v in triton)]
    (u,) = linear.units(generator)
    assert u.refused == (("engine", str(engine.refusal)),)
    assert len(u.candidates) == len(triton)
    assert 0 not in u.candidates
    (one,) = linear.units(generator, most=1)  # and still gets one kernel
    assert len(one.candidates) == 1
    assert cuda.for_gpu(H200, alone=True).variants(linear.region, linear.context) is engine.refusal


def test_no_choice_is_a_refusal_too(cuda, engine, linear):
    engine.configs = Refusal(Rule.SHARED_MEMORY, "linear", "no tile fits")
    found = cuda.for_gpu(H200).variants(linear.region, linear.context)
    assert found[0].refusal is engine.configs


def test_regions_without_a_product_are_tritons_without_a_word(cuda, engine):
    engine.refusal = Refusal(Rule.CONTRACTION_FORM, "relu", "no product")
    pointwise = Program(lambda x: torch.relu(x) * 2, torch.randn(32, 64))
    (u,) = pointwise.units(cuda.for_gpu(H200))
    assert u.refused == ()
    assert u.candidates


def test_a_variant_that_can_not_be_written_is_named(cuda, engine, linear, tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    (u,) = linear.units(cuda.for_gpu(H200, alone=True))
    assert [c.choice for c in u.candidates.values()] == [
        f"engine, {c.label}, tf32x3" for c in engine.configs if c.patch[1] != 3
    ]
    ((label, why),) = u.refused
    assert engine.configs[2].label in label
    assert "three is too much" in why


def test_the_engine_answers_where_triton_refuses(cuda, engine, linear, monkeypatch):
    refusal = Refusal(Rule.SCRATCH, "linear", "of Triton")
    generator = cuda.for_gpu(H200)
    given = linear.region, linear.strides, linear.constants
    assert generator.root_of(*given) is linear.region.outputs[0]
    assert engine.asked == []  # Triton's answer is enough
    monkeypatch.setattr(TritonGenerator, "root_of", lambda *_: refusal)
    monkeypatch.setattr(TritonGenerator, "variants", lambda *_: refusal)
    assert generator.root_of(*given) is None
    assert len(generator.variants(linear.region, linear.context)) == 4
    engine.refusal = Refusal(Rule.CONTRACTION_FORM, "linear", "of the engine")
    assert generator.root_of(*given) is refusal
    assert generator.variants(linear.region, linear.context) is refusal
    assert cuda.for_gpu(H200, alone=True).root_of(*given) is engine.refusal


# ---- the engine itself, without stand-ins --------------------------------------------------------


def test_float32_products_are_three_of_tf32(cuda, linear):
    generator = cuda.for_gpu(H200)
    assert generator.allowed[0] is False
    ways = generator.variants(linear.region, linear.context)
    mine = [v for v in ways if isinstance(v, cuda.Variant)]
    assert mine == ways[:2] + [v for v in ways[2:] if isinstance(v, cuda.Variant)]
    assert len(mine) > 2
    assert {(v.problem.kind, v.precision) for v in mine} == {("tf32x3", "tf32x3")}
    others = {v.options.precision for v in ways if isinstance(v, triton_generator.Variant)}
    assert others == {"tf32x3", "ieee"}
    c = generator.write(linear.region, mine[0], linear.context)
    assert isinstance(c, Candidate), c
    assert "SPLITS = 1;" in c.source.text
    assert c.precision == "tf32x3"  # not "tf32": float32's tolerance is the one that counts
    wide = replace(generator, allowed=(True, True)).variants(linear.region, linear.context)
    tf32 = [v for v in wide if isinstance(v, cuda.Variant)]
    assert {(v.problem.kind, v.precision) for v in tf32} == {("tf32", "tf32")}


def test_convolutions_follow_a_switch_of_their_own(cuda):
    x = torch.randn(2, 64, 14, 14).to(memory_format=torch.channels_last)
    program = Program(nn.Conv2d(64, 64, 3, padding=1).to(memory_format=torch.channels_last), x)
    for allowed, kind in (((False, True), "tf32"), ((True, False), "tf32x3")):
        generator = replace(cuda.for_gpu(H200, alone=True), allowed=allowed)
        found = generator.variants(program.region, program.context)
        assert {(v.problem.kind, v.precision) for v in found} == {(kind, kind)}


@needs_compilers
@pytest.mark.parametrize("name", ["linear", "product"])
def test_the_first_variant_is_worth_timing(cuda, linear, name, tmp_path, monkeypatch):
    """Of float32 that is split, and of a product of two activations, neither transposed."""
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    program, kind = linear, "tf32x3"
    if name == "product":
        a, b = torch.randn(4, 64, 32).bfloat16(), torch.randn(4, 32, 64).bfloat16()
        program, kind = Program(lambda a, b: torch.bmm(a, b) * 0.5, a, b), "bf16"
    generator = cuda.for_gpu(H200, alone=True)
    first = generator.variants(program.region, program.context)[0]
    assert (first.problem.kind, first.problem.w_features_inner) == (kind, name == "product")
    made = generator.write(program.region, first, program.context)
    assert isinstance(made, Candidate), made
    (built,) = generator.build_all([made])
    assert isinstance(built, Built), built
    assert [r.stack_bytes for r in built.resources] == [0]


# ---- candidates ---------------------------------------------------------------------------------


def test_a_candidate_gets_its_packed_weights(cuda, engine, linear):
    generator = cuda.for_gpu(H200)
    variant = generator.variants(linear.region, linear.context)[0]
    c = generator.write(linear.region, variant, linear.context)
    assert isinstance(c.source, CudaSource)
    assert c.source.name == "linear"
    assert "linear" in c.source.text.splitlines()[0]
    x, packed = c.source.inputs
    assert c.inputs == (x,)
    assert c.strides[x] == (64, 1)
    assert (c.precision, c.choice, c.waits) == ("tf32x3", variant.label, True)
    assert c.stored == frozenset(linear.region.outputs)
    (d,) = c.derived
    assert packed.name in d.name
    (weight,) = d.sources
    w = linear.values[weight]
    got = d.compute([w])
    assert got.shape == (1, 2, 48, 32)
    assert got.is_contiguous()
    for chunk in range(2):
        assert torch.equal(got[0, chunk], w[:, 32 * chunk : 32 * chunk + 32])


@needs_compilers
def test_what_was_chosen_is_written_again_without_looking_for_more(cuda, linear, monkeypatch):
    generator = cuda.for_gpu(H200)
    variants = generator.variants(linear.region, linear.context)
    made = [generator.write(linear.region, v, linear.context) for v in variants]
    made = [c for c in made if isinstance(c, Candidate)]
    assert {"config", "triton"} <= {k for c in made for k in c.token}
    # a cache keeps them as JSON
    tokens = [json.loads(json.dumps(c.token)) for c in made]
    monkeypatch.setattr(cuda.model, "configurations", None)
    monkeypatch.setattr(cuda.packed_model, "configurations", None)
    for c, token in zip(made, tokens, strict=True):
        again = generator.again(linear.region, token, linear.context)
        assert again is not None, c.choice
        same = generator.write(linear.region, again, linear.context)
        assert same.source.text == c.source.text
        assert same.choice == c.choice
    assert generator.again(linear.region, {"triton": "no such tile"}, linear.context) is None
    assert generator.again(linear.region, {}, linear.context) is None


def test_a_constant_may_be_laid_out(cuda, engine, linear, monkeypatch):
    def emit(problem, *rest):
        made = engine.emit(problem, *rest)
        return replace(made, inputs=(problem.x, problem.w), laid_out={problem.w: (1, 48)})

    monkeypatch.setattr(cuda.kernel, "emit", emit)
    generator = cuda.for_gpu(H200)
    variant = generator.variants(linear.region, linear.context)[0]
    c = generator.write(linear.region, variant, linear.context)
    (d,) = c.derived
    assert c.strides[d.sources[0]] == (1, 48)
    got = d.compute([linear.values[d.sources[0]]])
    assert got.stride() == (1, 48)


def test_a_tensor_map_that_can_not_be_is_a_refusal(cuda, engine, linear):
    engine.maps = (TensorMap(0, "fp32", 0, (64, 30), (200,), (32, 30), (1, 1), 128),)
    generator = cuda.for_gpu(H200)
    variant = generator.variants(linear.region, linear.context)[0]
    found = generator.write(linear.region, variant, linear.context)
    assert isinstance(found, Refusal)
    assert found.rule is Rule.CONTRACTION_FORM
    assert found.subject == linear.region.inputs[0].name
    assert "stride 0 is 200 bytes" in found.text


@needs_compilers
def test_kernels_of_both_languages_are_built_in_their_places(
    cuda, engine, linear, tmp_path, monkeypatch
):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    generator = cuda.for_gpu(H200)
    ways = generator.variants(linear.region, linear.context)
    chosen = [ways[2], ways[0], ways[4], ways[1]]
    made = [generator.write(linear.region, v, linear.context) for v in chosen]
    bad = replace(made[1], source=replace(made[1].source, text="no C++"))
    built = generator.build_all([*made, bad])
    assert all(isinstance(b, Built) for b in built[:4]), built
    assert [b.backend for b in built[:4]] == ["triton", "cuda", "triton", "cuda"]
    assert built[1].path != built[3].path
    assert built[1].path.suffix == ".cu"
    assert isinstance(built[4], CompilerError)
    assert generator.build_all([]) == []
    # one that keeps its multiprocessor busy with waiting is refused with its reason
    wide = Refusal(Rule.SERIALISED, "h200", "wgmma")
    monkeypatch.setattr(Built, "over_budget", lambda *_: wide)
    assert generator.build_all([made[1]]) == [wide]


# ---- which generator ----------------------------------------------------------------------------


def test_hopper_gpus_get_the_engine(cuda, monkeypatch):
    found = {"major": 9}
    properties = lambda device: SimpleNamespace(  # noqa: E731
        name="NVIDIA H200", major=found["major"], minor=0, multi_processor_count=132,
        shared_memory_per_block_optin=232448, shared_memory_per_block=49152, L2_cache_size=60 << 20,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(cudnn_plans, "installed", lambda: False)
    device = torch.device("cuda", 0)
    both = generator_for(device, Settings())
    assert isinstance(both, cuda.CudaGenerator)
    assert isinstance(both.beside, TritonGenerator)
    assert both.device == device
    alone = generator_for(device, Settings(generator="cuda"))
    assert isinstance(alone, cuda.CudaGenerator)
    assert alone.beside is None
    triton = generator_for(device, Settings(generator="triton"))
    assert isinstance(triton, TritonGenerator)
    keys = {units._key("t0=relu(t1)", g) for g in (both, alone, triton)}
    assert len(keys) == 3
    found["major"] = 10
    assert isinstance(generator_for(device, Settings()), TritonGenerator)
    with pytest.raises(InputError, match="sm_90, and cuda:0 is sm_100"):
        generator_for(device, Settings(generator="cuda"))
    with pytest.raises(InputError, match='use generator="auto"'):
        generator_for(torch.device("cpu"), Settings(generator="cuda"))


def test_without_nvrtc_triton_writes_and_the_reason_is_kept(cuda, engine, linear, monkeypatch):
    before = cuda.for_gpu(H200).key

    def missing():
        raise CompilerError("cuda-bindings is not installed")

    monkeypatch.setattr(cuda.build, "nvrtc_version", missing)
    generator, alone = cuda.for_gpu(H200), cuda.for_gpu(H200, alone=True)
    assert generator.problem == triton_generator.for_gpu(H200).problem
    first, *rest = generator.variants(linear.region, linear.context)
    assert "cuda-bindings package, or NVRTC, is not installed" in str(first.refusal)
    assert rest
    assert "not installed" in alone.problem
    assert generator.key != before
    assert engine.asked == []


def test_floors_are_the_data_sheets(cuda, linear):
    mine, triton = cuda.for_gpu(H200), triton_generator.for_gpu(H200)
    assert mine.floor_us(linear.region) == triton.floor_us(linear.region) > 0
    assert linear.region.inputs[0].dtype is DType.F32
