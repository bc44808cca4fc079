"""Rows of the engine's suite: single calls of whole programs, timed by report.bench_once.

A program is compiled on the model's own inputs, and verified and timed on others. Every form runs
on its own copies of them. Beside eager PyTorch and Inductor stand the bare product of the library
and cuDNN's fused graphs. PyTorch chooses cuDNN's algorithms by measuring them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onchip.capture.observe import clone_storage
from onchip.planning import fused_peers, peers
from onchip.report import bench_once as once
from onchip.report.bench_gpu import DeviceBench
from onchip.report.bench_replay import Call, reason
from onchip.report.bench_suites import Case

Inputs = tuple[torch.Tensor, ...]

PROTOCOL = (
    "a CUDA graph of one call, 256 MiB written before each replay, medians of {rounds} rounds in "
    "which all forms take turns; inputs that the program was not compiled on; bare is the "
    "library's product without bias and operators, as PyTorch calls it, cudnn the best of cuDNN's "
    "first plans for the convolution with its pointwise operators as one fused graph (and "
    "PyTorch's pooling); PyTorch picks cuDNN's algorithms by measuring them"
)
NO_CUDNN = "; no cudnn: nvidia-cudnn-frontend is not installed"


class EngineBench(DeviceBench):
    """Runs cases on the GPU at hand, one call at a time."""

    def __init__(self, with_peers: bool, without: Sequence[str] = ()) -> None:
        super().__init__(with_peers, without)
        self.empty_us = once.empty_us()  # before a case can break the GPU's context

    def conditions(self) -> dict[str, Any]:
        text = PROTOCOL.format(rounds=once.ROUNDS)
        text += "" if fused_peers.has_cudnn() else NO_CUDNN
        return {"protocol": text, "empty_us": self.empty_us}

    def _measured_on(self, inputs: Inputs) -> Inputs:
        return unseen(inputs)

    def _times(
        self,
        case: Case,
        program: Callable[..., Any],
        module: torch.nn.Module,
        inputs: Inputs,
        nbytes: int,
    ) -> tuple[dict[str, float], dict[str, str]]:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            forms, failed = self._forms(program, module, inputs)
            times, untimed = once.medians(forms)
        finally:
            torch.backends.cudnn.benchmark = before
        # of a peer's several variants the best is the peer
        best: dict[str, float] = {}
        for name, us in times.items():
            peer = name.partition(" ")[0]
            best[peer] = min(us, best.get(peer, us))
        missing = {n.partition(" ")[0]: why for n, why in {**failed, **untimed}.items()}
        return best, {n: why for n, why in missing.items() if n not in best}

    def _forms(
        self, program: Callable[..., Any], module: torch.nn.Module, inputs: Inputs
    ) -> tuple[dict[str, Call], dict[str, str]]:
        """Calls by name, several variants of a peer as "peer variant", and why peers have none."""
        forms = {"onchip": _bound(program, inputs), "eager": _bound(module, inputs)}
        failed: dict[str, str] = {}
        for name, make in PEERS.items():
            if not self._wants(name) or (name == "cudnn" and not fused_peers.has_cudnn()):
                continue
            try:
                with peers.quiet():
                    found = make(module, inputs)
                    for call in found.values():
                        call()
            except fused_peers.NoPeer:  # the model has nothing of the kind
                continue
            except Exception as error:  # a peer may fail in any way; the reason is reported
                failed[name] = reason(error)
            else:
                forms |= found
        return forms, failed


def unseen(inputs: Inputs) -> Inputs:
    """Normal numbers with the mean and deviation of each floating input, in its strides."""
    generator = torch.Generator(inputs[0].device).manual_seed(1)

    def again(x: torch.Tensor) -> torch.Tensor:
        out = clone_storage(x)
        if x.is_floating_point():
            mean, deviation = float(x.double().mean()), float(x.double().std(correction=0))
            out.normal_(mean, deviation, generator=generator)
        return out

    return tuple(again(x) for x in inputs)


def _bound(form: Callable[..., Any], inputs: Inputs) -> Call:
    own = [clone_storage(x) for x in inputs]
    return lambda: form(*own)


def _bare(module: torch.nn.Module, inputs: Inputs) -> dict[str, Call]:
    return {"bare": fused_peers.bare(module, inputs)}


def _cudnn(module: torch.nn.Module, inputs: Inputs) -> dict[str, Call]:
    plans = fused_peers.cudnn_plans(module, inputs)
    return {f"cudnn {n}": call for n, call in enumerate(plans)}


def _channels_last(module: torch.nn.Module, inputs: Inputs) -> dict[str, Call]:
    """Eager with the filters channels-last, where they are not."""
    form = torch.channels_last
    filters = [m.weight for m in module.modules() if isinstance(m, torch.nn.Conv2d)]
    if all(w.is_contiguous(memory_format=form) for w in filters):
        raise fused_peers.NoPeer("it has no other filters")
    call = peers.channels_last(module, inputs)
    if call is None:
        raise fused_peers.NoPeer("it has no filters of two axes")
    return {"channels_last": call}


def _inductor(module: torch.nn.Module, inputs: Inputs) -> dict[str, Call]:
    return {"inductor": peers.inductor(module, tuple(clone_storage(x) for x in inputs))}


PEERS: dict[str, Callable[[torch.nn.Module, Inputs], dict[str, Call]]] = {
    "bare": _bare,
    "cudnn": _cudnn,
    "channels_last": _channels_last,
    "inductor": _inductor,
}
