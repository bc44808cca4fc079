"""A program is indistinguishable from the model: aliasing, mutation, state, errors."""

import gc
import threading
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.modules import Fn, same
from torch import nn

from onchip.analysis.traffic import account
from onchip.errors import CaptureError, InputError
from onchip.settings import Settings

from .library import compile_library, library_plan


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


# ---- aliasing and mutation


def test_results_share_storage_exactly_where_eager_does():
    def f(s, x, y):
        z = x + y
        return x, x[1:], z, z[0], y * 1, x.clone(), s.w, z.clone()

    m = Fn(f, w=torch.ones(2))
    c = compile_library(m, (torch.randn(3, 4), torch.randn(3, 4)))
    for _ in range(2):
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        got, want = c(x, y), m(x, y)
        assert got[0] is x
        assert got[6] is m.w
        pointers = [[t.untyped_storage().data_ptr() for t in r] for r in (got, want)]
        pattern = [[p.index(q) for q in p] for p in pointers]
        assert pattern[0] == pattern[1]
        for a, b in zip(got, want, strict=True):
            same(a, b)
            assert a.stride() == b.stride()
            assert a.storage_offset() == b.storage_offset()


def test_equal_results_are_separate_tensors():
    c = compile_library(Fn(lambda s, x: (x * 2, x * 2)), (torch.ones(3),))
    a, b = c(torch.ones(3))
    a.zero_()
    same(b, torch.full((3,), 2.0))


def test_swap_by_mutation():
    def f(s, x, y):
        t = x.clone()
        x.copy_(y)
        y.copy_(t)

    c = compile_library(Fn(f), (torch.ones(2), torch.zeros(2)))
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert c(x, y) is None
    same(x, torch.tensor([3.0, 4.0]))
    same(y, torch.tensor([1.0, 2.0]))


def test_a_result_computed_before_a_mutation_keeps_its_value():
    def f(s, x):
        old = x.clone()
        x.add_(1)
        return old, x

    c = compile_library(Fn(f), (torch.ones(2),))
    x = torch.tensor([1.0, 2.0])
    old, new = c(x)
    same(old, torch.tensor([1.0, 2.0]))
    assert new is x
    same(x, torch.tensor([2.0, 3.0]))


def test_overlapping_inputs_with_mutation_run_eagerly_and_say_so():
    def f(s, x, y):
        x.mul_(2)
        return x + y

    c = compile_library(Fn(f), (torch.ones(6), torch.ones(6)))
    base = torch.arange(10.0)
    with pytest.warns(UserWarning, match="overlaps"):
        got = c(base[:6], base[3:9])
    other = torch.arange(10.0)
    same(got, f(None, other[:6], other[3:9]))
    same(base, other)
    assert len(c.notes) == 1


def test_an_input_that_is_a_buffer_of_the_model():
    def f(s, x):
        s.state.add_(1)
        return x * 2

    m = Fn(f, state=torch.zeros(3))
    c = compile_library(m, (torch.ones(3),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(c(m.state), torch.full((3,), 2.0))


def test_state_advances_once_a_call():
    def f(s, x):
        s.n.add_(1)
        return x * s.n

    m = Fn(f, n=torch.zeros(()))
    c = compile_library(m, (torch.ones(2),))
    assert float(m.n) == 0
    for i in range(1, 4):
        same(c(torch.ones(2)), torch.full((2,), float(i)))
    assert len(c.builds) == 1


def test_channels_last_and_expanded_inputs():
    m = Fn(lambda s, x, y: (F.relu(x) + 1, y * 2))
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    y = torch.randn(3, 1).expand(3, 4)
    c = compile_library(m, (x, y))
    for a, b in zip(c(x, y), m(x, y), strict=True):
        same(a, b)
        assert a.stride() == b.stride()


def test_nothing_is_kept_alive():
    m = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    c = compile_library(m, (torch.ones(4, 8),))
    x = torch.ones(4, 8)
    y = c(x)
    refs = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [r() for r in refs] == [None, None]


# ---- guards


def test_each_change_is_noticed_and_costs_one_specialisation():
    m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4, eps=1e-5)).eval()
    x = torch.randn(3, 4)
    c = compile_library(m, (x,))

    def check(builds):
        for _ in range(2):
            same(c(x), m(x))
        assert len(c.builds) == builds

    check(1)
    m[2].eps = 10.0
    check(2)
    handle = m[0].register_forward_hook(lambda mod, i, o: o * 0 + 1)
    check(3)
    handle.remove()
    check(3)  # the earlier specialisation fits again
    m[0] = nn.Linear(4, 4)
    check(4)
    m[0].weight.data = torch.randn(4, 4)
    check(4)
    m.double()
    x = x.double()
    check(5)
    m.train()
    assert not torch.equal(c(x), c(x))


def test_weights_may_change_in_every_way():
    m = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).eval()
    x = torch.randn(1, 2, 5, 5)
    c = compile_library(m, (x,))

    def check():
        torch.testing.assert_close(c(x), m(x), rtol=1e-4, atol=1e-5)

    check()
    m[0].weight.mul_(2)
    check()
    m[1].running_var.add_(3)
    check()
    m[0].bias.data = torch.full((3,), 5.0)
    check()
    state = {
        k: torch.rand_like(v) if v.is_floating_point() else v for k, v in m.state_dict().items()
    }
    m.load_state_dict(state)
    check()
    m.load_state_dict({k: v * 3 for k, v in state.items()}, assign=True)
    check()
    assert len(c.builds) == 1
    m[0].weight.data.mul_(7)  # PyTorch does not count this write
    c.refresh()
    check()


def test_only_what_changed_is_prepared_again():
    m = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    c = compile_library(m, (torch.randn(2, 3),))
    weights = c.latest.weights
    before = list(weights.snapshot.tensors)
    m[2].weight.add_(1)
    c(torch.randn(2, 3))
    changed = [a is not b for a, b in zip(before, weights.snapshot.tensors, strict=True)]
    assert sum(changed) == 2


def test_python_arguments_are_guarded_by_type_and_value():
    c = compile_library(Fn(lambda s, x, k, flag=True: x * k if flag else x), (torch.ones(2), 2))
    same(c(torch.ones(2), 3), torch.full((2,), 3.0))
    same(c(torch.ones(2), 2, flag=False), torch.ones(2))
    assert c(torch.ones(2, dtype=torch.int32), 2.0).dtype is torch.float32
    assert c(torch.ones(2, dtype=torch.int32), 2).dtype is torch.int32
    built = len(c.builds)
    same(c(torch.ones(2), 3), torch.full((2,), 3.0))
    assert len(c.builds) == built


def test_the_same_tensor_twice_is_another_program():
    def f(s, x, y):
        x.add_(1)
        return y * 10

    c = compile_library(Fn(f), (torch.ones(2), torch.ones(2)))
    x = torch.ones(2)
    same(c(x, x), torch.full((2,), 20.0))
    same(c(torch.ones(2), torch.ones(2)), torch.full((2,), 10.0))


def test_autocast_around_the_call():
    m = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    c = compile_library(m, (x,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert c(x).dtype is torch.bfloat16
    assert c(x).dtype is torch.float32


def test_specialisations_are_bounded():
    m = Fn(lambda s, x: x + 1)
    c = compile_library(m, (torch.ones(1),), settings=Settings(specialisations=3))
    for n in range(1, 8):
        same(c(torch.ones(n)), torch.full((n,), 2.0))
    assert sum(len(v) for v in c.table.values()) == 3


def test_a_further_shape_is_compiled_when_it_has_come_often():
    m = Fn(lambda s, x: x * 3 + (1 if s.training else 2))
    settings = Settings(compiled_at_once=2, eager_calls=3)
    c = compile_library(m, (torch.ones(2, 1),), settings=settings)
    built = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (3, 5, 5, 5, 7, 5, 5, 3, 7):
            x = torch.randn(rows, rows)
            same(c(x), m(x))
            built.append(len(c.builds))
    assert built == [2, 2, 2, 2, 2, 3, 3, 3, 3]
    assert [n for n in c.notes if "3 times before it is compiled" in n] == c.notes != []
    m.train(not m.training)  # another state of the model: nothing is compiled for it yet
    x = torch.randn(5, 5)
    same(c(x), m(x))
    assert len(c.builds) == 4


def test_every_shape_is_compiled_at_once_if_asked_for():
    c = compile_library(nn.ReLU(), (torch.ones(1),), settings=Settings(eager_calls=0))
    for n in range(2, 7):
        c(torch.ones(n))
    assert len(c.builds) == 6
    assert not c.notes


# ---- launches


def test_launches_count_what_runs():
    m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Softmax(1)).eval()
    x = torch.randn(2, 3, 6, 6)
    assert compile_library(m, (x,)).launches == 3

    def copying(captured):
        relu = captured.graph.nodes[1].results[0]
        return replace(library_plan(captured), layouts={relu: (64, 1, 16, 4)})

    assert compile_library(m, (x,), plan=copying).launches == 4  # flatten copies
    eager = lambda captured: replace(library_plan(captured), eager="a reason")  # noqa: E731
    assert compile_library(m, (x,), plan=eager).launches == 3
    unknown = Fn(lambda s, x: x if x.sum() > 0 else -x)
    assert compile_library(unknown, (x,), settings=Settings(uncapturable="eager")).launches is None
    f = Fn(lambda s, x: (x[0].add_(1), x.exp())[1])
    overlapping = compile_library(f, (torch.ones(1).expand(3),))
    assert overlapping.latest is None
    assert overlapping.launches == account(overlapping.builds[0].graph).launches >= 2


# ---- gradients, errors, threads


def test_gradients_run_the_original_with_one_warning():
    m = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    c = compile_library(m, (x,))
    with torch.enable_grad():
        with pytest.warns(UserWarning, match="gradients"):
            y = c(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            c(x)
        y.sum().backward()
    assert m.weight.grad is not None
    assert len(c.notes) == 1


def test_forward_that_counts_calls_runs_eagerly():
    def f(s, x):
        s.calls += 1
        return x + 1

    m = Fn(f)
    m.calls = 0
    c = compile_library(m, (torch.ones(1),))
    with pytest.warns(UserWarning, match="calls"):
        c(torch.ones(1))
    assert m.calls == 1


def test_wrong_arguments():
    c = compile_library(nn.Linear(3, 3), (torch.ones(2, 3),))
    with pytest.raises(InputError, match="unexpected keyword"):
        c(torch.ones(2, 3), scale=2)
    with pytest.raises(InputError, match="missing"):
        c()
    with pytest.raises(CaptureError):
        c(torch.ones(2, 5))


def test_uncapturable_models():
    m = Fn(lambda s, x: x if x.sum() > 0 else -x)
    with pytest.raises(CaptureError):
        compile_library(m, (torch.ones(2),))
    c = compile_library(m, (torch.ones(2),), settings=Settings(uncapturable="eager"))
    with pytest.warns(UserWarning, match="captured"):
        same(c(-torch.ones(2)), torch.ones(2))


def test_threads():
    m = Fn(lambda s, x, y: (x.sin() + y.cos()).softmax(-1) @ s.w, w=torch.randn(9, 9))
    c = compile_library(m, (torch.ones(5, 9), torch.ones(5, 9)))
    bad = []

    def work(i):
        try:
            for k in range(10):
                n = 5 + (i + k) % 3
                x = torch.full((n, 9), float(i + k))
                with torch.no_grad():
                    torch.testing.assert_close(c(x, x * 2), m(x, x * 2))
        except BaseException as e:
            bad.append(repr(e))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad


def test_keyword_and_nested_inputs():
    m = Fn(lambda s, batch, *, scale=1.0: {"y": batch["x"] * scale + batch["pair"][1]})
    batch = {"x": torch.ones(2), "pair": (torch.zeros(2), torch.ones(2))}
    c = compile_library(m, (batch,), {"scale": 3.0})
    same(c(batch, scale=3.0)["y"], torch.full((2,), 4.0))


def test_inference_mode():
    m = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).eval()
    x = torch.randn(1, 2, 5, 5)
    c = compile_library(m, (x,))
    with torch.inference_mode():
        torch.testing.assert_close(c(x), m(x))
        torch.testing.assert_close(c(x * 2), m(x * 2))
