"""torch.export, wrapped: tensors in, tensors out, functional ATen, and errors in one line."""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onchip.capture.containers import TENSOR_TYPES, Spec, flatten, is_constant, rebuild
from onchip.capture.functional import functional
from onchip.errors import CaptureError

with contextlib.suppress(ImportError):
    # torch.export loads half a second of modules at its first call: load them with torch instead
    import torch._functorch.aot_autograd
    import torch.export._trace

INNER = "model"  # the user's module inside the wrapper: parameter names start with it

# torch.export keeps global state while tracing.
export_lock = threading.RLock()


class FunctionModule(torch.nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class _FlatModule(torch.nn.Module):
    """The user's module behind a flat signature; what the result looked like goes to `seen`."""

    def __init__(self, model: torch.nn.Module, restore: Callable[..., Any], seen: list) -> None:
        super().__init__()
        setattr(self, INNER, model)
        self.restore, self.seen = restore, seen

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.restore(tensors)
        leaves, spec = flatten(getattr(self, INNER)(*args, **kwargs))
        self.seen[:] = [(leaves, spec)]
        return tuple(x for x in leaves if isinstance(x, TENSOR_TYPES))


@dataclass(frozen=True, eq=False, slots=True)
class Exported:
    """A functional program, the structure of its result, and each leaf of it: (constant, False),
    or (None, True) where a tensor belongs."""

    program: Any
    output_spec: Spec
    leaves: tuple[tuple[Any, bool], ...]

    def fake_inputs(self) -> list[torch.Tensor]:
        """What tracing knew about the user's inputs (sizes may be symbols)."""
        specs = self.program.graph_signature.input_specs
        user = {s.arg.name for s in specs if s.kind.name == "USER_INPUT"}
        nodes = [n for n in self.program.graph.nodes if n.op == "placeholder" and n.name in user]
        return [n.meta["val"] for n in nodes]


def export(
    module: torch.nn.Module,
    input_spec: Spec,
    leaves: list[Any],
    tensors: list[torch.Tensor],
    varying: list[set[int]] | None = None,
) -> Exported:
    """Trace `module` on the leaves; `tensors` are its distinct tensors, in order. Sizes of the
    axes in `varying` (one set for each tensor) become symbols where the model allows it.

    Raises CaptureError: data-dependent control flow or shapes, unsupported Python, or whatever
    error the model itself raises on these inputs.
    """
    position = {id(t): i for i, t in enumerate(tensors)}
    places = [position.get(id(x)) if isinstance(x, torch.Tensor) else None for x in leaves]

    def restore(given: tuple[torch.Tensor, ...]) -> Any:
        filled = [x if p is None else given[p] for x, p in zip(leaves, places, strict=True)]
        return rebuild(input_spec, filled)

    seen: list[Any] = []
    dynamic: dict[str, Any] = {}
    if varying is not None:
        axes = tuple({i: torch.export.Dim.AUTO for i in v} or None for v in varying)
        dynamic["dynamic_shapes"] = {"tensors": axes}
    flat = _FlatModule(module, restore, seen)
    try:
        with export_lock, torch.no_grad(), _quiet(), _keep_python_state(module, tensors):
            program = torch.export.export(flat, _apart(tensors), {}, strict=False, **dynamic)
            program = functional(program)
    except Exception as error:
        raise CaptureError(_explain(error)) from error
    out_leaves, out_spec = seen[0]
    return Exported(program, out_spec, tuple(_check_output(x) for x in out_leaves))


def _apart(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors, those that share storage replaced by stand-ins of the same layout: tracing
    reads no values, and the caller runs overlapping inputs that are written in eager mode."""
    seen: set[int] = set()
    out = []
    for t in tensors:
        storage = t.untyped_storage().data_ptr()
        if storage and storage in seen:
            extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            flat = torch.empty(max(extent, 0), dtype=t.dtype, device=t.device)
            t = flat.as_strided(t.shape, t.stride(), 0)
        seen.add(storage)
        out.append(t)
    return tuple(out)


def _check_output(leaf: Any) -> tuple[Any, bool]:
    if isinstance(leaf, TENSOR_TYPES):
        return None, True
    if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise CaptureError(
            "the model returns a Python number computed from tensor data, which a compiled "
            "program can't know in advance; return the tensor instead"
        )
    if not is_constant(leaf):
        raise CaptureError(
            f"the model returns an object of type {type(leaf).__name__}; return tensors, numbers, "
            "or containers of them (tuple, list, dict, named tuple, dataclass)"
        )
    return leaf, False


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No log lines about what is reported as a CaptureError anyway (torch.export prints the graph
    so far to stderr)."""
    import logging

    loggers = [logging.getLogger(n) for n in ("torch.fx.experimental.symbolic_shapes",)]
    levels = [g.level for g in loggers]
    for g in loggers:
        g.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for g, level in zip(loggers, levels, strict=True):
            g.setLevel(level)


@contextlib.contextmanager
def _keep_python_state(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put back every attribute that tracing changed, and the random number generators."""
    with torch.random.fork_rng(devices=gpus(module, inputs)):
        before = [(m, dict(m.__dict__), dict(m._buffers)) for m in module.modules()]
        try:
            yield
        finally:
            for m, attributes, buffers in before:
                for name in set(m.__dict__) - set(attributes):
                    del m.__dict__[name]
                m.__dict__.update(attributes)
                m._buffers.update(buffers)


def gpus(module: torch.nn.Module, inputs: Sequence[torch.Tensor] = ()) -> list[int]:
    """The CUDA devices of the model's and its inputs' tensors: a call may use their generators."""
    tensors = [*module.parameters(), *module.buffers(), *inputs]
    return sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})


_HINTS = (
    ("data-dependent", "write the branch with torch.where, or compute the number outside"),
    ("DataDependent", "write the branch with torch.where, or compute the number outside"),
    ("unbacked", "give the result a fixed size, or compute it outside the model"),
)


def _explain(error: Exception) -> str:
    """One line: what went wrong, where in the user's code, and what to do."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    text = next((x.strip() for x in str(root).splitlines() if x.strip()), type(root).__name__)
    text = re.sub(r"\s*\(unhinted:.*$", "", text)
    place = user_frame(
        [(f.filename, f.lineno or 0) for f in traceback.extract_tb(root.__traceback__)]
    )
    where = f" at {place[0]}:{place[1]}" if place else ""
    hint = next((h for k, h in _HINTS if k in str(root) or k in type(root).__name__), None)
    advice = hint or "the model must run in eager mode on these inputs and be traceable"
    return f"this model can't be captured{where}: {type(root).__name__}: {text}; {advice}"


_NO_FILE = re.compile(r"<frozen|<string>|/contextlib\.py")
_OWN = Path(__file__).parents[1]
_PACKAGES = (str(_OWN) + os.sep, str(Path(torch.__file__).parent) + os.sep)
_MODELS = str(_OWN / "models") + os.sep


def user_frame(frames: list[tuple[str, int]]) -> tuple[str, int] | None:
    """The innermost (file, line) that is neither PyTorch's nor ours (our models are like a
    user's), wherever the user's project lies."""

    def is_user(file: str) -> bool:
        ours = file.startswith(_PACKAGES) and not file.startswith(_MODELS)
        return not ours and not _NO_FILE.search(file)

    return next((f for f in reversed(frames) if is_user(f[0])), None)
