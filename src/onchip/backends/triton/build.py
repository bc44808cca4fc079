"""From generated Triton text to something that runs, or to a binary whose figures can be read.

With TRITON_INTERPRET=1 in the environment (before triton is imported) kernels run on CPU tensors;
there bfloat16 arithmetic is wrong (Triton 3.6 to 3.9). Compiling needs no GPU; the compiler may
abort the process on some inputs, so it belongs in a child process.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from onchip.errors import CompilerError

# Its default differs between versions; with it, a * b + c is rounded once.
OPTIONS = {"enable_fp_fusion": True}


@dataclass(frozen=True, slots=True)
class Compiled:
    """Figures of one binary: registers and stack bytes a thread, shared bytes a program (static
    and dynamic), and the size of the cubin in bytes."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    binary_bytes: int


def load(path: Path) -> Any:
    """The `kernel` of a generated file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise CompilerError(f"{path} is not a Python file that can be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def launch(kernel: Any, tensors: Sequence[torch.Tensor], tiles: int, warps: int = 4) -> None:
    """Run a kernel: inputs, then outputs, laid out as it was generated for."""
    if tiles:
        kernel[(tiles,)](*tensors, num_warps=warps, **OPTIONS)


def compile_for(
    path: Path, pointers: Sequence[str], capability: int = 90, warps: int = 4
) -> Compiled:
    """Compile a generated file for a CUDA device (`capability` 90: sm_90); `pointers`: the types
    of its parameters ("*fp32"). Raises CompilerError with the compiler's message."""
    function = load(path)
    signature = dict(zip(function.arg_names, pointers, strict=True))
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(len(pointers))}
    source = ASTSource(function, signature, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    try:
        made = triton.compile(source, target=target, options={"num_warps": warps, **OPTIONS})
    except Exception as error:
        raise CompilerError(f"Triton refused {path} for sm_{capability}: {error}") from error
    cubin = made.asm["cubin"]
    usage = _resources(cubin, path.with_suffix(".cubin"))
    return Compiled(
        usage["REG"], usage["STACK"], max(made.metadata.shared, usage["SHARED"]), len(cubin)
    )


def _resources(cubin: bytes, path: Path) -> dict[str, int]:
    """What cuobjdump (it ships inside Triton) reads in a binary."""
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(tool), "--dump-resource-usage", str(path)]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerError(f"{tool} could not read {path}: {error}") from error
    found = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|SHARED):(\d+)", text)}
    if found.keys() != {"REG", "STACK", "SHARED"}:
        raise CompilerError(f"{tool} printed no resource usage for {path}: {text[-200:]!r}")
    return found
