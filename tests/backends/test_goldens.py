"""Generated sources, kept: a change of the emitter shows in review as a change of these files."""

from __future__ import annotations

import re

import pytest
from tests.fusion.harness import jobs_of, op, program, value
from tests.fusion.test_convolution import pipeline
from tests.fusion.test_rows import product

from onchip.backends.cpp import run


def add_mul():
    return program([op("mul.Scalar", op("add.Tensor", value((64, 1000)), value((64, 1000))), 2.0)])


def softmax():
    return program([op("softmax.int", value((64, 1000)), -1)])


KERNELS = {
    "add-mul": add_mul,
    "softmax": softmax,
    "conv-relu-bn-pool": lambda: pipeline(
        ("relu", "bn", "pool"), "max2", (1, 16, 32, 32), 32, last=True
    ),
    "matmul-softmax": lambda: product(256, 64, 128, "softmax"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_source(name: str, golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a processor with AVX2, whatever runs the test; tensors are numbered from one."""
    monkeypatch.setattr(run, "panel_width", lambda: 16)
    monkeypatch.setattr(run, "pack", lambda panels, values: values[next(iter(values))])
    source = jobs_of(KERNELS[name]())[0].source.text
    numbers: dict[str, str] = {}
    plain = re.sub(
        r"^(// \w+?)_\d+:", lambda m: numbers.setdefault(m[0], f"{m[1]}:"), source, flags=re.M
    )
    golden(f"{name}.cpp", plain)
