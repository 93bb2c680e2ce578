"""POST /v1/audio/speech."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from models.errors import InputError
from service.api.context import ServerContext, context_of
from service.api.decoding import parse
from service.api.delivery import AudioFeed, PlaybackMeter, encode_chunk
from service.api.errors import bad_request
from service.api.openapi import WORK_ERRORS, operation
from service.api.record import CLIENT_CLOSED, RequestRecord, record_of
from service.api.routing import RequestRoute
from service.api.speaking import SpeechJob, prepare, speakable
from service.api.speech_schema import SpeechAudioDelta, SpeechAudioDone, SpeechRequestBody, SpeechUsage
from service.api.streaming import EVENT_STREAM, KEEP_ALIVE, ClientLeft, LiveResponse, error_event, unless_disconnected
from service.engine.messages import SpeechRequest
from service.media.audio_out import FORMATS, content_type
from service.text.cleaning import clean_text

router = APIRouter(route_class=RequestRoute)

LARGE_BODY = 1 << 18
"""Bytes above which a body is parsed in a thread."""
SMALL_TEXT = 512
"""Characters of an input that is split and tokenized in the loop."""
WAV_HEADER = 44
MAX_WHOLE_CHARS = 4096
"""Longer texts are only streamed: an answer that is sent whole is held in memory."""


@dataclass(frozen=True, eq=False)
class Speech:
    """A request that is ready for the engine. longest: seconds of audio that it can come to."""

    job: SpeechJob
    request: SpeechRequest
    input_tokens: int
    longest: float


@router.post(
    "/v1/audio/speech",
    openapi_extra=operation(
        "Speak a text.",
        dict.fromkeys(sorted({chosen.content_type for chosen in FORMATS.values()})),
        events=(SpeechAudioDelta, SpeechAudioDone),
        errors=WORK_ERRORS,
        body={"application/json": SpeechRequestBody},
    ),
)
async def speak(request: Request) -> Response:
    context = context_of(request)
    context.require_ready()
    raw = await request.body()
    await context.turns.mine()
    read = partial(parse, raw, SpeechRequestBody)
    body: SpeechRequestBody = await context.in_thread(read) if len(raw) > LARGE_BODY else read()
    record = record_of(request.scope)
    try:
        async with asyncio.timeout(context.settings.request_timeout):
            preparing = _prepare(context, body, record)
            # What does not wait needs nobody who watches the client meanwhile.
            speech = await (preparing if _is_small(body) else unless_disconnected(request, preparing))
            if body.stream_format == "sse":
                return _event_response(context, speech)
            if body.stream is not False:
                return _audio_response(context, speech)
            data = await unless_disconnected(request, _whole(context, speech))
    except ClientLeft:
        record.outcome = "aborted"
        return Response(status_code=CLIENT_CLOSED)  # nobody reads it
    return Response(data, headers=_headers(speech.job))


def _is_small(body: SpeechRequestBody) -> bool:
    """Prepared in the time that it takes to wake a thread, and the loop after it."""
    return len(body.input) <= SMALL_TEXT and not body.ref_audio and not body.prompt_audio


async def _prepare(context: ServerContext, body: SpeechRequestBody, record: RequestRecord) -> Speech:
    if len(body.input) > context.settings.max_speech_chars:
        most = context.settings.max_speech_chars
        raise bad_request(f"input: has {len(body.input)} characters; at most {most} are taken.", "input")
    if body.stream is False and body.stream_format == "sse":
        raise bad_request("stream: events are always streamed.", "stream")
    if body.stream is False and len(body.input) > MAX_WHOLE_CHARS:
        raise bad_request(f"stream: a text of more than {MAX_WHOLE_CHARS} characters must be streamed.", "stream")
    job = await prepare(context, body, record, default_format="mp3", default_granularity="none")

    def build() -> tuple[SpeechRequest, list[str]]:
        splitter = job.splitter()
        pieces = [*splitter.feed(job.strip(body.input)), *splitter.flush()]
        texts = [text for piece in pieces if speakable(text := clean_text(piece).strip())]
        if not texts:
            raise InputError("input", "the text holds nothing to speak")
        control = job.control_of(texts[0])
        segments = [job.segment(texts[0]), *(job.segment(control + text) for text in texts[1:])]
        live = body.stream is not False
        transcript = job.transcript_ids(texts[0])
        return job.request(segments, transcript, live=live, open=False, arrival=record.arrival), texts

    request, texts = build() if _is_small(body) else await context.in_thread(build)
    tokens = sum(len(segment.text_ids) for segment in request.segments)
    context.metrics.observe("speech_characters_total", sum(map(len, texts)), model=job.model.name)
    context.metrics.observe("request_input_tokens", tokens, model=job.model.name)
    record.notes["segments"] = len(texts)
    patches = sum(segment.max_patches for segment in request.segments)
    longest = patches * job.processor.samples_per_patch / job.processor.sample_rate / job.speed
    return Speech(job, request, tokens, longest)


def _headers(job: SpeechJob) -> dict[str, str]:
    """What a player must know of bytes that do not say it themselves."""
    return {
        "content-type": content_type(job.response_format, job.sample_rate),
        "x-sample-rate": str(job.sample_rate),
        "x-channels": "1",
        "x-bits-per-sample": "16",
    }


def _audio_response(context: ServerContext, speech: Speech) -> Response:
    headers = _headers(speech.job)
    return LiveResponse(
        _pieces(context, speech, Progress()),
        media_type=headers.pop("content-type"),
        timeout=context.settings.request_timeout + speech.longest,
        write_timeout=context.settings.write_timeout,
        headers=headers,
    )


@dataclass
class Progress:
    samples: int = 0


async def _pieces(context: ServerContext, speech: Speech, progress: Progress) -> AsyncGenerator[bytes]:
    """The file, piece by piece; its tail last. Closing it aborts the work."""
    job, settings = speech.job, context.settings
    encoder = job.encoder()
    meter = PlaybackMeter(context, job.model.name, job.record.arrival, live=speech.request.live)
    most_ahead = settings.speech_ahead if speech.request.live else speech.longest
    async with (
        AudioFeed(context, speech.request, job.processor.sample_rate, most_ahead) as feed,
        aclosing(feed.chunks()) as chunks,
    ):
        async for chunk in chunks:
            progress.samples += len(chunk.audio)
            if chunk.truncated:
                job.record.notes["truncated"] = True
            if data := await encode_chunk(context, job, encoder, chunk, meter):
                yield data
    tail = await context.encoders.finish(encoder)
    meter.finish()
    job.record.notes["audio_seconds"] = round(meter.seconds, 2)
    if tail:
        yield tail


def _event_response(context: ServerContext, speech: Speech) -> Response:
    return LiveResponse(
        _events(context, speech),
        media_type=EVENT_STREAM,
        timeout=context.settings.request_timeout + speech.longest,
        write_timeout=context.settings.write_timeout,
        keep_alive=(context.settings.keep_alive, KEEP_ALIVE),
        on_error=error_event,
        headers={"x-sample-rate": str(speech.job.sample_rate)},
    )


async def _events(context: ServerContext, speech: Speech) -> AsyncGenerator[bytes]:
    progress = Progress()
    async with aclosing(_pieces(context, speech, progress)) as pieces:
        async for data in pieces:
            delta = SpeechAudioDelta(base64.b64encode(data).decode(), speech.job.response_format)
            yield _named_event("speech.audio.delta", delta)
    patches = progress.samples // speech.job.processor.samples_per_patch
    usage = SpeechUsage(speech.input_tokens, patches, speech.input_tokens + patches)
    yield _named_event("speech.audio.done", SpeechAudioDone(usage))


def _named_event(name: str, payload: msgspec.Struct) -> bytes:
    return f"event: {name}\n".encode() + b"data: " + msgspec.json.encode(payload) + b"\n\n"


async def _whole(context: ServerContext, speech: Speech) -> bytes:
    job, progress = speech.job, Progress()
    async with aclosing(_pieces(context, speech, progress)) as pieces:
        data = bytearray(b"".join([piece async for piece in pieces]))
    if job.response_format == "wav":
        size_wav(data)
    if job.response_format == "flac" and job.speed == 1 and job.sample_rate == job.processor.sample_rate:
        size_flac(data, progress.samples)
    return bytes(data)


def size_wav(data: bytearray) -> None:
    """Writes the sizes that were not known when the streamed file's header was made."""
    struct.pack_into("<I", data, 4, len(data) - 8)
    struct.pack_into("<I", data, 40, len(data) - WAV_HEADER)


def size_flac(data: bytearray, samples: int) -> None:
    """The same for FLAC: the 36 lowest of 64 bits in STREAMINFO."""
    field = int.from_bytes(data[18:26], "big") | samples
    data[18:26] = field.to_bytes(8, "big")
