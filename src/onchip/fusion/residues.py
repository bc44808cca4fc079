"""Results whose positions fall into classes by remainder: transposed convolutions with a stride.

The position y of such a result is read from another tensor at ((y + p) // s, (y + p) % s); which
taps there are depends on the remainder alone. Where p is no multiple of s, or s does not divide
the result, y can't be split into two axes evenly. Here it is split unevenly: y = s * q + r - p
over all q and r, and the few positions that are outside of the result are not stored. What is read
at (q, r) is then put where it is read, so that all of it is one stage: one product, whose columns
are the features of all classes; or one product for each number of taps, of which r selects one.

Features of several classes side by side need q to cover the positions of all of them, one more
than each has. Where one class has columns enough, q counts the positions of each class: it starts
at the next one (`carry`) for remainders before p. Classes are then batches, without idle rows.
"""

from __future__ import annotations

from dataclasses import replace

from onchip.fusion.contraction import as_contraction
from onchip.fusion.inline import inline
from onchip.fusion.staging import Staged
from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Tensor,
    axis,
    loads,
    reduces,
    rewrite,
    substitute,
    walk,
)
from onchip.ir.index import bounds, linear, simplify

WIDE = 64  # columns of one class that are enough for a product of its own


def by_residue(staged: tuple[Staged, ...]) -> tuple[Staged, ...]:
    """The stages; those that are last and read tensors by quotient and remainder are split, and
    what they read becomes part of them."""
    folds = {s.tensor: s for s in staged if reduces(s.body) and not s.is_output}
    readers: dict[Tensor, list[Staged]] = {}
    for s in staged:
        for t in dict.fromkeys(ld.src for ld in s.loads):
            readers.setdefault(t, []).append(s)
    out: dict[Tensor, Staged] = {s.tensor: s for s in staged}
    for s in staged:
        parts = [t for t in folds if readers.get(t) == [s]]
        if s.tensor in readers or not parts:
            continue
        whole = replace(s, body=inline(s.body, {t: folds[t].body for t in parts}))
        places = _places(s)
        if places or selected(whole.body):
            out[s.tensor] = _split(whole, places)
            for t in parts:
                del out[t]
    return tuple(out.values())


def selected(e: Expr) -> set[Axis]:
    """Axes whose value alone decides which of several folds is taken."""
    found: set[Axis] = set()
    for x in walk(e):
        match x:
            case Call(fn="where", args=(Call(args=(Axis() as a, Const())), yes, no)):
                if reduces(yes) or reduces(no):
                    found.add(a)
    return found


def _places(s: Staged) -> dict[Axis, tuple[int, int]]:
    """Loops that are read as (a + p) // c and as (a + p) % c, with p and c."""
    found: dict[str, dict[Axis, set[tuple[int, int]]]] = {"floordiv": {}, "mod": {}}
    for x in walk(s.body):
        match x:
            case Call(fn="floordiv" | "mod" as fn, args=(a, Const(value=c)), dtype=DType.I64):
                form = linear(a)
                if len(form.terms) == 1 and form.terms[0][1] == 1:
                    atom = form.terms[0][0]
                    if isinstance(atom, Axis) and atom in s.loops:
                        found[fn].setdefault(atom, set()).add((form.constant % int(c), int(c)))
    quotients, remainders = found.values()
    same = {a: ways for a, ways in quotients.items() if remainders.get(a) == ways}
    return {a: next(iter(ways)) for a, ways in same.items() if len(ways) == 1}


def _split(s: Staged, places: dict[Axis, tuple[int, int]]) -> Staged:
    """The stage with each of the axes as two."""
    remainders = {a: axis(c) for a, (_, c) in places.items()}
    joint = _over(s, places, remainders, carry=False)
    products = [as_contraction(r, joint.loops) for r in reduces(joint.body)]
    columns = 1
    for p in products:
        if p is None:  # a window's own index would not be affine
            return joint
        for a in p.n_axes:
            columns *= 1 if a in remainders.values() else a.extent
    apart = len(products) > 1 or columns >= WIDE
    return _over(s, places, remainders, carry=True) if apart else joint


def _over(
    s: Staged, places: dict[Axis, tuple[int, int]], remainders: dict[Axis, Axis], carry: bool
) -> Staged:
    loops: list[Axis] = []
    mapping: dict[Axis, Expr] = {}
    for a in s.loops:
        if a not in places:
            loops.append(a)
            continue
        (p, c), r = places[a], remainders[a]
        q = axis((a.extent - 1) // c + 1 if carry else (p + a.extent - 1) // c + 1)
        late = simplify((Const(c + p - 1, DType.I64) - r) // c) if carry else Const(0, DType.I64)
        mapping[a] = simplify((q + late) * c + r - p)
        loops += [q, r]
    return replace(
        s,
        body=_over_pairs(s.body, mapping),
        loops=tuple(loops),
        store=tuple(simplify(substitute(i, mapping)) for i in s.store),
    )


def _over_pairs(e: Expr, mapping: dict[Axis, Expr]) -> Expr:
    """A value over the new axes. Positions outside of the result read zero where they would read
    outside of a tensor."""
    memo: dict[Expr, Expr] = {}

    def leaf(x: Expr) -> Expr | None:
        if isinstance(x, Call) and x.dtype is DType.I64 and not loads(x):
            return simplify(substitute(x, mapping))
        if not isinstance(x, Load):
            return mapping.get(x) if isinstance(x, Axis) else None
        index = tuple(simplify(rewrite(i, leaf, memo)) for i in x.index)
        spans = zip(map(bounds, index), x.src.shape, strict=True)
        inside = all(lo >= 0 and hi < n for (lo, hi), n in spans)
        data = any(loads(i) for i in index)
        return Load(x.src, index, 0 if x.pad is None and not inside and not data else x.pad)

    return rewrite(e, leaf, memo)
