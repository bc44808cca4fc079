"""Capture: the graph says what eager computes, names are the user's, nothing is changed."""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from tests.modules import Fn, interpret, targets
from torch import nn

from onchip.capture import Templates, capture
from onchip.capture import names as capture_module
from onchip.capture.export import user_frame
from onchip.errors import CaptureError, InternalError
from onchip.fusion.layout import contiguous
from onchip.models import crepe
from onchip.ops.registry import OPERATORS


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.ReLU()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 5 * 5, 6), nn.LayerNorm(6))

    def forward(self, x):
        return self.head(self.act(self.act(self.bn(self.conv(x))) - 0.5))


def test_composite_operators_stay_whole_and_names_are_module_paths():
    c = capture(Net().eval(), (torch.randn(2, 3, 5, 5),))
    names = {n.name: n for n in c.graph.nodes}
    for name, op in (("conv", "conv2d"), ("head.1", "linear"), ("head.2", "layer_norm")):
        assert names[name].op == op
    assert {"act", "act_1", "bn", "sub"} <= set(names)
    assert names["sub"].origin.file == __file__
    assert names["sub"].origin.line > 0
    assert len(names) == len(c.graph.nodes)


def test_a_users_folder_may_have_any_name():
    """One that is called like a package is still the user's; the packages themselves are not."""
    own, inner = "/home/a/onchip/torch/net.py", torch.nn.modules.linear.__file__
    frames = [("/home/a/onchip/run.py", 1), (own, 7), (inner, 9), (capture_module.__file__, 3)]
    assert user_frame(frames) == (own, 7)
    assert user_frame([(crepe.__file__, 5), (inner, 9)]) == (crepe.__file__, 5)
    assert user_frame([(inner, 9), ("<string>", 2)]) is None


def test_graph_equals_eager():
    m, x = Net().eval(), torch.randn(2, 3, 5, 5)
    (got,) = interpret(capture(m, (x,)), [x])
    torch.testing.assert_close(got, m(x).detach(), rtol=0, atol=0)


def test_model_and_inputs_are_unchanged():
    def f(s, x):
        s.count.add_(1)
        x.mul_(2)
        return s.bn(x).sum() + torch.rand(1)

    m = Fn(f, count=torch.zeros(2), bn=nn.BatchNorm1d(3)).train()
    x = torch.randn(4, 3)
    before, kept = copy.deepcopy(m.state_dict()), x.clone()
    flags = [k.training for k in m.modules()]
    versions = [t._version for t in (*m.parameters(), *m.buffers(), x)]
    keys = [set(k.__dict__) for k in m.modules()]
    seed = torch.random.get_rng_state()
    c = capture(m, (x,))
    assert torch.equal(torch.random.get_rng_state(), seed)
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), m.state_dict().values(), strict=True)
    )
    assert torch.equal(x, kept)
    assert [t._version for t in (*m.parameters(), *m.buffers(), x)] == versions
    assert [k.training for k in m.modules()] == flags
    assert [set(k.__dict__) for k in m.modules()] == keys
    assert all(p.grad is None for p in m.parameters())
    written = [m.target.name for m in c.graph.mutations]
    assert written == [
        "count",
        "bn.running_mean",
        "bn.running_var",
        "bn.num_batches_tracked",
        "input0",
    ]


def test_constants_are_slots_of_the_live_model():
    k = torch.ones(3)
    m = Fn(lambda s, x: x * s.w + s.b + k, w=nn.Parameter(torch.ones(3)), b=torch.ones(3))
    m.plain = torch.full((3,), 2.0)
    m.f = lambda s, x: x * s.w + s.b + k + s.plain
    c = capture(m, (torch.ones(3),))
    kinds = {c.graph.constants[t]: s.kind for t, s in c.slots.items()}
    assert kinds.pop("w") == "parameter"
    assert kinds.pop("b") == "buffer"
    assert kinds.pop("plain") == "attribute"
    assert list(kinds.values()) == ["value"]
    assert all(s.fetch() is v for s in c.slots.values() for v in [k] if s.kind == "value")


def test_clean_up_drops_dead_and_common_and_identities():
    def f(s, x):
        x.exp()
        a = (x * 2).clone()
        b = x * 2
        return F.dropout(a, 0.5, False) + b.detach().contiguous()

    c = capture(Fn(f), (torch.randn(3, 4),))
    assert targets(c) == ["aten.mul.Tensor", "aten.add.Tensor"]
    x = torch.randn(3, 4)
    torch.testing.assert_close(interpret(c, [x])[0], x * 4)


def test_clone_that_changes_strides_stays():
    c = capture(Fn(lambda s, x: x.t().contiguous().view(-1) + 1), (torch.randn(3, 4),))
    assert "aten.clone.default" in targets(c)


def test_random_operators_are_never_merged():
    c = capture(Fn(lambda s, x: torch.rand_like(x) - torch.rand_like(x)), (torch.ones(64),))
    assert sum("rand" in t for t in targets(c)) == 2


def test_python_scalars_of_different_type_are_not_merged():
    c = capture(Fn(lambda s, x: (x * 1, x * True, x * 1.0)), (torch.ones(3, dtype=torch.int32),))
    x = torch.tensor([4], dtype=torch.int32)
    got = [t.dtype for t in interpret(c, [x])]
    assert got == [torch.int32, torch.int32, torch.float32]


def test_constant_sub_graphs_are_prepared():
    def f(s, x):
        mask = torch.arange(6, device=x.device)[None, :] <= torch.arange(5)[:, None]
        return x.masked_fill(~mask, -1.0) @ s.w.t().exp()

    m = Fn(f, w=torch.randn(4, 6))
    c = capture(m, (torch.randn(5, 6),))
    assert len(c.graph.nodes) == 2
    assert len(c.prepare) >= 4
    x = torch.randn(5, 6)
    torch.testing.assert_close(interpret(c, [x])[0], m(x))


def test_mutated_buffers_are_no_constants():
    def f(s, x):
        y = x + s.state.exp()
        s.state.add_(1)
        return y

    c = capture(Fn(f, state=torch.zeros(3)), (torch.randn(3),))
    assert c.prepare == ()


def test_returned_constants_are_computed_each_call():
    c = capture(Fn(lambda s, x: (torch.arange(5), torch.zeros(3)[1:], x)), (torch.ones(2),))
    assert c.prepare == ()


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda s, x: x if x.sum() > 0 else -x, "data-dependent"),
        (lambda s, x: x[x > 0], "depends on tensor data"),
        (lambda s, x: (x, x.sum().item()), "tensor data"),
        (lambda s, x: (x, object()), "object of type object"),
        (lambda s, x: x @ x, "can't be captured"),
    ],
)
def test_errors_are_one_line_with_advice(f, words):
    with pytest.raises(CaptureError) as error:
        capture(Fn(f), (torch.randn(3, 4),))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_error_names_the_users_line():
    def f(s, x):
        return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match=rf"{__file__}:\d+"):
        capture(Fn(f), (torch.randn(3),))


def test_unsupported_inputs():
    with pytest.raises(CaptureError, match="sparse"):
        capture(Fn(lambda s, x: x.to_dense()), (torch.eye(3).to_sparse(),))
    with pytest.raises(CaptureError, match="object of type object"):
        capture(Fn(lambda s, x, o: x), (torch.ones(1), object()))


def test_a_wrong_declaration_is_an_internal_error(monkeypatch):
    from onchip.ir.expr import tensor

    wrong = lambda x: tensor((7,), x.dtype, lambda i: 0.0)  # noqa: E731
    monkeypatch.setitem(OPERATORS, "aten.tanh.default", wrong)
    with pytest.raises(InternalError, match=r"tanh.*float32\[7\].*float32\[3\]"):
        capture(Fn(lambda s, x: x.tanh()), (torch.ones(3),))


def test_strides_are_recorded():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    c = capture(Fn(lambda s, x: F.relu(x) * 2), (x,))
    assert all(t.tag["strides"] == x.stride() for n in c.graph.nodes for t in n.results)
    assert c.results[0].strides == x.stride()


def test_aliasing_is_observed():
    def f(s, x, y):
        z = y + 1
        return x, x[1], z, z.view(-1)[2:4], s.w, y * 2

    m = Fn(f, w=torch.ones(2))
    r = capture(m, (torch.ones(3, 4), torch.ones(2, 2))).results
    assert r[0].alias == ("input", 0)
    assert r[0].same
    assert (r[1].alias, r[1].same, r[1].shift) == (("input", 0), False, 16)
    assert r[2].alias is None
    assert r[3].alias == ("output", 2)
    assert r[4].alias[0] == "constant"
    assert r[5].alias is None


def test_forward_that_changes_attributes_is_noticed_and_undone():
    def f(s, x):
        s.calls = s.calls + 1
        return x + 1

    m = Fn(f)
    m.calls = 0
    c = capture(m, (torch.ones(2),))
    assert c.python_state == ("calls",)
    assert m.calls == 0


# ---- one export for many shapes


def test_templates_fill_in_shapes_without_tracing(monkeypatch):
    m = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(1), nn.Softmax(1)).eval()
    templates = Templates()
    for n in (4, 6):
        capture(m, (torch.randn(n, 2, 7, 7),), templates=templates)
    import onchip.capture.template as module

    monkeypatch.setattr(module, "export", lambda *a: pytest.fail("traced again"))
    x = torch.randn(9, 2, 7, 7)
    (got,) = interpret(capture(m, (x,), templates=templates), [x])
    torch.testing.assert_close(got, m(x).detach())


def test_a_template_whose_conditions_fail_is_not_used():
    def f(s, x):
        return x * 2 if x.shape[0] % 2 == 0 else x * 3

    templates = Templates()
    for n in (4, 6, 9, 1, 7):
        x = torch.randn(n, 3)
        (got,) = interpret(capture(Fn(f), (x,), templates=templates), [x])
        torch.testing.assert_close(got, f(None, x))


def test_templates_respect_strides():
    templates = Templates()
    f = Fn(lambda s, x: (x + 1).reshape(x.size(0), -1).cumsum(1))
    for n, move in ((3, False), (5, False), (6, True), (7, False)):
        x = torch.randn(n, 4, 6).transpose(1, 2) if move else torch.randn(n, 6, 4)
        c = capture(f, (x,), templates=templates)
        assert c.graph.inputs[0].tag["strides"] == x.stride()
        torch.testing.assert_close(interpret(c, [x])[0], f(x))


def test_results_have_the_strides_of_the_eager_run(monkeypatch):
    """Tracing says NCHW for a convolution on a GPU that gives NHWC."""
    file = importlib.import_module("onchip.capture.capture")
    real = file.build

    def traced_as_nchw(*args):
        graph, slots = real(*args)
        for n in graph.nodes:
            for t in n.results:
                t.tag["strides"] = contiguous(t.shape)
        return graph, slots

    monkeypatch.setattr(file, "build", traced_as_nchw)
    form = torch.channels_last
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU()).to(memory_format=form)
    x = torch.randn(2, 8, 9, 7).contiguous(memory_format=form)
    expected = model(x).stride()
    assert expected[1] == 1
    assert capture(model, (x,)).graph.outputs[0].tag["strides"] == expected
