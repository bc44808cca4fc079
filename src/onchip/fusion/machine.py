"""What tiling depends on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """threads: of one kernel; panel_width: columns of a packed weight panel."""

    threads: int
    panel_width: int
