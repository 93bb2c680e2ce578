"""A text that is spoken while it is being written: it is cut into segments that go to the engine as soon as they are
complete."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from models.interfaces.errors import InputError
from service.api.context import ServerContext
from service.api.speech.delivery import AudioFeed
from service.api.speech.request import SMALL_TEXT, SpeechJob, SpokenTooLong, max_spoken_chars
from service.api.speech.script import Line, Script, ScriptReader
from service.api.spoken_text.text_splitting import Granularity
from service.link.messages import SpeechAppend, SpeechSegment


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
        self.script = Script()
        """Grows as segments are complete."""
        self.arrival = arrival
        self.given = -math.inf
        """time.monotonic() when text of which something is to be spoken was last given."""
        self._context = context
        self._job = job
        self._number = number
        self._live = live
        self._reader = ScriptReader(job, ssml=ssml, written=written, first=first)
        self._characters = 0
        self._control = ""
        self._transcript: tuple[int, ...] = ()
        self._segments: list[SpeechSegment] = []
        """Complete segments that the engine does not have yet."""
        self._request_id = ""
        self._ended = False

    async def write(self, text: str, *, last: bool, pause: bool = False) -> None:
        """Adds text. pause: something else follows before more text, so a segment ends here. InputError if a segment
        cannot be spoken; the others are, and the text continues."""
        self.complete = last
        begun = len(self.script.lines)
        small = len(text) <= SMALL_TEXT
        final = last or pause
        parts = self._read(text, final) if small else await self._context.in_thread(lambda: self._read(text, final))
        if sum(len(part.text) for part in parts if isinstance(part, Line)) <= SMALL_TEXT:
            error = self._tokenize(parts)
        else:
            error = await self._context.in_thread(lambda: self._tokenize(parts))
        if lines := self.script.lines[begun:]:
            self.given = time.monotonic()
            spoken = sum(len(line.text) for line in lines)
            self._context.metrics.observe("speech_characters_total", spoken, model=self._job.model.name)
        if not self._ended:
            self._submit(last)
        if (error := self._reader.error or error) is not None:
            raise error

    def _read(self, text: str, final: bool) -> list[Line | float]:
        parts = self._reader.feed(text, final=final)
        if self._reader.speakable:
            self.given = time.monotonic()
        return parts

    def _tokenize(self, parts: Sequence[Line | float]) -> InputError | None:
        """Add these parts to the script. The description in front of the first text is repeated in front of each later
        one. Returns why a segment cannot be spoken."""
        refused = None
        for part in parts:
            try:
                if isinstance(part, Line):
                    self._add_segment(part.text)
                self.script.add(part)
            except InputError as error:
                refused = refused or error
        return refused

    def _add_segment(self, text: str) -> None:
        most = max_spoken_chars(self._context, live=self._live)
        self._characters += len(text)
        if self._characters > most:
            raise SpokenTooLong("text", f"as it is spoken, the text has more than {most} characters")
        segment = self._job.segment(self._control + text)
        if not self.script.lines:
            self._transcript = self._job.transcript_ids(text)
            self._control = self._job.control_of(text)
        self._segments.append(segment)

    def _submit(self, last: bool) -> None:
        segments, self._segments = tuple(self._segments), []
        if self.feed.done():
            if segments or last:
                self._context.engine.send(SpeechAppend(self._request_id, segments, last))
        elif segments:
            job, context = self._job, self._context
            self.arrival = time.monotonic() if self.arrival is None else self.arrival
            request = job.request(
                segments,
                self._transcript,
                live=self._live,
                open=not last,
                arrival=self.arrival,
                number=self._number,
            )
            self._request_id = request.request_id
            self.feed.set_result(AudioFeed(context, request, job.processor.sample_rate, context.settings.speech_ahead))
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
