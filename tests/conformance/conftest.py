"""Every case that these tests check on the interpreter is checked on generated C++ as well: the
kernels of one module are compiled together when its tests end (its last test reports them)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.conformance import compiled


@pytest.fixture(autouse=True, scope="module")
def _generated_cpp() -> Iterator[None]:
    compiled.PENDING.clear()
    yield
    compiled.flush()
