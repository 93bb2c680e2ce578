"""API processes: what they are started with, and how a signal ends one."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from service.api.app import threads_of_each
from service.hub.catalog import Catalog, load_catalog
from service.processes.control import ApiConfig, plain_settings
from service.processes.server import Server
from service.settings.settings import Settings, load_settings

SHARED = {"max_connections", "api_key", "api_key_file"}
"""What differs in an API process."""


def started(settings: Settings, catalog: Catalog) -> ApiConfig:
    values, models = plain_settings(settings), catalog.models
    line = ApiConfig(0, settings.num_api_processes, "api-1", 3, 4, 5, 1, "json", values, models).line()
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    return ApiConfig.read(line)


def test_settings_and_models_arrive_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("from-a-file\n")
    flags = {
        "api_processes": 3,
        "api_key": ["secret"],
        "api_key_file": str(keys),
        "voices_dir": str(tmp_path),
        "max_body": "3M",
        "graphs": False,
        "cors_origin": ["https://a.example", "https://b.example"],
        "max_connections": 10,
        "solver_steps": ["5", "12"],
    }
    settings = load_settings(flags)
    catalog = load_catalog(settings)
    config = started(settings, catalog)
    monkeypatch.setenv("REPRISE_MAX_BODY", "9M")  # what the supervisor made of the variables counts
    keys.unlink()
    arrived = load_settings(config.settings)
    assert arrived.keys() == ("secret", "from-a-file")
    assert arrived.model_dump(exclude=SHARED) == settings.model_dump(exclude=SHARED)
    assert arrived.max_connections == 4
    for ours, theirs in zip(catalog.models, config.models, strict=True):
        assert (ours.names, ours.kind, ours.checkpoint) == (theirs.names, theirs.kind, theirs.checkpoint)
        assert (ours.created, ours.demo) == (theirs.created, theirs.demo)
        assert type(ours.processor) is type(theirs.processor)


def test_threads_are_divided_among_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.interfaces.cpus.available", lambda: 16)
    for processes, threads in ((2, 4), (4, 2), (64, 1)):
        assert threads_of_each(load_settings({"api_processes": processes})) == threads


@pytest.mark.parametrize("supervised", [False, True])
def test_a_second_signal_ends_a_server_at_once_unless_a_supervisor_does(supervised: bool) -> None:
    context: Any = SimpleNamespace(draining=True)
    server = Server(uvicorn.Config("app"), context, supervised=supervised)
    server.handle_exit(signal.SIGTERM, None)
    assert server.force_exit is not supervised
