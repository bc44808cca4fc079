"""What the user reads: the report as data, text, JSON and one HTML page."""

from onchip.analysis.record import Decision, KernelRow, LedgerEntry, Totals
from onchip.report.report import CompileSummary, LaunchCost, Numerics, PlanSummary, Report

__all__ = [
    "CompileSummary",
    "Decision",
    "KernelRow",
    "LaunchCost",
    "LedgerEntry",
    "Numerics",
    "PlanSummary",
    "Report",
    "Totals",
]
