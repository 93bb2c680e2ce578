"""The audio that a client of a Realtime session sends, and what is said in it."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

from models.interfaces.errors import InputError
from models.interfaces.processor import AudioInput
from service.api.chat.transcriptions import PIECE_SECONDS, Hearing, TranscriptionForm, pieces_of
from service.api.context import ServerContext
from service.api.engines.request_stream import EngineError
from service.api.http.errors import ApiError, as_api_error, explain, invalid
from service.api.http.middleware import RequestRecord
from service.api.realtime.schema import (
    PCM,
    RealtimeFormat,
    RealtimeInput,
    RealtimeTranscription,
    TranscriptionFailure,
)
from service.hub.catalog import HostedModel
from service.media.audio_formats import CHAT_FORMATS, REALTIME_FORMATS
from service.media.reference_audio import resample

MAX_SECONDS = 600
"""Of audio that has not been committed."""
EVENT = "conversation.item.input_audio_transcription"

T = TypeVar("T", bound=msgspec.Struct)


def g711_levels(law: str) -> np.ndarray:
    """float32 [256], the 16-bit sample that each byte of "ulaw" or "alaw" stands for."""
    codes = np.arange(256) ^ (0xFF if law == "ulaw" else 0x55)
    segment, step = codes >> 4 & 7, codes & 0x0F
    if law == "ulaw":
        magnitude, negative = ((step << 3) + 132 << segment) - 132, codes & 0x80 != 0
    else:
        magnitude = (step << 4) + 8 + np.where(segment, 0x100, 0) << np.maximum(segment - 1, 0)
        negative = codes & 0x80 == 0
    return np.where(negative, -magnitude, magnitude).astype(np.float32)


class Ears:
    """The input buffer of a session. record: of the session, whose ticket is charged for what is buffered. tell: sends
    an event of SERVER_EVENTS."""

    def __init__(
        self, context: ServerContext, record: RequestRecord, model: HostedModel, tell: Callable[..., Awaitable[None]]
    ) -> None:
        self.model = model
        self._context = context
        self._record = record
        self._tell = tell
        self._audio = bytearray()
        self._format = PCM
        self._options = RealtimeTranscription()
        self.tells = False
        """Whether the client has asked for transcripts."""

    def configure(self, given: RealtimeInput, now: RealtimeInput) -> RealtimeInput:
        """`now` with what is given. ApiError names the field that does not fit."""
        at = "session.audio.input"
        format = _read(given.format, RealtimeFormat, f"{at}.format") or now.format
        if format.rate not in (None, format.sample_rate):
            raise invalid(f"{at}.format.rate", f"{format.rate} given, must be {format.sample_rate} for {format.type}")
        options = _read(given.transcription, RealtimeTranscription, f"{at}.transcription") or now.transcription
        if options is not None and options.language:
            try:
                self._hears(self._named(options)).language(options.language)
            except InputError as error:
                raise invalid(f"{at}.transcription.language", str(error)) from error
        if format.type != self._format.type:
            self.clear()
        self._format = RealtimeFormat(type=format.type, rate=format.sample_rate)
        if options is not None:
            self._options, self.tells, self.model = options, True, self._named(options)
        return msgspec.structs.replace(now, format=self._format, transcription=options)

    def append(self, audio: str) -> None:
        """audio: base64 of the next samples. ApiError where the buffer is full, 503 where the server is."""
        try:
            data = base64.b64decode(audio, validate=True)
        except (binascii.Error, ValueError):
            raise invalid("audio", "must be base64") from None
        most = MAX_SECONDS * self._format.bytes_per_second
        if len(self._audio) + len(data) > most:
            problem = f"too long: at most {MAX_SECONDS} seconds may be in the buffer; commit or clear it"
            raise invalid("audio", problem, "input_audio_buffer_full")
        self._record.ticket.grow(size=len(data))
        self._audio += data

    def clear(self) -> None:
        self._record.ticket.adjust(-len(self._audio))
        self._audio.clear()

    @property
    def empty(self) -> bool:
        return not self._audio

    async def transcribe(self, item_id: str) -> str:
        """What is said in the buffer, which is empty then; "" where that failed. The client is told of it if it has
        asked for that."""
        data = bytes(self._audio)
        self.clear()
        context, place = self._context, {"item_id": item_id, "content_index": 0}
        ticket = context.admission.ticket("realtime")
        record = RequestRecord(self._record.request_id, "realtime", ticket, self._record.client, model=self.model.name)
        try:
            async with asyncio.timeout(context.settings.request_timeout):
                context.require_ready()
                ticket.grow(1)
                hearing = await self._hearing(record, data)
                async for delta in hearing.deltas():
                    if self.tells:
                        await self._tell(f"{EVENT}.delta", **place, delta=delta.delta)
                done = hearing.done()
                if self.tells:
                    fields: dict[str, Any] = {"languages": done.languages, "usage": done.usage}
                    await self._tell(f"{EVENT}.completed", **place, transcript=done.text, **fields)
                return done.text
        except (ApiError, EngineError, InputError, TimeoutError) as error:
            answer = as_api_error(error)
            failure = TranscriptionFailure(type=answer.type, code=answer.code, message=answer.message)
            await self._tell(f"{EVENT}.failed", **place, error=failure)
            return ""
        finally:
            ticket.release()

    async def _hearing(self, record: RequestRecord, data: bytes) -> Hearing:
        audio, options = self._hears(self.model), self._options
        law = CHAT_FORMATS[REALTIME_FORMATS[self._format.type]]

        def samples() -> np.ndarray:
            if law == "pcm":
                heard = np.frombuffer(data[: len(data) // 2 * 2], "<i2").astype(np.float32)
            else:
                heard = g711_levels(law)[np.frombuffer(data, np.uint8)]
            return resample(heard / 32768, self._format.sample_rate, audio.sample_rate)

        form = TranscriptionForm(
            file="", model=self.model.name, prompt=options.prompt or "", keywords=options.keywords or []
        )
        language = audio.language(options.language) if options.language else None
        pieces = await pieces_of(
            self._context, self.model, await self._context.in_thread(samples), PIECE_SECONDS, record
        )
        return Hearing(self._context, form, self.model, audio, language, record, pieces)

    def _named(self, options: RealtimeTranscription) -> HostedModel:
        """The model that a client names, or else the one of the session: clients name OpenAI's by default."""
        found = self._context.catalog.get(options.model or "")
        return found if found is not None and found.task == "transcription" else self.model

    def _hears(self, model: HostedModel) -> AudioInput:
        audio = model.chat_processor.audio
        assert audio is not None
        return audio


def _read(value: Any, kind: type[T], field: str) -> T | None:
    try:
        return None if value is None else msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        path, problem = explain(str(error))
        raise invalid(f"{field}.{path}" if path else field, problem) from error
