"""Where a region is cut so that the tensor-core engine takes its product.

The engine refuses what it has no form for behind a product, or in front of it: a logsumexp of all
features, a pool whose windows lie across the classes of a transposed convolution, a pool that its
input comes from. All of it is then one kernel of Triton's, whose product is slower; or two kernels:
the engine's, with as much of the region as it takes, and the rest. Which of these is faster is
measured (decide.py).
"""

from __future__ import annotations

from collections.abc import Callable

from onchip.fusion.partition import Partitioner
from onchip.fusion.region import Region
from onchip.ir.graph import Node
from onchip.planning.candidates import Context
from onchip.planning.cut import Cut, closed, crossing_bytes
from onchip.planning.generators import Generator
from onchip.planning.precision import multiplies

MOST_ASKED = 24  # parts that the engine is asked about: each answer takes some milliseconds


def engine_cut(
    region: Region, partitioner: Partitioner, generator: Generator, context: Context,
    launches: Callable[[Node], bool],
) -> Cut | None:  # fmt: skip
    """The legal cut of which one part is the engine's: that with the most operators in it and, of
    equal ones, the fewest bytes over it. None if the engine takes the whole region, or no part.

    launches: whether an operator is more than a view
    """
    products = frozenset(filter(multiplies, region.nodes))
    if not products or generator.engine_takes(region, context):
        return None
    if not any(generator.engine_takes(partitioner.region([n]), context) for n in products):
        return None  # nor with anything around it
    places = {n: i for i, n in enumerate(region.nodes)}
    every = frozenset(region.nodes)
    found: list[tuple[int, int, Cut, frozenset[Node]]] = []
    for first in closed(region):
        parts = first, every - first
        if all(any(map(launches, part)) for part in parts):
            cut = Cut(tuple(sorted(map(places.__getitem__, first))), crossing_bytes(region, first))
            found += [(-len(p), cut.nbytes, cut, p) for p in parts if products & p]
    found.sort(key=lambda f: (*f[:2], f[2].first))
    for _, _, cut, part in found[:MOST_ASKED]:
        own = partitioner.region([n for n in region.nodes if n in part])
        if generator.engine_takes(own, context):
            return cut
    return None
