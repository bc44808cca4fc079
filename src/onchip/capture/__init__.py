"""PyTorch models as graphs: torch.export, node building, clean-up."""

from onchip.capture.capture import capture
from onchip.capture.captured import TENSOR, Captured, LedgerEntry, Prepare, Result, Slot
from onchip.capture.cleanup import constant_tensors, fixed_constants
from onchip.capture.template import Templates

__all__ = [
    "TENSOR", "Captured", "LedgerEntry", "Prepare", "Result", "Slot", "Templates", "capture",
    "constant_tensors", "fixed_constants",
]  # fmt: skip
