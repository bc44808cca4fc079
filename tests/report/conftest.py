"""What tests of several suites on a GPU stand on."""

import pytest

from onchip.report import bench_gpu
from onchip.report import bench_once as once
from onchip.report import bench_replay as replay


@pytest.fixture
def cpu_for_gpu(monkeypatch):
    """The CPU in the GPU's place, without a clock."""
    monkeypatch.setattr(bench_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(replay, "copy_gbs", lambda: 100.0)
    monkeypatch.setattr(replay, "free", lambda: None)
    monkeypatch.setattr(once, "empty_us", lambda: 4.5)
