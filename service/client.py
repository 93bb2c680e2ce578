"""A client for the command line: httpx against a running server, or against one started for the occasion."""

from __future__ import annotations

import base64
import json
import mimetypes
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

LOCAL_START_SECONDS = 180.0


class ServerSaid(Exception):
    """The server's own words on why it did not do what was asked, or that it cannot be reached."""


class ApiClient:
    """Talks to a server's /v1."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self.url = url
        self._http = httpx.Client(base_url=url, headers=headers, timeout=600, trust_env=False)

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._http.close()
        if isinstance(error, httpx.ConnectError | httpx.UnsupportedProtocol):
            raise ServerSaid(
                f"no server at {self.url} ({error}); start one with `reprise serve`, or add --local"
            ) from error
        if isinstance(error, httpx.TransportError):
            raise ServerSaid(f"the connection to {self.url} broke ({error})") from error

    def models(self) -> list[dict[str, Any]]:
        response = self._http.get("/v1/models")
        _check(response)
        return response.json()["data"]

    def ask(self, files: Sequence[Path], question: str, model: str, max_tokens: int) -> Iterator[tuple[str, str]]:
        """(reasoning, answer), piece by piece. files: pictures and videos, told apart by their names' endings."""
        content = [*map(_media_part, files), {"type": "text", "text": question}]
        body = {
            "model": model or self.first("chat"),
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "stream": True,
        }
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            _check(response)
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise ServerSaid(chunk["error"]["message"])
                    for choice in chunk["choices"]:
                        yield choice["delta"].get("reasoning_content") or "", choice["delta"].get("content") or ""

    def say(
        self,
        text: str,
        out: Path,
        model: str,
        voice: str,
        instructions: str = "",
        speed: float = 1.0,
        seed: int | None = None,
    ) -> int:
        """Bytes written to `out`, which is removed when the audio does not end as it should."""
        ending = out.suffix.removeprefix(".").lower() or "wav"
        body = {
            "model": model or self.first("speech"),
            "input": text,
            "voice": voice,
            "instructions": instructions,
            "speed": speed,
            "seed": seed,
            "response_format": "opus" if ending == "ogg" else ending,
        }
        with self._http.stream("POST", "/v1/audio/speech", json=body) as response:
            _check(response)
            with out.open("wb") as file:
                try:
                    size = sum(file.write(piece) for piece in response.iter_bytes())
                except BaseException:
                    out.unlink()
                    raise
                if ending == "wav":
                    # The header of a stream does not say how long it is, and some programs believe it.
                    for at in (4, 40):
                        file.seek(at)
                        file.write(struct.pack("<I", size - at - 4))
                return size

    def first(self, kind: str) -> str:
        """Name of the first model that is "chat" or "speech"; ServerSaid when there is none."""
        for card in self.models():
            if card["kind"] == kind:
                return card["id"]
        raise ServerSaid(f"the server has no {kind} model")


def _media_part(file: Path) -> dict[str, Any]:
    media_type = mimetypes.guess_type(file)[0] or "image/png"
    kind = "video_url" if media_type.startswith("video/") else "image_url"
    return {"type": kind, kind: {"url": f"data:{media_type};base64,{base64.b64encode(file.read_bytes()).decode()}"}}


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        raise ServerSaid(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        raise ServerSaid(f"the server answered with status {response.status_code}") from None


@contextmanager
def local_server() -> Iterator[ApiClient]:
    """A server on a free loopback port with the settings of the environment, stopped at the end."""
    command = [sys.executable, "-m", "service.cli", "serve", "--host", "127.0.0.1", "--port", "0"]
    options = ["--log-format", "json", "--log-level", "info"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        url = _ready_url(process)
        # A pipe that nobody reads would stop the server when it is full of log lines.
        threading.Thread(target=deque, args=(process.stderr, 0), daemon=True).start()
        with ApiClient(url, "none") as client:
            yield client
    finally:
        process.terminate()
        process.wait(timeout=60)


def _ready_url(process: subprocess.Popen[str]) -> str:
    """The address from the log line that says so."""
    assert process.stderr is not None
    deadline = time.monotonic() + LOCAL_START_SECONDS
    last = ""
    for line in process.stderr:
        last = line.strip() or last
        if line.startswith("{") and str(message := json.loads(line).get("message", "")).startswith("ready at "):
            return message.removeprefix("ready at ")
        if time.monotonic() > deadline:
            break
    raise ServerSaid(f"the local server did not start: {last}")
