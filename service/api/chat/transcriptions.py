"""POST /v1/audio/transcriptions: what is said in a recording. A longer one is cut at quiet places into pieces, each of
which is a chat job of its own."""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from models.interfaces.errors import InputError
from models.interfaces.processor import AlignedWord, Aligner, AudioInput, Transcript
from service.api.chat.job import ChatJob, generate, prepare_job
from service.api.chat.schema import ChatRequestBody, TokenLogprob, TopLogprob
from service.api.context import ServerContext, context_of
from service.api.http.admission import Decoding
from service.api.http.errors import ApiError, bad_request, invalid
from service.api.http.form import read_form
from service.api.http.middleware import RequestRecord, record_of
from service.api.http.openapi import JSON, WORK_ERRORS, json_response, operation
from service.api.http.streaming import DONE, event, event_stream, unless_disconnected
from service.api.speech.hearing import align
from service.api.tracing import phase
from service.hub.catalog import HostedModel
from service.system.concurrency import all_results, merged

router = APIRouter()

PATH = "/v1/audio/transcriptions"
PIECE_SECONDS, CUE_SECONDS = 120.0, 30.0
"""Length of the pieces of a longer recording, and where their times are part of the answer, or for
chunking_strategy auto."""
AT_ONCE = 16
"""Pieces of a request that are in the engine together."""
MAX_FIELDS = 256
NO_TAG = 50
"""Characters of an answer that name a language at most: without the tag by then, the answer is the text itself."""
LISTS = ("languages", "keywords", "include", "timestamp_granularities")
LONGEST_CUE, SHORTEST_CUE = 7.0, 0.2
"""Seconds of a cue of captions."""
ENDINGS = frozenset(".?!。？！")
CLOSING = re.compile(r"[^\w\s]*")
"""What follows a word directly."""


class TranscriptionForm(msgspec.Struct, frozen=True, kw_only=True):
    """file: a recording in WAV, FLAC, Ogg, MP3, M4A, AAC, WebM or the sound of an MP4. language: a code such as en, or
    languages with one entry; otherwise the model tells which it hears. prompt, keywords: names and words that may
    occur. chunking_strategy: auto cuts at quiet places every 30 seconds, not every two minutes. stream: with json or
    text. include: with json. timestamp_granularities: with verbose_json; word where an aligner is hosted."""

    file: str
    model: str
    language: str | None = None
    languages: list[str] = []
    prompt: str = ""
    keywords: list[str] = []
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"] = "json"
    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0
    timestamp_granularities: list[Literal["segment", "word"]] = []
    stream: bool = False
    include: list[Literal["logprobs"]] = []
    chunking_strategy: Any = None


class TranscribedLanguage(msgspec.Struct, frozen=True):
    code: str


class InputTokenDetails(msgspec.Struct, frozen=True):
    audio_tokens: int
    text_tokens: int


class TokenUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokenDetails
    type: Literal["tokens"] = "tokens"


class DurationUsage(msgspec.Struct, frozen=True):
    seconds: float
    type: Literal["duration"] = "duration"


class Transcription(msgspec.Struct, frozen=True):
    """languages: those that were heard, or the given one; empty where nobody speaks."""

    text: str
    languages: list[TranscribedLanguage]
    usage: TokenUsage
    logprobs: list[TopLogprob] | UnsetType = UNSET


class TranscriptionSegment(msgspec.Struct, frozen=True):
    """start, end: seconds at which the piece was cut. no_speech_prob: pieces in which nobody speaks are left out."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float = 0.0


class VerboseTranscription(msgspec.Struct, frozen=True):
    """language: its English name in lower case; empty where nobody speaks. duration: seconds. words: without
    punctuation."""

    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment]
    usage: DurationUsage
    words: list[AlignedWord] | UnsetType = UNSET
    task: Literal["transcribe"] = "transcribe"


class TranscriptDelta(msgspec.Struct, frozen=True, tag_field="type", tag="transcript.text.delta"):
    delta: str
    logprobs: list[TopLogprob] | UnsetType = UNSET


class TranscriptDone(Transcription, frozen=True, tag_field="type", tag="transcript.text.done"):
    """text: with repetitions repaired, which deltas may have."""


@router.post(
    PATH,
    openapi_extra=operation(
        "Transcribe a recording.",
        {JSON: Transcription, "text/plain": None, "text/vtt": None},
        events=(TranscriptDelta, TranscriptDone),
        errors=WORK_ERRORS,
        body={"multipart/form-data": TranscriptionForm},
    ),
)
async def transcribe(request: Request) -> Response:
    context, record = context_of(request), record_of(request.scope)
    _require_recogniser(context)
    context.require_ready()
    body, data, unread = await read_form(request, TranscriptionForm, "file", "file and model", LISTS, MAX_FIELDS)
    context.field_warnings.warn(PATH, unread)
    _refuse(body, aligns=context.catalog.of_task("alignment") is not None)
    model = context.model(body.model, "transcription", record)
    hearing = await unless_disconnected(
        request, _prepared(context, body, model, data or b"", record), context.settings.request_timeout
    )
    if body.stream:
        return event_stream(hearing.events(), context.settings)
    await unless_disconnected(request, hearing.hear_all())
    await unless_disconnected(request, hearing.align(), context.settings.request_timeout)
    return hearing.answer()


@router.post("/v1/audio/translations", include_in_schema=False)
async def translate(request: Request) -> Response:
    _require_recogniser(context_of(request))
    message = f"Models here do not translate speech: transcribe it ({PATH}), and have a chat model translate the text."
    raise bad_request(message, code="unsupported_endpoint")


def _require_recogniser(context: ServerContext) -> None:
    if context.catalog.of_task("transcription") is None:
        message = "This server has no speech recognition: host a model that has, such as Qwen/Qwen3-ASR-0.6B."
        raise ApiError(404, message, code="no_speech_recognition")


def _refuse(body: TranscriptionForm, *, aligns: bool) -> None:
    """ApiError 400 for what no model here can do, and for fields that exclude each other. aligns: an aligner is
    hosted."""
    kind, granularities, strategy = body.response_format, body.timestamp_granularities, body.chunking_strategy
    unsupported: tuple[tuple[str, object, str], ...] = (
        ("response_format", kind == "diarized_json", "diarized_json is not supported: no speaker model is hosted here"),
        ("chunking_strategy", strategy not in (None, "auto"), "only auto is supported"),
        ("timestamp_granularities", "word" in granularities and not aligns, "word requires that an aligner is hosted"),
    )
    for name, given, reason in unsupported:
        if given:
            raise invalid(name, reason, "unsupported_parameter")
    conflicts: tuple[tuple[str, object, str], ...] = (
        ("timestamp_granularities", granularities and kind != "verbose_json", "verbose_json"),
        ("stream", body.stream and kind not in ("json", "text"), "json or text"),
        ("include", body.include and kind != "json", "json"),
    )
    for name, given, formats in conflicts:
        if given:
            raise invalid(name, f"only with response_format {formats}")


@dataclass(eq=False)
class Piece:
    """Consecutive samples of a recording, float32 [n], and what has been heard there. start, end: seconds."""

    samples: np.ndarray
    start: float
    end: float
    job: ChatJob | None = None
    raw: str = ""
    """The answer so far, with the language that the model names first."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    words: list[AlignedWord] = field(default_factory=list)
    """Those that were aligned, with seconds of the recording."""


async def _prepared(
    context: ServerContext, body: TranscriptionForm, model: HostedModel, data: bytes, record: RequestRecord
) -> Hearing:
    """Decode the file and cut it into pieces. ApiError or InputError names the field that does not fit."""
    audio = hearing_of(model)
    named = body.language or (body.languages[0] if len(body.languages) == 1 else None)
    language = None if named is None else audio.language(named)
    times = body.response_format in ("srt", "vtt", "verbose_json")
    seconds = CUE_SECONDS if times or body.chunking_strategy else PIECE_SECONDS
    rate, began = audio.sample_rate, time.monotonic()
    with Decoding(record.ticket) as decoding, phase("media", kind="audio"):
        try:
            samples = await context.media.audio_file(
                data, sample_rate=rate, field="file", client=record.client, recording=True
            )
        except InputError:
            context.metrics.observe("media_rejections_total", kind="audio", reason="refused")
            raise
        decoding.keep(samples.nbytes)
    context.metrics.observe("media_decode_duration_seconds", time.monotonic() - began, kind="audio")
    pieces = await pieces_of(context, model, samples, seconds, record)
    return Hearing(context, body, model, audio, language, record, pieces)


def hearing_of(model: HostedModel) -> AudioInput:
    audio = model.chat_processor.audio
    assert audio is not None
    return audio


async def pieces_of(
    context: ServerContext, model: HostedModel, samples: np.ndarray, seconds: float, record: RequestRecord
) -> list[Piece]:
    """The pieces of a recording, for which the record's ticket takes places."""
    audio = hearing_of(model)
    cut = await context.in_thread(lambda: audio.pieces(samples, seconds))
    ends = np.cumsum([len(one) for one in cut]) / audio.sample_rate
    record.ticket.grow(min(len(cut), AT_ONCE) - 1)
    record.notes["audio_seconds"] = round(float(ends[-1]), 3)
    context.metrics.observe("audio_heard_seconds_total", float(ends[-1]), model=model.name)
    return [Piece(one, end - len(one) / audio.sample_rate, end) for one, end in zip(cut, ends.tolist(), strict=True)]


@dataclass(eq=False)
class Hearing:
    """A recording to transcribe. language: the model's name of it; None: the model tells. live: of its
    requests to the engine."""

    context: ServerContext
    body: TranscriptionForm
    model: HostedModel
    audio: AudioInput
    language: str | None
    record: RequestRecord
    pieces: Sequence[Piece]
    live: bool = False
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    def __post_init__(self) -> None:
        self._tag = self.model.chat_processor.detokenize([self.audio.start_id]).decode()

    async def hear_all(self) -> None:
        async with aclosing(self.deltas()) as deltas:
            async for _ in deltas:
                pass

    async def align(self) -> None:
        """Find the times of the words, if the answer has them and an aligner is hosted. Captions in a language that it
        does not know do without; InputError for words in one."""
        wanted = "word" in self.body.timestamp_granularities
        model = self.context.catalog.of_task("alignment")
        if model is None or not (wanted or self.body.response_format in ("srt", "vtt")):
            return
        aligner = cast(Aligner, model.processor)

        async def timed(piece: Piece) -> None:
            said = self._transcript(piece)
            try:
                words = aligner.words(said.text, said.language)
            except InputError:
                if wanted:
                    raise
                return
            if words:
                async with self._turns:
                    found = await align(self.context, words, lambda: piece.samples, self.record)
                piece.words = [replace(one, start=piece.start + one.start, end=piece.start + one.end) for one in found]

        await all_results([timed(piece) for piece in self.pieces])

    async def events(self) -> AsyncGenerator[bytes]:
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                yield event(delta)
        yield event(self.done()) + DONE

    def done(self) -> TranscriptDone:
        return TranscriptDone(**self._fields())

    async def deltas(self) -> AsyncGenerator[TranscriptDelta]:
        """What is said, in the order of the recording; what is heard of later pieces meanwhile waits."""

        async def hear(piece: Piece) -> AsyncGenerator[str]:
            async with self._turns:
                piece.job = await self._job(piece)
                piece.job.live = self.live
                async with aclosing(self._text(piece, piece.job)) as texts:
                    async for text in texts:
                        yield text
            yield ""  # its end

        said, waiting, ended = "", [""] * len(self.pieces), set[int]()
        current, begun, sent = 0, False, 0
        async with aclosing(merged([hear(piece) for piece in self.pieces])) as heard:
            async for index, text in heard:
                waiting[index] += text
                ended |= set() if text else {index}
                while current < len(self.pieces):
                    if text := waiting[current]:
                        both = self.audio.joined([Transcript(None, said), Transcript(None, text)])
                        delta = text if begun else both.text[len(said) :]
                        tokens = self._tokens(self.pieces[current], sent) if self.body.include else []
                        yield TranscriptDelta(delta, tokens if self.body.include else UNSET)
                        said, waiting[current], begun, sent = said + delta, "", True, sent + len(tokens)
                    if current not in ended:
                        break
                    current, begun, sent = current + 1, False, 0

    def answer(self) -> Response:
        kind, whole = self.body.response_format, self._whole()
        if kind in ("srt", "vtt"):
            return Response(self._captions(kind), media_type="text/vtt" if kind == "vtt" else "text/plain")
        if kind == "text":
            return Response(f"{whole.text}\n", media_type="text/plain")
        if kind == "json":
            return json_response(Transcription(**self._fields()))
        seconds = self.pieces[-1].end
        segments = [self._segment(index, piece) for index, piece in enumerate(self.pieces)]
        language = (whole.language or "").split(",")[0].lower()
        said = [one for one in segments if one.text]
        verbose = VerboseTranscription(language, seconds, whole.text, said, DurationUsage(seconds))
        if "word" in self.body.timestamp_granularities:
            words = [word for piece in self.pieces for word in piece.words]
            verbose = msgspec.structs.replace(verbose, words=words)
        return json_response(verbose)

    async def _job(self, piece: Piece) -> ChatJob:
        """ApiError that names the file if its piece is too long for the model's cache."""
        hints = "\n".join(filter(None, (self.body.prompt, ", ".join(self.body.keywords))))
        audio, language = self.audio, self.language

        def make() -> tuple[Any, int]:
            item = audio.item(piece.samples)
            return audio.prompt(item, context=hints, language=language), audio.max_new_tokens(item)

        prompt, most = await self.context.in_thread(make)
        asked = ChatRequestBody(
            model=self.model.name,
            messages=[],
            max_tokens=most,
            temperature=self.body.temperature,
            logprobs=self.body.response_format == "verbose_json" or bool(self.body.include),
        )
        try:
            return await prepare_job(self.context, asked, self.record, raw=prompt, task="transcription")
        except ApiError as error:
            if error.param != "messages":
                raise
            raise bad_request(f"file: {error.message.removeprefix('messages: ')}", "file", error.code) from error

    async def _text(self, piece: Piece, job: ChatJob) -> AsyncGenerator[str]:
        """What is said in a piece, as it comes, without white space at the ends."""
        piece.raw, piece.logprobs = "", []
        begun, held, said = self.language is not None, "", False
        async with aclosing(generate(self.context, job, 0)) as deltas:
            async for delta in deltas:
                piece.raw += delta.content
                piece.logprobs += delta.logprobs
                held += delta.content
                if not begun:
                    before, tag, behind = held.partition(self._tag)
                    begun = bool(tag) or "\n" in before or len(before) > NO_TAG or delta.finish_reason is not None
                    held = behind if tag else held
                text = held.rstrip() if said else held.strip()
                if begun and text:
                    held = held[len(held.rstrip()) :]
                    said = True
                    yield text

    def _whole(self) -> Transcript:
        return self.audio.joined([self._transcript(piece) for piece in self.pieces])

    def _transcript(self, piece: Piece) -> Transcript:
        return self.audio.transcript(piece.raw, self.language)

    def _tokens(self, piece: Piece, start: int = 0) -> list[TopLogprob]:
        """The tokens of what is said, from `start`: those behind the tag, or all if there is none."""
        behind = next((at + 1 for at, entry in enumerate(piece.logprobs) if entry.token == self._tag), 0)
        return [TopLogprob(one.token, one.logprob, one.bytes) for one in piece.logprobs[behind + start :]]

    def _fields(self) -> dict[str, Any]:
        """Of Transcription and TranscriptDone."""
        whole, codes = self._whole(), {name: code for code, name in self.audio.languages.items()}
        names = whole.language.split(",") if whole.language else []
        usages = [piece.job.usage() for piece in self.pieces if piece.job is not None]
        heard = sum(one.prompt_tokens_details.audio_tokens for one in usages)
        read, written = sum(one.prompt_tokens for one in usages), sum(one.completion_tokens for one in usages)
        self.record.notes |= {"prompt_tokens": read, "tokens": written}
        entries = [entry for piece in self.pieces for entry in self._tokens(piece)]
        return {
            "text": whole.text,
            "languages": [TranscribedLanguage(codes[name]) for name in names if name in codes],
            "usage": TokenUsage(read, written, read + written, InputTokenDetails(heard, read - heard)),
            "logprobs": entries if self.body.include else UNSET,
        }

    def _segment(self, index: int, piece: Piece) -> TranscriptionSegment:
        text, entries = self._transcript(piece).text, self._tokens(piece)
        raw = text.encode()
        return TranscriptionSegment(
            id=index,
            seek=round(piece.start * 100),
            start=piece.start,
            end=piece.end,
            text=text,
            tokens=self.model.chat_processor.tokenize(text),
            temperature=self.body.temperature,
            avg_logprob=sum(entry.logprob for entry in entries) / max(1, len(entries)),
            compression_ratio=len(raw) / len(zlib.compress(raw)),
        )

    def _captions(self, kind: Literal["srt", "vtt"]) -> str:
        """Cues of sentences where words have times, else one for each piece in which somebody speaks."""
        mark = "," if kind == "srt" else "."
        said = [(piece, text) for piece in self.pieces if (text := self._transcript(piece).text)]
        blocks = ["WEBVTT"] if kind == "vtt" else []
        cues = [cue for piece, text in said for cue in sentences(text, piece.words) or [(piece.start, piece.end, text)]]
        for number, (start, end, text) in enumerate(cues, 1):
            times = f"{_clock(start, mark)} --> {_clock(max(end, start + SHORTEST_CUE), mark)}"
            blocks.append("\n".join([*([str(number)] if kind == "srt" else []), times, " ".join(text.split())]))
        return "".join(f"{block}\n\n" for block in blocks)


def sentences(text: str, words: Sequence[AlignedWord]) -> list[tuple[float, float, str]]:
    """(start, end, text) of the sentences of a transcript, cut where they last too long. words: all of its words, which
    have its letters in their order."""
    cues: list[tuple[float, float, str]] = []
    begun, cursor, start = 0, 0, None
    for index, word in enumerate(words):
        start = word.start if start is None else start
        for character in word.word:
            cursor = text.index(character, cursor) + 1
        closing = CLOSING.match(text, cursor)
        cursor = cursor if closing is None else closing.end()
        ends = not ENDINGS.isdisjoint(text[begun:cursor][-2:]) or word.end - start >= LONGEST_CUE
        if ends or index + 1 == len(words):
            stop = cursor if index + 1 < len(words) else len(text)
            cues.append((start, word.end, text[begun:stop].strip()))
            begun, start = stop, None
    return cues


def _clock(seconds: float, mark: str) -> str:
    """00:01:02,345 for SubRip, with a point for WebVTT."""
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{mark}{milliseconds % 1000:03}"
