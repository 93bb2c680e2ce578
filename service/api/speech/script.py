"""The `input` of a speech request -> the segments to speak, the silence between them, and how each was written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from models.interfaces.errors import InputError
from service.api.speech.request import SpeechJob
from service.api.spoken_text.alignment import Alignment, Pair, common_words, inverse
from service.api.spoken_text.lexicon import MAX_GROWTH, LexiconFilter
from service.api.spoken_text.normalising.text import TextNormaliser
from service.api.spoken_text.passages import Passage, marked_passages
from service.api.spoken_text.ssml import is_ssml, ssml_passages
from service.api.spoken_text.text_cleaning import UNSPEAKABLE, clean_text, speakable
from service.api.spoken_text.text_splitting import WIDE_PAUSES, WIDE_STOPS, is_wide, spoken_length

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
    """A segment. text: as it is spoken. pause: seconds of silence before it. written, words: as in the input, if
    requested."""

    text: str
    pause: float
    written: str = ""
    words: tuple[Word, ...] = ()


@dataclass(frozen=True)
class Script:
    """lines: at least one. pause: seconds of silence after the last one."""

    lines: tuple[Line, ...]
    pause: float

    @property
    def pauses(self) -> float:
        """Seconds of all pauses together."""
        return sum(line.pause for line in self.lines) + self.pause

    @property
    def characters(self) -> int:
        return sum(len(line.text) for line in self.lines)


def read_script(job: SpeechJob, text: str, *, written: bool) -> Script:
    """written: also find out how the segments were written. InputError names what does not fit."""
    text = text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    passages = ssml_passages(text) if is_ssml(text) else marked_passages(text, markup=job.markup)
    lexicon = LexiconFilter(*job.lexicons) if job.lexicons else None
    lines: list[Line] = []
    pause = 0.0
    for passage in passages:
        pause += passage.pause
        steps = _steps(job, passage, lexicon)
        for line in _lines(job, steps, pause, first=not lines, written=written):
            lines.append(line)
            pause = 0.0
        if lexicon is not None and lexicon.full:
            raise InputError("lexicon", f"makes the text more than {MAX_GROWTH} characters longer")
    if not lines:
        raise InputError("input", f"nothing to speak: {_reason(text, markup=job.markup)}")
    return Script(tuple(lines), pause)


def _reason(text: str, *, markup: bool) -> str:
    """Why nothing of the text is spoken."""
    if not speakable(text):
        return "the text has neither words nor numbers, and signs by themselves are not spoken"
    removed = "blocks of code, tags, link targets and emoji are removed from it, which" if markup else "its markup"
    return f"{removed} leaves no word or number"


def _lines(job: SpeechJob, steps: Sequence[Sequence[Pair]], pause: float, *, first: bool, written: bool) -> list[Line]:
    """steps: those of a passage. pause: seconds before it."""
    text = _joined(steps[-1])
    splitter = job.splitter()
    parts = [*splitter.feed(text), *splitter.flush()]
    texts = [cleaned for part in parts if speakable(cleaned := clean_text(part).strip())]
    lines = [Line(spoken, 0.0 if index else pause) for index, spoken in enumerate(texts)]
    return Writing(steps).added(lines, job.control_of(texts[0]) if first and texts else "") if written else lines


def _steps(job: SpeechJob, passage: Passage, lexicon: LexiconFilter | None) -> list[list[Pair]]:
    """How the passage is rewritten, step by step: each begins with the text with which the previous one ends."""
    steps = [passage.parts]
    if lexicon is not None:
        steps.append(lexicon.pairs(_joined(steps[-1])))
    if job.normalised:
        pieces: list[Pair] = []
        normaliser = TextNormaliser(lambda source, words: pieces.append((source, words)))
        normaliser.feed(_joined(steps[-1]))
        normaliser.flush()
        steps.append(pieces)
    return steps


def _joined(pairs: Sequence[Pair]) -> str:
    return "".join(text for _, text in pairs)


def spoken_line(text: str) -> Line:
    """A segment for which only the spoken form is known, not how it was written."""
    return Line(text, 0.0, text, _words([(word, word) for word in text.split()]))


class Writing:
    """Finds out how the segments of a passage were written, from their places in its spoken text."""

    def __init__(self, steps: Sequence[Sequence[Pair]]) -> None:
        self._source = "".join(source for source, _ in steps[0])
        self._text = _joined(steps[-1])
        fine = [[pair for source, text in pairs for pair in common_words(source, text)] for pairs in steps]
        self._back = [Alignment(pairs) for pairs in reversed(fine)]
        self._forth = [Alignment(inverse(pairs)) for pairs in fine]
        self.end = 0
        """Place in the spoken text where the last of the segments ends."""

    def added(self, lines: Sequence[Line], description: str) -> list[Line]:
        """The lines with how they were written. description: that of the voice, at the begin of the first."""
        places = [place for place, sign in enumerate(self._text) if not (sign.isspace() or UNSPEAKABLE.match(sign))]
        solid = "".join(self._text[place] for place in places)
        full, at = [], 0
        for index, line in enumerate(lines):
            spoken = SPACES.sub("", line.text)
            # What lies between two segments has no letter or digit, so this is the next one's place.
            start = solid.index(spoken, at)
            at = start + len(spoken)
            self.end = places[at - 1] + 1
            begin = self._back_to_source(self._with_signs(places[start]))
            end = self._back_to_source(self.end)
            if not index and self._source.startswith(description, begin):
                begin += len(description)
            full.append(self._line(line, begin, end))
        return full

    def _with_signs(self, place: int) -> int:
        """Begin of the unspeakable signs right before a place, which belong to the same word."""
        while place and UNSPEAKABLE.match(self._text[place - 1]):
            place -= 1
        return place

    def _line(self, line: Line, begin: int, end: int) -> Line:
        written = clean_text(self._source[begin:end]).strip()
        if not speakable(written):
            # The middle of the replacement of a few characters of the source, or only the description.
            return replace(spoken_line(line.text), pause=line.pause)
        pieces = [(begin + match.start(), begin + match.end()) for match in PIECE.finditer(self._source[begin:end])]
        spoken = [self._text[self._spoken(start) : self._spoken(stop)] for start, stop in pieces]
        words = _words([(self._source[a:b], said) for (a, b), said in zip(pieces, spoken, strict=True)])
        return Line(line.text, line.pause, written, words)

    def _back_to_source(self, place: int) -> int:
        for alignment in self._back:
            place = alignment.source(place)
        return place

    def _spoken(self, place: int) -> int:
        for alignment in self._forth:
            place = alignment.source(place)
        return place


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
