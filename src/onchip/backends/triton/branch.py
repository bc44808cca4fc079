"""A choice between two values by a scalar, of which a program computes only one."""

from __future__ import annotations

from onchip.backends.triton.writer import Scope, Tile, Writer
from onchip.ir.expr import Expr


def emit_branch(w: Writer, stem: str, condition: Tile, ways: tuple[Expr, Expr]) -> Tile:
    """What is computed in a branch is known there only, so that both are written before the
    statement that they are part of."""
    outer, around, done, found = w.depth, w.branch, [], []
    for head, e in zip((f"if {condition.text}:", "else:"), ways, strict=True):
        w.open(head)
        w.branch = w.depth
        w.scopes.append(Scope({}))
        found.append(w.value(e))
        w.scopes.pop()
        done.append(w.levels.pop())
    w.branch = around
    axes, name = w.union(*found), w.fresh(stem)
    for level, tile in zip(done, found, strict=True):
        level.lines.append(f"{name} = {w.whole(tile, axes)}")
        w.levels.append(level)
        w.close()
    return Tile(name, axes, outer)
