"""What a start does at once: tokenizers are read while the engine starts and loads. Told by events, not by times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from models.interfaces.errors import CheckpointError
from service.hub.catalog import Catalog
from service.link.config import Channel, EngineConfig
from tests.support import fake_engine
from tests.support.fake_chat import FakeProcessor, fake_catalog
from tests.support.processes import ROOT
from tests.support.servers import running_server

TIMEOUT = 240.0


def with_load(load: Callable[[], Any]) -> Catalog:
    """The catalog of fakes, whose processor comes from `load`."""
    return Catalog([replace(model, load=load) for model in fake_catalog().models])


def test_tokenizers_are_read_while_the_engine_loads() -> None:
    """Each waits for the other to have begun: one after the other, in whatever order, neither would end."""
    reading, loading = threading.Event(), threading.Event()

    def load() -> FakeProcessor:
        reading.set()
        assert loading.wait(TIMEOUT), "the engine does not load while a tokenizer is read"
        return FakeProcessor()

    def engine(config: EngineConfig, channel: Channel) -> None:
        loading.set()
        assert reading.wait(TIMEOUT), "no tokenizer is read while the engine loads"
        fake_engine.serve(config, channel)

    with running_server(with_load(load), engine=engine) as server:
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "tiny"


def test_a_tokenizer_that_does_not_fit_ends_the_start() -> None:
    def load() -> Any:
        raise CheckpointError("tokenizer.json does not fit")

    with running_server(with_load(load), wait=False) as server:
        failure = server.context.engine.clients[0].failure
        assert failure == "tokenizer.json does not fit"
        assert httpx.get(f"{server.url}/ready").status_code == 503


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--max-n", "1000"], ["--model", "/nowhere/at/all"]])
def test_what_cannot_be_served_is_json_where_the_log_is(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "service.cli", "serve", "--port", "0", *arguments]
    environment = {**os.environ, "REPRISE_LOG_FORMAT": "json", "REPRISE_TYPO": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT, env=environment)
    assert done.returncode == 2
    assert [json.loads(line)["level"] for line in done.stderr.splitlines()][-1] == "error"
