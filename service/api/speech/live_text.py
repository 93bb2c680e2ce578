"""A text that is spoken while it is written: cut into segments that go to the engine as soon as they are complete."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from models.errors import InputError
from service.api.context import ServerContext
from service.api.speech.delivery import AudioFeed
from service.api.speech.request import SMALL_TEXT, SpeechJob, clean_text, speakable
from service.api.speech.text_splitting import Granularity
from service.link.messages import SpeechAppend, SpeechSegment


@dataclass
class _Written:
    """What one call of `write` adds: texts and their segments, and why others cannot be spoken."""

    texts: list[str] = field(default_factory=list)
    segments: list[SpeechSegment] = field(default_factory=list)
    transcript: tuple[int, ...] = ()
    error: InputError | None = None


class LiveText:
    """One text, written in chunks. `feed` is done with the first segment, and is None when the text ends without one.

    arrival: time.monotonic() from which its first audio is awaited; None: when its first segment is complete. number:
    counts the texts of a job. live: somebody listens while it is made. first: granularity of the first segment, where
    it differs. Close it at the end, whatever happened.
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
    ) -> None:
        self.complete = False
        """The text has ended."""
        self.feed: asyncio.Future[AudioFeed | None] = asyncio.get_running_loop().create_future()
        self.texts: deque[str] = deque()
        """Of the segments whose audio nobody has begun to take: the reader of `feed` pops them."""
        self.total = 0
        """Segments so far."""
        self.arrival = arrival
        self._context = context
        self._job = job
        self._number = number
        self._live = live
        self._filters = job.filters()
        self._splitter = job.splitter(first)
        self._control: str | None = None
        self._request_id = ""
        self._ended = False

    async def write(self, text: str, *, last: bool, pause: bool = False) -> None:
        """Adds text. pause: something else comes before more of it, so a segment ends here. InputError when a segment
        cannot be spoken: the others are, and the text goes on."""
        splitter, whole = self._splitter, last or pause
        for part in self._filters:
            text = part.feed(text) + (part.flush() if whole else "")
        parts = [*splitter.feed(text), *(splitter.flush() if whole else ())]
        texts = [cleaned for part in parts if speakable(cleaned := clean_text(part).strip())]
        self.complete = last
        written = await self._in_turn(texts)
        self.texts.extend(written.texts)
        self.total += len(written.texts)
        if written.texts:
            spoken = sum(map(len, written.texts))
            self._context.metrics.observe("speech_characters_total", spoken, model=self._job.model.name)
        if not self._ended:
            self._submit(written.segments, written.transcript, last)
        if written.error is not None:
            raise written.error

    async def _in_turn(self, texts: Sequence[str]) -> _Written:
        if sum(map(len, texts)) <= SMALL_TEXT:
            return self._tokenize(texts)
        return await self._context.in_thread(lambda: self._tokenize(texts))

    def _tokenize(self, texts: Sequence[str]) -> _Written:
        """The description in front of the first text is put in front of those after it."""
        written = _Written()
        for text in texts:
            first = self.total + len(written.texts) == 0
            try:
                segment = self._job.segment(text if first else (self._control or "") + text)
                if first:
                    written.transcript = self._job.transcript_ids(text)
                    self._control = self._job.control_of(text)
            except InputError as error:
                written.error = written.error or error
                continue
            written.texts.append(text)
            written.segments.append(segment)
        return written

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
