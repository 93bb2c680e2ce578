"""The segments of a text: as they are spoken, and as they were written, with a share of the speaking time per word."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from service.api.spoken_text.markup import UNSPEAKABLE, clean_text, speakable
from service.api.spoken_text.text_splitting import WIDE_PAUSES, WIDE_STOPS, is_wide, spoken_length

Pair = tuple[str, str]
"""A piece of a source, and what it was rewritten to."""

TOKEN = re.compile(r"\S+|\s+")
MAX_COMPARED = 64
"""Up to this many tokens on a side, every common word is found; in longer texts only those at both ends."""


class Alignment:
    """Maps places of a text that was made from a source piece by piece to places of the source. Within a piece that did
    not change, a place is exact. Within one that changed, every place after its begin maps to the end of the piece, so
    that a cut there leaves the whole piece on its left side.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        self._sources = [0]
        self._places = [0]
        for source, text in pairs:
            self._sources.append(self._sources[-1] + len(source))
            self._places.append(self._places[-1] + len(text))

    def source(self, place: int) -> int:
        """place: 0 to the length of the text."""
        index = min(bisect_right(self._places, place) - 1, len(self._pairs) - 1)
        if index < 0:
            return 0
        offset = place - self._places[index]
        same = self._pairs[index][0] == self._pairs[index][1]
        if same or offset == 0:
            return self._sources[index] + offset
        return self._sources[index + 1]


def spoken_of(pairs: Iterable[Pair]) -> str:
    """What the pieces were rewritten to, joined."""
    return "".join(text for _, text in pairs)


def inverse(pairs: Iterable[Pair]) -> list[Pair]:
    return [(text, source) for source, text in pairs]


def common_words(source: str, text: str) -> list[Pair]:
    """Pieces of a source and of its rewritten form; words that both have are pieces of their own."""
    if source == text:
        return [(source, text)] if source else []
    before, after = TOKEN.findall(source), TOKEN.findall(text)
    start = _common(before, after)
    stop = _common(before[start:][::-1], after[start:][::-1])
    middle = before[start : len(before) - stop], after[start : len(after) - stop]
    head, tail = "".join(before[:start]), "".join(before[len(before) - stop :])
    pairs = [(head, head), *_compared(*middle), (tail, tail)]
    return [pair for pair in pairs if any(pair)]


def _common(before: Sequence[str], after: Sequence[str]) -> int:
    count = 0
    for one, other in zip(before, after, strict=False):
        if one != other:
            break
        count += 1
    return count


def _compared(before: Sequence[str], after: Sequence[str]) -> list[Pair]:
    if max(len(before), len(after)) > MAX_COMPARED:
        return [("".join(before), "".join(after))]
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [("".join(before[a:b]), "".join(after[c:d])) for _, a, b, c, d in matcher.get_opcodes()]


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
