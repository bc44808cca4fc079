"""Readable names and origins of operators, in the user's terms."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from onchip.capture.export import INNER, user_frame
from onchip.ir.graph import Origin

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def origin(fx_node: Any) -> Origin:
    """Module path and user source line that torch.export recorded for an FX node."""
    stack = fx_node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    path = _strip(paths[-1]) if paths else ""
    trace = fx_node.meta.get("stack_trace") or ""
    frames = [(f, int(n)) for f, n in _FRAME.findall(trace)]
    file, line = user_frame(frames) or ("", 0)
    return Origin(path, file, line)


def _strip(path: str) -> str:
    path = re.sub(r"@\d+", "", path)  # a module called again has "path@1"
    return path.removeprefix(INNER).removeprefix(".")


def node_names(items: list[tuple[str, str]]) -> list[str]:
    """Unique names for (module path, operator) pairs in order.

    The module's path where the module holds one operator ("layer1.0.conv2"; called again:
    "layer1.0.relu_1"), else path.operator ("attention.matmul", "attention.matmul_1").
    """
    operators: dict[str, set[str]] = {}
    for path, op in items:
        operators.setdefault(path, set()).add(op)
    parents = {p[:i] for p in operators for i in range(len(p)) if p[i] == "."}
    used: Counter[str] = Counter()
    names = []
    for path, op in items:
        alone = path and len(operators[path]) == 1 and path not in parents
        stem = path if alone else f"{path}.{op}".removeprefix(".")
        used[stem] += 1
        names.append(stem if used[stem] == 1 else f"{stem}_{used[stem] - 1}")
    return names
