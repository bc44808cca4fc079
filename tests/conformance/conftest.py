"""Every case that these tests check on the interpreter is checked on generated C++ as well. The
kernels of several tests are compiled together: what is pending when a module ends, or when a test
leaves more than ENOUGH; the test that is the last one then reports the cases of all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.conformance import compiled

ENOUGH = 400


@pytest.fixture(autouse=True, scope="module")
def _generated_cpp() -> Iterator[None]:
    compiled.PENDING.clear()
    yield
    compiled.flush()


@pytest.fixture(autouse=True)
def _generated_cpp_in_parts() -> Iterator[None]:
    yield
    if len(compiled.PENDING) > ENOUGH:
        compiled.flush()
