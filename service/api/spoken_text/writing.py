"""The segments of a text: as they are spoken, and as they were written, with a share of the speaking time per word."""

from __future__ import annotations

import difflib
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from service.api.spoken_text.markup import UNSPEAKABLE, clean_text, speakable
from service.api.spoken_text.text_splitting import WIDE_PAUSES, WIDE_STOPS, is_wide, spoken_length

Pair = tuple[str, str]
"""A piece of a source, and what it was rewritten to."""

TOKEN = re.compile(r"\S+|\s+")
MAX_COMPARED = 64
"""Up to this many tokens on a side, every common word is found; in longer texts only those at both ends."""


def spoken_of(pairs: Iterable[Pair]) -> str:
    """What the pieces were rewritten to, joined."""
    return "".join(text for _, text in pairs)


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


Origin = tuple[int, int, int]
"""Where a character comes from: (begin, end) of what is written once it has been spoken, as places in the source, and
the place of the words that it is said for. Of a piece that was rewritten, the first character has the begin; the others
have only its end, so that a cut leaves the whole piece on its left side."""


class Writing:
    """Follow a text through the steps that rewrite it, each of which takes the output of the one before. Text of
    finished segments is dropped."""

    def __init__(self, steps: int) -> None:
        self._origins: list[deque[Origin]] = [deque() for _ in range(steps)]
        """Of the output of each step, as far as the next one has not taken it."""
        self._ends = [0] * steps
        """Where the source of the last character of each step ends."""
        self._source = ""
        self._dropped = 0
        """Characters of the source that were dropped."""
        self._text = ""
        """Output of the last step."""

    @property
    def empty(self) -> bool:
        return not (self._source or self._text or any(self._origins))

    def add(self, step: int, pairs: Iterable[Pair]) -> None:
        """Add what a step has rewritten, as it was and as it became."""
        for source, text in (words for pair in pairs for words in common_words(*pair)):
            if step:
                origins = [self._origins[step - 1].popleft() for _ in source]
            else:
                begin = self._dropped + len(self._source)
                self._source += source
                origins = [(place, place + 1, place) for place in range(begin, begin + len(source))]
            end = origins[-1][1] if origins else self._ends[step]
            if source != text:
                begin, _, said_for = origins[0] if origins else (end, end, end)
                origins = [(begin, end, said_for), *[(end, end, said_for)] * (len(text) - 1)][: len(text)]
            self._ends[step] = end
            self._origins[step] += origins
            if step == len(self._origins) - 1:
                self._text += text

    def clear(self) -> None:
        """Drop the rest of a text, which has no segment."""
        for origins in self._origins:
            origins.clear()
        self._source, self._text, self._dropped, self._ends = "", "", 0, [0] * len(self._ends)

    def lines(self, texts: Sequence[str], description: str) -> list[Line]:
        """Find how the next segments were written, from their places in the last step. description: that of the voice,
        at the begin of the first segment."""
        places = [at for at, sign in enumerate(self._text) if not (sign.isspace() or UNSPEAKABLE.match(sign))]
        solid = "".join(self._text[place] for place in places)
        origins = list(self._origins[-1])
        said: dict[int, str] = {}
        for sign, (_, _, place) in zip(self._text, origins, strict=True):
            said[place] = said.get(place, "") + sign
        lines, at, stop, end = [], 0, 0, self._dropped
        for index, text in enumerate(texts):
            spoken = SPACES.sub("", text)
            # What lies between two segments has no letter or digit, so this is the segment's place.
            start = solid.index(spoken, at)
            at = start + len(spoken)
            stop = places[at - 1] + 1
            place = places[start]
            while place and UNSPEAKABLE.match(self._text[place - 1]):  # belongs to the same word
                place -= 1
            begin, end = origins[place][0], origins[stop - 1][1]
            lines.append(self._line(text, begin, end, said, "" if index else description))
        for _ in range(stop):
            self._origins[-1].popleft()
        self._text = self._text[stop:]
        self._source, self._dropped = self._source[end - self._dropped :], end
        return lines

    def _line(self, text: str, begin: int, end: int, said: Mapping[int, str], description: str) -> Line:
        """The segment whose source is at begin:end. said: by place of the source what is said for it."""
        source = self._source[begin - self._dropped : end - self._dropped]
        if source.startswith(description):
            begin, source = begin + len(description), source[len(description) :]
        written = clean_text(source).strip()
        if not speakable(written):
            # The middle of the replacement of a few characters of the source, or only the description.
            return Line(text, text, _words([(word, word) for word in text.split()]))
        pieces = []
        for match in PIECE.finditer(source):
            places = range(begin + match.start(), begin + match.end())
            pieces.append((match[0], "".join(said.get(place, "") for place in places)))
        return Line(text, written, _words(pieces))


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
