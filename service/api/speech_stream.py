"""The WebSocket /v1/audio/speech/stream: text as it is written in, speech of each complete clause out.

Client: session.config, then input.text any number of times and input.done, which ends an utterance; the connection
stays for the next one until session.close. Server: for each segment audio.start, binary frames (one complete file of
the format) and audio.done, then session.done for the utterance; "error" says what was wrong. Message names are those
of vLLM-Omni.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial

import msgspec
from fastapi import APIRouter, WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from models.errors import InputError
from service.api.context import ServerContext, context_of
from service.api.decoding import parse
from service.api.delivery import AudioFeed, PlaybackMeter, encode_chunk
from service.api.errors import ApiError, as_api_error, bad_request
from service.api.openapi import websocket
from service.api.record import RequestRecord, record_of
from service.api.speaking import SpeechJob, prepare, speakable
from service.api.speech_schema import SpeechOptions
from service.engine.client import EngineError
from service.engine.messages import SpeechAppend, SpeechSegment
from service.media.audio_out import StreamingEncoder
from service.text.cleaning import clean_text

log = logging.getLogger(__name__)

router = APIRouter()

MAX_TEXT = 128 << 10
"""Bytes of one message with text."""
QUEUED_MESSAGES = 16
TRY_LATER = 1013
POLICY = 1008
GOING_AWAY = 1001
FAILED = 1011


class SessionConfig(SpeechOptions, frozen=True, kw_only=True, tag_field="type", tag="session.config"):
    pass


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input.text"):
    text: str


class InputDone(msgspec.Struct, frozen=True, tag_field="type", tag="input.done"):
    pass


class SessionClose(msgspec.Struct, frozen=True, tag_field="type", tag="session.close"):
    pass


ClientMessage = SessionConfig | InputText | InputDone | SessionClose


class AudioStart(msgspec.Struct, frozen=True, tag_field="type", tag="audio.start"):
    sentence_index: int
    sentence_text: str
    format: str
    sample_rate: int


class AudioDone(msgspec.Struct, frozen=True, tag_field="type", tag="audio.done"):
    sentence_index: int
    total_bytes: int
    error: bool = False


class SessionDone(msgspec.Struct, frozen=True, tag_field="type", tag="session.done"):
    total_sentences: int


class SocketError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """param: the field of session.config or the message that does not fit."""

    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None


ServerMessage = AudioStart | AudioDone | SessionDone | SocketError


PATH = "/v1/audio/speech/stream"
websocket(PATH, "Speak a text while it is being written.", client=ClientMessage, server=ServerMessage)


class Goodbye(Exception):
    """The session ends with this code."""

    def __init__(self, code: int = 1000, reason: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@router.websocket(PATH)
async def speech_stream(socket: WebSocket) -> None:
    context = context_of(socket)
    record = record_of(socket.scope)
    await socket.accept()
    context.open_sockets += 1
    session = Session(context, socket, record)
    try:
        context.require_ready()
        record.ticket.grow(1)
        await session.run()
    except Goodbye as goodbye:
        await _close(socket, goodbye.code, goodbye.reason)
    except WebSocketDisconnect:
        record.outcome = "aborted"
    except (ApiError, EngineError) as error:
        answer = as_api_error(error)
        record.outcome = record.end_with(answer.status)
        await session.tell_error(answer)
        await _close(socket, TRY_LATER if answer.status == 503 else FAILED, answer.code or "")
    finally:
        await session.stop()
        context.open_sockets -= 1


async def _close(socket: WebSocket, code: int, reason: str) -> None:
    if socket.application_state is not WebSocketState.DISCONNECTED:
        try:
            await socket.close(code, reason)
        except (RuntimeError, OSError):
            log.debug("the client closed the socket first")


class Session:
    """One connection: reads messages while an utterance is being spoken."""

    def __init__(self, context: ServerContext, socket: WebSocket, record: RequestRecord) -> None:
        self._context = context
        self._socket = socket
        self._record = record
        self._job: SpeechJob | None = None
        self._utterance: Utterance | None = None
        self._number = 0
        self._messages: asyncio.Queue[str | bytes | None] = asyncio.Queue(QUEUED_MESSAGES)
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Into a bounded queue, so that a client that writes faster than it listens is held back by the transport."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                await self._messages.put(None)
                return
            await self._messages.put(message.get("text") or message.get("bytes") or b"")

    async def run(self) -> None:
        while True:
            raw = await self._next()
            try:
                await self._handle(self._parse(raw))
            except (ApiError, InputError, msgspec.MsgspecError) as error:
                answer = as_api_error(error)
                if answer.status >= 500:
                    raise answer from error
                await self.tell_error(answer)

    async def _next(self) -> str | bytes:
        """The next message; an utterance that fails, or silence while none is being spoken, ends the session, and so
        does a shutdown between two utterances."""
        waiting = asyncio.create_task(self._messages.get())
        draining = asyncio.create_task(self._context.drain_begun.wait())
        watched: set[asyncio.Task] = {waiting}
        watched.add(draining if self._utterance is None else self._utterance.task)
        speaking = self._utterance is not None and self._utterance.complete
        try:
            idle = None if speaking else self._context.settings.speech_idle
            done, _ = await asyncio.wait(watched, timeout=idle, return_when=asyncio.FIRST_COMPLETED)
            if self._utterance is not None and self._utterance.task in done:
                await self._finish_utterance()
                if waiting not in done:
                    idle = self._context.settings.speech_idle
                    done, _ = await asyncio.wait({waiting, draining}, timeout=idle, return_when=asyncio.FIRST_COMPLETED)
            if draining in done:
                raise Goodbye(GOING_AWAY, "shutting down")
            if waiting not in done:
                raise Goodbye(POLICY, "idle")
            message = waiting.result()
        finally:
            waiting.cancel()
            draining.cancel()
        if message is None:
            raise WebSocketDisconnect
        return message

    def _parse(self, raw: str | bytes) -> ClientMessage:
        message: ClientMessage = parse(raw, ClientMessage)
        if isinstance(message, InputText) and len(raw) > MAX_TEXT:
            raise bad_request(f"text: a message has at most {MAX_TEXT} bytes.", "text")
        return message

    async def _handle(self, message: ClientMessage) -> None:
        match message:
            case SessionConfig():
                await self._finish_utterance(ended_by="session.config")
                self._job = await self._prepare(message)
            case InputText():
                await self._say(message.text, last=False)
            case InputDone():
                await self._say("", last=True)
            case SessionClose():
                await self._finish_utterance(ended_by="session.close")
                raise Goodbye

    async def _prepare(self, options: SpeechOptions) -> SpeechJob:
        return await prepare(self._context, options, self._record, default_format="wav", default_granularity="clause")

    async def _say(self, text: str, *, last: bool) -> None:
        if self._utterance is not None and self._utterance.complete:
            await self._finish_utterance()
        if self._utterance is None:
            if self._job is None:
                self._job = await self._prepare(SpeechOptions())
            self._utterance = Utterance(self._context, self._socket, self._job, self._number)
            self._number += 1
        await self._utterance.write(text, last=last)
        if self._utterance.task.done():
            await self._finish_utterance()

    async def _finish_utterance(self, ended_by: str | None = None) -> None:
        """Waits for the current utterance; one whose text had not ended is cut off by what came instead."""
        utterance, self._utterance = self._utterance, None
        if utterance is None:
            return
        if ended_by is not None and not utterance.complete:
            await utterance.stop()
            return
        await utterance.task

    async def tell_error(self, error: ApiError) -> None:
        message = SocketError(error.message, error.code, error.param, error.retry_after)
        try:
            await send(self._context, self._socket, message)
        except (WebSocketDisconnect, Goodbye):
            log.debug("the client left before it was told of an error")

    async def stop(self) -> None:
        self._reader.cancel()
        if self._utterance is not None:
            await self._utterance.stop()
        await asyncio.gather(self._reader, return_exceptions=True)


class Utterance:
    """A text on its way in and its speech on its way out. `task` sends; it ends when everything is spoken."""

    def __init__(self, context: ServerContext, socket: WebSocket, job: SpeechJob, number: int) -> None:
        self.complete = False
        """The text has ended."""
        self._context = context
        self._socket = socket
        self._job = job
        self._number = number
        self._arrival = time.monotonic()
        self._stripper = job.stripper()
        self._splitter = job.splitter()
        self._characters = 0
        self._control: str | None = None
        self._texts: deque[str] = deque()
        """Texts of the segments that have not been spoken."""
        self._total = 0
        self._feed: asyncio.Future[AudioFeed | None] = asyncio.get_running_loop().create_future()
        self._request_id = ""
        self.task = asyncio.create_task(self._send())

    async def write(self, text: str, *, last: bool) -> None:
        """More of the text. InputError or ApiError when it cannot be spoken: the utterance goes on without it."""
        self._characters += len(text)
        most = self._context.settings.max_speech_chars
        if self._characters > most:
            raise bad_request(f"text: an utterance has at most {most} characters.", "text")
        splitter, stripper = self._splitter, self._stripper
        if stripper is not None:
            text = stripper.feed(text) + (stripper.flush() if last else "")
        texts = [*splitter.feed(text), *(splitter.flush() if last else ())]
        self.complete = last
        texts = [cleaned for piece in texts if speakable(cleaned := clean_text(piece).strip())]
        told = texts
        if self._control is not None:
            told = [self._control + piece for piece in texts]
        elif texts:
            self._control = self._job.control_of(texts[0])
            told = [texts[0], *(self._control + piece for piece in texts[1:])]
        first = texts[0] if texts and not self._feed.done() else None
        try:
            segments, transcript = await self._context.in_thread(partial(self._tokenize, told, first))
        except InputError:
            self._hand_over([], (), last)
            raise
        self._texts.extend(texts)
        self._total += len(texts)
        self._context.metrics.observe("speech_characters_total", sum(map(len, texts)), model=self._job.model.name)
        self._hand_over(segments, transcript, last)

    def _tokenize(self, told: Sequence[str], first: str | None) -> tuple[list[SpeechSegment], tuple[int, ...]]:
        """first: the text behind the transcript of the clip, when none has been spoken yet."""
        return [self._job.segment(piece) for piece in told], () if first is None else self._job.transcript_ids(first)

    def _hand_over(self, segments: Sequence[SpeechSegment], transcript: tuple[int, ...], last: bool) -> None:
        if self._feed.done():
            if segments or last:
                self._context.engine.send(SpeechAppend(self._request_id, tuple(segments), last))
        elif segments:
            job = self._job
            request = job.request(
                segments, transcript, live=True, open=not last, arrival=self._arrival, number=self._number
            )
            ahead = self._context.settings.speech_ahead
            self._request_id = request.request_id
            self._feed.set_result(AudioFeed(self._context, request, job.processor.sample_rate, ahead))
        elif last:
            self._feed.set_result(None)

    async def _send(self) -> None:
        feed = await self._feed
        if feed is not None:
            meter = PlaybackMeter(self._context, self._job.model.name, self._arrival, live=True)
            async with feed:
                await self._speak(feed, meter)
            meter.finish()
        await send(self._context, self._socket, SessionDone(self._total))

    async def _speak(self, feed: AudioFeed, meter: PlaybackMeter) -> None:
        """Each segment as a file of its own between audio.start and audio.done."""
        context, socket, job = self._context, self._socket, self._job
        encoder: StreamingEncoder | None = None
        index = size = 0
        async with aclosing(feed.chunks()) as chunks:
            async for chunk in chunks:
                if encoder is None:
                    if not len(chunk.audio):
                        continue  # the end of a text that ended after its last segment was spoken
                    encoder, size = job.encoder(), 0
                    text = self._texts.popleft()
                    await send(context, socket, AudioStart(index, text, job.response_format, job.sample_rate))
                data = await encode_chunk(context, job, encoder, chunk, meter)
                if chunk.segment_done:
                    data += await context.encoders.finish(encoder)
                if data:
                    await send(context, socket, data)
                    size += len(data)
                if chunk.segment_done:
                    await send(context, socket, AudioDone(index, size))
                    encoder, index = None, index + 1

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        if self._feed.done() and not self._feed.cancelled() and (feed := self._feed.result()) is not None:
            await feed.__aexit__(None, None, None)
        self._feed.cancel()


async def send(context: ServerContext, socket: WebSocket, message: ServerMessage | bytes) -> None:
    """WebSocketDisconnect when the client is gone, Goodbye when it takes nothing for the write timeout."""
    try:
        async with asyncio.timeout(context.settings.write_timeout):
            if isinstance(message, bytes):
                await socket.send_bytes(message)
            else:
                await socket.send_text(msgspec.json.encode(message).decode())
    except TimeoutError:
        raise Goodbye(POLICY, "the client reads too slowly") from None
    except (RuntimeError, OSError):
        raise WebSocketDisconnect from None
