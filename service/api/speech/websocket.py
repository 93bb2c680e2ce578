"""The WebSocket /v1/audio/speech/stream: text in as it is written, speech of each complete clause out.

The client sends session.config, then input.text and at the end of each utterance input.done, at last session.close. The
server sends for each segment audio.start, binary frames (one complete file) and audio.done, then session.done for the
utterance, or "error". Message names are those of vLLM-Omni.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import aclosing
from typing import Literal

import msgspec
from fastapi import APIRouter, WebSocket
from msgspec import UNSET, UnsetType
from starlette.websockets import WebSocketDisconnect

from models.interfaces.errors import InputError
from service.api.context import ServerContext
from service.api.http.errors import ApiError, as_api_error, invalid
from service.api.http.json_body import parse
from service.api.http.middleware import RequestRecord
from service.api.sockets import POLICY, Inbox, StreamClosed, run_session, send
from service.api.speech.delivery import AudioFeed, Delivery
from service.api.speech.live_text import LiveText
from service.api.speech.request import SpeechJob, prepare
from service.api.speech.schema import Granularities, SpeechOptions
from service.media.audio_out import StreamingEncoder

log = logging.getLogger(__name__)

router = APIRouter()

IDLE = 30.0
"""Seconds without text to speak after which a client is disconnected."""
MAX_TEXT = 128 << 10
"""Limit in bytes of an input.text message."""
INSTEAD = {
    "timestamp_granularities": "request speech with stream_format: sse for captions",
    "verify": "request speech with stream: false",
}
"""What does the same as fields of a speech request that a session cannot have."""


class SessionConfig(SpeechOptions, frozen=True, kw_only=True, tag_field="type", tag="session.config"):
    """timestamp_granularities, verify: refused; audio.start and audio.done say where segments begin and end."""

    timestamp_granularities: Granularities | None = None
    verify: bool | None = None


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input.text"):
    text: str


class InputDone(msgspec.Struct, frozen=True, tag_field="type", tag="input.done"):
    pass


class SessionClose(msgspec.Struct, frozen=True, tag_field="type", tag="session.close"):
    pass


ClientMessage = SessionConfig | InputText | InputDone | SessionClose


class AudioStart(msgspec.Struct, frozen=True, tag_field="type", tag="audio.start"):
    """unspoken: letters and digits of the text that the model cannot speak, each once, if there are any."""

    sentence_index: int
    sentence_text: str
    format: str
    sample_rate: int
    unspoken: str | UnsetType = UNSET


class AudioDone(msgspec.Struct, frozen=True, tag_field="type", tag="audio.done"):
    """finish_reason: "length" where the segment ended at its cap."""

    sentence_index: int
    total_bytes: int
    error: bool = False
    finish_reason: Literal["stop", "length"] = "stop"


class SessionDone(msgspec.Struct, frozen=True, tag_field="type", tag="session.done"):
    """finish_reason: "length" where a segment ended at its cap."""

    total_sentences: int
    finish_reason: Literal["stop", "length"] = "stop"


class SocketError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """param: the invalid field of the client's message."""

    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None


PATH = "/v1/audio/speech/stream"


@router.websocket(PATH)
async def speech_stream(socket: WebSocket) -> None:
    await run_session(socket, Session)


class Session:
    """One connection. Goes on reading messages while an utterance is being spoken."""

    def __init__(self, context: ServerContext, socket: WebSocket, record: RequestRecord) -> None:
        self._context = context
        self._socket = socket
        self._record = record
        self._job: SpeechJob | None = None
        self._utterance: Utterance | None = None
        self._number = 0
        self._active = time.monotonic()
        """When the client last configured the session, or when the last utterance that was heard ended."""
        self._messages = Inbox(socket, record.ticket)
        self._place = context.admission.ticket(record.endpoint)
        """Holds one of the requests in flight while an utterance goes on."""

    async def run(self) -> None:
        self._context.require_ready()
        while True:
            if (left := self._idle_left()) <= 0:
                raise StreamClosed(POLICY, "idle")
            utterance = self._utterance
            task = None if utterance is None else utterance.task
            raw = await self._messages.next_during(self._context, task, left, busy=utterance is not None)
            if raw is not None:
                await self._take(raw)
            elif task is not None and task.done():
                await self._finish_utterance()

    async def _take(self, raw: str | bytes) -> None:
        """Handle a message. Errors are reported to the client, and the session goes on."""
        try:
            match message := parse(raw, ClientMessage):
                case SessionConfig():
                    for name, instead in INSTEAD.items():
                        if getattr(message, name):
                            raise invalid(name, f"not supported here: {instead}", "unsupported_parameter")
                    await self._finish_utterance(interrupted=True)
                    self._job = await self._prepare(message)
                    self._active = time.monotonic()
                case InputText():
                    if len(raw) > MAX_TEXT:
                        raise invalid("text", f"message too long: {len(raw)} bytes given, at most {MAX_TEXT} allowed")
                    await self._say(message.text, last=False)
                case InputDone():
                    await self._say("", last=True)
                case SessionClose():
                    await self._finish_utterance(interrupted=True)
                    raise StreamClosed
        except (ApiError, InputError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            answer = as_api_error(error)
            if answer.status >= 500:
                raise answer from error
            await self.send_error(answer)

    def _idle_left(self) -> float:
        """Seconds until the client may have been idle for too long. Other messages than a configuration and text to
        speak do not count: a stream without text takes room in the engine."""
        since, limit = self._active, IDLE
        if self._utterance is not None:
            since = max(since, self._utterance.active)
        return min(limit, since + limit - time.monotonic())

    async def _prepare(self, options: SpeechOptions) -> SpeechJob:
        return await prepare(self._context, options, self._record, default_format="wav", default_granularity="clause")

    async def _say(self, text: str, *, last: bool) -> None:
        if self._utterance is not None and self._utterance.complete:
            await self._finish_utterance()
        if self._utterance is None:
            if self._job is None:
                self._job = await self._prepare(SpeechOptions())
            self._place.grow(1)
            self._utterance = Utterance(self._context, self._socket, self._job, self._number)
            self._number += 1
        await self._utterance.write(text, last=last)
        if self._utterance.task.done():
            await self._finish_utterance()

    async def _finish_utterance(self, *, interrupted: bool = False) -> None:
        """Wait for the current utterance, or stop it if it is interrupted before its text has ended."""
        utterance, self._utterance = self._utterance, None
        if utterance is None:
            return
        try:
            if interrupted and not utterance.complete:
                await utterance.stop()
                return
            await utterance.task
        finally:
            self._place.release()
        self._active = max(self._active, utterance.active)

    async def send_error(self, error: ApiError) -> None:
        if error.param == "input":  # of a speech request; here it is the field of an input.text
            error = error.at("text")
        message = SocketError(error.message, error.code, error.param, error.retry_after)
        try:
            await send(self._context, self._socket, message)
        except (WebSocketDisconnect, StreamClosed):
            log.debug("the client disconnected before an error could be sent")

    async def stop(self) -> None:
        await self._messages.close()
        if self._utterance is not None:
            await self._utterance.stop()
        self._place.release()


class Utterance:
    """One text, written in chunks, and its speech. `task` sends the audio and ends when all of it has been sent."""

    def __init__(self, context: ServerContext, socket: WebSocket, job: SpeechJob, number: int) -> None:
        arrival = time.monotonic()
        self._context = context
        self._socket = socket
        self._job = job
        self._text = LiveText(context, job, number=number, arrival=arrival, ssml=True)
        self._script = self._text.script
        self._delivery = Delivery(context, job, live=True, arrival=arrival)
        self._files = 0
        """Files that have been or are being sent: one for each segment, and one for the pause after the last."""
        self._size = 0
        self._characters = 0
        self._spoken = 0
        """Segments whose audio has been sent."""
        self._sent = -math.inf
        """When audio was last sent to its end."""
        self.task = asyncio.create_task(self._run())

    @property
    def complete(self) -> bool:
        return self._text.complete

    @property
    def active(self) -> float:
        """time.monotonic() when there was last something to send, or text to speak was given; infinity while there is
        something to send."""
        if not self.task.done() and (self.complete or self._spoken < len(self._script.lines)):
            return math.inf
        return max(self._sent, self._text.given)

    async def write(self, text: str, *, last: bool) -> None:
        """Add text. InputError or ApiError if it cannot be spoken; the utterance continues without it."""
        given, most = self._characters + len(text), self._context.settings.max_speech_chars
        if given > most:
            raise invalid("text", f"utterance too long: {given} characters given, at most {most} allowed")
        self._characters = given
        await self._text.write(text, last=last)

    async def _run(self) -> None:
        try:
            feed = await self._text.feed
            if feed is not None:
                try:
                    await self._speak(feed)
                finally:
                    self._delivery.note()
                self._delivery.finish()
                self._sent = time.monotonic()
        finally:
            await self._text.close()
        await self._send(SessionDone(self._files, "length" if self._delivery.truncated else "stop"))

    async def _speak(self, feed: AudioFeed) -> None:
        """Send each segment as a complete file between audio.start and audio.done."""
        encoder: StreamingEncoder | None = None
        async with aclosing(feed.chunks()) as chunks:
            async for chunk in chunks:
                if encoder is None:
                    if not len(chunk.audio):
                        continue  # input.done came after the last segment had been spoken
                    encoder = await self._start()
                await self._send_audio(await self._delivery.encode(encoder, chunk))
                if chunk.segment_done:
                    await self._done(encoder, "length" if chunk.truncated else "stop")
                    encoder = None
                    self._spoken, self._sent = self._spoken + 1, time.monotonic()
        if encoder is not None:
            await self._done(encoder, "stop")

    async def _start(self) -> StreamingEncoder:
        """Announce the next file: of a segment, or of the pause after the last one, which has no text."""
        lines, job = self._script.lines, self._job
        text = lines[self._files].text if self._files < len(lines) else ""
        unspoken = job.processor.unspoken(text) or UNSET
        start = AudioStart(self._files, text, job.response_format, job.sample_rate, unspoken)
        self._files, self._size = self._files + 1, 0
        await self._send(start)
        return job.encoder()

    async def _send_audio(self, data: bytes) -> None:
        if data:
            await self._send(data)
            self._size += len(data)

    async def _done(self, encoder: StreamingEncoder, reason: Literal["stop", "length"]) -> None:
        await self._send_audio(await self._context.encoders.finish(encoder))
        await self._send(AudioDone(self._files - 1, self._size, finish_reason=reason))

    async def _send(self, message: msgspec.Struct | bytes) -> None:
        await send(self._context, self._socket, message)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self._text.close()  # A task that is cancelled before it has begun closes nothing.
