"""Recordings, live speech and spoken conversations through HTTP: a recogniser, a chat model and a voice on one GPU.

    python -m benchmarks.hearing [recognise] [live] [turns] [beside] [--tiny]

recognise: transcriptions of 30 s, alone and eight at a time. live: sessions that commit each second of a microphone
when it has passed; until its text. turns: conversations whose user speaks for 2.4 s and listens; from the detected end
of a turn to the first sound of the answer; only for these is a voice hosted. beside: vision chat alone, and beside
live sessions.

Full size and random weights; --tiny takes miniatures, to try the script. Transcripts have the tokens of speech
(benchmarks/servers/short_transcripts.py), 100 for 30 s; answers are a clause of 8 and 3.2 s of sound. What is said is
tests/golden/qwen3_asr/audio/words.wav, each time at another loudness in other noise, so that no cache has it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import tempfile
import time
import wave
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from benchmarks.checkpoints.published import GOLDEN, make
from benchmarks.checkpoints.served import TINY_MODEL, served_directory
from benchmarks.loads.rows import row_of
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import Row, record
from benchmarks.servers.process import ANSWER_TIMEOUT, Server, random_weights, serve
from benchmarks.servers.short_transcripts import PROGRAM
from service.cli.bench.run import run_load
from service.cli.bench.traffic import ChatLoad, Record
from service.hub.catalog import OPENAI_PCM_RATE
from service.media.reference_audio import resample

VOICE, SIDE, TOKENS = "voxcpm2", 448, 128
ANSWER_TOKENS, ANSWER_PATCHES = 8, 20
PIECE = 0.1
"""Seconds of audio in an event of a microphone."""
SILENCE = bytes(2 * round(PIECE * OPENAI_PCM_RATE))
APPEND, COMMIT, STOPPED = (f"input_audio_buffer.{name}" for name in ("append", "commit", "speech_stopped"))
HEARD, FAILED = (f"conversation.item.input_audio_transcription.{name}" for name in ("completed", "failed"))
SAID = "response.output_audio"
STAGES = {HEARD: "transcript", f"{SAID}_transcript.delta": "text", f"{SAID}.delta": "sound"}
"""What is timed of a turn: the first event of each type."""
ENDS = {"transcript": (HEARD, FAILED), "sound": ("response.done", "conversation.item.deleted")}
"""Events that end a turn, by the stage without which it has failed."""
SEEDS = count()


@dataclass(frozen=True)
class Scale:
    """recordings: requests, each of `seconds`, by how many are open. listeners: live sessions, for `live` seconds.
    talks: turns of each conversation by how many there are. chats: that are open, of `requests`, beside `beside` live
    sessions."""

    recogniser: str
    chat: str
    seconds: float
    recordings: dict[int, int]
    listeners: int
    live: float
    talks: dict[int, int]
    chats: int
    requests: int
    beside: int


FULL = Scale("qwen3_asr_1_7b", "qwen2_vl_2b", 30.0, {1: 20, 8: 64}, 32, 20.0, {1: 5, 16: 3}, 32, 384, 8)
TINY = Scale("qwen3_asr", TINY_MODEL, 3.0, {1: 2, 2: 4}, 2, 2.0, {1: 1, 2: 1}, 2, 4, 1)


@cache
def words(rate: int) -> np.ndarray:
    """float32 samples, resampled once: the loop that speaks must keep time."""
    with wave.open(str(GOLDEN / "qwen3_asr/audio/words.wav")) as file:
        said = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
        return resample(said, file.getframerate(), rate)


def speech(seconds: float = 0.0, rate: int = OPENAI_PCM_RATE) -> bytes:
    """16-bit samples of new speech, repeated to this length; 0: once."""
    rng, said = np.random.default_rng(next(SEEDS)), words(rate)
    samples = np.resize(said, round(seconds * rate)) if seconds else said
    noisy = rng.uniform(0.5, 0.9) * samples + rng.normal(0, 1e-3, len(samples))
    return bytes((32767 * noisy.clip(-1, 1)).astype("<i2").tobytes())


@dataclass(eq=False)
class Session:
    """A Realtime session. last: the stage that its turns end with. begun: when the open turns began. seen: seconds from
    there, by stage."""

    socket: ClientConnection
    last: str
    begun: deque[float] = field(default_factory=deque)
    seen: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STAGES.values()})
    ended: int = 0

    async def tell(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def speak(self, data: bytes) -> None:
        """Send samples as a microphone does."""
        due = time.perf_counter()
        for start in range(0, len(data), len(SILENCE)):
            due += PIECE
            await asyncio.sleep(due - time.perf_counter())
            await self.tell(APPEND, audio=base64.b64encode(data[start : start + len(SILENCE)]).decode())

    async def read(self) -> None:
        told: set[str] = set()
        async for message in self.socket:
            event, now = json.loads(message), time.perf_counter()
            kind = event["type"]
            if kind == "error":
                raise RuntimeError(event["error"]["message"])
            if kind == STOPPED:
                self.begun.append(now)
            if (stage := STAGES.get(kind)) and stage not in told:
                self.seen[stage].append(now - self.begun[0])
                told.add(stage)
            if kind in ENDS[self.last]:
                self.ended += 1
                self.begun.popleft()
                told.clear()


@asynccontextmanager
async def session(server: Server, query: str, last: str, **fields: Any) -> AsyncIterator[Session]:
    url = f"{server.url.replace('http', 'ws', 1)}/v1/realtime?{query}"
    async with asyncio.timeout(ANSWER_TIMEOUT), connect(url, max_size=None) as socket, asyncio.TaskGroup() as tasks:
        one = Session(socket, last)
        await one.tell("session.update", session=fields)
        reading = tasks.create_task(one.read())
        yield one
        reading.cancel()


async def listen(server: Server, scale: Scale, number: int, during: Coroutine[Any, Any, Any]) -> list[Session]:
    """Live sessions, as many as `number`, until `during` ends."""
    task = asyncio.create_task(during)

    async def one(index: int) -> Session:
        given = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
        query = f"intent=transcription&model={scale.recogniser}"
        async with session(server, query, "transcript", **given) as live:
            await asyncio.sleep(index / number)
            while not task.done():
                await live.speak(speech(1.0))
                await live.tell(COMMIT)
                live.begun.append(time.perf_counter())
            while live.begun:
                await live.speak(SILENCE)
        return live

    _, *sessions = await asyncio.gather(task, *map(one, range(number)))
    return sessions


async def converse(server: Server, scale: Scale, number: int, turns: int) -> list[Session]:
    """Conversations, begun within 6 s, whose user goes on when the answer was played."""

    async def one(index: int) -> Session:
        heard, said = {"transcription": {"model": scale.recogniser}}, {"max_len": ANSWER_PATCHES}
        given = {"type": "realtime", "max_output_tokens": ANSWER_TOKENS, "audio": {"input": heard, "output": said}}
        async with session(server, f"model={scale.chat}", "sound", **given) as talk:
            await talk.speak(SILENCE * (1 + 60 * index // number))
            for turn in range(turns):
                await talk.speak(speech())
                while talk.ended <= turn:
                    await talk.speak(SILENCE)
                await talk.speak(SILENCE * round(0.16 * ANSWER_PATCHES / PIECE))
        return talk

    return await asyncio.gather(*map(one, range(number)))


def row(part: str, sessions: Sequence[Session]) -> Row:
    failed = sum(one.ended - len(one.seen[one.last]) for one in sessions)
    found: Row = {"part": part, "at_once": len(sessions), "failed": failed}
    for stage in STAGES.values():
        if times := [seconds for one in sessions for seconds in one.seen[stage]]:
            found |= {"succeeded": len(times), **quantiles(stage, times)}
    return found


def quantiles(name: str, seconds: Sequence[float]) -> Row:
    return {f"{name}_p{share}_ms": 1e3 * float(np.percentile(seconds, share)) for share in (50, 95)}


def recognise(server: Server, scale: Scale) -> Iterator[Row]:
    """encoder_ms: the mean step of log-mel and tower, by the server."""

    def ask(client: httpx.Client) -> tuple[float, int]:
        sink = io.BytesIO()
        with wave.open(sink, "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes(speech(scale.seconds, 16_000))
        given, began = {"file": ("speech.wav", sink.getvalue())}, time.perf_counter()
        answer = client.post("/v1/audio/transcriptions", files=given, data={"model": scale.recogniser})
        return time.perf_counter() - began, answer.raise_for_status().json()["usage"]["output_tokens"]

    def encoder() -> np.ndarray:
        """Seconds of the encoder's steps, and their number."""
        names = (f"reprise_step_duration_seconds_{name}" for name in ("sum", "count"))
        return np.array([server.metric(name, kind="encoder") for name in names])

    http = httpx.Client(base_url=server.url, timeout=ANSWER_TIMEOUT, trust_env=False)
    for at_once, number in scale.recordings.items():
        before = encoder()
        with ThreadPoolExecutor(at_once) as pool:
            seconds, tokens = zip(*pool.map(ask, [http] * number), strict=True)
        spent, steps = encoder() - before
        found: Row = {"part": "recognise", "at_once": at_once, "succeeded": number, **quantiles("transcript", seconds)}
        yield found | {"tokens": float(np.mean(tokens)), "encoder_ms": 1e3 * spent / steps}


def live(server: Server, scale: Scale) -> Iterator[Row]:
    yield row("live", asyncio.run(listen(server, scale, scale.listeners, asyncio.sleep(scale.live))))


def turns(server: Server, scale: Scale) -> Iterator[Row]:
    for number, each in scale.talks.items():
        yield row("turns", asyncio.run(converse(server, scale, number, each)))


def beside(server: Server, scale: Scale) -> Iterator[Row]:
    """Each twice, in turn, since hosts drift."""
    shape: dict[str, Any] = {"width": SIDE, "height": SIDE, "text_words": 32, "output_tokens": TOKENS}
    shape |= {"concurrency": scale.chats, "requests": scale.requests}
    for listeners in (0, scale.beside) * 2:
        load, found = ChatLoad(url=server.url, model=scale.chat, seed=next(SEEDS), **shape), list[Record]()
        chatting = asyncio.to_thread(run_load, load, processes=min(4, scale.chats), report=found.append)
        sessions = asyncio.run(listen(server, scale, listeners, chatting))
        yield {"part": "beside", "at_once": scale.chats, "listeners": listeners, **row_of(load, found)}
        if sessions:
            yield row("beside chat", sessions)


RUNS = {one.__name__: one for one in (recognise, live, turns, beside)}


def measured(parts: Sequence[str], scale: Scale, tiny: bool) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row, and the facts that the server reports at that time; behind a little of everything, other contents."""
    recordings, talks = {max(scale.recordings): max(scale.recordings)}, {max(scale.talks): 1}
    warm = replace(scale, recordings=recordings, live=2.0, talks=talks, requests=scale.chats)
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        names = [scale.recogniser, *([VOICE] if "turns" in parts else [])]
        others = [GOLDEN / name if tiny else make(name, parent) for name in names]
        flags = [*random_weights([served_directory(scale.chat, parent), *others]), "--voices-dir", f"{folder}/voices"]
        with serve(*flags, program=PROGRAM) as server:
            for part in parts:
                list(RUNS[part](server, warm))
            server.wait_until_idle()
            for part in parts:
                yield from ((found, server.facts()) for found in RUNS[part](server, scale))


def main(words: Sequence[str] | None = None) -> Path:
    parser = command_line("benchmarks.hearing", __doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(RUNS))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(words)
    if unknown := [part for part in options.parts if part not in RUNS]:
        parser.error(f"unknown part {unknown[0]!r}; known are {', '.join(RUNS)}")
    scale = TINY if options.tiny else FULL
    rows = measured(options.parts or list(RUNS), scale, options.tiny)
    return record("hearing_tiny" if options.tiny else "hearing", rows, recogniser=scale.recogniser, chat=scale.chat)


if __name__ == "__main__":
    main()
