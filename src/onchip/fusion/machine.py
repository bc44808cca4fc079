"""What tiling depends on."""

from __future__ import annotations

from dataclasses import dataclass

# The capability since which there are clusters, programmatic dependent launch, and warpgroups that
# multiply together (CUDA C++ Programming Guide).
HOPPER = 90


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU that kernels are generated for.

    capability: 90 for sm_90; shared_bytes: what one program may use; l2_bytes: its last cache
    """

    name: str
    capability: int
    multiprocessors: int
    shared_bytes: int
    l2_bytes: int


# Compute capability, multiprocessors, shared memory of one program and L2: NVIDIA's CUDA C++
# Programming Guide (technical specifications) and the data sheets of the SXM parts.
GPUS = {
    g.name: g
    for g in (
        Gpu("a100", 80, 108, 163 << 10, 40 << 20),
        Gpu("h100", 90, 132, 227 << 10, 50 << 20),
        Gpu("h200", 90, 132, 227 << 10, 50 << 20),
        Gpu("b200", 100, 148, 227 << 10, 126 << 20),
    )
}


@dataclass(frozen=True, slots=True)
class Machine:
    """threads: of one kernel; panel_width: columns of a packed weight panel; gpu: what kernels are
    generated for, None for the CPU."""

    threads: int
    panel_width: int
    gpu: Gpu | None = None
