"""Fixtures that several files of tests of the planner ask for."""

import pytest
import torch


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache, random numbers from a seed, and no gradients."""
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    torch.manual_seed(0)
    with torch.no_grad():
        yield
