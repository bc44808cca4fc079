"""The cost model's parameters from made-up measurements."""

from dataclasses import replace

import pytest
import torch

from onchip.analysis.cost import Product, product_us
from onchip.analysis.roofline import Ceilings, Costs
from onchip.ir.dtype import DType
from onchip.planning import calibrate
from onchip.planning.calibrate import COPIED, FILLS, closest_fill

COSTS = Costs(((1 << 20, 10.0),), 2.0, 4, 8.0, 0.5)
CPU = Ceilings("c", 20.0, {"float32": 100.0}, 3.0, "made up", gpu=False, costs=COSTS)
SHAPES = (Product(3136, 64, 64, 1, DType.F32), Product(784, 128, 512, 1, DType.F32))


@pytest.mark.parametrize("fill", FILLS[::4])
def test_the_fill_that_measurements_came_from_is_found(fill):
    truth = replace(CPU, costs=replace(COSTS, fill=fill))
    # measured a little too long and too short
    measured = [(p, product_us(p, truth) * f) for p, f in zip(SHAPES, (1.005, 0.995), strict=True)]
    assert closest_fill(CPU, measured) == fill


def test_copies_are_kept_without_what_disturbed_them(monkeypatch):
    """20 GB/s and 3 µs a start, but one short copy took a millisecond. On a CPU it is the ceiling's
    time and a start at most, on a GPU no longer than the next longer copy."""
    monkeypatch.setattr(calibrate, "COPIED", COPIED[:4])
    times = {n: 8 * n / 20e3 + 3.0 for n in COPIED[:4]}
    times[COPIED[1]] = 1000.0
    asked = []

    def timed(run):
        size = run().numel()
        asked.append(size)
        return times[size]

    points = calibrate._copied(torch.device("cpu"), timed, 3.0, CPU)
    assert asked == list(reversed(COPIED[:4]))
    assert [n for n, _ in points] == [8 * n for n in COPIED[:4]]
    us = [t for _, t in points]
    assert us == sorted(us)
    for i in (0, 2, 3):
        assert us[i] == pytest.approx(8 * COPIED[i] / 20e3)
    assert us[1] == pytest.approx(8 * COPIED[1] / 20e3 + 3.0)
    gpu = calibrate._copied(torch.device("cpu"), timed, 3.0, replace(CPU, gpu=True))
    assert gpu[1][1] == pytest.approx(gpu[2][1] / 1.05)


def test_a_copy_that_is_shorter_than_its_start_has_some_time(monkeypatch):
    monkeypatch.setattr(calibrate, "COPIED", COPIED[:2])
    points = calibrate._copied(torch.device("cpu"), lambda run: run() is None or 3.0, 3.0, CPU)
    assert all(us > 0 for _, us in points)


def test_an_empty_kernel_starts_in_microseconds(monkeypatch, tmp_path):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    assert 0.1 < (calibrate.kernel_call_us() or 0.0) < 1e5
