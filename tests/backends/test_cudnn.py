"""Graphs for cuDNN: what is recognised, the text's values against ATen in float64, and plans in
child processes and the cache. (tests/gpu/test_cudnn.py runs them.)"""

from __future__ import annotations

import importlib.util
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.backends import cudnn_child
from tests.modules import Follow
from torch import nn

from onchip.backends.cudnn import build
from onchip.backends.cudnn.form import Form, form_of, written
from onchip.backends.cudnn.graph import graph_of
from onchip.backends.cudnn.source import GraphSource, lines_of
from onchip.backends.nvidia import pool
from onchip.capture import capture
from onchip.capture.cleanup import constant_tensors
from onchip.errors import CompilerError
from onchip.fusion.layout import captured_strides, channels_last
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.region import Region, region_of
from onchip.ir.expr import Tensor

BF16 = torch.bfloat16
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("cudnn") is None, reason="nvidia-cudnn-frontend is not installed"
)


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Whole:
    """The whole graph of a model as one region, all activations channels-last."""

    def __init__(self, model: nn.Module, *inputs: torch.Tensor, first: bool = False) -> None:
        self.captured = capture(model.eval(), inputs)
        graph = self.captured.graph
        results = [t for n in graph.nodes for t in n.results]
        self.strides = {t: captured_strides(t) for t in graph.constants}
        for t in (*graph.inputs, *results):
            lies = channels_last(t.shape) if t.rank > 2 and not first else captured_strides(t)
            self.strides[t] = lies
        self.constants = frozenset(constant_tensors(graph)) | frozenset(graph.constants)
        place = {n: i for i, n in enumerate(graph.nodes)}
        self.region: Region = region_of(graph.nodes, graph, self.constants, place)
        self.form = form_of(self.region, self.strides, self.constants)

    def source(self, plan: int = 0, comment: str = "") -> GraphSource:
        assert isinstance(self.form, Form), self.form
        return written(self.form, self.strides, frozenset(), plan, comment)

    def value(self, t: Tensor, inputs: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
        given = dict(zip(self.captured.graph.inputs, inputs, strict=False))
        return given[t] if t in given else self.captured.slots[t].fetch().detach()


def source_of(model: nn.Module, *inputs: torch.Tensor) -> GraphSource:
    return Whole(model, *inputs).source()


# ---- what the text means -----------------------------------------------------------------------

FUNCTIONS = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "swish": F.silu, "exp": torch.exp,
    "abs": torch.abs, "neg": torch.neg, "elu": F.elu, "softplus": F.softplus, "gelu": F.gelu,
    "gelu_approx_tanh": lambda x: F.gelu(x, approximate="tanh"), "identity": lambda x: x,
}  # fmt: skip


def relu(x, lower_clip=0.0, upper_clip=float("inf"), negative_slope=0.0):
    """cuDNN's, as its manual has it."""
    return torch.where(x > lower_clip, x, lower_clip + negative_slope * (x - lower_clip)).clamp(
        max=upper_clip
    )


def conv_fprop(x, w, padding, stride, dilation):
    groups = x.shape[1] // w.shape[1]
    return {4: F.conv2d, 5: F.conv3d}[x.dim()](x, w, None, stride, padding, dilation, groups)


def evaluate(source: GraphSource, memory: list[torch.Tensor]) -> torch.Tensor:
    """The text's result, in float64 and the order of axes that the text gives it. memory: what its
    pointers point to, in their order, but for the result."""
    known: dict[str, torch.Tensor] = {}
    out = torch.empty(0)
    for line in lines_of(source.text):
        match line:
            case {"tensor": n, "dim": dim, "stride": stride, "type": kind}:
                x = memory[n - 1]
                assert str(x.dtype) == f"torch.{kind}"
                known[f"t{n}"] = x.as_strided(dim, stride).double()
            case {"value": n, "op": op, "of": of, **options}:
                if op in ("add", "mul"):  # cuDNN takes the result's shape from the first one
                    assert of[0].startswith("v")
                f: Any = {"relu": relu, "conv_fprop": conv_fprop, **FUNCTIONS}[op]
                known[f"v{n}"] = f(*(known[x] for x in of), **options)
            case {"result": n, "of": of, "dim": dim, "stride": stride, "type": _}:
                assert n == len(memory) + 1
                assert list(known[of].shape) == dim
                assert stride == list(channels_last(tuple(dim)))
                out = known[of]
    return out


def laid(x: torch.Tensor) -> torch.Tensor:
    """A signal, picture or volume stored channels-last."""
    if x.dim() < 3:
        return x
    return torch.empty_strided(x.shape, channels_last(tuple(x.shape)), dtype=x.dtype).copy_(x)


def check(model: nn.Module, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Whole:
    """The text, interpreted on memory as it lies, gives what the model gives in float64."""
    model = model.to(dtype)
    inputs = tuple(laid(torch.randn(s, dtype=dtype)) for s in shapes)
    whole = Whole(model, *inputs)
    source = whole.source()
    assert isinstance(whole.form, Form)
    memory = []
    for t in source.inputs:
        x = whole.value(t, inputs)
        strides = source.laid_out.get(t, whole.strides[t])
        memory.append(torch.empty_strided(x.shape, strides, dtype=dtype).copy_(x))
    memory += [torch.full((1,), x) for x in source.scalars]
    got = evaluate(source, memory)
    want = model.double()(*(x.double() for x in inputs))
    torch.testing.assert_close(got.reshape(want.shape), want, rtol=1e-6, atol=1e-7)  # 1 / 6
    return whole


Y = (2, 16, 7, 6)
POINTWISE = {
    "nothing": lambda y: y,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "elu": F.elu,
    "softplus": F.softplus,
    "leaky_relu": lambda y: F.leaky_relu(y, 0.2),
    "relu6": lambda y: F.relu6(3 * y),
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "mish": F.mish,
    "clamp": lambda y: torch.clamp(y, -0.2, 0.3),
    "clamp_min": lambda y: torch.clamp_min(y, -0.2),
    "gated": lambda y: y * torch.sigmoid(y),
    "numbers": lambda y: (y * 0.5 - 1.5) / 3 + 0.25,
    "alpha": lambda y: torch.sub(torch.sigmoid(y), y, alpha=2),
    "abs exp neg": lambda y: torch.exp(-y.abs()),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_a_convolution_and_what_follows_it(name):
    check(Follow(nn.Conv2d(16, 16, 3, padding=1), POINTWISE[name]), Y)


GEOMETRIES = {
    "1x1": (nn.Conv2d(16, 24, 1), Y),
    "3x3 every 2": (nn.Conv2d(16, 24, 3, stride=2, padding=1), Y),
    "wide": (nn.Conv2d(16, 8, (3, 1), stride=(1, 2), padding=(1, 0)), Y),
    "dilated": (nn.Conv2d(16, 8, 3, dilation=2, padding="same"), Y),
    "groups": (nn.Conv2d(16, 32, 3, padding=1, groups=4), Y),
    "depthwise": (nn.Conv2d(16, 16, 3, padding=1, groups=16), Y),
    "no bias": (nn.Conv2d(16, 8, 3, bias=False), Y),
    "one feature": (nn.Conv2d(16, 1, 3), Y),
    "one pixel": (nn.Conv2d(16, 8, (7, 6)), Y),
    "three colours": (nn.Conv2d(3, 8, 3, stride=2), (2, 3, 9, 9)),
    "signal": (nn.Conv1d(16, 8, 3, stride=2, padding=1, dilation=2), (2, 16, 30)),
    "volume": (nn.Conv3d(8, 16, 3, stride=(1, 2, 1), padding=1), (2, 8, 5, 6, 7)),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries(name):
    layer, shape = GEOMETRIES[name]
    check(Follow(layer, F.relu), shape)


OPERANDS = {
    "residual": (lambda y, r: F.relu(y + r), [Y]),
    "residual first": (lambda y, r: F.relu(r + y), [Y]),
    "two residuals": (lambda y, r, s: (y + r) * s, [Y, Y]),
    "taken from": (lambda y, r: r - y, [Y]),
    "a value a channel": (lambda y, c: y * c, [(16, 1, 1)]),
    "a row": (lambda y, r: y + r, [(6,)]),
    "one number": (lambda y, s: y * s, [(1,)]),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_other_operands(name):
    f, others = OPERANDS[name]
    check(Follow(nn.Conv2d(16, 16, 3, padding=1), f), Y, *others)


def test_operands_of_signals_and_volumes():
    check(Follow(nn.Conv1d(8, 8, 3, padding=1), lambda y, g: y * g), (2, 8, 9), (8, 1))
    check(Follow(nn.Conv3d(8, 8, 1), lambda y, g: y + g), (2, 8, 3, 4, 5), (1, 8, 1, 1, 1))


def test_a_value_of_each_picture_and_channel_is_refused():
    """cuDNN 9.19 computes it wrong on an H200."""
    model = Follow(nn.Conv2d(16, 16, 3, padding=1), lambda y, g: y * g)
    whole = Whole(model, laid(torch.randn(Y)), torch.randn(2, 16, 1, 1))
    assert isinstance(whole.form, Refusal)
    assert whole.form.rule is Rule.CUDNN_FORM
    assert "of each picture, which cuDNN computes wrong" in whole.form.text


def test_a_clipped_relu_does_not_stand_right_behind_a_bias():
    """There, only two slow engines take it."""
    lines = lines_of(source_of(Follow(nn.Conv2d(16, 8, 1), F.relu6), laid(torch.randn(Y))).text)
    assert [x["op"] for x in lines if "op" in x] == ["conv_fprop", "add", "identity", "relu"]


def test_half_types_stay_float32_between_operators():
    whole = check(Follow(nn.Conv2d(16, 16, 3), lambda y: torch.relu(y * 0.5)), Y, dtype=BF16)
    kinds = [line["type"] for line in lines_of(whole.source().text) if "type" in line]
    assert kinds == ["bfloat16", "bfloat16", "bfloat16", "float32", "bfloat16"]
    model = Follow(nn.Conv2d(16, 16, 3).to(BF16), torch.Tensor.float)
    widened = Whole(model, laid(torch.ones(Y, dtype=BF16)))
    assert lines_of(widened.source().text)[-2]["type"] == "float32"


def test_weights_are_laid_out_once_and_only_if_they_must_be():
    layer = nn.Conv2d(16, 8, 3)
    x = laid(torch.randn(Y))
    source = source_of(layer, x)
    (weight,) = source.laid_out
    assert source.laid_out[weight] == channels_last((8, 16, 3, 3))
    assert source.inputs[-1] is weight, "what is derived at load comes last"
    assert source_of(layer.to(memory_format=torch.channels_last), x).laid_out == {}


def test_inputs_that_are_computed_at_load_come_last():
    whole = Whole(nn.Conv2d(16, 8, 3).to(memory_format=torch.channels_last), laid(torch.randn(Y)))
    assert isinstance(whole.form, Form)
    _, weight, bias = whole.form.tensors
    source = written(whole.form, whole.strides, frozenset([weight]), 2, "a place")
    assert source.inputs[1:] == (bias, weight)
    assert source.text.startswith("// a place\n")
    assert lines_of(source.text)[-1] == {"plan": 2}


# ---- what it does not take ---------------------------------------------------------------------


def conv(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 16, 3), *more)


REFUSED = {
    "is transposed": (nn.ConvTranspose2d(16, 8, 2, stride=2), [Y]),
    "2 convolutions": (conv(nn.ReLU(), nn.Conv2d(16, 8, 1)), [Y]),
    "2 results": (Follow(nn.Conv2d(16, 8, 3), lambda y: (y, y.relu())), [Y]),
    "(max_pool2d) is no pointwise": (conv(nn.MaxPool2d(2)), [Y]),
    "(clamp_max) is no pointwise": (Follow(nn.Conv2d(16, 8, 3), lambda y: y.clamp_max(1)), [Y]),
    "(maximum) is no pointwise": (Follow(nn.Conv2d(16, 8, 1), torch.maximum), [Y, (2, 8, 7, 6)]),
    "does not follow": (Follow(nn.Conv2d(16, 8, 1), lambda y, r: y + r.relu()), [Y, (2, 8, 7, 6)]),
    "has types that its graphs don't": (
        Follow(nn.Conv2d(16, 8, 1).double(), lambda y: y.float().relu()), [Y],
    ),
    "adds a multiple": (
        Follow(nn.Conv2d(16, 8, 1), lambda y, r: torch.add(y, r, alpha=2)), [Y, (2, 8, 7, 6)],
    ),
    "has a wider padding": (nn.Conv2d(16, 8, 2, padding="same"), [Y]),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_refusals_say_what_is_in_the_way(why):
    model, shapes = REFUSED[why]
    dtype = next(model.parameters()).dtype
    found = Whole(model, *(laid(torch.randn(s, dtype=dtype)) for s in shapes)).form
    assert isinstance(found, Refusal), found
    assert found.rule is Rule.CUDNN_FORM
    assert why in found.text


def test_channels_first_is_refused():
    found = Whole(nn.Conv2d(16, 8, 3), torch.randn(Y), first=True).form
    assert isinstance(found, Refusal)
    assert "channels-first" in found.text


def test_a_region_without_a_convolution_is_none_of_its():
    assert Whole(nn.ReLU(), torch.randn(Y)).form is None


# ---- cuDNN's own graph -------------------------------------------------------------------------

# What cuDNN asks of a GPU, here of an H200's (device_properties gives it where there is one).
H200 = json.dumps({
    "deviceName": "NVIDIA H200", "deviceVer": 900, "driverVer": 13000, "cudaDeviceId": 0,
    "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64],
    "regsPerBlock": 65536, "multiProcessorCount": 132, "smCountOrigin": 0,
    "smClockRateKHz": 1980000, "memClockRateKHz": 3201000, "l2CacheSize": 62914560, "warpSize": 32,
    "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536, "pciDeviceId": 0,
    "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "isTccDriver": 0,
    "supportCoopLaunch": 1, "totalGlobalMem": 150000000000,
})  # fmt: skip


def whole_graph() -> GraphSource:
    def f(y, r, s):
        return F.hardswish(F.leaky_relu(F.silu(F.gelu((y + r) * 0.5)) / s, 0.1))

    layer = nn.Conv2d(16, 16, 3, padding=1).to(BF16)
    inputs = [laid(torch.randn(s, dtype=BF16)) for s in (Y, Y, (16, 1, 1))]
    return source_of(Follow(layer, f), *inputs)


@needs_package
def test_cudnn_takes_the_graph():
    import cudnn

    properties = cudnn.create_device_properties(H200)
    graph, plan = graph_of(cudnn, whole_graph().text, device_property=properties)
    graph.validate()
    graph.build_operation_graph()
    assert plan == 0


@needs_package
@pytest.mark.parametrize("name", POINTWISE)
def test_cudnn_knows_every_mode(name):
    import cudnn

    layer = nn.Conv2d(16, 16, 3, padding=1).to(BF16)
    text = source_of(Follow(layer, POINTWISE[name]), laid(torch.randn(Y, dtype=BF16))).text
    properties = cudnn.create_device_properties(H200)
    graph, _ = graph_of(cudnn, text, device_property=properties)
    graph.validate()
    graph.build_operation_graph()


class Recorder:
    """Stands for the package: remembers what a graph is made of."""

    data_type = SimpleNamespace(FLOAT="f32", BFLOAT16="bf16", HALF="f16")

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def pygraph(self, **given: Any) -> Recorder:
        self.said.append(("pygraph", given))
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **given: Any) -> Any:
            self.said.append((name, *args, given))
            return f"{name} {given['uid']}" if "uid" in given else self

        return call


def test_what_the_package_is_told():
    layer = nn.Conv2d(16, 8, 3, bias=False).to(BF16)
    said = Recorder()
    text = source_of(Follow(layer, lambda y: y * 2), laid(torch.randn(Y, dtype=BF16))).text
    _, plan = graph_of(said, text.replace('"plan": 0', '"plan": 2'), handle="h")
    assert plan == 2
    names = [n for n, *_ in said.said]
    assert names == [
        "pygraph", "tensor", "tensor", "tensor", "conv_fprop", "mul", "set_output", "set_data_type",
        "set_dim", "set_stride", "set_uid",
    ]  # fmt: skip
    assert said.said[0][1] == {
        "io_data_type": "f32", "intermediate_data_type": "f32", "compute_data_type": "f32",
        "handle": "h",
    }  # fmt: skip
    assert said.said[1][1] == {
        "dim": [2, 16, 7, 6], "stride": [672, 1, 96, 16], "data_type": "bf16", "uid": 1,
    }  # fmt: skip
    given = {"image": "tensor 1", "weight": "tensor 2"}
    assert said.said[4][1] == {**given, "padding": [0, 0], "stride": [1, 1], "dilation": [1, 1]}
    assert said.said[5][1]["b"] == "tensor 3"
    assert said.said[-1][1] == 4


# ---- plans -------------------------------------------------------------------------------------


@pytest.fixture
def plans(monkeypatch, tmp_path):
    """build_all with tests/backends/cudnn_child.py in place of the package's process."""
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "cudnn_version", lambda: "package 1, cuDNN 2")
    asked = tmp_path / "asked"
    child = pool.Compiler("cuDNN", cudnn_child.__name__, lambda _: {cudnn_child.ASKED: str(asked)})
    monkeypatch.setattr(build, "COMPILER", child)
    yield lambda: asked.read_text().splitlines() if asked.exists() else []
    pool.end_idle()


def sources(*places: int, comment: str = "") -> list[GraphSource]:
    whole = Whole(nn.Conv2d(16, 8, 3), laid(torch.randn(Y)))
    return [whole.source(n, comment) for n in places]


def test_plans_are_built_once_and_kept(plans):
    first = [p for p in build.build_all(sources(0, 1), H200) if isinstance(p, build.Plan)]
    facts = [(p.name, p.workspace, p.pointers, p.reused) for p in first]
    assert facts == [("engine 0", 0, 4, False), ("engine 1", 100, 4, False)]
    assert [p.stored.read_text() for p in first] == ["plan 0", "plan 1"]
    again = build.build_all(sources(0, 1, comment="at another place"), H200)
    assert [p.reused for p in again if isinstance(p, build.Plan)] == [True, True]
    assert len(plans()) == 2


def test_a_plan_depends_on_the_device_and_the_versions(plans, monkeypatch):
    build.build_all(sources(0), H200)
    build.build_all(sources(0), H200.replace("132", "114"))
    monkeypatch.setattr(build, "cudnn_version", lambda: "package 1, cuDNN 3")
    build.build_all(sources(0), H200)
    assert len(plans()) == 3


def test_a_damaged_plan_is_built_again(plans):
    (plan,) = build.build_all(sources(0), H200)
    assert isinstance(plan, build.Plan)
    plan.stored.write_text("something else")
    (plan,) = build.build_all(sources(0), H200)
    assert isinstance(plan, build.Plan)
    assert not plan.reused
    assert plan.stored.read_text() == "plan 0"


@pytest.mark.parametrize(("place", "why"), [(7, "no engine takes it"), (8, "died (exit code 3)")])
def test_what_cudnn_refuses_and_what_ends_its_process(plans, place, why):
    refused, fine = build.build_all(sources(place, 0), H200)
    assert isinstance(refused, CompilerError)
    assert why in str(refused)
    assert isinstance(fine, build.Plan)


def test_without_the_package(monkeypatch):
    def missing(name: str) -> str:
        raise build.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(build.importlib.metadata, "version", missing)
    build.cudnn_version.cache_clear()
    try:
        with pytest.raises(CompilerError, match="onchip\\[cudnn\\]"):
            build.cudnn_version()
    finally:
        build.cudnn_version.cache_clear()


@needs_package
def test_places_count_the_librarys_engines_alone():
    from onchip.backends.cudnn.worker import plan_at

    names = ["conv_fprop_sm90[A=1]", "eng4_k24=3", "another", "eng0"]
    assert plan_at(names, 0) == 1
    assert plan_at(names, 1) == 3
    with pytest.raises(ValueError, match="propose 2 plans"):
        plan_at(names, 2)


@needs_package
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a driver")
def test_the_process_builds_without_a_gpu_what_needs_no_driver(monkeypatch, tmp_path):
    """The real one: engines that are compiled already need none, others say so."""
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    compiled, fused = build.build_all([*sources(0), whole_graph()], H200)
    assert isinstance(compiled, build.Plan), compiled
    assert compiled.name.startswith("eng")
    assert isinstance(fused, CompilerError)
    assert "cuDNN builds no plan" in str(fused)
    assert "driver" in str(fused)
    kept = [f for f in os.listdir(tmp_path / "cudnn") if f.endswith(".plan")]
    assert kept == [compiled.stored.name]

    import cudnn

    again = cudnn.pygraph(device_property=cudnn.create_device_properties(H200))
    again.deserialize(compiled.stored.read_bytes())
    assert again.get_workspace_size_plan_at_index(0) == compiled.workspace
    pool.end_idle()
