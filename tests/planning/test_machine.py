import json
from dataclasses import replace

import pytest
import torch

from onchip.analysis.roofline import Ceilings, Costs
from onchip.errors import CacheError, CompilerError, OnchipError
from onchip.fusion.machine import GPUS
from onchip.planning import machine

COSTS = Costs(((1024, 0.5), (4096, 1.5)), 2.0, 4, 16.0, 0.5)
FOUND = Ceilings("p", 10.0, {"float32": 20.0}, 3.0, "test", gpu=False, costs=COSTS)


@pytest.fixture
def counted(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "_measure_cpu", lambda: calls.append(1) or FOUND)
    monkeypatch.setattr(machine, "_load", lambda: 0.5)
    return calls


def test_measured_once_and_kept(counted, tmp_path):
    assert machine.measure() == machine.measure() == FOUND
    assert len(counted) == 1
    machine.measure(refresh=True)
    assert len(counted) == 2
    assert len(list(tmp_path.glob("ceilings/*.json"))) == 1


def test_other_threads_are_another_machine(counted, monkeypatch):
    machine.measure()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    machine.measure()
    assert len(counted) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"load": 0, "ceilings": {"x": 1}}'])
def test_a_damaged_file_is_measured_again(counted, tmp_path, text):
    machine.measure()
    (path,) = tmp_path.glob("ceilings/*.json")
    path.write_text(text)
    assert machine.measure() == FOUND
    assert len(counted) == 2
    assert json.loads(path.read_text())["load"] == 0.5


def test_figures_from_a_busy_machine_are_replaced_on_a_quiet_one(counted, monkeypatch):
    monkeypatch.setattr(machine, "_load", lambda: 100.0)
    machine.measure()
    machine.measure()
    assert len(counted) == 1  # still as busy
    monkeypatch.setattr(machine, "_load", lambda: 1.0)
    machine.measure()
    assert len(counted) == 2


def test_errors(monkeypatch, tmp_path):
    with pytest.raises(OnchipError, match="'cpu' or 'cuda'"):
        machine.measure("meta")
    (tmp_path / "f").write_text("")
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "f" / "g"))
    with pytest.raises(CacheError, match="ONCHIP_CACHE"):
        machine.measure()


def test_the_real_measurement_is_within_physics(monkeypatch):
    small = machine._copy_us(1 << 20, "cpu", lambda run: machine._best_us(run, 3))
    gbs = 2 * 4 * (1 << 20) / small / 1e3
    assert 0.1 < gbs < 5000
    slow = machine._best_us(lambda: torch.ones(1 << 20), 2)
    assert slow > machine._best_us(lambda: torch.ones(8), 2)


def test_multiply_adds_of_one_thread_and_without_a_compiler(monkeypatch):
    """A core does between 1 and 1000 GFLOP/s; without a compiler nothing is known."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert 1 < machine._multiply_add_rate() < 1000

    def missing(text):
        raise CompilerError("none")

    monkeypatch.setattr(machine, "build", missing)
    assert machine._multiply_add_rate() == 0.0


def test_the_drivers_version_is_part_of_what_a_gpus_choices_depend_on(monkeypatch, tmp_path):
    from onchip.planning.generators import cuda, triton

    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(machine, "_DRIVER", tmp_path / "version")
    machine.driver_version.cache_clear()
    assert machine.driver_version("cuda:0") == "570.86.15"
    assert machine.driver_version("cpu") == ""
    gpu, device = GPUS["h200"], torch.device("cuda:0")
    made = [replace(g, device=device) for g in (triton.for_gpu(gpu), cuda.for_gpu(gpu, alone=True))]
    before = [g.key for g in made]
    for module in (triton, cuda):
        monkeypatch.setattr(module, "driver_version", lambda device: "580.1.2")
    assert all(g.key != old for g, old in zip(made, before, strict=True))
    machine.driver_version.cache_clear()


def test_a_choice_for_one_processor_is_not_taken_on_another(monkeypatch):
    from onchip.planning.generators import cpp
    from onchip.settings import Settings

    before = cpp.for_cpu(Settings()).key
    monkeypatch.setattr(cpp, "device_name", lambda: "another processor")
    assert cpp.for_cpu(Settings()).key != before
