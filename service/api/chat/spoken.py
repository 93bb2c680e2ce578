"""Answers that are spoken while they are being written: the text of a choice goes to a speech model segment by
segment."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET, UnsetType

from models.interfaces.errors import InputError
from service.api.chat import schema
from service.api.chat.detokenizer import TextDelta
from service.api.chat.schema import ChatRequestBody
from service.api.context import ServerContext
from service.api.engines.request_stream import EngineError, step_report
from service.api.http.errors import ApiError, invalid, renamed
from service.api.http.middleware import RequestRecord
from service.api.speech.delivery import AudioChunk, Delivery, Script
from service.api.speech.live_text import LiveText
from service.api.speech.request import SpeechJob, SpokenTooLong, max_written_chars, prepare
from service.api.speech.schema import SpeechOptions, VoiceOptions
from service.hub.catalog import OPENAI_PCM_RATE, HostedModel
from service.media.audio_formats import CHAT_FORMATS, FORMATS, REALTIME_FORMATS
from service.system.concurrency import merged

AHEAD = 2
"""Number of deltas and pieces of audio that wait for a slow client; beyond it the text waits, and the audio is
merged."""
PIECE = 6
"""Multiple of bytes that holds whole samples and whole base64 groups."""


async def prepare_spoken(context: ServerContext, body: ChatRequestBody, record: RequestRecord) -> SpokenAnswer:
    """Say how the answer is spoken. ApiError names the field that does not fit."""
    chat_model = context.model(body.model, "chat", record).name
    modalities = body.modalities or ["text"]
    if "audio" not in modalities:
        raise invalid("audio", 'requires modalities: ["text", "audio"]')
    if "text" not in modalities:
        raise invalid("modalities", 'audio alone is not supported; ask for ["text", "audio"]')
    if not context.catalog.of_kind("speech"):
        raise invalid("modalities", "no speech model is served, so answers cannot be spoken", "unsupported_parameter")
    audio = body.audio
    if audio is None:
        raise invalid("audio", "required, with voice and format, to have the answer spoken")
    schema.refuse(audio, schema.NOT_SPOKEN, "in a spoken answer", "audio.")
    if body.n is not None and body.n > 1:
        raise invalid("n", f"{body.n} given, an answer that is spoken can only have one choice")
    if body.stream and FORMATS[CHAT_FORMATS[audio.format]].has_header:
        *names, last = REALTIME_FORMATS.values()
        raise invalid("audio.format", f"must be {', '.join(names)} or {last} in a stream")
    options = _options(audio, _named_model(context, audio), body.seed)
    try:
        with renamed(_within_audio):
            job = await prepare(context, options, record, default_format="wav", default_granularity="sentence")
    finally:
        record.model = chat_model
    record.ticket.grow(1)
    return SpokenAnswer(context, job, streamed=bool(body.stream))


def _named_model(context: ServerContext, audio: schema.AudioParams) -> HostedModel | None:
    """The speech model that the request or else the setting names, if any."""
    name = audio.model or context.settings.spoken_answer_model
    if name is None:
        return None
    model = context.catalog.get(name)
    if model is None or model.kind != "speech":
        problem = f"no speech model of this name is served; {context.served('speech')}"
        raise invalid("audio.model", problem, "model_not_found")
    return model


def _options(audio: schema.AudioParams, model: HostedModel | None, seed: int | None) -> SpeechOptions:
    given = {name: getattr(audio, name) for name in VoiceOptions.__struct_fields__}
    given |= {"model": model and model.name, "seed": seed if audio.seed is None else audio.seed}
    pcm_rate = OPENAI_PCM_RATE if audio.format == "pcm16" else None
    sample_rate = pcm_rate if audio.sample_rate is None else audio.sample_rate
    return SpeechOptions(response_format=CHAT_FORMATS[audio.format], sample_rate=sample_rate, **given)


def _within_audio(error: ApiError) -> ApiError:
    """Turn an error of a speech request's field into one with the field's name in a chat request."""
    if error.param is None or error.status >= 500:
        return error
    moved = error.at("audio.format" if error.param == "response_format" else f"audio.{error.param}")
    moved.status = 400
    return moved


class SpokenAnswer:
    """The speech of one answer. Text and speech fail together, and closing a generator of either ends both."""

    def __init__(self, context: ServerContext, job: SpeechJob, *, streamed: bool) -> None:
        self.cut = False
        """Whether the text or the time of the request reached its limit."""
        self.file = bytearray()
        """Audio that has been encoded; of a stream, that the client has not got yet."""
        self.script = Script()
        self._context = context
        self._job = job
        self._streamed = streamed
        self._most_characters = max_written_chars(context, live=streamed)
        self._encoder = job.encoder()
        self.delivery = Delivery(context, job, live=streamed)
        self._too_long = False
        """Whether the text has a part that was not spoken because of its length."""
        self._transcript = ""
        """What a stream has sent."""
        self._called = False
        self._finish_reason: schema.FinishReason | None = None

    @property
    def patches(self) -> int:
        """Number of audio tokens so far."""
        return self.delivery.patches

    @property
    def unspoken(self) -> str:
        """Letters, digits and signs of what is spoken that the speech model cannot speak, each once."""
        return self.script.unspoken(self._job.processor)

    @property
    def truncated(self) -> bool:
        """Whether a segment of the speech ended at its cap, or the text was too long to be spoken whole."""
        return self._too_long or self.delivery.truncated

    def audio(self, transcript: str) -> schema.AnswerAudio:
        """The whole file, once all parts are in `file`."""
        self._encoder.complete(self.file)
        return msgspec.structs.replace(self._last(transcript), transcript=transcript)

    def _last(self, transcript: str) -> schema.AnswerAudio:
        """What is in `file`, and what is known of the audio at its end."""
        return schema.AnswerAudio(
            id=schema.id_of(transcript),
            data=base64.b64encode(self.file).decode(),
            expires_at=int(time.time() + schema.ID_LIFETIME),
            finish_reason="length" if self.cut or self.truncated else "stop",
            steps=step_report(self.delivery.steps),
            unspoken=self.unspoken or UNSET,
        )

    def transcribed(self, text: str) -> schema.AnswerAudio | UnsetType:
        if not text:
            return UNSET
        self._transcript += text
        return schema.AnswerAudio(transcript=text)

    def sound(self, data: bytes) -> list[schema.ChunkChoice]:
        """The next piece of audio; empty while it is not whole samples."""
        self.file += data
        whole = len(self.file) - len(self.file) % PIECE
        if not whole:
            return []
        audio = schema.AnswerAudio(data=base64.b64encode(self.file[:whole]).decode())
        del self.file[:whole]
        return [schema.ChunkChoice(0, schema.DeltaMessage(audio=audio))]

    def ending(self) -> list[schema.ChunkChoice]:
        """The end of a stream. Calls without any text have no audio."""
        has_audio = self._transcript or not self._called
        last = [schema.DeltaMessage(audio=self._last(self._transcript))] if has_audio else []
        finish_reason = "length" if self.cut else self._finish_reason
        ended = schema.ChunkChoice(0, schema.DeltaMessage(), finish_reason=finish_reason)
        return [*(schema.ChunkChoice(0, delta) for delta in last), ended]

    async def parts(self, deltas: AsyncGenerator[TextDelta]) -> AsyncGenerator[TextDelta | bytes]:
        """Text as it is written and encoded audio as it is spoken. At request_timeout both end with what there is so
        far."""
        context = self._context
        text = LiveText(context, self._job, live=self._streamed, first="clause")
        self.script = text.script
        remaining = self._job.record.arrival + context.settings.request_timeout - time.monotonic()
        limit = asyncio.get_running_loop().call_later(remaining, self._time_out, text)
        try:
            sources: list[AsyncGenerator[TextDelta | bytes]] = [self._written(deltas, text), self._sounds(text)]
            async with aclosing(merged(sources, AHEAD)) as parts:
                async for _, part in parts:
                    yield part
        finally:
            limit.cancel()
            await text.close()

    def _time_out(self, text: LiveText) -> None:
        self.cut = True
        text.end()

    async def _written(self, deltas: AsyncGenerator[TextDelta], text: LiveText) -> AsyncGenerator[TextDelta]:
        """The deltas, each after it was given to the speech. Reasoning and calls are not spoken; the text before a call
        is spoken while the call is being written."""
        room = self._most_characters
        async with aclosing(deltas):
            async for delta in deltas:
                full = len(delta.content) > room
                if full:
                    self.cut = True
                    delta = msgspec.structs.replace(
                        delta, content=delta.content[:room], finish_reason="length", calls=()
                    )
                room -= len(delta.content)
                self._called = self._called or bool(delta.calls)
                self._finish_reason = delta.finish_reason or self._finish_reason
                if delta.content or delta.calls or delta.finish_reason is not None:
                    await self._write(text, delta)
                yield delta
                if full:
                    break

    async def _write(self, text: LiveText, delta: TextDelta) -> None:
        try:
            await text.write(delta.content, last=delta.finish_reason is not None, pause=bool(delta.calls))
        except SpokenTooLong:
            self._too_long = self._job.record.notes["unspoken"] = True
        except InputError:
            # Text that the speech model cannot speak stays in the transcript.
            self._job.record.notes["unspoken"] = True

    async def _sounds(self, text: LiveText) -> AsyncGenerator[bytes]:
        feed = await text.feed
        if feed is None:
            if tail := await self._context.encoders.finish(self._encoder):
                yield tail
            return
        assert text.arrival is not None
        self.delivery.arrival = text.arrival
        async with aclosing(self.delivery.file(self._followed(feed.chunks()), self._encoder)) as pieces:
            async for data in pieces:
                yield data

    async def _followed(self, chunks: AsyncGenerator[AudioChunk]) -> AsyncGenerator[AudioChunk]:
        """The chunks; observes when the first is there."""
        job = self._job
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    if not self.delivery.samples and len(chunk.audio) and self._streamed:
                        waited = time.monotonic() - job.record.arrival
                        self._context.metrics.observe("spoken_first_audio_seconds", waited, model=job.record.model)
                    yield chunk
        except EngineError as error:
            if error.field is None:
                raise
            # A text that is too long to be spoken is no field of a chat request: how to speak it can be shorter.
            field = f"audio.{error.field}"
            if error.field == "input":
                field = "audio.instructions" if job.speaker.design else "audio"
            raise EngineError(error.status, error.code, error.message, field, error.retry_after) from error
