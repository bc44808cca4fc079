"""Convolutions in Winograd's form: the same results from fewer products."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from tests.fusion.harness import Program, close, op, program, value

from onchip.backends.cpp.compiler import panel_width
from onchip.backends.cpp.kernel import KernelSource, emit_kernel
from onchip.backends.cpp.run import Job, job, region_for, run_all
from onchip.fusion.layout import channels_last, contiguous
from onchip.fusion.machine import Machine
from onchip.fusion.phases import nests_for
from onchip.fusion.refusal import Refusal
from onchip.fusion.staging import Staged, stage
from onchip.fusion.winograd import transformed_weights, winograd
from onchip.ir.expr import Tensor


@dataclass(frozen=True)
class Case:
    """One convolution with what follows it. padding: of each window axis."""

    channels: int = 17
    size: tuple[int, ...] = (10, 14)
    features: int = 19
    taps: tuple[int, ...] = (3, 3)
    padding: tuple[int, ...] = (1, 1)
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    batch: int = 2
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ("relu",)
    last: bool = True

    def program(self) -> Program:
        x = value((self.batch, self.channels, *self.size))
        w = value((self.features, self.channels // self.groups, *self.taps), seed=1)
        b = value((self.features,), seed=2)
        t: Tensor = x
        for name in self.before:
            t = op(name, t)
        conv = f"conv{len(self.size)}d"
        t = op(conv, t, w, b, self.stride, list(self.padding), self.dilation, self.groups)
        for name in self.after:
            if name == "add":
                t = op("add.Tensor", t, value(t.shape, seed=7))
            elif name.startswith("pool"):
                t = op("max_pool2d", t, [2, 2]) if name == "pool2" else _overlapping(t)
            else:
                t = op(name, t)
        strides = {y: channels_last(y.shape) for y in (x, t)} if self.last else {}
        return program([t], [w, b], strides=strides, tolerance=1e-4)


def _overlapping(t: Tensor) -> Tensor:
    return op("max_pool2d", t, [3, 3], [2, 2], [1, 1])


CASES = {
    "relu": Case(),
    "padding 0": Case(padding=(0, 0), size=(12, 16)),
    "padding 2": Case(padding=(2, 2)),
    "different paddings": Case(padding=(0, 2), size=(8, 16)),
    "contiguous": Case(last=False),
    "residual": Case(after=("add", "relu")),
    "odd height": Case(size=(9, 14)),
    "odd width": Case(size=(10, 7)),
    "one wide window": Case(taps=(3, 5), padding=(1, 0)),
    "1d": Case(size=(34,), taps=(3,), padding=(1,)),
    "3d": Case(size=(4, 6, 8), taps=(3, 3, 3), padding=(1, 1, 1), batch=1),
    "grouped": Case(channels=34, features=38, groups=2),
    "activation before": Case(before=("relu",)),
    "sigmoid before": Case(before=("sigmoid",), after=("sigmoid",)),
    "pooled": Case(after=("relu", "pool2"), size=(12, 20)),
    "overlapping pool": Case(after=("relu", "pool3"), size=(12, 20)),
    "many rows": Case(size=(40, 38), channels=16, features=33, batch=1),
}
UNSUITED = {
    "few channels": Case(channels=3),
    "few features": Case(features=5),
    "stride 2": Case(stride=2),
    "dilation 2": Case(dilation=2, padding=(2, 2)),
    "five taps": Case(taps=(5, 5), padding=(2, 2)),
    "one tap": Case(taps=(1, 1), padding=(0, 0)),
    "odd results": Case(size=(9, 7)),
}


def rewritten(p: Program) -> tuple[Staged, ...] | None:
    staged = stage(region_for(p.outputs, list(p.values)))
    assert not isinstance(staged, Refusal)
    return winograd(staged, p.constants)


def jobs_of(p: Program) -> list[Job]:
    """A job for each choice of tile of the rewritten stages."""
    staged = rewritten(p)
    assert staged is not None, "not rewritten"
    new = transformed_weights(staged)
    region = region_for(p.outputs, list(p.values))
    known = (*region.inputs, *region.tensors, *new)
    strides = {t: contiguous(t.shape) for t in known} | p.strides
    nests = nests_for(staged, strides, Machine(2, panel_width()))
    assert not isinstance(nests, Refusal), str(nests)
    made = [
        emit_kernel((n,), strides, p.constants.union(new), p.options, "", frozenset(new))
        for n in nests
    ]
    sources = [s for s in made if isinstance(s, KernelSource)]
    assert sources
    return [job(s, p.outputs, p.values, p.strides) for s in sources]


@pytest.fixture(scope="module")
def results():
    """Every case's program, and what each of its kernels computed; compiled together."""
    programs = {name: case.program() for name, case in CASES.items()}
    jobs = {name: jobs_of(p) for name, p in programs.items()}
    got = iter(run_all([j for js in jobs.values() for j in js]))
    return {name: (programs[name], [next(got) for _ in js]) for name, js in jobs.items()}


@pytest.mark.parametrize("name", CASES)
def test_results(results, name):
    p, found = results[name]
    for n, got in enumerate(found):
        assert not isinstance(got, Exception), repr(got)
        close(got, p, f"{name}, choice {n}")


@pytest.mark.parametrize("name", UNSUITED)
def test_unsuited_convolutions_stay_as_they_are(name):
    assert rewritten(UNSUITED[name].program()) is None


def test_products_are_saved():
    """16 products for four results in two dimensions, 4 for two in one."""
    for name, share in (("relu", 16 / 36), ("1d", 4 / 6), ("odd height", 4 / 6)):
        p = CASES[name].program()
        staged = rewritten(p)
        assert staged is not None
        (products,) = (s for s in staged if s.tensor.name.endswith("products_0"))
        channels = products.body.axes
        count = products.tensor.numel
        for a in channels:
            count *= a.extent
        direct = CASES[name]
        taps = direct.channels
        for n in direct.taps:
            taps *= n
        outputs = direct.batch * direct.features
        for n in p.outputs[0].shape[2:]:
            outputs *= n
        assert count == pytest.approx(share * taps * outputs)


def test_weights_must_be_constant():
    p = Case().program()
    unknown = Program(p.outputs, p.values, frozenset(), p.strides)
    assert rewritten(unknown) is None
