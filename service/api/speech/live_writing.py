"""How the segments of a text that is spoken while it is being written were written, as script.py does for a whole
text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from service.api.speech.script import Line, Writing
from service.api.spoken_text.alignment import Pair, common_words
from service.api.spoken_text.lexicon import LexiconFilter
from service.api.spoken_text.normalising.text import TextNormaliser


class LiveWriting:
    """Follows a text through the filters that rewrite it. filters: in order; each reports from now on how it rewrites
    its source. The parts of finished segments are dropped."""

    def __init__(self, filters: Sequence[LexiconFilter | TextNormaliser]) -> None:
        self._steps: list[list[Pair]] = [[] for _ in range(len(filters) + 1)]
        for rewriting, pairs in zip(filters, self._steps[1:], strict=True):
            rewriting.on_piece = partial(_add, pairs)

    def say(self, written: str, spoken: str) -> None:
        """Adds the input of the first filter, and how it was written."""
        _add(self._steps[0], written, spoken)

    def lines(self, texts: Sequence[str], description: str) -> list[Line]:
        """The next segments from the last filter. description: that of the voice, at the begin of the first."""
        if not texts:
            return []
        writing = Writing(self._steps)
        lines = writing.added([Line(text, 0.0) for text in texts], description)
        end = writing.end
        for pairs in reversed(self._steps):
            end = _drop(pairs, end)
        return lines

    def clear(self) -> None:
        """Ends a passage: the rest of it has no segment."""
        for pairs in self._steps:
            pairs.clear()


def _add(pairs: list[Pair], source: str, text: str) -> None:
    pairs.extend(common_words(source, text))


def _drop(pairs: list[Pair], place: int) -> int:
    """Drops the pieces of the text up to a place; returns the length of their source. A changed piece that ends after
    the place loses its whole source, as in Alignment."""
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
