"""The mission's figures, and the conventions on parameters, views, broadcasts and gathers."""

import pytest

from onchip.analysis.record import Totals, total
from onchip.analysis.traffic import Ledger, account, account_kernel
from onchip.ir.dtype import DType
from onchip.ir.expr import given, tensor

from .builders import binary, conv_relu_bn, graph, node, relu

F32 = DType.F32


def test_conv_relu_bn_takes_six_accesses_and_three_launches_fused_two_and_one():
    g = conv_relu_bn(n=2, c=4, h=6)
    unfused, fused = account(g), account_kernel(g.nodes, g)
    assert (unfused.accesses, unfused.launches) == (6, 3)
    assert (fused.accesses, fused.launches) == (2, 1)
    activation, weight, vector = 2 * 4 * 36 * 4, 4 * 4 * 9 * 4, 4 * 4
    assert unfused.dram_bytes == 6 * activation + weight + 4 * vector
    assert fused.dram_bytes == 2 * activation + weight + 4 * vector
    assert unfused.flops == fused.flops == 2 * 2 * 36 * 4 * 36 + 288 + 3 * 288 + 3 * 4
    assert fused.intensity > 2 * unfused.intensity


def test_add_mul_takes_five_accesses_fused_three():
    b, c = given((5, 7), F32), given((5, 7), F32)
    s = binary("add", b, c)
    d = binary("mul", s, 2.0)
    nodes = [node("aten.add.Tensor", (b, c), s), node("aten.mul.Scalar", (s, 2), d)]
    g = graph([b, c], [], nodes, d)
    assert account(g) == Totals(2, 5, 5 * 140, 70)
    fused = Ledger(g).kernel(g.nodes)
    assert (fused.accesses, fused.launches, fused.dram_bytes) == (3, 1, 3 * 140)
    assert fused.on_chip == ((s, 140),)


def test_pooling_fused_writes_the_pooled_result_only():
    g = conv_relu_bn(DType.BF16, pool=True, n=2, c=4, h=6)
    fused = Ledger(g).kernel(g.nodes)
    x, y = g.inputs[0], g.nodes[-1].results[0]
    assert fused.reads == ((x, x.nbytes),)
    assert fused.writes == ((y, y.nbytes),)
    assert y.numel * 4 == x.numel
    assert account(g).accesses == 8


def test_an_intermediate_that_others_need_is_written():
    x = given((4, 6), F32)
    a, w = relu(x), given((4, 6), F32)
    b, c = binary("mul", a, a), binary("add", a, w)
    nodes = [node("aten.relu.default", (x,), a), node("aten.mul.Tensor", (a, a), b),
             node("aten.add.Tensor", (a, w), c)]  # fmt: skip
    g = graph([x, w], [], nodes, b, c)
    ledger = Ledger(g)
    assert ledger.operator(nodes[1]).accesses == 2  # reads `a` once, writes
    pair = ledger.kernel(nodes[:2])
    assert [t for t, _ in pair.writes] == [a, b]
    assert pair.on_chip == ()
    assert ledger.kernel(nodes).accesses == 2 + 2
    kept = graph([x, w], [], nodes, a, b, c)
    assert ledger.kernel(nodes).writes != Ledger(kept).kernel(nodes).writes


def test_views_are_free_and_read_through():
    x = given((6, 8), F32)
    part = tensor((2, 8), F32, lambda i, j: x[i + 1, j])
    wide = tensor((3, 2, 8), F32, lambda k, i, j: part[i, j])
    y = relu(wide)
    nodes = [node("aten.slice.Tensor", (x,), part), node("aten.expand.default", (part,), wide),
             node("aten.relu.default", (wide,), y)]  # fmt: skip
    ledger = Ledger(graph([x], [], nodes, y))
    assert ledger.operator(nodes[0]).totals == Totals(0, 0, 0, 0)
    alone = ledger.operator(nodes[2])
    assert alone.reads == ((x, 2 * 8 * 4),)  # the slice's own bytes, once
    assert ledger.kernel(nodes).reads == alone.reads
    assert account(ledger.graph).launches == 1


def test_a_view_of_a_result_that_leaves_writes_the_result():
    x = given((6, 8), F32)
    a = relu(x)
    v = tensor((8, 6), F32, lambda i, j: a[j, i])
    nodes = [node("aten.relu.default", (x,), a), node("aten.permute.default", (a,), v)]
    kernel = Ledger(graph([x], [], nodes, v)).kernel(nodes[:1])
    assert kernel.writes == ((a, a.nbytes),)


def test_a_parameter_behind_a_view_is_a_parameter():
    x, w = given((4, 6), F32), given((6, 4), F32)
    t = tensor((4, 6), F32, lambda i, j: w[j, i])
    y = binary("mul", x, t)
    nodes = [node("aten.t.default", (w,), t), node("aten.mul.Tensor", (x, t), y)]
    own = Ledger(graph([x], [w], nodes, y)).operator(nodes[1])
    assert (own.accesses, own.parameters, own.dram_bytes) == (2, ((w, 96),), 3 * 96)


def test_contiguous_is_free_unless_it_has_something_to_copy():
    x = given((4, 6), F32)
    same = tensor((4, 6), F32, lambda i, j: x[i, j])
    turned = tensor((6, 4), F32, lambda i, j: x[j, i])
    copied = tensor((6, 4), F32, lambda i, j: turned[i, j])
    cloned = tensor((4, 6), F32, lambda i, j: x[i, j])
    nodes = [node("aten.contiguous.default", (x,), same), node("aten.t.default", (x,), turned),
             node("aten.contiguous.default", (turned,), copied),
             node("aten.clone.default", (x,), cloned)]  # fmt: skip
    ledger = Ledger(graph([x], [], nodes, same, copied, cloned))
    assert [ledger.operator(n).launches for n in nodes] == [0, 0, 1, 1]


def test_broadcasts_and_gathers_cost_what_is_read():
    x, row = given((5, 7), F32), given((7,), F32)
    y = tensor((5, 7), F32, lambda i, j: x[i, j] * row[j])
    table, ids = given((1000, 8), F32), given((3,), DType.I64)
    e = tensor((3, 8), F32, lambda i, j: table[ids[i], j])
    nodes = [node("aten.mul.Tensor", (x, row), y), node("aten.embedding.default", (table, ids), e)]
    ledger = Ledger(graph([x, row, ids], [table], nodes, y, e))
    assert ledger.operator(nodes[0]).dram_bytes == 140 + 28 + 140
    lookup = ledger.operator(nodes[1])
    assert lookup.parameters == ((table, 3 * 8 * 4),)
    assert lookup.reads == ((ids, 24),)


def test_opaque_operators_have_bytes_and_no_flops():
    x, y = given((5,), F32), given((5,), F32)
    nodes = [node("aten.sort.default", (x,), y)]
    g = graph([x], [], nodes, y)
    assert account(g) == Totals(1, 2, 40, None)
    assert account(g).intensity is None


def test_empty_tensors_and_sums():
    x = given((0, 4), F32)
    y = relu(x)
    g = graph([x], [], [node("aten.relu.default", (x,), y)], y)
    assert account(g).dram_bytes == 0
    assert account(g).intensity is None
    assert total([]) == Totals(0, 0, 0, 0, 0.0)
    assert (Totals(1, 1, 1, 1, 2.0) + Totals(1, 1, 1, None, 3.0)).latency_us == pytest.approx(5.0)
