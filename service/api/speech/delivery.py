"""Audio from the engine to a client: buffered with a limit, encoded, and measured as a listener would hear it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from service.api.context import ServerContext
from service.api.engines.request_stream import RequestStream
from service.api.speech.request import SpeechJob
from service.link.messages import Pause, SpeechDelta, SpeechRequest, StepCounts
from service.media.audio_out import StreamingEncoder


@dataclass(frozen=True, eq=False)
class AudioChunk:
    """Audio of one segment, float32 [samples]. arrived: time.monotonic() of its first samples from the engine."""

    audio: np.ndarray
    arrived: float
    segment: int
    segment_done: bool
    finished: bool
    truncated: bool
    steps: StepCounts | None
    silent: bool = False
    """A pause of the text, not audio of the segment."""


class AudioFeed:
    """Audio chunks of one request. Audio that the client has not read yet is merged, up to the end of a segment.

    The stream is paused in the engine while more than `max_ahead` seconds wait, and resumed at half of that. Use as a
    context manager: leaving it aborts a request that has not ended.

    A callback takes the deltas, not a task: when the first patches of 64 streams come in one message, none waits for 64
    tasks to wake up.
    """

    def __init__(self, context: ServerContext, request: SpeechRequest, sample_rate: int, max_ahead: float) -> None:
        self._engine = context.engine
        self._request_id = request.request_id
        self._stream: RequestStream[SpeechDelta] = context.engine.submit(request)
        self._max_ahead_samples = int(max_ahead * sample_rate)
        self._waiting: deque[tuple[SpeechDelta, float]] = deque()
        self._samples = 0
        self._paused = False
        self._segment = 0
        self._reader: asyncio.Future[None] | None = None
        """Awaited by chunks() while there are none."""
        self._stream.on_update = self._take

    async def __aenter__(self) -> AudioFeed:
        return self

    def end(self) -> None:
        """Aborts a request that has not ended; its chunks end with those that have come."""
        nothing = np.zeros(0, np.float32)
        self._stream.cut(SpeechDelta(self._request_id, nothing, self._segment, finished=True))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """Raises the error of a failed request, usually EngineError."""
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
        return AudioChunk(audio, arrived, first.segment, last.segment_done, last.finished, last.truncated, last.steps)


class AudioCounts:
    """What the audio of an answer has so far."""

    def __init__(self, job: SpeechJob) -> None:
        self._job = job
        self.samples = 0
        """Samples before they are encoded, pauses included."""
        self.silence = 0
        """Samples of pauses."""
        self.truncated = False
        """Whether a segment ended at its cap, not by itself."""
        self.steps: tuple[StepCounts, ...] = ()
        """Set once the engine has ended the request."""

    def add(self, chunk: AudioChunk) -> None:
        self.samples += len(chunk.audio)
        self.silence += len(chunk.audio) if chunk.silent else 0
        if chunk.steps is not None:
            self.steps = (chunk.steps,)
        if chunk.truncated:
            self.truncated = self._job.record.notes["truncated"] = True

    @property
    def patches(self) -> int:
        return (self.samples - self.silence) // self._job.processor.samples_per_patch

    @property
    def seconds(self) -> float:
        """Seconds as a listener hears them."""
        return self.samples / self._job.heard_rate


class PlaybackMeter:
    """Simulates a listener that plays audio as it arrives: time to first audio, gaps, underruns."""

    def __init__(self, context: ServerContext, model: str, arrival: float, *, live: bool) -> None:
        self._metrics = context.metrics
        self._model = model
        self._arrival = arrival
        self._live = live
        self._end: float | None = None
        """When playback of all chunks so far ends."""
        self._last_chunk = arrival
        self._underrun = 0.0
        self.seconds = 0.0

    def chunk_ready(self, at: float, seconds: float) -> None:
        """Records that `seconds` of audio were ready to be sent at time `at`."""
        if self._live:
            if self._end is None:
                self._metrics.observe("time_to_first_audio_seconds", at - self._arrival, model=self._model)
                self._end = at
            else:
                self._metrics.observe("audio_chunk_gap_seconds", max(0.0, at - self._last_chunk), model=self._model)
                late = max(0.0, at - self._end)
                self._underrun += late
                self._end += late
            self._end += seconds
        self._last_chunk = at
        self.seconds += seconds

    def finish(self) -> None:
        if not self.seconds:
            return
        factor = (self._last_chunk - self._arrival) / self.seconds
        self._metrics.observe("audio_realtime_factor", factor, model=self._model)
        if self._live:
            self._metrics.observe("audio_underrun_seconds", self._underrun, model=self._model)
            underrun = "true" if self._underrun > 0 else "false"
            self._metrics.observe("audio_streams_total", model=self._model, underrun=underrun)


async def encode_chunk(
    context: ServerContext, job: SpeechJob, encoder: StreamingEncoder, chunk: AudioChunk, meter: PlaybackMeter
) -> bytes:
    """The encoded bytes of a chunk; reports to the meter when they were ready."""
    began = time.monotonic()
    data = await context.encoders.encode(encoder, chunk.audio)
    took = time.monotonic() - began
    context.metrics.observe("audio_encode_duration_seconds", took, format=job.response_format)
    if chunk.truncated:
        context.metrics.observe("speech_truncated_total", model=job.model.name)
    if len(chunk.audio):
        # From its arrival: time that a chunk waited for a slow client is not an underrun of the server.
        meter.chunk_ready(chunk.arrived + took, len(chunk.audio) / job.heard_rate)
    return data
