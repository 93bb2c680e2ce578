"""FFmpeg's libraries take half a second to import, and its encoders milliseconds to set up: never in the event loop."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import av.filter
import httpx
import lameenc
import pytest

from service.link.engine_link import InlineLink
from tests.support.fake_talker import FakeTalker, talking_catalog
from tests.support.processes import ROOT
from tests.support.servers import running_server
from tests.support.waiting import GENEROUS


def test_ffmpeg_is_imported_outside_the_event_loop_and_not_at_start() -> None:
    command = [sys.executable, "-m", "tests.support.imports_of_ffmpeg"]
    answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=600)
    threads = json.loads(answer.stdout)
    assert threads["at start"] == []
    assert threads["later"] and all(name.startswith("encode") for name in threads["later"])


def test_encoders_are_set_up_outside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def recorded(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name)
            return make(*arguments, **options)

        return made

    monkeypatch.setattr(av, "open", recorded(av.open))
    monkeypatch.setattr(lameenc, "Encoder", recorded(lameenc.Encoder))
    monkeypatch.setattr(av.filter, "Graph", recorded(av.filter.Graph))
    talker = FakeTalker()
    flags: dict[str, Any] = {"voices_dir": tmp_path, "fixed_voices": False}
    with running_server(talking_catalog(), lambda config: InlineLink(config, talker.serve), **flags) as server:
        for name in ("flac", "mp3", "opus", "aac", "wav"):
            body = {"input": "One. Two.", "response_format": name, "sample_rate": 24_000}
            httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=GENEROUS).raise_for_status()
    assert len(threads) == 5 + 4  # a resampler each, and an encoder for all but wav
    assert all(name.startswith("encode") for name in threads)
