"""Which GPUs serve, what each engine is started with, and how many API processes a server starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from service.hub.catalog import load_catalog
from service.link.engine_link import engine_environment, num_threads, thread_variables
from service.processes.config import api_process_count, count_for, engine_configs, engine_gpus, supervised, with_count
from service.settings.reading import SettingsError
from service.settings.settings import load_settings
from service.system import gpus
from service.system.gpus import GpuError, chosen_gpus, count_gpus, visible_gpus

FOUR = ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("written", "chosen"),
    [
        ("2", FOUR[:2]),
        ("all", FOUR),
        ("3,1", ("3", "1")),
        ("2,", ("2",)),
        (" 0 , 2 ", ("0", "2")),
        (3, FOUR[:3]),
        ([1, 2], ("1", "2")),
        ([2], ("2",)),
        ("GPU-5a6b,MIG-7c", ("GPU-5a6b", "MIG-7c")),
    ],
)
def test_a_number_all_or_a_list(written: object, chosen: tuple[str, ...]) -> None:
    wanted = load_settings({"gpus": written}).gpus
    assert wanted is not None and chosen_gpus(wanted, FOUR) == chosen


def test_gpus_that_are_not_there_are_named() -> None:
    for wanted, visible, says in (
        ("2", (), "gpus: 2 asked for, but there is no GPU here"),
        ("all", (), "--engines N starts several engines on the CPU"),
        ("5", FOUR, "gpus: 5 asked for, CUDA shows 4 here"),
        ("1,4", FOUR, "gpus: there is no GPU 4; CUDA shows 4 here, counted from 0"),
    ):
        with pytest.raises(GpuError, match=says):
            chosen_gpus(wanted, visible)


def test_indexes_count_what_the_operator_has_made_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_ask_driver", lambda environ: 2)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "6, 4,9"}) == ("6", "4")  # CUDA stops at one that is not there
    assert visible_gpus({}) == ("0", "1")
    assert chosen_gpus("1,", visible_gpus({"CUDA_VISIBLE_DEVICES": "6,4"})) == ("4",)


def test_without_a_driver_there_is_no_gpu() -> None:
    assert count_gpus("libcuda-that-is-not-there.so") == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_each_engine_has_its_gpu_and_share_of_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.interfaces.cpus.available", lambda: 24)
    monkeypatch.setattr("service.link.engine_link.SMALL_BYTES", 0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("service.processes.config.visible_gpus", lambda: FOUR)
    settings = load_settings({"gpus": "0,2,3", "voices_dir": str(tmp_path)})
    assert supervised(settings)
    configs = engine_configs(settings, load_catalog(settings), engine_gpus(settings))
    assert [engine_environment(config)["CUDA_VISIBLE_DEVICES"] for config in configs] == ["0", "2", "3"]
    assert {(config.device, num_threads(config, {})) for config in configs} == {("cuda", 8)}
    assert thread_variables(configs[0], {})["OMP_NUM_THREADS"] == "8"


def test_engines_on_the_cpu_share_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("service.processes.config.visible_gpus", tuple)
    settings = load_settings({"engines": 2, "voices_dir": str(tmp_path)})
    configs = engine_configs(settings, load_catalog(settings), engine_gpus(settings))
    assert [(config.device, config.gpu, config.sharers) for config in configs] == [("cpu", "", 2)] * 2
    assert [config.index for config in configs] == [0, 1]
    monkeypatch.setattr("service.processes.config.visible_gpus", lambda: FOUR)
    with pytest.raises(
        SettingsError, match="engines: there is a GPU here, which several would share; add --device cpu"
    ):
        engine_gpus(settings)
    assert engine_gpus(load_settings({"engines": 2, "device": "cpu"})) == ("", "")


def test_one_engine_is_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def unasked() -> tuple[str, ...]:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr("service.processes.config.visible_gpus", unasked)
    settings = load_settings({})
    assert not supervised(settings)
    configs = engine_configs(settings, load_catalog(settings), engine_gpus(settings))
    assert [(config.device, config.gpu, config.sharers, config.index) for config in configs] == [("auto", "", 1, None)]
    assert engine_environment(configs[0]).get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")


def machine(monkeypatch: pytest.MonkeyPatch, processors: int, gpus: tuple[str, ...]) -> None:
    monkeypatch.setattr("models.interfaces.cpus.available", lambda: processors)
    monkeypatch.setattr("service.processes.config.visible_gpus", lambda: gpus)


@pytest.mark.parametrize(
    ("processors", "gpus", "number"),
    [
        (1, 1, 1),
        (13, 1, 1),
        (14, 1, 4),
        (32, 1, 4),
        (256, 1, 4),
        (256, 0, 1),
        (13, 8, 1),
        (14, 2, 4),
        (32, 2, 8),
        (128, 8, 16),
    ],
)
def test_four_for_each_gpu_where_there_are_processors_for_them(processors: int, gpus: int, number: int) -> None:
    assert count_for(load_settings({}), processors, gpus).number == number
    for asked in (1, 3):
        assert count_for(load_settings({"api_processes": asked}), processors, gpus).number == asked


@pytest.mark.parametrize("flags", [{"device": "cpu"}, {"engines": 2, "device": "cpu"}])
def test_one_where_several_cannot_serve(monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any]) -> None:
    machine(monkeypatch, 32, ("0",))
    count = api_process_count(load_settings(flags))
    assert (count.number, count.reason) == (1, "the engine computes on the same processors")


def test_the_machine_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 32, ("0", "1"))
    one, both = api_process_count(load_settings({})), api_process_count(load_settings({"gpus": "all"}))
    assert (one.number, both.number) == (4, 8)  # without --gpus a server uses one
    assert both.reason == "32 processors may be used beside 2 GPUs"
    with pytest.raises(SettingsError, match="gpus: 4 asked for, CUDA shows 2 here"):
        api_process_count(load_settings({"gpus": 4}))
    machine(monkeypatch, 32, ())
    assert api_process_count(load_settings({})).number == 1


def test_what_is_left_open_is_one_process_until_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 16, ("0",))
    settings = load_settings({})
    assert settings.api_processes == "auto" and not supervised(settings) and settings.num_api_processes == 1
    chosen = with_count(settings, api_process_count(settings))
    assert supervised(chosen) and chosen.num_api_processes == 4
