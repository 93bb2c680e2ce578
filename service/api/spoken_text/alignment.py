"""Maps places of a rewritten text to places of its source."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence

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
