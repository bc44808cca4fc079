"""Scratch that is written where it is first read: exp(x - top) is stored by the loop that sums it,
which saves a pass over the tile."""

from __future__ import annotations

from collections.abc import Sequence

from onchip.fusion.nest import Span, Stage
from onchip.ir.expr import Axis, Const, Load, Reduce, Tensor, loads, reduces
from onchip.ir.index import structural_key


def stored_by_reader(stages: Sequence[Stage]) -> dict[Tensor, Stage]:
    """The stages that need no loops of their own, each with the stage whose loops store it.
    `stages`: those of a tile, in order."""
    out: dict[Tensor, Stage] = {}
    for n, st in enumerate(stages):
        reader = next((r for r in stages[n + 1 :] if _loads_of(st.tensor, r)), None)
        if reader is not None and reader.tensor not in out and _visits_once(st, reader):
            out[st.tensor] = reader
    return out


def _loads_of(t: Tensor, reader: Stage) -> list[Load]:
    return [ld for ld in loads(reader.staged.body) if ld.src is t]


def _visits_once(st: Stage, reader: Stage) -> bool:
    """The reader's one fold reads every element of the stage's box, each where the element is, and
    the element is an expression of what exists already (no fold, no rounding on the way)."""
    s = st.staged
    if st.placement != "scratch" or s.tensor.dtype.compute is not s.tensor.dtype or s.layout:
        return False
    folds = reduces(reader.staged.body)
    found = _loads_of(st.tensor, reader)
    if reduces(s.body) or s.store != s.loops or len(folds) != 1 or len(found) != 1:
        return False
    fold, load = folds[0], found[0]
    if reader.contraction is not None or fold.monoid.startswith("arg") or load.pad is not None:
        return False
    return load in loads(fold.body) and _covers(st, reader, fold, load)


def _covers(st: Stage, reader: Stage, fold: Reduce, load: Load) -> bool:
    spans: dict[Axis, Span] = dict(zip(reader.staged.loops, reader.spans, strict=True))
    for index, span in zip(load.index, st.box, strict=True):
        match index:
            case Axis() if index in spans:
                own = spans.pop(index)
                if structural_key(own.origin) != structural_key(span.origin):
                    return False
                if own.extent != span.extent:
                    return False
            case Axis() if index in fold.axes and not span.depends:
                if span.extent != index.extent:
                    return False
            case Const(value=0) if span.extent == 1 and not span.depends:
                pass
            case _:
                return False
    axes = [i for i in load.index if isinstance(i, Axis)]
    left = [sp for sp in spans.values() if sp.extent > 1]
    return len(set(axes)) == len(axes) and set(fold.axes) <= set(axes) and not left
