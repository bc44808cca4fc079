"""Options and profiles for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

GOLDENS = Path(__file__).parent / "goldens"

_QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
# The same examples every time: a failure is the change's, not the day's.
settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=12, suppress_health_check=_QUIET
)
# A longer search: pytest --hypothesis-profile=search
settings.register_profile("search", deadline=None, max_examples=200, suppress_health_check=_QUIET)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens",
        action="store_true",
        help="write tests/goldens instead of comparing with it",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """golden(name, text): assert that a generated text is the one in tests/goldens."""
    update = request.config.getoption("--update-goldens")

    def check(name: str, text: str) -> None:
        path = GOLDENS / name
        if update:
            GOLDENS.mkdir(exist_ok=True)
            path.write_text(text)
            return
        again = f"pytest {os.environ.get('PYTEST_CURRENT_TEST', '').split('::')[0]} "
        again += "--update-goldens, and read the difference before you keep it"
        assert path.exists(), f"{path} is missing: make it with {again}"
        assert text == path.read_text(), f"{path} differs from what is generated now: {again}"

    return check
