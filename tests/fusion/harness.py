"""Programs of several operators in one generated kernel, against the interpreter in float64.

    PROGRAMS = Programs()

    @PROGRAMS.add
    def softmax_of_sum():
        x = value((5, 7))
        return program([op("softmax.int", op("add.Tensor", x, x), -1)])

    @pytest.mark.parametrize("name", PROGRAMS.names())
    def test_program(name): PROGRAMS.check(name)

Every choice of tile of every program is compiled (all of a module together) and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import onchip.ops  # noqa: F401  (declares the operators)
from onchip.backends.cpp.kernel import KernelOptions
from onchip.backends.cpp.run import Job, job, kernels_for, region_for, run_all
from onchip.backends.interpreter import evaluate
from onchip.backends.scalar_numpy import round_bfloat16
from onchip.fusion.refusal import Refusal
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor, given
from onchip.ops.registry import OPERATORS

Strides = tuple[int, ...]
VALUES: dict[Tensor, np.ndarray] = {}
TOLERANCE = {DType.F32: 3e-5, DType.F64: 1e-12, DType.F16: 3e-3, DType.BF16: 2e-2}


def op(target: str, *args: Any, **kwargs: Any) -> Any:
    """The operator's result, or its first one."""
    name = f"aten.{target}" if "." in target else f"aten.{target}.default"
    out = OPERATORS[name](*args, **kwargs)
    return out[0] if isinstance(out, tuple) else out


def value(
    shape: Sequence[int], dtype: DType = DType.F32, seed: int = 0, low: float = -3.0,
    high: float = 3.0, like: np.ndarray | None = None,
) -> Tensor:  # fmt: skip
    """A given tensor with uniform signed values (or those of `like`)."""
    random = np.random.default_rng(1000 * seed + sum(shape) + len(shape))
    t = given(tuple(shape), dtype)
    if like is not None:
        x = np.asarray(like)
    elif dtype is DType.BOOL:
        x = random.random(t.shape) < 0.5
    else:
        x = random.uniform(low, high, t.shape)
    VALUES[t] = stored(x, dtype)
    return t


def stored(x: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is DType.BF16:
        return round_bfloat16(np.asarray(x, np.float32))
    return np.asarray(x).astype(dtype.label)


@dataclass(frozen=True, eq=False)
class Program:
    outputs: list[Tensor]
    values: dict[Tensor, np.ndarray]
    constants: frozenset[Tensor] = frozenset()
    strides: dict[Tensor, Strides] = field(default_factory=dict)
    options: KernelOptions = field(default_factory=KernelOptions)
    tolerance: float | None = None


def program(outputs: list[Tensor], constants: Sequence[Tensor] = (), **more: Any) -> Program:
    """The program of these outputs; the values are those of the given tensors it reads."""
    region = region_for(outputs, list(VALUES))
    return Program(outputs, {t: VALUES[t] for t in region.inputs}, frozenset(constants), **more)


def jobs_of(p: Program) -> list[Job] | Refusal:
    """One job for each choice of tile."""
    region = region_for(p.outputs, list(p.values))
    made = kernels_for(region, p.strides, p.constants, p.options)
    if isinstance(made, Refusal):
        return made
    return [job(source, p.outputs, p.values, p.strides) for source, _ in made]


def close(got: Sequence[np.ndarray], p: Program, what: str) -> None:
    """Assert that results are the interpreter's in float64 (integers and bools: exactly)."""
    for t, x, want in zip(p.outputs, got, evaluate(p.outputs, p.values, exact=True), strict=True):
        assert x.shape == t.shape, f"{what}: {t} has shape {x.shape}"
        if not t.dtype.is_float:
            np.testing.assert_array_equal(x, want, err_msg=what)
            continue
        tol = p.tolerance or TOLERANCE[t.dtype]
        finite = np.abs(want[np.isfinite(want)])
        scale = max(float(finite.max(initial=0.0)), 1e-3)
        np.testing.assert_allclose(
            x.astype(np.float64), want, rtol=tol, atol=tol * scale, equal_nan=True, err_msg=what
        )


class Programs:
    """Named programs whose kernels are compiled together at the first check."""

    def __init__(self, optimise: str = "-O1") -> None:
        self.makers: dict[str, Callable[[], Program]] = {}
        self.optimise = optimise
        self.made: dict[str, tuple[Program | None, Any, list[Any]]] = {}

    def add(self, maker: Callable[[], Program], name: str = "") -> Callable[[], Program]:
        name = name or maker.__name__
        assert name not in self.makers, f"{name} twice"
        self.makers[name] = maker
        return maker

    def names(self) -> list[str]:
        return list(self.makers)

    def _run(self) -> None:
        for name, maker in self.makers.items():
            try:
                p = maker()
                self.made[name] = (p, jobs_of(p), [])
            except Exception as error:  # reported by the test of this name
                self.made[name] = (None, error, [])
        todo = [(j, out) for _, js, out in self.made.values() if isinstance(js, list) for j in js]
        for (_, out), got in zip(todo, run_all([j for j, _ in todo], self.optimise), strict=True):
            out.append(got)

    def check_alone(self, name: str, optimise: str = "-O0") -> None:
        """The same for one program, made and compiled anew."""
        p = self.makers[name]()
        jobs = jobs_of(p)
        assert isinstance(jobs, list), f"{name} is refused: {jobs}"
        for got in run_all(jobs, optimise):
            assert not isinstance(got, Exception), f"{got!r} from {name}"
            close(got, p, name)

    def check(self, name: str) -> list[Job]:
        """Assert every choice's results; returns the jobs for further looks."""
        if not self.made:
            self._run()
        p, jobs, results = self.made[name]
        if isinstance(jobs, Exception):
            raise jobs
        assert isinstance(jobs, list), f"{name} is refused: {jobs}"
        assert p is not None
        for n, (j, got) in enumerate(zip(jobs, results, strict=True)):
            what = f"{name}, choice {n} of {len(jobs)}\n{j.source.text}"
            assert not isinstance(got, Exception), f"{got!r} from {what}"
            close(got, p, what)
        return jobs
