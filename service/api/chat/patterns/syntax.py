"""Regular expressions as JSON Schema has them (ECMA-262), read into a tree. Groups capture nothing, and lazy
repetitions are plain ones: what matches is the same.

`.`, `\\d`, `\\w` and `\\s` mean what llguidance takes them for, so that a pattern means one thing with look-ahead and
without.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from service.api.chat.patterns.characters import LAST, SURROGATES, Characters, others, united

MAX_NESTING = 50
"""Groups inside each other."""
MAX_REPEATS = 1000
"""Largest number in a repetition."""


class PatternError(ValueError):
    """Why a pattern cannot be used."""


@dataclass(frozen=True)
class Chars:
    """One character of a set."""

    of: Characters


@dataclass(frozen=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """most: None for any number."""

    item: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Look:
    """(?=...) or, if negative, (?!...)."""

    item: Node
    negative: bool


@dataclass(frozen=True)
class Edge:
    """^ or, if it is the end, $."""

    end: bool


Node = Chars | Sequence | Choice | Repeat | Look | Edge

_LINE_BREAK: Characters = ((10, 10),)
_DIGITS: Characters = ((48, 57),)
_WORD: Characters = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Characters = (
    *((9, 13), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
"""Unicode's White_Space."""
_SETS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d+)(?:(,)(\d*))?\})\??")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|c([A-Za-z])|(0)(?!\d)")
_GROUP = re.compile(r"\?(?::|(=)|(!)|<(?![=!])[^>]*>)")


def parsed(pattern: str) -> Node:
    """The tree of a pattern. PatternError for what this module does not know."""
    reader = _Reader(pattern)
    tree = reader.choice(0)
    if reader.at < len(pattern):
        raise PatternError("a bracket is closed that was not opened")
    return tree


def read_class(text: str) -> Characters:
    """The set that a class of characters, with its square brackets, stands for. PatternError as of parsed."""
    tree = parsed(text)
    if not isinstance(tree, Chars):
        raise PatternError("not one class of characters")
    return tree.of


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def choice(self, depth: int) -> Node:
        if depth > MAX_NESTING:
            raise PatternError(f"at most {MAX_NESTING} groups inside each other allowed")
        options = [self._sequence(depth)]
        while self._taken("|"):
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            items.append(self._repeated(self._item(depth)))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _repeated(self, item: Node) -> Node:
        found = self._matched(_QUANTIFIER)
        if found is None:
            return item
        if isinstance(item, Look | Edge):
            raise PatternError(f"nothing to repeat before {found[0]}")
        sign, least, several, most = found.groups()
        if sign:
            return Repeat(item, int(sign == "+"), 1 if sign == "?" else None)
        if max(len(least), len(most or "")) > 4 or int(least) > MAX_REPEATS or int(most or 0) > MAX_REPEATS:
            raise PatternError(f"{found[0]}: at most {MAX_REPEATS} repetitions allowed")
        return Repeat(item, int(least), (int(most) if most else None) if several else int(least))

    def _item(self, depth: int) -> Node:
        character = self.text[self.at]
        self.at += 1
        if character == "(":
            return self._group(depth)
        if character == "[":
            return Chars(self._class())
        if character == "\\":
            return Chars(self._escape(in_class=False))
        if character in "*+?":
            raise PatternError(f"nothing to repeat before {character}")
        if character in "^$":
            return Edge(end=character == "$")
        return Chars(others(_LINE_BREAK) if character == "." else _single(character))

    def _group(self, depth: int) -> Node:
        kind = self._matched(_GROUP)
        if kind is None and self._taken("?"):
            behind = self.text.startswith(("<=", "<!"), self.at)
            raise PatternError("look-behind is not supported" if behind else "a kind of group that is not supported")
        item = self.choice(depth + 1)
        if not self._taken(")"):
            raise PatternError("a bracket is not closed")
        looks = kind is not None and (kind[1] or kind[2])
        # A group may be repeated, even if what it holds may not.
        return Look(item, negative=looks == "!") if looks else Sequence((item,))

    def _class(self) -> Characters:
        negative = self._taken("^")
        ranges: list[tuple[int, int]] = []
        while not self._taken("]"):
            low = self._member()
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                high = self._member()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or low[0][0] > high[0][1]:
                    raise PatternError("a range of characters without an order")
                ranges.append((low[0][0], high[0][1]))
            else:
                ranges += low
        found = united(ranges)
        return others(found) if negative else found

    def _member(self) -> Characters:
        if self.at >= len(self.text):
            raise PatternError("a class of characters is not closed")
        self.at += 1
        character = self.text[self.at - 1]
        return self._escape(in_class=True) if character == "\\" else _single(character)

    def _escape(self, *, in_class: bool) -> Characters:
        if found := self._matched(_CODE):
            two, four, many, control, zero = found.groups()
            code = ord(control) % 32 if control else int(two or four or many or zero, 16)
            if code > LAST or SURROGATES[0] <= code <= SURROGATES[1]:
                raise PatternError(f"\\{found[0]} is no character")
            return ((code, code),)
        character = self.text[self.at : self.at + 1]
        self.at += 1
        if (kind := character.lower()) in _SETS:
            return _SETS[kind] if kind == character else others(_SETS[kind])
        if character in _CONTROLS:
            return ((_CONTROLS[character], _CONTROLS[character]),)
        if character == "b" and in_class:
            return ((8, 8),)
        if not character or (character.isascii() and character.isalnum()):
            raise PatternError(f"\\{character} is not supported beside look-ahead")
        return _single(character)

    def _taken(self, character: str) -> bool:
        taken = self.text.startswith(character, self.at)
        self.at += taken
        return taken

    def _matched(self, wanted: re.Pattern[str]) -> re.Match[str] | None:
        found = wanted.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found


def _single(character: str) -> Characters:
    return ((ord(character), ord(character)),)
