"""What a start does at once: tokenizers are read while the engine starts and loads. Told by events, not by times."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.checkpoints.published import GOLDEN
from benchmarks.checkpoints.tokenizers import PUBLISHED, grow_file
from models.interfaces.errors import CheckpointError
from service.api.engines.engine_client import EngineClient
from service.api.engines.engines import Engines
from service.hub.catalog import Catalog, load_catalog
from service.link.config import Channel, EngineConfig
from service.link.engine_link import InlineLink, ProcessLink
from service.settings.settings import load_settings
from tests.support import fake_engine
from tests.support.fake_chat import FakeProcessor, fake_catalog
from tests.support.processes import ROOT, ServerProcess
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import wait

PATIENCE = 240.0


def with_load(load: Callable[[], Any]) -> Catalog:
    """The catalog of fakes, whose processor comes from `load`."""
    return Catalog([replace(model, load=load) for model in fake_catalog().models])


def test_tokenizers_are_read_while_the_engine_loads() -> None:
    """Each waits for the other to have begun: one after the other, in whatever order, neither would end."""
    reading, loading = threading.Event(), threading.Event()

    def load() -> FakeProcessor:
        reading.set()
        assert loading.wait(PATIENCE), "the engine does not load while a tokenizer is read"
        return FakeProcessor()

    def engine(config: EngineConfig, channel: Channel) -> None:
        loading.set()
        assert reading.wait(PATIENCE), "no tokenizer is read while the engine loads"
        fake_engine.serve(config, channel)

    with running_server(with_load(load), lambda config: InlineLink(config, engine)) as server:
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "tiny"


def test_requests_are_taken_once_tokenizers_are_there() -> None:
    """Also where the engine is ready long before them."""
    ready, read = threading.Event(), threading.Event()

    def load() -> FakeProcessor:
        assert ready.wait(PATIENCE)
        read.set()
        return FakeProcessor()

    class Signalling:
        def __init__(self, channel: Channel) -> None:
            self._channel = channel

        def send(self, outputs: Any) -> None:
            self._channel.send(outputs)
            if outputs.state is not None and outputs.state.phase == "ready":
                ready.set()

        def receive(self, timeout: float | None) -> list[Any]:
            return self._channel.receive(timeout)

    def engine(config: EngineConfig, channel: Channel) -> None:
        fake_engine.serve(config, Signalling(channel))

    with running_server(with_load(load), lambda config: InlineLink(config, engine)) as server:
        assert read.is_set() and httpx.get(f"{server.url}/ready").status_code == 200


def one_engine(server: RunningServer) -> EngineClient:
    engines = server.context.engine
    assert isinstance(engines, Engines)
    (client,) = engines.clients
    return client


def test_a_tokenizer_that_does_not_fit_ends_the_start() -> None:
    def load() -> Any:
        raise CheckpointError("tokenizer.json does not fit")

    with running_server(with_load(load), wait=False) as server:
        failure = one_engine(server).failure
        assert failure is not None and failure.reason == "tokenizer.json does not fit"
        assert httpx.get(f"{server.url}/ready").status_code == 503


@pytest.mark.slow
def test_a_tokenizer_of_published_size_is_read_beside_the_engine_process(tmp_path: Path) -> None:
    """151,643 entries. The engine's process, which reads them beside its weights, runs before the API's begins."""
    directory = tmp_path / "large"
    shutil.copytree(GOLDEN / "qwen2_vl", directory)
    grow_file(directory / "tokenizer.json")
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 316', '"vocab_size": 151936'))
    flags = {"model": (str(directory),), "load_format": "random", "graphs": False}
    (model,) = load_catalog(load_settings(flags)).models
    links: list[ProcessLink] = []
    engines_at_begin: list[Process | None] = []

    def load() -> Any:
        engines_at_begin.extend(link._process for link in links)
        return model.load()

    def make_link(engine: EngineConfig) -> ProcessLink:
        links.append(ProcessLink(engine))
        return links[-1]

    hosted = replace(model, load=load)
    with running_server(Catalog([hosted]), make_link, wait=False, **flags) as server:
        wait(lambda: server.context.engine.ready, PATIENCE, "the engine is ready")
        assert hosted.chat_processor.vocab_size == PUBLISHED
        (link,) = links
        assert link._process is not None
        assert engines_at_begin == [link._process], "the engine that is ready ran when the tokenizer was begun"


def test_every_line_of_the_log_is_json(embedded_server: ServerProcess) -> None:
    """From the first one, which comes before anything is loaded."""
    messages = [json.loads(line)["message"] for line in list(embedded_server.log)]
    assert messages[0].endswith(": locating")


@pytest.mark.parametrize("arguments", [["--max-n", "1000"], ["--model", "/nowhere/at/all"]])
def test_what_cannot_be_served_is_json_where_the_log_is(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "service.cli", "serve", "--port", "0", *arguments]
    environment = {**os.environ, "REPRISE_LOG_FORMAT": "json", "REPRISE_TYPO": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE, env=environment)
    assert done.returncode == 2
    assert [json.loads(line)["level"] for line in done.stderr.splitlines()][-1] == "error"


def test_a_long_path_of_temporary_files_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Paths of sockets have at most 107 bytes."""
    (long := tmp_path / ("long" * 25)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with running_server(make_link=lambda config: ProcessLink(config, "tests.support.fake_engine:serve")) as server:
        assert httpx.get(f"{server.url}/ready").status_code == 200
