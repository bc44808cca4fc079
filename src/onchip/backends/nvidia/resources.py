"""What a compiled kernel needs of a multiprocessor, and when that is too much."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onchip.errors import CompilerError
from onchip.fusion.machine import Gpu
from onchip.fusion.refusal import Refusal, Rule

# Judgements, not limits of the hardware: beyond these a kernel has always lost to a smaller tile.
MOST_STACK = 128  # bytes a thread: a few values that are read again once
MOST_CODE = 256 << 10  # bytes: twice the instruction cache of a multiprocessor (about 128 KiB)
MOST_SECONDS = 30.0  # of a processor, to compile


@dataclass(frozen=True, slots=True)
class Resources:
    """One compiled function.

    registers       of a thread
    stack_bytes     local memory of a thread; with spills, what did not fit its registers
    spills          instructions that store to or load from local memory
    shared_bytes    of a program
    warps           of a program
    programs        that a multiprocessor holds at once; 0: not even one
    occupancy       resident share of a multiprocessor's warps, 0 to 1
    instructions    of machine code; code_bytes: their size
    seconds         of processor time that compiling took
    warnings        what the compiler's back end said about its code, each once
    """

    registers: int
    stack_bytes: int
    spills: int
    shared_bytes: int
    warps: int
    programs: int
    occupancy: float
    instructions: int
    code_bytes: int
    seconds: float
    warnings: tuple[str, ...] = ()

    @property
    def serialised(self) -> str:
        """The warning that asynchronous matrix products wait for each other, "" if there is none:
        results or operands were not in the registers that the hardware needs them in."""
        return next((w for w in self.warnings if "wgmma" in w and "serialized" in w), "")


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Limits of one multiprocessor: resident warps and programs, bytes of shared memory."""

    warps: int
    programs: int
    shared_bytes: int


# CUDA C++ Programming Guide, technical specifications per compute capability.
_MULTIPROCESSORS = {
    80: Multiprocessor(64, 32, 164 << 10),
    86: Multiprocessor(48, 16, 100 << 10),
    89: Multiprocessor(48, 24, 100 << 10),
    90: Multiprocessor(64, 32, 228 << 10),
    100: Multiprocessor(64, 32, 228 << 10),
    103: Multiprocessor(64, 32, 228 << 10),
    120: Multiprocessor(48, 24, 100 << 10),
}
_REGISTERS = (
    1 << 16
)  # of a multiprocessor, in four equal parts; a warp has its registers in one of them
_PARTS = 4
_REGISTER_UNIT = 256  # registers of a warp are handed out in units of so many
_SHARED_UNIT = 128
_RESERVED = 1024  # bytes of shared memory that the driver keeps for each program


def resident_programs(
    capability: int, registers: int, shared_bytes: int, warps: int
) -> tuple[int, float]:
    """(programs that a multiprocessor holds at once, resident share of its warps). CompilerError
    for a capability whose limits are not known."""
    limits = _MULTIPROCESSORS.get(capability)
    if limits is None:
        known = ", ".join(f"sm_{c}" for c in _MULTIPROCESSORS)
        raise CompilerError(f"no limits are known for sm_{capability}: known are {known}")
    of_warp = _up(max(registers, 1) * 32, _REGISTER_UNIT)
    by_registers = _REGISTERS // _PARTS // of_warp * _PARTS // warps
    by_shared = limits.shared_bytes // _up(shared_bytes + _RESERVED, _SHARED_UNIT)
    n = min(limits.programs, limits.warps // warps, by_registers, by_shared)
    return n, n * warps / limits.warps


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def over_budget(resources: Sequence[Resources], gpu: Gpu) -> Refusal | None:
    """Why a kernel (the functions of one text) should not even be timed, with the figures."""
    for r in resources:
        found = _over(r, gpu)
        if found is not None:
            return found
    return None


def _over(r: Resources, gpu: Gpu) -> Refusal | None:
    costs = {
        "registers": r.registers,
        "stack_bytes": r.stack_bytes,
        "shared_bytes": r.shared_bytes,
        "code_bytes": r.code_bytes,
        "compile_s": r.seconds,
    }
    if r.shared_bytes > gpu.shared_bytes:
        text = f"{r.shared_bytes:,} bytes of {gpu.shared_bytes:,}"
        return Refusal(Rule.SHARED_MEMORY, gpu.name, text, costs)
    if not r.programs:
        text = f"{r.registers} registers a thread, {r.warps} warps: no program fits"
        return Refusal(Rule.SPILLS, gpu.name, text, costs)
    if r.stack_bytes > MOST_STACK:
        text = f"{r.stack_bytes:,} bytes a thread of at most {MOST_STACK}, {r.spills:,} accesses"
        return Refusal(Rule.SPILLS, gpu.name, text, costs)
    if r.code_bytes > MOST_CODE:
        text = f"{r.code_bytes >> 10:,} KiB of machine code of at most {MOST_CODE >> 10}"
        return Refusal(Rule.TOO_LARGE, gpu.name, text, costs)
    if r.serialised:
        return Refusal(Rule.SERIALISED, gpu.name, r.serialised, costs)
    if r.seconds > MOST_SECONDS:
        text = f"compiling took {r.seconds:.0f} s of at most {MOST_SECONDS:.0f}"
        return Refusal(Rule.TOO_LARGE, gpu.name, text, costs)
    return None


# ---- the binary --------------------------------------------------------------------------------

_INSTRUCTION = 16  # bytes, since sm_70
# The low 12 bits of an instruction, since sm_70: stores to and loads from local memory.
_LOCAL = {0x387: "STL", 0x983: "LDL"}


def examine(
    cubin: Path,
    capability: int,
    shared_bytes: int,
    warps: int,
    seconds: float,
    warnings: tuple[str, ...] = (),
) -> Resources:
    """The resources of a binary. `shared_bytes`, `warps`: those it is launched with; `seconds`:
    that compiling it took; `warnings`: of the compiler. CompilerError if it can't be read."""
    usage = _usage(cubin)
    code = [body for name, body in _sections(cubin.read_bytes()) if name.startswith(".text")]
    programs, occupancy = resident_programs(capability, usage["REG"], shared_bytes, warps)
    return Resources(
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        spills=sum(_local_accesses(c) for c in code),
        shared_bytes=shared_bytes,
        warps=warps,
        programs=programs,
        occupancy=occupancy,
        instructions=sum(len(c) for c in code) // _INSTRUCTION,
        code_bytes=sum(len(c) for c in code),
        seconds=seconds,
        warnings=warnings,
    )


def tool() -> Path:
    """cuobjdump, which ships inside Triton."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise CompilerError("Triton is not installed, so there is no cuobjdump: pip install triton")
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def _usage(cubin: Path) -> dict[str, int]:
    command = [str(tool()), "--dump-resource-usage", str(cubin)]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerError(f"{command[0]} could not read {cubin}: {error}") from error
    found = {k: int(v) for k, v in re.findall(r"\b(REG|STACK):(\d+)", text)}
    if found.keys() != {"REG", "STACK"}:
        raise CompilerError(f"{command[0]} printed no resources of {cubin}: {text[-200:]!r}")
    return found


def _local_accesses(code: bytes) -> int:
    starts = range(0, len(code), _INSTRUCTION)
    return sum((code[i] | (code[i + 1] & 15) << 8) in _LOCAL for i in starts)


def _sections(data: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, contents) of the sections of an ELF64 file."""
    if data[:5] != b"\x7fELF\x02":
        raise CompilerError("the compiled kernel is no ELF file: the compiler's output changed")

    def number(source: bytes, at: int, width: int) -> int:
        return int.from_bytes(source[at : at + width], "little")

    first, size, count, names = (
        number(data, a, w) for a, w in ((40, 8), (58, 2), (60, 2), (62, 2))
    )
    heads = [data[first + i * size : first + (i + 1) * size] for i in range(count)]
    strings = number(heads[names], 24, 8)
    for head in heads:
        start, length = number(head, 24, 8), number(head, 32, 8)
        name = data[strings + number(head, 0, 4) :].split(b"\0", 1)[0].decode()
        yield name, data[start : start + length]
