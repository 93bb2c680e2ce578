"""How many API processes a server starts where the setting leaves it open."""

from __future__ import annotations

from typing import Any

import pytest

from service.processes.config import api_process_count, count_for, supervised, with_count
from service.settings.reading import SettingsError
from service.settings.settings import load_settings


def machine(monkeypatch: pytest.MonkeyPatch, processors: int, gpus: tuple[str, ...]) -> None:
    monkeypatch.setattr("models.interfaces.cpus.available", lambda: processors)
    for module in ("service.processes.config", "service.tuning.sizing"):
        monkeypatch.setattr(f"{module}.visible_gpus", lambda: gpus)


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


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"device": "cpu"}, "the engine computes on the same processors"),
        ({"engines": 2, "device": "cpu"}, "the engine computes on the same processors"),
    ],
)
def test_one_where_several_cannot_serve(monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], reason: str) -> None:
    machine(monkeypatch, 32, ("0",))
    count = api_process_count(load_settings(flags))
    assert (count.number, count.reason) == (1, reason)


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


@pytest.mark.parametrize("written", ["0", "65", "-1", "2.5", "many", True])
def test_numbers_that_do_not_fit_are_refused_in_one_line(written: object) -> None:
    with pytest.raises(SettingsError, match=r"^api_processes: must be auto, or a number from 1 to 64 \(.* given\)$"):
        load_settings({"api_processes": written})
