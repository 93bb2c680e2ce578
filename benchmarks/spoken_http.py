"""Spoken answers about a picture, through HTTP: the first sound that is not silence at the client, and underruns.

    python -m benchmarks.spoken_http [--tiny] [-- server flags]

A JPEG of 448 x 448 and a question; the answer is read from a script (benchmarks/servers/scripted.py), so that its first
clause has 8 tokens and all of it 40, each decoded one by one. Full size and random weights; --tiny serves the embedded
models. `alone` asks one at a time, `arrivals` 32 conversations at random moments of a minute, `burst` all 32 at once.
The server needs PyAV: it levels the built-in voice and turns 48 kHz into pcm16 at 24 kHz.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.checkpoints.published import make
from benchmarks.measure.record import Row, record
from benchmarks.servers.process import Server, random_weights, serve
from benchmarks.servers.scripted import SCRIPT

RATE = 24_000
SILENCE = 33
"""16-bit samples up to this are silence: -60 dBFS."""
SEGMENT_PATCHES = 20
"""Of 160 ms, for each segment: untrained speech does not end by itself."""
TIMEOUT = 300.0


@dataclass(frozen=True)
class Scale:
    """repeats alone; conversations, and seconds in which they arrive; side of the picture."""

    repeats: int
    conversations: int
    seconds: float
    side: int


FULL = Scale(20, 32, 60.0, 448)
TINY = Scale(2, 2, 2.0, 112)


@dataclass(frozen=True)
class Heard:
    """Seconds from the request: to the first text, the first audio, the first sound that is not silence as a player
    would play it, and how long the player had to wait in all."""

    text: float
    audio: float
    sound: float
    underrun: float


def body(models: Sequence[str], side: int, number: int) -> dict[str, Any]:
    noise = np.random.default_rng(number).integers(0, 256, (side // 8, side // 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((side, side)).save(file, "JPEG", quality=90)
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    text = f"Question {number}: what is to be seen in this picture? Answer in whole sentences."
    return {
        "model": models[0],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
            }
        ],
        "max_tokens": len(SCRIPT),
        "ignore_eos": True,
        "stream": True,
        "seed": number,
        "modalities": ["text", "audio"],
        "audio": {"voice": "nova", "format": "pcm16", "model": models[1], "max_len": SEGMENT_PATCHES},
    }


async def listen(client: httpx.AsyncClient, asked: dict[str, Any]) -> Heard:
    """One answer, played as it comes."""
    began = time.monotonic()
    text = audio = sound = 0.0
    played_to, underrun = 0.0, 0.0
    async with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
        if answer.status_code != 200:
            raise RuntimeError((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            now = time.monotonic() - began
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(line)
            for choice in event["choices"]:
                spoken = choice["delta"].get("audio") or {}
                if spoken.get("transcript") and not text:
                    text = now
                if not spoken.get("data"):
                    continue
                samples = np.frombuffer(base64.b64decode(spoken["data"]), "<i2").astype(int)
                if not audio:
                    audio = played_to = now
                late = max(0.0, now - played_to)
                underrun, played_to = underrun + late, played_to + late
                loud = np.flatnonzero(np.abs(samples) > SILENCE)
                if not sound and loud.size:
                    sound = played_to + int(loud[0]) / RATE
                played_to += len(samples) / RATE
    return Heard(text, audio, sound, underrun)


async def conversations(server: Server, models: Sequence[str], side: int, starts: Sequence[float]) -> list[Heard]:
    """One answer for each start, in seconds from now; each client has a connection of its own."""
    bodies = [body(models, side, 1000 * len(starts) + number) for number in range(len(starts))]

    async def one(start: float, asked: dict[str, Any]) -> Heard:
        await asyncio.sleep(start)
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:
            return await listen(client, asked)

    return list(await asyncio.gather(*map(one, starts, bodies)))


async def alone(server: Server, models: Sequence[str], scale: Scale) -> list[Heard]:
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:
        return [await listen(client, body(models, scale.side, number)) for number in range(scale.repeats)]


def row(traffic: str, heard: Sequence[Heard]) -> Row:
    def ms(values: list[float]) -> dict[str, float]:
        p50, p95 = np.percentile(values, [50, 95])
        return {"p50": 1e3 * float(p50), "p95": 1e3 * float(p95), "max": 1e3 * max(values)}

    columns = {
        f"{name}_{key}_ms": value
        for name in ("text", "audio", "sound")
        for key, value in ms([getattr(one, name) for one in heard]).items()
    }
    silent = sum(not one.sound for one in heard)
    underruns = sum(one.underrun > 0 for one in heard)
    return {"traffic": traffic, "answers": len(heard), "silent": silent, **columns, "underruns": underruns}


def measured(server: Server, models: Sequence[str], scale: Scale) -> Iterator[tuple[Row, dict[str, Any]]]:
    asyncio.run(conversations(server, models, scale.side, [0.0]))  # makes the voice, too
    server.wait_until_idle()
    yield row("alone", asyncio.run(alone(server, models, scale))), server.facts()
    moments = random.Random(0)
    starts = sorted(moments.uniform(0, scale.seconds) for _ in range(scale.conversations))
    yield row("arrivals", asyncio.run(conversations(server, models, scale.side, starts))), server.facts()
    burst = conversations(server, models, scale.side, [0.0] * scale.conversations)
    yield row("burst", asyncio.run(burst)), server.facts()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the embedded models and few requests, to try the script")
    given = sys.argv[1:]
    own = given.index("--") if "--" in given else len(given)
    tiny, more = parser.parse_args(given[:own]).tiny, given[own + 1 :]
    scale = TINY if tiny else FULL
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--voices-dir", f"{folder}/voices", "--log-level", "warning", *more]
        if not tiny:
            flags += random_weights([make(name, Path(folder)) for name in ("qwen2_vl_2b", "voxcpm2")])
        with serve(*flags, program=["benchmarks.servers.scripted", "serve"]) as server:
            models = sorted(server.models(), key=lambda name: "voxcpm2" in name)
            result = "spoken_http_tiny" if tiny else "spoken_http"
            record(result, measured(server, models, scale), side=scale.side, tokens=len(SCRIPT), flags=more)


if __name__ == "__main__":
    main()
