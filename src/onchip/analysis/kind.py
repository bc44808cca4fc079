"""What sort of computation a tensor is, recognised from its expression alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from onchip.analysis.work import values
from onchip.ir.expr import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Stream,
    Tensor,
    children,
    loads,
    mentioned,
)
from onchip.ir.graph import Node
from onchip.ir.index import simplify


class Kind(Enum):
    """Ordered from light to heavy: an operator of several tensors has its heaviest kind."""

    CREATION = "creation"  # reads nothing
    VIEW = "view"  # an element of one tensor, elsewhere: a pure index map
    POINTWISE = "pointwise"  # scalar functions of elements
    GATHER = "gather"  # reads at places that depend on data
    REDUCTION = "reduction"  # folds whole axes
    WINDOW = "window"  # folds a window that moves with the output (pooling, depthwise conv)
    STREAM = "stream"  # carries state over an axis (online softmax, Welford, attention)
    CONTRACTION = "contraction"  # sum of products, free axes on both sides: a matrix product
    OPAQUE = "opaque"  # no expression: library only

    @property
    def weight(self) -> int:
        return list(Kind).index(self)


@dataclass(frozen=True, slots=True)
class Contraction:
    """sum over `reduction` of lhs * rhs, a (batched) matrix product.

    rows     output axes that only the lhs reads
    columns  output axes that only the rhs reads; one that the lhs reads as `axis // size`
             (grouped convolution) is a column inside its group
    batch    output axes that both read
    groups   (axis, size) of the columns and rows that are split into groups of `size`
    """

    reduce: Reduce
    lhs: Load
    rhs: Load
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    batch: tuple[Axis, ...]
    reduction: tuple[Axis, ...]
    groups: tuple[tuple[Axis, int], ...] = ()

    @property
    def m(self) -> int:
        return self._extent(self.rows)

    @property
    def n(self) -> int:
        return self._extent(self.columns)

    @property
    def k(self) -> int:
        return prod(a.extent for a in self.reduction)

    @property
    def batches(self) -> int:
        """Independent products: the batch axes and the groups."""
        return prod(a.extent for a in self.batch) * prod(a.extent // s for a, s in self.groups)

    def _extent(self, axes: tuple[Axis, ...]) -> int:
        size = dict(self.groups)
        return prod(size.get(a, a.extent) for a in axes)


def kind(tensor: Tensor) -> Kind:
    """The kind of a tensor that has an expression; ValueError for one given from outside."""
    body = tensor.body
    if body is None:
        raise ValueError(f"{tensor} is given from outside: it has no expression, hence no kind")
    if not loads(body):
        return Kind.CREATION
    inner = list(values(body))
    if any(isinstance(e, Stream) for e in inner):
        return Kind.STREAM
    if contraction(tensor) is not None:
        return Kind.CONTRACTION
    folds = [e for e in inner if isinstance(e, Reduce)]
    if folds:
        return Kind.WINDOW if any(_moves(r) for r in folds) else Kind.REDUCTION
    if any(loads_in_index(ld) for ld in loads(body)):
        return Kind.GATHER
    return Kind.VIEW if isinstance(body, Load) and body.pad is None else Kind.POINTWISE


def node_kind(node: Node) -> Kind:
    """The heaviest kind among an operator's tensors."""
    if node.opaque:
        return Kind.OPAQUE
    return max((kind(t) for t in node.tensors), key=lambda k: k.weight, default=Kind.VIEW)


def loads_in_index(load: Load) -> list[Load]:
    """Loads that a load's index depends on (a gather)."""
    return [x for i in load.index for x in loads(i)]


def _moves(fold: Reduce) -> bool:
    """True if some read inside mixes a folded axis with another one in one index."""
    own = set(fold.axes)
    for ld in loads(fold.body):
        for i in ld.index:
            axes = {a for a in mentioned(simplify(i)) if a.extent != 1}
            if axes & own and axes - own:
                return True
    return False


def contraction(tensor: Tensor) -> Contraction | None:
    """The matrix product inside a tensor's expression (with any epilogue around it), or None.
    With several, the first in the expression."""
    if tensor.body is None:
        return None
    for e in values(tensor.body):
        if isinstance(e, Reduce) and e.monoid == "sum" and (found := _product(e)) is not None:
            return found
    return None


def _product(fold: Reduce) -> Contraction | None:
    match _uncast(fold.body):
        case Call(fn="mul", args=(a, b)):
            lhs, rhs = _uncast(a), _uncast(b)
        case _:
            return None
    if not isinstance(lhs, Load) or not isinstance(rhs, Load):
        return None
    left, right = _divisors(lhs), _divisors(rhs)
    folded = set(fold.axes)
    if any(a.extent != 1 and not (a in left and a in right) for a in folded):
        return None
    rows, columns, batch, groups = [], [], [], []
    for a in dict.fromkeys((*left, *right)):
        if a in folded:
            continue
        match left.get(a, 0), right.get(a, 0):
            case _, 0:
                rows.append(a)
            case 0, _:
                columns.append(a)
            case size, 1 if size > 1:
                columns.append(a)
                groups.append((a, size))
            case 1, size if size > 1:
                rows.append(a)
                groups.append((a, size))
            case _:
                batch.append(a)
    if not rows or not columns:
        return None
    return Contraction(
        fold, lhs, rhs, tuple(rows), tuple(columns), tuple(batch), fold.axes, tuple(groups)
    )


def _uncast(e: Expr) -> Expr:
    while isinstance(e, Call) and e.fn.startswith("cast_"):
        e = e.args[0]
    return e


def _divisors(load: Load) -> dict[Axis, int]:
    """Axis -> how a load's index reads it: 1 directly, c > 1 if only as `axis // c`."""
    found: dict[Axis, int] = {}

    def visit(e: Expr) -> None:
        match e:
            case Axis():
                found[e] = 1
            case Call(fn="floordiv", args=(Axis() as a, Const(value=c))):
                known = found.get(a)
                found[a] = int(c) if known in (None, int(c)) else 1
            case _:
                for child in children(e):
                    visit(child)

    for i in load.index:
        visit(simplify(i))
    return found
