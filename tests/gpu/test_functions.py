"""Every function of the expression language, as Triton spells it, on this machine's GPU."""

from __future__ import annotations

import pytest
import torch
from tests.backends import triton_functions as functions
from tests.backends.triton_jobs import launch_on_gpu

CASES = functions.cases()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here"),
]


@pytest.fixture(scope="module")
def results() -> dict[str, object]:
    got = launch_on_gpu([functions.job(c) for c in CASES])
    return dict(zip(map(str, CASES), got, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_agrees_with_numpy(case: functions.Case, results) -> None:
    got = results[str(case)]
    if isinstance(got, str):
        pytest.fail(got)
    functions.check(case, got[0], functions.arguments(case))
