import pytest

from onchip.analysis.kind import Kind
from onchip.analysis.roofline import (
    DEVICES,
    Bound,
    Ceilings,
    bound_us,
    classify,
    datasheet,
    kernel_us,
    launch_us,
)
from onchip.analysis.summary import analyze, groups, program_bound_us
from onchip.analysis.traffic import Ledger
from onchip.errors import OnchipError
from onchip.ir.dtype import DType
from onchip.ir.expr import given, tensor

from .builders import binary, conv_relu_bn, graph, matmul, node, relu

F32, BF16 = DType.F32, DType.BF16
ROUND = Ceilings("round", 1000.0, {"float32": 1e4, "bfloat16": 1e5}, 5.0, "made up", 1.0)


def test_units():
    # 1000 GB/s is a gigabyte in a millisecond; 10 TFLOP/s are 10 GFLOP in one
    assert ROUND.memory_us(1e9) == pytest.approx(1000.0)
    assert ROUND.compute_us(1e10, F32) == pytest.approx(1000.0)
    assert ROUND.compute_us(1e10, BF16, matrix=True) == pytest.approx(100.0)
    assert ROUND.compute_us(1e10, BF16) == pytest.approx(1000.0)
    assert bound_us(ROUND, 1e9, 5e10) == pytest.approx(5000.0)
    assert ROUND.ridge == pytest.approx(10.0)


def test_classes():
    assert classify(ROUND, 1e9, 1e9) is Bound.MEMORY
    assert classify(ROUND, 1e8, 1e10) is Bound.COMPUTE
    assert classify(ROUND, 2e6, 1e6) is Bound.LAUNCH
    assert classify(ROUND, 2e6, 1e6, graph=True) is Bound.MEMORY
    assert launch_us(ROUND, graph=True) == 1.0


def test_a_launch_overlaps_on_a_gpu_and_adds_on_a_cpu():
    cpu = Ceilings("cpu", 30.0, {"float32": 100.0}, 5.0, "made up", gpu=False)
    assert kernel_us(ROUND, 20.0) == 20.0
    assert kernel_us(ROUND, 2.0) == 5.0
    assert kernel_us(cpu, 20.0) == 25.0
    assert launch_us(cpu, graph=True) == 5.0


def test_measured_h200_reproduces_the_measured_bounds():
    h200 = datasheet("H200")
    # reference/measured.md: (B + C) * 2 on 2^28 fp32 is bound by 749 us, on 2^20 by 2.9
    assert h200.memory_us(3 * 4 * 2**28) == pytest.approx(749, rel=0.01)
    assert h200.memory_us(3 * 4 * 2**20) == pytest.approx(2.9, rel=0.02)
    assert h200.source.startswith("measured")


def test_every_device_has_dense_rates_in_order():
    for name, c in DEVICES.items():
        assert c.device == name
        assert c.gflops["float32"] <= c.gflops["tf32"] < c.gflops["float16"]
    assert datasheet("RTX-4090").device == "rtx4090"
    with pytest.raises(OnchipError, match="known are a100"):
        datasheet("tpu")


def test_program_bound_of_the_mission_pipeline():
    # reference/measured.md, first row: bf16 floor 10 us (compute at 712 TFLOP/s)
    g = conv_relu_bn(BF16, pool=True, n=32, c=64, h=56)
    assert program_bound_us(g, datasheet("h200")) == pytest.approx(10, rel=0.1)
    # and fp32, whose convolution PyTorch runs in TF32: 21 us
    g = conv_relu_bn(F32, pool=True, n=32, c=64, h=56)
    assert program_bound_us(g, datasheet("h200")) == pytest.approx(21, rel=0.1)


def test_analysis_sums_and_gains():
    g = conv_relu_bn(F32, n=32, c=64, h=56)
    a = analyze(g, datasheet("h200"))
    assert sum(r.share for r in a.rows) == pytest.approx(1.0)
    assert [r.kind for r in a.rows] == [Kind.CONTRACTION, Kind.POINTWISE, Kind.POINTWISE]
    assert a.rows[1].bound is a.rows[1].running is Bound.MEMORY
    assert a.unfused.accesses == 6
    assert a.fused.accesses == 2
    assert len(a.potentials) == 1
    saved = a.unfused.dram_bytes - a.fused.dram_bytes
    assert saved == 4 * 32 * 64 * 56 * 56 * 4
    assert a.bound_us <= a.best_us <= a.predicted_us
    assert a.potentials[0].gain_us == pytest.approx(a.predicted_us - a.best_us)


def test_groups_can_run_in_order():
    x, w = given((6, 6), F32), given((6, 6), F32)
    a = relu(x)
    m = matmul(a, w)
    turned = tensor((6, 6), F32, lambda i, j: m[j, i])
    s = binary("add", turned, a)  # joins the product, not the relu that it also reads
    o = given((6, 6), F32)
    r = relu(o)
    nodes = [
        node("aten.relu.default", (x,), a, name="relu"),
        node("aten.mm.default", (a, w), m, name="mm"),
        node("aten.t.default", (m,), turned, name="t"),
        node("aten.add.Tensor", (turned, a), s, name="add"),
        node("aten.sort.default", (s,), o, name="sort"),
        node("aten.relu.default", (o,), r, name="last"),
    ]
    found = groups(Ledger(graph([x], [w], nodes, r)))
    assert [[n.name for n in g] for g in found] == [["relu"], ["mm", "add"], ["sort"], ["last"]]


def test_analysis_of_views_and_opaque_operators():
    x = given((0, 4), F32)
    v = tensor((4, 0), F32, lambda i, j: x[j, i])
    a = analyze(graph([x], [], [node("aten.t.default", (x,), v)], v), ROUND)
    assert a.rows[0].bound is None
    assert (a.predicted_us, a.rows[0].share) == (0.0, 0.0)
    y, z = given((50,), F32), given((50,), F32)
    b_graph = graph([y], [], [node("aten.sort.default", (y,), z)], z)
    b = analyze(b_graph, ROUND)
    assert b.rows[0].totals.flops is None
    assert (b.rows[0].bound, b.rows[0].running) == (Bound.LAUNCH, Bound.MEMORY)
    in_graph = analyze(b_graph, ROUND, graphs=True)
    assert in_graph.predicted_us == pytest.approx(1.0)
    assert b.predicted_us == pytest.approx(5.0)


def test_matrix_and_scalar_work_overlap_on_a_gpu_and_add_on_a_cpu():
    g = conv_relu_bn(F32, n=2, c=8, h=16)
    ledger = Ledger(g)
    rates = {"float32": 1.0, "tf32": 10.0}
    gpu = Ceilings("g", 1e9, rates, 0.0, "made up")
    cpu = Ceilings("c", 1e9, {"float32": 1.0}, 0.0, "made up", gpu=False)
    conv, relu_, norm = (ledger.flops(n) for n in g.nodes)
    assert conv / 10 > relu_ + norm
    assert program_bound_us(g, gpu) == pytest.approx(conv / 10 / 1e3)
    assert program_bound_us(g, cpu) == pytest.approx((conv + relu_ + norm) / 1e3)
