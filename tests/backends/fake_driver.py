"""libcuda as Python functions: what was called, with the values behind the pointers."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace

from onchip.backends.nvidia import launcher, tensor_map


class Driver:
    """libcuda in Python: what was called, and codes to return instead of 0 (one each)."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.codes: dict[str, list[int]] = {}
        self.counts: dict[int, int] = {}
        self.attributes: list[list[tuple]] = []  # of each launch: number, value
        self.functions: dict[str, int] = {}  # parameters of a function, where they are not 5
        for name, arguments in {**launcher._FUNCTIONS, **tensor_map._FUNCTIONS}.items():
            made = ctypes.CFUNCTYPE(ctypes.c_int, *(arguments or [ctypes.c_void_p] * 4))(
                lambda *a, name=name: self.called(name, a)
            )
            setattr(self, name, made)

    def called(self, name: str, arguments: tuple) -> int:
        if name == "cuGetErrorName":
            self.text = ctypes.c_char_p(b"CUDA_ERROR_OF_A_TEST")
            ctypes.c_void_p.from_address(arguments[1]).value = ctypes.cast(
                self.text, ctypes.c_void_p
            ).value
            return 0
        if name == "cuLaunchKernelEx":
            config, handle, parameters, extra = arguments
            addresses = (ctypes.c_void_p * self.counts[handle]).from_address(parameters)
            values = [ctypes.c_uint64.from_address(a).value for a in addresses]
            sizes = list((ctypes.c_uint * 7).from_address(config))
            stream, at, count = (ctypes.c_uint64 * 3).from_address(config + 32)
            assert extra is None
            words = [(ctypes.c_uint * 5).from_address(at + 72 * n) for n in range(count & 0xFFFF)]
            self.attributes.append([(w[0], *w[2:]) for w in words])
            arguments = (handle, *sizes, stream, values)
        elif name == "cuModuleGetFunction":
            handle = 1000 + len(self.counts)
            ctypes.c_void_p.from_address(arguments[0]).value = handle
            self.counts[handle] = self.functions.get(arguments[2].decode(), 5)
        elif name == "cuTensorMapEncodeTiled":
            rank, given = arguments[2], arguments[4:8]
            kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
            counts = (rank, rank - 1, rank, rank)
            read = [
                list((k * n).from_address(a)) for k, n, a in zip(kinds, counts, given, strict=True)
            ]
            self.put(arguments[0], arguments[3])
            arguments = (*arguments[1:4], *read, *arguments[8:])
        elif name == "cuTensorMapReplaceAddress":
            self.put(*arguments)
            arguments = arguments[1:]
        self.calls.append((name, *arguments))
        left = self.codes.get(name, [])
        return left.pop(0) if left else 0

    def put(self, at: int, address: int) -> None:
        """Of this driver's tensor maps, only the first word says something: the address."""
        assert at % 64 == 0, f"a tensor map at {at:#x}"
        memory = (ctypes.c_uint64 * 16).from_address(at)
        memory[:] = [address, *[0] * 15]

    def named(self, name: str) -> list[tuple]:
        return [c[1:] for c in self.calls if c[0] == name]


def installed(monkeypatch) -> Iterator[Driver]:
    """In place of CUDA's driver, and of PyTorch's device and streams."""
    fake = Driver()
    cuda = launcher.torch.cuda
    monkeypatch.setattr(launcher, "driver", lambda: fake)
    monkeypatch.setattr(cuda, "init", lambda: None)
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "device", lambda index: contextlib.nullcontext())
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(cuda, "current_stream", lambda: stream)
    launcher._loaded.cache_clear()
    yield fake
    launcher._loaded.cache_clear()
