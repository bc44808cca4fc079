import pytest

from onchip.analysis.kind import Kind, contraction, kind, node_kind
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Const, Reduce, Stream, Var, call, cast, fold, given, tensor

from .builders import batch_norm, conv2d, matmul, max_pool, node, relu

F32 = DType.F32
X = given((2, 4, 6, 6), F32)


def _stream():
    v = Var("v", F32)
    ax = Axis("s", 6)
    return tensor(
        (2,),
        F32,
        lambda i: Stream(
            ax, (v,), (Const(0.0, F32),), (v + Reduce("sum", (ax,), X[i, 0, 0, ax]),), v
        ),
    )


@pytest.mark.parametrize(
    ("t", "expected"),
    [
        (relu(X), Kind.POINTWISE),
        (batch_norm(X, *(given((4,), F32) for _ in range(4))), Kind.POINTWISE),
        (tensor((6, 6), F32, lambda i, j: X[0, 1, j, i]), Kind.VIEW),
        (tensor((48, 6), F32, lambda i, j: X[i // 24, i // 6 % 4, i % 6, j]), Kind.VIEW),
        (tensor((2, 8), F32, lambda i, j: X.padded(0.0)[i, 0, 0, j - 1]), Kind.POINTWISE),
        (tensor((3,), F32, lambda i: 1.0), Kind.CREATION),
        (tensor((3,), DType.I64, lambda i: i * 2), Kind.CREATION),
        (max_pool(X, 3, 2, 1), Kind.WINDOW),
        (conv2d(X, given((4, 1, 3, 3), F32), groups=4), Kind.WINDOW),
        (
            tensor((2,), F32, lambda n: fold("sum", (4, 6), lambda c, i: X[n, c, i, 0])),
            Kind.REDUCTION,
        ),
        (conv2d(X, given((8, 4, 3, 3), F32), padding=1), Kind.CONTRACTION),
        (matmul(given((3, 5), F32), given((5, 7), F32)), Kind.CONTRACTION),
        (_stream(), Kind.STREAM),
    ],
)
def test_kind(t, expected):
    assert kind(t) is expected


def test_gather_and_given():
    table, ids = given((10, 4), F32), given((3,), DType.I64)
    assert kind(tensor((3, 4), F32, lambda i, j: table[ids[i], j])) is Kind.GATHER
    with pytest.raises(ValueError, match="given from outside"):
        kind(table)


def test_sum_of_products_without_free_axes_on_both_sides_is_a_reduction():
    a, b = given((5, 7), F32), given((7,), F32)
    y = tensor((5,), F32, lambda i: fold("sum", (7,), lambda r: a[i, r] * b[r]))
    assert contraction(y) is None
    assert kind(y) is Kind.REDUCTION
    # a factor without the folded axis is no operand of a product
    z = tensor((5, 7), F32, lambda i, j: fold("sum", (7,), lambda r: a[i, r] * b[j]))
    assert contraction(z) is None


def test_contraction_of_a_convolution_with_epilogue():
    w, bias = given((8, 4, 3, 3), F32), given((8,), F32)
    c = conv2d(X, w, padding=1)
    y = tensor(
        c.shape,
        F32,
        lambda n, o, i, j: call(
            "maximum",
            fold(
                "sum",
                (4, 3, 3),
                lambda k, p, q: (
                    cast(X.padded(0.0)[n, k, i + p - 1, j + q - 1], F32) * w[o, k, p, q]
                ),
            )
            + bias[o],
            0.0,
        ),
    )
    for t in (c, y):
        found = contraction(t)
        assert found is not None
        assert (found.lhs.src, found.rhs.src) == (X, w)
        assert found.rows == (t.axes[0], t.axes[2], t.axes[3])
        assert found.columns == (t.axes[1],)
        assert found.batch == ()
        assert (found.m, found.n, found.k, found.batches) == (2 * 36, 8, 36, 1)


def test_contraction_of_a_grouped_convolution_and_a_batched_product():
    x, w = given((2, 6, 5, 5), F32), given((9, 2, 3, 3), F32)
    found = contraction(conv2d(x, w, groups=3))
    assert found is not None
    assert (found.m, found.n, found.k, found.batches) == (2 * 9, 3, 18, 3)
    q, k = given((2, 3, 5), F32), given((2, 4, 5), F32)
    s = tensor((2, 3, 4), F32, lambda b, i, j: fold("sum", (5,), lambda r: q[b, i, r] * k[b, j, r]))
    found = contraction(s)
    assert found is not None
    assert found.batch == (s.axes[0],)
    assert (found.m, found.n, found.k, found.batches) == (3, 4, 5, 2)


def test_node_has_its_heaviest_kind():
    x = given((4, 6), F32)
    top = tensor((4,), F32, lambda i: fold("max", (6,), lambda r: x[i, r]))
    out = tensor((4, 6), F32, lambda i, j: call("exp", x[i, j] - top[i]))
    assert node_kind(node("aten.op.default", (x,), top, out)) is Kind.REDUCTION
    assert node_kind(node("aten.sort.default", (x,), given((4, 6), F32))) is Kind.OPAQUE
