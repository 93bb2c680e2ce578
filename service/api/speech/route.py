"""POST /v1/audio/speech."""

from __future__ import annotations

import base64
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from operator import itemgetter
from urllib.parse import quote

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from service.api.context import ServerContext, post
from service.api.engines.request_stream import EngineError, step_report
from service.api.http.errors import invalid
from service.api.http.middleware import RequestRecord, record_of
from service.api.http.streaming import LiveResponse, event, event_stream, unless_disconnected
from service.api.speech import schema
from service.api.speech.delivery import AudioChunk, AudioFeed, Captions, Delivery, Script
from service.api.speech.hearing import segment_errors
from service.api.speech.live_text import SpokenText
from service.api.speech.request import MAX_WHOLE_CHARS, RETRIES, SMALL_TEXT, SpeechJob, max_spoken_chars, prepare
from service.link.messages import SpeechRequest, SpeechSegment
from service.media.audio_formats import FORMATS, content_type
from service.media.audio_out import StreamingEncoder

MAX_UNSPOKEN = 100
"""Characters of a header."""

router = APIRouter()


@dataclass(frozen=True, eq=False)
class PreparedSpeech:
    """A request that is ready for the engine."""

    job: SpeechJob
    script: Script
    unspoken: str
    """Letters, digits and signs that the model cannot speak, each once."""
    request: SpeechRequest
    encoder: StreamingEncoder
    delivery: Delivery
    max_ahead: float
    """Seconds of audio that may wait for the client."""
    timeout: float
    """Seconds that the answer may take: a listener who hears all of it is no slow request."""
    notice: dict[str, str]
    """Headers with what the model leaves out of the text, percent-encoded, and with what a recogniser heard of it."""
    attempts: int = 0
    """How often the text may be spoken until a recogniser hears it; 0: nobody checks."""


EVENTS = (schema.SpeechAudioDelta, schema.SpeechAudioSegment, schema.SpeechAudioDone)
FILES = dict.fromkeys(sorted({chosen.content_type for chosen in FORMATS.values()}))


@post(router, "/v1/audio/speech", "Convert a text to speech.", schema.SpeechRequestBody, FILES, events=EVENTS)
async def speak(request: Request, context: ServerContext, body: schema.SpeechRequestBody) -> Response:
    settings, record = context.settings, record_of(request.scope)
    speech = await unless_disconnected(request, _prepare(context, body, record), settings.request_timeout)
    job = speech.job
    headers = {"x-sample-rate": str(job.sample_rate), **speech.notice}
    if body.stream_format == "sse":
        return event_stream(_events(context, speech), settings, timeout=speech.timeout, headers=headers)
    headers |= {"x-channels": "1", "x-bits-per-sample": str(FORMATS[job.response_format].bits)}
    media_type = content_type(job.response_format, job.sample_rate)
    if body.stream is not False:
        chunks, write_timeout = _encoded(context, speech), settings.write_timeout
        return LiveResponse(
            chunks, media_type=media_type, timeout=speech.timeout, write_timeout=write_timeout, headers=headers
        )
    data = await unless_disconnected(request, _whole(context, speech), speech.timeout)
    return Response(data, headers={**headers, **speech.notice, "content-type": media_type})


async def _prepare(context: ServerContext, body: schema.SpeechRequestBody, record: RequestRecord) -> PreparedSpeech:
    """Validate a request, load its voice and tokenize its text. ApiError or InputError names the field that does not
    fit."""
    settings = context.settings
    _check_fields(context, body)
    captions = frozenset[str](body.timestamp_granularities or ())
    live = body.stream is not False
    job = await prepare(context, body, record, default_format="mp3", default_granularity="none")

    text = SpokenText(job, max_spoken_chars(context, live=live))

    def read() -> tuple[list[SpeechSegment], str]:
        return text.whole(body.input), text.script.unspoken(job.processor)

    small = len(body.input) + len(job.speaker.transcript) <= SMALL_TEXT
    segments, unspoken = read() if small else await context.in_thread(read)
    script = text.script
    request = job.request(segments, text.transcript_ids, live=live, open=False, arrival=record.arrival)
    characters = sum(len(line.text) for line in script.lines)
    context.metrics.observe("speech_characters_total", characters, model=job.model.name)
    context.metrics.observe("request_input_tokens", _tokens(request), model=job.model.name)
    record.notes["segments"] = len(script.lines)
    patches = sum(segment.max_patches for segment in segments)
    seconds = patches * job.processor.samples_per_patch / job.heard_rate + script.pauses
    follower = Captions(context, job, script.lines, captions) if captions else None
    return PreparedSpeech(
        job,
        script,
        unspoken,
        request,
        job.encoder(),
        Delivery(context, job, live=live, arrival=record.arrival, captions=follower),
        max_ahead=context.speech_ahead if live else seconds,
        timeout=settings.request_timeout + seconds,
        notice={"x-unspoken-text": quote(unspoken[:MAX_UNSPOKEN])} if unspoken else {},
        attempts=0 if not body.verify else 1 if body.seed is not None else 1 + RETRIES,
    )


def _tokens(request: SpeechRequest) -> int:
    return sum(len(segment.text_ids) for segment in request.segments)


def _check_fields(context: ServerContext, body: schema.SpeechRequestBody) -> None:
    """ApiError for fields that contradict each other, and for a text that is too long whatever is spoken of it."""
    length, max_chars = len(body.input), context.settings.max_speech_chars
    if length > max_chars:
        raise invalid("input", f"too long: {length} characters given, at most {max_chars} allowed")
    if body.stream is False and body.stream_format == "sse":
        raise invalid("stream", "cannot be false with stream_format: sse")
    if body.stream is False and length > MAX_WHOLE_CHARS:
        message = f"cannot be false for a text this long: {length} characters given, at most {MAX_WHOLE_CHARS} allowed"
        raise invalid("stream", message)
    if body.timestamp_granularities and body.stream_format != "sse":
        raise invalid("timestamp_granularities", "require stream_format: sse")
    if body.verify and body.stream is not False:
        raise invalid("verify", "requires stream: false")
    if body.verify and context.catalog.of_task("transcription") is None:
        raise invalid("verify", "not supported: no speech recogniser is hosted here", "unsupported_parameter")


def _encoded(context: ServerContext, speech: PreparedSpeech) -> AsyncGenerator[bytes]:
    """Yield the encoded file, piece by piece as it is made. Closing the generator aborts the request."""
    chunks = _verified(context, speech) if speech.attempts else _spoken(context, speech, speech.request)
    return speech.delivery.file(chunks, speech.encoder)


async def _spoken(context: ServerContext, speech: PreparedSpeech, request: SpeechRequest) -> AsyncGenerator[AudioChunk]:
    async with (
        aclosing(AudioFeed(context, speech.job, request, speech.script, speech.max_ahead)) as feed,
        aclosing(feed.chunks()) as chunks,
    ):
        async for chunk in chunks:
            yield chunk


async def _verified(context: ServerContext, speech: PreparedSpeech) -> AsyncGenerator[AudioChunk]:
    """Speak the text until a recogniser hears it, and yield the attempt with the fewest errors."""
    request, tried = speech.request, list[tuple[tuple[bool, int], list[AudioChunk], str]]()
    while len(tried) < speech.attempts and (not tried or tried[-1][0][0]):
        try:
            chunks, errors = await _attempt(context, speech, request)
        except EngineError:
            if not tried:
                raise
            break
        outcome = "failed" if errors["failed"] else "unavailable" if errors["unavailable"] else "passed"
        context.metrics.observe("speech_verifications_total", model=request.model, outcome=outcome)
        counts = {name: errors[name] for name in ("deletions", "insertions", "substitutions")}
        told = "; ".join([outcome, *(f"{name}={count}" for name, count in counts.items())])
        tried.append(((outcome == "failed", sum(counts.values())), chunks, told))
        id, seed = f"{speech.request.request_id}-{len(tried)}", secrets.randbits(63)
        request = msgspec.structs.replace(request, request_id=id, seed=seed, arrival=time.monotonic())
    _, chunks, told = min(tried, key=itemgetter(0))
    speech.notice["x-verification"] = f"{told}; attempts={len(tried)}"
    for chunk in chunks:
        yield chunk


async def _attempt(
    context: ServerContext, speech: PreparedSpeech, request: SpeechRequest
) -> tuple[list[AudioChunk], Counter[str]]:
    """Speak all segments, and transcribe each while the next ones are spoken."""
    chunks, errors, audio = list[AudioChunk](), Counter[str](), list[np.ndarray]()
    async with aclosing(_spoken(context, speech, request)) as spoken:
        async for chunk in spoken:
            chunks.append(chunk)
            audio += [] if chunk.silent else [chunk.audio]
            if chunk.segment_done:
                text = speech.job.spoken(chunk.segment, speech.script.lines[chunk.segment].text)
                errors += await segment_errors(context, speech.job, text, np.concatenate(audio))
                audio.clear()
    return chunks, errors


async def _events(context: ServerContext, speech: PreparedSpeech) -> AsyncGenerator[bytes]:
    delivery, captions = speech.delivery, speech.delivery.captions
    async with aclosing(_encoded(context, speech)) as pieces:
        async for data in pieces:
            delta = schema.SpeechAudioDelta(base64.b64encode(data).decode(), speech.job.response_format)
            yield event(delta, "speech.audio.delta") + await _segments(captions)
    if rest := await _segments(captions, rest=True):
        yield rest
    tokens, patches = _tokens(speech.request), delivery.patches
    done = schema.SpeechAudioDone(
        schema.SpeechUsage(tokens, patches, tokens + patches),
        "length" if delivery.truncated else "stop",
        step_report(delivery.steps),
        speech.unspoken or UNSET,
    )
    yield event(done, "speech.audio.done")


async def _segments(captions: Captions | None, *, rest: bool = False) -> bytes:
    segments = await captions.take(rest=rest) if captions else ()
    return b"".join(event(segment, "speech.audio.segment") for segment in segments)


async def _whole(context: ServerContext, speech: PreparedSpeech) -> bytes:
    async with aclosing(_encoded(context, speech)) as pieces:
        data = bytearray(b"".join([piece async for piece in pieces]))
    speech.encoder.complete(data)
    return bytes(data)
