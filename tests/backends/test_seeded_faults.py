"""One wrong edit in each piece of the emitter and of the nests: some program must turn red.

An edit replaces text of one function's source, in memory only.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass

import pytest
from tests.backends import test_cpp_layouts as layouts
from tests.backends import test_cpp_semantics as semantics
from tests.fusion import test_convolution as convolution
from tests.fusion import test_rows as rows
from tests.fusion import test_sliding_windows as windows


@dataclass(frozen=True)
class Fault:
    place: str  # module:function or module:Class.method
    old: str
    new: str
    module: object
    program: str


CPP, FUSION = "onchip.backends.cpp", "onchip.fusion"
FAULTS = {
    "a result is read before it is computed": Fault(
        f"{CPP}.kernel:_emit_nest", "level = allocation + 2", "level = 0",
        semantics, "a_result_read_again_is_not_read_early"),
    "no lower bound is tested": Fault(
        f"{CPP}.writer:Writer._condition", "if lo < 0:", "if lo < -99:",
        semantics, "index_of_negative_quotient"),
    "padding is zero": Fault(
        f"{CPP}.writer:Writer._load", "e.pad if e.pad is not None else 0", "0",
        windows, "pools_with_different_padding"),
    "a margin is not written": Fault(
        f"{CPP}.margins:fill_margin", "if first < 0:", "if False:", windows, "odd channels"),
    "a moving margin is not written": Fault(
        f"{CPP}.margins:fill_margin", "onchip::most({n}l, {origin})", "{end}",
        windows, "plain"),
    "a margin is zero": Fault(
        f"{CPP}.margins:_slab", "spelling.constant(margin.pad,", "spelling.constant(0,",
        convolution, "negative max3"),
    "taps are as far apart as positions": Fault(
        f"{CPP}.window:_window", "dilation // step", "stride // step",
        windows, "dilated with stride"),
    "positions left over are not computed": Fault(
        f"{CPP}.window:emit_window", "if rest:", "if False:", windows, "primes"),
    "lanes are used above their loop": Fault(
        f"{CPP}.loops:_accumulate", "w.line(f\"{slot} = {step};\")", "w.line(f\"{slot} = 0;\")",
        semantics, "deviation_from_a_mean_of_lanes"),
    "a lane's value is hoisted out of the lanes": Fault(
        f"{CPP}.loops:_emit_vector", "w.follows[array] = name", "w.where[array] = level",
        semantics, "deviation_from_a_mean_of_lanes"),
    "an inner fold leaves the outer one's loops": Fault(
        f"{CPP}.reduce:lane_reductions", "and not axes & around", "",
        semantics, "nested_reductions"),
    "a row's maximum drops NaN": Fault(
        f"{CPP}.reduce:_fold_extreme", "? -1 : 0", "? 0 : 0", semantics, "wide amax 1"),
    "a maximum starts at zero": Fault(
        f"{CPP}.spelling:identity", "low = monoid in", "return \"0\"\n    low = monoid in",
        semantics, "wide amax of integers"),
    "a column's maximum drops NaN": Fault(
        f"{CPP}.spelling:combine", "onchip::maximum({a}, {b})", "({a} > {b} ? {a} : {b})",
        semantics, "tall amax"),
    "argmax skips NaN": Fault(
        f"{CPP}.reduce:_argument", "if e.body.dtype.is_float else \"false\"\n    w.open",
        "and \"false\"\n    w.open", semantics, "wide argmax 1"),
    "a float is a bool through an integer": Fault(
        f"{CPP}.spelling:_cast", "({arg} != 0)", "(int({arg}) != 0)",
        semantics, "float_to_integers"),
    "scratch tiles overlap": Fault(
        f"{CPP}.kernel:_scratch_plan", "offset += ", "offset += 0 * ",
        rows, "softmax (5, 7)"),
    "a streamed line is stored across rows": Fault(
        f"{CPP}.loops:_emit_vector", "if stream and ", "if stream or ",
        layouts, "streamed stepped"),
    "columns beyond the first panel": Fault(
        f"{CPP}.pack:pack_right", "({p} - {n_lo}) * {product.k}l", "0",
        rows, "mm gelu False"),
    "keys of one head serve all heads": Fault(
        f"{CPP}.product:_pack_once", "f\"if ({held} != {which})\"", "f\"if ({held} < 0)\"",
        rows, "attention"),
    "a value is not stored where it is first read": Fault(
        f"{CPP}.writer:Writer._stored_first", "self.line(f\"{place} = {name};\")", "pass",
        rows, "softmax (3, 1200)"),
    "a part of a value is stored for all of it": Fault(
        f"{CPP}.first_read:_covers", "span.extent != index.extent", "False",
        rows, "sum_of_a_part"),
    "chunks of a softmax are not rescaled": Fault(
        f"{FUSION}.split:_moved", "call(\"exp\", fold - centre)", "1.0",
        rows, "long softmax DType.F32"),
    "a chunk that is masked whole is no number": Fault(
        f"{FUSION}.split:_near", "where(Call", "fold if True else where(Call",
        rows, "long softmax DType.F32"),
    "no padding around an inlined value": Fault(
        f"{FUSION}.inline:_at", "if inside is None:", "if True:",
        semantics, "branch_not_taken_reads_out_of_range"),
    "a divisor outside is checked": Fault(
        f"{FUSION}.inline:can_fail", "return True", "return False",
        semantics, "padded_quotient_has_no_divisor_outside"),
    "a box is the first read's only": Fault(
        f"{FUSION}.nest:_union", "max(a.extent, d + b.extent)", "a.extent",
        semantics, "shifted_reads_of_a_stored_value"),
    "an output is read across tiles": Fault(
        f"{FUSION}.nest:_read_in_step", "return False", "return True",
        semantics, "output_read_transposed"),
    "argmax over split axes": Fault(
        f"{FUSION}.staging:split_reduction_axes", 'in ("argmax", "argmin")', "in ()",
        semantics, "argmax_of_flattened"),
}  # fmt: skip


def plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the function, wherever it was imported to, by the edited one."""
    module_name, path = fault.place.split(":")
    module = importlib.import_module(module_name)
    owner: object = module
    for part in path.split(".")[:-1]:
        owner = getattr(owner, part)
    name = path.split(".")[-1]
    original = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    assert fault.old in source, f"{fault.place} has no longer {fault.old!r}: renew this fault"
    space: dict = {}
    code = compile("from __future__ import annotations\n" + source.replace(fault.old, fault.new),
                   module_name, "exec")  # fmt: skip
    exec(code, module.__dict__, space)
    if owner is not module:
        monkeypatch.setattr(owner, name, space[name])
        return
    for other in [m for n, m in sys.modules.items() if n.startswith("onchip.")]:
        if getattr(other, name, None) is original:
            monkeypatch.setattr(other, name, space[name])


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    programs = fault.module.PROGRAMS  # type: ignore[attr-defined]
    assert fault.program in programs.makers
    plant(fault, monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        programs.check_alone(fault.program)


def test_the_programs_are_right_without_a_fault() -> None:
    for module, program in dict.fromkeys((f.module, f.program) for f in FAULTS.values()):
        module.PROGRAMS.check_alone(program)  # type: ignore[attr-defined]
