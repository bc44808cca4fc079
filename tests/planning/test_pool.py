"""Which regions are priced: stretches of groups, their number, and groups that are joined."""

import itertools

import pytest
import torch
from torch import nn

from onchip.analysis.cost import Pricer
from onchip.analysis.roofline import Ceilings, Costs
from onchip.analysis.traffic import Ledger
from onchip.capture import capture
from onchip.capture.cleanup import constant_tensors
from onchip.capture.schema import is_view
from onchip.fusion.layout import choose_layouts
from onchip.fusion.machine import Machine
from onchip.fusion.partition import Partitioner, region_root
from onchip.fusion.refusal import Rule
from onchip.planning import pool as pools
from onchip.planning.pool import (
    MOST_CUTS,
    blocks_of,
    bound_of,
    join,
    pool_of,
    price_of,
    ranked_cuts,
)

MACHINE = Machine(2, 16)
COSTS = Costs(((1 << 20, 10.0), (1 << 28, 5000.0)), 2.0, 2, 16.0, 0.5)
CPU = Ceilings("c", 20.0, {"float32": 100.0}, 3.0, "made up", gpu=False, costs=COSTS)


def parts_of(model, *inputs):
    """(partitioner, greedy partition, pricer)."""
    module = model.eval() if isinstance(model, nn.Module) else model
    with torch.no_grad():
        graph = capture(module, inputs).graph
    layouts = choose_layouts(graph, lambda n: is_view(n.call.target))
    constants = frozenset(constant_tensors(graph)) | frozenset(graph.constants)
    root_of = lambda r, strides, _: region_root(r, strides, MACHINE)  # noqa: E731
    p = Partitioner(graph, layouts, constants, root_of)
    return p, p.run(), Pricer(Ledger(graph, layouts), CPU)


def names(partition):
    return [[n.op for n in g.nodes] for g in partition.groups]


# ---- pieces of groups --------------------------------------------------------------------------


def diamond(x):
    y = x.exp()
    a, b = y.sum(1, keepdim=True), torch.tanh(y)
    return a * b.amax(1, keepdim=True)


def test_orders_are_orders_of_execution_and_the_second_keeps_branches_together():
    p, _, _ = parts_of(diamond, torch.randn(8, 16))
    blocks = blocks_of(p.graph.nodes)
    assert len(blocks.pieces) == len(p.graph.nodes)
    for order in blocks.orders:
        place = {q: i for i, q in enumerate(order)}
        assert sorted(order) == list(range(len(blocks.pieces)))
        assert all(place[a] < place[b] for a, b in blocks.edges)

    def branches(x):
        a, b = torch.relu(x), torch.sin(x)
        return (a * 2).sum(1) + (b + 1).amax(1)

    # relu, sin, mul, sum, add, amax, add: as written, and a branch after the other
    p, _, _ = parts_of(branches, torch.randn(8, 16))
    found = blocks_of(p.graph.nodes)
    ops = [[found.pieces[q][0].op for q in order] for order in found.orders]
    assert ops[0] == [n.op for n in p.graph.nodes]
    assert ops[1] == ["relu", "mul", "sum", "sin", "add", "amax", "add"]


@pytest.mark.parametrize("length", [100, 400])
def test_a_long_chain_has_few_regions(length):
    def chain(x):
        for i in range(length):
            x = torch.relu(x + i)
        return x

    p, partition, pricer = parts_of(chain, torch.randn(64))
    priced = []
    count = pricer.kernel_us
    pricer.kernel_us = lambda nodes: priced.append(1) or count(nodes)
    found = bound_of(pool_of(partition, p, price_of(pricer)), p, pricer, 1.0)
    most = MOST_CUTS * (MOST_CUTS + 1) // 2
    kinds = len({len(g.nodes) for g in partition.groups})
    assert sum(len(g.nodes) for g in partition.groups) == 2 * length
    assert found.regions <= len(partition.groups) * most
    assert len(priced) <= (len(partition.groups) + kinds) * most
    for g in partition.groups:
        pieces = blocks_of(g.nodes).pieces
        assert [n for q in pieces for n in q] == g.nodes
        assert len(pieces) <= MOST_CUTS


def test_long_groups_are_cut_where_few_bytes_cross():
    def f(x):
        for _ in range(30):
            x = torch.relu(x + 1)
        y = x.sum(1)
        for _ in range(30):
            y = torch.relu(y + 1)
        return y

    p, _, _ = parts_of(f, torch.randn(64, 256))
    pieces = blocks_of(p.graph.nodes).pieces
    (at,) = [i for i, n in enumerate(p.graph.nodes) if n.op == "sum"]
    ends = list(itertools.accumulate(len(q) for q in pieces))
    assert at + 1 in ends


def test_a_network_of_equal_layers_is_priced_once():
    block = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16))
    deep = nn.Sequential(*(block for _ in range(30)))
    once = bound_of_model(nn.Sequential(*(block for _ in range(3))))
    assert bound_of_model(deep).regions == once.regions


def bound_of_model(model):
    p, partition, pricer = parts_of(model, torch.randn(8, 16))
    return bound_of(pool_of(partition, p, price_of(pricer)), p, pricer, 1.0)


def test_the_bound_is_below_the_cheapest_cover_and_that_below_the_groups():
    for model, x in (
        (diamond, torch.randn(64, 256)),
        (nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.MaxPool2d(3, 2)), torch.randn(2, 4, 9, 9)),
        (Siblings(), torch.randn(512, 16)),
    ):  # fmt: skip
        p, partition, pricer = parts_of(model, x)
        found = bound_of(pool_of(partition, p, price_of(pricer)), p, pricer, 1.0)
        whole = sum(price_of(pricer)(g.nodes) for g in partition.groups)
        assert 0 < found.lower_bound_us <= found.predicted_us <= whole + 1e-9


def test_cuts_are_ranked_by_the_price_of_their_best_cover():
    _, partition, _ = parts_of(nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Tanh()), torch.randn(64))
    (group,) = partition.groups
    first, second, third = group.nodes
    prices = {(first,): 1.0, (second,): 5.0, (third,): 5.0, (second, third): 3.0}
    prices |= {(first, second): 9.0, (first, second, third): 2.0}
    found = ranked_cuts(group.nodes, lambda nodes: prices[tuple(nodes)])
    assert [(c.first, c.us) for c in found] == [((first,), 4.0), ((first, second), 11.0)]


# ---- joined groups -----------------------------------------------------------------------------


class Siblings(nn.Module):
    """Three linear layers of one input."""

    def __init__(self, width=16):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, width) for _ in range(3))

    def forward(self, x):
        return self.q(x), self.k(x), self.v(x)


def pointwise(x):
    return torch.relu(x), torch.sigmoid(x), x * 2


@pytest.mark.parametrize(
    ("model", "x"), [(pointwise, torch.randn(64, 256)), (Siblings(), torch.randn(64, 16))]
)
def test_siblings_that_read_one_tensor_are_joined(model, x):
    p, partition, pricer = parts_of(model, x)
    assert len(partition.groups) == 3
    found = join(pool_of(partition, p, price_of(pricer)), p)
    (group,) = found.groups
    assert [list(g) for g in group.joined] == [g.nodes for g in partition.groups]
    assert len(p.region(group.nodes).outputs) == 3


def test_what_saves_too_little_is_not_joined(monkeypatch):
    p, partition, pricer = parts_of(pointwise, torch.randn(64, 256))
    price = price_of(pricer)
    alone = sum(price(g.nodes) for g in partition.groups)
    both = price([n for g in partition.groups for n in g.nodes])
    monkeypatch.setattr(pools, "LEAST_SAVED", 1 - both / alone + 0.01)
    pool = pool_of(partition, p, price)
    assert [len(o.places) for o in pool.joins] == []
    assert join(pool, p) is partition


def test_siblings_with_a_kernel_between_them_stay_apart_with_the_reason():
    def f(x):
        y = torch.sort(torch.relu(x))[0]
        return x * y

    p, partition, pricer = parts_of(f, torch.randn(64, 256))
    pool = pool_of(partition, p, price_of(pricer))
    assert not pool.joins
    (refusal,) = pool.apart.values()
    assert refusal.rule is Rule.CYCLE
    assert "sort" in str(refusal)


def test_products_in_a_row_are_not_joined():
    p, partition, _ = parts_of(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)),
                               torch.randn(64, 16))  # fmt: skip
    assert len(partition.groups) == 2
    refusal = p.union_refusal(partition.groups)
    assert refusal is not None
    assert refusal.rule is Rule.RECOMPUTE


def test_joins_that_wait_for_each_other_are_not_both_made():
    """a → sort → b and c → sort → d: {a, d} and {b, c} make a circle."""

    def f(x, y):
        a, c = torch.relu(x), torch.relu(y)
        b, d = torch.sort(a)[0] * y, torch.sort(c)[0] * x
        return b, d

    p, partition, _ = parts_of(f, torch.randn(64, 256), torch.randn(64, 256))
    ops = {g.nodes[-1].op + str(i): i for i, g in enumerate(partition.groups)}
    relus = [i for k, i in ops.items() if k.startswith("relu")]
    muls = [i for k, i in ops.items() if k.startswith("mul")]
    groups = partition.groups
    for relu in relus:
        reads = {t for n in groups[relu].nodes for t in n.inputs}
        (mul,) = [m for m in muls if reads & {t for n in groups[m].nodes for t in n.inputs}]
        # each join alone is legal
        assert p.union_refusal([groups[relu], groups[mul]]) is None
    price = lambda nodes: 10.0 if len(nodes) == 1 else 1.0  # noqa: E731
    pool = pool_of(partition, p, price)
    assert len(pool.joins) == 2
    found = join(pool, p)
    assert len(found.groups) == len(groups) - 1
