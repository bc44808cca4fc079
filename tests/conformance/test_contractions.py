"""Matrix products against ATen."""

import pytest
import torch
from tests.conformance.aten import check, express, randn

from onchip.errors import OpaqueOperator
from onchip.ir.expr import Axis, Load, reduces


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((5,), (5,)), ((3, 5), (5,)), ((5,), (5, 7)), ((3, 5), (5, 7)), ((2, 3, 5), (5,)),
        ((5,), (2, 5, 7)), ((2, 3, 5), (2, 5, 7)), ((2, 1, 3, 5), (4, 5, 7)),
        ((1, 3, 5), (2, 5, 1)), ((2, 3, 5), (5, 7)), ((0, 5), (5, 3)), ((3, 0), (0, 4)),
    ],
)  # fmt: skip
def test_matmul(a, b):
    check("aten.matmul.default", randn(*a), randn(*b, seed=1))


def test_named_products():
    check("aten.mm.default", randn(3, 5), randn(5, 7))
    check("aten.bmm.default", randn(2, 3, 5), randn(2, 5, 7))
    check("aten.mv.default", randn(3, 5), randn(5))
    check("aten.dot.default", randn(5), randn(5, seed=1))
    check("aten.vdot.default", randn(5), randn(5, seed=1))
    check("aten.outer.default", randn(5), randn(3))
    check("aten.inner.default", randn(2, 3, 5), randn(4, 5))
    check("aten.inner.default", randn(2, 3), randn().reshape(()))
    check("aten.tensordot.default", randn(2, 3, 5), randn(5, 4, 3), [1, 2], [2, 0])
    check("aten.tensordot.default", randn(2, 3), randn(4), [], [])
    check("aten.tensordot.default", randn(2, 3), randn(3, 2), [-1, 0], [0, 1])


@pytest.mark.parametrize("x", [(4,), (3, 4), (2, 3, 4), (0, 4), (2, 1, 3, 4)])
@pytest.mark.parametrize("bias", [None, (7,), (1,), ()])
def test_linear(x, bias):
    b = None if bias is None else randn(*bias)
    if bias == () and len(x) != 2:
        pytest.skip("ATen takes a 0-d bias for matrices only")
    if bias == (1,) and len(x) == 3:
        pytest.skip("ATen takes a bias of size 1 for some ranks only")
    check("aten.linear.default", randn(*x), randn(7, 4), b)


def test_linear_with_one_row():
    check("aten.linear.default", randn(3, 4), randn(4))


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (2, 0.5), (0, 3), (-0.5, 1), (1, 0)])
def test_addmm(beta, alpha):
    for c in [(3, 7), (7,), (1, 7), (3, 1), ()]:
        args = (randn(*c), randn(3, 5), randn(5, 7))
        check("aten.addmm.default", *args, beta=beta, alpha=alpha)
    args = (randn(2, 3, 7), randn(2, 3, 5), randn(2, 5, 7))
    check("aten.baddbmm.default", *args, beta=beta, alpha=alpha)
    check("aten.addmv.default", randn(3), randn(3, 5), randn(5), beta=beta, alpha=alpha)
    check("aten.addbmm.default", randn(3, 7), *args[1:], beta=beta, alpha=alpha)
    check("aten.addr.default", randn(3, 7), randn(3), randn(7), beta=beta, alpha=alpha)


def test_beta_zero_does_not_read():
    nan = torch.full((3, 7), float("nan"))
    check("aten.addmm.default", nan, randn(3, 5), randn(5, 7), beta=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    check("aten.mm.default", randn(3, 31, dtype=dtype), randn(31, 7, dtype=dtype))
    a, b, c = (randn(*s, dtype=dtype) for s in [(3, 31), (7, 31), (7,)])
    check("aten.linear.default", a, b, c)


def test_products_of_two_loads():
    for target, args in [
        ("aten.linear.default", (randn(2, 3, 4), randn(7, 4), randn(7))),
        ("aten.matmul.default", (randn(2, 3, 4), randn(4, 7))),
    ]:
        (out,), _ = express(target, args, {})
        (total,) = reduces(out.body)
        assert total.body.fn == "mul"
        assert all(isinstance(a, Load) for a in total.body.args)
        assert all(isinstance(i, Axis) for i in total.body.args[1].index)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.mm.default", (torch.ones(2, 2).long(), torch.ones(2, 2).long())),
        ("aten.mm.default", (torch.ones(2, 2), torch.ones(2, 2).double())),
        ("aten.einsum.default", ("ij,jk->ik", [torch.ones(2, 2), torch.ones(2, 2)])),
    ],
)
def test_left_to_the_library(target, args):
    with pytest.raises(OpaqueOperator):
        express(target, args, {})
