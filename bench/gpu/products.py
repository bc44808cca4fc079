"""The two products of the acceptance, and some more, on the GPU at hand: times of all variants.

    PYTHONPATH=src python3 bench/gpu/products.py [--all]

Runs bench/gpu/kernels.py for each case and prints its best variant. Exit code 1: a case has no
correct variant, or one of the first two takes longer than it may (29 us; 1,550 us). --all: also
cases without a limit (a stem, a deep layer at batch 1, few rows, 1x1 convolutions, batches).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent

# MODEL, type, microseconds that it may take
LIMITED = (
    ("pipeline:conv-relu-bn-pool:32x64x56x56:channels-last", "bfloat16", 29.0),
    ("pipeline:linear-gelu-residual:1024x8192", "float32", 1550.0),
)
OTHERS = (
    ("pipeline:stem:32x3x224x224:channels-last", "bfloat16", None),
    ("pipeline:conv-relu-bn-pool3:32x64x56x56:channels-last", "bfloat16", None),
    ("pipeline:conv-bn-relu:1x64x56x56:channels-last", "bfloat16", None),
    ("pipeline:residual:1x512x7x7:channels-last", "bfloat16", None),
    ("pipeline:residual:32x512x7x7:channels-last", "bfloat16", None),
    ("pipeline:linear-gelu-residual:8x4096", "bfloat16", None),
    ("pipeline:linear-gelu-residual:1x4096", "bfloat16", None),
    ("pipeline:linear-gelu-residual:4096x4096", "bfloat16", None),
)


def best(model: str, dtype: str) -> tuple[float, str] | None:
    """Microseconds and label of the fastest correct variant."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "kernels.py"), model, "--dtype", dtype]
        environment = {**os.environ, "OUT": folder}
        subprocess.run([*command, "--peers", "none"], env=environment, check=False)
        found = Path(folder, "kernels.json")
        entries = json.loads(found.read_text()) if found.exists() else []
    rows = [e.get("row") or e.get("final") for e in entries]
    rows = [r for r in rows if r and r["case"].endswith(dtype)]  # a suite may have several types
    good = [r for r in rows if r.get("us") and not r.get("error") and not r.get("peer")]
    if not good:
        return None
    row = min(good, key=lambda r: r["us"])
    return row["us"], row["variant"]


def main() -> int:
    bad = 0
    lines = []
    for model, dtype, limit in LIMITED + OTHERS * ("--all" in sys.argv):
        found = best(model, dtype)
        if found is None:
            lines.append(f"FAIL {model} {dtype}: no correct variant")
            bad += 1
            continue
        us, label = found
        over = limit is not None and us > limit
        bad += over
        word = "FAIL" if over else "ok"
        lines.append(f"{word} {model} {dtype}: {us:.1f} us of at most {limit}, {label}")
    print("\n".join(lines))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
