"""The kernels that tests/gpu/test_engine.py runs on a GPU: each is possible, and between them they
take every branch of the device code."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from tests.gpu.engine_cases import CASES, FEW, Prepared, prepare

from onchip.backends.cuda.geometry import Geometry
from onchip.backends.cuda.limits import refusal
from onchip.backends.cuda.packed import PackedGeometry
from onchip.backends.cuda.parts import at_once
from onchip.backends.cuda.registers import launched
from onchip.backends.cuda.totals import folded_tiles, warps

prepared = cache(lambda name: prepare(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_every_configuration_is_possible(name):
    p = prepared(name)
    for c in p.configs:
        refused = refusal(p.geometry(c), FEW.shared_bytes)
        assert refused is None, f"{c.label}: {refused}"


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("two_results")])
def test_tiles_have_all_positions_and_cells(name):
    p = prepared(name)
    for c in p.configs:
        g = p.geometry(c)
        for line, tiles, cells, patch in zip(
            p.problem.lines, g.tiles, g.cells, c.patch, strict=True
        ):
            pools = p.problem.pools
            found = {t * cells + q for t in range(tiles) for q in range(cells)}
            assert set(range(line.cells if pools else line.positions)) <= found
            starts = [
                t * cells * line.hop - line.lead if pools else t * patch for t in range(tiles)
            ]
            assert set(range(line.positions)) <= {s + i for s in starts for i in range(patch)}


def facts(p: Prepared, g: Geometry) -> Iterator[str]:
    """The branches of the device code that a kernel takes, in words."""
    c, q = g.config, g.problem
    if q.totals:
        form = "packed" if isinstance(g, PackedGeometry) else "copied"
        yield f"totals of {form} input, {'with' if q.results else 'without'} results"
        yield f"totals, {'places kept apart' if any(x.apart for x in q.lines) else 'of all'}"
        for name in ("teams", "split", "blocks", "k_split", "x_shared", "w_shared"):
            if getattr(c, name) > 1:
                yield f"totals, {name}"
        yield f"totals along {c.along}"
        yield from (f"totals by {t.fold}" for t in q.totals)
        yield f"{len(q.totals)} totals, {'several warps' if warps(g) > 1 else 'one warp'}"
        if g.tile_reads:
            yield "totals of tile reads"
        if folded_tiles(g) % warps(g):
            yield "warps with different numbers of tiles"
    if isinstance(g, PackedGeometry):
        yield f"packed, {q.kind}, {'windows handed on' if g.carried else 'no windows handed on'}"
        yield f"packed, {c.teams} teams"
        yield f"packed, rows of {'several chunks' if g.run_chunks > 1 else 'one chunk'}"
        yield f"packed, pairs {'across rows' if g.across_rows else 'of a row'}"
        yield f"packed, rows by {'the copy engine' if g.whole_rows else 'threads'}"
        yield f"packed, weights in {'registers' if g.w_held else 'shared memory'}"
        yield f"packed, loaders {'hand on' if g.registers > launched(g) else 'keep'} registers"
        yield f"packed, {'some' if g.loaders < g.loader_warps else 'all'} warps load"
        return  # another main loop
    yield q.kind
    yield f"along {c.along}"
    yield f"rows of {c.row_bytes} bytes"
    for name in ("teams", "split", "blocks", "k_split", "x_shared", "w_shared"):
        n = getattr(c, name)
        yield f"{name} {n}"
        if n > 1:
            yield f"{name}, weights {'come by' if c.w_stages else 'stay'}"
    if at_once(g):
        yield "slots for all of a part"
    if c.teams > 1:
        yield f"teams {'with' if g.turns else 'without'} turns"
    yield "several strips" if len(g.strips) > 1 else "one strip"
    yield f"{len(q.lines)} lines"
    yield f"{len(q.results)} results"
    if g.tile_reads:
        yield f"reads {'in place' if g.in_place else 'apart'}, {q.kind}"
        yield f"{len(g.tile_reads)} reads"
    if q.pools:
        yield f"{q.fold} of windows {'staged' if g.staged else 'in registers'}, wide {g.wide}"
        if c.k_split > 1:
            yield "windows behind a split of K"
        if any(x.lead for x in q.lines):
            yield "windows that begin outside"
    for r in q.results:
        yield f"results of {r.tensor.dtype.size} bytes, {'tiles' if r.tile else 'elements'}"
    yield f"{'weights laid out' if q.w_constant else 'weights as they lie'}, batch {q.batch > 1}"
    for x in q.lines:
        if x.stride > 1:
            yield "strides"
        if x.dilation > 1:
            yield "dilation"
        if x.pad and x.size + 2 * x.pad != (x.positions - 1) * x.stride + (
            x.dilation * (x.taps - 1) + 1
        ):
            yield "padding on one side"
        if x.taps > 16:
            yield "many taps"
    if q.classes > 1:
        kind = f"classes {'unlike' if q.unlike else 'alike'}"
        yield kind
        yield f"{kind}, {'turns' if g.turns else 'no turns'}"
        yield f"{kind}, {'tiles' if q.results[0].tile else 'elements'}, {len(g.tile_reads)} reads"
        yield f"{kind}, cluster of {c.cluster}"
        if q.uneven:
            reads = {"by tiles" if r.kind == "tile" else r.kind for r in q.reads} - {"feature"}
            stored = "tiles" if q.results[0].tile else "elements"
            yield f"classes of different lengths, {stored}, reads {' '.join(reads) or 'nothing'}"
            yield f"classes of different lengths, cluster of {c.cluster}"
    if q.channels % g.chunk:
        yield "channels fill up"
    if q.features % g.tile_features:
        yield "features fill up"
    if q.features < 64:
        yield "fewer features than a block"
    if any(n % m for n, m in zip((x.positions for x in q.lines), c.patch, strict=True)):
        yield "positions fill up"
    if g.pieces > c.x_shared:
        yield "a line longer than a copy"
    if q.lines[0].step > q.channels and q.lines[0].stride == 1 and q.batch == q.classes:
        yield "gaps between rows of channels"
    if q.x_offset:
        yield "an input that begins elsewhere"
    programs = prepared(p.case.name).candidate(c).source.programs
    if c.k_split == 1 and g.work * c.cluster >= 2 * programs * c.teams:
        yield f"two tiles or more for each of {c.teams} teams"
        yield f"the same, cluster of {c.cluster}"


WANTED = [
    "bf16", "fp16", "tf32", "along 0", "along 1",
    *(f"rows of {n} bytes" for n in (128, 64, 32)),
    *(f"teams {n}" for n in (1, 2, 3, 4)), *(f"split {n}" for n in (1, 2, 4)),
    "blocks 1", "blocks 2", *(f"k_split {n}" for n in (2, 5, 8, 9, 16)),
    *(f"{who}_shared {n}" for who in "xw" for n in (2, 4)),
    "teams, weights stay", "teams, weights come by",
    "slots for all of a part",
    "teams with turns", "teams without turns", "several strips", "one strip",
    *(f"{n} lines" for n in (1, 2, 3, 4)), "1 results", "2 results",
    "reads in place, bf16", "reads apart, bf16", "reads in place, tf32", "1 reads", "2 reads",
    "max of windows in registers, wide False", "max of windows in registers, wide True",
    "max of windows staged, wide False", "max of windows staged, wide True",
    "sum of windows in registers, wide True", "sum of windows staged, wide True",
    "windows behind a split of K", "windows that begin outside",
    *(f"results of {n} bytes, tiles" for n in (2, 4)),
    *(f"results of {n} bytes, elements" for n in (2, 4)),
    "weights laid out, batch False", "weights laid out, batch True",
    "weights as they lie, batch False", "weights as they lie, batch True",
    "strides", "dilation", "padding on one side", "many taps",
    "classes alike, turns", "classes unlike, turns", "classes unlike, no turns",
    "classes alike, tiles, 0 reads", "classes alike, elements, 0 reads",
    *(f"classes of different lengths, {how}" for how in (
        "tiles, reads nothing", "tiles, reads by tiles", "elements, reads direct", "cluster of 2",
    )),
    "classes unlike, tiles, 1 reads", "classes alike, cluster of 2", "classes unlike, cluster of 2",
    "channels fill up", "features fill up", "fewer features than a block", "positions fill up",
    "gaps between rows of channels",
    "a line longer than a copy", "an input that begins elsewhere",
    *(f"packed, {kind}, {windows}windows handed on" for kind, windows in (
        ("bf16", ""), ("tf32", ""), ("bf16", "no "), ("fp16", "no "),
    )),
    *(f"packed, {n} teams" for n in (1, 2, 3, 4)),
    "totals of copied input, with results", "totals of copied input, without results",
    "totals of packed input, with results", "totals, places kept apart", "totals, of all",
    *(f"totals, {n}" for n in ("teams", "split", "blocks", "k_split", "x_shared", "w_shared")),
    "totals along 0", "totals along 1", *(f"totals by {n}" for n in ("sum", "max", "min")),
    "1 totals, several warps", "2 totals, several warps", "1 totals, one warp",
    "totals of tile reads", "warps with different numbers of tiles",
    "packed, rows of one chunk", "packed, rows of several chunks",
    "packed, pairs across rows", "packed, pairs of a row",
    "packed, rows by the copy engine", "packed, rows by threads",
    "packed, weights in registers", "packed, weights in shared memory",
    "packed, loaders hand on registers", "packed, loaders keep registers",
    "packed, some warps load", "packed, all warps load",
    *(f"two tiles or more for each of {n} teams" for n in (1, 2, 3, 4)),
    *(f"the same, cluster of {n}" for n in (2, 4)),
]  # fmt: skip


def test_the_kernels_take_every_branch():
    found = {
        f for name in CASES for p in [prepared(name)] for c in p.configs
        for f in facts(p, p.geometry(c))
    }  # fmt: skip
    missing = sorted(set(WANTED) - found)
    assert not missing
