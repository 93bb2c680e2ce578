"""A server of the package's models gives their memory back while nobody asks, and answers who asks then."""

from __future__ import annotations

import os
from asyncio.subprocess import Process
from functools import partial

import httpx
import pytest
from websockets.sync.client import connect

from benchmarks.servers.footprint import children, inspect
from service.api.engines import engine_client
from service.hub.catalog import load_catalog
from service.link import standby as standby_module
from service.link.engine_link import ProcessLink
from service.link.standby import EngineAddress, Standby
from service.settings.settings import load_settings
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, wait

FLAGS = {"max_running": 2, "decode_buckets": (1,), "sleep_after": 0.5}


def engines() -> set[int]:
    """Process ids of the engines that this process has started."""
    return {pid for pid in children(os.getpid()) if (process := inspect(pid)) is not None and process.role == "engine"}


def wait_asleep(server: RunningServer, others: set[int], standing_by: int) -> set[int]:
    """The processes that stand by. others: engines of other servers."""

    def gone() -> bool:
        return server.context.engine.phase == "asleep" and len(engines() - others) == standing_by

    wait(gone, GENEROUS, "the engine's process has ended")
    return engines() - others


class Recorded(Standby):
    def __init__(self) -> None:
        super().__init__(beside_cpu=True)
        self.taken = set[int]()

    async def take(self, address: EngineAddress) -> Process | None:
        process = await super().take(address)
        self.taken |= set() if process is None else {process.pid}
        return process


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("standby", ["off", "on"])
def test_chat_and_speech_wake_an_engine_whose_process_had_ended(monkeypatch: pytest.MonkeyPatch, standby: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(engine_client, "HEARTBEAT_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(standby_module, "PREPARE_AFTER", 0.0)
    catalog = load_catalog(load_settings({}))
    chat, speech = (next(m.name for m in catalog.models if m.kind == kind) for kind in ("chat", "speech"))
    said = {"model": chat, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    spoken = {"model": speech, "input": "Hello.", "voice": "default", "response_format": "pcm", "max_len": 2}
    standing_by = Recorded() if standby == "on" else None
    waited, others = set[int](), engines()
    with running_server(catalog, partial(ProcessLink, standby=standing_by), **FLAGS) as server:
        with httpx.Client(base_url=server.url, timeout=GENEROUS) as http:
            for path, body in (("/v1/chat/completions", said), ("/v1/audio/speech", spoken)):
                waited |= wait_asleep(server, others, int(standby == "on"))
                ready = http.get("/ready")
                assert ready.status_code == 200 and ready.json()["engine"] == "asleep"
                assert http.get("/health").status_code == 200
                answer = http.post(path, json=body)
                assert answer.status_code == 200 and answer.content
            page = http.get("/metrics").text
        # A voice is made first, and then speaks: the engine does not sleep between the two.
        assert "reprise_engine_wake_duration_seconds_count 2.0" in page and "reprise_engine_restarts_total 0.0" in page
    if standing_by is not None:
        assert standing_by.taken == waited and len(waited) == 2
    assert engines() <= others


def test_an_open_websocket_keeps_the_engine_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "HEARTBEAT_CHECK_SECONDS", 0.05)
    with running_server(sleep_after=0.2) as server:
        with connect(server.url.replace("http", "ws") + "/v1/realtime?model=tiny") as client:
            assert "session.created" in str(client.recv())
            body = {"model": "tiny", "messages": [{"role": "user", "content": "wake up"}]}
            assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=GENEROUS).status_code == 200
            (engine,), asked = server.context.engine.clients, list[bool]()
            in_use = engine.in_use
            monkeypatch.setattr(engine, "in_use", lambda: asked.append(in_use()) or asked[-1])
            wait(lambda: len(asked) >= 10, GENEROUS, "the engine has been looked at for longer than `sleep_after`")
            assert all(asked) and engine.phase == "ready"
        wait(lambda: server.context.engine.phase == "asleep", GENEROUS, "the engine sleeps once the socket is closed")
