"""Splits a text that arrives in chunks into texts and pauses, as passages.py does for a whole text."""

from __future__ import annotations

import re

from models.interfaces.errors import InputError
from service.api.spoken_text.alignment import Pair
from service.api.spoken_text.markup import MarkupStripper
from service.api.spoken_text.passages import PAUSE, Passages, marked_seconds
from service.api.spoken_text.ssml import SsmlReader, is_ssml, may_be_ssml

OPEN_MARK = re.compile(r"\[(?:p(?:a(?:u(?:s(?:e(?::[^\[\]\n]{0,32})?)?)?)?)?)?\Z", re.IGNORECASE)
"""How a chunk may end inside a pause."""

Piece = Pair | float
"""Text as written and as spoken, or seconds of silence."""


class LivePassages:
    """markup: the text may hold Markdown, HTML tags and emoji, which are taken out. ssml: a text that begins with
    <speak> is SSML.

    error: after a call, why something could not be read; a text continues after it, SSML does not.
    """

    def __init__(self, *, markup: bool, ssml: bool) -> None:
        self.error: InputError | None = None
        self._passages = Passages()
        self._markup = MarkupStripper() if markup else None
        self._may_be_ssml = ssml
        self._ssml: SsmlReader | None = None
        self._broken = False
        self._begin = ""
        """Begin of the text, while it may be SSML."""
        self._pending = ""
        """Text that may be the beginning of a pause."""

    def feed(self, text: str, *, whole: bool) -> list[Piece]:
        """The part that later chunks cannot change any more. whole: a segment ends here."""
        self.error = None
        if self._broken:
            return []
        if self._may_be_ssml:
            text = self._begin = self._begin + text
            if is_ssml(text):
                self._ssml = SsmlReader(self._passages)
            elif may_be_ssml(text) and not whole:
                return []
            self._may_be_ssml = False
        try:
            if self._ssml is not None:
                self._ssml.feed(text, final=whole)
            else:
                self._read_marked(text, whole=whole)
        except InputError as error:
            self.error = error
            self._broken = self._ssml is not None
        return self._passages.take()

    def _read_marked(self, text: str, *, whole: bool) -> None:
        if self._markup is not None:
            text = self._markup.feed(text) + (self._markup.flush() if whole else "")
        text = self._pending + text
        mark = None if whole else OPEN_MARK.search(text)
        self._pending = "" if mark is None else mark[0]
        # In [text, duration, text, ...] every second item is a duration.
        pieces = PAUSE.split(text.removesuffix(self._pending))
        refused = None
        for index, piece in enumerate(pieces):
            try:
                if index % 2 == 0:
                    self._passages.say(piece)
                else:
                    self._passages.pause(marked_seconds(piece))
            except InputError as error:
                refused = error
        if refused is not None:
            raise refused
