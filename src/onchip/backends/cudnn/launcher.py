"""Running cuDNN's plans. A launch neither allocates nor waits: a CUDA graph can record it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from onchip.backends.cudnn.build import Plan
from onchip.backends.nvidia.launcher import make_current
from onchip.errors import DeviceError

_lock = threading.Lock()  # a handle belongs to one call at a time
_thread = threading.local()


@functools.cache
def _handle(device: int) -> Any:
    """cuDNN's state for a GPU, the current one; kept, since work may still be on its way."""
    import cudnn

    return cudnn.create_handle()


class PlanLauncher:
    """A plan on one GPU."""

    def __init__(self, plan: Plan, device: int) -> None:
        """`device`: its index. DeviceError if cuDNN can't load the plan."""
        import cudnn

        torch.cuda.init()
        self.device, self._set_stream = device, cudnn.set_stream
        self._names = range(1, plan.pointers + 1)  # see source.py
        with _lock, torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # the runtime makes its context now
            try:
                self._handle = _handle(device)
                self._graph = cudnn.pygraph(handle=self._handle)
                self._graph.deserialize(self._handle, plan.stored.read_bytes())
            except Exception as error:  # the package has types of its own
                raise DeviceError(f"cuDNN can't load its plan {plan.stored}: {error}") from error

    def run(self, pointers: Sequence[int], stream: int = 0) -> int:
        """Enqueue it: pointers of inputs, numbers, results and workspace, in the text's order;
        `stream`: a CUDA stream's handle on this device. 0, or DeviceError."""
        self.enqueue(pointers, stream)
        return 0

    def enqueue(self, pointers: Sequence[int], stream: int) -> None:
        """`run`, without an answer."""
        count = len(self._names)
        pack: dict[Any, Any] = dict(zip(self._names, pointers, strict=False))
        workspace = pointers[count] if len(pointers) > count else None
        with _lock, torch.cuda.device(self.device):
            if getattr(_thread, "current", None) != self.device:  # this thread's first use of it
                make_current(self.device)
                _thread.current = self.device
            try:
                self._set_stream(handle=self._handle, stream=stream)
                self._graph.execute(pack, workspace, handle=self._handle)
            except Exception as error:
                raise DeviceError(f"cuDNN can't run its plan: {error}") from error
