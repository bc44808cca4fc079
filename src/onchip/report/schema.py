"""The `--json` contract as a JSON Schema, its check, and its documentation (docs/json.md)."""

from __future__ import annotations

from typing import Any

from onchip.errors import OnchipError

Schema = dict[str, Any]


def _value(kind: str, text: str) -> Schema:
    return {"type": kind, "description": text}


def _maybe(kind: str, text: str) -> Schema:
    """A value that may be unknown: null."""
    return {"type": [kind, "null"], "description": text}


def _object(text: str, optional: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "description": text,
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def _list(text: str, items: Schema) -> Schema:
    return {"type": "array", "description": text, "items": items}


def _map(text: str, values: Schema) -> Schema:
    return {"type": "object", "description": text, "additionalProperties": values}


def _totals(text: str) -> Schema:
    return _object(
        text,
        launches=_maybe("integer", "kernels started in one call"),
        accesses=_maybe("integer", "whole activation tensors read or written in global memory"),
        dram_bytes=_maybe("integer", "bytes of each kernel's inputs, outputs and parameters"),
        flops=_maybe("integer", "operations; null if an operator without expression takes part"),
        intensity=_maybe("number", "flops / dram_bytes"),
        latency_us=_maybe("number", "measured median time of a call, microseconds"),
    )


def _interval(text: str) -> Schema:
    """An interval, or null."""
    found = _object(
        f"{text}, of rounds in which both took turns; null: too few rounds for an interval",
        median=_value("number", "median of the rounds' ratios"),
        low=_value("number", "lower end of its 95 % confidence interval"),
        high=_value("number", "upper end"),
        rounds=_value("integer", "rounds"),
    )
    return {**found, "type": ["object", "null"]}


_KERNEL = _object(
    "One kernel of the fused program.",
    name=_value("string", "unique name"),
    ops=_list("operators it computes, in order", _value("string", "operator's name")),
    backend=_value("string", "cpp, triton, cuda, cudnn or library"),
    choice=_value("string", "the variant chosen"),
    dram_bytes=_maybe("integer", "bytes read and written in global memory"),
    flops=_maybe("integer", "operations"),
    predicted_us=_maybe("number", "predicted time, microseconds"),
    measured_us=_maybe("number", "measured time, microseconds"),
    registers=_maybe("integer", "registers a thread"),
    spills=_maybe("integer", "bytes spilled a thread"),
    shared_bytes=_maybe("integer", "shared memory a block"),
    occupancy=_maybe("number", "resident share of the warps, 0 to 1"),
    code_bytes=_maybe("integer", "machine code"),
    compile_s=_maybe("number", "seconds to compile (triton: of a processor); 0 if reused"),
    unfused_us=_maybe("number", "its operators as library calls, microseconds"),
    ratio=_interval("its time over that"),
)

_CONTEST = _object(
    "One place where a more fused form was measured against a less fused one.",
    ops=_list("operators, in order", _value("string", "operator's name")),
    against=_value("string", "operators (each its library call), two kernels, or eager (of all)"),
    fused_us=_value("number", "microseconds of the more fused form"),
    unfused_us=_value("number", "of the other"),
    ratio=_interval("the former over the latter"),
    won=_value("boolean", "the more fused form was chosen"),
    first=_list("operators of the first of two kernels", _value("string", "operator's name")),
)

_DECISION = _object(
    "Why a producer and a consumer are, or are not, in one kernel.",
    edge={
        **_list("producer's and consumer's name", _value("string", "operator's name")),
        "minItems": 2,
        "maxItems": 2,
    },
    fused=_value("boolean", "in one kernel"),
    rule=_value("string", "name of the rule that decided, or empty"),
    family=_value("string", "illegal, unsupported, unprofitable, over-budget, failed or empty"),
    text=_value("string", "the reason for people"),
    costs=_map("figures by name, units in the names", {"description": "number or text"}),
)

REPORT: Schema = _object(
    "Report of `onchip optimize MODEL --json`.",
    model=_value("string", "MODEL as given"),
    device=_value("string", "the device's own name"),
    dtype=_value("string", "element type of the model's input"),
    versions=_map("package -> version", _value("string", "version")),
    unfused=_totals("The model as given, eager, one kernel an operator."),
    fused=_totals("The program that onchip made."),
    baselines=_map("better unfused or compiled forms -> latency", _maybe("number", "microseconds")),
    bound_us=_maybe("number", "physical limit of the device for this model, microseconds"),
    speedup=_maybe("number", "unfused latency / fused latency"),
    launch=_object(
        "What starting one kernel costs on this device.",
        eager_us=_maybe("number", "an operator in eager PyTorch, microseconds"),
        fused_us=_maybe("number", "a kernel of the fused program (graph node, or call)"),
    ),
    numerics=_object(
        "Error against float64.",
        error=_maybe("number", "largest error of the program, relative to the result's scale"),
        eager_error=_maybe("number", "the same of eager PyTorch"),
        ledger=_list(
            "Deliberate differences from eager's arithmetic.",
            _object(
                "One difference.",
                kind=_value(
                    "string", "rounding_removed, winograd, tf32x3, reassociated, or an algebra rule"
                ),
                where=_value("string", "operator or edge"),
                text=_value("string", "what was done"),
                error=_maybe("number", "largest error that it causes"),
            ),
        ),
    ),
    plan=_object(
        "The chosen partition.",
        predicted_us=_maybe("number", "predicted time, microseconds"),
        lower_bound_us=_maybe("number", "no cover by known regions takes less, microseconds"),
        gap=_maybe("number", "measured / lower bound - 1; 0: nothing is left to gain"),
    ),
    compile=_object(
        "What compiling took.",
        seconds=_maybe("number", "wall-clock seconds"),
        kernels_built=_maybe("integer", "compiled now"),
        kernels_reused=_maybe("integer", "taken from the cache"),
        kernels_left_out=_maybe("integer", "variants for which the budget left no time"),
        seconds_per_us_saved=_maybe(
            "number", "seconds for each microsecond a call saves; null: it saves none"
        ),
        pays_off_after=_maybe("integer", "calls that save as much time as compiling took"),
    ),
    cuda_graph=_object(
        "Whether the program runs as one CUDA graph.",
        graphed=_maybe("boolean", "it does; null: it does not run on a GPU"),
        text=_value("string", "how, or why not"),
        blockers=_list(
            "Operators that can't be part of a graph.",
            _object(
                "One operator.",
                operator=_value("string", "operator's or input's name"),
                origin=_value("string", "its module and source line"),
                reason=_value("string", "why it can't"),
            ),
        ),
        launched_us=_maybe("number", "a call with each kernel launched by itself, microseconds"),
        replayed_us=_maybe("number", "the same as a graph"),
        copied_us=_maybe("number", "the same with inputs copied in and results copied out"),
        branches=_maybe("integer", "branches that run at once; 1: all operators run in a row"),
        row_us=_maybe("number", "one of several replays, in a row; null: there is no other way"),
        branched_us=_maybe("number", "the same with branches at once"),
        early_us=_maybe("number", "the same with kernels that start while the one before ends"),
    ),
    kernels=_list("In execution order.", _KERNEL),
    decisions=_list("One for each edge between two operators.", _DECISION),
    notes=_list("Sentences for people.", _value("string", "what else to know")),
    ratio=_interval("fused latency / unfused"),
    contests=_list("A region that was cut comes before its parts.", _CONTEST),
)

BENCH: Schema = _object(
    "Results of `onchip bench SUITE --json`.",
    ("protocol", "empty_us"),
    suite=_value("string", "suite's name"),
    device=_value("string", "the device's own name"),
    versions=_map("package -> version", _value("string", "version")),
    date=_value("string", "ISO date"),
    protocol=_value("string", "how times were taken; absent where docs/design.md says it"),
    empty_us=_value("number", "what a kernel without work takes by that protocol"),
    rows=_list(
        "One for each case.",
        _object(
            "One case.",
            ("group", "predicted_us", "seconds"),
            name=_value("string", "case"),
            dtype=_value("string", "element type"),
            onchip_us=_maybe("number", "microseconds"),
            predicted_us=_maybe("number", "by the cost model; absent in results from before it"),
            peers=_map("name -> latency", _maybe("number", "microseconds; null if it failed")),
            floor_us=_maybe("number", "physical limit, microseconds"),
            error=_maybe("number", "largest error against float64, relative"),
            eager_error=_maybe("number", "the same of eager PyTorch"),
            launches=_maybe("integer", "kernels started"),
            bytes=_maybe("integer", "inputs, weights and results, each once; null on a CPU"),
            share=_maybe("number", "of the copy ceiling, for what is bound by memory"),
            target_us=_maybe("number", "microseconds that it must not exceed; null: none promised"),
            group=_value("string", "rows that are summarised together; absent: all of the suite"),
            seconds=_map("what the row took: stage -> wall-clock", _value("number", "seconds")),
            notes=_value("string", "what else to know"),
        ),
    ),
)

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def check(data: Any, schema: Schema, where: str = "report") -> None:
    """OnchipError naming the first field of `data` that does not fit `schema`."""
    kinds = schema.get("type")
    if kinds is not None:
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not any(_is(data, k) for k in kinds):
            raise OnchipError(f"{where} is {type(data).__name__}; expected {' or '.join(kinds)}")
    if isinstance(data, dict):
        _check_object(data, schema, where)
    elif isinstance(data, list):
        if not schema.get("minItems", 0) <= len(data) <= schema.get("maxItems", len(data)):
            raise OnchipError(f"{where} has {len(data)} items; expected {schema['minItems']}")
        for i, item in enumerate(data):
            check(item, schema.get("items", {}), f"{where}[{i}]")


def _is(data: Any, kind: str) -> bool:
    # bool is an int in Python, not in JSON
    if isinstance(data, bool):
        return kind == "boolean"
    return isinstance(data, _TYPES[kind])


def _check_object(data: dict[str, Any], schema: Schema, where: str) -> None:
    known = schema.get("properties", {})
    for key in schema.get("required", ()):
        if key not in data:
            raise OnchipError(f"{where} has no {key!r}")
    extra = schema.get("additionalProperties", {})
    for key, value in data.items():
        if key in known:
            check(value, known[key], f"{where}.{key}")
        elif extra is False:
            raise OnchipError(f"{where} has an unknown field {key!r}")
        else:
            check(value, extra, f"{where}.{key}")


# ---- documentation -----------------------------------------------------------------------------


def document() -> str:
    """The text of docs/json.md."""
    head = (
        "# The JSON contracts\n\nWritten by `onchip.report.schema.document()`; a test keeps this "
        "page current. A value that onchip does not know is `null`; none is invented. Times are "
        "microseconds unless the name says otherwise.\n"
    )
    parts = [head]
    for title, schema in (("`onchip optimize --json`", REPORT), ("`onchip bench --json`", BENCH)):
        parts.append(f"\n## {title}\n\n{schema['description']}\n\n| field | type | meaning |")
        parts.append("| --- | --- | --- |")
        parts.extend(_rows(schema, ""))
    return "\n".join(parts) + "\n"


def _rows(schema: Schema, prefix: str) -> list[str]:
    out = []
    for key, s in schema.get("properties", {}).items():
        name, kinds = f"{prefix}{key}", s.get("type", "any")
        kinds = " or ".join(kinds) if isinstance(kinds, list) else kinds
        out.append(f"| `{name}` | {kinds} | {s.get('description', '')} |")
        out.extend(_rows(s, f"{name}."))
        out.extend(_rows(s.get("items", {}), f"{name}[]."))
    return out
