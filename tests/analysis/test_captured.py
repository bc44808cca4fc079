"""The analysis on real captured operators: kinds as the field names them, products against
torch's own counter."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from onchip.analysis.kind import Kind, contraction
from onchip.analysis.traffic import Ledger, account, viewable
from onchip.capture import capture


class Each(nn.Module):
    """One operator of each kind, in a chain of small, odd sizes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 12, 3, padding=1, bias=True)
        self.grouped = nn.Conv2d(12, 6, 3, groups=3, stride=2)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6)
        self.norm = nn.BatchNorm2d(6)
        self.out = nn.Linear(6 * 3 * 3, 7)

    def forward(self, x):
        x = functional.max_pool2d(torch.relu(self.conv(x)), 3, 2, 1)
        x = self.norm(self.depthwise(self.grouped(functional.pad(x, (3, 3, 2, 2)))))
        x = functional.avg_pool2d(x, 2)[:, :, :3, :3]
        return torch.softmax(self.out(x.flatten(1)), 1)


@pytest.fixture(scope="module")
def case():
    model, x = Each().eval(), torch.randn(2, 6, 27, 31)
    return model, x, capture(model, (x,)).graph


EXPECTED = {
    "conv": Kind.CONTRACTION,
    "relu": Kind.POINTWISE,
    "max_pool2d": Kind.WINDOW,
    "pad": Kind.POINTWISE,
    "grouped": Kind.CONTRACTION,
    "depthwise": Kind.WINDOW,
    "norm": Kind.POINTWISE,
    "avg_pool2d": Kind.WINDOW,
    "out": Kind.CONTRACTION,
    "softmax": Kind.REDUCTION,
}


def test_kinds(case):
    ledger = Ledger(case[2])
    found = {n.name: ledger.kind(n) for n in case[2].nodes if not ledger.is_free(n)}
    names = {k: v for k, v in found.items() if v is not Kind.VIEW}
    assert list(names.values()) == list(EXPECTED.values()), names


def test_products_agree_with_torch(case):
    model, x, graph = case
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    ours = 0
    for n in graph.nodes:
        for t in n.tensors:
            if (c := contraction(t)) is not None:
                ours += 2 * c.m * c.n * c.k * c.batches
    depthwise = 2 * 9 * next(n for n in graph.nodes if "depthwise" in n.name).results[0].numel
    assert ours + depthwise == counter.get_total_flops()


def test_unfused_accesses_are_a_read_and_a_write_an_operator(case):
    graph = case[2]
    ledger = Ledger(graph)
    work = [n for n in graph.nodes if not ledger.is_free(n)]
    total = account(graph)
    assert total.launches == len(work)
    assert total.accesses == 2 * len(work)
    assert ledger.kernel(graph.nodes).accesses == 2
    assert total.flops == sum(ledger.flops(n) for n in graph.nodes)


BASES = [
    torch.empty(2, 3, 4),
    torch.empty(6, 1, 4).transpose(0, 2),
    torch.empty(4, 3, 2).permute(2, 1, 0),
    torch.empty(2, 6, 4)[:, ::2],
    torch.empty(2, 1, 4).expand(2, 3, 4),
    torch.empty(1, 1).expand(4, 6),
    torch.empty(2, 2, 3, 2).to(memory_format=torch.channels_last),
    torch.empty(5, 6, 7)[1:3, 1:4, 2:6],
    torch.empty(24)[3:7:2],
    torch.empty(()),
    torch.empty(3, 0, 2).transpose(0, 2),
]
SHAPES = [(24,), (4, 6), (6, 4), (2, 12), (2, 3, 4), (2, 3, 2, 2), (1, 24, 1), (3, 8), (8, 3), (2,),
          (1, 1), (0,), (2, 0), (4, 2, 3), (2, 2, 6)]  # fmt: skip


def test_what_can_be_a_view_is_what_torch_says():
    found = []
    for t in BASES:
        for shape in SHAPES:
            if torch.Size(shape).numel() != t.numel():
                continue
            try:
                t.view(shape)
                expected = True
            except RuntimeError:
                expected = False
            assert viewable(tuple(t.shape), t.stride(), shape) is expected, (t.stride(), shape)
            found.append(expected)
    assert {True, False} <= set(found)
    assert len(found) > 60


def test_a_view_of_another_type_moves_nothing():
    class Halves(nn.Module):
        def forward(self, x):
            return x.view(torch.int16) + 3

    graph = capture(Halves(), (torch.arange(40, dtype=torch.int32).reshape(5, 8),)).graph
    assert [Ledger(graph).operator(n).launches for n in graph.nodes] == [0, 1]


def test_a_reshape_of_another_layout_is_a_launch_that_reads_and_writes():
    graph = capture(nn.Flatten(), (torch.randn(2, 3, 4, 5),)).graph
    (node,) = graph.nodes
    assert account(graph).launches == 0
    moved = Ledger(graph, {graph.inputs[0]: (60, 1, 15, 3)})
    own = moved.operator(node)
    assert (own.launches, own.accesses, own.dram_bytes) == (1, 2, 2 * 120 * 4)
    kept = Ledger(graph, {graph.inputs[0]: (200, 20, 5, 1)})  # still one run behind the batch
    assert kept.operator(node).launches == 0
