"""Layers with what follows them for cuDNN's graphs, and their plans ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tests.backends.test_cudnn import Whole, laid
from tests.modules import Follow
from torch import nn

from onchip.backends.cudnn.build import Plan
from onchip.fusion.refusal import Refusal, Rule
from onchip.planning.candidates import Candidate, Context, completed
from onchip.planning.generators.cudnn import Variant, WithCudnn
from onchip.planning.plan import Kernel
from onchip.planning.tuner import Trial
from onchip.planning.values import Values, run_eagerly

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Y = (8, 64, 28, 28)
# Relative distance from float64 (by the norm): roundings of the operands and the result.
TOLERANCE = {BF16: 4e-3, FP16: 6e-4, FP32: 1e-3}


@dataclass(frozen=True)
class Case:
    """layer and function, shapes of the inputs, type."""

    layer: Callable[[], nn.Module]
    f: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...] = (Y,)
    dtype: torch.dtype = BF16


def wide() -> nn.Module:
    return nn.Conv2d(64, 64, 3, padding=1)


CASES = {
    "alone": Case(lambda: nn.Conv2d(64, 64, 3, padding=1, bias=False), lambda y: y),
    "relu": Case(wide, F.relu),
    "residual": Case(wide, lambda y, r: F.relu(y + r), (Y, Y)),
    "two residuals": Case(wide, lambda y, r, s: F.relu(y + r + s), (Y, Y, Y)),
    "1x1": Case(lambda: nn.Conv2d(64, 256, 1), F.relu),
    "1x1, residual": Case(lambda: nn.Conv2d(256, 64, 1), lambda y, r: F.relu(y + r),
                          ((8, 256, 28, 28), Y)),
    "3x3 every 2": Case(lambda: nn.Conv2d(64, 128, 3, stride=2, padding=1), F.relu),
    "dilated": Case(lambda: nn.Conv2d(64, 64, 3, padding=2, dilation=2), F.relu),
    "first": Case(lambda: nn.Conv2d(3, 64, 7, stride=2, padding=3), F.relu, ((8, 3, 224, 224),)),
    "groups": Case(lambda: nn.Conv2d(64, 64, 3, padding=1, groups=8), F.relu),
    "depthwise": Case(lambda: nn.Conv2d(64, 64, 3, padding=1, groups=64), F.relu6),
    "gelu": Case(wide, F.gelu),
    "silu": Case(wide, F.silu),
    "sigmoid": Case(wide, torch.sigmoid),
    "hardswish": Case(wide, F.hardswish),
    "mish": Case(wide, F.mish),
    "relu6": Case(wide, F.relu6),
    "leaky": Case(wide, lambda y: F.leaky_relu(y, 0.1)),
    "numbers": Case(wide, lambda y: (y * 0.5 + 1).clamp(-1, 2) / 3),
    "fp16": Case(wide, F.relu, (Y,), FP16),
    "fp32": Case(wide, F.relu, (Y,), FP32),
    "fp32, residual": Case(wide, lambda y, r: F.relu(y + r), (Y, Y), FP32),
    "volume": Case(lambda: nn.Conv3d(32, 64, 3, padding=1), F.relu, ((2, 32, 8, 28, 28),)),
    "signal": Case(lambda: nn.Conv1d(64, 64, 3, padding=1), F.relu, ((8, 64, 128),)),
}  # fmt: skip


class Nothing:
    """A generator without kernels, beside which cuDNN's plans stand."""

    name, timed, pads_operands, problem, key = "none", True, False, "", ()

    def variants(self, region, context):
        return Refusal(Rule.SWITCHED_OFF, region.name)


@dataclass(eq=False)
class Ready:
    """A case on the GPU: its plans, built or refused, and what they compute in float64."""

    whole: Whole
    values: Values
    want: torch.Tensor
    candidates: list[Candidate]
    built: list[object]
    generator: WithCudnn

    def kernel(self, n: int) -> Kernel:
        return self.generator.kernel(self.candidates[n], self.built[n])

    def trial(self, n: int, values: Values | None = None) -> Trial:
        c, values = self.candidates[n], values or self.values
        derived = [d.compute([values[s] for s in d.sources]) for d in c.derived]
        return Trial.of(c, self.kernel(n), values, derived)

    @property
    def plans(self) -> list[int]:
        return [n for n, b in enumerate(self.built) if isinstance(b, Plan)]


def inputs_of(case: Case) -> list[torch.Tensor]:
    return [laid(torch.randn(s)).to("cuda", case.dtype) for s in case.shapes]


def ready(cases: dict[str, Case], generator: WithCudnn) -> dict[str, Ready]:
    """All plans of the cases, built in one call."""
    found: dict[str, Ready] = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        model = Follow(case.layer(), case.f).to("cuda", case.dtype).eval()
        inputs = inputs_of(case)
        with torch.no_grad():
            whole = Whole(model, *inputs)
            values = run_eagerly(whole.captured, inputs, whole.strides)
            want = model.double()(*(x.double() for x in inputs))
        graph = whole.captured.graph
        available = frozenset({*graph.inputs, *graph.constants})
        context = Context(whole.strides, whole.constants, available)
        variants = generator.variants(whole.region, context)
        assert not isinstance(variants, Refusal), f"{name}: {variants}"
        assert all(isinstance(v, Variant) for v in variants), whole.form
        candidates = [generator.write(whole.region, v, context) for v in variants]
        assert all(isinstance(c, Candidate) for c in candidates)
        found[name] = Ready(whole, values, want, candidates, [], generator)  # type: ignore[arg-type]
    built = iter(generator.build_all([c for r in found.values() for c in r.candidates]))
    for r in found.values():
        r.built = [next(built) for _ in r.candidates]
        r.candidates = [completed(c, b) for c, b in zip(r.candidates, r.built, strict=True)]
    return found
