"""cuDNN's plans beside another generator's kernels, with stand-ins for both."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.backends.test_cudnn import Whole, Y, laid
from tests.modules import Follow
from torch import nn

from onchip.backends.cudnn import build
from onchip.backends.cudnn.source import GraphSource
from onchip.backends.nvidia.source import Workspace
from onchip.errors import CompilerError
from onchip.fusion.layout import channels_last
from onchip.fusion.refusal import Refusal, Rule
from onchip.planning.candidates import Context, completed
from onchip.planning.generators import NoVariant, cudnn
from onchip.planning.generators.cudnn import Variant, WithCudnn
from onchip.planning.library import planted
from onchip.planning.timing import HOST
from onchip.planning.tuner import tune
from onchip.planning.values import run_eagerly

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@dataclass
class Other:
    """Another generator, with so many variants, or with none."""

    found: Sequence[Any] | Refusal = tuple("abcd")
    built: list[Any] = field(default_factory=list)
    key: tuple[str, ...] = ("other",)
    name: str = "cuda"
    pads_operands: bool = True
    seconds_per_kernel: float = 1.0
    problem: str = ""

    def variants(self, region, context):
        return self.found

    def write(self, region, variant, context):
        return f"written {variant}"

    def again(self, region, token, context):
        return token.get("other")

    def build_all(self, candidates):
        self.built = list(candidates)
        return [f"built {c.source}" for c in candidates]

    def kernel(self, candidate, built):
        return f"kernel of {built}"


def generator(other: Any = None, tf32: bool = True) -> WithCudnn:
    return WithCudnn(other or Other(), CPU, "an H200", tf32)


def context_of(whole: Whole) -> Context:
    graph = whole.captured.graph
    available = frozenset({*graph.inputs, *graph.constants})
    return Context(whole.strides, whole.constants, available)


def whole(f=F.relu, layer=None, *others) -> Whole:
    return Whole(Follow(layer or nn.Conv2d(16, 16, 3, padding=1), f), laid(torch.randn(Y)), *others)


def labels(found: Any) -> list[str]:
    return [v if isinstance(v, str) else v.label for v in found]


def test_plans_take_turns_with_the_others_kernels():
    w = whole()
    found = generator().variants(w.region, context_of(w))
    assert labels(found) == ["a", "b", "cuDNN, plan 0", "c", "cuDNN, plan 1", "d", "cuDNN, plan 2"]


def test_plans_alone_where_the_other_has_nothing():
    w, refusal = whole(), Refusal(Rule.CONTRACTION_FORM, "conv2d")
    found = generator(Other(refusal)).variants(w.region, context_of(w))
    assert labels(found) == ["cuDNN, plan 0", "cuDNN, plan 1", "cuDNN, plan 2"]


def test_a_region_without_a_convolution_is_the_others():
    w = Whole(nn.ReLU(), torch.randn(Y))
    assert generator().variants(w.region, context_of(w)) == tuple("abcd")


def test_why_there_are_no_plans_is_kept():
    w = whole(lambda y: F.max_pool2d(y, 2))
    g, context = generator(), context_of(w)
    *others, last = g.variants(w.region, context)
    assert others == list("abcd")
    assert isinstance(last, NoVariant)
    assert "max_pool2d" in str(g.write(w.region, last, context))


def test_without_tf32_there_are_no_plans_for_float32():
    w = whole()
    found = generator(tf32=False).variants(w.region, context_of(w))
    assert labels(found) == ["a", "b", "c", "d", "cuDNN"]
    assert "TF32" in found[-1].refusal.text
    half = Whole(nn.Conv2d(16, 8, 3).bfloat16(), laid(torch.randn(Y).bfloat16()))
    assert len(generator(tf32=False).variants(half.region, context_of(half))) == 7


def test_a_candidate_reads_weights_and_numbers_that_are_laid_out_at_load():
    w = whole(lambda y, r: F.relu(y * 0.5 + r), None, laid(torch.randn(Y)))
    context = context_of(w)
    c = generator().write(w.region, Variant(w.form, 1), context)  # type: ignore[arg-type]
    assert not isinstance(c, Refusal)
    weight, bias = w.captured.graph.constants
    assert c.inputs == (w.captured.graph.inputs[0], bias, w.captured.graph.inputs[1])
    made = [d.compute([w.value(s) for s in d.sources]) for d in c.derived]
    assert made[0].stride() == channels_last((16, 16, 3, 3))
    assert torch.equal(made[0], w.value(weight))
    assert made[1].tolist() == [0.5]
    assert (c.precision, c.foreign, c.token) == ("tf32", True, {"cudnn": 1})
    assert c.stored == frozenset(c.outputs)


def test_a_token_gives_the_variant_again():
    w = whole()
    g, context = generator(), context_of(w)
    found = g.again(w.region, {"cudnn": 2}, context)
    assert isinstance(found, Variant)
    assert found.place == 2
    assert g.again(w.region, {"other": "c"}, context) == "c"


def plan(name: str = "eng4_k24=3", workspace: int = 0) -> build.Plan:
    return build.Plan(Path("a.graph"), Path("a.plan"), name, workspace, 4, 0.1, False)


def test_each_kernel_is_built_by_its_own(monkeypatch):
    w, other = whole(), Other()
    g, context = generator(other), context_of(w)
    mine = g.write(w.region, Variant(w.form, 0), context)  # type: ignore[arg-type]
    others = [SimpleNamespace(source=x) for x in "ab"]
    asked: list[Any] = []

    def build_all(sources: list[GraphSource], device: str) -> list[Any]:
        asked.append((sources, device))
        return [plan()]

    monkeypatch.setattr(build, "build_all", build_all)
    found = g.build_all([others[0], mine, others[1]])  # type: ignore[list-item]
    assert found[0] == "built a"
    assert isinstance(found[1], build.Plan)
    assert found[2] == "built b"
    assert asked == [([mine.source], "an H200")]  # type: ignore[union-attr]
    assert g.kernel(mine, found[1]).built is found[1]  # type: ignore
    assert g.kernel(others[0], found[0]) == "kernel of built a"  # type: ignore[arg-type]


def test_a_built_plan_completes_its_candidate():
    w = whole()
    c = generator().write(w.region, Variant(w.form, 0), context_of(w))  # type: ignore[arg-type]
    assert not isinstance(c, Refusal)
    found = completed(c, plan(workspace=4096))
    assert found.choice == "cuDNN, plan 0: eng4_k24=3"
    assert found.workspace == (Workspace(4096),)
    assert completed(c, plan()).workspace == ()
    assert completed(c, "another kernel") is c


def test_verdicts_depend_on_cudnns_version(monkeypatch):
    monkeypatch.setattr(build, "cudnn_version", lambda: "cuDNN 9")
    assert generator().key == ("other", "cuDNN 9")


def test_the_other_is_alone_without_the_package(monkeypatch):
    other = Other()
    monkeypatch.setattr(build, "installed", lambda: False)
    assert cudnn.beside(other, torch.device("cuda", 0)) is other  # type: ignore[arg-type]


def test_a_package_that_can_not_be_used_is_a_refusal_in_the_report(monkeypatch):
    def missing() -> str:
        raise CompilerError("it finds no library")

    monkeypatch.setattr(build, "installed", lambda: True)
    monkeypatch.setattr(build, "cudnn_version", missing)
    found = cudnn.beside(Other(), torch.device("cuda", 0))  # type: ignore[arg-type]
    assert isinstance(found, WithCudnn)
    assert found.key == ("other", "it finds no library")
    w = whole()
    *others, last = found.variants(w.region, context_of(w))
    assert others == list("abcd")
    assert "it finds no library" in str(found.write(w.region, last, context_of(w)))


def test_it_is_beside_where_cudnn_is_there(monkeypatch):
    monkeypatch.setattr(build, "installed", lambda: True)
    monkeypatch.setattr(build, "cudnn_version", lambda: "cuDNN 9")
    monkeypatch.setattr(cudnn, "_properties", lambda device: f"GPU {device}")
    found = cudnn.beside(Other(), torch.device("cuda", 1))  # type: ignore[arg-type]
    assert isinstance(found, WithCudnn)
    assert found.properties == "GPU 1"


# ---- checked before it is timed ----------------------------------------------------------------


@dataclass
class Kernel:
    """Writes what `f` makes of the first tensor."""

    f: Callable[[torch.Tensor], torch.Tensor]

    def run(self, pointers: list[int]) -> int:
        x, y = (_at(p, Y) for p in (pointers[0], pointers[-1]))
        y.copy_(self.f(x))
        return 0


def _at(pointer: int, shape: tuple[int, ...]) -> torch.Tensor:
    memory = (ctypes.c_float * torch.Size(shape).numel()).from_address(pointer)
    flat = torch.frombuffer(memory, dtype=torch.float32)
    return flat.as_strided(shape, channels_last(shape))


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (F.relu, ""),
        (lambda x: F.relu(x).nan_to_num(0.0, float("inf"), 0.0), "with NaN and infinities among"),
        (lambda x: F.relu(x) * 1.1, "relative error"),
    ],
)
def test_a_plan_is_compared_with_atens_operators_on_nan_too(f, why):
    one = nn.Conv2d(16, 16, 1, bias=False, groups=16)
    one.weight.fill_(1)
    w = whole(F.relu, one)
    c = generator().write(w.region, Variant(w.form, 0), context_of(w))  # type: ignore[arg-type]
    kernel = Kernel(f)
    values = run_eagerly(w.captured, [laid(torch.randn(Y))], w.strides)
    marked = planted(w.region, w.constants, values)
    x = w.captured.graph.inputs[0]
    assert marked[x].isnan().any()
    found = tune(w.region, {0: c}, {0: kernel}, (), w.constants, values, 0.01, HOST)
    assert ([why in text for _, text in found.refused] == [True]) if why else not found.refused
    assert (found.kernel_us is None) == bool(why)
    ours = tune(
        w.region, {0: replace(c, foreign=False)}, {0: kernel}, (), w.constants, values, 0.01, HOST
    )
    assert (ours.kernel_us is None) == ("error" in why), "only a library's is asked for NaN"
