"""The `input` of a speech request, in pieces -> texts and pauses, from SSML or from marks like [pause:1.5s].

SSML: a small part of SSML 1.1 (W3C): speak, p, s, break and sub, at most four inside each other. There is no DTD, so
no entity is declared. Unsupported elements are refused by name, not ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.parsers.expat import ErrorString, ExpatError, ParserCreate

from models.interfaces.errors import InputError
from service.api.spoken_text.markup import UNSPEAKABLE, MarkupStripper

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
        self._read: list[str | float] = []

    def feed(self, text: str, *, final: bool = False) -> list[str | float]:
        """Return what later pieces cannot change: texts, and seconds of silence."""
        self.error = None
        if self._may_be_ssml:
            text = self._begin = self._begin + text
            if is_ssml(text):
                self._ssml, text = SsmlReader(self._say, self._pause), text.lstrip()
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
                    self._say(part)
                elif (seconds := seconds_of(part)) is None:
                    raise InputError("input", "a pause is written [pause:1.5s] or [pause:300ms]")
                else:
                    self._pause(seconds)
            except InputError as error:
                self.error = self.error or error

    def _say(self, text: str) -> None:
        if text:
            self._read.append(text)

    def _pause(self, seconds: float) -> None:
        if seconds > MAX_PAUSE:
            raise InputError("input", f"a pause of {seconds:g} s given, at most {MAX_PAUSE:g} s allowed")
        self._pauses += seconds
        if self._pauses > MAX_PAUSES:
            raise InputError("input", f"its pauses are longer than {MAX_PAUSES:g} s together")
        if seconds > 0:
            self._read.append(seconds)


# SSML

BEGIN = re.compile(r"\s*<(?:speak[\s/>]|\?xml\s|!DOCTYPE\s)")
"""With a DTD in front it is SSML, too, and refused for that: as a text it would be spoken without its breaks."""
MAX_BEGIN = 1000
"""Number of spaces in front at most."""
DURATION = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?|\.\d{1,6})\s*(ms|s)\s*", re.IGNORECASE)
SPACES = re.compile(r"\s+")

IN_TEXT = frozenset({"break", "sub"})
CHILDREN = {
    "": frozenset({"speak"}),
    "speak": IN_TEXT | {"p", "s"},
    "p": IN_TEXT | {"s"},
    "s": IN_TEXT,
    "break": frozenset[str](),
    "sub": frozenset[str](),
}
ATTRIBUTES = {
    "p": frozenset({"xml:lang"}),
    "s": frozenset({"xml:lang"}),
    "break": frozenset({"time", "strength"}),
    "sub": frozenset({"alias"}),
}
"""Attributes of each element. Those of speak (version, namespaces, language) are not read."""
STRENGTHS = {"none": 0.0, "x-weak": 0.25, "weak": 0.5, "medium": 0.75, "strong": 1.0, "x-strong": 1.25}
"""Seconds of the strengths of a break, which SSML leaves to the processor."""


def is_ssml(text: str) -> bool:
    """Whether it begins with a <speak> element, or what stands in front of one."""
    return BEGIN.match(text) is not None


def may_be_ssml(text: str) -> bool:
    """Whether a text with this beginning can still become SSML."""
    start = text.lstrip()
    return len(text) <= MAX_BEGIN and any(begin.startswith(start) for begin in ("<speak", "<?xml", "<!DOCTYPE"))


class SsmlReader:
    """Read SSML in pieces. say: receives texts. pause: receives seconds of silence."""

    def __init__(self, say: Callable[[str], None], pause: Callable[[float], None]) -> None:
        self._say = say
        self._pause = pause
        self._open = [""]
        """Names of the open elements."""
        self._parser = ParserCreate()
        self._parser.buffer_text = True
        if hasattr(self._parser, "SetReparseDeferralEnabled"):
            self._parser.SetReparseDeferralEnabled(False)  # it would hold back text that is complete
        self._parser.StartElementHandler = self._begin
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._characters
        self._parser.StartDoctypeDeclHandler = _refuse
        self._parser.StartCdataSectionHandler = self._parser.ProcessingInstructionHandler = _refuse

    def feed(self, text: str, *, final: bool = False) -> None:
        """final: the text ends here. InputError names what is not supported or not well formed."""
        try:
            self._parser.Parse(UNSPEAKABLE.sub("", text), final)
        except ExpatError as error:
            place = f"line {error.lineno}, column {error.offset}"
            problem = f"not well formed at {place}: {ErrorString(error.code)}"
            raise _error(f"{problem}; write &lt; for < and &amp; for &, entities of HTML as characters") from None

    def _characters(self, text: str) -> None:
        if self._open[-1] == "break":
            raise _error("<break> holds no text")
        if self._open[-1] != "sub":
            self._say(SPACES.sub(" ", text))

    def _begin(self, name: str, attributes: dict[str, str]) -> None:
        parent = self._open[-1]
        if name not in CHILDREN:
            raise _error(f"<{name[:64]}> is not supported; supported are {', '.join(sorted(filter(None, CHILDREN)))}")
        if name not in CHILDREN[parent]:
            raise _error(f"<{name}> cannot stand inside <{parent}>")
        for key in attributes:
            if name in ATTRIBUTES and key not in ATTRIBUTES[name]:
                raise _error(f"the attribute {key[:64]} of <{name}> is not supported")
        self._open.append(name)
        match name:
            case "break":
                self._pause(_pause(attributes))
            case "sub":
                if not attributes.get("alias", "").strip():
                    raise _error("<sub> needs the attribute alias")
                self._say(attributes["alias"])
            case "p" | "s":
                self._say("\n\n")

    def _end(self, name: str) -> None:
        self._open.pop()
        if name in ("p", "s"):
            self._say("\n\n")


def _refuse(*_: object) -> None:
    raise _error("a DTD, CDATA and processing instructions (<!...>, <?...>) are not supported")


def seconds_of(duration: str) -> float | None:
    """ "1.5s", "300ms" -> seconds; None for any other text."""
    match = DURATION.fullmatch(duration)
    return None if match is None else float(match[1]) / (1000 if match[2].lower() == "ms" else 1)


def _pause(attributes: dict[str, str]) -> float:
    """Seconds of a <break>."""
    strength = attributes.get("strength", "medium")
    if strength not in STRENGTHS:
        raise _error(f"strength of <break>: must be one of {', '.join(STRENGTHS)}")
    if "time" not in attributes:
        return STRENGTHS[strength]
    seconds = seconds_of(attributes["time"])
    if seconds is None:
        raise _error("time of <break>: must be written as 1.5s or 300ms")
    return seconds


def _error(message: str) -> InputError:
    return InputError("input", f"SSML: {message}")
