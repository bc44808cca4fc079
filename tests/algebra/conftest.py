import pytest
import torch

from onchip.algebra import rewriting


@pytest.fixture(autouse=True)
def seed():
    """The same parameters and inputs each time."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_starts(monkeypatch):
    """Models here are small: the kernels added to them would take longer to start than to run."""
    monkeypatch.setattr(rewriting, "_launches", lambda _: 0)
