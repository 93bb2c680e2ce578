"""Audio from the engine to a client: buffered with a limit, encoded, and measured as a listener would hear it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import msgspec
import numpy as np

from models.interfaces.processor import SpeechProcessor
from service.api.context import ServerContext
from service.api.engines.request_stream import RequestStream
from service.api.speech.hearing import audible, word_times
from service.api.speech.request import SpeechJob
from service.api.speech.schema import CaptionWord, SpeechAudioSegment
from service.api.spoken_text.text_splitting import spoken_length, words_of
from service.link.messages import Pause, SpeechDelta, SpeechRequest, StepCounts
from service.media.audio_out import StreamingEncoder

SILENCE = 48_000
"""Samples of a pause in one chunk: a client that does not read holds one."""


@dataclass(frozen=True)
class Line:
    """A segment, as it is spoken. pause: seconds of silence before it."""

    text: str
    pause: float = 0.0


@dataclass
class Script:
    """Segments of a text, perhaps still being written. pause: seconds of silence after the last one. left_out: text of
    which the model can speak nothing."""

    lines: list[Line] = field(default_factory=list)
    pause: float = 0.0
    left_out: str = ""

    def add(self, part: str | float) -> None:
        """part: the next segment, or seconds of silence."""
        if isinstance(part, float):
            self.pause += part
        else:
            self.lines.append(Line(part, self.pause))
            self.pause = 0.0

    @property
    def pauses(self) -> float:
        """Seconds of all pauses together."""
        return sum(line.pause for line in self.lines) + self.pause

    def unspoken(self, processor: SpeechProcessor) -> str:
        return processor.unspoken("".join(line.text for line in self.lines) + self.left_out)


@dataclass(frozen=True, eq=False)
class AudioChunk:
    """Audio of one segment, float32 [samples]. arrived: time.monotonic() of its first samples from the engine. silent:
    a pause of the text, which ends no segment."""

    audio: np.ndarray
    arrived: float
    segment: int
    segment_done: bool = False
    truncated: bool = False
    steps: StepCounts | None = None
    silent: bool = False


class AudioFeed:
    """Audio chunks of one request. Audio that the client has not read yet is merged, up to the end of a segment.

    The stream is paused in the engine while more than `max_ahead` seconds wait, and resumed at half of that. `aclose`
    aborts a request that has not ended. script: says where the pauses are; may grow. A callback takes the
    deltas, not a task, so that none of 64 streams waits for 64 tasks to wake up.
    """

    def __init__(
        self, context: ServerContext, job: SpeechJob, request: SpeechRequest, script: Script, max_ahead: float
    ) -> None:
        self._engine = context.engine
        self._request_id = request.request_id
        self._script = script
        self._rate = job.heard_rate
        self._stream: RequestStream[SpeechDelta] = context.engine.submit(request)
        self._max_ahead_samples = int(max_ahead * job.processor.sample_rate)
        self._waiting: deque[tuple[SpeechDelta, float]] = deque()
        self._samples = 0
        self._paused = False
        self._segment = 0
        self._reader: asyncio.Future[None] | None = None
        """Awaited while no delta waits."""
        self._stream.on_update = self._take

    def end(self) -> None:
        """End the chunks with those that have come, and abort a request that has not ended."""
        nothing = np.zeros(0, np.float32)
        self._stream.cut(SpeechDelta(self._request_id, nothing, self._segment, finished=True))

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _take(self) -> None:
        now = time.monotonic()
        for delta in self._stream.take():
            self._waiting.append((delta, now))
            self._samples += len(delta.audio)
            self._segment = delta.segment
        self._set_paused(self._samples > self._max_ahead_samples)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _set_paused(self, paused: bool) -> None:
        if paused != self._paused and not self._stream.ended:
            self._paused = paused
            self._engine.send(Pause(self._request_id, paused))

    async def chunks(self) -> AsyncGenerator[AudioChunk]:
        """Yield the audio with silence in front of each segment and after the last. A pause comes as soon as the
        segment before it has ended, or with the segment after it where that was not written yet. Raises the error of a
        failed request, usually EngineError."""
        lines, silent = self._script.lines, 0
        """silent: segments whose pause has come."""
        last: AudioChunk | None = None
        async with aclosing(self._spoken()) as spoken:
            async for chunk in spoken:
                if len(chunk.audio) and silent == chunk.segment:
                    for silence in self._silence(chunk, lines[silent].pause):
                        yield silence
                    silent += 1
                yield chunk
                if chunk.segment_done and silent < len(lines):
                    for silence in self._silence(chunk, lines[silent].pause):
                        yield silence
                    silent += 1
                last = chunk
        if last is not None:
            for silence in self._silence(last, self._script.pause):
                yield silence

    def _silence(self, beside: AudioChunk, seconds: float) -> Iterator[AudioChunk]:
        samples = round(seconds * self._rate)
        for start in range(0, samples, SILENCE):
            audio = np.zeros(min(SILENCE, samples - start), np.float32)
            yield AudioChunk(audio, beside.arrived, beside.segment, silent=True)

    async def _spoken(self) -> AsyncGenerator[AudioChunk]:
        while True:
            while not self._waiting:
                if self._stream.error is not None:
                    raise self._stream.error
                if self._stream.ended:
                    return
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            chunk = self._merge()
            if self._paused and self._samples <= self._max_ahead_samples // 2:
                self._set_paused(False)
            yield chunk

    def _merge(self) -> AudioChunk:
        first, arrived = self._waiting.popleft()
        parts, last = [first.audio], first
        while self._waiting and not last.segment_done and self._waiting[0][0].segment == first.segment:
            last, _ = self._waiting.popleft()
            parts.append(last.audio)
        audio = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._samples -= len(audio)
        return AudioChunk(audio, arrived, first.segment, last.segment_done, last.truncated, last.steps)


@dataclass(eq=False)
class Captions:
    """When each segment and its words are heard: the words are estimated, or found by a hosted aligner while later
    audio goes on. lines: of the segments. granularities: timestamp_granularities."""

    context: ServerContext
    job: SpeechJob
    lines: Sequence[Line]
    granularities: frozenset[str]
    _audio: list[np.ndarray] = field(default_factory=list)
    """The current segment's."""
    _made: deque[asyncio.Task[SpeechAudioSegment]] = field(default_factory=deque)

    def add(self, chunk: AudioChunk, span: tuple[float, float] | None) -> None:
        """span: begin and end of the segment in seconds, if the chunk completes it."""
        self._audio.append(chunk.audio)
        if span is not None:
            audio, self._audio = np.concatenate(self._audio), []
            self._made.append(asyncio.create_task(self._timed(self._caption(chunk.segment, span, audio), audio)))
            self.context.keep_task(self._made[-1])

    async def take(self, *, rest: bool = False) -> list[SpeechAudioSegment]:
        """Return the captions that are complete, in order, and were not taken yet. rest: wait for the others, too."""
        if self._made:
            await (asyncio.gather(*self._made) if rest else asyncio.sleep(0))
        taken = list[SpeechAudioSegment]()
        while self._made and self._made[0].done():
            taken.append(self._made.popleft().result())
        return taken

    async def _timed(self, caption: SpeechAudioSegment, audio: np.ndarray) -> SpeechAudioSegment:
        words, speed = caption.words, self.job.template.speed
        if words is None or (times := await word_times(self.context, self.job, caption.text, audio)) is None:
            return caption
        heard = (round(min(caption.start + time / speed, caption.end), 3) for span in times for time in span)
        exact = tuple(CaptionWord(one.word, next(heard), next(heard), estimated=False) for one in words)
        return msgspec.structs.replace(caption, words=exact)

    def _caption(self, index: int, span: tuple[float, float], audio: np.ndarray) -> SpeechAudioSegment:
        text, words = self.job.spoken(index, self.lines[index].text), None
        if "word" in self.granularities:
            begin, end = (span[0] + at / self.job.heard_rate for at in audible(audio) or (0, len(audio)))
            words = _estimated(text, begin, end)
        return SpeechAudioSegment(index, *span, text, words)


def _estimated(text: str, begin: float, end: float) -> tuple[CaptionWord, ...]:
    """Words share the time from begin to end by their length."""
    words = words_of(text)
    lengths = [*accumulate(map(spoken_length, words), initial=0)]
    times = [round(begin + (end - begin) * length / lengths[-1], 3) for length in lengths]
    return tuple(CaptionWord(word, *span) for word, span in zip(words, pairwise(times), strict=True))


@dataclass(eq=False)
class Delivery:
    """Encode the audio of an answer, count it, and measure it as heard by a listener who plays it as it arrives. live:
    somebody listens. arrival: time.monotonic() from which the first audio is awaited."""

    context: ServerContext
    job: SpeechJob
    live: bool
    arrival: float = 0.0
    captions: Captions | None = None
    samples: int = 0
    """Samples before they are encoded, pauses included."""
    segments: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each complete segment, in seconds as a listener hears them."""
    begun: float | None = None
    """Begin of the segment whose audio is not complete."""
    truncated: bool = False
    """Whether a segment ended at its cap, not by itself."""
    steps: tuple[StepCounts, ...] = ()
    """Set once the engine has ended the request."""
    _silence: int = 0
    """Samples of pauses."""
    _end: float | None = None
    """When playback of all chunks so far ends."""
    _last_chunk: float = 0.0
    _underrun: float = 0.0

    @property
    def patches(self) -> int:
        return (self.samples - self._silence) // self.job.processor.samples_per_patch

    @property
    def seconds(self) -> float:
        """Seconds as a listener hears them."""
        return self.samples / self.job.heard_rate

    async def file(self, chunks: AsyncGenerator[AudioChunk], encoder: StreamingEncoder) -> AsyncGenerator[bytes]:
        """Yield the encoded file of all chunks, piece by piece as it is made."""
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    if data := await self.encode(encoder, chunk):
                        yield data
        finally:
            self.note()
        self.finish()
        if tail := await self.context.encoders.finish(encoder):
            yield tail

    async def encode(self, encoder: StreamingEncoder, chunk: AudioChunk) -> bytes:
        metrics, job = self.context.metrics, self.job
        if not chunk.silent and self.begun is None:
            self.begun = self.seconds
        self.samples += len(chunk.audio)
        self._silence += len(chunk.audio) if chunk.silent else 0
        if chunk.segment_done and self.begun is not None:
            self.segments.append((self.begun, self.seconds))
            self.begun = None
        if self.captions is not None and not chunk.silent:
            self.captions.add(chunk, self.segments[-1] if chunk.segment_done else None)
        if chunk.steps is not None:
            self.steps = (chunk.steps,)
        if chunk.truncated:
            self.truncated = job.record.notes["truncated"] = True
            metrics.observe("speech_truncated_total", model=job.model.name)
        began = time.monotonic()
        data = await self.context.encoders.encode(encoder, chunk.audio)
        took = time.monotonic() - began
        metrics.observe("audio_encode_duration_seconds", took, format=job.response_format)
        if len(chunk.audio):
            # From its arrival: time that a chunk waited for a slow client is not an underrun of the server.
            self._heard(chunk.arrived + took, len(chunk.audio) / job.heard_rate)
        return data

    def _heard(self, at: float, seconds: float) -> None:
        """`seconds` of audio were ready to be sent at the time `at`."""
        if self.live:
            metrics, model = self.context.metrics, self.job.model.name
            if self._end is None:
                metrics.observe("time_to_first_audio_seconds", at - self.arrival, model=model)
                self._end = at
            else:
                metrics.observe("audio_chunk_gap_seconds", max(0.0, at - self._last_chunk), model=model)
                late = max(0.0, at - self._end)
                self._underrun += late
                self._end += late
            self._end += seconds
        self._last_chunk = at

    def note(self) -> None:
        """Add what was spoken to the access log line of the request or connection."""
        notes = self.job.record.notes
        before = notes.get("audio_seconds", 0.0)
        assert isinstance(before, float)
        notes["audio_seconds"] = round(before + self.seconds, 2)

    def finish(self) -> None:
        """Observe the metrics of audio that was delivered to its end."""
        if not self.samples:
            return
        metrics, model = self.context.metrics, self.job.model.name
        metrics.observe("audio_realtime_factor", (self._last_chunk - self.arrival) / self.seconds, model=model)
        if self.live:
            metrics.observe("audio_underrun_seconds", self._underrun, model=model)
            metrics.observe("audio_streams_total", model=model, underrun="true" if self._underrun > 0 else "false")
