"""The `input` of a speech request, in pieces -> texts and pauses, from SSML or from marks like [pause:1.5s].

SSML: a small part of SSML 1.1 (W3C): speak, p, s, break and sub, read by a tokenizer of its own: no DTD, no entities
but the five of XML, no processing instructions, at most four elements inside each other. Unsupported elements are
refused by name, not ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from models.interfaces.errors import InputError
from service.api.spoken_text.markup import MarkupStripper

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

BEGIN = re.compile(r"\s*(?:<\?xml[^<>?]{0,200}\?>\s*)?(?=<(?:!DOCTYPE )?speak[\s/>])")
"""With a DTD in front it is SSML, too, and refused for that: as a text it would be spoken without its breaks."""
DECLARATION = re.compile(r"<\?xml[^<>?]{0,200}(?:\?>\s*|\?)?")
NAME = r"[A-Za-z_][\w.:-]{0,63}"
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
TAG = re.compile(rf"<(/?)({NAME})((?:\s+{NAME}\s*=\s*(?:\"[^\"<]*\"|'[^'<]*'))*)\s*(/?)>", re.ASCII)
ATTRIBUTE = re.compile(rf"({NAME})\s*=\s*(?:\"([^\"]*)\"|'([^']*)')", re.ASCII)
OPEN_TAG = re.compile(r"<(?:[^\"'<>]|\"[^\"<]*\"|'[^'<]*')*(?:\"[^\"<]*|'[^'<]*)?\Z")
"""How a chunk of text may end inside a tag."""
OPEN_ENTITY = re.compile(r"&[^;&<]{0,33}\Z")
MAX_BEGIN = 1000
"""Number of characters before <speak> at most."""
MAX_OPEN = 4096
"""Number of characters of a tag or comment at most."""
DURATION = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?|\.\d{1,6})\s*(ms|s)\s*", re.IGNORECASE)
ENTITY = re.compile(r"&(#[0-9]{1,7};|#[xX][0-9A-Fa-f]{1,6};|[A-Za-z]{1,32};)?")
TEXT = re.compile(r"[^<]+")
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
ENTITIES = {"lt;": "<", "gt;": ">", "amp;": "&", "quot;": '"', "apos;": "'"}


def is_ssml(text: str) -> bool:
    """Whether it begins with a <speak> element."""
    return BEGIN.match(text) is not None


def may_be_ssml(text: str) -> bool:
    """Whether a text with this beginning can still become SSML."""
    if len(text) > MAX_BEGIN:
        return False
    start = text.lstrip()
    declaration = DECLARATION.match(start)
    if declaration is not None:
        start = start[declaration.end() :]
    return any(begin.startswith(start) for begin in ("<speak", "<?xml", "<!DOCTYPE speak"))


@dataclass
class _Element:
    """alias: what is said in place of its text."""

    name: str
    alias: str = ""


class SsmlReader:
    """Read SSML in pieces. say: receives texts. pause: receives seconds of silence."""

    def __init__(self, say: Callable[[str], None], pause: Callable[[float], None]) -> None:
        self._text = ""
        """Text that has not been read yet."""
        self._read = 0
        self._say = say
        self._pause = pause
        self._open: list[_Element] = [_Element("")]
        self._begun = self._complete = False

    def feed(self, text: str, *, final: bool = False) -> None:
        """final: the text ends here. InputError names what is not supported or not well formed."""
        self._text += text
        place = 0
        if not self._begun:
            begin = BEGIN.match(self._text)
            place, self._begun = 0 if begin is None else begin.end(), True
        while place < len(self._text) and (final or not self._is_open(place)):
            place = self._step(place, final)
        self._text, self._read = self._text[place:], self._read + place
        if final and len(self._open) > 1:
            raise _error(f"<{self._open[-1].name}> is not closed")

    def _is_open(self, place: int) -> bool:
        """Whether the tag or entity at `place` may end in a later chunk."""
        text = self._text
        if text[place] != "<":
            return text[place] == "&" and OPEN_ENTITY.match(text, place) is not None
        if len(text) - place > MAX_OPEN:
            return False
        if text.startswith("<!--", place):
            return COMMENT.match(text, place) is None
        return "<!--".startswith(text[place:]) or OPEN_TAG.match(text, place) is not None

    def _step(self, place: int, final: bool) -> int:
        """Read the tag, entity or text at `place`; return where it ends."""
        if match := TEXT.match(self._text, place):
            entity = None if final else OPEN_ENTITY.search(match[0])
            text = match[0] if entity is None or match.end() < len(self._text) else match[0][: entity.start()]
            self._characters(SPACES.sub(" ", _unescape(text)))
            return place + len(text)
        if match := COMMENT.match(self._text, place):
            return match.end()
        match = TAG.match(self._text, place)
        if match is None and self._text.startswith(("<!", "<?"), place):
            raise _error("declarations (<!...>) and processing instructions (<?...>) are not supported")
        if match is None:
            raise _error(f"the tag at character {self._read + place} is not well formed; write &lt; for <")
        closing, name, attributes, empty = match.groups()
        if not closing:
            self._begin(name, attributes)
        if closing or empty:
            self._end(name, closing and (attributes or empty))
        return match.end()

    def _characters(self, text: str) -> None:
        name = self._open[-1].name
        if name in ("", "break"):
            if text.strip():
                raise _error("there is text outside of <speak>" if name == "" else "<break> holds no text")
        elif name != "sub":
            self._say(text)

    def _begin(self, name: str, source: str) -> None:
        parent = self._open[-1].name
        if name not in CHILDREN:
            raise _error(f"<{name}> is not supported; supported are {', '.join(sorted(filter(None, CHILDREN)))}")
        if name not in CHILDREN[parent] or (parent == "" and self._complete):
            raise _error(f"<{name}> cannot stand " + (f"inside <{parent}>" if parent else "outside of <speak>"))
        attributes = self._attributes(name, source)
        element = _Element(name)
        match name:
            case "break":
                self._pause(_pause(attributes))
            case "sub":
                element.alias = attributes.get("alias", "")
                if not element.alias.strip():
                    raise _error("<sub> needs the attribute alias")
            case "p" | "s":
                self._say("\n\n")
        self._open.append(element)

    def _attributes(self, name: str, source: str) -> dict[str, str]:
        attributes: dict[str, str] = {}
        for key, double, single in ATTRIBUTE.findall(source):
            if name in ATTRIBUTES and key not in ATTRIBUTES[name]:
                raise _error(f"the attribute {key} of <{name}> is not supported")
            if key in attributes:
                raise _error(f"<{name}> has the attribute {key} twice")
            attributes[key] = _unescape(double or single)
        return attributes

    def _end(self, name: str, malformed: str) -> None:
        element = self._open[-1]
        if malformed or element.name != name:
            raise _error(f"</{name}> does not close " + (f"<{element.name}>" if element.name else "anything"))
        self._open.pop()
        match name:
            case "sub":
                self._say(element.alias)
            case "p" | "s":
                self._say("\n\n")
            case "speak":
                self._complete = True


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


def _unescape(text: str) -> str:
    return ENTITY.sub(_character, text) if "&" in text else text


def _character(match: re.Match[str]) -> str:
    name = match[1]
    if name is None:
        raise _error("& stands for itself only as &amp;")
    if name in ENTITIES:
        return ENTITIES[name]
    if not name.startswith("#"):
        raise _error(f"the entity &{name} is not supported")
    digits = name[1:-1]
    code = int(digits[1:], 16) if digits[0] in "xX" else int(digits)
    if not 0 < code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise _error(f"&{name} is no character")
    return chr(code)


def _error(message: str) -> InputError:
    return InputError("input", f"SSML: {message}")
