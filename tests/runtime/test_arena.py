"""Memory: live buffers never overlap, and a result is never overwritten while it is held."""

import gc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.runtime.arena import ALIGNMENT, ArenaPool, Buffer, OutputPool, View, plan_offsets

buffers = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 12), st.integers(0, 6)).map(
        lambda x: Buffer(x[0], (x[1], x[1] + x[2]))
    ),
    max_size=14,
)


@given(buffers)
@settings(max_examples=200, deadline=None)
def test_buffers_alive_together_do_not_overlap(requests):
    offsets, total = plan_offsets(requests)
    for i, a in enumerate(requests):
        assert offsets[i] % ALIGNMENT == 0
        assert offsets[i] + a.nbytes <= total
        for j, b in enumerate(requests[:i]):
            if a.steps[0] <= b.steps[1] and b.steps[0] <= a.steps[1]:
                apart = offsets[i] + a.nbytes <= offsets[j] or offsets[j] + b.nbytes <= offsets[i]
                assert apart


def test_memory_is_used_again():
    _, total = plan_offsets([Buffer(640, (i, i + 1)) for i in range(10)])
    assert total == 2 * 640


def test_large_arena_is_aligned_and_usable():
    n = 3 << 20
    view = View(0, (n // 4,), (1,), torch.float32)
    arena = ArenaPool(n, [view], torch.device("cpu")).take()
    assert arena.pointers[0] % ALIGNMENT == 0
    arena.tensors[0].fill_(3.0)
    assert float(arena.tensors[0].sum()) == 3.0 * (n // 4)


def test_concurrent_calls_get_different_arenas():
    pool = ArenaPool(256, [View(0, (4,), (1,), torch.float32)], torch.device("cpu"))
    a, b = pool.take(), pool.take()
    assert a.pointers != b.pointers
    pool.give(a)
    assert pool.take() is a


def test_arenas_stay_on_their_stream():
    """On a GPU a call gives its arena back before its work is done: only work behind it on the same
    stream may use it."""
    pool = ArenaPool(256, [View(0, (4,), (1,), torch.float32)], torch.device("cpu"), zeroed=64)
    a = pool.take(7)
    assert int(a.block[-64:].sum()) == 0
    pool.give(a, 7)
    b = pool.take(8)
    assert b is not a
    pool.give(b, 8)
    assert pool.take(7) is a
    for stream in range(100, 100 + 3 * ArenaPool.STREAMS):
        pool.give(pool.take(stream), stream)
    assert len(pool.free) <= ArenaPool.STREAMS


def pool(n, dtype=torch.float32):
    return OutputPool((n, 64), (64, 1), dtype, torch.device("cpu"))


def test_held_results_are_never_reused():
    for n in (1, 1 << 10, 1 << 15):
        p = pool(n)
        held = [p.take().fill_(i) for i in range(6)]
        assert len({t.data_ptr() for t in held}) == 6
        assert all(bool((t == i).all()) for i, t in enumerate(held))


def test_a_held_view_keeps_the_storage():
    p = pool(1 << 12)
    view = p.take().fill_(7)[3:5]
    others = [p.take().fill_(0) for _ in range(4)]
    assert bool((view == 7).all())
    del others
    p.take().fill_(1)
    assert bool((view == 7).all())


def test_freed_results_are_reused_and_few_are_kept():
    p = pool(1 << 12)
    pointer = p.take().data_ptr()
    gc.collect()
    assert p.take().data_ptr() == pointer
    held = [p.take() for _ in range(9)]
    del held
    assert len(p.kept) <= p.KEEP


def test_strided_result():
    t = OutputPool((3, 4), (1, 3), torch.int16, torch.device("cpu")).take()
    assert t.stride() == (1, 3)
