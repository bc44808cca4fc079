"""PyTorch models as graphs: torch.export, node building, clean-up, batch-norm folding."""

from onchip.capture.capture import capture
from onchip.capture.captured import TENSOR, Captured, LedgerEntry, Prepare, Result, Slot
from onchip.capture.cleanup import constant_tensors, fixed_constants
from onchip.capture.fold import fold_batch_norm
from onchip.capture.template import Templates

__all__ = [
    "TENSOR", "Captured", "LedgerEntry", "Prepare", "Result", "Slot", "Templates", "capture",
    "constant_tensors", "fixed_constants", "fold_batch_norm",
]  # fmt: skip
