"""The before/after picture: left, every operator with its round trip through global memory; right,
the fused kernels with the operators inside and only the first and the last access."""

from __future__ import annotations

from html import escape

from onchip.report.report import Report

ROW, GAP, WIDTH, BOX = 26, 10, 960, 300
LEFT, RIGHT = 20, 540
BAR = 70  # width of the global-memory column beside each side


def picture(r: Report, limit: int = 60) -> str:
    """An SVG of the report's kernels in order (the first `limit` operators)."""
    kernels, hidden, shown = [], 0, 0
    for k in r.kernels:
        if shown + len(k.ops) > limit and kernels:
            hidden += len(k.ops)
        else:
            kernels.append(k)
            shown += len(k.ops)
    if not kernels:
        return "<p>No kernels were recorded.</p>"
    body, y = [], 56
    for k in kernels:
        ops = k.ops or (k.name,)
        height = len(ops) * (ROW + GAP)
        body += [_operator(op, y + i * (ROW + GAP)) for i, op in enumerate(ops)]
        body.append(_kernel(k.name, k.backend, ops, y, height))
        y += height + GAP + 14
    if hidden:
        body.append(f'<text class="soft" x="{LEFT}" y="{y + 4}">… {hidden} operators more</text>')
        y += 20
    head = _heading(LEFT, "Unfused", r.unfused.launches, r.unfused.accesses)
    head += _heading(RIGHT, "Fused", r.fused.launches, r.fused.accesses)
    memory = _memory(LEFT + BOX + 40, y) + _memory(RIGHT + BOX + 40, y)
    return (
        f'<svg viewBox="0 0 {WIDTH} {y + 10}" role="img" '
        f'aria-label="operators before fusion and kernels after it">{_ARROWS}'
        f"{head}{memory}{''.join(body)}</svg>"
    )


_ARROWS = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
    'orient="auto-start-reverse"><path class="tip" d="M0 0L8 4L0 8z"/></marker>'
    '<marker id="innertip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
    'orient="auto"><path class="innertip" d="M0 0L8 4L0 8z"/></marker></defs>'
)


def _heading(x: int, name: str, launches: int | None, accesses: int | None) -> str:
    facts = [f"{n:,} {what}" for n, what in ((launches, "launches"), (accesses, "tensor accesses"))
             if n is not None]  # fmt: skip
    return (
        f'<text class="head" x="{x}" y="18">{name}</text>'
        f'<text class="soft" x="{x}" y="36">{", ".join(facts)}</text>'
    )


def _memory(x: int, bottom: int) -> str:
    return (
        f'<rect class="memory" x="{x}" y="46" width="{BAR}" height="{bottom - 56}" rx="4"/>'
        f'<text x="{x + BAR / 2}" y="36" text-anchor="middle">memory</text>'
    )


def _operator(op: str, y: int) -> str:
    """One operator as a kernel of its own: it reads from memory and writes to it."""
    return _box("op", LEFT, y, BOX, op) + _trip(LEFT, y + 7, True) + _trip(LEFT, y + 19, False)


def _kernel(name: str, backend: str, ops: tuple[str, ...], y: int, height: int) -> str:
    out = [
        f'<rect class="kernel" x="{RIGHT - 8}" y="{y - 8}" width="{BOX + 16}" '
        f'height="{height + 6}" rx="6"><title>{escape(f"{name} ({backend})")}</title></rect>'
    ]
    for i, op in enumerate(ops):
        top = y + i * (ROW + GAP)
        out.append(_box("op", RIGHT, top, BOX, op))
        if i:
            x = RIGHT + BOX / 2
            out.append(
                f'<path class="inner" d="M{x} {top - GAP}V{top - 1}" marker-end="url(#innertip)"/>'
            )
    last = y + (len(ops) - 1) * (ROW + GAP)
    out += [_trip(RIGHT, y + 7, True), _trip(RIGHT, last + 19, False)]
    return "".join(out)


def _trip(x: int, y: int, read: bool) -> str:
    """An arrow between a box and the memory column."""
    near, far = x + BOX + 2, x + BOX + 38
    start, end = (far, near) if read else (near, far)
    return f'<path class="traffic" d="M{start} {y}H{end}" marker-end="url(#tip)"/>'


def _box(kind: str, x: int, y: int, width: int, label: str) -> str:
    short = label if len(label) <= 42 else f"{label[:20]}…{label[-20:]}"
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{ROW}" rx="4">'
        f"<title>{escape(label)}</title></rect>"
        f'<text x="{x + 10}" y="{y + 17}">{escape(short)}</text>'
    )
