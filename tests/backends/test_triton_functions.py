"""Every function of the expression language, as Triton spells it, against numpy in float64."""

from __future__ import annotations

import importlib.util

import pytest
from tests.backends import triton_functions as functions
from tests.backends.triton_jobs import interpret

from onchip.ir.functions import FUNCTIONS

CASES = functions.cases()
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the triton package is not installed"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, object]:
    jobs = [functions.job(c) for c in CASES]
    got = interpret(jobs, tmp_path_factory.mktemp("functions"))
    return dict(zip(map(str, CASES), got, strict=True))


def test_every_function_is_covered() -> None:
    assert {c.fn for c in CASES} == FUNCTIONS


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_agrees_with_numpy(case: functions.Case, results) -> None:
    got = results[str(case)]
    if isinstance(got, str):
        pytest.fail(got)
    functions.check(case, got[0], functions.arguments(case))
