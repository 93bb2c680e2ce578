"""One timed request of each kind."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import h11
import msgspec
import numpy as np
from PIL import Image

from service.cli.bench.connection import Connection, ConnectionFailed
from service.cli.bench.spec import AnyLoad, ChatLoad, Record, SpeechLoad
from service.cli.bench.words import text

PATCH_SECONDS = 0.16
_SPOKEN = (
    "river",
    "stone",
    "light",
    "copper",
    "window",
    "quiet",
    "garden",
    "seven",
    "orange",
    "falcon",
    "winter",
    "paper",
    "signal",
    "morning",
    "coast",
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
            body = _continued(body, "".join(said), questions[turn])


def _continued(body: bytes, answer: str, question: str) -> bytes:
    asked = msgspec.json.decode(body)
    asked["messages"] += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return msgspec.json.encode(asked)


async def _send(connection: Connection, load: AnyLoad, body: bytes, said: list[str]) -> Record:
    """said: receives the pieces of a chat answer."""
    record = Record(start=time.time(), status=0)
    try:
        if isinstance(load, ChatLoad):
            await _time_chat(connection, body, record, said)
        else:
            await _time_speech(connection, body, record, load)
    except (ConnectionFailed, TimeoutError, msgspec.DecodeError) as error:
        record.error = "failed"
        record.status = record.status or (408 if isinstance(error, TimeoutError) else 0)
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
    guided = {"guided_json": msgspec.json.decode(load.json_schema)} if load.json_schema else {}
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


async def _time_chat(connection: Connection, body: bytes, record: Record, said: list[str]) -> None:
    begin = last = time.perf_counter()
    response = await connection.request("POST", "/v1/chat/completions", body)
    record.status = response.status_code
    if response.status_code != 200:
        await _refused(connection, record)
        record.duration = time.perf_counter() - begin
        return
    async for event in _events(connection):
        if "error" in event:
            record.error = "failed"
        if usage := event.get("usage"):
            record.tokens = usage["completion_tokens"]
            record.prompt_tokens = usage["prompt_tokens"]
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        choice = event["choices"][0] if event.get("choices") else None
        # The event with the finish reason follows the last output at once: this is not a gap between tokens.
        output = _output(choice["delta"]) if choice else ""
        if output or (choice and choice["finish_reason"] and not record.first):
            said.append(output)
            now = time.perf_counter()
            if not record.first:
                record.first = now - begin
            else:
                record.gaps.append(now - last)
            last = now
    record.duration = time.perf_counter() - begin


async def _events(connection: Connection) -> AsyncGenerator[dict[str, Any]]:
    """The payloads of a stream of server-sent events, to the end of the answer."""
    held = b""
    async for piece in connection.body():
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            payload = line.removeprefix(b"data: ").strip()
            if line.startswith(b"data: ") and payload != b"[DONE]":
                yield msgspec.json.decode(payload)


async def _refused(connection: Connection, record: Record) -> None:
    record.error = "refused"
    said = b"".join([piece async for piece in connection.body()])
    try:
        record.message = msgspec.json.decode(said)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        record.message = said.decode(errors="replace")[:200]


def _output(delta: dict[str, Any]) -> str:
    return delta.get("content") or delta.get("reasoning_content") or ""


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


async def _time_speech(connection: Connection, body: bytes, record: Record, load: SpeechLoad) -> None:
    """pcm is counted exactly; of other formats the audio is what a fixed number of patches gives, underruns unknown."""
    begin = time.perf_counter()
    response = await connection.request("POST", "/v1/audio/speech", body)
    record.status = response.status_code
    if response.status_code != 200:
        await _refused(connection, record)
        record.duration = time.perf_counter() - begin
        return
    bytes_per_second = 2 * int(_header(response, b"x-sample-rate") or 48000)
    pcm = load.response_format == "pcm"
    received, playback, last = 0.0, 0.0, begin
    async for chunk in connection.body():
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
    record.duration = time.perf_counter() - begin


def _header(response: h11.Response, name: bytes) -> bytes | None:
    return next((value for key, value in response.headers if key == name), None)


def _patches(load: SpeechLoad) -> int:
    """Tokens of an answer of fixed length; 0 if the model decides."""
    return max(1, round(load.seconds / PATCH_SECONDS)) if load.seconds else 0
