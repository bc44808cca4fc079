"""What libraries for GPUs make of one product and its operators, to compare a kernel with.

`bare` is the product alone, `cudnn_plans` cuDNN's fused graph of a convolution with what follows it
element by element. Makers raise NoPeer where a model has nothing of the kind.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onchip.capture.observe import clone_storage
from onchip.models.layers import Bmm, Plus

Call = Callable[[], object]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
PRODUCTS = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear, Bmm)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

MOST_PLANS = 5  # of cuDNN's, in the order of its heuristics
MOST_BUILDS = 20  # attempts at them: some can't be built
# Relative distance from eager that a fused graph may have: it rounds in other places.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}


class NoPeer(Exception):
    """A peer that is not for this model, and why."""


def has_cudnn() -> bool:
    """Whether the package nvidia-cudnn-frontend is installed."""
    return importlib.util.find_spec("cudnn") is not None


def bare(module: nn.Module, args: tuple[Any, ...]) -> Call:
    """The model's only product on what it reads, without bias: a call of cuDNN's or cuBLAS'."""
    layers = [m for m in module.modules() if isinstance(m, PRODUCTS)]
    if len(layers) != 1:
        raise NoPeer(f"the model has {len(layers)} products, not one")
    given: list[tuple[Any, ...]] = []
    hook = layers[0].register_forward_pre_hook(lambda _, inputs: given.append(inputs))
    try:
        module(*args)
    finally:
        hook.remove()
    alone: Any = copy.deepcopy(layers[0])
    if getattr(alone, "bias", None) is not None:
        alone.bias = None
    inputs = [clone_storage(x) for x in given[0]]
    return lambda: alone(*inputs)


def cudnn_plans(module: nn.Module, args: tuple[Any, ...]) -> list[Call]:
    """cuDNN's first plans for a convolution, its bias, and the batch norms, ReLUs, GELUs and
    shortcuts behind it as one fused graph; other stages (pooling) are PyTorch's. Raises what cuDNN
    raises, and RuntimeError where no plan gives eager's result."""
    stages = list(module.children())
    if not isinstance(module, nn.Sequential) or not isinstance(stages[0], (nn.Conv2d, nn.Conv3d)):
        raise NoPeer("the model does not start with a convolution of two or three axes")
    graph = _Graph(stages[0], args[0])
    others, done = list(args[1:]), 1
    for stage in stages[1:]:
        if not graph.append(stage, others):
            break
        done += 1
    rest = nn.Sequential(*stages[done:])
    want = module(*args)
    calls = [lambda run=run: rest(run()) for run in graph.plans()]
    wrong = [_distance(call(), want) for call in calls]
    good: list[Call] = [c for c, d in zip(calls, wrong, strict=True) if d <= TOLERANCE[want.dtype]]
    if not good:
        raise RuntimeError(f"no plan gives eager's result: relative distances {wrong}")
    return good


def _distance(found: Any, want: torch.Tensor) -> float:
    return float((found.double() - want.double()).norm() / want.double().norm())


class _Graph:
    """A convolution as a graph of cuDNN's, to which stages are appended."""

    def __init__(self, conv: Any, x: torch.Tensor) -> None:
        import cudnn

        self.cudnn: Any = cudnn
        types = cudnn.data_type
        self.kind = {
            torch.float32: types.FLOAT,
            torch.float16: types.HALF,
            torch.bfloat16: types.BFLOAT16,
        }[x.dtype]
        self.handle = cudnn.create_handle()
        self.graph: Any = cudnn.pygraph(
            io_data_type=self.kind,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self.handle,
        )
        self.tensors: dict[Any, torch.Tensor] = {}
        self.value: Any = self.graph.conv_fprop(
            image=self._tensor(clone_storage(x), self.kind),
            weight=self._tensor(conv.weight.detach(), self.kind),
            padding=list(conv.padding),
            stride=list(conv.stride),
            dilation=list(conv.dilation),
        )
        self.out = torch.empty_like(conv(x))
        if conv.bias is not None:
            self.value = self.graph.bias(input=self.value, bias=self._channels(conv.bias))

    def append(self, stage: nn.Module, others: list[Any]) -> bool:
        """Whether it could be appended; a shortcut takes the next of the other inputs."""
        match stage:
            case nn.ReLU():
                self.value = self.graph.relu(input=self.value)
            case nn.GELU():
                self.value = self.graph.gelu(input=self.value)
            case Plus():
                shortcut = self._tensor(clone_storage(others.pop(0)), self.kind)
                self.value = self.graph.add(a=self.value, b=shortcut)
            case _ if isinstance(stage, NORMS):
                scale, shift = _affine(stage)
                scaled = self.graph.scale(input=self.value, scale=self._channels(scale))
                self.value = self.graph.bias(input=scaled, bias=self._channels(shift))
            case _:
                return False
        return True

    def plans(self) -> list[Callable[[], torch.Tensor]]:
        """A callable for each of the first plans that can be built."""
        modes = [self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK]
        self.value.set_output(True).set_data_type(self.kind)
        self.value.set_dim(list(self.out.shape)).set_stride(list(self.out.stride()))
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans(modes)
        found: list[Callable[[], torch.Tensor]] = []
        for n in range(min(self.graph.get_execution_plan_count(), MOST_BUILDS)):
            try:
                self.graph.build_plan_at_index(n)
            except Exception:  # this plan does not support the graph; the next may
                continue
            size = self.graph.get_workspace_size_plan_at_index(n)
            space = torch.empty(max(size, 16), dtype=torch.uint8, device=self.out.device)
            found.append(lambda n=n, space=space: self._run(n, space))
            if len(found) == MOST_PLANS:
                break
        if not found:
            raise RuntimeError("cuDNN builds none of its plans for the fused graph")
        return found

    def _run(self, plan: int, space: torch.Tensor) -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        self.cudnn.set_stream(handle=self.handle, stream=stream)
        pack = {**self.tensors, self.value: self.out}
        self.graph.execute_plan_at_index(pack, space, index=plan, handle=self.handle)
        return self.out

    def _tensor(self, data: torch.Tensor, kind: Any) -> Any:
        found = self.graph.tensor(dim=list(data.shape), stride=list(data.stride()), data_type=kind)
        self.tensors[found] = data
        return found

    def _channels(self, vector: torch.Tensor) -> Any:
        """A value for each channel, in float32, channels-last."""
        count, axes = len(vector), self.out.dim() - 2
        data = vector.detach().float().contiguous()
        view = data.as_strided((1, count, *[1] * axes), (count, 1, *[count] * axes))
        return self._tensor(view, self.cudnn.data_type.FLOAT)


def _affine(norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """An inference batch norm as scale and shift, in float32."""
    mean, variance = norm.running_mean.double(), norm.running_var.double()
    scale = (variance + norm.eps).rsqrt() * norm.weight.double()
    return scale.float(), (norm.bias.double() - mean * scale).float()
