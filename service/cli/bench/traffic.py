"""A load: its shape in time, its requests, one timed request of each kind, and the measurements of each."""

from __future__ import annotations

import base64
import io
import ssl
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import httpcore
import httpx
import msgspec
import numpy as np
from msgspec import Meta
from PIL import Image

from service.media.audio_formats import NAMES


class Load(msgspec.Struct, frozen=True, tag_field="endpoint"):
    """Requests against one server.

    Closed loop: `concurrency` requests are always open. Open loop: `rate` requests a second, Poisson arrivals.
    `warmup` extra requests run first, one by one, and are not measured.
    """

    url: str
    model: str
    requests: int
    seed: int
    concurrency: int = 0
    rate: float = 0.0
    warmup: int = 2
    api_key: str | None = None
    timeout: float = 300.0


def _option(description: str, flag: str = "", *, ge: float | None = None, le: float | None = None) -> Meta:
    """Of a field that is an option of `reprise bench`, named as the field unless there is a flag."""
    return Meta(description=description, ge=ge, le=le, extra={"flag": flag})


class ChatLoad(Load, frozen=True, tag="chat"):
    """Chat requests of new random JPEG pictures and new random text each, so that no cache can hit but for what a load
    asks for: a system prompt that all requests share, and conversations, each turn of which has a Record.
    """

    images: Annotated[int, _option("Pictures in a request.", ge=0)] = 1
    width: Annotated[int, _option("Width of a picture in pixels.", ge=28)] = 448
    height: Annotated[int, _option("Height of a picture in pixels.", ge=28)] = 448
    text_characters: Annotated[int, _option("Characters of random text in a request.", "--text", ge=1)] = 128
    text_words: Annotated[int, _option("Ordinary words in a request, instead of --text.", "--words", ge=0)] = 0
    system_tokens: Annotated[
        int, _option("Words of a system prompt that all requests share, about a token each.", ge=0)
    ] = 0
    system_message: Annotated[
        bool, _option("Send a system message; without one the model's template applies.", "--system/--no-system")
    ] = True
    turns: Annotated[
        int, _option("Turns of a conversation about its pictures; counts and rates then count conversations.", ge=1)
    ] = 1
    output_tokens: Annotated[int, _option("Exact number of tokens of each answer.", "--tokens", ge=1)] = 64
    temperature: Annotated[float, _option("Sampling temperature; 0: the most probable token.", ge=0, le=2)] = 0.0
    json_schema: Annotated[str, _option("A file with the JSON schema that all answers follow.")] = ""
    """The schema itself, as text."""


class SpeechLoad(Load, frozen=True, tag="speech"):
    """Speech requests with new random text each."""

    text_words: Annotated[int, _option("Words in a text.", "--words", ge=1)] = 12
    seconds: Annotated[
        float, _option("Seconds of audio in each answer, if the text is long enough; 0: the model decides.", ge=0)
    ] = 0.0
    response_format: Annotated[str, _option(f"{NAMES}.", "--format")] = "pcm"
    solver_steps: Annotated[int | None, _option("Solver steps (inference_timesteps).", "--steps")] = None
    voices: Annotated[tuple[str, ...], _option("Voice; of several, one is drawn for each request.", "--voice")] = (
        "default",
    )


AnyLoad = ChatLoad | SpeechLoad


class Record(msgspec.Struct):
    """The client's measurements of one request. Times in seconds; `start` is on the machine's wall clock.

    first: until the first token or the first audio byte. duration: until the last byte.
    tokens: completion tokens; gaps: between consecutive events that carried output.
    audio: seconds of audio; underrun: seconds for which a player that began at the first byte had nothing to play.
    delay: open loop: from the moment that was drawn for the request until its client sent it.
    turn: of a conversation, from 1; a later one follows its answer at once and has no delay.
    message: the server's words on a refusal, or what the client saw of a failure.
    """

    start: float
    status: int
    first: float = 0.0
    duration: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    gaps: list[float] = []
    audio: float = 0.0
    underrun: float = 0.0
    delay: float = 0.0
    turn: int = 1
    error: Literal["", "refused", "failed"] = ""
    message: str = ""


class Assignment(msgspec.Struct, frozen=True):
    """One client process's share of a load: send at `offsets` (seconds after the beginning, open loop) or keep `lanes`
    requests open until `count` are done (closed loop), beginning `after` seconds later than the others and sending
    nothing from `until` seconds on after their beginning (0: no end)."""

    load: AnyLoad
    seed: int
    lanes: int
    count: int
    offsets: tuple[float, ...] = ()
    after: float = 0.0
    until: float = 0.0


WORDS = tuple(Path(__file__).with_name("english.words").read_text("utf-8").split())


def text(rng: np.random.Generator, count: int) -> str:
    return " ".join(rng.choice(WORDS, count))


FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)
"""No complete answer: not connected, cut off, or not HTTP."""


@cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)


class Connection:
    """The connection of one lane of a load, opened again for the next request if the server has closed it.

    By httpcore: the processor time of httpx for a request, a millisecond, is as much as an idle server takes for its
    part."""

    def __init__(self, load: Load) -> None:
        """Raises ValueError for what is not the address of a server."""
        url = httpx.URL(load.url)
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"url: {load.url!r} is not the address of a server")
        tls = _tls() if url.scheme == "https" else None
        self._pool = httpcore.AsyncConnectionPool(tls, max_connections=1)
        self._url = str(url.copy_with(userinfo=b"")).rstrip("/")
        self._headers: dict[bytes | str, bytes | str] = {
            "host": url.netloc.decode(),
            "content-type": "application/json",
        }
        if load.api_key:
            self._headers["authorization"] = f"Bearer {load.api_key}"
        self._extensions = {"timeout": dict.fromkeys(("connect", "read", "write"), load.timeout)}

    def stream(self, method: str, path: str, content: bytes = b"") -> AbstractAsyncContextManager[httpcore.Response]:
        """Raises one of FAILURES, as the reading of the response's body does."""
        url, headers = self._url + path, self._headers
        return self._pool.stream(method, url, headers=headers, content=content, extensions=self._extensions)

    async def warm_up(self) -> None:
        """Opens the connection with one GET, so that no measured request is the first. Errors surface in the next
        request."""
        with suppress(*FAILURES):
            async with self.stream("GET", "/health") as response:
                await response.aread()

    async def close(self) -> None:
        await self._pool.aclose()


PATCH_SECONDS = 0.16
_SPOKEN = tuple(
    "river stone light copper window quiet garden seven orange falcon winter paper signal morning coast".split()  # noqa: SIM905
)
SYSTEM_SEED = 20_000
"""Seed of the shared system prompt, the same in every load and every client process."""


def payload(load: AnyLoad, rng: np.random.Generator) -> dict[str, Any]:
    """JSON body of a new request; everything in it is drawn from `rng`."""
    return _chat_payload(load, rng) if isinstance(load, ChatLoad) else _speech_payload(load, rng)


def questions(load: AnyLoad, rng: np.random.Generator) -> list[str]:
    """The questions that follow a new request; none unless the load is of conversations."""
    return [_asked(load, rng) for _ in range(load.turns - 1)] if isinstance(load, ChatLoad) else []


async def converse(
    connection: Connection, load: AnyLoad, body: bytes, questions: Sequence[str]
) -> AsyncGenerator[Record]:
    """Sends a prepared body and times its answer, then each question with the conversation so far. An answer that fails
    ends the conversation."""
    for turn in range(len(questions) + 1):
        said: list[str] = []
        record = await _send(connection, load, body, said)
        record.turn = turn + 1
        yield record
        if record.error:
            return
        if turn < len(questions):
            asked = msgspec.json.decode(body)
            asked["messages"].append({"role": "assistant", "content": "".join(said)})
            asked["messages"].append({"role": "user", "content": questions[turn]})
            body = msgspec.json.encode(asked)


async def _send(connection: Connection, load: AnyLoad, body: bytes, said: list[str]) -> Record:
    """said: receives the pieces of a chat answer."""
    record = Record(start=time.time(), status=0)
    begin = time.perf_counter()
    try:
        path = "/v1/chat/completions" if isinstance(load, ChatLoad) else "/v1/audio/speech"
        async with connection.stream("POST", path, body) as response:
            record.status = response.status
            if record.status != 200:
                await _refused(response, record)
            elif isinstance(load, ChatLoad):
                await _time_chat(response, record, begin, said)
            else:
                await _time_speech(response, record, begin, load)
            record.duration = time.perf_counter() - begin
    except (*FAILURES, msgspec.DecodeError) as error:
        record.error = "failed"
        record.status = record.status or (408 if isinstance(error, httpcore.TimeoutException) else 0)
        record.message = str(error) or type(error).__name__
    return record


def picture(rng: np.random.Generator, width: int, height: int) -> bytes:
    """A JPEG with structure at several scales, so that decoding it costs about as much as a photograph."""
    layers = []
    for cells in (4, 16, 64):
        noise = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        layers.append(Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR))
    mean = Image.blend(Image.blend(layers[0], layers[1], 1 / 2), layers[2], 1 / 3)
    sink = io.BytesIO()
    mean.save(sink, "JPEG", quality=85)
    return sink.getvalue()


def _chat_payload(load: ChatLoad, rng: np.random.Generator) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for _ in range(load.images):
        data = base64.b64encode(picture(rng, load.width, load.height)).decode()
        content.append({"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}})
    content.append({"type": "text", "text": _asked(load, rng)})
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if load.system_message:
        # A separate system turn keeps even the first page of the prefix index from being shared.
        messages.insert(0, {"role": "system", "content": shared_prompt(load) or _letters(rng, 16)})
    guided = {"structured_outputs": {"json": msgspec.json.decode(load.json_schema)}} if load.json_schema else {}
    return {
        "model": load.model,
        "messages": messages,
        "max_completion_tokens": load.output_tokens,
        "ignore_eos": True,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **guided,
    }


def shared_prompt(load: ChatLoad) -> str:
    """The system prompt of all requests; "" if each has its own, or none."""
    return text(np.random.default_rng(SYSTEM_SEED), load.system_tokens) if load.system_message else ""


def _asked(load: ChatLoad, rng: np.random.Generator) -> str:
    return text(rng, load.text_words) if load.text_words else _letters(rng, load.text_characters)


def _letters(rng: np.random.Generator, count: int) -> str:
    return "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz0123456789"), count))


async def _time_chat(response: httpcore.Response, record: Record, begin: float, said: list[str]) -> None:
    last = begin
    async for event in _events(response):
        if "error" in event:
            record.error = "failed"
        if usage := event.get("usage"):
            record.tokens = usage["completion_tokens"]
            record.prompt_tokens = usage["prompt_tokens"]
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        choice = event["choices"][0] if event.get("choices") else None
        # The event with the finish reason follows the last output at once: this is not a gap between tokens.
        output = (choice["delta"].get("content") or choice["delta"].get("reasoning_content") or "") if choice else ""
        if output or (choice and choice["finish_reason"] and not record.first):
            said.append(output)
            now = time.perf_counter()
            if not record.first:
                record.first = now - begin
            else:
                record.gaps.append(now - last)
            last = now


async def _events(response: httpcore.Response) -> AsyncGenerator[dict[str, Any]]:
    """The payloads of a stream of server-sent events, to the end of the answer."""
    held = b""
    async for piece in response.aiter_stream():
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            payload = line.removeprefix(b"data: ").strip()
            if line.startswith(b"data: ") and payload != b"[DONE]":
                yield msgspec.json.decode(payload)


async def _refused(response: httpcore.Response, record: Record) -> None:
    record.error = "refused"
    said = await response.aread()
    try:
        record.message = msgspec.json.decode(said)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        record.message = said.decode(errors="replace")[:200]


def _speech_payload(load: SpeechLoad, rng: np.random.Generator) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": load.model,
        "input": " ".join(rng.choice(_SPOKEN, load.text_words)) + ".",
        "voice": load.voices[0],
        "response_format": load.response_format,
        "seed": int(rng.integers(1 << 31)),
    }
    if len(load.voices) > 1:
        body["voice"] = str(rng.choice(load.voices))
    if load.seconds:
        body["min_len"] = body["max_len"] = _patches(load)
    if load.solver_steps:
        body["inference_timesteps"] = load.solver_steps
    return body


async def _time_speech(response: httpcore.Response, record: Record, begin: float, load: SpeechLoad) -> None:
    """pcm is counted exactly; of other formats the audio is what a fixed number of patches gives, underruns unknown."""
    bytes_per_second = 2 * int(dict(response.headers).get(b"x-sample-rate", 48000))
    pcm = load.response_format == "pcm"
    received, playback, last = 0.0, 0.0, begin
    async for chunk in response.aiter_stream():
        now = time.perf_counter()
        if not record.first:
            record.first = now - begin
            playback = now
        else:
            record.gaps.append(now - last)
            if pcm and (late := now - playback - received) > 0:
                record.underrun += late
                playback += late
        last = now
        received += len(chunk) / bytes_per_second
    record.audio = received if pcm else _patches(load) * PATCH_SECONDS


def _patches(load: SpeechLoad) -> int:
    """Tokens of an answer of fixed length; 0 if the model decides."""
    return max(1, round(load.seconds / PATCH_SECONDS)) if load.seconds else 0
