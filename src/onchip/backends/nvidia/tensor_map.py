"""CUtensorMap: how the copy engine sees a tensor (cuTensorMapEncodeTiled of the driver API)."""

from __future__ import annotations

import ctypes
from typing import Any

from onchip.backends.nvidia.source import TensorMap
from onchip.errors import DeviceError

_BYTES, _ALIGNMENT = 128, 64  # of a CUtensorMap
_UNIT = 16  # bytes: of addresses, strides and rows of boxes
_MOST_DIMENSIONS, _MOST_BOX, _MOST_EVERY = 5, 256, 8
_MOST_SIZE, _MOST_STRIDE = 1 << 32, 1 << 40
# cuda.h: CUtensorMapDataType and bytes of an element; CUtensorMapSwizzle by bytes of a row
_KINDS = {"fp16": (6, 2), "fp32": (7, 4), "bf16": (9, 2), "tf32": (11, 4)}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_NO_INTERLEAVE, _PROMOTE_256, _ZEROS = 0, 3, 0


def problem_of(m: TensorMap) -> str:
    """Why the hardware can't have such a map; "" if it can (CUDA driver API, tensor map objects,
    tiled, not interleaved)."""
    rank = len(m.sizes)
    if m.kind not in _KINDS:
        return f"it has no elements of type {m.kind}: known are {', '.join(_KINDS)}"
    size = _KINDS[m.kind][1]
    if not 1 <= rank <= _MOST_DIMENSIONS:
        return f"{rank} dimensions, where 1 to {_MOST_DIMENSIONS} are possible"
    if (len(m.strides), len(m.box), len(m.every)) != (rank - 1, rank, rank):
        return (
            f"{rank} sizes need {rank - 1} strides, {rank} of box and every, not "
            f"{len(m.strides)}, {len(m.box)} and {len(m.every)}"
        )
    if m.swizzle not in _SWIZZLES:
        return f"swizzle is {m.swizzle} bytes, where {', '.join(map(str, _SWIZZLES))} are possible"
    if m.offset * size % _UNIT:
        return f"it starts {m.offset * size} bytes into the tensor, no multiple of {_UNIT}"
    for name, values, low, high in (
        ("size", m.sizes, 1, _MOST_SIZE),
        ("box", m.box, 1, _MOST_BOX),
        ("every", m.every, 1, _MOST_EVERY),
        ("stride", m.strides, 0, _MOST_STRIDE - 1),
    ):
        for n, v in enumerate(values):
            if not low <= v <= high:
                return f"{name} {n} is {v:,}, where {low} to {high:,} is possible"
    for n, v in enumerate(m.strides):
        if v % _UNIT:
            return f"stride {n} is {v:,} bytes, no multiple of {_UNIT}"
    row = m.box[0] * size
    if m.every[0] != 1:
        return f"it takes one in {m.every[0]} of the innermost elements, where all are taken"
    if row % _UNIT:
        return f"a row of the box is {row} bytes, no multiple of {_UNIT}"
    if m.swizzle and row > m.swizzle:
        return f"a row of the box is {row} bytes, and {m.swizzle} are permuted"
    return ""


class EncodedMap:
    """A tensor map in memory, as a kernel takes it by value. pointer: of the tensor that it is
    for, 0 before the first `move`."""

    def __init__(self, spec: TensorMap) -> None:
        self.spec, self.pointer = spec, 0
        self._memory = (ctypes.c_char * (_BYTES + _ALIGNMENT))()
        self.address = -(-ctypes.addressof(self._memory) // _ALIGNMENT) * _ALIGNMENT

    def move(self, driver: ctypes.CDLL, pointer: int) -> int:
        """Make it for the tensor at another address; the driver's code, 0 if all is well.
        DeviceError if the driver has no tensor maps. A launch that is on its way has a copy."""
        address = pointer + self.spec.offset * _KINDS[self.spec.kind][1]
        if self.pointer:
            name, arguments = "cuTensorMapReplaceAddress", (self.address, address)
        else:
            name, arguments = "cuTensorMapEncodeTiled", self._encoding(address)
        code = _function(driver, name)(*arguments)
        if not code:
            self.pointer = pointer
        return code

    def _encoding(self, address: int) -> tuple[Any, ...]:
        m, rank = self.spec, len(self.spec.sizes)
        return (
            self.address,
            _KINDS[m.kind][0],
            rank,
            address,
            (ctypes.c_uint64 * rank)(*m.sizes),
            (ctypes.c_uint64 * max(rank - 1, 1))(*m.strides),
            (ctypes.c_uint32 * rank)(*m.box),
            (ctypes.c_uint32 * rank)(*m.every),
            _NO_INTERLEAVE,
            _SWIZZLES[m.swizzle],
            _PROMOTE_256,
            _ZEROS,
        )


_pointer, _int, _word = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
_FUNCTIONS: dict[str, list[Any]] = {
    "cuTensorMapEncodeTiled": [
        _pointer, _int, _word, _pointer, _pointer, _pointer, _pointer, _pointer,
        _int, _int, _int, _int,
    ],
    "cuTensorMapReplaceAddress": [_pointer, _pointer],
}  # fmt: skip


def _function(driver: ctypes.CDLL, name: str) -> Any:
    try:
        function = getattr(driver, name)
    except AttributeError as error:
        raise DeviceError(
            f"the NVIDIA driver has no {name}: kernels for sm_90 need one for CUDA 12 or later"
        ) from error
    function.argtypes, function.restype = _FUNCTIONS[name], _int
    return function
