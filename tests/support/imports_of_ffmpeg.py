"""A server's start, first spoken answer and first speech: which threads import FFmpeg's libraries.

    python -m tests.support.imports_of_ffmpeg     -> a line of JSON: [thread ...]

In a process of its own, since a process imports a package once. The event loop's thread is named "server".
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import httpx

from tests.support.fake_talker import FakeTalker, talking_catalog
from tests.support.inline_link import InlineLink
from tests.support.servers import running_server
from tests.support.waiting import GENEROUS


class Recorder:
    """A finder that finds nothing, and keeps the thread of each import of `av` or a part of it."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] == "av":
            self.threads.append(threading.current_thread().name)
        return None


def main() -> None:
    recorder = Recorder()
    sys.meta_path.insert(0, recorder)
    talker = FakeTalker()
    with (
        tempfile.TemporaryDirectory() as voices,
        running_server(
            talking_catalog(), lambda config: InlineLink(config, talker.serve), voices_dir=voices, fixed_voices="off"
        ) as server,
        httpx.Client(base_url=f"{server.url}/v1", timeout=GENEROUS) as client,
    ):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "One, two."}],
            "modalities": ["text", "audio"],
            "audio": {"voice": "default", "format": "pcm16"},
        }
        client.post("/chat/completions", json={**body, "stream": True}).raise_for_status()
        client.post("/audio/speech", json={"input": "One.", "response_format": "mp3"}).raise_for_status()
    print(json.dumps(recorder.threads))


if __name__ == "__main__":
    main()
