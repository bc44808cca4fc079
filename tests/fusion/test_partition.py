"""Merging: the short cut for operators in step decides what staging the whole region decides. A
long chain is cut where a kernel would be too large, and is not staged again for each operator."""

from math import prod

import pytest
import torch

from onchip.backends.cpp.run import region_for
from onchip.capture import capture
from onchip.capture.cleanup import constant_tensors
from onchip.fusion import partition
from onchip.fusion.layout import choose_layouts, contiguous
from onchip.fusion.machine import Machine
from onchip.fusion.partition import SIZE_LIMIT, Partitioner, region_root
from onchip.fusion.phases import nest_root, nests_for
from onchip.fusion.refusal import Refusal, Rule
from onchip.fusion.region import region_of
from onchip.fusion.staging import stage
from onchip.fusion.tiling import SCRATCH_BUDGET, single_nests
from onchip.ir.dtype import DType
from onchip.ir.expr import given
from onchip.ops.registry import OPERATORS

MACHINE = Machine(2, 16)


def partitioner(f, *inputs):
    module = f if isinstance(f, torch.nn.Module) else None
    graph = capture(module or f, inputs).graph
    layouts = choose_layouts(graph, lambda n: n.op in ("view", "permute", "slice", "expand", "t"))
    constants = frozenset(constant_tensors(graph)) | frozenset(graph.constants)
    root_of = lambda r, strides, constants: partition.region_root(r, strides, MACHINE)  # noqa: E731
    return Partitioner(graph, layouts, constants, root_of)


@pytest.fixture
def staged_regions(monkeypatch):
    seen, original = [], partition.region_root
    monkeypatch.setattr(
        partition, "region_root", lambda r, *rest: seen.append(r) or original(r, *rest)
    )
    return seen


def chain(n):
    def f(x):
        for i in range(n):
            x = x * 1.5 + i if i % 2 else torch.relu(x)
        return x

    return f


def test_a_long_chain_is_cut_and_its_regions_are_not_staged_again_and_again(staged_regions):
    p = partitioner(chain(800), torch.randn(5, 7))
    groups = p.run().groups
    sizes = [g.size for g in groups]
    assert sum(len(g.nodes) for g in groups) == len(p.graph.nodes) > 1000
    assert len(groups) == -(-sum(sizes) // SIZE_LIMIT)
    assert max(sizes) <= SIZE_LIMIT
    assert {r.rule for r in p.refusals.values()} == {Rule.TOO_LARGE}
    assert sum(len(r.nodes) for r in staged_regions) < 20  # each first pair, no more


def residual(x, y):
    a = x + y
    b = a.sin()
    return (a * b + x).relu(), b


def row_then_pointwise(x, y):
    z = torch.softmax(x, -1)
    return (z * 2 + y).tanh() - z


def shifted(x, y):
    a = (x * y).exp()
    b = a + 1
    return b[:, 1:] + b[:, :-1]


def transposed(x, y):
    a = torch.relu(x @ y.t())
    return (a + a.t()) * 0.5 + a.sum(0)


def broadcast(x, y):
    a = x.mean(0)
    return ((x - a) * y).relu() + a


def outputs_on_the_way(x, y):
    a = x * 2
    b = a + y
    c = b.tanh()
    return a, b, c * a, c.sum()


def pooled(x, y):
    a = torch.nn.functional.max_pool2d((x * y)[None, None], 3, 2, 1)
    return a.relu() * 2 - a


FUNCTIONS = [
    residual,
    row_then_pointwise,
    shifted,
    transposed,
    broadcast,
    outputs_on_the_way,
    pooled,
]


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_in_step_means_that_a_nest_exists(f, monkeypatch):
    p = partitioner(f, torch.randn(13, 13), torch.randn(13, 13))
    original, taken = Partitioner._in_step, []

    def checked(self, a, b):
        found = original(self, a, b)
        if found:
            region = self.region(a.nodes + b.nodes)
            taken.append(region)
            assert not isinstance(region_root(region, self.strides, MACHINE), Refusal), region.name
        return found

    monkeypatch.setattr(Partitioner, "_in_step", checked)
    merged = p.run()
    assert taken or f in (shifted, transposed, pooled)
    # and it decides nothing: without it the groups are the same
    monkeypatch.setattr(Partitioner, "_in_step", lambda *_: False)
    whole = partitioner(f, torch.randn(13, 13), torch.randn(13, 13)).run()
    assert _names(merged) == _names(whole)


def _names(found):
    return [[n.name for n in g.nodes] for g in found.groups]


@pytest.mark.parametrize(
    "read", [lambda a: a.t(), lambda a: a.flip(0), lambda a: torch.roll(a, 1, 1)]
)
def test_other_reads_than_its_own_element_are_not_in_step(read, staged_regions):
    """Same shape, other elements: such an operator is staged with its region, as boxes may grow."""
    p = partitioner(lambda x: read((x.relu() * 2).exp()), torch.randn(13, 13))
    p.run()
    staged = {n for r in staged_regions for n in r.nodes}
    first = {n for n in p.graph.nodes if n.op in ("relu", "mul")}
    rest = {n for n in p.graph.nodes if n.op not in ("relu", "mul", "exp")}
    assert rest
    assert staged >= first | rest


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_there_is_a_root_exactly_if_there_are_nests(f):
    p = partitioner(f, torch.randn(13, 13), torch.randn(13, 13))
    nodes = p.graph.nodes
    found = set()
    for i in range(len(nodes)):
        for j in range(i + 1, len(nodes) + 1):
            staged = stage(p.region(list(nodes[i:j])))
            assert not isinstance(staged, Refusal)
            root = nest_root(staged, p.strides, MACHINE)
            nests = nests_for(staged, p.strides, MACHINE)
            assert isinstance(root, Refusal) == isinstance(nests, Refusal), (i, j)
            if isinstance(root, Refusal):
                assert root == nests
            found.add(isinstance(root, Refusal))
    assert False in found


def test_outputs_of_a_region_are_what_others_and_the_caller_read():
    p = partitioner(outputs_on_the_way, torch.randn(3, 5), torch.randn(3, 5))
    graph = p.graph
    for i in range(len(graph.nodes)):
        for j in range(i + 1, len(graph.nodes) + 1):
            nodes = graph.nodes[i:j]
            outside = [n for n in graph.nodes if n not in nodes]
            wanted = {t for n in outside for t in n.inputs} | set(graph.output_tensors)
            expected = [t for n in nodes for t in n.results if t in wanted]
            for users in (None, graph.users()):
                region = region_of(nodes, graph, p.constants, p.position, users)
                assert list(region.outputs) == expected


def test_what_was_between_two_operators_may_be_merged_first():
    """y * f(y): f is between the two until it is part of the product's group."""

    def of(region, *_):  # y may not be a result of its group, as where its tile would be too large
        kept = any(t.name == "exp" for t in region.outputs) and len(region.nodes) > 1
        refusal = Refusal(Rule.SCRATCH, "exp", "its tile is too large")
        return refusal if kept else region.nodes[-1].results[0]

    def f(x):
        y = torch.exp(x)
        return y * torch.sigmoid(y)

    p = partitioner(f, torch.randn(5, 7))
    p.root_of = of
    (group,) = p.run().groups
    assert [n.op for n in group.nodes] == ["exp", "sigmoid", "mul"]
    names = {(a.op, b.op): r.rule for (a, b), r in p.refusals.items()}
    assert names == {("exp", "sigmoid"): Rule.SCRATCH}


def test_a_chain_of_many_intermediates_has_tiles_that_fit_the_cache() -> None:
    """Sixteen values are alive at once, of 16,384 elements each they would need a megabyte."""
    x, y = given((16, 64, 56, 56), DType.F32, "x"), given((16, 64, 56, 56), DType.F32, "y")
    values = [OPERATORS["aten.tanh.default"](x), y]
    for step in range(1, 64):
        last, back = values[-1], values[max(0, step - 15)]
        if step % 2:
            values.append(OPERATORS["aten.sub.Tensor"](last, back))
        else:
            values.append(OPERATORS["aten.tanh.default"](last))
    region = region_for([values[-1]], [x, y])
    staged = stage(region)
    assert not isinstance(staged, Refusal)
    strides = {t: contiguous(t.shape) for t in (*region.inputs, *region.tensors)}
    nests = single_nests(staged, strides, Machine(2, 8))
    assert not isinstance(nests, Refusal)
    assert nests[0].scratch_bytes <= SCRATCH_BUDGET
    assert prod(nests[0].tile) >= 1000
