"""When each segment of a text is heard, counted in samples, and when its words are, estimated."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from service.api.speech.delivery import AudioChunk
from service.api.speech.schema import CaptionWord, SpeechAudioSegment
from service.api.speech.script import Line, Script

AUDIBLE = 0.01
"""-40 dBFS: softer audio at the ends of a segment is not part of a word."""
SILENCE = 48_000
"""Samples of a pause in one chunk."""


async def with_pauses(chunks: AsyncGenerator[AudioChunk], script: Script, rate: float) -> AsyncGenerator[AudioChunk]:
    """Chunks of audio with silence in front of each segment and after the last. A pause comes as soon as the segment
    before it has ended, or with the segment after it where that was not written yet. rate: SpeechJob.heard_rate."""
    silent = 0
    """Segments whose pause has come."""
    last: AudioChunk | None = None
    async for chunk in chunks:
        if len(chunk.audio) and silent == chunk.segment:
            for silence in _silence(chunk, script.lines[silent].pause * rate):
                yield silence
            silent += 1
        yield chunk
        if chunk.segment_done and silent < len(script.lines):
            for silence in _silence(chunk, script.lines[silent].pause * rate):
                yield silence
            silent += 1
        last = chunk
    if last is not None:
        for silence in _silence(last, script.pause * rate):
            yield silence


def _silence(beside: AudioChunk, length: float) -> Iterator[AudioChunk]:
    """Chunks of silence, of which none ends the segment or the request. They are short, since a client that does not
    read holds one."""
    samples = round(length)
    for start in range(0, samples, SILENCE):
        audio = np.zeros(min(SILENCE, samples - start), np.float32)
        yield replace(beside, audio=audio, segment_done=False, finished=False, truncated=False, steps=None, silent=True)


@dataclass
class _Heard:
    """Sample numbers: where the current segment begins, and its first and last audible sample."""

    start: int
    first: int | None = None
    last: int = 0


class Captions:
    """Follows the audio of a request. rate: SpeechJob.heard_rate. lines: those of the segments; more may be added until
    their audio is complete. kind: type of the events."""

    def __init__(
        self,
        lines: Sequence[Line],
        rate: float,
        *,
        words: bool,
        kind: type[SpeechAudioSegment] = SpeechAudioSegment,
    ) -> None:
        self._kind = kind
        self._lines = lines
        self._rate = rate
        self._words = words
        self._samples = 0
        self._heard: _Heard | None = None
        self._complete: deque[SpeechAudioSegment] = deque()

    def add(self, chunk: AudioChunk) -> None:
        start, self._samples = self._samples, self._samples + len(chunk.audio)
        if chunk.silent:
            return
        if self._heard is None:
            self._heard = _Heard(start)
        loud = np.flatnonzero(np.abs(chunk.audio) >= AUDIBLE)
        if len(loud):
            self._heard.first = start + int(loud[0]) if self._heard.first is None else self._heard.first
            self._heard.last = start + int(loud[-1]) + 1
        if chunk.segment_done:
            self._complete.append(self._caption(chunk.segment, self._heard))
            self._heard = None

    def take(self) -> list[SpeechAudioSegment]:
        """Captions of the segments that were completed since the last call."""
        taken = [*self._complete]
        self._complete.clear()
        return taken

    def _caption(self, index: int, heard: _Heard) -> SpeechAudioSegment:
        line = self._lines[index]
        begin, end = (heard.start, self._samples) if heard.first is None else (heard.first, heard.last)
        words = tuple(
            CaptionWord(word.text, self._seconds(begin, end, word.begin), self._seconds(begin, end, word.end))
            for word in line.words
        )
        start, stop = heard.start / self._rate, self._samples / self._rate
        return self._kind(index, start, stop, line.written, words if self._words else None)

    def _seconds(self, begin: int, end: int, part: float) -> float:
        return round((begin + (end - begin) * part) / self._rate, 3)
