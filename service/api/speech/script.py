"""The `input` of a speech request, whole or as it is written -> segments to speak and the silence between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from models.interfaces.errors import InputError
from models.interfaces.processor import SpeechProcessor
from service.api.speech.request import SpeechJob
from service.api.spoken_text.alignment import Alignment, Pair, common_words, inverse, spoken_of
from service.api.spoken_text.lexicon import MAX_GROWTH, LexiconFilter
from service.api.spoken_text.markup import UNSPEAKABLE, clean_text, speakable
from service.api.spoken_text.normalising.text import TextNormaliser
from service.api.spoken_text.passages import PassageReader
from service.api.spoken_text.text_splitting import (
    WIDE_PAUSES,
    WIDE_STOPS,
    Granularity,
    TextSplitter,
    is_wide,
    spoken_length,
)

SPACES = re.compile(r"\s+")
WIDE_SIGNS = WIDE_STOPS | WIDE_PAUSES
PIECE = re.compile(r"\S+")


@dataclass(frozen=True)
class Word:
    """A word as it was written. begin, end: its part of the segment's speaking time, estimated, 0 to 1."""

    text: str
    begin: float
    end: float


@dataclass(frozen=True)
class Line:
    """A segment. text: as it is spoken. written, words: as in the input, if requested. pause: seconds of silence before
    it."""

    text: str
    written: str = ""
    words: tuple[Word, ...] = ()
    pause: float = 0.0


class Writing:
    """Follows a text through the steps that rewrite it, each of which takes the output of the one before. Text of
    finished segments is dropped."""

    def __init__(self, steps: int) -> None:
        self._steps: list[list[Pair]] = [[] for _ in range(steps)]

    def add(self, step: int, pairs: Iterable[Pair]) -> None:
        """Add what a step has rewritten, as it was and as it became."""
        self._steps[step] += [words for source, text in pairs for words in common_words(source, text)]

    def clear(self) -> None:
        """Drop the rest of a text, which has no segment."""
        for pairs in self._steps:
            pairs.clear()

    def lines(self, texts: Sequence[str], description: str) -> list[Line]:
        """Find how the next segments were written, from their places in the last step. description: that of the voice,
        at the begin of the first segment."""
        passage = _Passage(self._steps)
        lines = [passage.line(text, "" if index else description) for index, text in enumerate(texts)]
        end = passage.end
        for pairs in reversed(self._steps):
            end = _drop(pairs, end)
        return lines


class _Passage:
    """Maps segments to places of the source, one after the other. end: place where the last segment ends in the spoken
    text."""

    def __init__(self, steps: Sequence[Sequence[Pair]]) -> None:
        self.end = 0
        self._source = "".join(source for source, _ in steps[0])
        self._text = spoken_of(steps[-1])
        self._back = [Alignment(pairs) for pairs in reversed(steps)]
        self._forth = [Alignment(inverse(pairs)) for pairs in steps]
        self._places = [at for at, sign in enumerate(self._text) if not (sign.isspace() or UNSPEAKABLE.match(sign))]
        self._solid = "".join(self._text[place] for place in self._places)
        self._at = 0

    def line(self, text: str, description: str) -> Line:
        spoken = SPACES.sub("", text)
        # What lies between two segments has no letter or digit, so this is the segment's place.
        start = self._solid.index(spoken, self._at)
        self._at = start + len(spoken)
        self.end = self._places[self._at - 1] + 1
        place = self._places[start]
        while place and UNSPEAKABLE.match(self._text[place - 1]):  # belongs to the same word
            place -= 1
        begin, end = _mapped(self._back, place), _mapped(self._back, self.end)
        if self._source.startswith(description, begin):
            begin += len(description)
        written = clean_text(self._source[begin:end]).strip()
        if not speakable(written):
            # The middle of the replacement of a few characters of the source, or only the description.
            return Line(text, text, _words([(word, word) for word in text.split()]))
        pieces = [(begin + match.start(), begin + match.end()) for match in PIECE.finditer(self._source[begin:end])]
        said = [self._text[_mapped(self._forth, a) : _mapped(self._forth, b)] for a, b in pieces]
        return Line(text, written, _words([(self._source[a:b], s) for (a, b), s in zip(pieces, said, strict=True)]))


def _mapped(alignments: Iterable[Alignment], place: int) -> int:
    for alignment in alignments:
        place = alignment.source(place)
    return place


def _drop(pairs: list[Pair], place: int) -> int:
    """Drop the pieces of the text up to a place; return the length of their source. A changed piece that ends after the
    place loses its whole source, as in Alignment."""
    count, dropped = 0, 0
    for source, text in pairs:
        if not place:
            break
        if len(text) > place:
            same = source == text
            pairs[count] = (source[place:] if same else "", text[place:])
            dropped += place if same else len(source)
            break
        count += 1
        place -= len(text)
        dropped += len(source)
    del pairs[:count]
    return dropped


def _words(pieces: Sequence[Pair]) -> tuple[Word, ...]:
    """pieces: the text between spaces, and what is said for it."""
    words: list[str] = []
    lengths: list[float] = []
    for source, said in pieces:
        parts = _parts(clean_text(source))
        if not parts:
            continue
        words += parts
        share = max(1, spoken_length(said)) / sum(map(spoken_length, parts))
        lengths += [spoken_length(part) * share for part in parts]
    ends = [*accumulate(lengths, initial=0.0)]
    return tuple(
        Word(word, start / ends[-1], end / ends[-1])
        for word, start, end in zip(words, ends[:-1], ends[1:], strict=True)
    )


def _parts(piece: str) -> list[str]:
    """Words of Han and kana characters, which have no spaces between them: each character with the signs behind it."""
    parts: list[str] = []
    last = ""
    """The last letter or digit of the current part; empty while it has none."""
    for sign in piece:
        begins = sign.isalnum() and last and (_alone(sign) or _alone(last) or parts[-1][-1] in WIDE_SIGNS)
        if not parts or begins:
            parts.append(sign)
        else:
            parts[-1] += sign
        last = sign if sign.isalnum() else last
    return parts


def _alone(sign: str) -> bool:
    return is_wide(sign) and not "\uac00" <= sign <= "\ud7af"  # hangul has spaces


@dataclass
class Script:
    """Segments of a text, perhaps still being written. pause: seconds of silence after the last one."""

    lines: list[Line] = field(default_factory=list)
    pause: float = 0.0

    def add(self, part: Line | float) -> None:
        """part: the next segment, or seconds of silence."""
        if isinstance(part, float):
            self.pause += part
        else:
            self.lines.append(replace(part, pause=self.pause))
            self.pause = 0.0

    @property
    def pauses(self) -> float:
        """Seconds of all pauses together."""
        return sum(line.pause for line in self.lines) + self.pause

    @property
    def characters(self) -> int:
        return sum(len(line.text) for line in self.lines)

    def unspoken(self, processor: SpeechProcessor) -> str:
        """Letters and digits that the model cannot speak, each once."""
        return processor.unspoken("".join(line.text for line in self.lines))


class ScriptReader:
    """Reads a text in chunks. However it is cut into chunks, the segments are the same.

    ssml: a text that begins with <speak> is SSML. written: also find out how segments were written. first: granularity
    of the first segment, if it differs, so that the first audio is ready sooner.
    """

    def __init__(
        self, job: SpeechJob, *, ssml: bool = True, written: bool = False, first: Granularity | None = None
    ) -> None:
        self.speakable = False
        """Whether the last chunk had something to speak, even if its segment is not complete."""
        self._job = job
        self._passages = PassageReader(ssml=ssml)
        self._lexicon = LexiconFilter(*job.lexicons) if job.lexicons else None
        normaliser = TextNormaliser() if job.normalised else None
        self._filters = [step for step in (self._lexicon, normaliser) if step is not None]
        self._writing = Writing(1 + len(self._filters)) if written else None
        self._splitter = TextSplitter(job.granularity, max_length=job.segment_length, first=first)
        self._begun = False
        """Whether the first segment is complete."""

    @property
    def error(self) -> InputError | None:
        """What could not be read of the last chunk; text continues after it, SSML does not."""
        return self._passages.error

    @property
    def lexicon_full(self) -> bool:
        """Whether words were not replaced because the text would have become too long."""
        return self._lexicon is not None and self._lexicon.full

    def feed(self, text: str, *, final: bool = False) -> list[Line | float]:
        """Return the segments that are complete, and pauses in seconds. final: a segment ends here."""
        self.speakable = False
        parts: list[Line | float] = []
        for piece in self._passages.feed(text, final=final):
            if isinstance(piece, float):
                parts += [*self._segments((), final=True), piece]
            else:
                self.speakable = self.speakable or speakable(piece[1])
                parts += self._segments((piece,), final=False)
        return [*parts, *self._segments((), final=True)] if final else parts

    def _segments(self, pairs: Sequence[Pair], *, final: bool) -> list[Line]:
        steps = [pairs]
        for step in self._filters:
            steps.append(step.feed(spoken_of(steps[-1]), final=final))
        cut = self._splitter.feed(spoken_of(steps[-1]), final=final)
        texts = [cleaned for part in cut if speakable(cleaned := clean_text(part).strip())]
        if self._writing is None:
            return [Line(text) for text in texts]
        for index, rewritten in enumerate(steps):
            self._writing.add(index, rewritten)
        lines: list[Line] = []
        if texts:
            lines = self._writing.lines(texts, "" if self._begun else self._job.control_of(texts[0]))
            self._begun = True
        if final:
            self._writing.clear()
        return lines


def read_script(job: SpeechJob, text: str, *, written: bool) -> Script:
    """Read a whole text. written: also find out how the segments were written. InputError names what does not fit."""
    reader, script = ScriptReader(job, written=written), Script()
    for part in reader.feed(text, final=True):
        script.add(part)
    if reader.error is not None:
        raise reader.error
    if reader.lexicon_full:
        raise InputError("lexicon", f"makes the text more than {MAX_GROWTH} characters longer")
    if not script.lines:
        raise InputError("input", f"nothing to speak: {_reason(text)}")
    return script


def _reason(text: str) -> str:
    """Why nothing of the text is spoken."""
    if not speakable(text):
        return "the text has neither words nor numbers, and signs by themselves are not spoken"
    return "blocks of code, tags, link targets and emoji are removed from it, which leaves no word or number"
