"""verify() sees wrong values, wrong state and wrong structure, and measures real errors."""

import math

import pytest
import torch
from torch import nn

from onchip.errors import VerificationError
from onchip.runtime.verify import relative_error, verify

from .library import compile_library
from .test_program import Fn


def test_errors_against_float64():
    m = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.BatchNorm1d(64)).train()
    x = torch.randn(16, 64)
    state = {k: v.clone() for k, v in m.state_dict().items()}
    v = verify(compile_library(m, (x,)), m, (x,))
    assert v.reference == "float64"
    assert 0 < v.eager_error < 1e-6
    assert v.error == pytest.approx(v.eager_error, rel=0.5)
    assert v.difference == 0
    names = {c.what for c in v.comparisons}
    assert {"output 0", "input 0", "buffer 2.running_mean"} <= names
    assert all(
        torch.equal(a, b) for a, b in zip(state.values(), m.state_dict().values(), strict=True)
    )


def test_a_wrong_program_is_seen():
    m = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    assert verify(lambda x: m(x) * 1.01, m, (x,)).error == pytest.approx(0.01, rel=1e-3)
    with pytest.raises(VerificationError, match="in eager mode"):
        verify(lambda x: m(x).double(), m, (x,))
    with pytest.raises(VerificationError):
        verify(lambda x: (m(x), m(x)), m, (x,))


def test_a_forgotten_mutation_is_seen():
    def f(s, x):
        s.state.add_(1)
        return x.add_(1)

    m = Fn(f, state=torch.zeros(2))
    v = verify(lambda x: x + 1, m, (torch.ones(2),))
    wrong = {c.what for c in v.comparisons if c.difference > 0}
    assert wrong == {"input 0", "buffer state"}
    assert float(m.state.sum()) == 0


def test_large_tensors_are_compared_in_parts(monkeypatch):
    a, b = torch.randn(7, 5), torch.randn(5, 7).t()
    whole = relative_error(a, b)
    assert whole == pytest.approx(float((a - b).double().norm() / b.double().norm()))
    monkeypatch.setattr("onchip.runtime.verify._AT_ONCE", 4)
    assert relative_error(a, b) == pytest.approx(whole)
    b[0, 1] = math.inf
    assert relative_error(a, b) == math.inf
    assert relative_error(torch.empty(0), torch.empty(0)) == 0


def test_relative_error():
    one = torch.ones(4)
    assert relative_error(one * 1.5, one) == 0.5
    inf = torch.tensor([1.0, math.inf, math.nan])
    assert relative_error(inf, inf) == 0
    assert relative_error(torch.tensor([1.0, -math.inf, math.nan]), inf) == math.inf
    assert relative_error(torch.tensor([1.0, math.inf, 0.0]), inf) == math.inf
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_error(one * 2j, one * 1j) == 1.0
