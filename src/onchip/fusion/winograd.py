"""Winograd's minimal filtering as a rewriting of stages: 3-tap convolutions with fewer products.

F(2, 3) computes two neighbouring results of a 3-tap filter with 4 products instead of 6, in two
dimensions 4 results with 16 instead of 36 (Lavin and Gray, "Fast Algorithms for Convolutional
Neural Networks", CVPR 2016):

    y = A^T [(G w G^T) * (B^T d B)] A

One convolution becomes three stages in one kernel: the transformed input V = B^T d B, one matrix
product over the channels at each of the 4 (16) positions, and A^T m A with the operator's own
epilogue. The transformed weights G w G^T depend on constants only and are computed at load, in
float64. Exact in real arithmetic; in float32 the sums are taken in another order and with
intermediate differences, so the caller lists it in the numerics ledger.
"""

from __future__ import annotations

from dataclasses import replace

from onchip.fusion.contraction import Contraction, find_contraction
from onchip.fusion.inline import substitute_simplified
from onchip.fusion.staging import Staged
from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Tensor,
    axis,
    children,
    lift,
    loads,
    mentioned,
    rewrite,
    substitute,
    where,
)
from onchip.ir.index import linear, simplify

TAPS = 3
POSITIONS = 4  # products for two results
MOST_WINDOWS = 2  # the transforms of three would cost more than they save
# The transforms cost some ten operations an element of the input and of the result, which the
# saved products must pay for: with fewer channels than this on either side they do not.
LEAST_CHANNELS = 16


def winograd(staged: tuple[Staged, ...], constants: frozenset[Tensor]) -> tuple[Staged, ...] | None:
    """The stages with every suitable convolution rewritten; None if there is none."""
    out: list[Staged] = []
    for s in staged:
        parts = _shortened(s, constants)
        out += parts or [s]
    return tuple(out) if len(out) > len(staged) else None


def transformed_weights(staged: tuple[Staged, ...]) -> tuple[Tensor, ...]:
    """Tensors that the stages read and that are computed at load from constants."""
    own = {s.tensor for s in staged}
    reads = dict.fromkeys(ld.src for s in staged for ld in loads(s.body))
    return tuple(t for t in reads if t not in own and t.tag.get("winograd"))


def _shortened(s: Staged, constants: frozenset[Tensor]) -> list[Staged] | None:
    c = find_contraction(s.body, s.loops)
    if c is None or c.reduce.dtype is not DType.F32:
        return None
    sides = [(c.left, c.right, c.n_axes), (c.right, c.left, c.m_axes)]
    for data, weight, columns in sides:
        if all(ld.src in constants for ld in loads(weight)):
            windows = [w for a in s.loops if (w := _window(a, data, weight, c)) is not None]
            windows = windows[-MOST_WINDOWS:]
            channels = [a for a in c.k_axes if a not in {k for _, k in windows}]
            if windows and _enough(channels) and _enough(columns):
                return _rewritten(s, c, data, weight, windows, channels)
    return None


def _enough(axes: list[Axis] | tuple[Axis, ...]) -> bool:
    count = 1
    for a in axes:
        count *= a.extent
    return count >= LEAST_CHANNELS


def _window(a: Axis, data: Expr, weight: Expr, c: Contraction) -> tuple[Axis, Axis] | None:
    """(result axis, tap axis) of a sliding window of 3 taps with stride and dilation 1 over an
    even number of results: the data depend on both by their sum alone."""
    if a.extent % 2 or a in mentioned(weight) or a not in mentioned(data):
        return None
    for k in c.k_axes:
        if k.extent == TAPS and k in mentioned(weight) and _slides(data, a, k):
            return a, k
    return None


def _slides(data: Expr, a: Axis, k: Axis) -> bool:
    """The data depend on both axes, and wherever they do, with the same coefficient."""
    found = False
    for i in _positions(data):
        form = linear(i)
        if any(not isinstance(t, Axis) and mentioned(t) & {a, k} for t, _ in form.terms):
            return False
        if form.coefficient(a) != form.coefficient(k):
            return False
        found = found or form.coefficient(k) != 0
    return found


def _positions(e: Expr) -> list[Expr]:
    """The outermost integer expressions: indices of loads, bounds that conditions compare."""
    out: list[Expr] = []
    stack, seen = [e], set()
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        if x.dtype is DType.I64:
            out.append(x)
        else:
            stack.extend(children(x))
    return out


def _rewritten(
    s: Staged,
    c: Contraction,
    data: Expr,
    weight: Expr,
    windows: list[tuple[Axis, Axis]],
    channels: list[Axis],
) -> list[Staged]:
    name = s.tensor.name.rsplit("_", 1)[0]
    places = {a: axis(a.extent // 2) for a, _ in windows}
    rows = [places.get(a, a) for a in s.loops if a in mentioned(data)]
    columns = [a for a in s.loops if a in mentioned(weight)]
    inputs = _input_transform(name, data, windows, places, rows, channels)
    weights = _weight_transform(name, weight, windows, columns, channels)
    products = _products(name, inputs, weights, windows, rows, columns, channels)
    read = dict(places)
    inner = {a: axis(2) for a, _ in windows}
    result = _output_transform(products, [inner[a] for a, _ in windows], rows, columns)
    split: dict[Axis, Expr] = {a: read[a] * 2 + inner[a] for a, _ in windows}
    body = rewrite(s.body, lambda e: result if e is c.reduce else None)
    loops = tuple(x for a in s.loops for x in ((read[a], inner[a]) if a in read else (a,)))
    store = tuple(simplify(substitute(i, split)) for i in s.store)
    last = replace(s, body=substitute_simplified(body, split), loops=loops, store=store)
    return [
        Staged(inputs, _body(inputs), False, inputs.axes, inputs.axes),
        Staged(products, _body(products), False, products.axes, products.axes),
        last,
    ]


def _body(t: Tensor) -> Expr:
    assert t.body is not None
    return t.body


def _input_transform(
    name: str,
    data: Expr,
    windows: list[tuple[Axis, Axis]],
    places: dict[Axis, Axis],
    rows: list[Axis],
    channels: list[Axis],
) -> Tensor:
    """V[p..., rows..., channels...], p the position along each window: each row of
    B^T = [1 0 -1 0; 0 1 1 0; 0 1 -1 0; 0 1 0 -1] has two elements, d[first] + sign * d[second].
    (Its third row and G's third are negated against the paper: the product is the same.)"""
    positions = [axis(POSITIONS) for _ in windows]

    def taken(n: int, mapping: dict[Axis, Expr]) -> Expr:
        if n == len(windows):
            return substitute_simplified(data, mapping)
        (a, k), p = windows[n], positions[n]
        one = Const(1, DType.I64)
        first = Call("minimum", (p, one), DType.I64)
        second = p // 3 + 2
        sign = where(Call("eq", (p, one), DType.BOOL), lift(1.0, DType.F32), lift(-1.0, DType.F32))
        at = places[a] * 2
        near = taken(n + 1, mapping | {a: at, k: first})
        far = taken(n + 1, mapping | {a: at, k: second})
        return near + sign * far

    axes = (*positions, *rows, *channels)
    return _fresh(f"{name}_input", axes, taken(0, {}))


def _weight_transform(
    name: str,
    weight: Expr,
    windows: list[tuple[Axis, Axis]],
    columns: list[Axis],
    channels: list[Axis],
) -> Tensor:
    """U[p..., columns..., channels...] = G w G^T, G = [1 0 0; .5 .5 .5; -.5 .5 -.5; 0 0 1]."""
    positions = [axis(POSITIONS) for _ in windows]
    matrix = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (-0.5, 0.5, -0.5), (0.0, 0.0, 1.0))

    def factor(p: Axis, tap: int) -> Expr:
        value: Expr = lift(matrix[3][tap], DType.F32)
        for row in (2, 1, 0):
            here = Call("eq", (p, Const(row, DType.I64)), DType.BOOL)
            value = where(here, lift(matrix[row][tap], DType.F32), value)
        return value

    def summed(n: int, chosen: dict[Axis, Expr]) -> Expr:
        if n == len(windows):
            return substitute_simplified(weight, chosen)
        _, k = windows[n]
        terms = [
            summed(n + 1, chosen | {k: Const(t, DType.I64)}) * factor(positions[n], t)
            for t in range(TAPS)
        ]
        return terms[0] + terms[1] + terms[2]

    out = _fresh(f"{name}_weight", (*positions, *columns, *channels), summed(0, {}))
    out.tag["winograd"] = True
    return out


def _products(
    name: str,
    inputs: Tensor,
    weights: Tensor,
    windows: list[tuple[Axis, Axis]],
    rows: list[Axis],
    columns: list[Axis],
    channels: list[Axis],
) -> Tensor:
    """M[p..., rows..., columns...]: the sum over the channels of V * U."""
    p = [axis(POSITIONS) for _ in windows]
    r = {a: axis(a.extent) for a in rows}
    n = {a: axis(a.extent) for a in columns if a not in r}
    k = [axis(a.extent, "r") for a in channels]
    left = Load(inputs, (*p, *r.values(), *k))
    right = Load(weights, (*p, *((r | n)[a] for a in columns), *k))
    total = Reduce("sum", tuple(k), left * right)
    return Tensor(
        f"{name}_products_0",
        tuple(a.extent for a in (*p, *r.values(), *n.values())),
        DType.F32,
        (*p, *r.values(), *n.values()),
        total,
    )


def _output_transform(
    products: Tensor, inner: list[Axis], rows: list[Axis], columns: list[Axis]
) -> Expr:
    """A^T m A, A^T = [1 1 1 0; 0 1 -1 -1] (positions 2 and 3 as in the transforms above):
    result r of a window is m[r] + sign * (m[r + 1] + m[r + 2]), sign + for r = 0."""
    rest = (*rows, *(a for a in columns if a not in rows))

    def summed(n: int, at: tuple[Expr, ...]) -> Expr:
        if n == len(inner):
            return Load(products, (*at, *rest))
        r = inner[n]
        even = Call("eq", (r, Const(0, DType.I64)), DType.BOOL)
        sign = where(even, lift(1.0, DType.F32), lift(-1.0, DType.F32))
        m = [summed(n + 1, (*at, r + i)) for i in range(3)]
        return m[0] + sign * (m[1] + m[2])

    return summed(0, ())


def _fresh(name: str, axes: tuple[Axis, ...], body: Expr) -> Tensor:
    """A tensor over axes of its own."""
    own = tuple(axis(a.extent) for a in axes)
    body = substitute_simplified(body, dict(zip(axes, own, strict=True)))
    return Tensor(f"{name}_0", tuple(a.extent for a in own), DType.F32, own, body)
