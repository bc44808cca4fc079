"""Element types, and PyTorch's rule for combining them (torch.result_type)."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """Element type. Members: name, size in bytes, category (0 bool, 1 integer, 2 floating,
    3 library only)."""

    BOOL = ("bool", 1, 0)
    U8 = ("uint8", 1, 1)
    I8 = ("int8", 1, 1)
    I16 = ("int16", 2, 1)
    I32 = ("int32", 4, 1)
    I64 = ("int64", 8, 1)
    F16 = ("float16", 2, 2)
    BF16 = ("bfloat16", 2, 2)
    F32 = ("float32", 4, 2)
    F64 = ("float64", 8, 2)
    # Stored and passed to library calls only: no expression computes with these.
    U16 = ("uint16", 2, 3)
    U32 = ("uint32", 4, 3)
    U64 = ("uint64", 8, 3)
    C64 = ("complex64", 8, 3)
    C128 = ("complex128", 16, 3)
    F8_E4M3 = ("float8_e4m3fn", 1, 3)
    F8_E5M2 = ("float8_e5m2", 1, 3)

    def __init__(self, label: str, size: int, category: int) -> None:
        self.label, self.size, self.category = label, size, category

    @property
    def is_float(self) -> bool:
        return self.category == 2

    @property
    def is_int(self) -> bool:
        return self.category == 1

    @property
    def is_computable(self) -> bool:
        """Whether expressions can have this type; otherwise only library calls touch it."""
        return self.category < 3

    @property
    def compute(self) -> DType:
        """The type that arithmetic happens in: half precision is widened to float32 on chip."""
        return DType.F32 if self in (DType.F16, DType.BF16) else self

    def __repr__(self) -> str:
        return self.label


BY_LABEL = {d.label: d for d in DType}

_INTS = (DType.I8, DType.I16, DType.I32, DType.I64)


def promote(a: DType, b: DType) -> DType:
    """Common type of two elements of equal standing (c10::promoteTypes)."""
    if a is b:
        return a
    if a.category != b.category:
        return a if a.category > b.category else b
    if a.is_float:
        if {a, b} == {DType.F16, DType.BF16}:
            return DType.F32
        return a if a.size > b.size else b
    if DType.U8 in (a, b):
        other = b if a is DType.U8 else a
        return _INTS[max(_INTS.index(other), 1)]
    return a if a.size > b.size else b


def result_type(operands: list[tuple[DType, str]]) -> DType:
    """PyTorch's type promotion. Each operand is (dtype, "tensor" | "zero_dim" | "scalar").

    A dimensioned tensor outranks a 0-d tensor, which outranks a Python scalar, unless the lower
    rank has a higher category (https://docs.pytorch.org/docs/stable/tensor_attributes.html).
    """
    chosen: DType | None = None
    for rank in ("tensor", "zero_dim", "scalar"):
        group = [d for d, r in operands if r == rank]
        if not group:
            continue
        own = group[0]
        for d in group[1:]:
            own = promote(own, d)
        if chosen is None:
            chosen = own
        elif own.category > chosen.category:
            # a float scalar among integers gives the default float type
            chosen = own
    assert chosen is not None, "result_type of nothing"
    return chosen


def scalar_dtype(value: object) -> DType:
    """The type a Python number has in promotion: bool, int64, or the default float32."""
    if isinstance(value, bool):
        return DType.BOOL
    return DType.I64 if isinstance(value, int) else DType.F32
