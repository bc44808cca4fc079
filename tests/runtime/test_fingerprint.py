"""Writes to memory that nobody counted: found at once where they are large, and in a bounded number
of looks wherever they are. With and without a compiler."""

import itertools

import pytest
import torch

from onchip.runtime import fingerprint
from onchip.runtime.fingerprint import BLOCK, CALLS, SAMPLES, Fingerprint


@pytest.fixture(params=["compiled", "interpreted"], autouse=True)
def way(request, monkeypatch):
    if request.param == "interpreted":
        monkeypatch.setattr(fingerprint, "_compiled", lambda: None)
    else:
        assert fingerprint._compiled() is not None
    return request.param


def noticed(f, first=0):
    """Which of `steps` looks in a row see a change."""
    return [n for n in range(first, first + f.steps) if not f.holds(n)]


SMALL = {
    "prime": torch.randn(3, 5),
    "transposed": torch.randn(5, 3).t(),
    "every other": torch.randn(13)[::2],
    "expanded": torch.randn(3, 1).expand(3, 4),
    "scalar": torch.tensor(-2.5),
    "three bytes": torch.tensor([1, -2, 3], dtype=torch.int8),
    "flags": torch.tensor([True, False] * 19),
    "halves": torch.randn(9).bfloat16(),
    "complex": torch.randn(5, dtype=torch.complex128),
    "five words and a half": torch.randn(11),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_look_sees_every_element_of_a_small_model(name):
    t = SMALL[name]
    f = Fingerprint([torch.ones(3), t])
    assert f.steps == 1
    assert f.holds(0)
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    elements = t.as_strided((extent,), (1,))
    for i in range(extent):
        old = elements[i].clone()
        elements[i] = old.logical_not() if t.dtype is torch.bool else -old + 1
        assert not f.holds(5), i
        elements[i] = old
        assert f.holds(6), i


def test_any_element_is_reached_by_exactly_one_share_or_by_all():
    sizes = (3, 1000, 3 * BLOCK // 4 + 1, 9 * BLOCK // 4 - 3)
    tensors = [torch.randn(n) for n in sizes]
    f = Fingerprint(tensors)
    assert 1 < f.steps <= CALLS
    for t in tensors:
        bytes_ = t.view(torch.uint8)
        edges = [b + d for b in range(0, len(bytes_), BLOCK) for d in (-1, 0, 1)]
        for i in {*edges, len(bytes_) - 1, len(bytes_) // 2} & set(range(len(bytes_))):
            bytes_[i] += 1
            assert len(noticed(f, first=i)) in (1, f.steps), (len(t), i)
            bytes_[i] -= 1
    assert noticed(f) == []


def test_the_number_of_looks_is_bounded():
    f = Fingerprint([torch.zeros(CALLS * BLOCK // 2)])  # twice the bytes that a smallest share has
    assert f.steps == CALLS
    assert Fingerprint([torch.zeros(CALLS * BLOCK // 8)]).steps == CALLS // 2


def test_a_written_quarter_is_seen_by_every_look():
    t = torch.randn(40 * BLOCK // 4)
    f = Fingerprint([t])
    assert f.steps > 10
    quarter = len(t) // 4 + 4
    for start in range(0, len(t) - quarter + 1, 997):
        saved = t[start : start + quarter].clone()
        t[start : start + quarter] *= 2
        assert noticed(f) == list(range(f.steps)), start
        t[start : start + quarter] = saved


def test_samples_of_a_matrix_are_in_several_columns():
    columns = 64
    f = Fingerprint([torch.zeros(512, columns)])
    starts = f._spans[: f._sampled, 0].astype(int)
    assert len(starts) == SAMPLES
    assert len({(s - starts[0]) // 4 % columns for s in starts}) >= SAMPLES // 2


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.copy_(t.flip(0)),  # the same rows in another order
        lambda t: t.neg_(),
        lambda t: t.copy_(t.roll(8, 1)),
        lambda t: t[1:3].copy_(t[1:3].flip(0)),
        lambda t: t.view(torch.int32).bitwise_xor_(1 << 31),
        lambda t: t[::2].neg_(),
        lambda t: t.view(-1)[1::2].neg_(),  # the highest bits of an even number of words
        lambda t: t.fill_(float("nan")),
    ],
)
def test_rearranged_and_negated_values_are_changes(write):
    t, other = torch.randn(16, 64), torch.randn(5)
    before = Fingerprint([other, t])
    write(t)
    assert Fingerprint([other, t]).changed(before) == {1}


def test_equal_bytes_are_no_change():
    a, b = torch.randn(1000), torch.randn(7)
    f = Fingerprint([a, b])
    assert Fingerprint([a.clone(), b.clone()]).changed(f) == set()
    b[3] += 1
    assert Fingerprint([a, b]).changed(f) == {1}


def test_neighbours_in_one_storage_are_not_looked_at():
    base = torch.zeros(30)
    f = Fingerprint([base[10:20]])
    for i, seen in ((9, False), (10, True), (19, True), (20, False)):
        base[i] = 1
        assert (not f.holds(0)) is seen
        base[i] = 0


def test_nothing_to_look_at():
    for tensors in ([], [torch.zeros(0, 3)], [torch.zeros(4, device="meta")]):
        f = Fingerprint(tensors)
        assert f.holds(0)
        assert f.changed(Fingerprint(tensors)) == set()


def test_memory_that_its_owner_dropped_may_still_be_looked_at():
    p = torch.nn.Parameter(torch.randn(BLOCK * 4))
    f = Fingerprint([p])
    p.data = torch.randn(3)
    trash = [torch.full((BLOCK * 4,), float(i)) for i in range(4)]
    assert noticed(f) == []
    del trash


def test_a_change_of_a_large_model_is_hashed_by_all_threads():
    t = torch.zeros(300, BLOCK // 4)  # more blocks than one thread takes
    f = Fingerprint([t, torch.zeros(2)])
    for i in itertools.chain(range(0, 300, 37), [299]):
        t[i, i] = 1
        assert Fingerprint([t, torch.zeros(2)]).changed(f) == {0}
        t[i, i] = 0
    assert Fingerprint([t, torch.zeros(2)]).changed(f) == set()
