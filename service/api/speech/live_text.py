"""A text that is spoken while it is being written: it is cut into segments that go to the engine as soon as they are
complete."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from models.interfaces.errors import InputError
from service.api.context import ServerContext
from service.api.speech.delivery import AudioFeed
from service.api.speech.live_writing import LiveWriting
from service.api.speech.request import SMALL_TEXT, SpeechJob
from service.api.speech.script import Line
from service.api.speech.text_limits import SpokenTooLong, max_spoken_chars
from service.api.spoken_text.live_passages import LivePassages
from service.api.spoken_text.text_cleaning import clean_text, speakable
from service.api.spoken_text.text_splitting import Granularity
from service.link.messages import SpeechAppend, SpeechSegment


@dataclass
class _Written:
    """The result of one call of `write`: texts, the pause before each in seconds, their segments, and why others cannot
    be spoken."""

    lines: list[Line] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    segments: list[SpeechSegment] = field(default_factory=list)
    transcript: tuple[int, ...] = ()
    error: InputError | None = None


class LiveText:
    """One text, written in chunks. `feed` is done with the first segment, and is None when the text ends without one.

    arrival: time.monotonic() from which its first audio is awaited; None: when its first segment is complete. number:
    counts the texts of a job. live: somebody listens while it is spoken. first: granularity of the first segment, if it
    differs. ssml: a text that begins with <speak> is SSML. written: also find out how segments were written. Must be
    closed in any case.
    """

    def __init__(
        self,
        context: ServerContext,
        job: SpeechJob,
        *,
        number: int = 0,
        live: bool = True,
        arrival: float | None = None,
        first: Granularity | None = None,
        ssml: bool = False,
        written: bool = False,
    ) -> None:
        self.complete = False
        """Whether the text has ended."""
        self.feed: asyncio.Future[AudioFeed | None] = asyncio.get_running_loop().create_future()
        self.texts: list[str] = []
        """Texts of all segments so far, as they are spoken."""
        self.lines: list[Line] = []
        """The same with how they were written, if that was asked for."""
        self.pauses: list[float] = []
        """Seconds of silence before each segment."""
        self.pause = 0.0
        """Seconds of silence after the last segment."""
        self.arrival = arrival
        self.given = -math.inf
        """time.monotonic() when text of which something is to be spoken was last given."""
        self._context = context
        self._job = job
        self._number = number
        self._live = live
        self._passages = LivePassages(markup=job.markup, ssml=ssml)
        self._filters = job.filters()
        self._writing = LiveWriting(self._filters) if written else None
        self._splitter = job.splitter(first)
        self._begun = False
        """Whether the first segment is complete."""
        self._characters = 0
        self._control: str | None = None
        self._request_id = ""
        self._ended = False

    async def write(self, text: str, *, last: bool, pause: bool = False) -> None:
        """Adds text. pause: something else follows before more text, so a segment ends here. InputError if a segment
        cannot be spoken; the others are, and the text continues."""
        self.complete = last
        if len(text) <= SMALL_TEXT:
            parts = self._cut(text, whole=last or pause)
        else:
            parts = await self._context.in_thread(lambda: self._cut(text, whole=last or pause))
        written = await self._tokenized(parts)
        texts = [line.text for line in written.lines]
        if texts:
            self.given = time.monotonic()
        self.texts.extend(texts)
        self.lines.extend(written.lines)
        self.pauses.extend(written.pauses)
        if texts:
            spoken = sum(map(len, texts))
            self._context.metrics.observe("speech_characters_total", spoken, model=self._job.model.name)
        if not self._ended:
            self._submit(written.segments, written.transcript, last)
        if (error := self._passages.error or written.error) is not None:
            raise error

    def _cut(self, text: str, *, whole: bool) -> list[Line | float]:
        """Segments that are complete, and pauses."""
        parts: list[Line | float] = []
        for piece in self._passages.feed(text, whole=whole):
            if isinstance(piece, float):
                parts += [*self._split("", whole=True), piece]
                continue
            if speakable(piece[1]):
                self.given = time.monotonic()
            if self._writing is not None:
                self._writing.say(*piece)
            parts += self._split(piece[1], whole=False)
        return [*parts, *self._split("", whole=True)] if whole else parts

    def _split(self, text: str, *, whole: bool) -> list[Line]:
        for part in self._filters:
            text = part.feed(text) + (part.flush() if whole else "")
        parts = [*self._splitter.feed(text), *(self._splitter.flush() if whole else ())]
        texts = [cleaned for part in parts if speakable(cleaned := clean_text(part).strip())]
        if self._writing is None:
            return [Line(spoken, 0.0) for spoken in texts]
        lines = self._writing.lines(texts, self._job.control_of(texts[0]) if texts and not self._begun else "")
        self._begun = self._begun or bool(texts)
        if whole:
            self._writing.clear()
        return lines

    async def _tokenized(self, parts: Sequence[Line | float]) -> _Written:
        """Segments of these parts; long ones are tokenized in a thread."""
        if sum(len(part.text) for part in parts if isinstance(part, Line)) <= SMALL_TEXT:
            return self._tokenize(parts)
        return await self._context.in_thread(lambda: self._tokenize(parts))

    def _tokenize(self, parts: Sequence[Line | float]) -> _Written:
        """The description that is in front of the first text is repeated in front of each later one."""
        written = _Written()
        for part in parts:
            if isinstance(part, float):
                self.pause += part
                continue
            first, text = not self.texts and not written.lines, part.text
            try:
                self._count(text)
                segment = self._job.segment(text if first else (self._control or "") + text)
                if first:
                    written.transcript = self._job.transcript_ids(text)
                    self._control = self._job.control_of(text)
            except InputError as error:
                written.error = written.error or error
                continue
            written.lines.append(part)
            written.pauses.append(self.pause)
            written.segments.append(segment)
            self.pause = 0.0
        return written

    def _count(self, text: str) -> None:
        """Raises SpokenTooLong at the limit of all segments together."""
        most = max_spoken_chars(self._context, live=self._live)
        self._characters += len(text)
        if self._characters > most:
            raise SpokenTooLong("text", f"as it is spoken, the text has more than {most} characters")

    def _submit(self, segments: Sequence[SpeechSegment], transcript: tuple[int, ...], last: bool) -> None:
        if self.feed.done():
            if segments or last:
                self._context.engine.send(SpeechAppend(self._request_id, tuple(segments), last))
        elif segments:
            job, context = self._job, self._context
            self.arrival = time.monotonic() if self.arrival is None else self.arrival
            request = job.request(
                segments, transcript, live=self._live, open=not last, arrival=self.arrival, number=self._number
            )
            self._request_id = request.request_id
            ahead = context.settings.speech_ahead
            self.feed.set_result(AudioFeed(context, request, job.processor.sample_rate, ahead))
        elif last:
            self.feed.set_result(None)

    def end(self) -> None:
        """Ends the speech with what has been spoken; text that is still written is not spoken."""
        self._ended = True
        if not self.feed.done():
            self.feed.set_result(None)
        elif (feed := self.feed.result()) is not None:
            feed.end()

    async def close(self) -> None:
        """Aborts speech that has not ended."""
        self._ended = True
        if self.feed.done() and not self.feed.cancelled() and (feed := self.feed.result()) is not None:
            await feed.__aexit__(None, None, None)
        self.feed.cancel()
