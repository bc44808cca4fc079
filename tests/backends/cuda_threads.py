"""A kernel on threads of this machine: its own text, with the PTX functions of
host_cuda/onchip/hopper.cuh. Matrix products read shared memory by their descriptors."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from tests.backends.cuda_host import HOST, INCLUDE

from onchip.backends.cuda.source import CudaSource
from onchip.backends.nvidia.source import TensorMap

STORED = {torch.bfloat16: "u16", torch.float16: "u16", torch.float32: "float"}
KINDS = {"bf16": "b", "f16": "h", "tf32": "t"}


def run(source: CudaSource, x: int, memory: Sequence[torch.Tensor], folder: Path) -> None:
    """Runs the clusters of programs one after the other; results are written to `memory`, the
    kernel's inputs and outputs as they lie, of which the x-th is what threads copy. Raises
    AssertionError with what stopped a program."""
    instruction = r"DEVICE void product\(float \(&d\)\[(\d+)\].*?\n\}"
    on_host, found = re.subn(instruction, _product, source.text, flags=re.S)
    assert found, "a kernel multiplies"
    names, head, args = [], [], []
    for n, t in enumerate(memory):
        names.append(folder / f"{n}.bin")
        names[-1].write_bytes(t.contiguous().view(torch.uint8).numpy().tobytes())
        head.append(f'char* p{n} = read("{names[-1]}", {t.nbytes});')
    head.append(f"copied_from = p{x}, copied_to = p{x} + {memory[x].nbytes};")
    for k, q in enumerate(source.parameters):
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
    last = len(memory) - 1
    main = MAIN.format(
        head="\n    ".join(head), programs=source.programs, threads=source.threads,
        call=f"{source.name}({', '.join(args)})", out=last, result=names[last],
        nbytes=memory[last].nbytes, cluster=source.cluster,
    )  # fmt: skip
    text, made = folder / "kernel.cpp", folder / "kernel"
    text.write_text(on_host + main)
    flags = ["-std=c++20", "-O1", "-w", "-pthread", f"-I{HOST}", f"-I{INCLUDE}"]
    built = subprocess.run(
        ["g++", *flags, str(text), "-o", str(made)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[:4000]
    done = subprocess.run([str(made)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    data = torch.frombuffer(bytearray(names[last].read_bytes()), dtype=memory[last].dtype)
    memory[last].copy_(data.view(memory[last].shape))


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
int main() {{
    {head}
    gridDim.x = {programs}, blockDim.x = {threads}, cluster_size = {cluster};
    for (int program = 0; program < gridDim.x; program += cluster_size) {{
        std::memset(shared_bytes, 0xFF, sizeof shared_bytes);
        std::vector<std::thread> threads;
        for (int n = 0; n < cluster_size * blockDim.x; n++)
            threads.emplace_back([&, n] {{
                rank = n / blockDim.x, threadIdx.x = n % blockDim.x, blockIdx.x = program + rank;
                {call};
            }});
        for (std::thread& t : threads) t.join();
    }}
    std::FILE* file = std::fopen("{result}", "wb");
    std::fwrite(p{out}, 1, {nbytes}, file);
    std::fclose(file);
}}
"""
