"""Other ways of running the same model, to compare with: each a callable, or why there is none."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], object]
Maker = Callable[[torch.nn.Module, tuple[Any, ...]], Call]


def channels_last(module: torch.nn.Module, args: tuple[Any, ...]) -> Call | None:
    """Eager with the weights, and whatever inputs are batches of images, channels-last; None if
    no layer is a 2-d convolution."""
    if not any(isinstance(m, torch.nn.Conv2d) for m in module.modules()):
        return None
    form = torch.channels_last
    other: Any = copy.deepcopy(module)
    other = other.to(memory_format=form)
    inputs = [
        x.contiguous(memory_format=form) if isinstance(x, torch.Tensor) and x.dim() == 4 else x
        for x in args
    ]
    return lambda: other(*inputs)


def inductor(module: torch.nn.Module, args: tuple[Any, ...]) -> Call:
    """torch.compile with its default backend, on a copy of the model."""
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(module), dynamic=False)
    compiled(*args)
    return lambda: compiled(*args)


# Ways to compile for a GPU, by name: options of Inductor. Freezing folds weights into constants
# (inference only); max-autotune (as mode "max-autotune-no-cudagraphs" has it) also times Triton's
# products and convolutions against the library's. None makes CUDA graphs: who measures does.
FORMS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "inductor_freezing": {"freezing": True},
    "inductor_max_autotune": {"max_autotune": True, "coordinate_descent_tuning": True},
}


def compiled_forms(
    module: torch.nn.Module, args: tuple[Any, ...], names: Sequence[str]
) -> tuple[dict[str, Callable[..., object]], dict[str, str]]:
    """The model as torch.compile makes it, by name of FORMS, compiled for arguments like these;
    and the reasons of those that fail."""
    from torch._inductor import config

    found: dict[str, Callable[..., object]] = {}
    failed: dict[str, str] = {}
    torch._dynamo.reset()  # not in between: it would make each compile again when it is timed
    for name in names:
        options = FORMS[name]
        compiled = torch.compile(copy.deepcopy(module), dynamic=False, options=options)
        try:
            # as options they tell this form's code from the others', but tracing reads the globals
            with quiet(), torch.no_grad(), config.patch(options):
                compiled(*args)
        except Exception as error:  # a peer may fail in any way; the reason is reported
            failed[name] = _reason(error)
        else:
            found[name] = compiled
    return found, failed


def _reason(error: Exception) -> str:
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"[:200]


def onnxruntime(module: torch.nn.Module, args: tuple[Any, ...]) -> Call:
    """ONNX Runtime on the CPU with as many threads as PyTorch has."""
    import onnxruntime as runtime

    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        _export_onnx(copy.deepcopy(module), args, path)
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    names = [i.name for i in session.get_inputs()]
    feed = {n: x.detach().numpy() for n, x in zip(names, tensors, strict=True)}
    return lambda: session.run(None, feed)


def _export_onnx(module: torch.nn.Module, args: tuple[Any, ...], path: Path) -> None:
    """By the exporter built on torch.export, else by the older one built on tracing."""
    try:
        torch.onnx.export(module, args, str(path), dynamo=True, verbose=False)
    except Exception:
        torch.onnx.export(module, args, str(path), dynamo=False)


PEERS: dict[str, Maker] = {"inductor": inductor, "onnxruntime": onnxruntime}


def names_for(device: torch.device) -> tuple[str, ...]:
    """The peers that run models on a device."""
    return ("inductor",) if device.type == "cuda" else tuple(PEERS)


def make_peers(
    module: torch.nn.Module, args: tuple[Any, ...], names: tuple[str, ...] = tuple(PEERS)
) -> tuple[dict[str, Call], dict[str, str]]:
    """Peers that run this model, by name, and the reasons of those that do not."""
    found: dict[str, Call] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            with quiet(), torch.no_grad():
                call = PEERS[name](module, args)
                call()
        except Exception as error:  # a peer may fail in any way; the reason is reported
            failed[name] = _reason(error)
        else:
            found[name] = call
    return found, failed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing on stdout, no warnings, no log lines: exporters chat."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
