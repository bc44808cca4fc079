"""A process that compiles Triton kernels for its parent. It needs no torch.

python -m onchip.backends.triton.worker
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from onchip.backends.nvidia.resources import examine
from onchip.backends.nvidia.worker import processor_s, serve

# Its default differs between versions; with it, a * b + c is rounded once.
OPTIONS = {"enable_fp_fusion": True}


def load(path: Path) -> Any:
    """The module of a generated file."""
    spec = importlib.util.spec_from_file_location(f"kernels_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file that can be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_kernel(job: dict[str, Any]) -> dict[str, Any]:
    """Compile the function `name` of the file `source` for sm_`capability` and write the binary to
    `cubin`; its facts. `pointers`: the types of its parameters."""
    started = processor_s()
    function = getattr(load(Path(job["source"])), job["name"])
    signature = dict(zip(function.arg_names, job["pointers"], strict=True))
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(len(signature))}
    options = {"num_warps": job["warps"], "num_stages": job["stages"], **OPTIONS}
    made: Any = triton.compile(
        ASTSource(function, signature, attrs=aligned),
        target=GPUTarget("cuda", job["capability"], 32),
        options=options,
    )
    facts = made.metadata
    scratch = facts.global_scratch_size + facts.profile_scratch_size
    if scratch or facts.num_ctas != 1:
        raise ValueError(f"it needs {scratch} bytes of scratch memory, {facts.num_ctas} clusters")
    target = Path(job["cubin"])
    target.write_bytes(made.asm["cubin"])
    used = processor_s() - started
    found = examine(target, job["capability"], facts.shared, facts.num_warps, used)
    return {
        "name": facts.name,
        "parameters": parameters(made.asm["ptx"], facts.name),
        "resources": asdict(found),
    }


def parameters(ptx: str, name: str) -> int:
    """How many pointers the function takes, Triton's own scratch pointers among them."""
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\(([^)]*)\)", ptx)
    types = re.findall(r"\.param\s+\.(\w+)", entry.group(1)) if entry else []
    if not types or set(types) != {"u64"}:
        raise ValueError(f"the parameters of {name} are {types}, not pointers")
    return len(types)


if __name__ == "__main__":
    sys.dont_write_bytecode = True  # beside kernels in the cache
    serve(compile_kernel)
