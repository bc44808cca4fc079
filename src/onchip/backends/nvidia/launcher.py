"""Running compiled kernels through the CUDA driver.

A Launcher is made once for a kernel and a device; `run` neither allocates nor waits, so that a CUDA
graph can record it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onchip.backends.nvidia.build import Built, Cubin
from onchip.backends.nvidia.source import Launch, TensorMap
from onchip.backends.nvidia.tensor_map import EncodedMap, problem_of
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


class _Mode(threading.local):
    early = False  # found at once; looking for an attribute that is missing takes half a launch


_mode = _Mode()


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
    """One launch, ready: what cuLaunchKernelEx takes. config: the launch's size, stream and
    attributes; parameters: where each of its pointers is found (Launcher keeps them in one place),
    and its tensor maps, which are `maps`; counts: of the attributes, without and with an early
    start."""

    handle: ctypes.c_void_p
    name: str
    config: _Config
    parameters: ctypes.Array[ctypes.c_void_p]
    counts: tuple[int, int]
    maps: tuple[EncodedMap, ...] = ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        return ctypes.byref(self.config), self.handle, self.parameters, None


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
        for n in (n for launch in built.launches for n in launch.arguments):
            if isinstance(n, TensorMap) and (problem := problem_of(n)):
                raise DeviceError(f"a tensor map of {built.path} can't be: {problem}")
        torch.cuda.init()
        self.device = device
        self._launch = driver().cuLaunchKernelEx
        self._lock = threading.Lock()  # slots and configs belong to one call at a time
        taken = (n for x in built.launches for n in x.arguments)
        numbers = (n.n if isinstance(n, TensorMap) else n for n in taken)
        self._count = 1 + max(numbers, default=-1)
        self._slots = (ctypes.c_uint64 * (self._count + 1))()  # of pointers; the last stays null
        self._put = struct.Struct(f"={self._count}Q").pack_into
        self._stream, self._early = 0, False
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # the runtime makes its context now
            self._functions = tuple(
                _function(launch, cubin, self._slots)
                for launch, cubin in zip(built.launches, built.cubins, strict=True)
                if launch.programs
            )
        self._calls = tuple((f, f.arguments) for f in self._functions)
        self._maps = tuple(m for f in self._functions for m in f.maps)

    def run(self, pointers: Sequence[int], stream: int = 0) -> int:
        """Launch the functions in order: `pointers` are the kernel's (inputs, outputs, workspace),
        `stream` a CUDA stream's handle on this device. 0, or DeviceError."""
        for p in pointers:
            if p % _ALIGNMENT:
                raise DeviceError(
                    f"a tensor at address {p:#x} is not aligned to {_ALIGNMENT} bytes, as "
                    "generated kernels need it: copy it first"
                )
        self.enqueue(pointers, stream)
        return 0

    def enqueue(self, pointers: Sequence[int], stream: int) -> None:
        """`run`, for pointers that are known to be aligned."""
        early = _mode.early
        with self._lock:
            self._put(self._slots, 0, *pointers[: self._count])
            for m in self._maps:
                if (address := pointers[m.spec.n]) != m.pointer:
                    self._move(m, address)
            if stream != self._stream:
                for f in self._functions:
                    f.config.stream = stream
                self._stream = stream
            if early is not self._early:
                for f in self._functions:
                    f.config.count = f.counts[early]
                self._early = early
            for f, arguments in self._calls:
                code = self._launch(*arguments)
                if code == _INVALID_CONTEXT:  # this thread's first use of the GPU
                    make_current(self.device)
                    code = self._launch(*arguments)
                if code:
                    _check(code, f"launching {f.name}")

    def _move(self, m: EncodedMap, pointer: int) -> None:
        code = m.move(driver(), pointer)
        if code == _INVALID_CONTEXT:
            make_current(self.device)
            code = m.move(driver(), pointer)
        _check(code, f"making a tensor map of the memory at {pointer:#x}")


def _function(launch: Launch, cubin: Cubin, slots: ctypes.Array[ctypes.c_uint64]) -> Function:
    """Load a binary into the current context. It finds its pointers in the kernel's `slots`."""
    handle = _loaded(cubin.path, cubin.name, torch.cuda.current_device())
    shared = cubin.resources.shared_bytes
    if shared > _FREE_SHARED:
        code = driver().cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED, shared)
        _check(code, f"giving {cubin.name} {shared} bytes of shared memory")
    if launch.cluster > _FREE_CLUSTER:
        code = driver().cuFuncSetAttribute(handle, _WIDE_CLUSTERS, 1)
        _check(code, f"letting {cubin.name} run in clusters of {launch.cluster}")
    null = len(slots) - 1  # for pointers of Triton's own
    places = [*launch.arguments, *[null] * (cubin.parameters - len(launch.arguments))]
    first = ctypes.addressof(slots)
    given = [EncodedMap(n) if isinstance(n, TensorMap) else first + 8 * n for n in places]
    maps = tuple(x for x in given if isinstance(x, EncodedMap))
    addresses = [x.address if isinstance(x, EncodedMap) else x for x in given]
    parameters = (ctypes.c_void_p * len(places))(*addresses)
    grid, block = (launch.programs, 1, 1), (32 * cubin.resources.warps, 1, 1)
    plain = [_Attribute(_CLUSTER, 0, (launch.cluster, 1, 1))] * (launch.cluster > 1)
    early = [_Attribute(_DEPENDENT, 0, (1,))] * launch.waits  # the last one, so that it can be left
    attributes = (_Attribute * 2)(*plain, *early)
    counts = len(plain), len(plain) + len(early)
    config = _Config(grid, block, shared, None, attributes, counts[0])
    return Function(handle, cubin.name, config, parameters, counts, maps)


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

_pointer, _int = ctypes.c_void_p, ctypes.c_int
_FUNCTIONS: dict[str, list[Any] | None] = {
    "cuModuleLoadData": [_pointer, ctypes.c_char_p],
    "cuModuleGetFunction": [_pointer, _pointer, ctypes.c_char_p],
    "cuFuncGetAttribute": [_pointer, _int, _pointer],
    "cuFuncSetAttribute": [_pointer, _int, _int],
    # called for each kernel, with ctypes objects only: nothing is converted, which takes as long as
    # the rest
    "cuLaunchKernelEx": None,
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


def make_current(device: int) -> None:
    """Make torch's context, the device's primary one, this thread's."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver().cuDeviceGet(ctypes.byref(handle), device), f"opening GPU {device}")
    retained = driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    _check(retained, f"taking the context of GPU {device}")
    _check(driver().cuCtxSetCurrent(context), f"using the context of GPU {device}")
