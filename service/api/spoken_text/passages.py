"""The `input` of a speech request -> passages with pauses between them, from marks like [pause:1.5s] or from SSML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from models.interfaces.errors import InputError
from service.api.spoken_text.alignment import Pair
from service.api.spoken_text.lexicon import MAX_GROWTH
from service.api.spoken_text.markup import strip_markup

MAX_PAUSE = 10.0
"""Seconds of one pause at most."""
MAX_PAUSES = 120.0
"""Seconds of all pauses of a text."""
PAUSE = re.compile(r"\[pause:([^\[\]\n]{0,32})\]", re.IGNORECASE)
DURATION = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?|\.\d{1,6})\s*(ms|s)\s*", re.IGNORECASE)


@dataclass
class Passage:
    """Text up to the next pause. parts: as written and as spoken, in order. pause: seconds of silence before it."""

    pause: float = 0.0
    parts: list[Pair] = field(default_factory=list)


class Passages:
    """Builds passages."""

    def __init__(self) -> None:
        self.all = [Passage()]
        self._pauses = 0.0
        self._growth = 0

    def say(self, written: str, spoken: str | None = None) -> None:
        """spoken: if it differs from what is written. InputError if that makes the text too long."""
        self._growth += 0 if spoken is None else len(spoken) - len(written)
        if self._growth > MAX_GROWTH:
            raise InputError("input", f"its elements make it more than {MAX_GROWTH} characters longer")
        pair = (written, written if spoken is None else spoken)
        if any(pair):
            self.all[-1].parts.append(pair)

    def pause(self, seconds: float) -> None:
        """Adds a pause. InputError if it is too long, alone or together with those before it."""
        if seconds > MAX_PAUSE:
            raise InputError("input", f"a pause of {seconds:g} s given, at most {MAX_PAUSE:g} s allowed")
        self._pauses += seconds
        if self._pauses > MAX_PAUSES:
            raise InputError("input", f"its pauses are longer than {MAX_PAUSES:g} s together")
        if seconds > 0:
            self.all.append(Passage(seconds))

    def take(self) -> list[Pair | float]:
        """Texts, as written and as spoken, and seconds of silence since the last call, in order."""
        taken: list[Pair | float] = []
        for passage in self.all:
            taken += [passage.pause] if passage.pause else []
            taken += passage.parts
        self.all = [Passage()]
        return taken


def seconds_of(duration: str) -> float | None:
    """ "1.5s", "300ms" -> seconds; None for any other text."""
    match = DURATION.fullmatch(duration)
    return None if match is None else float(match[1]) / (1000 if match[2].lower() == "ms" else 1)


def marked_passages(text: str, *, markup: bool) -> Sequence[Passage]:
    """Passages of a text that is not SSML. markup: the text may hold Markdown, HTML tags and emoji, which are
    removed."""
    passages = Passages()
    # In [text, duration, text, ...] every second item is a duration.
    for index, piece in enumerate(PAUSE.split(strip_markup(text) if markup else text)):
        if index % 2 == 0:
            passages.say(piece)
        else:
            passages.pause(marked_seconds(piece))
    return passages.all


def marked_seconds(duration: str) -> float:
    """Seconds of a mark [pause:DURATION]. InputError if it is not a valid duration."""
    seconds = seconds_of(duration)
    if seconds is None:
        raise InputError("input", "a pause is written [pause:1.5s] or [pause:300ms]")
    return seconds
