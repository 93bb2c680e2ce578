"""The `input` of a speech request, in pieces -> texts and pauses, from SSML or from marks like [pause:1.5s]."""

from __future__ import annotations

import re

from models.interfaces.errors import InputError
from service.api.spoken_text.alignment import Pair
from service.api.spoken_text.lexicon import MAX_GROWTH
from service.api.spoken_text.markup import MarkupStripper
from service.api.spoken_text.ssml import SsmlReader, is_ssml, may_be_ssml, seconds_of

MAX_PAUSE = 10.0
"""Seconds of one pause at most."""
MAX_PAUSES = 120.0
"""Seconds of all pauses of a text."""
PAUSE = re.compile(r"\[pause:([^\[\]\n]{0,32})\]", re.IGNORECASE)
OPEN_MARK = re.compile(r"\[(?:p(?:a(?:u(?:s(?:e(?::[^\[\]\n]{0,32})?)?)?)?)?)?\Z", re.IGNORECASE)
"""How a piece may end inside a pause."""


class PassageReader:
    """Separates texts from pauses. However the input is cut into pieces, the joined texts are the same.

    Markdown, HTML tags and emoji are removed. ssml: read an input that begins with <speak> as SSML.
    error: the first thing that the last call could not read; a text continues after it, SSML does not.
    """

    def __init__(self, *, ssml: bool) -> None:
        self.error: InputError | None = None
        self._markup = MarkupStripper()
        self._may_be_ssml = ssml
        self._ssml: SsmlReader | None = None
        self._broken = False
        self._begin = ""
        """The input so far, while it may be SSML."""
        self._pending = ""
        """Text that may be the begin of a pause."""
        self._pauses = 0.0
        self._growth = 0
        self._read: list[Pair | float] = []

    def feed(self, text: str, *, final: bool = False) -> list[Pair | float]:
        """Return what later pieces cannot change: texts, as written and as spoken, and seconds of silence."""
        self.error = None
        if self._may_be_ssml:
            text = self._begin = self._begin + text
            if is_ssml(text):
                self._ssml = SsmlReader(self._say, self._pause)
            elif may_be_ssml(text) and not final:
                return []
            self._may_be_ssml = False
        if self._ssml is None:
            self._read_marked(text, final=final)
        elif not self._broken:
            try:
                self._ssml.feed(text, final=final)
            except InputError as error:
                self.error, self._broken = error, True
        read, self._read = self._read, []
        return read

    def _read_marked(self, text: str, *, final: bool) -> None:
        text = self._markup.feed(text, final=final)
        text, self._pending = self._pending + text, ""
        if not final and (mark := OPEN_MARK.search(text)) is not None:
            text, self._pending = text[: mark.start()], mark[0]
        # In [text, duration, text, ...] every second item is a duration.
        for index, part in enumerate(PAUSE.split(text)):
            try:
                if index % 2 == 0:
                    self._say(part, part)
                elif (seconds := seconds_of(part)) is None:
                    raise InputError("input", "a pause is written [pause:1.5s] or [pause:300ms]")
                else:
                    self._pause(seconds)
            except InputError as error:
                self.error = self.error or error

    def _say(self, written: str, spoken: str) -> None:
        self._growth += len(spoken) - len(written)
        if self._growth > MAX_GROWTH:
            raise InputError("input", f"its elements make it more than {MAX_GROWTH} characters longer")
        if written or spoken:
            self._read.append((written, spoken))

    def _pause(self, seconds: float) -> None:
        if seconds > MAX_PAUSE:
            raise InputError("input", f"a pause of {seconds:g} s given, at most {MAX_PAUSE:g} s allowed")
        self._pauses += seconds
        if self._pauses > MAX_PAUSES:
            raise InputError("input", f"its pauses are longer than {MAX_PAUSES:g} s together")
        if seconds > 0:
            self._read.append(seconds)
