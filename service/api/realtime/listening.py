"""The audio that a client of a Realtime session sends, and what is said in it."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from msgspec import UNSET

from models.interfaces.errors import InputError
from service.api.chat.transcriptions import PIECE_SECONDS, Hearing, TranscriptionForm, hearing_of, pieces_of
from service.api.context import ServerContext
from service.api.engines.request_stream import EngineError
from service.api.http.errors import ApiError, ErrorDetail, as_api_error, invalid
from service.api.http.middleware import RequestRecord
from service.api.realtime import schema
from service.hub.catalog import HostedModel
from service.media.audio_formats import CHAT_FORMATS, REALTIME_FORMATS
from service.media.reference_audio import resample
from service.media.voice_activity import Boundary, TurnDetector, VoiceStream

MAX_SECONDS = 600
"""Of audio that has not been committed."""
KEPT_SECONDS = 30
"""Of audio in which no turn was detected: a client may still commit it."""
DETECTED_SECONDS = 4
"""Of audio that a step of detection takes, which bounds its memory."""
LIVE_SECONDS = 2
"""The longest piece of live speech; what is longer may be a turn, whose answer is waited for."""
EVENT = "conversation.item.input_audio_transcription"


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
        self._begin_ms = 0.0
        self._format = schema.PCM
        self.options: schema.RealtimeTranscription | None = None
        """None: transcripts are not told."""
        self.detection: schema.Detection | None = schema.ServerVad()
        self._detector: TurnDetector | None = None
        self._seen = 0
        """Bytes of the buffer that detection has seen."""
        self._restart_detection()

    @property
    def configuration(self) -> schema.RealtimeInput:
        return schema.RealtimeInput(format=self._format, turn_detection=self.detection, transcription=self.options)

    def configure(self, given: schema.RealtimeInput) -> None:
        """Set what is given. ApiError names the field that does not fit; nothing is set then."""
        at = "session.audio.input"
        format = (given.format or self._format).settled(f"{at}.format")
        options = self.options if given.transcription is UNSET else given.transcription
        model = self._named(options)
        if options is not None and options.language:
            try:
                hearing_of(model).language(options.language)
            except InputError as error:
                raise invalid(f"{at}.transcription.language", str(error)) from error
        detection = self.detection if given.turn_detection is UNSET else given.turn_detection
        changed = format != self._format
        if changed:
            self.take()
        self._format, self.options, self.model = format, options, model
        if changed or detection != self.detection:
            self.detection = detection
            self._restart_detection()

    async def append(self, audio: str) -> list[Boundary]:
        """The boundaries of turns that the next samples complete, in milliseconds of the session. audio: base64.
        ApiError where the buffer is full, 503 where the server is."""
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
        return [] if self._detector is None else await self._detect(self._detector)

    async def _detect(self, detector: TurnDetector) -> list[Boundary]:
        boundaries = []
        step = DETECTED_SECONDS * self._format.bytes_per_second
        whole = len(self._audio) // self._width * self._width
        for start in range(self._seen, whole, step):
            samples = _decoded(bytes(self._audio[start : min(start + step, whole)]), self._format)
            found = await self._context.voice_activity.probabilities(self._stream, samples, self._context.in_thread)
            boundaries += [one for one in map(detector.update, found.tolist()) if one is not None]
        self._seen = whole
        if not boundaries and not detector.speaking:
            self._drop(whole - KEPT_SECONDS * self._format.bytes_per_second)
        return [Boundary(one.starts, one.ms + self._detected_from) for one in boundaries]

    def _restart_detection(self) -> None:
        """Begin at the end of the buffer: nobody speaks."""
        vad = self.detection.stands_for if isinstance(self.detection, schema.SemanticVad) else self.detection
        if vad is None:
            self._detector = None
        else:
            self._detector = TurnDetector(vad.threshold, vad.prefix_padding_ms, vad.silence_duration_ms)
        self._stream = VoiceStream(self._format.sample_rate)
        self._seen = len(self._audio)
        self._detected_from: float = self._begin_ms + 1000 * self._seen / self._format.bytes_per_second

    @property
    def _width(self) -> int:
        """Bytes of a sample."""
        return self._format.bytes_per_second // self._format.sample_rate

    def _offset(self, ms: float) -> int:
        """Where the sample at this time of the session is in the buffer."""
        samples = round((ms - self._begin_ms) * self._format.sample_rate / 1000)
        return min(len(self._audio), max(0, samples * self._width))

    def _drop(self, size: int) -> None:
        """size: bytes; nothing where it is negative."""
        size = max(0, size)
        del self._audio[:size]
        self._record.ticket.adjust(-size)
        self._seen = max(0, self._seen - size)
        self._begin_ms += 1000 * size / self._format.bytes_per_second

    def take(self, end_ms: float | None = None) -> bytes:
        """The buffer up to there, which it loses. None: all of it, and what is said next is another turn."""
        end = len(self._audio) if end_ms is None else self._offset(end_ms)
        data = bytes(self._audio[:end])
        self._drop(end)
        if end_ms is None:
            self._restart_detection()
        return data

    def drop_until(self, ms: float) -> None:
        self._drop(self._offset(ms))

    @property
    def empty(self) -> bool:
        return len(self._audio) < self._width

    @property
    def speaking(self) -> bool:
        """Whether a turn has begun that was not committed."""
        return self._detector is not None and self._detector.speaking

    async def transcribe(self, item_id: str, data: bytes, *, told: bool, live: bool) -> str:
        """What is said in samples of the buffer; "" where that failed. told: the client gets the transcript, too.
        live: as of Hearing."""
        context, place = self._context, {"item_id": item_id, "content_index": 0}
        ticket = context.admission.ticket("realtime")
        record = RequestRecord(self._record.request_id, "realtime", ticket, self._record.client, model=self.model.name)
        try:
            async with asyncio.timeout(context.settings.request_timeout):
                context.require_ready()
                ticket.grow(1, len(data))
                hearing = await self._hearing(record, data, live=live)
                async for delta in hearing.deltas():
                    if told:
                        await self._tell(f"{EVENT}.delta", **place, delta=delta.delta)
                done = hearing.done()
                if told:
                    fields: dict[str, Any] = {"languages": done.languages, "usage": done.usage}
                    await self._tell(f"{EVENT}.completed", **place, transcript=done.text, **fields)
                return done.text
        except (ApiError, EngineError, InputError, TimeoutError) as error:
            answer = as_api_error(error)
            failure = ErrorDetail(answer.message, answer.type, code=answer.code)
            await self._tell(f"{EVENT}.failed", **place, error=failure)
            return ""
        finally:
            ticket.release()

    async def _hearing(self, record: RequestRecord, data: bytes, *, live: bool) -> Hearing:
        context, model, format = self._context, self.model, self._format
        asked = self.options or schema.RealtimeTranscription()
        audio = hearing_of(model)
        form = TranscriptionForm(file="", model=model.name, prompt=asked.prompt or "", keywords=asked.keywords or [])
        language = audio.language(asked.language) if asked.language else None
        heard = await context.in_thread(lambda: resample(_decoded(data, format), format.sample_rate, audio.sample_rate))
        pieces = await pieces_of(context, model, heard, PIECE_SECONDS, record)
        live = live and len(data) <= LIVE_SECONDS * format.bytes_per_second
        return Hearing(context, form, model, audio, language, record, pieces, live)

    def _named(self, options: schema.RealtimeTranscription | None) -> HostedModel:
        """The model that a client names, or else the one of the session: clients name OpenAI's by default."""
        found = self._context.catalog.get((options and options.model) or "")
        return found if found is not None and found.task == "transcription" else self.model


def _decoded(data: bytes, format: schema.RealtimeFormat) -> np.ndarray:
    """float32 [n] of samples in the format of the session."""
    law = CHAT_FORMATS[REALTIME_FORMATS[format.type]]
    if law == "pcm":
        return np.frombuffer(data[: len(data) // 2 * 2], "<i2") / np.float32(32768)
    return g711_levels(law)[np.frombuffer(data, np.uint8)] / np.float32(32768)
