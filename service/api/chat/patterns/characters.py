"""Sets of characters as sorted ranges of code points, and how a regular expression writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

Characters = tuple[tuple[int, int], ...]
"""Ranges of code points, both ends inside, in order and apart from each other."""

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
"""No characters of text. A set may hold all of them or none."""
ANY: Characters = ((0, LAST),)
_SIGNS = frozenset(r"\.+*?()|[]{}^$#&-~")
"""What Rust's regex may take for more than itself. An escape of another sign may mean something, as \\< does."""
_CONTROLS = ((0, 9), (11, 31))
"""All but the line feed."""


def quotable(characters: Characters) -> Characters:
    """The set as llguidance keeps it inside a JSON string. One that holds all control characters lets a quotation mark
    and a backslash through as well, even if it holds neither; it loses NUL, which no answer needs."""
    controls = all(any(low <= first and last <= high for low, high in characters) for first, last in _CONTROLS)
    affected = controls and not (holds(characters, ord('"')) and holds(characters, ord("\\")))
    return others(united([*others(characters), (0, 0)])) if affected else characters


def united(ranges: Iterable[tuple[int, int]]) -> Characters:
    """All characters of the ranges, which may overlap."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def others(characters: Characters) -> Characters:
    """All characters but these."""
    ends = [-1, *(end for low, high in characters for end in (low - 1, high + 1)), LAST + 1]
    ends[0] = 0
    ends[-1] = LAST
    return tuple((low, high) for low, high in zip(ends[::2], ends[1::2], strict=True) if low <= high)


def classes(sets: Iterable[Characters]) -> list[Characters]:
    """The coarsest division of all characters in which each of the sets is a union of parts."""
    distinct = list(dict.fromkeys(sets))
    starts = sorted({0, LAST + 1, *(end for chars in distinct for low, high in chars for end in (low, high + 1))})
    parts: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for low, following in pairwise(starts):
        held = tuple(holds(chars, low) for chars in distinct)
        parts.setdefault(held, []).append((low, following - 1))
    return [united(ranges) for ranges in parts.values()]


def holds(characters: Characters, code: int) -> bool:
    """Whether a code point is in the set."""
    return any(low <= code <= high for low, high in characters)


def expression(characters: Characters) -> str:
    """The set as a class in the syntax of Rust's regex."""
    if characters == ANY:
        return r"[\s\S]"
    shorter = min((characters, others(characters)), key=len)
    if len(shorter) == 1 and shorter[0][0] == shorter[0][1] and shorter is characters:
        return _escaped(shorter[0][0])
    return f"[{'' if shorter is characters else '^'}{''.join(_members(shorter))}]"


def _members(characters: Characters) -> Iterator[str]:
    for low, high in characters:
        yield _escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}"


def _escaped(code: int) -> str:
    character = chr(code)
    if character in _SIGNS:
        return f"\\{character}"
    return character if character.isascii() and character.isprintable() else f"\\x{{{code:X}}}"
