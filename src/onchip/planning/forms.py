"""The forms of a program, and how long each takes: what a report's latencies are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from onchip.capture.captured import Captured
from onchip.capture.containers import flatten
from onchip.planning import assess, peers
from onchip.planning.assess import Compiled, Measured
from onchip.planning.calibrate import kernel_call_us
from onchip.planning.intervals import interval
from onchip.planning.peers import quiet
from onchip.planning.plan import LibraryStep, Plan

MEASURE_S = 4.0  # seconds that the forms of a program are timed for its report
GRAPH = "_graph"  # ends the name of a form that was timed as one CUDA graph


def library_plan(captured: Captured) -> Plan:
    """Every operator as its library call: what is always possible."""
    return Plan(tuple(LibraryStep(n) for n in captured.graph.nodes))


def form_of(compiled: Compiled) -> tuple[Captured, Plan]:
    """What runs: the fused plan, the library's calls, or the module itself."""
    match compiled.outcome.form:
        case "eager":
            eager = Plan(library_plan(compiled.original).steps, eager=compiled.outcome.text)
            return compiled.original, eager
        case "library":
            return compiled.captured, library_plan(compiled.captured)
    return compiled.captured, compiled.planned.plan


def graph_inputs(captured: Captured, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The distinct tensors among the arguments, in the order of the graph's inputs."""
    leaves, _ = flatten((args, kwargs))
    found: dict[int, torch.Tensor] = {}
    for leaf, x in zip(captured.leaves, leaves, strict=True):
        if leaf.tensor is not None:
            found.setdefault(leaf.tensor, x)
    return [found[i] for i in range(len(found))]


def measure(
    program: Callable[..., object],
    compiled: Compiled,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    device: torch.device,
    with_peers: bool,
) -> Measured:
    """Time every form of the model, interleaved, on copies of its inputs: what a caller waits for,
    and on a GPU also ("eager_graph" ...) what it takes as one CUDA graph."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device, assess.undisturbed(module, tensors):
        inputs, _ = assess.copied(args, {})
        forms: dict[str, Callable[[], object]] = {
            "eager": lambda: module(*inputs),
            "onchip": lambda: program(*inputs),
        }
        other = peers.channels_last(module, inputs)
        if other is not None:
            forms["eager_channels_last"] = other
        failed: dict[str, str] = {}
        if with_peers:
            found, failed = peers.make_peers(module, inputs, peers.names_for(device))
            forms |= found
        notes = [f"{k} does not run this model: {v}" for k, v in failed.items()]
        with quiet():
            taken = assess.measure_forms(forms, MEASURE_S, assess.caller_clock(device))
            times = assess.medians_us(taken)
            if device.type == "cuda":
                graphed, odd = assess.measure_graphs(forms, MEASURE_S, device)
                times |= {k + GRAPH: t for k, t in graphed.items()}
                notes += [f"{k} can't be captured in a CUDA graph: {v}" for k, v in odd.items()]
        graph, plan = form_of(compiled)
        nodes = [s.node for s in plan.steps if isinstance(s, LibraryStep)]
        node_us = assess.library_times(
            nodes, graph, graph_inputs(graph, inputs, {}), compiled.planned, device
        )
    baselines: dict[str, float | None] = {
        k: v for k, v in times.items() if k not in ("eager", "onchip")
    }
    baselines |= dict.fromkeys(failed)
    call_us = kernel_call_us() if device.type == "cpu" else None
    ratio = interval(taken["onchip"], taken["eager"])
    return Measured(
        times["eager"], times["onchip"], baselines, tuple(notes), node_us, call_us, ratio
    )
