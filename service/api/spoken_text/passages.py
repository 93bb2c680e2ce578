"""The `input` of a speech request, in pieces -> texts and pauses, from marks like [pause:1.5s]."""

from __future__ import annotations

import re

from models.interfaces.errors import InputError
from service.api.spoken_text.markup import MarkupStripper

MAX_PAUSE = 10.0
"""Seconds of one pause at most."""
MAX_PAUSES = 120.0
"""Seconds of all pauses of a text."""
PAUSE = re.compile(r"\[pause:([^\[\]\n]{0,32})\]", re.IGNORECASE)
OPEN_MARK = re.compile(r"\[(?:p(?:a(?:u(?:s(?:e(?::[^\[\]\n]{0,32})?)?)?)?)?)?\Z", re.IGNORECASE)
"""How a piece may end inside a pause."""
DURATION = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?|\.\d{1,6})\s*(ms|s)\s*", re.IGNORECASE)


class PassageReader:
    """Separate texts from pauses. However the input is cut into pieces, the joined texts are the same.

    Markdown, HTML tags and emoji are removed. error: the first pause that the last call could not read; the text
    continues after it.
    """

    def __init__(self) -> None:
        self.error: InputError | None = None
        self._markup = MarkupStripper()
        self._pending = ""
        """Text that may be the begin of a pause."""
        self._pauses = 0.0

    def feed(self, text: str, *, final: bool = False) -> list[str | float]:
        """Return what later pieces cannot change: texts, and seconds of silence."""
        self.error = None
        text = self._markup.feed(text, final=final)
        text, self._pending = self._pending + text, ""
        if not final and (mark := OPEN_MARK.search(text)) is not None:
            text, self._pending = text[: mark.start()], mark[0]
        read: list[str | float] = []
        # In [text, duration, text, ...] every second item is a duration.
        for index, part in enumerate(PAUSE.split(text)):
            try:
                read.append(part if index % 2 == 0 else self._pause(part))
            except InputError as error:
                self.error = self.error or error
        return [part for part in read if part]

    def _pause(self, duration: str) -> float:
        """Seconds of a pause."""
        if (match := DURATION.fullmatch(duration)) is None:
            raise InputError("input", "a pause is written [pause:1.5s] or [pause:300ms]")
        seconds = float(match[1]) / (1000 if match[2].lower() == "ms" else 1)
        if seconds > MAX_PAUSE:
            raise InputError("input", f"a pause of {seconds:g} s given, at most {MAX_PAUSE:g} s allowed")
        self._pauses += seconds
        if self._pauses > MAX_PAUSES:
            raise InputError("input", f"its pauses are longer than {MAX_PAUSES:g} s together")
        return seconds
