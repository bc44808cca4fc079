"""Results whose positions fall into classes by remainder: transposed convolutions with a stride.

The position y of such a result is read from another tensor at ((y + p) // s, (y + p) % s); which
taps there are depends on the remainder alone. Where p is no multiple of s, or s does not divide
the result, y can't be split into two axes evenly. Here it is split unevenly: y = s * q + r - p
over all q and r, and the few positions that are outside of the result are not stored. What is read
at (q, r) is then put where it is read, so that all of it is one stage: one product, whose columns
are the features of all classes. Products of different numbers of taps are one as well, whose taps
end where r says; those that differ in more stay apart, and r selects one.

Features of several classes side by side need q to cover the positions of all of them, one more
than each has. Where one class has columns enough, q counts the positions of each class: it starts
at the next one for remainders before p. Classes are then batches, without idle rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from onchip.fusion.contraction import as_contraction, ended_body, until
from onchip.fusion.inline import inline, substitute_simplified
from onchip.fusion.staging import Staged, split_own_axes, with_own_axes
from onchip.ir.dtype import DType
from onchip.ir.expr import (
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Tensor,
    Var,
    axis,
    loads,
    mentioned,
    reduces,
    rewrite,
    substitute,
    walk,
)
from onchip.ir.index import bounds, linear, simplify, structural_key

WIDE = 64  # columns of one class that are enough for a product of its own


def by_residue(staged: tuple[Staged, ...]) -> tuple[Staged, ...]:
    """The stages; those that are last and read tensors by quotient and remainder are split, and
    what they read becomes part of them."""
    staged = _put_where_read(staged)
    folds = {s.tensor: s for s in staged if reduces(s.body) and not s.is_output}
    readers: dict[Tensor, list[Staged]] = {}
    for s in staged:
        for t in dict.fromkeys(ld.src for ld in s.loads):
            readers.setdefault(t, []).append(s)
    out: dict[Tensor, Staged] = {s.tensor: s for s in staged}
    for s in staged:
        places = places_of(s)
        parts = [t for t in folds if readers.get(t) == [s] and _is_part(folds[t], s, places)]
        if s.tensor in readers or not parts:
            continue
        whole = replace(s, body=inline(s.body, {t: folds[t].body for t in parts}))
        if places or selected(whole.body):
            out[s.tensor] = _split(whole, places)
            for t in parts:
                del out[t]
    return tuple(out.values())


def _put_where_read(staged: tuple[Staged, ...]) -> tuple[Staged, ...]:
    """The stages; one of an axis that falls into parts (classes of positions, groups of channels),
    itself no fold, whose one reader reads each of its elements in place, if several times
    (x * sigmoid(x)), is a value of that reader, whose axis then falls into the same."""
    out = {s.tensor: s for s in staged}
    for t in [s.tensor for s in staged]:
        s = out[t]
        if s.is_output or reduces(s.body) or (s.store == s.loops and not places_of(s)):
            continue
        found = [r for r in out.values() if any(ld.src is t for ld in r.loads)]
        if len(found) != 1:
            continue
        s, r = with_own_axes(s), with_own_axes(found[0])
        if _reads_in_place(r, s):
            value = substitute(s.body, dict(zip(s.loops, r.loops, strict=True)))
            out[r.tensor] = split_own_axes(replace(r, body=_with_value(r.body, t, value)))
            del out[t]
    return tuple(out.values())


def _reads_in_place(r: Staged, s: Staged) -> bool:
    """Whether r reads of s the element that it computes, outside of any fold."""
    read = [ld for ld in r.loads if ld.src is s.tensor]
    folded = any(ld.src is s.tensor for x in reduces(r.body) for ld in loads(x))
    same = len(s.loops) == len(r.loops)
    return same and not folded and all(ld.index == r.loops and ld.pad is None for ld in read)


def _with_value(e: Expr, t: Tensor, value: Expr) -> Expr:
    """The expression with one value, the same object, in place of each load of a tensor."""
    return rewrite(e, lambda x: value if isinstance(x, Load) and x.src is t else None)


def _is_part(fold: Staged, s: Staged, places: dict[Axis, tuple[int, int]]) -> bool:
    """Whether elements of s read elements of their own of a fold: along each axis that is split,
    or (nothing is) of a product."""
    found = [ld for ld in s.loads if ld.src is fold.tensor]
    if not places:
        return fold.product is not None
    return all(places.keys() <= set().union(*map(mentioned, ld.index)) for ld in found)


def selected(e: Expr) -> set[Axis]:
    """Axes whose value alone decides which of several folds is taken."""
    found: set[Axis] = set()
    for x in walk(e):
        match x:
            case Call(fn="where", args=(Call(args=(Axis() as a, Const())), yes, no)):
                if reduces(yes) or reduces(no):
                    found.add(a)
    return found


def places_of(s: Staged) -> dict[Axis, tuple[int, int]]:
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


def by_class(s: Staged, places: dict[Axis, tuple[int, int]]) -> tuple[Staged, dict[Axis, Axis]]:
    """The stage with y = step * q + class in place of each of the loops that is read by quotient
    and remainder; and the class' axis for each q. Where the step does not divide a loop, the last q
    of some classes is beyond it."""
    joint, pairs = _side_by_side(s, places)
    mapping: dict[Axis, Expr] = {}
    loops: dict[Axis, tuple[Axis, ...]] = {}
    known: dict[Axis, Expr] = {}
    classes: dict[Axis, Axis] = {}
    for a, (q, r) in pairs.items():
        p, c = places[a]
        own, digit = axis(-(-a.extent // c)), axis(c)
        mapping |= {q: own + (digit + p) // c, r: (digit + p) % c}
        loops |= {q: (own,), r: (digit,)}
        known[a] = own * c + digit
        classes[own] = digit
    apart = _over(joint, mapping, loops)
    return replace(apart, store=tuple(substitute(i, known) for i in s.store)), classes


def reading_classes(s: Staged) -> Staged:
    """The stage with each loop that is read as a // c and a % c as two, where c does not divide it:
    it reads what `by_class` has made."""
    split = {a: (axis(-(-a.extent // c)), axis(c)) for a, (p, c) in places_of(s).items() if p == 0}
    known: dict[Axis, Expr] = {a: own * digit.extent + digit for a, (own, digit) in split.items()}
    return replace(
        s,
        body=substitute_simplified(s.body, known),
        loops=tuple(x for a in s.loops for x in split.get(a, (a,))),
        store=tuple(simplify(substitute(i, known)) for i in s.store),
    )


def _side_by_side(
    s: Staged, places: dict[Axis, tuple[int, int]]
) -> tuple[Staged, dict[Axis, tuple[Axis, Axis]]]:
    """The stage with each of the axes as quotient and remainder; and these."""
    pairs: dict[Axis, tuple[Axis, Axis]] = {}
    mapping: dict[Axis, Expr] = {}
    for a, (p, c) in places.items():
        q, r = pairs[a] = axis((p + a.extent - 1) // c + 1), axis(c)
        mapping[a] = q * c + r - p
    joint = _over(s, mapping, pairs)
    return replace(joint, body=_merged(joint.body)), pairs


def _split(s: Staged, places: dict[Axis, tuple[int, int]]) -> Staged:
    """The stage with each of the axes as two."""
    joint, pairs = _side_by_side(s, places)
    products = [as_contraction(r, joint.loops, ended=True) for r in reduces(joint.body)]
    remainders = {r for _, r in pairs.values()}
    columns = 1
    for product in products:
        if product is None:  # a window, which slides along q alone
            return joint
        columns *= prod(a.extent for a in product.n_axes if a not in remainders)
    ended = any(product.ends for product in products if product)
    if len(products) == 1 and not ended and columns < WIDE:
        return joint
    apart = {q: axis((a.extent - 1) // places[a][1] + 1) for a, (q, _) in pairs.items()}
    starts: dict[Axis, Expr] = {
        q: apart[q] + _below(r, places[a][0]) for a, (q, r) in pairs.items()
    }
    return _over(joint, starts, {q: (own,) for q, own in apart.items()})


def _over(s: Staged, mapping: dict[Axis, Expr], loops: Mapping[Axis, tuple[Axis, ...]]) -> Staged:
    """The stage over other loops in place of some."""
    return replace(
        s,
        body=_over_pairs(s.body, mapping),
        loops=tuple(x for a in s.loops for x in loops.get(a, (a,))),
        store=tuple(simplify(substitute(i, mapping)) for i in s.store),
    )


def _below(r: Axis, n: int) -> Expr:
    """1 where r < n, else 0."""
    if n <= 0:
        return Const(0, DType.I64)
    if n == 1 and r.extent == 2:
        return 1 - r
    return (n - 1 - r) // r.extent + 1


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


# ---- products of different numbers of taps as one -----------------------------------------------


def _merged(e: Expr) -> Expr:
    """Products of which a remainder selects one, as one product whose taps end where the
    remainder says, if nothing else tells them apart."""

    def leaf(x: Expr) -> Expr | None:
        match x:
            case Call(fn="where", args=(Call(fn="lt", args=(Axis() as r, Const() as c)), yes, no)):
                a, b = _merged(yes), _merged(no)
                if len(reduces(a)) == len(reduces(b)) == 1:
                    return _one(r, int(c.value), a, b) or replace(x, args=(x.args[0], a, b))
        return None

    return rewrite(e, leaf)


def _one(r: Axis, c: int, a: Expr, b: Expr) -> Expr | None:
    """The value of a where r < c and of b elsewhere, if b is a with fewer taps."""
    (x,), (y,) = reduces(a), reduces(b)
    product = Var("product", x.dtype)
    around = [structural_key(_with(e, s, product)) for e, s in ((a, x), (b, y))]
    (p, own), (q, other) = ended_body(x), ended_body(y)
    match p, q:
        case (Call(fn="mul", args=(left, Load() as v)), Call(fn="mul", args=(less, Load() as w))):
            names = _same_steps(left, x.axes, less, y.axes)
        case _:
            return None
    if names is None or around[0] != around[1] or v.src is not w.src:
        return None
    alone = {k: Const(0, DType.I64) for k in x.axes if k not in names.values()}
    same = [
        (i, simplify(substitute(i, alone)), simplify(substitute(j, names)))
        for i, j in zip(v.index, w.index, strict=True)
    ]
    chosen = [
        i if structural_key(s) == structural_key(t) else _selected(i, t, r, c) for i, s, t in same
    ]
    index = tuple(i for i in chosen if i is not None)
    taps = {n: k.extent for k, n in names.items()}
    ends = {k: substitute(n, names) for k, n in own.items()}
    renamed = {names[k]: substitute(n, names) for k, n in other.items()}
    keys = [{k: structural_key(n) for k, n in some.items()} for some in (ends, renamed)]
    if len(index) < len(chosen) or keys[0] != keys[1]:
        return None
    for k in x.axes:
        fewer = k.extent - taps.get(k, 1)
        if fewer < 0 or (fewer and k in ends):
            return None
        if fewer:
            ends[k] = _below(r, c) * fewer + taps.get(k, 1)
    if len(ends) == len(x.axes):  # none is left to be the blocks of a loop
        return None
    body = until(left * Load(v.src, index, v.pad), ends)
    return _with(a, x, Reduce("sum", x.axes, body))


def _with(e: Expr, old: Expr, new: Expr) -> Expr:
    return rewrite(e, lambda x: new if x is old else None)


def _selected(i: Expr, j: Expr, r: Axis, c: int) -> Expr | None:
    """The index that is i where r < c and j elsewhere, if that is r."""

    def is_r(e: Expr, values: range) -> bool:
        return e is r or (isinstance(e, Const) and list(values) == [e.value])

    return r if is_r(i, range(c)) and is_r(j, range(c, r.extent)) else None


def _same_steps(
    left: Expr, axes: tuple[Axis, ...], less: Expr, fewer: tuple[Axis, ...]
) -> dict[Axis, Expr] | None:
    """For each of `fewer` the one of `axes` that walks as it does, if `less` is `left` where the
    rest of those is 0."""
    found = {steps: a for a in axes if (steps := _walk(left, a))}
    names: dict[Axis, Expr] = {b: found[s] for b in fewer if (s := _walk(less, b)) in found}
    alone: dict[Axis, Expr] = {a: Const(0, DType.I64) for a in axes if a not in names.values()}
    if len(set(names.values())) != len(fewer) or len(found) != len(axes):
        return None
    a, b = (_unpadded(_over_pairs(e, m)) for e, m in ((left, alone), (less, names)))
    return names if structural_key(a) == structural_key(b) else None


def _walk(e: Expr, a: Axis) -> tuple[int, ...]:
    """An axis' factor in each index of each load."""
    return tuple(linear(i).coefficient(a) for ld in loads(e) for i in ld.index)


def _unpadded(e: Expr) -> Expr:
    """The same with all loads alike, whether or not they may read outside of their tensor."""

    def leaf(x: Expr) -> Expr | None:
        return Load(x.src, x.index) if isinstance(x, Load) and x.pad in (None, 0) else None

    return rewrite(e, leaf)
