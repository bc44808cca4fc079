"""ATen's operators as Triton kernels on this machine's GPU: the kernels that tests/conformance
interprets, launched on memory with margins of NaN, against ATen in float64.

Each file of tests/conformance runs in a process of its own, all at once; in each, all kernels are
compiled side by side when its tests are done.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FILES = sorted(f.name for f in (ROOT / "tests" / "conformance").glob("test_*.py"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here"),
]


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """The process of each file, and where it writes."""
    folder = tmp_path_factory.mktemp("conformance")
    environment = {**os.environ, "ONCHIP_CONFORMANCE": "cuda", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    found = {}
    for name in FILES:
        command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/conformance/{name}"]
        command += ["-p", "no:cacheprovider", "-o", "timeout=900", "--tb=short"]
        output = folder / f"{name}.txt"
        with output.open("wb") as f:
            child = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=f, stderr=subprocess.STDOUT
            )
        found[name] = child, output
    yield found
    for child, _ in found.values():
        child.kill()
        child.wait()


@pytest.mark.parametrize("name", FILES)
def test_operators_agree_with_aten(name: str, running) -> None:
    child, output = running[name]
    code = child.wait()
    text = output.read_text(errors="replace")
    assert code == 0, text[-20_000:]
    assert " passed" in text or "100%" in text, text[-2000:]
