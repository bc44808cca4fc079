"""Every function of the expression language, as CUDA C++ spells it, on the host against numpy in
float64; and all of it through NVRTC."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil

import numpy as np
import pytest
import torch
from tests.backends import triton_functions as functions
from tests.backends.cuda_host import library, nvrtc_log
from tests.backends.triton_functions import Case

from onchip.backends.cuda import spelling
from onchip.backends.cuda.spelling import VALUES
from onchip.ir.dtype import DType
from onchip.ir.functions import FUNCTIONS

CASES = [c for c in functions.cases() if DType.F64 not in (c.operand, c.dtype)]
CASES.append(Case("sqrt", DType.F32, coarse=True))


def _texts(case: Case) -> tuple[str, list[DType]]:
    own = [case.operand] * (case.arity - (case.literal is not None))
    if case.fn == "where":
        own[0] = DType.BOOL
    texts = list("abc"[: len(own)])
    if case.literal is not None:
        texts.append(spelling.constant(case.literal, case.operand))
    return spelling.call(case.fn, texts, case.dtype, case.operand, case.coarse), own


def _loop(n: int, case: Case) -> str:
    text, own = _texts(case)
    params = ", ".join(f"const {VALUES[d]}* p{k}" for k, d in enumerate(own))
    values = " ".join(f"const {VALUES[d]} {'abc'[k]} = p{k}[i];" for k, d in enumerate(own))
    kind = VALUES[case.dtype]
    return (
        f'extern "C" void f{n}(long n, {kind}* out, {params}) {{\n'
        f"    for (long i = 0; i < n; ++i) {{ {values} out[i] = {text}; }}\n}}\n"
    )


def _kernel(n: int, case: Case) -> str:
    loop = _loop(n, case)
    return loop.replace('extern "C" void', 'extern "C" __global__ void')


@pytest.fixture(scope="module")
def lib(tmp_path_factory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    text = "".join(_loop(n, c) for n, c in enumerate(CASES))
    return library(text, tmp_path_factory.mktemp("functions"))


def test_every_function_is_covered() -> None:
    assert {c.fn for c in CASES} == FUNCTIONS - {"cast_float64"}


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(c) for c in CASES])
def test_it_agrees_with_numpy(number: int, lib) -> None:
    case = CASES[number]
    inputs = functions.arguments(case)
    out = torch.empty(len(inputs[0]), dtype=getattr(torch, case.dtype.label))
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (out, *(x.contiguous() for x in inputs))]
    getattr(lib, f"f{number}")(ctypes.c_long(len(out)), *pointers)
    if case.fn == "sqrt" and case.coarse:
        want = inputs[0].double().sqrt().numpy()
        np.testing.assert_allclose(out.numpy(), want, rtol=1e-6, equal_nan=True)
        return
    functions.check(case, out, inputs)


def test_coarse_forms_are_within_what_half_types_show(lib) -> None:
    """2e-4 of the value; where 1 is added to tanh and erf (GELU) of that, beside the rounding of
    the sum."""
    x = torch.linspace(-20, 20, 400_001)
    wide = x.double()
    exact = {
        "exp": wide.exp(), "sigmoid": wide.sigmoid(), "tanh": wide.tanh(), "erf": wide.erf(),
    }  # fmt: skip
    for n, c in enumerate(CASES):
        if c.coarse and c.fn in exact:
            out = torch.empty_like(x)
            getattr(lib, f"f{n}")(len(x), *(ctypes.c_void_p(t.data_ptr()) for t in (out, x)))
            want = exact[c.fn]
            error = ((out.double() - want).abs() / want.abs().clamp(min=1e-30)).max()
            assert error < 2e-4, f"{c.fn}: {error}"
            if c.fn in ("tanh", "erf"):
                one = torch.special.erfc(-wide) if c.fn == "erf" else 2 * (2 * wide).sigmoid()
                over = (1 + out.double() - one).abs() - 2e-4 * one - 4e-7
                assert over.max() <= 0, f"1 + {c.fn}: {over.max()}"


@pytest.mark.skipif(importlib.util.find_spec("cuda.bindings") is None, reason="needs NVRTC")
def test_nvrtc_compiles_every_function() -> None:
    assert nvrtc_log("".join(_kernel(n, c) for n, c in enumerate(CASES))) == ""


def test_what_has_no_spelling_is_an_error() -> None:
    with pytest.raises(KeyError, match="no CUDA spelling of erf of int32"):
        spelling.call("erf", ["a"], DType.I32)
    with pytest.raises(KeyError, match="float64"):
        spelling.call("cast_float64", ["a"], DType.F64, DType.F32)
