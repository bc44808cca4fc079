"""Views, parts, joins and padding: values exactly as ATen's, indices in their simplest form."""

from __future__ import annotations

import pytest
import torch
from tests.conformance.harness import check, declared_in, express, sample

from onchip.errors import InputError, OpaqueOperator
from onchip.ir.expr import Axis, Const, Load
from onchip.ops import parts, views

SEEN: set[str] = set()
TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def see(target: str, shape: tuple[int, ...], *rest: object, **kwargs: object) -> None:
    SEEN.add(target)
    for dtype in TYPES:
        check(
            target,
            [sample(shape, dtype), *rest],
            kwargs,
            tol=(0, 0) if dtype.is_floating_point else None,
        )


RESHAPES = [
    ((2, 3, 4), [6, 4]), ((6, 4), [2, 3, 4]), ((2, 3, 4), [4, 3, 2]), ((2, 3, 4), [-1]),
    ((7,), [1, 7, 1]), ((1, 7, 1), [7]), ((), [1, 1]), ((1, 1), []), ((0, 3), [3, 0]),
    ((0, 3), [0, 5]), ((2, 6, 5), [2, 2, 3, -1]), ((2, 2, 3, 5), [4, 15]), ((4, 9), [6, 6]),
    ((2, 1, 3), [2, 3, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "size"), RESHAPES)
def test_reshape(shape, size) -> None:
    for name in (
        "view.default", "reshape.default", "_unsafe_view.default", "view_copy.default",
        "_reshape_copy.default",
    ):  # fmt: skip
        see(f"aten.{name}", shape, size)


def test_reshape_alias() -> None:
    see("aten._reshape_alias.default", (2, 3, 4), [6, 4], [4, 1])


@pytest.mark.parametrize(
    ("shape", "size"),
    [((2, 3, 4), [6, 4]), ((6, 4), [2, 3, 4]), ((5, 6), [1, 5, 2, 3]), ((7, 1), [7])],
)
def test_splits_and_merges_keep_other_dimensions_plain(shape, size) -> None:
    (out,), _ = express("aten.reshape.default", [sample(shape), size])
    assert isinstance(out.body, Load)
    for n, index in zip(shape, out.body.index, strict=True):
        if n in size and n != 1:
            assert isinstance(index, Axis)


def test_merge_then_split_is_the_identity() -> None:
    """A reshape there and back, composed, reads at the plain axes again."""
    from onchip.ir.expr import substitute
    from onchip.ir.index import simplify

    (there,), _ = express("aten.reshape.default", [sample((5, 6, 7)), [30, 7]])
    from onchip.ops.views import reshape

    back = reshape(there, (5, 6, 7))
    mapping = dict(zip(there.axes, back.body.index, strict=True))
    for k, index in enumerate(there.body.index):
        composed = simplify(substitute(index, mapping))
        assert composed is back.axes[k], f"dimension {k}: {composed}"


def test_a_shape_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="6 elements"):
        express("aten.view.default", [sample((2, 3)), [4]])
    with pytest.raises(InputError, match="6 elements"):
        express("aten.view.default", [sample((2, 3)), [4, -1]])


def test_shape_changes() -> None:
    x = (2, 3, 1, 5)
    check("aten.view_as.default", [sample((2, 3)), sample((6,))])
    check("aten.reshape_as.default", [sample((2, 3)), sample((3, 2))])
    SEEN.update({"aten.view_as.default", "aten.reshape_as.default"})
    see("aten.flatten.using_ints", x)
    see("aten.flatten.using_ints", x, 1)
    see("aten.flatten.using_ints", x, -3, -2)
    see("aten.flatten.using_ints", ())
    see("aten.ravel.default", x)
    see("aten.unflatten.int", (2, 12, 5), 1, [3, -1])
    see("aten.unflatten.int", (2, 12), -1, [2, 2, 3])
    for suffix in ("", "_copy"):
        see(f"aten.squeeze{suffix}.default", (1, 3, 1))
        see(f"aten.squeeze{suffix}.dim", x, 2)
        see(f"aten.squeeze{suffix}.dim", x, 1)
        see(f"aten.squeeze{suffix}.dim", (), 0)
        see(f"aten.squeeze{suffix}.dims", (1, 3, 1, 1), [0, -1, 1])
        for dim in (0, 2, -1):
            see(f"aten.unsqueeze{suffix}.default", (2, 3), dim)
        see(f"aten.unsqueeze{suffix}.default", (), 0)


def test_order_of_dimensions() -> None:
    x = (2, 3, 5)
    for suffix in ("", "_copy"):
        see(f"aten.permute{suffix}.default", x, [2, 0, -2])
        see(f"aten.permute{suffix}.default", (), [])
        see(f"aten.transpose{suffix}.int", x, 0, -1)
        see(f"aten.t{suffix}.default", (2, 3))
    see("aten.t.default", (3,))
    see("aten.swapaxes.default", x, 0, 1)
    see("aten.swapdims.default", x, 0, 1)
    see("aten.numpy_T.default", (2, 3))
    for name in ("mT", "mH", "adjoint"):
        see(f"aten.{name}.default", x)
    for name in ("movedim", "moveaxis"):
        see(f"aten.{name}.int", x, 0, -1)
        see(f"aten.{name}.intlist", (2, 3, 5, 7), [0, 1], [2, 0])
    with pytest.raises(InputError, match="permutation"):
        express("aten.permute.default", [sample(x), [0, 0, 1]])


def test_repetition() -> None:
    for name in ("expand", "expand_copy", "broadcast_to"):
        see(f"aten.{name}.default", (3, 1), [2, 3, 4])
        see(f"aten.{name}.default", (3, 1), [-1, 4])
        see(f"aten.{name}.default", (), [2, 3])
        see(f"aten.{name}.default", (1,), [0])
    check("aten.expand_as.default", [sample((3, 1)), sample((2, 3, 4))])
    check("aten.broadcast_tensors.default", [[sample((3, 1)), sample((4,)), sample(())]])
    for target in ("meshgrid.default", "meshgrid.indexing"):
        check(f"aten.{target}", [[sample((3,)), sample((4,)), sample(())]],
              {"indexing": "ij"} if "indexing" in target else {})  # fmt: skip
    check("aten.meshgrid.indexing", [[sample((3,)), sample((4,)), sample((2,))]],
          {"indexing": "xy"})  # fmt: skip
    SEEN.update(f"aten.{n}" for n in (
        "expand_as.default", "broadcast_tensors.default", "meshgrid.default", "meshgrid.indexing",
    ))  # fmt: skip
    see("aten.repeat.default", (2, 3), [2, 1, 3])
    see("aten.repeat.default", (2, 3), [0, 2])
    see("aten.repeat.default", (), [3])
    see("aten.tile.default", (2, 3), [2])
    see("aten.tile.default", (3,), [2, 2])
    see("aten.repeat_interleave.self_int", (2, 3), 3, 1)
    see("aten.repeat_interleave.self_int", (2, 3), 2)
    see("aten.repeat_interleave.self_int", (2, 3), 0, 0)


def test_order_of_elements() -> None:
    x = (2, 3, 5)
    see("aten.flip.default", x, [0, -1])
    see("aten.flip.default", x, [])
    see("aten.fliplr.default", x)
    see("aten.flipud.default", x)
    for k in range(-1, 5):
        see("aten.rot90.default", x, k, [0, 2])
    see("aten.rot90.default", x, 1, [2, 1])
    see("aten.roll.default", x, [1], [2])
    see("aten.roll.default", x, [-7, 4], [0, 2])
    see("aten.roll.default", x, [1, 1], [2, 2])
    see("aten.roll.default", x, [8])
    see("aten.roll.default", (0, 3), [1], [0])
    see("aten.pixel_shuffle.default", (2, 12, 3, 5), 2)
    see("aten.pixel_shuffle.default", (9, 2, 5), 3)
    see("aten.pixel_unshuffle.default", (2, 3, 4, 6), 2)
    see("aten.channel_shuffle.default", (2, 6, 3), 3)
    SEEN.add("aten.native_channel_shuffle.default")
    check("aten.native_channel_shuffle.default", [sample((2, 6, 3, 2)), 2])


def test_parts() -> None:
    x = (3, 7, 5)
    for suffix in ("", "_copy"):
        for rest in (
            (1,), (1, 2), (1, 2, 6, 3), (1, -3, -1), (0, 5, 9), (2, 0, 2**63 - 1), (1, 3, 3),
            (1, 4, 2), (-1, -99, 99, 2),
        ):  # fmt: skip
            see(f"aten.slice{suffix}.Tensor", x, *rest)
        see(f"aten.select{suffix}.int", x, 1, -2)
        see(f"aten.select{suffix}.int", x, 0, 2)
        see(f"aten.unbind{suffix}.int", x, 1)
        see(f"aten.diagonal{suffix}.default", x)
        for offset in (-2, 1, 4, 9):
            see(f"aten.diagonal{suffix}.default", x, offset, 1, 2)
        see(f"aten.diagonal{suffix}.default", x, 1, -1, 0)
        see(f"aten.unfold{suffix}.default", x, 1, 3, 2)
        see(f"aten.unfold{suffix}.default", x, 2, 5, 1)
        see(f"aten.narrow{suffix}.default", x, 1, 2, 4)
        see(f"aten.narrow{suffix}.default", x, 1, -3, 2)
        see(f"aten.split_with_sizes{suffix}.default", x, [1, 0, 6], 1)
        see(f"aten.split{suffix}.Tensor", x, 3, 1)
    see("aten.unfold.default", (), 0, 1, 1)
    see("aten.split.sizes", x, [2, 1])
    see("aten.unsafe_split_with_sizes.default", x, [2, 1])
    see("aten.unsafe_split.Tensor", x, 2)
    see("aten.split.Tensor", x, 9, 2)
    see("aten.split.Tensor", (0, 3), 2)
    for name in ("chunk", "unsafe_chunk"):
        for chunks in (2, 3, 4, 9):
            see(f"aten.{name}.default", x, chunks, 1)
    see("aten.chunk.default", (0, 3), 2)
    for sections in (2, 3, 9):
        see("aten.tensor_split.sections", x, sections, 1)
    see("aten.tensor_split.indices", x, [1, 4, 3, 9], 1)
    SEEN.add("aten.diff.default")
    for dtype in TYPES:
        y = sample(x, dtype)
        check("aten.diff.default", [y])
        check("aten.diff.default", [y, 2, 1])
        check("aten.diff.default", [y, 0, 1])
        check("aten.diff.default", [y, 1, 0, y[:2], y[:1]])
    with pytest.raises(InputError, match="outside"):
        express("aten.select.int", [sample(x), 1, 7])


def test_joins() -> None:
    a, b, c = sample((2, 3)), sample((2, 4), seed=1), sample((2, 1), seed=2)
    for name in ("cat", "concat", "concatenate"):
        target = f"aten.{name}.default"
        SEEN.add(target)
        check(target, [[a, b, c], 1])
        check(target, [[a, a.flip(0)]])
        check(target, [[a, sample((0,)), sample((2, 0)), b], -1])
        check(target, [[a]])
        check(target, [[sample((0,)), sample((0,))]])
        check(target, [[a.bfloat16(), b, c.long()], 1])
        check(target, [[a.half(), b.bfloat16()], 1])
        check(target, [[a > 0, b > 0], 1])
        check(target, [[a.int(), b > 0], 1])
    for dim in (0, 1, -1):
        check("aten.stack.default", [[a, a.flip(0), a.bfloat16()], dim])
    check("aten.stack.default", [[sample(()), sample((), seed=1)]])
    check("aten.hstack.default", [[a, b]])
    check("aten.hstack.default", [[sample((3,)), sample((2,))]])
    check("aten.hstack.default", [[sample(()), sample((2,))]])
    SEEN.update({"aten.stack.default", "aten.hstack.default"})
    with pytest.raises(InputError, match="differ"):
        express("aten.cat.default", [[a, b]])


def test_scatter_of_parts() -> None:
    x = sample((3, 7, 5))
    SEEN.update({"aten.select_scatter.default", "aten.slice_scatter.default"})
    check("aten.select_scatter.default", [x, sample((3, 5), seed=1), 1, -2])
    check("aten.slice_scatter.default", [x, sample((3, 3, 5), seed=1), 1, 2, 5])
    check("aten.slice_scatter.default", [x, sample((3, 3, 5), seed=1), 1, 1, None, 2])
    check("aten.slice_scatter.default", [x, sample((3, 2, 5), seed=1), 1, -2])
    check("aten.slice_scatter.default", [x, sample((3, 7, 5), torch.float32, 1)])
    check("aten.slice_scatter.default", [x, sample((0, 7, 5)), 0, 1, 1])


PADS = [
    ((2, 3, 7), [1, 2]), ((2, 3, 7), [0, 3, 2, 1]), ((2, 3, 7), [-1, 2]), ((2, 3, 7), [-2, -3]),
    ((2, 3, 7), [1, 0, 0, 0, 2, 1]), ((0, 3), [0, 0, 1, 2]), ((), []), ((3,), [-3, 0]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "amounts"), PADS)
def test_constant_padding(shape, amounts) -> None:
    see("aten.constant_pad_nd.default", shape, amounts)
    SEEN.add("aten.pad.default")
    for value in (0.5, -float("inf"), float("nan")):
        check("aten.constant_pad_nd.default", [sample(shape), amounts, value])
        check("aten.pad.default", [sample(shape), amounts, "constant", value])
    check("aten.constant_pad_nd.default", [sample(shape, torch.int32), amounts, 2.9])
    check(
        "aten.constant_pad_nd.default", [sample(shape, torch.bfloat16), amounts, 0.1], exact=False
    )


@pytest.mark.parametrize(
    ("shape", "amounts"),
    [
        ((2, 5), [2, 4]), ((2, 3, 5), [4, 1]), ((2, 3, 5), [0, 3, 2, 1]),
        ((1, 2, 3, 5), [1, 2, 2, 0]), ((1, 2, 3, 4, 5), [1, 2, 2, 1, 0, 2]),
    ],
)  # fmt: skip
def test_mirrored_and_repeated_edges(shape, amounts) -> None:
    n = len(amounts) // 2
    for kind, mode in (("reflection", "reflect"), ("replication", "replicate")):
        SEEN.add(f"aten.{kind}_pad{n}d.default")
        for dtype in (torch.float32, torch.float64):
            check(f"aten.{kind}_pad{n}d.default", [sample(shape, dtype), amounts])
            check("aten.pad.default", [sample(shape, dtype), amounts, mode])
    if len(shape) == n + 2:
        SEEN.add("aten._pad_circular.default")
        check("aten._pad_circular.default", [sample(shape), amounts])
        check("aten.pad.default", [sample(shape), amounts, "circular"])
    far = [9] * len(amounts)
    check(f"aten.replication_pad{n}d.default", [sample(shape), far])
    for mode in ("reflect", "circular"):
        with pytest.raises(InputError, match="padding"):
            express("aten.pad.default", [sample(shape), far, mode])


def test_padded_positions_stay_inside() -> None:
    """The bounds of the mapped indices are those of the tensor, so that no guard is needed."""
    from onchip.ir.index import bounds

    for mode in ("reflect", "replicate", "circular"):
        (out,), _ = express("aten.pad.default", [sample((1, 2, 7)), [3, 4], mode])
        assert bounds(out.body.index[2]) == (0, 6), mode


def test_a_broadcast_dimension_reads_a_constant() -> None:
    (out,), _ = express("aten.expand.default", [sample((3, 1)), [2, 3, 4]])
    row, column = out.body.index
    assert row is out.axes[1]
    assert isinstance(column, Const)


def test_what_reads_memory_is_opaque() -> None:
    x = sample((2, 4))
    cases = {
        "aten.as_strided.default": [x, [2, 2], [2, 1]], "aten.view.dtype": [x, torch.int32],
        "aten.as_strided_copy.default": [x, [2, 2], [2, 1]], "aten.view_as_real.default": [x],
        "aten.view_as_complex.default": [x],
    }  # fmt: skip
    for target, args in cases.items():
        SEEN.add(target)
        with pytest.raises(OpaqueOperator):
            express(target, args)


def test_every_view_is_covered() -> None:
    """Runs after the tests above, which collect what they check."""
    assert not declared_in(views, parts) - SEEN
