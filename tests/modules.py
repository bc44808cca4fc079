"""Modules made of a function, and running a captured graph: for tests of capture and runtime."""

import torch
from torch import nn

from onchip.capture import schema


class Fn(nn.Module):
    """`f(self, *args)` as a module with these parts: tensors become buffers."""

    def __init__(self, f, **parts):
        super().__init__()
        for name, v in parts.items():
            if isinstance(v, torch.Tensor) and not isinstance(v, nn.Parameter):
                self.register_buffer(name, v)
            else:
                setattr(self, name, v)
        self.f = f

    def forward(self, *a, **k):
        return self.f(self, *a, **k)


class Follow(nn.Module):
    """A layer and a function of its result (and of the other inputs)."""

    def __init__(self, layer, f):
        super().__init__()
        self.layer, self.f = layer, f

    def forward(self, x, *others):
        return self.f(self.layer(x), *others)


def same(a, b):
    """Equal in every bit but the sign of zero and the kind of NaN."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def interpret(captured, inputs):
    """Run a captured graph with ATen; the flat outputs."""
    values = dict(zip(captured.graph.inputs, inputs, strict=True))
    values |= {t: s.fetch() for t, s in captured.slots.items()}
    for p in captured.prepare:
        values.update(zip(p.outputs, p.compute([values[s] for s in p.sources]), strict=True))
    with torch.no_grad():
        for n in captured.graph.nodes:
            got = schema.call(n.call, values)
            values.update((t, x) for t, x in zip(n.outputs, got, strict=True) if t is not None)
    return [values[t] for t in captured.graph.outputs]


def targets(captured):
    return [n.call.target for n in captured.graph.nodes]
