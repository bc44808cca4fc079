import dataclasses
import json
from pathlib import Path

import pytest

from onchip.errors import OnchipError
from onchip.report import KernelRow, Report, Totals, schema

from .samples import bare, full

CONTRACT = {  # what docs/json.md promises
    "": "model device dtype versions unfused fused baselines bound_us speedup numerics plan "
    "compile kernels decisions launch notes cuda_graph ratio contests",
    "unfused": "launches accesses dram_bytes flops intensity latency_us",
    "fused": "launches accesses dram_bytes flops intensity latency_us",
    "numerics": "error eager_error ledger",
    "plan": "predicted_us lower_bound_us gap",
    "compile": "seconds kernels_built kernels_reused kernels_left_out seconds_per_us_saved "
    "pays_off_after",
    "kernels": "name ops backend choice dram_bytes flops predicted_us measured_us registers "
    "spills shared_bytes occupancy code_bytes compile_s unfused_us ratio",
    "ratio": "median low high rounds",
    "contests": "ops against fused_us unfused_us ratio won first",
    "cuda_graph": "graphed text blockers launched_us replayed_us copied_us branches row_us "
    "branched_us early_us",
    "decisions": "edge fused rule family text costs",
}


@pytest.mark.parametrize("part", CONTRACT)
def test_json_holds_the_contract_and_nothing_else(part):
    data = json.loads(full().to_json())
    value = data[part] if part else data
    for item in value if isinstance(value, list) else [value]:
        assert set(item) == set(CONTRACT[part].split())


@pytest.mark.parametrize("report", [full(), bare()])
def test_json_round_trip_and_schema(report):
    text = report.to_json()
    schema.check(json.loads(text), schema.REPORT)
    assert Report.from_json(text) == report
    assert Report.from_json(text).to_json() == text


def test_values():
    data = json.loads(full().to_json())
    assert data["speedup"] == pytest.approx(200 / 120)
    assert data["unfused"]["intensity"] == 8.0
    assert data["fused"]["intensity"] == 16.0
    assert data["kernels"][1]["flops"] is None


def test_unknown_stays_unknown():
    data = json.loads(bare().to_json())
    assert data["speedup"] is None
    assert set(data["unfused"].values()) == {None}
    nan = dataclasses.replace(full(), bound_us=float("nan"))
    assert json.loads(nan.to_json())["bound_us"] is None
    odd = dataclasses.replace(full(), versions={"torch": object()})
    with pytest.raises(OnchipError, match="can't hold a object"):
        odd.to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("plan"), "report has no 'plan'"),
        (lambda d: d.update(extra=1), "unknown field 'extra'"),
        (lambda d: d["unfused"].update(launches=1.5), "report.unfused.launches is float"),
        (lambda d: d["unfused"].update(launches=True), "report.unfused.launches is bool"),
        (lambda d: d["kernels"][0].update(ops="conv"), r"report.kernels\[0\].ops is str"),
        (lambda d: d["decisions"][0].update(edge=["a"]), r"edge has 1 items; expected 2"),
        (lambda d: d["baselines"].update(inductor="fast"), "baselines.inductor is str"),
    ],
)
def test_a_wrong_report_is_refused_by_field(change, message):
    data = json.loads(full().to_json())
    change(data)
    with pytest.raises(OnchipError, match=message):
        Report.from_json(json.dumps(data))


def test_not_json():
    with pytest.raises(OnchipError, match="invalid JSON"):
        Report.from_json("{")


def test_documentation_is_current():
    page = Path(__file__).parents[2] / "docs" / "json.md"
    assert page.read_text() == schema.document(), (
        "run: python -c 'from onchip.report import schema; "
        'print(schema.document(), end="")\' > docs/json.md'
    )
    for key in CONTRACT[""].split():
        assert f"`{key}`" in schema.document()


def test_why():
    r = full()
    assert r.why("relu", "bn") == "relu -> bn: one kernel, k0 (cpp). saves 2,000 bytes"
    cut = r.why("block", "bn")  # a module's name, and the other order
    assert cut.startswith("bn -> block.head: separate kernels [unprofitable: SLOWER]")
    assert "fused_us 140" in cut
    far = r.why("conv", "block.head")
    assert "not neighbours" in far
    assert "bn -> block.head" in far
    assert "one kernel, k0" in r.why("conv", "bn")
    with pytest.raises(OnchipError, match="no operator or module 'rel'; nearest: relu"):
        r.why("rel", "bn")


def test_why_of_unconnected_operators():
    r = dataclasses.replace(
        full(), decisions=(), kernels=(KernelRow("a", ("x",), "cpp"), KernelRow("b", ("y",), "cpp"))
    )
    assert "share no tensor" in r.why("x", "y")


def test_totals_of_a_program_without_traffic():
    assert Totals(0, 0, 0, 0, 0.0).intensity is None
    assert dataclasses.replace(full(), fused=Totals(latency_us=0.0)).speedup is None
