"""Requests of every kind that a client may send, good ones and bad ones, and their outcomes.

Chat with pictures and videos, streamed and whole; speech live, whole and over the WebSocket; voices; clients that leave
in the middle or whose connection is cut; bad input.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import socket
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import soundfile
from PIL import Image
from websockets.asyncio.client import connect

from benchmarks.servers.process import Server

TOKENS, PATCHES = 6, 4
"""Of the longest answers: short, since requests are counted, not work."""
SENTENCES = (
    "The tide goes out, and the harbour falls silent.",
    "Seven trains left before noon; none of them was late.",
    "She folded the letter twice. Then she burned it.",
)
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends RST, as if the peer were gone."""

Kind = Callable[[httpx.AsyncClient], Awaitable[None]]


class MixedTraffic:
    """The kinds of requests that a server's models allow.

    statuses: counts by (kind, outcome). seconds: of each request, by kind. problems: outcomes that should not be.
    """

    def __init__(self, server: Server, seed: int) -> None:
        self.statuses: Counter[tuple[str, str]] = Counter()
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.problems: list[str] = []
        self._server = server
        self.random = random.Random(seed)
        cards = httpx.get(f"{server.url}/v1/models").json()["data"]
        self._chat = next((card["id"] for card in cards if card["kind"] == "chat"), None)
        self._speech = next((card["id"] for card in cards if card["kind"] == "speech"), None)
        rng = np.random.default_rng(seed)
        self._pictures = [_picture(rng, width, height) for width, height in ((64, 64), (224, 160), (448, 448))]
        self._video = _video(rng)
        self._clip = _clip()
        chat: list[Kind] = [
            self._chat_whole, self._chat_streamed, self._chat_video, self._chat_left, self._chat_cut, self._bad_picture,
            self._bad_video, self._bad_body,
        ]  # fmt: skip
        speech: list[Kind] = [
            self._speech_live, self._speech_whole, self._speech_left, self._speech_socket, self._socket_cut,
            self._voice, self._bad_voice, self._bad_speech,
        ]  # fmt: skip
        self.kinds = (chat if self._chat else []) + (speech if self._speech else [])

    async def send(self, kind: Kind, http: httpx.AsyncClient) -> None:
        """Sends one request of that kind, and those that belong to it."""
        name = kind.__name__.strip("_")
        began = time.monotonic()
        try:
            await kind(http)
        except (httpx.HTTPError, OSError, AssertionError, json.JSONDecodeError) as error:
            self.statuses[name, type(error).__name__] += 1
            self.problems.append(f"{name}: {error!r}")
        self.seconds[name].append(time.monotonic() - began)

    def rows(self) -> list[dict[str, Any]]:
        """Requests, seconds and outcomes by kind."""
        rows = []
        for kind, seconds in sorted(self.seconds.items()):
            outcomes = {status: count for (name, status), count in self.statuses.items() if name == kind}
            ordered = sorted(seconds)
            row = {"kind": kind, "requests": len(seconds), "p50_s": ordered[len(ordered) // 2]}
            rows.append({**row, "p95_s": ordered[int(len(ordered) * 0.95)], "outcomes": outcomes})
        return rows

    def _saw(self, kind: str, response: httpx.Response, *expected: int) -> bool:
        """Records an answer's status; True for a 200. A refusal because of load is not a problem."""
        self.statuses[kind, str(response.status_code)] += 1
        overloaded = response.status_code == 503 and "retry-after" in response.headers
        if response.status_code not in expected and not overloaded:
            self.problems.append(f"{kind}: status {response.status_code}")
        return response.status_code == 200

    def _question(self, *media: dict[str, Any], **fields: Any) -> dict[str, Any]:
        text = {"type": "text", "text": self.random.choice(SENTENCES)}
        fields = {"max_tokens": self.random.randint(1, TOKENS), "ignore_eos": True, **fields}
        return {"model": self._chat, "messages": [{"role": "user", "content": [*media, text]}], **fields}

    def _image(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": _data_url(self.random.choice(self._pictures), "image/jpeg")}}

    async def _chat_whole(self, http: httpx.AsyncClient) -> None:
        body = self._question(*(self._image() for _ in range(self.random.randrange(3))))
        self._saw("chat_whole", await http.post("/v1/chat/completions", json=body), 200)

    async def _chat_video(self, http: httpx.AsyncClient) -> None:
        part = {"type": "video_url", "video_url": {"url": _data_url(self._video, "video/mp4")}}
        self._saw("chat_video", await http.post("/v1/chat/completions", json=self._question(part)), 200)

    async def _chat_streamed(self, http: httpx.AsyncClient) -> None:
        body = self._question(self._image(), stream=True)
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            text = "".join([piece async for piece in response.aiter_text()])
            if self._saw("chat_streamed", response, 200):
                assert text.endswith("data: [DONE]\n\n"), "the stream did not end well"

    async def _chat_left(self, http: httpx.AsyncClient) -> None:
        body = self._question(self._image(), stream=True, max_tokens=1000)
        await self._leave(http, "chat_left", "/v1/chat/completions", body)

    def _text(self, **fields: Any) -> dict[str, Any]:
        fields = {"response_format": "pcm", "max_len": PATCHES, **fields}
        return {"model": self._speech, "input": self.random.choice(SENTENCES), **fields}

    async def _chat_cut(self, http: httpx.AsyncClient) -> None:
        """The connection ends in the head, in the body, or while the answer is on its way."""
        body = json.dumps(self._question(self._image(), stream=True, max_tokens=1000)).encode()
        request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode() + body
        at = self.random.choice((20, len(request) - len(body) // 2, len(request)))
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self._server.url.rsplit(":", 1)[1]))
        writer.write(request[:at])
        await writer.drain()
        if at == len(request):
            await reader.read(100)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
        self.statuses["chat_cut", "cut"] += 1

    async def _speech_live(self, http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/audio/speech", json=self._text(min_len=PATCHES // 2)) as response:
            await response.aread()
            self._saw("speech_live", response, 200)

    async def _speech_whole(self, http: httpx.AsyncClient) -> None:
        name = self.random.choice(("mp3", "opus", "flac", "wav", "aac"))
        body = self._text(response_format=name, stream=False)
        self._saw("speech_whole", await http.post("/v1/audio/speech", json=body), 200)

    async def _speech_left(self, http: httpx.AsyncClient) -> None:
        body = self._text(input=" ".join(SENTENCES * 5), min_len=100, max_len=100)
        await self._leave(http, "speech_left", "/v1/audio/speech", body)

    async def _speech_socket(self, http: httpx.AsyncClient) -> None:
        url = self._server.url.replace("http", "ws", 1) + "/v1/audio/speech/stream"
        async with connect(url) as socket:
            await socket.send(json.dumps({"type": "session.config", **self._text(input=None)}))
            for word in self.random.choice(SENTENCES).split():
                await socket.send(json.dumps({"type": "input.text", "text": word + " "}))
            await socket.send(json.dumps({"type": "input.done"}))
            kind = ""
            while kind not in ("session.done", "error"):
                message = await asyncio.wait_for(socket.recv(), 60)
                kind = json.loads(message)["type"] if isinstance(message, str) else ""
            self.statuses["speech_socket", kind] += 1

    async def _socket_cut(self, http: httpx.AsyncClient) -> None:
        """The client disconnects in the middle of an utterance, without a closing handshake."""
        async with connect(self._server.url.replace("http", "ws", 1) + "/v1/audio/speech/stream") as socket:
            await socket.send(json.dumps({"type": "session.config", **self._text(input=None, min_len=50, max_len=50)}))
            await socket.send(json.dumps({"type": "input.text", "text": " ".join(SENTENCES)}))
            await asyncio.wait_for(socket.recv(), 60)
            socket.transport.abort()
        self.statuses["socket_cut", "cut"] += 1

    async def _voice(self, http: httpx.AsyncClient) -> None:
        form = {"name": f"voice {self.random.getrandbits(40)}", "consent": "agreed"}
        files = {"audio_sample": ("clip.wav", self._clip, "audio/wav")}
        kept = await http.post("/v1/audio/voices", data=form, files=files)
        if self._saw("voice", kept, 200):
            id_ = kept.json()["id"]
            self._saw("voice", await http.post("/v1/audio/speech", json=self._text(voice=id_)), 200)
            self._saw("voice", await http.delete(f"/v1/audio/voices/{id_}"), 200)

    async def _leave(self, http: httpx.AsyncClient, kind: str, path: str, body: dict[str, Any]) -> None:
        """Reads a few chunks and disconnects."""
        pieces = self.random.randrange(1, 8)
        async with http.stream("POST", path, json=body) as response:
            self._saw(kind, response, 200)
            async for _ in response.aiter_bytes():
                pieces -= 1
                if not pieces:
                    break

    async def _bad_picture(self, http: httpx.AsyncClient) -> None:
        data = bytearray(self.random.choice(self._pictures))
        del data[self.random.randrange(20, 200) :]
        part = {"type": "image_url", "image_url": {"url": _data_url(bytes(data), "image/jpeg")}}
        self._saw("bad_picture", await http.post("/v1/chat/completions", json=self._question(part)), 400)

    async def _bad_video(self, http: httpx.AsyncClient) -> None:
        data = self._video[: self.random.randrange(50, len(self._video) // 2)]
        part = {"type": "video_url", "video_url": {"url": _data_url(data, "video/mp4")}}
        self._saw("bad_video", await http.post("/v1/chat/completions", json=self._question(part)), 400)

    async def _bad_voice(self, http: httpx.AsyncClient) -> None:
        form = {"name": f"voice {self.random.getrandbits(40)}", "consent": "agreed"}
        files = {"audio_sample": ("clip.wav", self._clip[: self.random.randrange(10, 60)], "audio/wav")}
        self._saw("bad_voice", await http.post("/v1/audio/voices", data=form, files=files), 400)

    async def _bad_body(self, http: httpx.AsyncClient) -> None:
        body = self.random.choice([b"{", b"[]", b'{"model": 3}', json.dumps(self._question(n=1000)).encode()])
        self._saw("bad_body", await http.post("/v1/chat/completions", content=body), 400)

    async def _bad_speech(self, http: httpx.AsyncClient) -> None:
        wrong: list[dict[str, Any]] = [{"input": "..."}, {"speed": 99}, {"ref_audio": "data:,x"}]
        body = self._text(**self.random.choice(wrong))
        self._saw("bad_speech", await http.post("/v1/audio/speech", json=body), 400)


def _data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _picture(rng: np.random.Generator, width: int, height: int) -> bytes:
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG")
    return buffer.getvalue()


def _video(rng: np.random.Generator) -> bytes:
    import av  # a machine that only measures may lack it

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for _ in range(12):
            pixels = np.full((64, 96, 3), rng.integers(0, 256, 3), np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode(None))
    return buffer.getvalue()


def _clip() -> bytes:
    buffer = io.BytesIO()
    times = np.arange(32_000) / 16_000
    soundfile.write(buffer, (0.4 * np.sin(2 * np.pi * 180 * times)).astype(np.float32), 16_000, format="WAV")
    return buffer.getvalue()
