"""onchip: operator fusion for PyTorch models. Analyse first, fuse where it pays, prove it."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_API = ("compile", "optimize", "analyze", "Settings", "Program", "Report")


def __getattr__(name: str) -> Any:
    """The interface loads torch only when it is used."""
    if name in _API:
        from onchip import api

        return getattr(api, name)
    raise AttributeError(f"module 'onchip' has no attribute {name!r}")
