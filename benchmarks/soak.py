"""A mixed load for minutes, and what is left of it: memory, descriptors, threads and gauges must return to where they
were.

    python -m benchmarks.soak --minutes 15 [--clients 3] [--pause 0.5] [--checkpoint NAME ...] [-- server flags]

Chat with pictures and videos, streamed and whole; speech live, whole and over the WebSocket; voices; clients that leave
in the middle; bad input. Without --checkpoint the models of the package are served. SIGTERM to this process alone ends
the load early; the result says after how many minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import av
import httpx
import numpy as np
import soundfile
import torch
from PIL import Image
from websockets.asyncio.client import connect

from benchmarks.checkpoints import make
from benchmarks.footprint import Footprint, footprint
from benchmarks.record import table, write
from benchmarks.server import Server, random_weights, serve

WARM_UP = 45.0
"""Seconds after which pools, caches and decoders are as large as they get."""
SAMPLE_SECONDS = 5.0
SAMPLES_A_LINE = 12
"""Of progress."""
SETTLE_SECONDS = 30.0
GROWTH_RATIO = 0.10
"""Of resident memory and of threads, from the first to the last third of the run. The server's thread pools are
bounded, but take one more thread when they are busier than ever before: with 16 CPUs the last few of 60 come after
minutes. What leaks a thread for a kind of request leaks far more."""
GROWTH_BYTES = 48 << 20
"""Of resident memory, beside that."""
BYTES_PER_SECOND = 96_000
"""Of 16-bit audio at 48 kHz."""
SENTENCES = (
    "The tide goes out, and the harbour falls silent.",
    "Seven trains left before noon; none of them was late.",
    "She folded the letter twice. Then she burned it.",
)


class Soak:
    """Clients that draw one kind of request after the other, and what they met."""

    def __init__(self, server: Server, pause: float, seed: int) -> None:
        self.statuses: Counter[tuple[str, str]] = Counter()
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.underruns = 0
        self.problems: list[str] = []
        self.ended = asyncio.Event()
        """Before its time, by a signal."""
        self._server = server
        self._pause = pause
        self._random = random.Random(seed)
        cards = httpx.get(f"{server.url}/v1/models").json()["data"]
        self._chat = next((card["id"] for card in cards if card["kind"] == "chat"), None)
        self._speech = next((card["id"] for card in cards if card["kind"] == "speech"), None)
        rng = np.random.default_rng(seed)
        self._pictures = [_picture(rng, width, height) for width, height in ((64, 64), (224, 160), (448, 448))]
        self._video = _video(rng)
        self._clip = _clip()
        chat: list[Callable[[httpx.AsyncClient], Awaitable[None]]] = [
            self._chat_whole, self._chat_streamed, self._chat_video, self._chat_left, self._bad_picture, self._bad_body,
        ]  # fmt: skip
        speech: list[Callable[[httpx.AsyncClient], Awaitable[None]]] = [
            self._speech_live, self._speech_whole, self._speech_left, self._speech_socket, self._voice,
            self._bad_speech,
        ]  # fmt: skip
        self._kinds = (chat if self._chat else []) + (speech if self._speech else [])

    async def client(self, until: float) -> None:
        async with httpx.AsyncClient(base_url=self._server.url, timeout=120) as http:
            while time.monotonic() < until and not self.ended.is_set():
                kind = self._random.choice(self._kinds)
                name = kind.__name__.strip("_")
                began = time.monotonic()
                try:
                    await kind(http)
                except (httpx.HTTPError, OSError, AssertionError, json.JSONDecodeError) as error:
                    self.statuses[name, type(error).__name__] += 1
                    self.problems.append(f"{name}: {error!r}")
                self.seconds[name].append(time.monotonic() - began)
                await asyncio.sleep(self._random.expovariate(1 / self._pause))

    def _saw(self, kind: str, response: httpx.Response, *expected: int) -> bool:
        """Notes an answer's status; True for a 200. An honest refusal for load is no problem."""
        self.statuses[kind, str(response.status_code)] += 1
        overloaded = response.status_code == 503 and "retry-after" in response.headers
        if response.status_code not in expected and not overloaded:
            self.problems.append(f"{kind}: status {response.status_code}")
        return response.status_code == 200

    def _question(self, *media: dict[str, Any], **fields: Any) -> dict[str, Any]:
        text = {"type": "text", "text": self._random.choice(SENTENCES)}
        fields = {"max_tokens": self._random.randint(4, 48), "ignore_eos": True, **fields}
        return {"model": self._chat, "messages": [{"role": "user", "content": [*media, text]}], **fields}

    def _image(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": _data_url(self._random.choice(self._pictures), "image/jpeg")}}

    async def _chat_whole(self, http: httpx.AsyncClient) -> None:
        body = self._question(*(self._image() for _ in range(self._random.randrange(3))))
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
        fields = {"response_format": "pcm", "max_len": 20, **fields}
        return {"model": self._speech, "input": self._random.choice(SENTENCES), **fields}

    async def _speech_live(self, http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/audio/speech", json=self._text(min_len=12)) as response:
            end, silent = 0.0, 0.0
            async for piece in response.aiter_bytes():
                now = time.monotonic()
                silent += max(0.0, now - end) if end else 0.0
                end = max(end, now) + len(piece) / BYTES_PER_SECOND
            if self._saw("speech_live", response, 200):
                self.underruns += silent > 0

    async def _speech_whole(self, http: httpx.AsyncClient) -> None:
        name = self._random.choice(("mp3", "opus", "flac", "wav", "aac"))
        body = self._text(response_format=name, stream=False)
        self._saw("speech_whole", await http.post("/v1/audio/speech", json=body), 200)

    async def _speech_left(self, http: httpx.AsyncClient) -> None:
        body = self._text(input=" ".join(SENTENCES * 5), min_len=100, max_len=100)
        await self._leave(http, "speech_left", "/v1/audio/speech", body)

    async def _speech_socket(self, http: httpx.AsyncClient) -> None:
        url = self._server.url.replace("http", "ws", 1) + "/v1/audio/speech/stream"
        async with connect(url) as socket:
            await socket.send(json.dumps({"type": "session.config", **self._text(input=None)}))
            for word in self._random.choice(SENTENCES).split():
                await socket.send(json.dumps({"type": "input.text", "text": word + " "}))
            await socket.send(json.dumps({"type": "input.done"}))
            kind = ""
            while kind not in ("session.done", "error"):
                message = await asyncio.wait_for(socket.recv(), 60)
                kind = json.loads(message)["type"] if isinstance(message, str) else ""
            self.statuses["speech_socket", kind] += 1

    async def _voice(self, http: httpx.AsyncClient) -> None:
        form = {"name": f"voice {self._random.getrandbits(40)}", "consent": "agreed"}
        files = {"audio_sample": ("clip.wav", self._clip, "audio/wav")}
        kept = await http.post("/v1/audio/voices", data=form, files=files)
        if self._saw("voice", kept, 200):
            id_ = kept.json()["id"]
            self._saw("voice", await http.post("/v1/audio/speech", json=self._text(voice=id_)), 200)
            self._saw("voice", await http.delete(f"/v1/audio/voices/{id_}"), 200)

    async def _leave(self, http: httpx.AsyncClient, kind: str, path: str, body: dict[str, Any]) -> None:
        """Reads a few pieces and goes away."""
        pieces = self._random.randrange(1, 8)
        async with http.stream("POST", path, json=body) as response:
            self._saw(kind, response, 200)
            async for _ in response.aiter_bytes():
                pieces -= 1
                if not pieces:
                    break

    async def _bad_picture(self, http: httpx.AsyncClient) -> None:
        data = bytearray(self._random.choice(self._pictures))
        del data[self._random.randrange(20, 200) :]
        part = {"type": "image_url", "image_url": {"url": _data_url(bytes(data), "image/jpeg")}}
        self._saw("bad_picture", await http.post("/v1/chat/completions", json=self._question(part)), 400)

    async def _bad_body(self, http: httpx.AsyncClient) -> None:
        body = self._random.choice([b"{", b"[]", b'{"model": 3}', json.dumps(self._question(n=1000)).encode()])
        self._saw("bad_body", await http.post("/v1/chat/completions", content=body), 400)

    async def _bad_speech(self, http: httpx.AsyncClient) -> None:
        body = self._text(**self._random.choice([{"input": "..."}, {"speed": 99}, {"ref_audio": "data:,x"}]))
        self._saw("bad_speech", await http.post("/v1/audio/speech", json=body), 400)


def _data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _picture(rng: np.random.Generator, width: int, height: int) -> bytes:
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG")
    return buffer.getvalue()


def _video(rng: np.random.Generator) -> bytes:
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


async def drive(soak: Soak, server: Server, temporary: Path, minutes: float, clients: int) -> list[Footprint]:
    """Footprints from the end of the warm-up to the end of the load."""
    began = time.monotonic()
    until = began + max(60 * minutes, WARM_UP + 4 * SAMPLE_SECONDS)
    samples: list[Footprint] = []

    async def watch() -> None:
        await asyncio.sleep(WARM_UP)
        while True:
            samples.append(await asyncio.to_thread(footprint, server.pid, server.url, temporary))
            if len(samples) % SAMPLES_A_LINE == 1:
                minutes, requests = (time.monotonic() - began) / 60, sum(map(len, soak.seconds.values()))
                print(f"{minutes:.1f} min: {requests} requests, {len(soak.problems)} problems", flush=True)
            await asyncio.sleep(SAMPLE_SECONDS)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(soak.client(until) for _ in range(clients)))
    watcher.cancel()
    return samples


async def settle(server: Server, temporary: Path, seconds: float) -> Footprint:
    """The footprint when no gauge shows work any more, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        await asyncio.sleep(1.5)
        now = await asyncio.to_thread(footprint, server.pid, server.url, temporary)
        if not now.busy or time.monotonic() > deadline:
            return now


def thirds(samples: Sequence[Footprint], kind: Literal["resident_bytes", "threads"]) -> dict[str, list[float]]:
    """Medians of the run's thirds, by role."""
    edges = [len(samples) * part // 3 for part in range(4)]
    parts = [samples[begin : max(begin + 1, end)] for begin, end in pairwise(edges)]
    roles = sorted({role for sample in samples for role in getattr(sample, kind)})
    return {
        role: [statistics.median(getattr(sample, kind).get(role, 0) for sample in part) for part in parts]
        for role in roles
    }


def faults(before: Footprint, samples: Sequence[Footprint], after: Footprint) -> list[str]:
    """What did not return to where it was, or grew all along. before: idle after a warm-up; after: idle at the end."""
    found = after.left_over(before)
    for role, (early, _, late) in thirds(samples, "threads").items():
        if late > early * (1 + GROWTH_RATIO):
            found.append(f"threads of {role}: {early:g} -> {late:g}")
    for role, (early, _, late) in thirds(samples, "resident_bytes").items():
        if late > early * (1 + GROWTH_RATIO) + GROWTH_BYTES:
            found.append(f"resident bytes of {role}: {early:.0f} -> {late:.0f}")
    return found


async def run(server: Server, temporary: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    warm = Soak(server, arguments.pause / 2, seed=1)
    await drive(warm, server, temporary, 0, arguments.clients)
    before = await settle(server, temporary, SETTLE_SECONDS)
    soak = Soak(server, arguments.pause, seed=2)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, soak.ended.set)
    began = time.monotonic()
    samples = await drive(soak, server, temporary, arguments.minutes, arguments.clients)
    minutes = (time.monotonic() - began) / 60
    after = await settle(server, temporary, SETTLE_SECONDS)
    rows = []
    for kind, seconds in sorted(soak.seconds.items()):
        outcomes = {status: count for (name, status), count in soak.statuses.items() if name == kind}
        ordered = sorted(seconds)
        row = {"kind": kind, "requests": len(seconds), "p50_s": ordered[len(ordered) // 2]}
        rows.append({**row, "p95_s": ordered[int(len(ordered) * 0.95)], "outcomes": outcomes})
    return {
        "rows": rows,
        "minutes": round(minutes, 2),
        "faults": [*faults(before, samples, after), *(f"request: {problem}" for problem in soak.problems)],
        "underruns": soak.underruns,
        "restarts": server.metric("reprise_engine_restarts_total"),
        "before": _facts(before),
        "after": _facts(after),
        "threads_in_thirds": thirds(samples, "threads"),
        "peak_resident_bytes": {
            role: max(sample.resident_bytes.get(role, 0) for sample in samples) for role in after.resident_bytes
        },
    }


def _facts(state: Footprint) -> dict[str, Any]:
    return {
        "processes": state.processes,
        "descriptors": state.descriptors,
        "threads": state.threads,
        "tasks": state.tasks,
        "resident_bytes": state.resident_bytes,
        "busy": list(state.busy),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.5, help="mean seconds between a client's requests")
    parser.add_argument("--checkpoint", action="append", default=[], help="a name of benchmarks/checkpoints.py")
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        temporary = folder / "tmp"
        temporary.mkdir()
        flags = [*arguments.flags, "--voices-dir", str(folder / "voices")]
        if arguments.checkpoint:
            flags += random_weights([make(name, folder / "models") for name in arguments.checkpoint])
        server = stack.enter_context(serve(*flags, environment={"TMPDIR": str(temporary)}))
        result = asyncio.run(run(server, temporary, arguments))
    rows = result.pop("rows")
    facts = {"clients": arguments.clients, "pause": arguments.pause, **result}
    device = "gpu" if torch.cuda.is_available() else "cpu"
    print(write(f"soak_{device}", rows, flags=arguments.flags, checkpoints=arguments.checkpoint, **facts))
    print(table([{key: str(value) for key, value in row.items()} for row in rows]))
    print("\n".join(facts["faults"]) or "nothing is left over")
    return 1 if facts["faults"] or facts["restarts"] else 0


if __name__ == "__main__":
    sys.exit(main())
