"""A kernel on this machine, its threads in turn: its own text, with the PTX functions of
host_cuda/onchip/hopper.cuh. Matrix products read shared memory by their descriptors."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from tests.backends.cuda_host import HOST, INCLUDE

from onchip.backends.cuda.source import CudaSource, Further
from onchip.backends.nvidia.source import TensorMap

STORED = {torch.bfloat16: "u16", torch.float16: "u16", torch.float32: "float", torch.uint8: "float"}
KINDS = {"bf16": "b", "f16": "h", "tf32": "t"}


FLAGS = ("-std=c++20", "-O1", "-w")


@cache
def standard() -> tempfile.TemporaryDirectory[str]:
    """A folder to include from, with onchip/standard.h precompiled: half of a kernel's time."""
    made = tempfile.TemporaryDirectory()
    to = Path(made.name) / "onchip" / "standard.h.gch"
    to.parent.mkdir()
    header = HOST / "onchip" / "standard.h"
    command = ["g++", *FLAGS, "-x", "c++-header", str(header), "-o", str(to)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[:4000]
    return made


def run(source: CudaSource, x: int, memory: Sequence[torch.Tensor], folder: Path) -> None:
    """Runs the clusters of programs of each launch one after the other; results are written to
    `memory`, the kernel's inputs, outputs and workspace (bytes) as they lie, of which the x-th is
    what threads copy. Raises AssertionError with what stopped a program."""
    for n, part in enumerate((source, *source.further)):
        _launch(source, part, n, x, memory, folder)


def _launch(
    source: CudaSource, part: CudaSource | Further, number: int, x: int,
    memory: Sequence[torch.Tensor], folder: Path,
) -> None:  # fmt: skip
    instruction = r"DEVICE void product\(float \(&d\)\[(\d+)\].*?\n\}"
    on_host, found = re.subn(instruction, _product, source.text, flags=re.S)
    assert found, "a kernel multiplies"
    names, head, args = [], [], []
    for n, t in enumerate(memory):
        names.append(folder / f"{n}.bin")
        names[-1].write_bytes(t.contiguous().view(torch.uint8).numpy().tobytes())
        head.append(f'char* p{n} = read("{names[-1]}", {t.nbytes});')
    head.append(f"copied_from = p{x}, copied_to = p{x} + {memory[x].nbytes};")
    for k, q in enumerate(part.parameters):
        t = memory[q.n]
        if isinstance(q, TensorMap):
            assert set(q.every) == {1}
            assert q.swizzle == 128
            size = t.element_size()
            lists = ", ".join(_list(v) for v in (q.sizes, (size, *q.strides), q.box))
            head.append(
                f"TensorMap m{k} = {{p{q.n} + {q.offset * size}, {len(q.sizes)}, {size}, {lists}}};"
            )
            args.append(f"m{k}")
        else:
            args.append(f"({STORED[t.dtype]}*)p{q.n}")
    written = range(len(source.inputs), len(memory))
    main = MAIN.format(
        head="\n    ".join(head), programs=part.programs, threads=part.threads,
        call=f"{part.name}({', '.join(args)})", cluster=1 if number else source.cluster,
        tail="\n    ".join(f'write(p{n}, "{names[n]}", {memory[n].nbytes});' for n in written),
    )  # fmt: skip
    text, made = folder / "kernel.cpp", folder / "kernel"
    text.write_text(on_host + main)
    flags = [*FLAGS, f"-I{standard().name}", "-include", "onchip/standard.h"]
    flags += [f"-I{HOST}", f"-I{INCLUDE}"]
    flags += [f"-DONCHIP_LAUNCH={number}"] * (number > 0)
    built = subprocess.run(
        ["g++", *flags, str(text), "-o", str(made)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[:4000]
    done = subprocess.run([str(made)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for n in written:
        data = torch.frombuffer(bytearray(names[n].read_bytes()), dtype=memory[n].dtype)
        memory[n].copy_(data.view(memory[n].shape))


def _product(found: re.Match[str]) -> str:
    """An instruction's function for the host."""
    kind = KINDS[re.findall(r"\.f32\.(\w+)\.", found[0])[0]]
    inner = str("1, 1, 1, 0;" in found[0]).lower()
    takes, call = "u64 a", f"multiply_here<'{kind}', {found[1]}, {inner}>(d, a, b, add);"
    if "const u32 (&a)[4]" in found[0]:
        takes, call = "const u32 (&a)[4]", f"multiply_held<'{kind}', {found[1]}>(d, a, b, add);"
    return f"DEVICE void product(float (&d)[{found[1]}], {takes}, u64 b, u32 add) {{ {call} }}"


def _list(values: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, values)) + "}"


MAIN = """
static char* read(const char* name, long n) {{
    char* p = (char*)std::aligned_alloc(256, (n + 255) / 256 * 256);
    std::FILE* file = std::fopen(name, "rb");
    if (std::fread(p, 1, n, file) != (unsigned long)n) std::_Exit(4);
    std::fclose(file);
    return p;
}}
static void write(const char* p, const char* name, long n) {{
    std::FILE* file = std::fopen(name, "wb");
    std::fwrite(p, 1, n, file);
    std::fclose(file);
}}
int main() {{
    {head}
    gridDim.x = {programs}, blockDim.x = {threads}, cluster_size = {cluster};
    for (int program = 0; program < gridDim.x; program += cluster_size) {{
        std::memset(shared_bytes, 0xFF, sizeof shared_bytes);
        run_cluster(program, [&] {{ {call}; }});
    }}
    {tail}
}}
"""
