"""The order in which tiles of a matrix product are tried: its formula by hand, and what follows."""

from math import ceil

import pytest
from tests.fusion.harness import op, program, value

from onchip.backends.cpp.run import region_for
from onchip.fusion.machine import Machine
from onchip.fusion.nest import Nest, build_nest
from onchip.fusion.product_tiles import predicted_ns, product_tiles
from onchip.fusion.staging import stage


def linear(rows: int, features: int, depth: int):
    p = program([op("linear", value((rows, depth)), value((features, depth), seed=1))])
    staged = stage(region_for(p.outputs, list(p.values)))
    return staged, next(s for s in staged if s.product is not None)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("tile", [(61, 97), (7, 97), (61, 32)])
def test_the_formula_by_hand(tile: tuple[int, int], threads: int) -> None:
    staged, root = linear(61, 97, 128)
    nest = build_nest(staged, root, tile)
    assert isinstance(nest, Nest)
    m, n = tile
    streaming = 4 * n * 128 / 25
    one = 1500 + max(2 * m * n * 128 / 80, streaming) + 0.1 * streaming
    turns = ceil(ceil(61 / m) * ceil(97 / n) / threads)
    assert predicted_ns(nest, Machine(threads, 16)) == pytest.approx(turns * one)


def test_tiles_are_in_order_and_keep_two_threads_busy() -> None:
    staged, root = linear(509, 257, 128)
    machine = Machine(2, 16)
    tiles = product_tiles(staged, root, [False, False], machine)
    times = [predicted_ns(build_nest(staged, root, t), machine) for t in tiles]  # type: ignore
    assert times == sorted(times)
    assert (509, 257) in tiles
    assert tiles[0] != (509, 257)
    rows, columns = zip(*tiles, strict=True)
    assert 1 in rows
    assert set(columns) == {257, 160, 96}  # whole, and multiples of 32 for two and four pieces


def test_whole_axes_stay_whole() -> None:
    staged, root = linear(61, 97, 128)
    tiles = product_tiles(staged, root, [False, True], Machine(2, 16))
    assert {t[1] for t in tiles} == {97}
    assert {t[0] for t in product_tiles(staged, root, [True, False], Machine(2, 16))} == {61}
