"""A server of the package's models gives their memory back while nobody asks, and answers who asks then."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from service.api import engine_client
from service.catalog import load_catalog
from service.link.supervisor import ProcessLink
from service.settings import load_settings
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, wait

FLAGS = {"max_running": 2, "decode_buckets": (1,), "sleep_after": 0.5}


def engines() -> set[int]:
    """Process ids of the engines that this process has started."""
    found = set()
    for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        try:
            if b"service.link.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(int(pid))
        except OSError:  # it has ended meanwhile
            continue
    return found


def wait_asleep(server: RunningServer) -> None:
    def gone() -> bool:
        return server.context.engine.phase == "asleep" and not engines()

    wait(gone, GENEROUS, "the engine's process has ended")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_chat_and_speech_wake_an_engine_whose_process_had_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(engine_client, "HEARTBEAT_CHECK_SECONDS", 0.05)
    catalog = load_catalog(load_settings({}))
    chat, speech = (next(m.name for m in catalog.models if m.kind == kind) for kind in ("chat", "speech"))
    said = {"model": chat, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    spoken = {"model": speech, "input": "Hello.", "voice": "default", "response_format": "pcm", "max_len": 2}
    with running_server(catalog, ProcessLink, **FLAGS) as server:
        with httpx.Client(base_url=server.url, timeout=GENEROUS) as http:
            for path, body in (("/v1/chat/completions", said), ("/v1/audio/speech", spoken)):
                wait_asleep(server)
                ready = http.get("/ready")
                assert ready.status_code == 200 and ready.json()["engine"] == "asleep"
                assert http.get("/health").status_code == 200
                answer = http.post(path, json=body)
                assert answer.status_code == 200 and answer.content
            page = http.get("/metrics").text
        # A voice is made first, and then speaks: the engine does not sleep between the two.
        assert "reprise_engine_wake_duration_seconds_count 2.0" in page and "reprise_engine_restarts_total 0.0" in page
