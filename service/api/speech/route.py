"""POST /v1/audio/speech."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from models.interfaces.errors import InputError
from service.api.context import ServerContext, context_of
from service.api.engines.request_stream import step_report
from service.api.http.errors import bad_request
from service.api.http.openapi import WORK_ERRORS, operation
from service.api.http.record import RequestRecord, record_of
from service.api.http.streaming import (
    EVENT_STREAM,
    KEEP_ALIVE,
    LiveResponse,
    error_event,
    unless_disconnected,
)
from service.api.speech.captions import Captions, with_pauses
from service.api.speech.delivery import AudioChunk, AudioCounts, AudioFeed, PlaybackMeter, encode_chunk
from service.api.speech.request import (
    MAX_WHOLE_CHARS,
    MAX_WORDED_CHARS,
    SMALL_TEXT,
    SpeechJob,
    max_spoken_chars,
    prepare,
)
from service.api.speech.schema import (
    SpeechAudioDelta,
    SpeechAudioDone,
    SpeechAudioSegment,
    SpeechRequestBody,
    SpeechUsage,
)
from service.api.speech.script import Script, read_script
from service.link.messages import SpeechRequest
from service.media.audio_formats import FORMATS, content_type

MAX_UNSPOKEN = 100
"""Characters of a header."""

router = APIRouter()


@dataclass(frozen=True, eq=False)
class PreparedSpeech:
    """A request that is ready for the engine."""

    job: SpeechJob
    script: Script
    unspoken: str
    """Letters and digits that the model cannot speak, each once."""
    captions: frozenset[str]
    """timestamp_granularities of the request."""
    request: SpeechRequest
    input_tokens: int
    max_seconds: float
    """Upper bound of its audio, pauses included."""


@router.post(
    "/v1/audio/speech",
    openapi_extra=operation(
        "Convert a text to speech.",
        dict.fromkeys(sorted({chosen.content_type for chosen in FORMATS.values()})),
        events=(SpeechAudioDelta, SpeechAudioSegment, SpeechAudioDone),
        errors=WORK_ERRORS,
        body={"application/json": SpeechRequestBody},
    ),
)
async def speak(request: Request) -> Response:
    context = context_of(request)
    context.require_ready()
    body = await context.read_json(request, SpeechRequestBody)
    record = record_of(request.scope)
    async with asyncio.timeout(context.settings.request_timeout):
        speech = await unless_disconnected(request, _prepare(context, body, record))
    if body.stream_format == "sse":
        return _event_response(context, speech)
    if body.stream is not False:
        return _audio_response(context, speech)
    async with asyncio.timeout(_seconds(context, speech)):
        data = await unless_disconnected(request, _whole(context, speech))
    return Response(data, headers=_headers(speech))


async def _prepare(context: ServerContext, body: SpeechRequestBody, record: RequestRecord) -> PreparedSpeech:
    """Validates a request, loads its voice and tokenizes its text. ApiError or InputError names the field that does not
    fit."""
    _check_fields(body, context.settings.max_speech_chars)
    captions = frozenset[str](body.timestamp_granularities or ())
    job = await prepare(context, body, record, default_format="mp3", default_granularity="none")

    def read() -> tuple[Script, str, SpeechRequest]:
        script = read_script(job, body.input, written=bool(captions))
        _check_length(script, max_spoken_chars(context, live=True), whole=body.stream is False)
        return script, script.unspoken(job.processor), _engine_request(job, script, live=body.stream is not False)

    small = len(body.input) + len(job.speaker.transcript) <= SMALL_TEXT
    script, unspoken, request = read() if small else await context.in_thread(read)
    tokens = sum(len(segment.text_ids) for segment in request.segments)
    context.metrics.observe("speech_characters_total", script.characters, model=job.model.name)
    context.metrics.observe("request_input_tokens", tokens, model=job.model.name)
    record.notes["segments"] = len(script.lines)
    patches = sum(segment.max_patches for segment in request.segments)
    max_seconds = patches * job.processor.samples_per_patch / job.heard_rate + script.pauses
    return PreparedSpeech(job, script, unspoken, captions, request, tokens, max_seconds)


def _check_fields(body: SpeechRequestBody, max_chars: int) -> None:
    """ApiError for fields that contradict each other, and for a text that is too long whatever is spoken of it."""
    length = len(body.input)
    if length > max_chars:
        raise bad_request(f"input: too long: {length} characters given, at most {max_chars} allowed.", "input")
    if body.stream is False and body.stream_format == "sse":
        raise bad_request("stream: cannot be false with stream_format: sse.", "stream")
    if body.stream is False and length > MAX_WHOLE_CHARS:
        message = f"cannot be false for a text this long: {length} characters given, at most {MAX_WHOLE_CHARS} allowed"
        raise bad_request(f"stream: {message}.", "stream")
    if body.timestamp_granularities and body.stream_format != "sse":
        raise bad_request("timestamp_granularities: require stream_format: sse.", "timestamp_granularities")


def _check_length(script: Script, max_spoken: int, *, whole: bool) -> None:
    """InputError for a text that is too long as it is spoken. whole: the answer is not streamed."""
    length = script.characters
    if length > max_spoken:
        raise InputError("input", f"as it is spoken, the text has {length} characters, at most {max_spoken} allowed")
    if whole and length > MAX_WORDED_CHARS:
        reason = f"with its numbers in words the text has {length} characters, at most {MAX_WORDED_CHARS} allowed"
        raise InputError("stream", f"cannot be false for this text: {reason}")


def _engine_request(job: SpeechJob, script: Script, *, live: bool) -> SpeechRequest:
    """The request of a whole text. A description in front of the first segment is repeated in front of the others."""
    first, *others = (line.text for line in script.lines)
    control = job.control_of(first)
    segments = [job.segment(first), *(job.segment(control + text) for text in others)]
    return job.request(segments, job.transcript_ids(first), live=live, open=False, arrival=job.record.arrival)


def _seconds(context: ServerContext, speech: PreparedSpeech) -> float:
    """How long the answer may take: a listener who hears all of it is no slow request."""
    return context.settings.request_timeout + speech.max_seconds


def _notice(speech: PreparedSpeech) -> dict[str, str]:
    """What the model leaves out of the text, percent-encoded."""
    return {"x-unspoken-text": quote(speech.unspoken[:MAX_UNSPOKEN])} if speech.unspoken else {}


def _headers(speech: PreparedSpeech) -> dict[str, str]:
    """Content type, the audio format for players of raw pcm, and what is not spoken."""
    job = speech.job
    return {
        **_notice(speech),
        "content-type": content_type(job.response_format, job.sample_rate),
        "x-sample-rate": str(job.sample_rate),
        "x-channels": "1",
        "x-bits-per-sample": str(FORMATS[job.response_format].bits),
    }


def _audio_response(context: ServerContext, speech: PreparedSpeech) -> Response:
    headers = _headers(speech)
    return LiveResponse(
        _encoded(context, speech, AudioProgress(speech)),
        media_type=headers.pop("content-type"),
        timeout=_seconds(context, speech),
        write_timeout=context.settings.write_timeout,
        headers=headers,
    )


class AudioProgress:
    """What an answer has so far."""

    def __init__(self, speech: PreparedSpeech) -> None:
        self.encoder = speech.job.encoder()
        self.counts = AudioCounts(speech.job)
        self._captions = None
        if speech.captions:
            words = "word" in speech.captions
            self._captions = Captions(speech.script.lines, speech.job.heard_rate, words=words)

    def add(self, chunk: AudioChunk) -> None:
        self.counts.add(chunk)
        if self._captions is not None:
            self._captions.add(chunk)

    def events(self) -> bytes:
        """Events about the segments completed since the last call, if the client asked for captions."""
        segments = () if self._captions is None else self._captions.take()
        return b"".join(_named_event("speech.audio.segment", segment) for segment in segments)


async def _encoded(context: ServerContext, speech: PreparedSpeech, progress: AudioProgress) -> AsyncGenerator[bytes]:
    """The encoded file, piece by piece as it is made. Closing the generator aborts the request."""
    job = speech.job
    encoder = progress.encoder
    meter = PlaybackMeter(context, job.model.name, job.record.arrival, live=speech.request.live)
    max_ahead = context.settings.speech_ahead if speech.request.live else speech.max_seconds
    async with (
        AudioFeed(context, speech.request, job.processor.sample_rate, max_ahead) as feed,
        aclosing(feed.chunks()) as spoken,
        aclosing(with_pauses(spoken, speech.script, job.heard_rate)) as chunks,
    ):
        try:
            async for chunk in chunks:
                progress.add(chunk)
                if data := await encode_chunk(context, job, encoder, chunk, meter):
                    yield data
        finally:
            job.record.notes["audio_seconds"] = round(meter.seconds, 2)
    tail = await context.encoders.finish(encoder)
    meter.finish()
    if tail:
        yield tail


def _event_response(context: ServerContext, speech: PreparedSpeech) -> Response:
    return LiveResponse(
        _events(context, speech),
        media_type=EVENT_STREAM,
        timeout=_seconds(context, speech),
        write_timeout=context.settings.write_timeout,
        keep_alive=KEEP_ALIVE,
        on_error=error_event,
        headers={"x-sample-rate": str(speech.job.sample_rate), **_notice(speech)},
    )


async def _events(context: ServerContext, speech: PreparedSpeech) -> AsyncGenerator[bytes]:
    progress = AudioProgress(speech)
    async with aclosing(_encoded(context, speech, progress)) as chunks:
        async for data in chunks:
            delta = SpeechAudioDelta(base64.b64encode(data).decode(), speech.job.response_format)
            yield _named_event("speech.audio.delta", delta) + progress.events()
    if rest := progress.events():
        yield rest
    counts = progress.counts
    usage = SpeechUsage(speech.input_tokens, counts.patches, speech.input_tokens + counts.patches)
    done = SpeechAudioDone(
        usage, "length" if counts.truncated else "stop", step_report(counts.steps), speech.unspoken or UNSET
    )
    yield _named_event("speech.audio.done", done)


def _named_event(name: str, payload: msgspec.Struct) -> bytes:
    return f"event: {name}\n".encode() + b"data: " + msgspec.json.encode(payload) + b"\n\n"


async def _whole(context: ServerContext, speech: PreparedSpeech) -> bytes:
    progress = AudioProgress(speech)
    async with aclosing(_encoded(context, speech, progress)) as chunks:
        data = bytearray(b"".join([chunk async for chunk in chunks]))
    progress.encoder.complete(data)
    return bytes(data)
