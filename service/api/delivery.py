"""Audio on its way from the engine to a client: bounded, encoded, and measured as a listener would hear it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from service.api.context import ServerContext
from service.api.speaking import SpeechJob
from service.engine.client import RequestStream
from service.engine.messages import Pause, SpeechDelta, SpeechRequest
from service.media.audio_out import StreamingEncoder


@dataclass(frozen=True, eq=False)
class Chunk:
    """Audio of one segment, float32 [samples], and when its first part came from the engine."""

    audio: np.ndarray
    arrived: float
    segment: int
    segment_done: bool
    finished: bool
    truncated: bool


class AudioFeed:
    """Chunks of one request. What the client has not taken is merged, up to the end of a segment.

    More than `most_ahead` seconds of it pause the stream in the engine; half of that lets it go on. Use as a context
    manager: leaving it aborts a request that has not ended.

    Deltas are taken by a callback of the stream's, not by a task: of 64 first patches that come in one message, none
    waits until the loop has woken as many tasks.
    """

    def __init__(self, context: ServerContext, request: SpeechRequest, sample_rate: int, most_ahead: float) -> None:
        self._engine = context.engine
        self._request_id = request.request_id
        self._stream: RequestStream[SpeechDelta] = context.engine.submit(request)
        self._most_ahead = int(most_ahead * sample_rate)
        self._waiting: deque[tuple[SpeechDelta, float]] = deque()
        self._samples = 0
        self._paused = False
        self._reader: asyncio.Future[None] | None = None
        """What chunks() waits for when there are none."""
        self._stream.on_news = self._take

    async def __aenter__(self) -> AudioFeed:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stream.aclose()

    def _take(self) -> None:
        now = time.monotonic()
        for delta in self._stream.take():
            self._waiting.append((delta, now))
            self._samples += len(delta.audio)
        self._set_paused(self._samples > self._most_ahead)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _set_paused(self, paused: bool) -> None:
        if paused != self._paused and not self._stream.ended:
            self._paused = paused
            self._engine.send(Pause(self._request_id, paused))

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Raises what the request failed with, an EngineError as a rule."""
        while True:
            while not self._waiting:
                if self._stream.error is not None:
                    raise self._stream.error
                if self._stream.ended:
                    return
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            chunk = self._merge()
            if self._paused and self._samples <= self._most_ahead // 2:
                self._set_paused(False)
            yield chunk

    def _merge(self) -> Chunk:
        first, arrived = self._waiting.popleft()
        parts, last = [first.audio], first
        while self._waiting and not last.segment_done and self._waiting[0][0].segment == first.segment:
            last, _ = self._waiting.popleft()
            parts.append(last.audio)
        audio = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._samples -= len(audio)
        return Chunk(audio, arrived, first.segment, last.segment_done, last.finished, last.truncated)


class PlaybackMeter:
    """A listener's clock on the server's side: first audio, gaps, silence where audio should have been."""

    def __init__(self, context: ServerContext, model: str, arrival: float, *, live: bool) -> None:
        self._metrics = context.metrics
        self._model = model
        self._arrival = arrival
        self._live = live
        self._end: float | None = None
        """When the listener has heard everything handed over so far."""
        self._handed = arrival
        self._underrun = 0.0
        self.seconds = 0.0

    def hand(self, at: float, seconds: float) -> None:
        """`seconds` of audio are ready for the transport."""
        if self._live:
            if self._end is None:
                self._metrics.observe("time_to_first_audio_seconds", at - self._arrival, model=self._model)
                self._end = at
            else:
                self._metrics.observe("audio_chunk_gap_seconds", max(0.0, at - self._handed), model=self._model)
                late = max(0.0, at - self._end)
                self._underrun += late
                self._end += late
            self._end += seconds
        self._handed = at
        self.seconds += seconds

    def finish(self) -> None:
        if not self.seconds:
            return
        factor = (self._handed - self._arrival) / self.seconds
        self._metrics.observe("audio_realtime_factor", factor, model=self._model)
        if self._live:
            self._metrics.observe("audio_underrun_seconds", self._underrun, model=self._model)
            underrun = "true" if self._underrun > 0 else "false"
            self._metrics.observe("audio_streams_total", model=self._model, underrun=underrun)


async def encode_chunk(
    context: ServerContext, job: SpeechJob, encoder: StreamingEncoder, chunk: Chunk, meter: PlaybackMeter
) -> bytes:
    """The chunk's bytes, measured when they are ready to be sent."""
    began = time.monotonic()
    data = await context.encoders.encode(encoder, chunk.audio)
    took = time.monotonic() - began
    context.metrics.observe("audio_encode_duration_seconds", took, format=job.response_format)
    if len(chunk.audio):
        # Time that a chunk had to wait for a slow client is not the server's silence.
        meter.hand(chunk.arrived + took, len(chunk.audio) / job.processor.sample_rate / job.speed)
    return data
