"""A process that compiles CUDA C++ with NVRTC for its parent. It needs neither torch nor a GPU.

python -m onchip.backends.cuda.worker
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from onchip.backends.nvidia.resources import examine
from onchip.backends.nvidia.worker import processor_s, serve


def compile_kernel(job: dict[str, Any]) -> dict[str, Any]:
    """Compile the function `name` of the file `source` with the `options` and the headers below
    `include`, and write the binary to `cubin`; its facts. `parameters`: "pointer" or "map" for each
    that its launch gives it."""
    started = processor_s()
    text = Path(job["source"]).read_text()
    code, log, ptx, binary = run_nvrtc(
        text, Path(job["source"]).name, headers(Path(job["include"])), job["options"]
    )
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ValueError(f"{code.name}: {log or 'it printed nothing'}")
    _check_parameters(ptx.decode(), job["name"], job["parameters"])
    target = Path(job["cubin"])
    target.write_bytes(binary)
    used = processor_s() - started
    found = examine(
        target, job["capability"], job["shared_bytes"], job["warps"], used, warnings(log)
    )
    return {
        "name": job["name"],
        "parameters": len(job["parameters"]),
        "resources": asdict(found),
    }


def headers(include: Path) -> dict[str, str]:
    """The engine's device code, by the name that texts include it by."""
    return {p.relative_to(include).as_posix(): p.read_text() for p in include.rglob("*.cuh")}


def run_nvrtc(
    text: str, name: str, given: dict[str, str], options: Sequence[str]
) -> tuple[Any, str, bytes, bytes]:
    """(NVRTC's code, log, PTX, binary) of a text called `name`; given: its headers."""
    names = [n.encode() for n in given]
    contents = [t.encode() for t in given.values()]
    program = _asked(
        nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(given), contents, names)
    )
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    ptx = binary = b""
    if code == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        ptx = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        binary = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    nvrtc.nvrtcDestroyProgram(program)
    return code, log.rstrip(b"\0").decode(errors="replace").strip(), ptx, binary


def _asked(answer: tuple[Any, ...]) -> Any:
    code, *value = answer
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC failed: {code.name}")
    return value[0] if value else None


def _read(size: Any, get: Any, program: Any) -> bytes:
    count = _asked(size(program))
    out = bytes(count + 1)  # memory of its own: all of Python shares the bytes of length 1
    _asked(get(program, out))
    return out[:count]


def warnings(log: str) -> tuple[str, ...]:
    """What ptxas says with a number of its own ("(C7511) Potential Performance Loss: ..."), each
    text once: it repeats one for every line of PTX."""
    found = re.findall(r"^ptxas (?:info|warning)\s*:\s*(\(C\d+\).*)$", log, re.MULTILINE)
    return tuple(dict.fromkeys(re.sub(r" in around line \d+", "", w).strip() for w in found))


def _check_parameters(ptx: str, name: str, expected: Sequence[str]) -> None:
    """The driver would read beyond what a launch gives, or nonsense."""
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\(([^)]*)\)", ptx)
    if entry is None:
        raise ValueError(f'it has no kernel of that name: extern "C" __global__ void {name}')
    declared = [x.split() for x in entry.group(1).split(",") if x.strip()]
    kinds = [_kind(words) for words in declared]
    if kinds != list(expected):
        raise ValueError(f"{name} takes {kinds}, and its launch gives it {list(expected)}")


def _kind(words: Sequence[str]) -> str:
    """Of a parameter in PTX: .param .u64 name, or .param .align 64 .b8 name[128]."""
    if ".u64" in words:
        return "pointer"
    if words[1:4] == [".align", "64", ".b8"] and words[-1].endswith("[128]"):
        return "map"
    return " ".join(words[1:])


if __name__ == "__main__":
    serve(compile_kernel)
