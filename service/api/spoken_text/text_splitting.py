"""Splits a text into segments that are synthesized one after the other; the text may still be arriving in chunks.

Borders depend on the text alone, not on its chunks: a border is decided only when the next character (after a space,
the one behind it) is known.
"""

from __future__ import annotations

import re
import unicodedata
from enum import IntEnum
from typing import Literal

Granularity = Literal["none", "sentence", "clause"]
"""Where segments end before their maximum length: nowhere, after each sentence, or after each clause."""

WIDE_STOPS = frozenset("。！？｡")
STOPS = WIDE_STOPS | frozenset(".!?…؟۔।॥")
CLOSERS = frozenset("\"'”’»)]}」』）】》〉")
WIDE_PAUSES = frozenset("，；：、—")
PAUSES = WIDE_PAUSES | frozenset(",;:،؛–")

# Abbreviations whose full stop does not end a sentence. Those that often end one (etc., usw.) are left out: for them a
# lower-case letter after the stop decides.
ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof sr jr st vs rev hon gen col capt lt sgt gov sen rep messrs mt ft approx dept est "  # noqa: SIM905
    "jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri sat sun "
    "bzw ca evtl ggf hr fr str dipl mme mlle sra dna av cf e.g i.e z.b d.h u.a p.ex".split()
)
BEFORE_NUMBERS = frozenset("no nr nos fig figs vol p pp art sec ch chap eq ref tab abb núm".split())  # noqa: SIM905
LONGEST_WORD = 16

MIN_CLAUSE = 16
"""Length (spoken_length) below which a clause is joined with the next one."""

CONTROL = re.compile(r"\([^()]{1,400}\)")
"""A description of the voice or manner at the very start of a text (VoxCPM2: "(description)text")."""
CONTROL_MAY_FOLLOW = re.compile(r"\([^()]{0,400}(?:\)[\W_]*)?")

WORD = re.compile(r"(\S*)(\s*)")
"""A word (perhaps empty) and the whitespace after it."""

WIDE = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]")
WIDE_LENGTH = 3
"""A Han, kana or hangul character takes about as long to speak as three letters of an alphabet."""


class Border(IntEnum):
    """Kind of border at a position of the text. A segment that is too long is cut at its highest border."""

    CHARACTER = 1
    WORD = 2
    CLAUSE = 3
    SENTENCE = 4


ENDS: dict[Granularity, Border | None] = {"none": None, "sentence": Border.SENTENCE, "clause": Border.CLAUSE}
"""The lowest border that ends a segment."""


def is_wide(character: str) -> bool:
    """Whether it is Han, kana or hangul: written mostly without spaces."""
    return WIDE.match(character) is not None


def spoken_length(text: str) -> int:
    """Length in proportion to speaking time: characters, where wide ones count three."""
    return len(text) if text.isascii() else len(text) + (WIDE_LENGTH - 1) * len(WIDE.findall(text))


def words_of(text: str) -> list[str]:
    """Words, separated by spaces. Han and kana have none: each character is a word, with the signs behind it."""
    return [part for piece in text.split() for part in _parts(piece)]


def _parts(piece: str) -> list[str]:
    parts: list[str] = []
    last = ""
    """The last letter or digit of the current part; empty while it has none."""
    for sign in piece:
        begins = sign.isalnum() and last and (_alone(sign) or _alone(last) or parts[-1][-1] in WIDE_STOPS | WIDE_PAUSES)
        if not parts or begins:
            parts.append(sign)
        else:
            parts[-1] += sign
        last = sign if sign.isalnum() else last
    return parts


def _alone(sign: str) -> bool:
    return is_wide(sign) and not "\uac00" <= sign <= "\ud7af"  # hangul has spaces


class TextSplitter:
    """Split a text that arrives in chunks.

    A segment is at most `max_length` long (spoken_length): it ends at its last sentence border, else at its last clause
    border, else between words, else between characters. Clauses shorter than MIN_CLAUSE are joined with the next one.
    Segments have a letter or digit, and single spaces inside; otherwise the text is unchanged. A description at the
    start of the text (CONTROL) is neither split nor split off, unless it exceeds max_length. first: the granularity of
    a text's first segment, if it differs.
    """

    def __init__(self, granularity: Granularity, *, max_length: int, first: Granularity | None = None) -> None:
        if max_length < 1:
            raise ValueError(f"max_length must be positive, got {max_length}")
        self._later_end_at = ENDS[granularity]
        self._first_ends_at = ENDS[granularity if first is None else first]
        self._max_length = max_length
        self._space = ""  # trailing whitespace, kept until the next word: "\n" for a blank line, else " "
        self._newlines = 0
        self._buffer = ""
        self._begin = 0  # start of the current segment in _buffer
        self._at = 0  # characters before it have been examined
        self._length = 0
        self._speakable = False
        self._stop_at = -1  # first of the stops (and closing quotes or brackets) right before _at; -1: none
        self._best: dict[Border, int] = {}  # position of the last border of each kind
        self._first = True  # the current segment is the first of the text

    def feed(self, text: str, *, final: bool = False) -> list[str]:
        """Return the segments that are now complete. final: the text ends here, and a new one may follow."""
        self._append(text)
        segments = self._cut(final=final)
        if final:
            self._space, self._newlines, self._buffer = "", 0, ""
            self._restart(0)
            self._first = True
            return segments
        # Drop the text of finished segments.
        self._buffer = self._buffer[self._begin :]
        self._at -= self._begin
        self._stop_at -= self._begin
        self._best = {kind: place - self._begin for kind, place in self._best.items()}
        self._begin = 0
        return segments

    def _append(self, text: str) -> None:
        parts: list[str] = []
        for word, space in WORD.findall(text):
            if word:
                if self._space and (self._buffer or parts):
                    parts.append(self._space)
                parts.append(word)
                self._space, self._newlines = "", 0
            if space:
                self._newlines += space.count("\n")
                self._space = "\n" if self._newlines > 1 else " "
        self._buffer += "".join(parts)

    def _restart(self, begin: int) -> None:
        """Begin a new segment at buffer[begin]."""
        self._begin = self._at = begin
        self._length, self._speakable, self._stop_at, self._best = 0, False, -1, {}

    def _cut(self, *, final: bool) -> list[str]:
        segments: list[str] = []
        while self._at < len(self._buffer):
            if self._at == self._begin and self._rest_is_one():
                break
            character = self._buffer[self._at]
            length = self._length + (WIDE_LENGTH if is_wide(character) else 1)
            if length > self._max_length and self._at > self._begin and character not in " \n":
                self._end(self._best[max(self._best)] if self._best else self._at, segments)
                continue
            after = self._at + 1
            if after == len(self._buffer) and not final:
                break  # the border after this character depends on the next one
            self._length = length
            self._speakable = self._speakable or character.isalnum()
            if character in STOPS:
                self._stop_at = self._at if self._stop_at < 0 else self._stop_at
            elif character not in CLOSERS:
                self._stop_at = -1
            self._at = after
            border = self._border(after) if after < len(self._buffer) and self._speakable else None
            if border is None or (self._first and CONTROL_MAY_FOLLOW.fullmatch(self._buffer, self._begin, after)):
                continue
            self._best[border] = after
            if self._ends_at is None or border < self._ends_at:
                continue
            if border is Border.SENTENCE or self._length >= MIN_CLAUSE:
                self._end(after, segments)
        if final:
            self._end(len(self._buffer), segments)
        return segments

    @property
    def _ends_at(self) -> Border | None:
        return self._first_ends_at if self._first else self._later_end_at

    def _rest_is_one(self) -> bool:
        """Whether the buffered text fits in one segment: no need to find borders yet."""
        rest = len(self._buffer) - self._begin
        if self._ends_at is not None or rest > self._max_length:
            return False
        return spoken_length(self._buffer[self._begin :]) <= self._max_length

    def _end(self, place: int, segments: list[str]) -> None:
        segment = self._buffer[self._begin : place].strip().replace("\n", " ")
        if any(character.isalnum() for character in segment):
            segments.append(segment)
        while place < len(self._buffer) and self._buffer[place] in " \n":
            place += 1
        self._first = False
        self._restart(place)

    def _border(self, place: int) -> Border | None:
        """The border between buffer[place - 1] and buffer[place], which both exist."""
        left, right = self._buffer[place - 1], self._buffer[place]
        spaced = right in " \n"
        if right == "\n" or (self._stop_at >= 0 and self._ends_sentence(place)):
            return Border.SENTENCE
        if left in PAUSES and (spaced or left in WIDE_PAUSES) and right not in CLOSERS:
            return Border.CLAUSE
        if spaced:
            return Border.WORD
        if right in STOPS or right in CLOSERS or right in PAUSES or left == "\u200d" or right == "\u200d":
            return None
        if unicodedata.category(right).startswith("M"):
            return None
        if is_wide(left) and is_wide(right):
            return Border.WORD
        return Border.CHARACTER

    def _ends_sentence(self, place: int) -> bool:
        right = self._buffer[place]
        stops = self._buffer[self._stop_at : place]
        if right in STOPS or right in CLOSERS or right in PAUSES:
            return False
        if any(stop in WIDE_STOPS for stop in stops):
            return True
        if is_wide(right):
            # An ellipsis does not end a sentence here; a single stop after a digit is a decimal point.
            return not set(stops) <= {"…"} and (len(stops) > 1 or not self._buffer[self._stop_at - 1].isdigit())
        if right != " ":
            return False
        following = self._buffer[place + 1]
        if following.islower():
            return False
        return stops[0] != "." or len(stops) > 1 or not self._abbreviated(following)

    def _abbreviated(self, following: str) -> bool:
        """Whether the one full stop at _stop_at belongs to the word before it."""
        start = self._stop_at
        for sign in reversed(self._buffer[max(self._begin, start - LONGEST_WORD) : start]):
            if sign != "." and (not sign.isalnum() or is_wide(sign)):
                break
            start -= 1
        word = self._buffer[start : self._stop_at].lower()
        if word.isdigit():
            # "1. First, ..." at the start or after another sentence
            return start == self._begin or self._best.get(Border.SENTENCE) == start - 1
        initials = all(len(part) == 1 and part.isalpha() for part in word.split("."))
        return word in ABBREVIATIONS or initials or (word in BEFORE_NUMBERS and following.isdigit())
