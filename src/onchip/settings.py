"""What a user may choose; everything else is decided by measuring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Settings:
    """Choices of one compilation.

    numerics          "fast": intermediates stay in float32 on chip; "eager": every rounding point
                      of eager is reproduced
    fold_batch_norm   multiply an inference batch norm into the layer before it
    without           names of algebra rules (onchip.algebra.RULES) that are left out; those that
                      may change a rounding are left out with numerics="eager" in any case
    winograd          3-tap convolutions may be computed with fewer products (fusion/winograd.py),
                      where that is measured faster; never with numerics="eager"
    generator         what writes kernels: "auto" is C++ for tensors on the CPU and Triton for those
                      on an NVIDIA GPU, on Hopper GPUs beside the tensor-core engine, and beside
                      cuDNN's graphs where nvidia-cudnn-frontend is installed; "triton" and
                      "cuda" (the engine, for tests) force one of the two. "triton" on the CPU is
                      for tests too: kernels run under Triton's interpreter (TRITON_INTERPRET=1),
                      are checked, and ship without being timed
    fuel              apply only the first `fuel` fusions (for bisecting); None: all
    start             "ready": a program is compiled before its first call; "eager": it is captured
                      then, and the rest is done in the background (`program.wait()` waits for it),
                      while calls run the original module. Leave its weights alone meanwhile
    lock              a lock file (planning/lock.py): written if there is none, else every choice
                      comes from it, and nothing is measured. One file is one program's
    budget_s          seconds that building and measuring kernels may take for one specialisation;
                      what is then left out runs as the library's, and the report says so
    threads           CPU threads of generated kernels; 0: as many as PyTorch uses
    cuda_graph        "auto": a program on a GPU runs as one CUDA graph where that is possible and
                      measured faster (`program.graph_coverage` says); "off": never
    uncapturable      what a model that can't be exported means: "raise" CaptureError, or run
                      "eager" (with one warning and an entry in program.notes)
    specialisations   how many sets of shapes, strides and states are kept before the least
                      recently used is dropped
    compiled_at_once  how many sets of shapes, strides and Python values a program compiles at
                      their first call (for each structure of the arguments and state of the model)
    eager_calls       a further set runs in eager mode this many times (with an entry in
                      program.notes) and is compiled then, so that a shape which comes once or
                      twice costs no compilation; 0: compiled at its first call
    """

    numerics: Literal["fast", "eager"] = "fast"
    fold_batch_norm: bool = True
    without: frozenset[str] = frozenset()
    winograd: bool = True
    generator: Literal["auto", "cpp", "triton", "cuda"] = "auto"
    fuel: int | None = None
    start: Literal["ready", "eager"] = "ready"
    lock: str | None = None
    budget_s: float = 60.0
    threads: int = 0
    cuda_graph: Literal["auto", "off"] = "auto"
    uncapturable: Literal["raise", "eager"] = "raise"
    specialisations: int = 64
    compiled_at_once: int = 3
    eager_calls: int = 8
