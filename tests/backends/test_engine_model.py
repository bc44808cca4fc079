"""The engine's choices: that those which were fastest where they were measured come early, and that
each one that is proposed computes the right thing by its addresses, element by element."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

import numpy as np
import pytest
from tests.backends.engine_problems import Shape, contraction, expected, values_of
from tests.backends.engine_protocol import Rings, Wrong
from tests.backends.engine_simulator import Simulator

from onchip.backends.cuda.choices import clusters_of
from onchip.backends.cuda.geometry import Geometry
from onchip.backends.cuda.limits import refusal
from onchip.backends.cuda.model import MOST, Estimate, configurations
from onchip.backends.cuda.parts import at_once, part_inputs, part_steps
from onchip.backends.cuda.problem import Config, Problem
from onchip.backends.cuda.registers import available, held
from onchip.fusion.machine import GPUS, Gpu
from onchip.fusion.refusal import Refusal
from onchip.ir.dtype import DType

H200 = GPUS["h200"]
FEW = replace(H200, name="few", multiprocessors=3)  # programs go through several tiles
SAME = ((1, 1), (1, 1))
PAIRS = ((2, 2, 0), (2, 2, 0))
OVERLAP = ((3, 2, 1), (3, 2, 1))

SHAPES = {
    "3x3, pool": Shape(1, 64, (14, 14), 64, (3, 3), pads=SAME, pool=PAIRS),
    "tf32, pool": Shape(1, 64, (14, 10), 64, (3, 3), pads=SAME, pool=PAIRS, kind="tf32"),
    "channels and features that fill up": Shape(
        1, 72, (9, 5), 136, (3, 3), pads=SAME, residual=True
    ),
    "float32 residual": Shape(1, 40, (9, 5), 72, (3, 3), pads=SAME, kind="tf32", residual=True),
    "7x7 pictures": Shape(3, 64, (7, 7), 128, (3, 3), pads=SAME),
    "stride 2": Shape(2, 64, (15, 15), 64, (3, 3), strides=(2, 2), pads=SAME),
    "strides, one-sided padding": Shape(
        2, 64, (14, 11), 64, (3, 2), strides=(2, 3), pads=((0, 1), (1, 0)), dilations=(1, 2)
    ),
    "1x1, stride 2": Shape(2, 128, (14, 14), 64, (1, 1), strides=(2, 2)),
    "dilation": Shape(1, 32, (13, 13), 32, (3, 3), dilations=(2, 2), pads=((2, 2), (2, 2))),
    "5x5": Shape(1, 24, (11, 11), 40, (5, 5), pads=((2, 2), (2, 2))),
    "overlapping pool": Shape(1, 32, (17, 13), 64, (3, 3), pads=SAME, pool=OVERLAP),
    "overlapping pool, float32": Shape(
        1, 32, (11, 13), 64, (3, 3), pads=SAME, pool=OVERLAP, kind="tf32"
    ),
    "sum pool": Shape(1, 32, (12, 12), 64, (3, 3), pads=SAME, pool=PAIRS, fold="sum"),
    "min pool, odd": Shape(1, 32, (13, 13), 64, (3, 3), pads=SAME, pool=PAIRS, fold="min"),
    "pool 2x3": Shape(1, 32, (12, 12), 64, (3, 3), pads=SAME, pool=((2, 2, 0), (3, 3, 0))),
    "pool 3x2": Shape(1, 32, (12, 12), 64, (3, 3), pads=SAME, pool=((3, 3, 0), (2, 2, 0))),
    "1-d": Shape(3, 64, (75,), 64, (9,), pads=((4, 4),)),
    "1-d, one picture": Shape(0, 64, (300,), 64, (17,), pads=((8, 8),)),
    "1-d, many taps, pool": Shape(2, 64, (120,), 64, (16,), pool=((2, 2, 0),)),
    "3-d, pool": Shape(1, 32, (8, 6, 5), 64, (3, 3, 3), pads=((1, 1),) * 3, pool=((2, 2, 0),) * 3),
    "product, residual": Shape(0, 64, (300,), 256, (1,), residual=True),
    "product": Shape(0, 264, (130,), 72, (1,)),
    "batched product": Shape(0, 64, (50,), 80, (1,), batch=3, constant=False),
    "product with weights as they lie": Shape(0, 128, (200,), 64, (1,), constant=False),
    "split, pool": Shape(1, 64, (14, 10), 128, (3, 3), pads=SAME, pool=PAIRS, kind="tf32x3"),
    "split, overlapping pool": Shape(
        1, 32, (11, 13), 64, (3, 3), pads=SAME, pool=OVERLAP, kind="tf32x3"
    ),
    "split, stride 2": Shape(2, 32, (15, 15), 64, (3, 3), strides=(2, 2), pads=SAME, kind="tf32x3"),
    "split, 1x1": Shape(2, 72, (14, 14), 136, (1, 1), kind="tf32x3"),
    "split product, residual": Shape(0, 136, (300,), 256, (1,), residual=True, kind="tf32x3"),
    "split product, batches": Shape(0, 64, (50,), 80, (1,), batch=3, constant=False, kind="tf32x3"),
    "groups": Shape(1, 32, (10, 6), 32, (3, 3), pads=SAME, batch=3),
    "element by element": Shape(1, 64, (9, 9), 33, (3, 3), pads=SAME, tile=False),
    "smaller than a tile": Shape(1, 64, (3, 2), 64, (3, 3), pads=SAME),
    "one row": Shape(0, 512, (1,), 64, (1,)),
    "few tiles of many channels": Shape(1, 512, (7, 7), 64, (3, 3), pads=SAME, pool=PAIRS),
    "shared weights": Shape(3, 136, (10, 7), 64, (3, 3), pads=SAME),
}


@cache
def problem(name: str) -> Problem:
    return contraction(SHAPES[name])


@cache
def proposed(p: Problem, gpu: Gpu = H200) -> list[Config]:
    found = configurations(p, gpu)
    assert not isinstance(found, Refusal), found
    return found


# ---- what is proposed --------------------------------------------------------------------------

# Kernels that were the fastest of several on an H200: (shape, patch, features a program computes,
# programs that share K), and among how many of the first choices they are.
MEASURED = [
    (Shape(32, 64, (56, 56), 64, (3, 3), pads=SAME, pool=PAIRS), (8, 14, 1), 64, 1, 5),
    (Shape(128, 128, (28, 28), 128, (3, 3), pads=SAME, pool=PAIRS), (8, 28, 1), 128, 1, 4),
    (Shape(32, 128, (56, 56), 128, (3, 3), pads=SAME, pool=PAIRS), (8, 14, 1), 128, 1, 5),
    (Shape(32, 512, (7, 7), 512, (3, 3), pads=SAME), (8, 7, 2), 64, 1, 2),
    (Shape(0, 256, (100352,), 64, (1,)), (128,), 64, 1, 3),
    (Shape(0, 64, (100352,), 256, (1,), residual=True), (64,), 256, 1, 4),
    (Shape(1, 512, (7, 7), 512, (3, 3), pads=SAME, pool=PAIRS), (8, 6, 1), 64, 8, 3),
]


@pytest.mark.parametrize(("shape", "patch", "features", "k_split", "first"), MEASURED)
def test_what_was_fastest_comes_early(shape, patch, features, k_split, first):
    p = contraction(shape)
    found = [
        (c.patch[: len(patch)], Geometry(p, c).tile_features, c.k_split)
        for c in proposed(p)[:first]
    ]
    assert (patch, features, k_split) in found


@pytest.mark.parametrize("name", SHAPES)
def test_every_choice_is_possible_and_none_comes_twice(name):
    p = problem(name)
    for gpu in (H200, FEW):
        found = proposed(p, gpu)
        assert 0 < len(found) <= MOST
        assert len(set(found)) == len(found)
        for c in found:
            assert refusal(Geometry(p, c), gpu.shared_bytes) is None, c.label


@pytest.mark.parametrize("residual", [False, True])
def test_large_split_products_have_large_tiles_of_two_warpgroups(residual):
    p = contraction(Shape(0, 8192, (1024,), 8192, (1,), residual=residual, kind="tf32x3"))
    found = proposed(p)
    first = found[0]
    assert (first.patch, Geometry(p, first).tile_features) == ((128,), 128)
    for c in found[:3]:
        assert c.split * c.teams == 2
        shared = c.x_shared * c.w_shared
        assert prod(c.patch) * Geometry(p, c).tile_features * shared >= 128 * 128
    times = [Estimate(p, c, H200).microseconds for c in found]
    assert times == sorted(times)
    # three products for each, at the rate of TF32's (data sheet: 495 TFLOPS), and not much longer
    least = 3 * 2 * 1024 * 8192 * 8192 / 495e6
    assert least < times[0] < 1.5 * least


def test_split_operands_have_a_slot_for_their_low_parts():
    p = contraction(Shape(32, 128, (56, 56), 128, (3, 3), pads=SAME, kind="tf32x3"))
    for c in proposed(p):
        g = Geometry(p, c)
        assert g.x_slot >= 2 * g.x_bytes
        assert held(g) < available(g)
        assert c.split * c.teams > 1  # else nothing multiplies while sums are added


@pytest.mark.parametrize("s", [
    Shape(0, 1024, (2048,), 1024, (1,), constant=False),
    Shape(0, 72, (40,), 96, (1,), batch=3, constant=False, kind="fp16"),
    Shape(0, 64, (512,), 64, (1,), batch=16, constant=False),
])  # fmt: skip
def test_features_innermost_have_choices(s):
    steps = {"w_step": s.features, "w_batch": s.features * s.channels}
    p = replace(contraction(s), w_features_inner=True, **steps)
    found = proposed(p)
    assert found
    for c in found:
        assert refusal(Geometry(p, c), H200.shared_bytes) is None, c.label


@pytest.mark.parametrize(("size", "channels"), [(7, 512), (14, 256)])
def test_one_picture_of_many_channels_is_split_several_ways(size, channels):
    """Each with slots for all that a program fetches."""
    p = contraction(Shape(1, channels, (size, size), channels, (3, 3), pads=SAME))
    found = proposed(p)[:4]
    assert len({c.k_split for c in found}) >= 2
    for c in found:
        g = Geometry(p, c)
        assert at_once(g), c.label
        assert g.work <= clusters_of(H200, c.k_split)


@pytest.mark.parametrize(
    "s",
    [
        Shape(1, 512, (7, 7), 64, (3, 3), pads=SAME),
        Shape(1, 192, (15, 15), 64, (3, 3), strides=(2, 2), pads=SAME),  # four phases
        Shape(0, 1024, (8,), 64, (1,)),
    ],
)
def test_what_a_part_fetches_at_most(s):
    p = contraction(s)
    for parts in range(1, 17):
        c = Config((8,) + (1,) * (len(p.lines) - 1), 0, x_stages=2, w_stages=2, k_split=parts)
        g, simulated = Geometry(p, c), Simulator(p, c, 132, values_of(p))
        walks = [simulated.steps(simulated.tile(0, rank)) for rank in range(parts)]
        assert part_steps(g) == max(map(len, walks))
        assert part_inputs(g) == max(sum(first for *_, first in walk) for walk in walks)


def test_clusters_fit_whatever_the_sizes_of_a_gpu_s_parts():
    """132 multiprocessors in eight parts of at most 18: by hand, the worst sizes for each."""
    found = {n: clusters_of(H200, n) for n in (1, 2, 4, 8, 9, 16)}
    # 4: 18 x 5, 14 x 3; 8: the same; 9: 18 x 2, 16 x 6; 16: as 4
    assert found == {1: 132, 2: 66, 4: 29, 8: 13, 9: 10, 16: 5}


# ---- what it computes --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_every_element_is_stored_once_from_the_right_inputs(name):
    p = problem(name)
    values = values_of(p)
    want = expected(p, values)
    for gpu, most in ((H200, 2), (FEW, 4)):
        for c in proposed(p, gpu)[:most]:
            check(p, c, gpu.multiprocessors, values, want)


# Choices that the model does not propose for small problems.
OTHERS = [
    ("7x7 pictures", Config((8, 7, 2), 1, split=2, x_stages=2, w_stages=3, x_shared=1, w_shared=2)),
    ("7x7 pictures", Config((8, 7, 2), 1, x_stages=2, w_stages=3, x_shared=2)),
    ("7x7 pictures", Config((8, 7, 2), 1, x_stages=2, w_stages=4, w_shared=4)),
    ("channels and features that fill up", Config((16, 3, 1), 0, split=3, x_stages=2, w_stages=2)),
    (
        "channels and features that fill up",
        Config((16, 7, 1), 1, 2, x_stages=3, w_stages=3, row_bytes=32),
    ),
    ("3x3, pool", Config((16, 14, 1), 0, 1, 1, 1, x_stages=2, w_stages=2)),
    ("few tiles of many channels", Config((8, 8, 1), 1, x_stages=2, w_stages=4, k_split=7)),
    ("1-d, one picture", Config((256,), 0, x_stages=2, w_stages=2)),
]


@pytest.mark.parametrize(("name", "config"), OTHERS)
def test_other_choices_are_right_too(name, config):
    p = problem(name)
    assert refusal(Geometry(p, config), H200.shared_bytes) is None
    values = values_of(p)
    check(p, config, 8, values, expected(p, values))


def check(p: Problem, c: Config, multiprocessors: int, values, want) -> None:
    simulated = Simulator(p, c, multiprocessors, values)
    simulated.run()
    assert (simulated.stored == 1).all(), f"{c.label}: stored {np.unique(simulated.stored)} times"
    assert np.array_equal(simulated.results, want), c.label


def test_a_wrong_shift_shows():
    p = problem("3x3, pool")
    values = values_of(p)
    simulated = Simulator(p, proposed(p)[0], 132, values)
    simulated.rows_of_columns = simulated.rows_of_columns.copy()
    simulated.rows_of_columns[5] += 1
    simulated.run()
    assert not np.array_equal(simulated.results, expected(p, values))


# ---- the rings ---------------------------------------------------------------------------------


def schedules(g: Geometry, turns: bool, count: int) -> list[str]:
    """What goes wrong in some schedules of a program of a few tiles."""
    wrong, parts = [], g.config.k_split
    for seed in range(count):
        try:
            Rings(g, 2 * g.config.teams + 2 if parts == 1 else 1, turns, seed % parts).play(seed)
        except Wrong as found:
            wrong.append(str(found))
    return wrong


@pytest.mark.parametrize("name", SHAPES)
def test_no_schedule_of_a_choice_goes_wrong(name):
    p = problem(name)
    for c in proposed(p, FEW)[:6]:
        g = Geometry(p, c)
        if g.steps <= 40:
            assert not schedules(g, g.turns, 6), c.label


TWO_CHUNKS = Shape(4, 128, (16, 16), 64, (3, 3), pads=SAME)


def test_tiles_of_two_half_types_are_refused():
    """A kernel converts one of them."""
    p = contraction(Shape(0, 64, (64,), 64, (1,), residual=True))
    (read,) = (r for r in p.reads if r.kind == "tile")
    other = replace(read.tensor, dtype=DType.F16)
    reads = tuple(replace(r, tensor=other) if r is read else r for r in p.reads)
    config = Config((64,), 0, w_stages=2)
    assert refusal(Geometry(p, config), H200.shared_bytes) is None
    found = refusal(Geometry(replace(p, reads=reads), config), H200.shared_bytes)
    assert isinstance(found, Refusal)
    assert found.text == "tiles of bfloat16 and of float16"


@pytest.mark.parametrize(("stages", "w_stages"), [(1, 4), (3, 1), (1, 1)])
def test_a_ring_of_one_slot_never_ends_and_is_refused(stages, w_stages):
    """A slot is given back when the products of the next one have begun."""
    g = Geometry(contraction(TWO_CHUNKS), Config((8, 4, 1), 1, x_stages=stages, w_stages=w_stages))
    assert schedules(g, g.turns, 2)
    found = refusal(g, H200.shared_bytes)
    assert isinstance(found, Refusal)
    assert found.text == f"rings of {stages} chunks and {w_stages} tiles of weights"


@pytest.mark.parametrize(
    ("teams", "stages", "w_stages", "right"),
    [
        (2, 2, 0, False),
        (2, 3, 0, False),
        (2, 4, 0, True),
        (2, 5, 0, False),
        (3, 5, 0, False),
        (3, 6, 0, True),
    ],
)
def test_teams_that_take_no_turns_need_slots_of_their_own(teams, stages, w_stages, right):
    p = contraction(TWO_CHUNKS)
    c = Config((8, 4, 1), 1, teams=teams, x_stages=stages, w_stages=w_stages)
    assert (not schedules(Geometry(p, c), False, 60)) is right
    assert not schedules(Geometry(p, c), True, 30)


@pytest.mark.parametrize(
    ("teams", "reads", "right"),
    [(1, 1, False), (1, 2, True), (2, 2, False), (2, 3, False), (2, 4, True)],
)
def test_results_in_the_place_of_reads_need_two_rounds_of_them(teams, reads, right):
    p = contraction(Shape(0, 64, (4096,), 64, (1,), residual=True))
    g = Geometry(p, Config((64,), 0, teams=teams, x_stages=teams, r_stages=reads))
    assert g.in_place
    assert (not schedules(g, g.turns, 60)) is right
