"""onchip/scalar.h against float64 references (floats) and ATen (specials, integers, casts).

One shared library holds a `#pragma omp simd` loop per function and type, called through ctypes, so
what is tested is the vectorised code that generated kernels get.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

HEADER = Path(__file__).parents[2] / "src/onchip/backends/cpp/include"
FLAGS = [
    "-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
]  # fmt: skip
FLAGS_LIB = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "t.cpp", "-o", "t.so"]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

FLOAT_UNARY = [
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos",
    "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma",
    "digamma", "sqrt", "rsqrt", "reciprocal", "abs", "neg", "sign", "floor", "ceil", "trunc",
    "round", "frac", "sigmoid",
]  # fmt: skip
FLOAT_BINARY = [
    "pow", "atan2", "fmod", "remainder", "floor_divide", "trunc_divide", "maximum", "minimum",
    "fmax", "fmin", "copysign", "hypot", "nextafter", "ldexp", "logaddexp", "xlogy",
]  # fmt: skip
INT_UNARY = [
    "abs", "neg", "sign", "floor", "ceil", "trunc", "round", "bitwise_not",
]  # fmt: skip
INT_BINARY = [
    "pow", "fmod", "remainder", "floor_divide", "trunc_divide", "maximum", "minimum",
    "bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "shift_right",
]  # fmt: skip
PREDICATES = [
    "isnan", "isinf", "isfinite", "logical_not",
]  # fmt: skip
COMPARISONS = [
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor",
]  # fmt: skip
INTS = {"int8_t": torch.int8, "int32_t": torch.int32, "int64_t": torch.int64}
UINTS = {"uint8_t": torch.uint8}
FLOATS = {"float": torch.float32, "double": torch.float64}
CASTS = {
    **FLOATS, **INTS, **UINTS, "bool": torch.bool, "onchip::bf16": torch.bfloat16,
    "onchip::f16": torch.float16,
}  # fmt: skip
CAST_PAIRS = [
    (s, d)
    for s in CASTS
    for d in CASTS
    if s != d and (CASTS[s].is_floating_point or CASTS[d].is_floating_point)
]
CAST_PAIRS += [("int64_t", "uint8_t"), ("int32_t", "bool"), ("bool", "int64_t")]
VECTORISED = [
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sigmoid", "erf", "sin",
    "cos", "sqrt", "rsqrt", "reciprocal", "floor", "ceil", "round", "trunc", "frac", "abs", "neg",
    "sign", "maximum", "minimum", "fmax", "fmin", "hypot", "logaddexp", "xlogy", "copysign",
    "ldexp",
]  # fmt: skip

EXACT = [
    "fmod", "remainder", "floor_divide", "trunc_divide", "maximum", "minimum", "fmax", "fmin",
    "copysign", "nextafter",
]  # fmt: skip

# Largest error in ulp over the ranges tested; the libm-backed functions have glibc's own bounds.
MAX_ULP = {
    "exp": 1.1, "exp2": 1.0, "expm1": 1.6, "log": 1.0, "log2": 1.3, "log10": 1.1, "log1p": 1.6,
    "sin": 1.6, "cos": 1.6, "tanh": 2.6, "sigmoid": 2.4, "erf": 1.1, "rsqrt": 1.5, "sqrt": 0.5,
    "reciprocal": 0.5,
}  # fmt: skip


def symbol(name: str, *types: str) -> str:
    return "_".join((name, *types)).replace("onchip::", "")


def loop(sym: str, out: str, types: list[str], expr: str) -> str:
    params = ", ".join(f"const {t}* __restrict p{i}" for i, t in enumerate(types))
    args = " ".join(
        f"const {t} {v} = p{i}[i];" for i, (t, v) in enumerate(zip(types, "abc", strict=False))
    )
    return (
        f'extern "C" void {sym}(long n, {out}* __restrict o, {params}) {{\n'
        f"#pragma omp simd\nfor (long i = 0; i < n; ++i) {{ {args} o[i] = {expr}; }} }}\n"
    )


def source() -> str:
    parts = ['#include "onchip/scalar.h"\n']
    for t in FLOATS:
        parts += [loop(symbol(f, t), t, [t], f"onchip::{f}(a)") for f in FLOAT_UNARY]
        parts += [loop(symbol(f, t), t, [t, t], f"onchip::{f}(a, b)") for f in FLOAT_BINARY]
    for t in INTS | UINTS:
        unary = INT_UNARY if t in INTS else [f for f in INT_UNARY if f != "neg"]
        parts += [loop(symbol(f, t), t, [t], f"onchip::{f}(a)") for f in unary]
        parts += [loop(symbol(f, t), t, [t, t], f"onchip::{f}(a, b)") for f in INT_BINARY]
    for t in ("float", "int32_t"):
        parts += [loop(symbol(f, t), "bool", [t], f"onchip::{f}(a)") for f in PREDICATES]
        parts += [loop(symbol(f, t), "bool", [t, t], f"onchip::{f}(a, b)") for f in COMPARISONS]
        parts += [loop(symbol("clamp", t), t, [t, t, t], "onchip::clamp(a, b, c)")]
        parts += [loop(symbol("where", t), t, ["bool", t, t], "onchip::where(a, b, c)")]
    parts += [
        loop(symbol("cast", src, dst), dst, [src], f"onchip::cast<{dst}>(a)")
        for src, dst in CAST_PAIRS
    ]
    return "".join(parts)


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scalar")
    (folder / "t.cpp").write_text(source())
    command = [
        "g++",
        *FLAGS,
        *FLAGS_LIB,
        f"-I{HEADER}",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "t.so"))


def call(lib, sym: str, out: torch.dtype, *args: torch.Tensor) -> torch.Tensor:
    args = tuple(a.contiguous() for a in args)
    result = torch.empty(args[0].shape, dtype=out)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (result, *args)]
    getattr(lib, sym)(ctypes.c_long(result.numel()), *pointers)
    return result


def specials(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    denormal = info.smallest_normal * info.eps
    values = [
        0.0,
        denormal,
        3 * denormal,
        info.smallest_normal,
        info.smallest_normal * (1 - info.eps),
    ]
    values += [
        1e-30,
        1e-10,
        1e-4,
        0.25,
        0.5,
        0.75,
        1 - info.eps / 2,
        1.0,
        1 + info.eps,
        1.5,
        2.0,
        2.5,
        3.0,
        7.0,
    ]
    values += [
        10.0,
        88.5,
        88.8,
        103.9,
        104.1,
        127.0,
        128.0,
        149.0,
        150.0,
        700.0,
        8388609.0,
        1e10,
        1e30,
        info.max,
    ]
    values += [float("inf"), float("nan")]
    return torch.tensor([s * v for v in values for s in (1, -1)], dtype=torch.float64).to(dtype)


def samples(seed: int = 0) -> torch.Tensor:
    """float32: every exponent by random bit patterns, then dense normal ranges."""
    g = torch.Generator().manual_seed(seed)
    raw = torch.randint(-(2**31), 2**31, (60_000,), generator=g).to(torch.int32).view(torch.float32)
    dense = [
        torch.rand(25_000, generator=g) * 2 * s - s for s in (0.5, 1.0, 2.0, 6.0, 20.0, 150.0, 1e4)
    ]
    near_one = 1 + (torch.rand(20_000, generator=g) - 0.5) * 2e-3
    return torch.cat([raw, *dense, near_one, specials(torch.float32)])


def pairs(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.repeat_interleave(len(y)), y.repeat(len(x))


def ulp_error(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Error of float32 `got` in ulp of the float64 value `want`, where both are finite."""
    _, exponent = torch.frexp(want.abs().clamp_min(2.0**-126))
    error = (got.double() - want).abs() / torch.ldexp(torch.ones_like(want), exponent - 24)
    return torch.where(got.isfinite() & want.float().isfinite(), error, torch.zeros_like(error))


REFERENCE = {
    "ldexp": lambda x, n: x * torch.pow(2.0, n),
    "floor_divide": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
}


def reference(name: str):
    return REFERENCE.get(name) or getattr(torch, name)


@pytest.mark.parametrize("name", MAX_ULP)
def test_float_accuracy(lib, name):
    x = samples()
    if name in ("sin", "cos"):
        # Also floats next to multiples of pi/2, where the reduction cancels.
        multiples = torch.arange(-100_000, 100_000, dtype=torch.float64) * (torch.pi / 2)
        x = torch.cat([x[x.abs() <= 2.0**48], x[~x.isfinite()], multiples.float()])
    want = reference(name)(x.double())
    if name == "sigmoid":
        want = torch.where(x < 0, x.double().exp() / (1 + x.double().exp()), want)
    got = call(lib, symbol(name, "float"), torch.float32, x)
    error = ulp_error(got, want)
    worst = int(error.argmax())
    assert error[worst] <= MAX_ULP[name], (x[worst].item(), got[worst].item(), want[worst].item())
    # The same NaN and inf; next to the overflow threshold one ulp may tip over.
    same = (got == want.float()) | (got.isnan() & want.isnan())
    same |= got.isfinite() & want.float().isfinite()
    edge = want.abs() > 3.4028e38
    assert bool((same | (edge & ~want.isinf())).all()), x[~same][:5]


@pytest.mark.parametrize("type_", FLOATS)
@pytest.mark.parametrize("name", FLOAT_UNARY)
def test_float_unary_follows_aten(lib, name, type_):
    dtype = FLOATS[type_]
    ramps = [torch.linspace(-s, s, 1603, dtype=dtype) for s in (4, 200)]
    x = torch.cat([specials(dtype), *ramps])
    if name in ("sin", "cos"):
        x = x[~(x.abs() > 2.0**48) | x.isinf()]
    got, want = call(lib, symbol(name, type_), dtype, x), reference(name)(x)
    if name == "sigmoid":  # ATen flushes the lower tail; scalar.h keeps it
        want = torch.where((x < -80) & x.isfinite(), torch.exp(x), want)
    # digamma and lgamma cancel near their roots: an absolute tolerance goes with the relative one.
    eps = torch.finfo(dtype).eps
    loose = {"lgamma": 40, "digamma": 400, "tan": 30, "erfc": 100, "erfinv": 40}.get(name, 6) * eps
    tiny = torch.finfo(dtype).smallest_normal * eps * 2
    tiny += loose if name in ("lgamma", "digamma") else 0
    torch.testing.assert_close(got, want, rtol=loose, atol=tiny, equal_nan=True)
    zeros = (want == 0) & (got == 0) & (x == 0)
    assert torch.equal(got.signbit()[zeros], want.signbit()[zeros]) or name == "sign"


@pytest.mark.parametrize("type_", FLOATS)
@pytest.mark.parametrize("name", FLOAT_BINARY)
def test_float_binary_follows_aten(lib, name, type_):
    dtype = FLOATS[type_]
    a, b = pairs(specials(dtype), specials(dtype))
    g = torch.Generator().manual_seed(1)
    a = torch.cat([a, torch.randn(4000, generator=g, dtype=dtype) * 10])
    b = torch.cat([b, torch.randn(4000, generator=g, dtype=dtype) * 3])
    if name in ("fmod", "remainder"):
        # SLEEF's vector fmod in ATen gives NaN where a / b overflows; libm does not.
        keep = ~((a / b).isinf() & a.isfinite() & (b != 0))
        a, b = a[keep], b[keep]
    got, want = call(lib, symbol(name, type_), dtype, a, b), reference(name)(a, b)
    exact = name in EXACT
    eps = torch.finfo(dtype).eps
    rtol = 0.0 if exact else {"logaddexp": 8, "xlogy": 6}.get(name, 4) * eps
    atol = 0.0 if exact else torch.finfo(dtype).smallest_normal * eps * 2
    atol = 2 * eps if name == "logaddexp" else atol
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)


def integers(dtype: torch.dtype) -> torch.Tensor:
    info = torch.iinfo(dtype)
    values = {info.min, info.min + 1, info.max, info.max - 1, *range(-9, 10)}
    values |= {31, 32, 33, 63, 64, 65, 100}
    return torch.tensor(sorted(v for v in values if info.min <= v <= info.max), dtype=dtype)


@pytest.mark.parametrize("type_", INTS | UINTS)
def test_integers_follow_aten(lib, type_):
    dtype = (INTS | UINTS)[type_]
    info = torch.iinfo(dtype)
    x = integers(dtype)
    for name in INT_UNARY:
        if name != "neg" or type_ in INTS:
            assert torch.equal(call(lib, symbol(name, type_), dtype, x), reference(name)(x)), name
    a, b = pairs(x, x)
    for name in INT_BINARY:
        p, q = a, b
        if name in ("fmod", "remainder", "floor_divide", "trunc_divide"):
            # ATen raises or traps on the rest.
            keep = (q != 0) & ~((q == -1) & (p == info.min) & (info.min < 0))
            p, q = a[keep], b[keep]
        got, want = call(lib, symbol(name, type_), dtype, p, q), reference(name)(p, q)
        wrong = got != want
        assert not wrong.any(), (name, p[wrong][:5], q[wrong][:5], got[wrong][:5], want[wrong][:5])


@pytest.mark.parametrize("type_", INTS)
def test_integer_division_does_not_trap(lib, type_):
    dtype = INTS[type_]
    low = torch.iinfo(dtype).min
    a, b = torch.tensor([low, low, 7, -7], dtype=dtype), torch.tensor([-1, 0, 0, 0], dtype=dtype)
    firsts = {"floor_divide": low, "trunc_divide": low, "fmod": 0, "remainder": 0}
    for name, first in firsts.items():
        assert call(lib, symbol(name, type_), dtype, a, b).tolist() == [first, 0, 0, 0], name


@pytest.mark.parametrize("type_", ["float", "int32_t"])
def test_predicates_and_selection(lib, type_):
    dtype = CASTS[type_]
    x = specials(dtype) if dtype.is_floating_point else integers(dtype)
    for name in PREDICATES:
        assert torch.equal(call(lib, symbol(name, type_), torch.bool, x), reference(name)(x)), name
    a, b = pairs(x, x)
    for name in COMPARISONS:
        got = call(lib, symbol(name, type_), torch.bool, a, b)
        assert torch.equal(got, reference(name)(a, b)), name
    c = b.flip(0)
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    got = call(lib, symbol("clamp", type_), dtype, a, b, c)
    torch.testing.assert_close(got, torch.clamp(a, b, c), **same)
    got = call(lib, symbol("where", type_), dtype, a > 0, b, c)
    torch.testing.assert_close(got, torch.where(a > 0, b, c), **same)


@pytest.mark.parametrize(("src", "dst"), CAST_PAIRS)
def test_casts_follow_aten(lib, src, dst):
    s, d = CASTS[src], CASTS[dst]
    if s == torch.bool:
        x = torch.tensor([False, True])
    elif not s.is_floating_point:
        x = integers(s)
    else:
        x = torch.cat([samples(2).to(s), (torch.arange(-3000, 3000) / 8).to(s)])
        if not d.is_floating_point and d != torch.bool:
            # Out of range is undefined; negatives to uint8 wrap.
            low = -127 if d == torch.uint8 else torch.iinfo(d).min
            x = x[(x.double() >= low) & (x.double() <= min(torch.iinfo(d).max, 2**53))]
    got, want = call(lib, symbol("cast", src, dst), d, x), x.to(d)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7, 8, 9) if d.is_floating_point else got,
                       want.nan_to_num(7, 8, 9) if d.is_floating_point else want)  # fmt: skip


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_every_half_round_trips(lib, half):
    name = "bf16" if half == torch.bfloat16 else "f16"
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(half)
    wide = call(lib, f"cast_{name}_float", torch.float32, x)
    torch.testing.assert_close(wide, x.float(), rtol=0, atol=0, equal_nan=True)
    back = call(lib, f"cast_float_{name}", half, wide)
    numbers = ~x.isnan()
    assert torch.equal(back.view(torch.int16)[numbers], x.view(torch.int16)[numbers])
    assert bool(back[~numbers].isnan().all())


def test_hot_functions_vectorise(tmp_path):
    """gcc reports the loop of every hot float function as vectorised."""
    lines = ['#include "onchip/scalar.h"']
    where = {}
    for name in VECTORISED:
        types = ["float", "float"] if name in FLOAT_BINARY else ["float"]
        expr = f"onchip::{name}({', '.join('ab'[: len(types)])})"
        text = loop(name, "float", types, expr).rstrip().splitlines()
        where[name] = len(lines) + 3  # the line with the for
        lines += text
    (tmp_path / "v.cpp").write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        ["g++", *FLAGS, "-fopt-info-vec-optimized", f"-I{HEADER}", "-c", "v.cpp", "-o", "v.o"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reports = [line for line in done.stderr.splitlines() if "loop vectorized" in line]
    reported = {line.split(":")[1] for line in reports if line.startswith("v.cpp")}
    assert [n for n, line in where.items() if str(line) not in reported] == []
