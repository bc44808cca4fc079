"""Transposed convolutions with a stride: each kernel that is proposed stores each element once,
from the taps of its class alone; no schedule of its rings goes wrong; texts compile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.cuda_problems import case_of
from tests.backends.engine_classes import Up, transposed, values_and_result
from tests.backends.engine_compile import compiled, source_of
from tests.backends.engine_problems import values_of
from tests.backends.engine_protocol import Rings, Wrong
from tests.backends.engine_simulator import Simulator
from torch import nn

from onchip.backends.cuda.classes import class_taps
from onchip.backends.cuda.geometry import Geometry
from onchip.backends.cuda.limits import refusal
from onchip.backends.cuda.maps import Maps
from onchip.backends.cuda.model import configurations
from onchip.backends.cuda.problem import Config, Problem
from onchip.backends.cuda.weights import packed_weights
from onchip.backends.interpreter import evaluate
from onchip.fusion.layout import contiguous
from onchip.fusion.machine import GPUS
from onchip.fusion.refusal import Refusal

H200 = GPUS["h200"]
FEW = replace(H200, name="few", multiprocessors=3)  # programs go through several tiles

SHAPES = {
    "4, stride 2": Up(2, 72, (5, 7), 64, (4, 4), (2, 2), (1, 1)),
    "4, stride 2, residual": Up(2, 24, (5, 7), 136, (4, 4), (2, 2), (1, 1), residual=True),
    "4, stride 2, float32": Up(
        1, 24, (5, 7), 40, (4, 4), (2, 2), (1, 1), kind="tf32", residual=True
    ),
    "3, stride 2": Up(2, 72, (9, 6), 64, (3, 3), (2, 2), (1, 1)),
    "3, stride 2, residual": Up(1, 24, (9, 6), 72, (3, 3), (2, 2), (1, 1), residual=True),
    "5, stride 2": Up(1, 64, (9, 6), 64, (5, 5), (2, 2), (2, 2)),
    "5, stride 2, split": Up(1, 40, (9, 6), 64, (5, 5), (2, 2), (2, 2), kind="tf32x3"),
    "one line": Up(1, 32, (9, 6), 64, (4, 3), (2, 1), (1, 1)),
    "wave form": Up(2, 64, (37,), 64, (16,), (8,), (4,)),
    "wave form, more taps": Up(1, 32, (50,), 64, (11,), (4,), (3,), longer=1),
    "uneven": Up(2, 72, (9, 6), 64, (3, 3), (2, 2), (1, 1), less=1),
    "uneven, residual": Up(1, 24, (9, 6), 72, (3, 3), (2, 2), (1, 1), less=1, residual=True),
    "uneven, a patch more": Up(1, 24, (8, 4), 64, (4, 3), (2, 2), (1, 0), longer=1, less=1),
    "uneven, element by element": Up(1, 24, (5, 7), 33, (3, 3), (2, 2), (1, 1), less=1, tile=False),
    "uneven wave form": Up(1, 32, (50,), 64, (11,), (4,), (3,), longer=1, less=3),
    "uneven volume": Up(1, 32, (4, 3, 3), 64, (3, 3, 3), (2, 2, 2), (1, 1, 1), less=1, kind="tf32"),
    "volume": Up(1, 32, (4, 3, 3), 64, (3, 3, 3), (2, 2, 2), (1, 1, 1)),
    "element by element": Up(1, 24, (5, 7), 33, (3, 3), (2, 2), (1, 1), tile=False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_element_is_stored_once_from_the_taps_of_its_class(name):
    s = SHAPES[name]
    p = transposed(s)
    values, want = values_and_result(s, p)
    for gpu, most in ((H200, 2), (FEW, 4)):
        found = configurations(p, gpu)
        assert not isinstance(found, Refusal), found
        for c in found[:most]:
            assert refusal(Geometry(p, c), gpu.shared_bytes) is None
            check(p, c, gpu.multiprocessors, values, want)


OTHERS = [
    ("3, stride 2", Config((8, 3, 1), 1, teams=3, x_stages=2, w_stages=3)),
    ("3, stride 2", Config((8, 3, 1), 1, teams=2, x_stages=3, w_stages=5, w_shared=2)),
    ("4, stride 2", Config((8, 7, 1), 1, x_stages=2, w_stages=3, k_split=4)),
    ("4, stride 2, residual", Config((8, 4, 1), 0, x_stages=2, w_stages=2, x_shared=2)),
]


@pytest.mark.parametrize(("name", "config"), OTHERS)
def test_other_choices_are_right_too(name, config):
    s = SHAPES[name]
    p = transposed(s)
    assert refusal(Geometry(p, config), H200.shared_bytes) is None
    check(p, config, 8, *values_and_result(s, p))


def check(p, c, multiprocessors, values, want):
    simulated = Simulator(p, c, multiprocessors, values)
    simulated.run()
    assert (simulated.stored == 1).all(), f"{c.label}: stored {np.unique(simulated.stored)} times"
    assert np.array_equal(simulated.results, want), c.label


@pytest.mark.parametrize("name", ["uneven", "uneven, residual", "uneven volume"])
def test_tensor_maps_have_each_element_once(name):
    """What a class' map does not have, the copy engine neither reads nor stores."""
    p = transposed(SHAPES[name])
    patch = (8, *[1] * (len(p.lines) - 1))
    r, strides = p.results[0], {p.results[0].tensor: contiguous(p.results[0].tensor.shape)}
    maps = Maps(Geometry(p, Config(patch, 0, w_stages=2)), strides, {r.tensor: 0})
    count = np.zeros(r.tensor.shape, int)
    for m in maps.tiles(r.tensor, r.index, False):
        steps = (1, *(n // r.tensor.dtype.size for n in m.strides))
        places = zip(np.indices(m.sizes), steps, strict=True)
        np.add.at(count.ravel(), m.offset + sum(i * n for i, n in places), 1)
    assert (count == 1).all()


def test_the_text_has_the_positions_of_each_class():
    p = transposed(SHAPES["uneven"])
    text = source_of(p, Config((8, 3, 1), 1, w_stages=3)).text
    assert "UNEVEN = 1;" in text
    # 17 columns and 11 rows of a stride of 2, two pictures
    assert "LENGTH[][4] = {{9, 6, 2, 1}, {8, 6, 2, 1}, {9, 5, 2, 1}, {8, 5, 2, 1}};" in text


def test_a_class_of_fewer_taps_walks_fewer():
    p = transposed(SHAPES["3, stride 2"])
    g = Geometry(p, Config((8, 3, 1), 1, w_stages=3))
    assert [len(t) for t in class_taps(g)] == [1, 2, 2, 4]
    assert sorted({number for taps in class_taps(g) for _, number in taps}) == [0, 1, 2, 3]
    refused = refusal(g.__class__(p, replace(g.config, k_split=2)), H200.shared_bytes)
    assert isinstance(refused, Refusal)
    assert refused.text == "classes of different numbers of taps split in parts"


@pytest.mark.parametrize("multiprocessors", [132, 8])
def test_programs_have_as_many_steps_and_neighbours_the_same_positions(multiprocessors):
    """A program's tiles would be of one class if it came round with the number of programs."""
    p = transposed(Up(8, 64, (64, 64), 64, (3, 3), (2, 2), (1, 1)))
    c = Config((8, 8, 1), 1, x_stages=2, w_stages=4)
    simulated = Simulator(p, c, multiprocessors, values_of(p))
    g, taps = simulated.g, class_taps(simulated.g)
    tiles = [simulated.tile(n, 0) for n in range(g.work)]
    steps = [
        sum(len(taps[t.batch]) for t in tiles[k :: simulated.clusters])
        for k in range(simulated.clusters)
    ]
    assert sum(steps) == 9 * g.position_tiles
    assert max(steps) <= min(steps) + 2 * 4
    for n in range(0, g.work, 4):
        assert len({t.position for t in tiles[n : n + 4]}) == 1
        assert {t.batch for t in tiles[n : n + 4]} == {0, 1, 2, 3}


def wrong(g: Geometry, turns: bool, count: int) -> int:
    """Schedules that go wrong."""
    found = 0
    for seed in range(count):
        try:
            Rings(g, 13, turns).play(seed)
        except Wrong:
            found += 1
    return found


@pytest.mark.parametrize("name", ["4, stride 2", "3, stride 2", "5, stride 2"])
def test_no_schedule_goes_wrong(name):
    p = transposed(SHAPES[name])
    found = configurations(p, FEW)
    assert not isinstance(found, Refusal)
    teams = [Config((8, 3, 1), 1, teams=n, x_stages=x, w_stages=w)
             for n, x, w in ((2, 2, 2), (2, 4, 8), (3, 2, 5), (2, 4, 16))]  # fmt: skip
    for c in [*found[:4], *teams]:
        g = Geometry(p, c)
        assert not wrong(g, g.turns, 20), c.label


def test_teams_take_turns_where_classes_have_different_numbers_of_taps():
    """Two tiles of the most taps fill the ring: with classes alike, each team had its slots."""
    p = transposed(SHAPES["3, stride 2"])
    g = Geometry(p, Config((8, 3, 1), 1, teams=2, x_stages=8, w_stages=16))
    assert g.w_tiles % (g.config.teams * g.steps) == 0
    assert g.turns
    assert wrong(g, False, 60)
    assert not wrong(g, True, 60)


# kernel, stride, padding and output padding along each dimension
LAYERS = [((4, 4), (2, 2), (1, 1), 0), ((3, 5), (2, 2), (1, 2), 1), ((16,), (8,), (4,), 0)]


@pytest.mark.parametrize(("kernel", "stride", "padding", "more"), LAYERS)
def test_packed_weights_are_the_layers(kernel, stride, padding, more):
    """What a class' steps multiply, found in the order of the tables, is ATen's result."""
    d = len(kernel)
    make = (nn.ConvTranspose1d, nn.ConvTranspose2d)[d - 1]
    x = torch.randn(2, *(5, 6)[:d], 24).movedim(-1, 1)
    case = case_of(make(24, 40, kernel, stride, padding, more, bias=False), x)
    p = case.problem
    assert isinstance(p, Problem)
    g = Geometry(p, Config((8, 2, 1)[: len(p.lines)], 0, row_bytes=64, w_stages=2))
    (packed,) = evaluate([packed_weights(p, g.chunk)], case.values, exact=True)
    rows = packed.reshape(p.classes, p.taps, g.chunks, p.features, g.chunk)
    rows = rows.transpose(0, 1, 3, 2, 4).reshape(p.classes, p.taps, p.features, -1)
    assert not rows[..., p.channels :].any()
    (want,) = case.wanted
    for n, taps in enumerate(class_taps(g)):
        own = p.class_of(n)[:d]
        total: np.ndarray | float = 0.0
        for _, number in taps:
            rest = number
            values = x.double().numpy()  # [n, channels, outermost first]
            for k, line in enumerate(p.lines[:d]):
                rest, tap = divmod(rest, line.taps)
                at = np.arange(line.positions) + tap - line.pad + line.shifts[own[k]]
                there = (at >= 0) & (at < line.size)
                values = values.take(np.where(there, at, 0), -1 - k)
                values = values * there.reshape(-1, *[1] * k)
            tile = rows[n, number, :, : p.channels]
            total = total + np.einsum("nc...,fc->nf...", values, tile)
        part = want[(..., *(slice(c, None, s) for c, s in zip(own[::-1], stride, strict=True)))]
        np.testing.assert_allclose(total, part, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SHAPES)
def test_the_first_choice_compiles_without_spills(name):
    p = transposed(SHAPES[name])
    found = configurations(p, H200)
    assert not isinstance(found, Refusal)
    got = compiled(source_of(p, found[0]).text)
    assert got.spilled == 0, got.log
    assert "serialized" not in got.log, got.log
