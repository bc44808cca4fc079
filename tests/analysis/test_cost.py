"""The cost model: its arithmetic on made-up machines, and facts about operators by hand."""

from dataclasses import replace

import pytest
from hypothesis import given as given_by
from hypothesis import strategies as st

from onchip.analysis.cost import (
    Pricer,
    Product,
    Work,
    computing_us,
    moving_us,
    predicted_us,
    product_us,
    running_us,
)
from onchip.analysis.roofline import Ceilings, Costs, datasheet
from onchip.analysis.traffic import Ledger
from onchip.ir.dtype import DType
from onchip.ir.expr import given

from .builders import conv2d, graph, max_pool, node, relu

F32, BF16 = DType.F32, DType.BF16
# 1 MB takes 10 µs, 100 MB 5000: slower by five beyond the caches; one FLOP/µs is 1e-3 GFLOP/s
COPIED = ((1_000_000, 10.0), (100_000_000, 5000.0))
COSTS = Costs(COPIED, start_us=2.0, processors=4, fill=10.0, overlap=0.5)
CPU = Ceilings("c", 20.0, {"float32": 100.0}, 3.0, "made up", gpu=False, costs=COSTS)
GPU = Ceilings("g", 20.0, {"float32": 100.0, "bfloat16": 1000.0}, 9.0, "made up", 1.0, costs=COSTS)


def test_measured_copies_are_met_and_others_lie_between():
    assert moving_us(1e6, CPU) == 10.0
    assert moving_us(1e8, CPU) == pytest.approx(5000.0)
    assert moving_us(1e7, CPU) == pytest.approx((10.0 * 5000.0) ** 0.5)  # half way in logarithms
    assert moving_us(1e5, CPU) == pytest.approx(1.0)  # beyond the ends in proportion
    assert moving_us(2e8, CPU) == pytest.approx(10_000.0)
    assert moving_us(0, CPU) == 0.0


sizes = st.integers(1, 4000)
works = st.builds(
    Work,
    st.integers(0, 10**9),
    st.floats(0, 1e9),
    st.lists(st.builds(Product, sizes, sizes, sizes, st.integers(1, 3), st.just(F32)), max_size=2)
    .map(tuple),
    st.integers(0, 10**8),
    st.integers(1, 3),
)  # fmt: skip


@given_by(works, st.sampled_from([CPU, GPU]))
def test_more_work_takes_no_less(work, ceilings):
    us = predicted_us(work, ceilings)
    assert us >= (1.0 if ceilings.gpu else 2.0)
    more = [
        replace(work, nbytes=work.nbytes * 2 + 1),
        replace(work, operations=work.operations * 2 + 1),
        replace(work, products=(*work.products, Product(64, 64, 64, 1, F32))),
        replace(work, phases=work.phases + 1),
    ]
    assert all(predicted_us(m, ceilings) >= us for m in more)


@given_by(sizes, sizes, sizes, st.sampled_from([CPU, GPU]))
def test_larger_products_take_no_less(m, n, k, ceilings):
    us = product_us(Product(m, n, k, 1, F32), ceilings)
    for bigger in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)):
        assert product_us(Product(*bigger, 1, F32), ceilings) >= us * (1 - 1e-9)
    # never faster than the device's rate
    assert us >= 2.0 * m * n * k / 100e3 * (1 - 1e-9)


def test_a_product_goes_in_waves():
    """4 processors of 25,000 FLOP/µs; tiles of 8 × 32, each as long as its K and 10 steps more."""
    one = 2 * 8 * 32 * (90 + 10) / 25_000
    assert product_us(Product(32, 32, 90, 1, F32), CPU) == pytest.approx(one)
    assert product_us(Product(33, 32, 90, 1, F32), CPU) < 2 * one + 1e-9
    assert product_us(Product(256, 256, 90, 1, F32), CPU) == pytest.approx(64 * one)
    assert product_us(Product(32, 32, 90, 5, F32), CPU) == pytest.approx(5 * one)


def test_moving_and_computing_hide_each_other_in_part():
    work = Work(1_000_000, operations=250_000.0, elements=1 << 20)
    assert computing_us(work, CPU) == pytest.approx(5.0)  # 50,000 instructions a microsecond
    assert running_us(work, CPU) == pytest.approx(10.0 + 5.0 - 2.5)
    assert predicted_us(work, CPU) == pytest.approx(2.0 + 12.5)
    assert predicted_us(replace(work, phases=3), CPU) == pytest.approx(6.0 + 12.5)
    assert predicted_us(work, GPU) == pytest.approx(1.0 + 12.5)  # a node of a graph
    assert predicted_us(work, GPU, graph=False) == pytest.approx(9.0 + 12.5)
    # little work is one thread's
    assert computing_us(replace(work, elements=100), CPU) == pytest.approx(20.0)


def test_a_device_that_is_not_there_has_parameters():
    h200 = datasheet("h200")
    assert moving_us(4_275_000_000, h200) == pytest.approx(1000.0)
    big = product_us(Product(8192, 8192, 8192, 1, BF16), h200)
    assert 2 * 8192**3 / 712e6 <= big <= 1.2 * 2 * 8192**3 / 712e6
    # IEEE float32, or three TF32 products for one
    assert product_us(Product(8192, 8192, 8192, 1, F32), h200) == pytest.approx(
        3 * product_us(Product(8192, 8192, 8192, 1, F32, convolution=True), h200)
    )


def pooled(k, s, p):
    x, w = given((2, 4, 32, 32), F32, "x"), given((8, 4, 3, 3), F32, "w")
    c = conv2d(x, w, padding=1)
    r = relu(c)
    y = max_pool(r, k, s, p)
    nodes = (node("conv2d", (x, w), c), node("relu", (c,), r), node("max_pool2d", (r,), y))
    return Pricer(Ledger(graph((x,), (w,), nodes, y)), CPU), nodes


def test_work_of_a_convolution_under_a_pool():
    pricer, nodes = pooled(2, 2, 0)
    work = pricer.work(nodes)
    assert work is not None
    assert work.products == (Product(2 * 32 * 32, 8, 4 * 9, 1, F32, True),)
    positions = 2 * 8 * 32 * 32
    # ReLU: a load and a maximum; the pool: a load and a step of the fold for each of its taps
    assert work.operations == pytest.approx(2 * positions + 2 * positions)
    assert work.nbytes == 4 * (2 * 4 * 32 * 32 + 8 * 4 * 9 + positions // 4)
    assert (work.elements, work.phases) == (positions, 1)


def test_overlapping_windows_compute_again():
    """3 taps every 2: tiles of 8 × 8 results need 17 × 17 where 16 × 16 are new."""
    pricer, nodes = pooled(3, 2, 1)
    (product,) = pricer.work(nodes).products
    assert product.m == pytest.approx(2 * 32 * 32 * (17 / 16) ** 2, abs=1)
    (alone,) = pricer.work(nodes[:2]).products
    assert alone.m == 2 * 32 * 32


def test_a_kernel_takes_more_than_its_floor_and_calls_more_than_it():
    for pricer, nodes in (pooled(2, 2, 0), pooled(3, 2, 1)):
        for n in (1, 2, 3):
            part = nodes[:n]
            assert pricer.floor_us(part) <= pricer.kernel_us(part)
        assert pricer.kernel_us(nodes) < pricer.library_us(nodes)
        assert pricer.library_us(nodes) == sum(map(pricer.call_us, nodes))
        assert pricer.floor_us(nodes, 2.25) <= pricer.floor_us(nodes)


def test_a_floor_by_hand():
    pricer, nodes = pooled(3, 2, 1)
    (product,) = pricer.work(nodes[:1]).products
    flops = 2 * product.m * 8 * 36
    slow = replace(CPU, costs=replace(COSTS, copied=((1 << 20, 1e-3),)))  # memory costs nothing
    floor = Pricer(pricer.ledger, slow).floor_us
    # nothing is computed twice, and a start is the cheaper of both
    assert floor(nodes) == pytest.approx(flops / 100e3 + 2.0)
    assert floor(nodes, 2.25) == pytest.approx(flops / 100e3 / 2.25 + 2.0)
