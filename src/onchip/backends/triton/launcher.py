"""Running compiled Triton kernels through the CUDA driver.

A Launcher is made once for a kernel and a device; `run` neither allocates nor waits, so that a CUDA
graph can record it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onchip.backends.triton.build import Built, Cubin
from onchip.backends.triton.source import Launch
from onchip.errors import CompilerError, DeviceError

# cuda.h
_INVALID_CONTEXT = 201
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_REGISTERS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS
_WIDE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_DEPENDENT = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_FREE_SHARED = 48 << 10  # bytes that a launch may ask for without saying so before
_FREE_CLUSTER = 8  # programs of a cluster that a launch may ask for without saying so before
_ALIGNMENT = 16  # bytes, of every pointer: kernels are compiled for it


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_mode = threading.local()


@contextlib.contextmanager
def early_starts() -> Iterator[None]:
    """Inside, this thread's launches of kernels that wait for the one before them by themselves
    (Launch.waits) say so: such a kernel's programs start while the last ones of the kernel before
    are running (programmatic dependent launch)."""
    _mode.early = True
    try:
        yield
    finally:
        _mode.early = False


@dataclass(frozen=True, eq=False, slots=True)
class Function:
    """One launch, ready: the function's handle and the memory that its arguments are put into.
    takes: which of the kernel's pointers; slots: their values; parameters: the slots' addresses;
    config: what it asks for beyond a plain launch; waits: see Launch."""

    handle: ctypes.c_void_p
    name: str
    programs: int
    threads: int
    shared_bytes: int
    takes: tuple[int, ...]
    slots: ctypes.Array[ctypes.c_uint64]
    parameters: ctypes.Array[ctypes.c_void_p]
    config: _Config
    waits: bool
    clustered: bool


def current_device() -> int:
    """The index of the GPU that PyTorch works on; DeviceError if it sees none."""
    # asking whether there is one takes as long as a launch
    if not torch.cuda.is_initialized() and not torch.cuda.is_available():
        raise DeviceError("torch sees no GPU here: run `onchip doctor`")
    return torch.cuda.current_device()


class Launcher:
    """A kernel on one device. Functions are loaded here, not when it runs."""

    def __init__(self, built: Built, device: int) -> None:
        """`device`: its index. DeviceError if the driver refuses."""
        if not built.cubins:
            raise CompilerError(f"{built.path} was not compiled (TRITON_INTERPRET is set)")
        torch.cuda.init()
        self.device = device
        self._driver = driver()
        self._lock = threading.Lock()  # the slots belong to one launch at a time
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # the runtime makes its context now
            self._functions = tuple(
                _function(launch, cubin)
                for launch, cubin in zip(built.launches, built.cubins, strict=True)
                if launch.programs
            )

    def run(self, pointers: Sequence[int], stream: int = 0) -> int:
        """Launch the functions in order: `pointers` are the kernel's (inputs, outputs, workspace),
        `stream` a CUDA stream's handle on this device. 0, or DeviceError."""
        for p in pointers:
            if p % _ALIGNMENT:
                raise DeviceError(
                    f"a tensor at address {p:#x} is not aligned to {_ALIGNMENT} bytes, as "
                    "generated kernels need it: copy it first"
                )
        early = getattr(_mode, "early", False)
        with self._lock:
            for f in self._functions:
                for slot, n in enumerate(f.takes):
                    f.slots[slot] = pointers[n]
                code = self._launch(f, stream, early)
                if code == _INVALID_CONTEXT:  # this thread's first use of the GPU
                    _make_current(self.device)
                    code = self._launch(f, stream, early)
                if code:
                    _check(code, f"launching {f.name}")
        return 0

    def _launch(self, f: Function, stream: int, early: bool) -> int:
        early = early and f.waits
        if not (early or f.clustered):
            return self._driver.cuLaunchKernel(
                f.handle, f.programs, 1, 1, f.threads, 1, 1, f.shared_bytes, stream,
                f.parameters, None,
            )  # fmt: skip
        f.config.stream = stream
        f.config.count = f.clustered + early
        return self._driver.cuLaunchKernelEx(ctypes.byref(f.config), f.handle, f.parameters, None)


def _function(launch: Launch, cubin: Cubin) -> Function:
    """Load a binary into the current context."""
    handle = _loaded(cubin.path, cubin.name, torch.cuda.current_device())
    shared = cubin.resources.shared_bytes
    if shared > _FREE_SHARED:
        code = driver().cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED, shared)
        _check(code, f"giving {cubin.name} {shared} bytes of shared memory")
    if launch.cluster > _FREE_CLUSTER:
        code = driver().cuFuncSetAttribute(handle, _WIDE_CLUSTERS, 1)
        _check(code, f"letting {cubin.name} run in clusters of {launch.cluster}")
    slots = (ctypes.c_uint64 * cubin.parameters)()  # Triton's own pointers stay null
    first = ctypes.addressof(slots)
    addresses = [first + 8 * n for n in range(cubin.parameters)]
    parameters = (ctypes.c_void_p * cubin.parameters)(*addresses)
    threads = 32 * cubin.resources.warps
    return Function(
        handle, cubin.name, launch.programs, threads, shared, launch.arguments, slots, parameters,
        _config(launch, threads, shared), launch.waits, launch.cluster > 1,
    )  # fmt: skip


def _config(launch: Launch, threads: int, shared_bytes: int) -> _Config:
    """What cuLaunchKernelEx takes: attributes that are always meant, then those of early starts."""
    cluster = [_Attribute(_CLUSTER, 0, (launch.cluster, 1, 1))] * (launch.cluster > 1)
    attributes = [*cluster, _Attribute(_DEPENDENT, 0, (1,))]
    array = (_Attribute * len(attributes))(*attributes)
    grid, block = (launch.programs, 1, 1), (threads, 1, 1)
    return _Config(grid, block, shared_bytes, None, array, 0)


@functools.cache
def _loaded(path: Path, name: str, device: int) -> ctypes.c_void_p:
    """A function of a binary, loaded once a device and kept: launches may still be on their way."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    image = path.read_bytes()
    cuda = driver()
    _check(cuda.cuModuleLoadData(ctypes.byref(module), image), f"loading {path} on GPU {device}")
    found = cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
    _check(found, f"finding {name} in {path}")
    # with lazy loading, asking for an attribute loads the code: not in the midst of a graph
    registers = ctypes.c_int()
    asked = cuda.cuFuncGetAttribute(ctypes.byref(registers), _REGISTERS, function)
    _check(asked, f"loading {name} of {path}")
    return function


# ---- the driver --------------------------------------------------------------------------------

_pointer, _int, _unsigned = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_FUNCTIONS: dict[str, list[Any]] = {
    "cuModuleLoadData": [_pointer, ctypes.c_char_p],
    "cuModuleGetFunction": [_pointer, _pointer, ctypes.c_char_p],
    "cuFuncGetAttribute": [_pointer, _int, _pointer],
    "cuFuncSetAttribute": [_pointer, _int, _int],
    "cuLaunchKernel": [_pointer, *[_unsigned] * 7, _pointer, _pointer, _pointer],
    "cuLaunchKernelEx": [_pointer, _pointer, _pointer, _pointer],
    "cuDriverGetVersion": [_pointer],
    "cuDeviceGet": [_pointer, _int],
    "cuDevicePrimaryCtxRetain": [_pointer, _int],
    "cuCtxSetCurrent": [_pointer],
    "cuGetErrorName": [_int, _pointer],
    "cuGetErrorString": [_int, _pointer],
}


@functools.cache
def driver() -> ctypes.CDLL:
    """libcuda; DeviceError if there is none."""
    name = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise DeviceError(f"the NVIDIA driver ({name}) is not installed here: {error}") from error
    for function, arguments in _FUNCTIONS.items():
        getattr(library, function).argtypes = arguments
        getattr(library, function).restype = _int
    return library


def _check(code: int, what: str) -> None:
    if not code:
        return
    texts = []
    for ask in (driver().cuGetErrorName, driver().cuGetErrorString):
        text = ctypes.c_char_p()
        ask(code, ctypes.byref(text))
        texts.append((text.value or b"unknown").decode())
    raise DeviceError(f"{what} failed: {texts[0]} ({texts[1]})")


def _make_current(device: int) -> None:
    """Make torch's context, the device's primary one, this thread's."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver().cuDeviceGet(ctypes.byref(handle), device), f"opening GPU {device}")
    retained = driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    _check(retained, f"taking the context of GPU {device}")
    _check(driver().cuCtxSetCurrent(context), f"using the context of GPU {device}")
