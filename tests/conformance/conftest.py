"""Every case that these tests check on the interpreter is checked on generated C++ as well, and
some of them on generated Triton. The kernels of several tests are compiled together: what is
pending when a module ends, or when a test leaves more than ENOUGH; those of Triton are interpreted
when a module ends. The test that is the last one then reports the cases of all."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from tests.conformance import compiled, generated_triton

ENOUGH = 400


@pytest.fixture(autouse=True, scope="module")
def _generated_cpp() -> Iterator[None]:
    compiled.PENDING.clear()
    yield
    _flush_cpp()


def _flush_cpp() -> None:
    if generated_triton.on_gpu():
        compiled.PENDING.clear()
    else:
        compiled.flush()


@pytest.fixture(autouse=True)
def _generated_cpp_in_parts() -> Iterator[None]:
    yield
    if len(compiled.PENDING) > ENOUGH:
        _flush_cpp()


@pytest.fixture(autouse=True, scope="module")
def _generated_triton(tmp_path_factory) -> Iterator[None]:
    generated_triton.OFFERED.clear()
    yield
    if importlib.util.find_spec("triton") is not None:
        generated_triton.flush(tmp_path_factory.mktemp("triton"))
