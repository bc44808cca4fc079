"""From a graph's text to cuDNN's own: what nvidia-cudnn-frontend is told."""

from __future__ import annotations

from typing import Any

from onchip.backends.cudnn.source import lines_of

# The names of a pointwise mode's operands in the package's functions.
_PAIR = ("a", "b")
OPERANDS = {
    "conv_fprop": ("image", "weight"), "add": _PAIR, "sub": _PAIR, "mul": _PAIR, "div": _PAIR,
}  # fmt: skip
TYPES = {"bfloat16": "BFLOAT16", "float16": "HALF", "float32": "FLOAT"}


def graph_of(cudnn: Any, text: str, **where: Any) -> tuple[Any, int]:
    """(a pygraph, the place of its plan). cudnn: the module; where: its handle, or the properties
    of a device. Raises what the package raises, but nothing of the device is asked for yet."""
    types, lines = cudnn.data_type, lines_of(text)
    graph = cudnn.pygraph(
        io_data_type=types.FLOAT,  # each tensor has its own
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        **where,
    )
    known: dict[str, Any] = {}
    plan = 0
    for line in lines:
        match line:
            case {"tensor": n, "dim": dim, "stride": stride, "type": kind}:
                kind = getattr(types, TYPES[kind])
                known[f"t{n}"] = graph.tensor(dim=dim, stride=stride, data_type=kind, uid=n)
            case {"value": n, "op": op, "of": of, **options}:
                names = OPERANDS.get(op, ("input",))
                given = dict(zip(names, (known[x] for x in of), strict=True))
                known[f"v{n}"] = getattr(graph, op)(**given, **options)
            case {"result": n, "of": of, "dim": dim, "stride": stride, "type": kind}:
                out = known[of].set_output(True).set_data_type(getattr(types, TYPES[kind]))
                out.set_dim(dim).set_stride(stride).set_uid(n)
            case {"plan": n}:
                plan = n
    return graph, plan
