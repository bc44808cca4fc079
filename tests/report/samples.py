"""A full report of an invented model; the figures check arithmetic, not speed."""

from onchip.analysis.record import Blocker, Contest, GraphCoverage, Interval
from onchip.report import (
    CompileSummary,
    Decision,
    KernelRow,
    LaunchCost,
    LedgerEntry,
    Numerics,
    PlanSummary,
    Report,
    Totals,
)  # fmt: skip


def full() -> Report:
    return Report(
        model="pipeline:conv-relu-bn",
        device="some processor",
        dtype="float32",
        unfused=Totals(4, 8, 8000, 64000, 200.0),
        fused=Totals(2, 4, 4000, 64000, 120.0),
        versions={"torch": "2.14.1"},
        baselines={"eager_channels_last": 150.0, "inductor": None},
        bound_us=60.0,
        launch=LaunchCost(5.0, 1.0),
        numerics=Numerics(
            1.2e-7, 3.4e-7, (LedgerEntry("rounding_removed", "a -> b", "kept in float32", 1e-8),)
        ),
        plan=PlanSummary(110.0, 100.0, 0.1),
        compile=CompileSummary(1.5, 2, 0, 3, 0.01875, 18_750),
        cuda_graph=GraphCoverage(
            False,
            "no CUDA graph: drop can't be part of one",
            (Blocker("drop", "head (net.py:7)", "it draws random numbers"),),
            12.0,
        ),
        kernels=(
            KernelRow(
                "k0", ("conv", "relu", "bn"), "cpp", "direct", 3000, 60000, 100.0, 110.0,
                unfused_us=180.0, ratio=Interval(0.61, 0.6, 0.63, 12),
            ),
            KernelRow("k1<&>", ("block.head",), "library", "", 1000, None, 10.0, 10.0),
        ),
        decisions=(
            Decision(("conv", "relu"), True),
            Decision(("relu", "bn"), True, text="saves 2,000 bytes"),
            Decision(
                ("bn", "block.head"), False, "SLOWER", "unprofitable",
                "measured: the separate kernels are faster",
                {"fused_us": 140.0, "separate_us": 120.0},
            ),
        ),
        ratio=Interval(0.6, 0.5, 0.625, 24),
        contests=(
            Contest(("conv", "relu", "bn", "block.head"), "two kernels", 140.0, 120.0,
                    Interval(1.17, 1.1, 1.2, 6), False, ("conv", "relu", "bn")),
            Contest(("conv", "relu", "bn"), "operators", 110.0, 180.0,
                    Interval(0.61, 0.6, 0.63, 12), True),
        ),
    )  # fmt: skip


def bare() -> Report:
    return Report("m", "cpu", "float32", Totals(), Totals())
