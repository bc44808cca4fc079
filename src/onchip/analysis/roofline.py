"""The roofline: what a device can do at most, and what that means for some bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from onchip.errors import OnchipError
from onchip.ir.dtype import DType


class Bound(Enum):
    """What limits a kernel."""

    MEMORY = "memory-bound"
    COMPUTE = "compute-bound"
    LAUNCH = "launch-bound"  # starting it takes longer than running it


@dataclass(frozen=True, slots=True)
class Costs:
    """Parameters of the cost model (analysis.cost), measured on the device.

    copied      (bytes, µs): what a copy takes that reads and writes so many bytes together, its
                start left out; both ascend
    start_us    what starting one generated kernel takes
    processors  threads, or multiprocessors
    fill        what a tile of a matrix product takes beyond its K, in steps of K
    overlap     the part of the shorter of moving bytes and computing that the longer hides, 0 to 1
    """

    copied: tuple[tuple[int, float], ...]
    start_us: float
    processors: int
    fill: float
    overlap: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """A device's limits.

    copy_gbs         GB/s of global memory, bytes read plus bytes written
    gflops           GFLOP/s by type: "float32" (also the rate of scalar work), "tf32", "float16",
                     "bfloat16", "float64"; the dense matrix rate where the device has one
    launch_us        microseconds that starting one operator costs in eager PyTorch
    graph_launch_us  the same inside a CUDA graph; None where there are none
    source           where the figures come from
    gpu              launches overlap with running kernels, and matrix units with scalar ones;
                     on a CPU both add up
    costs            how kernels fall short of that, for predictions; None: not measured
    """

    device: str
    copy_gbs: float
    gflops: Mapping[str, float]
    launch_us: float
    source: str
    graph_launch_us: float | None = None
    gpu: bool = True
    costs: Costs | None = None

    def rate(self, dtype: DType, matrix: bool = False, tf32: bool = False) -> float:
        """GFLOP/s of matrix products, or of scalar work, in `dtype`. Scalar work on half types
        happens in float32; integers are priced as float32; tf32 applies to float32 matrices."""
        if matrix and tf32 and dtype is DType.F32 and "tf32" in self.gflops:
            return self.gflops["tf32"]
        if dtype is DType.F64 and "float64" in self.gflops:
            return self.gflops["float64"]
        if matrix and dtype.label in self.gflops:
            return self.gflops[dtype.label]
        return self.gflops["float32"]

    @property
    def ridge(self) -> float:
        """FLOP/byte at which float32 work stops being memory-bound."""
        return self.gflops["float32"] / self.copy_gbs

    def memory_us(self, nbytes: float) -> float:
        return nbytes / self.copy_gbs / 1e3

    def compute_us(
        self, flops: float, dtype: DType, matrix: bool = False, tf32: bool = False
    ) -> float:
        return flops / self.rate(dtype, matrix, tf32) / 1e3


def bound_us(
    ceilings: Ceilings,
    nbytes: float,
    flops: float,
    dtype: DType = DType.F32,
    matrix: bool = False,
    tf32: bool = False,
) -> float:
    """The least time in microseconds: the longer of moving the bytes and doing the FLOPs."""
    return max(ceilings.memory_us(nbytes), ceilings.compute_us(flops, dtype, matrix, tf32))


def classify(
    ceilings: Ceilings,
    nbytes: float,
    flops: float,
    dtype: DType = DType.F32,
    matrix: bool = False,
    tf32: bool = False,
    launches: int = 1,
    graph: bool = False,
) -> Bound:
    """What limits a kernel: `graph` prices launches as CUDA-graph nodes."""
    memory = ceilings.memory_us(nbytes)
    compute = ceilings.compute_us(flops, dtype, matrix, tf32)
    if launches * launch_us(ceilings, graph) > max(memory, compute):
        return Bound.LAUNCH
    return Bound.COMPUTE if compute > memory else Bound.MEMORY


def kernel_us(
    ceilings: Ceilings, running_us: float, launches: int = 1, graph: bool = False
) -> float:
    """Time of a kernel that runs for `running_us`, its launch included."""
    starting = launches * launch_us(ceilings, graph)
    return max(running_us, starting) if ceilings.gpu else running_us + starting


def launch_us(ceilings: Ceilings, graph: bool = False) -> float:
    """What starting one kernel costs; eager's cost where the device has no graphs."""
    if graph and ceilings.graph_launch_us is not None:
        return ceilings.graph_launch_us
    return ceilings.launch_us


# ---- devices that are not there ----------------------------------------------------------------

# Launch costs depend on the host more than on the GPU; these were measured with an H200
# (reference/measured.md: a tiny eager operator, and the same as a CUDA-graph node).
_EAGER_LAUNCH_US, _GRAPH_LAUNCH_US = 9.5, 1.1


def _sheet(device: str, gbs: float, fp32: float, tf32: float, half: float, fp64: float) -> Ceilings:
    """Data-sheet figures: GB/s and dense TFLOP/s (half: float16 and bfloat16, fp32 accumulator)."""
    rates = {"float32": fp32, "tf32": tf32, "float16": half, "bfloat16": half, "float64": fp64}
    return Ceilings(
        device,
        gbs,
        {k: v * 1e3 for k, v in rates.items()},
        _EAGER_LAUNCH_US,
        "NVIDIA data sheet (dense); launch costs measured on another host",
        _GRAPH_LAUNCH_US,
    )


# Sparse figures of the sheets are halved. fp64 is the tensor-core rate where there is one.
DEVICES: dict[str, Ceilings] = {
    # NVIDIA A100 80GB SXM data sheet, 2021
    "a100": _sheet("a100", 2039, 19.5, 156, 312, 19.5),
    # NVIDIA H100 SXM data sheet, 2023
    "h100": _sheet("h100", 3350, 67, 494.5, 989.5, 67),
    # measured on one H200 with torch 2.11 (reference/measured.md); fp64 of the data sheet
    "h200": replace(
        _sheet("h200", 4275, 51, 356, 664, 67),
        gflops={
            "float32": 51e3,
            "tf32": 356e3,
            "float16": 664e3,
            "bfloat16": 712e3,
            "float64": 67e3,
        },
        source="measured (8192^3 products, copy, launches); float64 from NVIDIA's data sheet",
    ),
    # NVIDIA HGX B200 data sheet, one GPU, 2025
    "b200": _sheet("b200", 7700, 75, 1100, 2250, 37),
    # NVIDIA L4 data sheet, 2023; fp64 at 1/64 of fp32 (Ada whitepaper)
    "l4": _sheet("l4", 300, 30.3, 60, 121, 0.47),
    # NVIDIA L40S data sheet, 2023; fp64 at 1/64 of fp32
    "l40s": _sheet("l40s", 864, 91.6, 183, 362, 1.43),
    # NVIDIA Ada GPU architecture whitepaper v2.02, 2023 (fp32 accumulator)
    "rtx4090": _sheet("rtx4090", 1008, 82.6, 82.6, 165.2, 1.29),
}


def datasheet(device: str) -> Ceilings:
    """Ceilings of a device that is not there; OnchipError names those that are known."""
    key = device.lower().replace("-", "").replace("_", "").replace("nvidia ", "")
    if key not in DEVICES:
        known = ", ".join(DEVICES)
        raise OnchipError(
            f"no ceilings for device {device!r}: known are {known}; 'cpu' is measured here"
        )
    return DEVICES[key]
