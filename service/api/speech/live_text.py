"""The text of a speech request, whole or as it is written -> segments to speak and the silence between them."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from functools import partial

from models.interfaces.errors import InputError
from service.api.context import ServerContext
from service.api.speech.delivery import AudioFeed, Script
from service.api.speech.request import SMALL_TEXT, SpeechJob, SpokenTooLong, Unspeakable, max_spoken_chars
from service.api.spoken_text.lexicon import MAX_GROWTH, LexiconFilter
from service.api.spoken_text.markup import clean_text, speakable
from service.api.spoken_text.normaliser import TextNormaliser
from service.api.spoken_text.passages import PassageReader
from service.api.spoken_text.text_splitting import Granularity, TextSplitter
from service.link.messages import SpeechAppend, SpeechSegment


class ScriptReader:
    """Read a text in chunks; the segments do not depend on how it is cut. ssml: a text that begins with <speak> is
    SSML. first: granularity of the first segment, if it differs, so that the first audio is ready sooner."""

    def __init__(self, job: SpeechJob, *, ssml: bool = True, first: Granularity | None = None) -> None:
        self.speakable = False
        """Whether the last chunk had something to speak, even if its segment is not complete."""
        self._passages = PassageReader(ssml=ssml)
        self._lexicon = LexiconFilter(*job.lexicons) if job.lexicons else None
        normaliser = TextNormaliser() if job.normalised else None
        self._filters = [step for step in (self._lexicon, normaliser) if step is not None]
        self._splitter = TextSplitter(job.granularity, max_length=job.segment_length, first=first)

    @property
    def error(self) -> InputError | None:
        """What could not be read of the last chunk; text continues after it, SSML does not."""
        return self._passages.error

    @property
    def lexicon_full(self) -> bool:
        """Whether words were not replaced because the text would have become too long."""
        return self._lexicon is not None and self._lexicon.full

    def feed(self, text: str, *, final: bool = False) -> list[str | float]:
        """Return the segments that are complete, and pauses in seconds. final: a segment ends here."""
        self.speakable = False
        parts: list[str | float] = []
        for piece in self._passages.feed(text, final=final):
            if isinstance(piece, float):
                parts += [*self._segments("", final=True), piece]
            else:
                self.speakable = self.speakable or speakable(piece)
                parts += self._segments(piece, final=False)
        return [*parts, *self._segments("", final=True)] if final else parts

    def _segments(self, text: str, *, final: bool) -> list[str]:
        for step in self._filters:
            text = step.feed(text, final=final)
        cut = self._splitter.feed(text, final=final)
        return [cleaned for part in cut if speakable(cleaned := clean_text(part).strip())]


class SpokenText:
    """A text, read in chunks: its script, and its segments for the engine. most: characters of it as it is spoken.
    ssml, first: of ScriptReader."""

    def __init__(self, job: SpeechJob, most: int, *, ssml: bool = True, first: Granularity | None = None) -> None:
        self.script = Script()
        self.transcript_ids: tuple[int, ...] = ()
        """Of SpeechJob.request."""
        self.error: InputError | None = None
        """Why the first part of the last chunk that cannot be spoken cannot; the others are."""
        self._job = job
        self._most = most
        self._characters = 0
        self._control = ""
        self._reader = ScriptReader(job, ssml=ssml, first=first)

    @property
    def speakable(self) -> bool:
        return self._reader.speakable

    def feed(self, text: str, *, final: bool) -> list[SpeechSegment]:
        """Return the segments that are complete. final: a segment ends here."""
        segments, error = list[SpeechSegment](), None
        for part in self._reader.feed(text, final=final):
            try:
                if isinstance(part, str):
                    segments.append(self._segment(part))
                self.script.add(part)
            except InputError as refused:
                error = refused if error is None or isinstance(error, Unspeakable) else error
        self.error = self._reader.error or error
        return segments

    def whole(self, text: str) -> list[SpeechSegment]:
        """Read all of it. InputError names what does not fit."""
        segments = self.feed(text, final=True)
        if self._reader.lexicon_full:
            raise InputError("lexicon", f"makes the text more than {MAX_GROWTH} characters longer")
        if self.error is not None and not (segments and isinstance(self.error, Unspeakable)):
            raise self.error
        if not segments:
            raise InputError("input", f"nothing to speak: {_reason(text)}")
        return segments

    def _segment(self, text: str) -> SpeechSegment:
        """The description in front of the first text is repeated in front of each later one."""
        self._characters += len(text)
        if self._characters > self._most:
            raise SpokenTooLong("input", f"as it is spoken, the text has more than {self._most} characters")
        control = "" if self.script.lines else self._job.control_of(text)
        if not self._job.speaks(text.removeprefix(control) or text):
            self.script.left_out += text
            self._control = self._control or control
            raise Unspeakable("input", "the text holds no character that this model can speak")
        segment = self._job.segment(self._control + text)
        if not self.script.lines:
            self.transcript_ids = self._job.transcript_ids(text)
            self._control = self._control or control
        return segment


def _reason(text: str) -> str:
    if not speakable(text):
        return "the text has neither words nor numbers, and signs by themselves are not spoken"
    return "blocks of code, tags, link targets and emoji are removed from it, which leaves no word or number"


@dataclass(eq=False)
class LiveText:
    """One text, written in chunks, to be closed in any case.

    arrival: time.monotonic() from which its first audio is awaited; None: when its first segment is complete. number:
    counts the texts of a job. live: somebody listens while it is spoken. ssml, first: of ScriptReader.
    """

    context: ServerContext
    job: SpeechJob
    number: int = 0
    live: bool = True
    arrival: float | None = None
    first: Granularity | None = None
    ssml: bool = False
    feed: asyncio.Future[AudioFeed | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done with the first segment; None when the text ends without one."""
    complete: bool = False
    given: float = -math.inf
    """time.monotonic() when text of which something is to be spoken was last given."""
    _segments: list[SpeechSegment] = field(default_factory=list)
    """Complete segments that the engine does not have yet."""
    _request_id: str = ""
    _ended: bool = False

    def __post_init__(self) -> None:
        most = max_spoken_chars(self.context, live=self.live)
        self._text = SpokenText(self.job, most, ssml=self.ssml, first=self.first)

    @property
    def script(self) -> Script:
        return self._text.script

    async def write(self, text: str, *, last: bool, pause: bool = False) -> None:
        """Add text. pause: something else follows before more text, so a segment ends here. InputError if a segment
        cannot be spoken; the others are, and the text continues."""
        self.complete = last
        begun = len(self.script.lines)
        feed = partial(self._text.feed, text, final=last or pause)
        segments = feed() if len(text) <= SMALL_TEXT else await self.context.in_thread(feed)
        self._segments += segments
        lines = self.script.lines[begun:]
        if lines:
            spoken = sum(len(line.text) for line in lines)
            self.context.metrics.observe("speech_characters_total", spoken, model=self.job.model.name)
        if lines or self._text.speakable:
            self.given = time.monotonic()
        if not self._ended:
            self._submit(last)
        if self._text.error is not None:
            raise self._text.error

    def _submit(self, last: bool) -> None:
        segments, self._segments = tuple(self._segments), []
        if self.feed.done():
            if segments or last:
                self.context.engine.send(SpeechAppend(self._request_id, segments, last))
        elif segments:
            job, context, ids = self.job, self.context, self._text.transcript_ids
            self.arrival = time.monotonic() if self.arrival is None else self.arrival
            request = job.request(
                segments, ids, live=self.live, open=not last, arrival=self.arrival, number=self.number
            )
            self._request_id = request.request_id
            self.feed.set_result(AudioFeed(context, job, request, self.script, context.speech_ahead))
        elif last:
            self.feed.set_result(None)

    def end(self) -> None:
        """End the speech with what has been spoken; text that is still written is not spoken."""
        self._ended = True
        if not self.feed.done():
            self.feed.set_result(None)
        elif (feed := self.feed.result()) is not None:
            feed.end()

    async def close(self) -> None:
        self._ended = True
        if self.feed.done() and not self.feed.cancelled() and (feed := self.feed.result()) is not None:
            await feed.aclose()
        self.feed.cancel()
