"""Attention, and the statistics of long rows, as one walk over the keys in Triton.

Small walks of every program (a few keys a step, so that there are many steps) run under Triton's
interpreter, half types as on a GPU, and are compared with float64. The tiles that are proposed are
compiled for sm_80, sm_90 and sm_100.
"""

from __future__ import annotations

import importlib.util
import math
import operator
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tests.backends.triton_jobs import Job, interpret
from tests.fusion.harness import VALUES, Program, close, op, program, value

from onchip.backends.cpp.run import region_for
from onchip.backends.nvidia.build import Built
from onchip.backends.nvidia.resources import tool
from onchip.backends.triton.build import build_all
from onchip.backends.triton.kernel import emit_kernel
from onchip.backends.triton.source import Options, TritonSource, Variant
from onchip.backends.triton.stream_tiles import walk_variants
from onchip.backends.triton.tiles import variants
from onchip.fusion.layout import contiguous
from onchip.fusion.machine import GPUS
from onchip.fusion.nest import Nest, build_nest
from onchip.fusion.online import as_online, merged
from onchip.fusion.refusal import Refusal
from onchip.fusion.staging import stage
from onchip.fusion.tiling import roots
from onchip.fusion.visible import visible
from onchip.ir.dtype import DType
from onchip.ir.expr import Axis, Call, Const, Expr, Tensor, given
from onchip.ops import OPERATORS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the triton package is not installed (torch brings it on Linux)",
)
H200 = GPUS["h200"]
F32, BF16, F16 = DType.F32, DType.BF16, DType.F16
TOLERANCE = {F32: 3e-5, F16: 3e-3, BF16: 2e-2}
NAN, INF = math.nan, math.inf


def sdpa(
    queries: int, keys: int, width: int, *, kind: DType = F32, mask: np.ndarray | str = "",
    heads: tuple[int, int] = (2, 2), reach: float = 3.0, values: int = 0, edit: dict | None = None,
    swapped: bool = False, scale: float | None = None,
) -> Program:  # fmt: skip
    """ATen's operator. mask: "causal", "added", or booleans; edit: elements of q, k or v by name
    and index; swapped: tensors are [B, S, H, D] in memory, the result as well."""
    shapes = {
        "q": (2, heads[0], queries, width),
        "k": (2, heads[1], keys, width),
        "v": (2, heads[1], keys, values or width),
    }
    tensors = {}
    for n, (name, shape) in enumerate(shapes.items()):
        x = np.random.default_rng(n).uniform(-reach, reach, shape)
        for at, new in (edit or {}).get(name, {}).items():
            x[at] = new
        tensors[name] = value(shape, kind, like=x)
        if kind is BF16:
            VALUES[tensors[name]] = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    q, k, v = tensors.values()
    m = None
    if isinstance(mask, np.ndarray):
        m = value(mask.shape, DType.BOOL, like=mask)
    elif mask == "added":
        m = value((2, 1, queries, keys), kind, seed=9)
    grouped = heads[0] != heads[1]
    out = op(
        "scaled_dot_product_attention", q, k, v, m, 0.0, isinstance(mask, str) and mask == "causal",
        scale=scale, enable_gqa=grouped,
    )  # fmt: skip
    strides = {t: _heads_inside(t.shape) for t in (q, k, v, out)} if swapped else {}
    # what float32 leaves of a score of some thousands is multiplied into a weight
    tolerance = 3e-3 if reach > 10 else TOLERANCE[kind]
    return program([out], strides=strides, tolerance=tolerance)


def _heads_inside(shape: tuple[int, ...]) -> tuple[int, ...]:
    _, h, n, d = shape
    return (h * n * d, d, h * d, 1)


def composed(queries: int, keys: int, change: Callable[[Tensor], Tensor], half=False) -> Program:
    """softmax(change(q k')) v by several operators; half: weights are cast to float16."""
    q, k, v = (value((3, n, 17), seed=s) for s, n in enumerate((queries, keys, keys)))
    scores = change(op("bmm", q, op("transpose.int", k, 1, 2)))
    weights = op("softmax.int", scores, -1)
    if half:
        weights = op("to.dtype", op("to.dtype", weights, F16), F32)
    tolerance = TOLERANCE[F16] if half else TOLERANCE[F32]
    return program([op("bmm", weights, v)], tolerance=tolerance)


def softcap(x: Tensor) -> Tensor:
    return op("mul.Scalar", op("tanh", op("mul.Scalar", x, 0.05)), 20.0)


def _distance(x: Tensor) -> Tensor:
    rows, columns = (op("arange", n, dtype=DType.I64) for n in x.shape[-2:])
    return op("sub.Tensor", op("unsqueeze", rows, 1), columns)


def alibi(x: Tensor) -> Tensor:
    return op("sub.Tensor", x, op("mul.Scalar", op("abs", _distance(x)), 0.1))


def window(x: Tensor) -> Tensor:
    """A query sees itself and ten keys before it."""
    near = _distance(x)
    hidden = op("logical_or", op("lt.Scalar", near, 0), op("gt.Scalar", near, 10))
    return op("masked_fill.Scalar", x, hidden, -INF)


def rows_of(kind: str, dtype: DType, like: np.ndarray | None = None) -> Program:
    x = value((3, 101), dtype, like=like) if like is not None else value((3, 101), dtype)
    if kind == "logsumexp":
        return program([op("logsumexp", x, [1])])
    target = value((3,), DType.I64, like=np.array([100, 0, 57]))
    return program([op("cross_entropy_loss", x, target, None, 0)])


def means_behind() -> Program:
    """The sums of a layer, each over means: folds in folds that the walk over features has."""
    x, w = value((3, 7, 11), F32), value((101, 7), F32)
    return program([op("logsumexp", op("linear", op("mean.dim", x, [2]), w), [1])])


def some_rows(queries: int, keys: int) -> np.ndarray:
    """Booleans, with rows that see nothing, only the last key, only the first."""
    mask = np.random.default_rng(5).random((queries, keys)) < 0.4
    mask[1] = mask[queries // 2] = mask[-1] = False
    mask[queries // 2, -1] = mask[-1, 0] = True
    return mask


EXTREME = np.array([[-INF] * 101, [*([-INF] * 60), 1.0, *([-2.0] * 40)], [INF, *([3.0] * 100)]])
PROGRAMS: dict[str, Callable[[], Program]] = {
    "plain": lambda: sdpa(37, 71, 16),
    "odd width": lambda: sdpa(19, 53, 37, values=23),
    "narrow": lambda: sdpa(19, 37, 5),
    "causal": lambda: sdpa(53, 71, 16, mask="causal"),
    "causal, more queries": lambda: sdpa(71, 37, 16, mask="causal"),
    "booleans": lambda: sdpa(37, 53, 16, mask=some_rows(37, 53)),
    "added mask": lambda: sdpa(37, 53, 16, mask="added"),
    "grouped": lambda: sdpa(19, 37, 16, heads=(6, 2), mask="causal"),
    "heads inside": lambda: sdpa(37, 53, 16, swapped=True),
    "large scores": lambda: sdpa(19, 71, 16, reach=60.0),
    "small scale": lambda: sdpa(19, 37, 16, scale=1e-3),
    "negative scale": lambda: sdpa(19, 37, 16, scale=-0.5, kind=F16),
    "one query": lambda: sdpa(1, 71, 16),
    "one query, grouped": lambda: sdpa(1, 71, 16, heads=(6, 2), kind=BF16),
    "NaN and infinity": lambda: sdpa(
        37, 53, 16, edit={"q": {(0, 0, 3, 2): NAN, (1, 1, 5): 0.0}, "k": {(0, 1, 50, 0): INF}}
    ),
    "NaN among values": lambda: sdpa(19, 37, 16, edit={"v": {(0, 0, 30, 3): NAN}}),
    "bfloat16": lambda: sdpa(37, 71, 16, kind=BF16, mask="causal"),
    "float16": lambda: sdpa(37, 71, 16, kind=F16, mask=some_rows(37, 71)),
    "half with a mask": lambda: sdpa(37, 53, 16, kind=BF16, mask="added"),
    "composed": lambda: composed(37, 53, lambda x: op("mul.Scalar", x, 0.25)),
    "softcap": lambda: composed(19, 53, softcap),
    "alibi": lambda: composed(19, 53, alibi),
    "window": lambda: composed(71, 71, window),
    "weights cast": lambda: composed(19, 53, softcap, half=True),
    "logsumexp": lambda: rows_of("logsumexp", F32),
    "logsumexp of a layer of means": means_behind,
    "logsumexp of extremes": lambda: rows_of("logsumexp", F32, EXTREME),
    "cross entropy": lambda: rows_of("cross entropy", BF16),
}

# A wrong edit of a kernel: of which program, old text, new text, all of which are replaced.
FAULTS: dict[str, tuple[str, str, str]] = {
    "old sums are not rescaled": ("plain", " * decay0[:, None]", ""),
    "the total is not rescaled": ("plain", " * decay0 +", " +"),
    "keys beyond the end count": ("plain", " < 71", " < 80"),
    "hidden keys are not tested": ("causal", "range(0, at1, 16)", "range(0, at0, 16)"),
    "the last blocks are left out": ("causal", "range(at1, at0, 16)", "range(at1, at1, 16)"),
    "queries that see nothing": ("booleans", '== float("-inf"), 0.0', '== float("-inf"), top0'),
    "a window's start": ("window", "range(at0, ", "range(at0 + 16, "),
}


@dataclass(frozen=True, eq=False)
class Case:
    program: Program
    variant: Variant
    source: TritonSource
    strides: dict[Tensor, tuple[int, ...]]


def walks(p: Program, gpu=H200, base: Options = Options()) -> list[Variant] | Refusal:
    staged = stage(region_for(p.outputs, list(p.values)))
    assert not isinstance(staged, Refusal), staged
    return walk_variants(staged, roots(staged)[0], gpu, base)


def small(v: Variant, keys: int = 16, queries: int = 16) -> Variant:
    """The same with few queries a tile and few keys a step."""
    staged = tuple(st.staged for st in v.nest.stages)
    root = next(s for s in staged if s.tensor is v.nest.root.tensor)
    *rows, columns = v.nest.tile
    tile = (*(min(t, queries) for t in rows), columns)
    nest = build_nest(staged, root, tile)
    assert isinstance(nest, Nest), nest
    return Variant(nest, replace(v.options, stream=keys))


def written(p: Program, v: Variant) -> Case:
    strides = {t: contiguous(t.shape) for st in v.nest.stages for t in (st.tensor,)}
    strides |= {t: contiguous(t.shape) for t in p.values} | p.strides
    source = emit_kernel(v.nest, strides, v.options)
    assert isinstance(source, TritonSource), f"{v.label} is refused: {source}"
    return Case(p, v, source, strides)


def case(name: str) -> Case:
    p = PROGRAMS[name]()
    found = walks(p)
    assert isinstance(found, list), f"{name} is refused: {found}"
    return written(p, small(found[0]))


def job(name: str, c: Case, text: str | None = None) -> Job:
    source = replace(c.source, text=c.source.text if text is None else text)
    inputs = tuple((_torch(c.program.values[t], t.dtype), c.strides[t]) for t in source.inputs)
    outputs = tuple((_kind(t.dtype), t.shape, c.strides[t]) for t in source.outputs)
    return Job(name, replace(source, inputs=(), outputs=(), laid_out={}), inputs, outputs)


def _kind(d: DType) -> torch.dtype:
    return getattr(torch, d.label)


def _torch(x: np.ndarray, d: DType) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).to(_kind(d))


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {name: case(name) for name in PROGRAMS}


@pytest.fixture(scope="module")
def results(cases, tmp_path_factory) -> dict[str, list[np.ndarray] | str]:
    jobs = [job(name, c) for name, c in cases.items()]
    for name, (of, old, new) in FAULTS.items():
        text = cases[of].source.text
        assert old in text, f"the fault {name!r} does not apply to\n{text}"
        jobs.append(job(name, cases[of], text.replace(old, new)))
    made = interpret(jobs, tmp_path_factory.mktemp("attention"))
    return {
        j.name: m if isinstance(m, str) else [x.float().numpy() for x in m]
        for j, m in zip(jobs, made, strict=True)
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_walk_agrees_with_float64(name: str, cases, results) -> None:
    assert not isinstance(results[name], str), f"{results[name]}\n{cases[name].source.text}"
    close(results[name], cases[name].program, cases[name].source.text)


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_walk_is_noticed(name: str, cases, results) -> None:
    of = FAULTS[name][0]
    if isinstance(results[name], str):
        raise AssertionError(f"the fault {name!r} gives no kernel: {results[name]}")
    with pytest.raises(AssertionError):
        close(results[name], cases[of].program, name)


@pytest.mark.parametrize("name", ["plain", "causal", "booleans", "grouped"])
def test_it_agrees_with_aten(name: str, cases, results) -> None:
    """The operator of PyTorch in float64 (the other comparison evaluates onchip's expressions)."""
    p = cases[name].program
    mask = [torch.from_numpy(x) for x in p.values.values() if x.dtype == bool]
    q, k, v = (torch.from_numpy(x) for x in p.values.values() if x.dtype != bool)
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), mask[0] if mask else None,
        is_causal=name in ("causal", "grouped"), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    np.testing.assert_allclose(results[name][0], want.numpy(), rtol=3e-5, atol=3e-5)


# ---- the form ----------------------------------------------------------------------------------


def test_only_blocks_with_a_hidden_key_are_tested(cases) -> None:
    first, second = cases["causal"].source.text.split("    for ")[1:]
    assert "<=" not in first
    assert "<=" in second


def test_what_no_step_changes_is_outside_of_the_loop(cases) -> None:
    before, loop = cases["plain"].source.text.split("    for k0")[:2]
    assert before.count("tl.load") == 1
    assert loop.split("    for k1")[0].count("tl.load") == 2


def test_weights_are_rounded_to_the_values_type(cases) -> None:
    assert "tl.dot(p0.to(tl.bfloat16), " in cases["bfloat16"].source.text
    assert ".to(tl.bfloat16), " not in cases["plain"].source.text


def test_the_scale_is_part_of_the_exponent(cases) -> None:
    """One multiply-add and exp2 an element; a negative scale does not keep the maximum."""
    scale = re.escape(repr(np.float32(0.25 * math.log2(math.e)).item()))
    assert re.search(rf"exp2\(\w+ \* {scale} - ", cases["bfloat16"].source.text)
    plain = re.escape(repr(np.float32(math.log2(math.e)).item()))
    assert re.search(rf"exp2\(\w+ \* {plain} - ", cases["negative scale"].source.text)


def test_a_causal_walk_ends_at_the_diagonal() -> None:
    """A tile of 16 queries from 32 on sees 48 keys, and the first 32 in whole blocks of 16."""
    p = PROGRAMS["causal"]()
    found = walks(p)
    assert isinstance(found, list)
    online = as_online(small(found[0]).nest)
    assert not isinstance(online, Refusal)
    seen = visible(online)
    assert seen is not None
    assert [_number(e, 32) for e in seen.blocks(71, 16)] == [0, 48, 0, 32]


def _number(e: Expr, origin: int) -> int:
    """An index for tiles that start at `origin`."""
    match e:
        case Const(value=v):
            return int(v)
        case Axis():
            return origin
        case Call(fn=fn, args=(a, b)):
            return INTEGERS[fn](_number(a, origin), _number(b, origin))
    raise AssertionError(e)


INTEGERS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv,
    "maximum": max, "minimum": min,
}  # fmt: skip


REFUSED: dict[str, tuple[Callable[[], Program], str]] = {
    "no keys": (lambda: sdpa(19, 0, 16), "no stream"),
    "one key": (lambda: sdpa(19, 1, 16), "no maximum"),
    "a result of the row's size": (
        lambda: program([op("softmax.int", value((5, 37)), -1)]), "beside the walk",
    ),
    "no exponential": (
        lambda: program([op("sum.dim_IntList", op("relu", value((5, 37))), [1])]), "no maximum",
    ),
    "another maximum": (
        lambda: program([_shifted_by_another()]), "is not a maximum's shift",
    ),
}  # fmt: skip


def _shifted_by_another() -> Tensor:
    x, y = value((5, 37)), value((5, 37), seed=1)
    top = op("amax", y, [1], True)
    return op("sum.dim_IntList", op("exp", op("sub.Tensor", x, top)), [1])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_walk_is_refused(name: str) -> None:
    make, text = REFUSED[name]
    found = walks(make())
    assert isinstance(found, Refusal), [v.label for v in found]
    assert text in found.text


def test_walks_are_among_a_regions_variants() -> None:
    """Long rows of scores are never held whole; of few keys both forms compete."""
    for keys, both in ((1000, False), (100, True)):
        p = sdpa(300, keys, 16)
        staged = stage(region_for(p.outputs, list(p.values)))
        assert not isinstance(staged, Refusal)
        strides = {t: contiguous(t.shape) for s in staged for t in (s.tensor,)}
        strides |= {t: contiguous(t.shape) for t in p.values}
        found = variants(staged, strides, H200)
        assert isinstance(found, list)
        assert found[0].options.stream > 0
        assert any(not v.options.stream for v in found) is both


# ---- compiled ----------------------------------------------------------------------------------


def unvalued(queries: int, keys: int, width: int, kind: DType, causal: bool) -> Program:
    q, k, v = (given((2, 16, n, width), kind) for n in (queries, keys, keys))
    out = OPERATORS["aten.scaled_dot_product_attention.default"](q, k, v, None, 0.0, causal)
    return Program([out], {t: np.empty(0) for t in (q, k, v)})


COMPILED = {
    "sm_80": ("a100", (2048, 2048, 64, BF16, True), 1),
    "sm_90, causal": ("h200", (4096, 4096, 128, BF16, True), 0),
    "sm_90, 128 keys": ("h200", (4096, 4096, 128, F16, False), 2),
    "sm_90, float32": ("h200", (1000, 1000, 64, F32, False), 0),
    "sm_100": ("b200", (2048, 2048, 64, BF16, False), 1),
}


@pytest.fixture(scope="module")
def built() -> dict[str, Built]:
    out = {}
    for name, (gpu, sizes, n) in COMPILED.items():
        p = unvalued(*sizes)
        found = walks(p, GPUS[gpu])
        assert isinstance(found, list), found
        (made,) = build_all([written(p, found[n]).source], GPUS[gpu])
        assert isinstance(made, Built), f"{name}: {made}"
        out[name] = made
    return out


@pytest.mark.parametrize("name", COMPILED)
def test_proposed_tiles_compile_without_spills(name: str, built) -> None:
    made, gpu = built[name], GPUS[COMPILED[name][0]]
    (r,) = made.resources
    assert (r.stack_bytes, r.spills) == (0, 0)
    assert r.shared_bytes <= gpu.shared_bytes
    assert made.over_budget(gpu) is None


@pytest.mark.parametrize("name", ["sm_90, causal", "sm_90, 128 keys"])
def test_half_products_are_warpgroup_instructions(name: str, built) -> None:
    (binary,) = built[name].cubins
    command = [str(tool()), "-sass", str(binary.path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "HGMMA" in text
    assert " HMMA" not in text


def test_outputs_only_are_merged() -> None:
    p = sdpa(19, 37, 16)
    staged = stage(region_for(p.outputs, list(p.values)))
    assert not isinstance(staged, Refusal)
    made = merged(staged)
    assert not isinstance(made, Refusal)
    assert [s.tensor for s in made] == p.outputs
