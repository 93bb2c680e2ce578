"""A pattern with look-ahead -> patterns without it that a string must match all of.

Look-aheads at the start of an anchored pattern, as in ^(?!\\.)(?=.{3,9}$)[a-z.]+$, are conditions on the whole string:
each becomes a pattern of its own. What cannot be separated like that goes through an automaton.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from service.api.chat.patterns.automaton import MAX_STEPS, Steps, automaton
from service.api.chat.patterns.characters import expression, quotable
from service.api.chat.patterns.elimination import regular_expression
from service.api.chat.patterns.syntax import PatternError, parsed, read_class

LONGEST = 4096
"""Characters of a pattern, and of each one that is made of it."""

_SIGN = re.compile(r"\\.?|\[\^?(?:\\.?|[^\]\\])*(?:\]|\Z)|\(\?<?[=!]|[()|]", re.DOTALL)
"""An escape, a class, or one of the signs that this module looks for, which these two may hold. What is not closed ends
with the pattern: if it were no sign, the search would start anew from each bracket."""
_AROUND = ("(?=", "(?!", "(?<=", "(?<!")
_AHEAD = _AROUND[:2]


@dataclass(frozen=True)
class Separated:
    """patterns: without look-ahead; a string must match all. problem: why there are none. steps: what it took, of
    automaton.MAX_STEPS."""

    patterns: tuple[str, ...]
    problem: str
    steps: int


@lru_cache(maxsize=256)
def separated(pattern: str) -> Separated:
    """The patterns that say together what `pattern` says; itself if it looks nowhere, but for characters.quotable."""
    return _result(pattern, several=True)


@lru_cache(maxsize=256)
def united(pattern: str) -> Separated:
    """One pattern that says what `pattern` says; itself if it looks nowhere, but for characters.quotable."""
    return _result(pattern, several=False)


def _result(pattern: str, *, several: bool) -> Separated:
    if not _looks(pattern):
        return Separated((_SIGN.sub(_quotable, pattern),), "", 0)
    steps = Steps()
    try:
        made = tuple(dict.fromkeys(_conditions(pattern, steps))) if several else (_converted(pattern, steps),)
    except PatternError as error:
        return Separated((), str(error), MAX_STEPS - max(0, steps.left))
    return Separated(made, "", MAX_STEPS - steps.left)


def _conditions(pattern: str, steps: Steps) -> Iterator[str]:
    looks, rest = _leading(pattern)
    for look in looks:
        inner = look[len("(?=") : -1]
        if look.startswith("(?!") or _looks(inner):
            yield _converted(f"^{look}", steps)
        else:
            # Without brackets where it can be: llguidance knows $ only at the end of a whole alternative.
            plain = _SIGN.sub(_quotable, inner)
            yield f"^(?:{plain})" if _divides(inner) else f"^{plain}"
    if _looks(rest):
        yield _converted(rest, steps)
    elif rest != "^":
        yield _SIGN.sub(_quotable, rest)


def _quotable(sign: re.Match[str]) -> str:
    """A class that llguidance would not keep inside a JSON string, as one that it keeps; all else as it is."""
    if not sign[0].startswith("["):
        return sign[0]
    try:
        given = read_class(sign[0])
    except PatternError:  # \p{...}, or no class at all
        return sign[0]
    kept = quotable(given)
    return sign[0] if kept == given else expression(kept)


def _leading(pattern: str) -> tuple[list[str], str]:
    """The look-aheads after ^, and the pattern without them."""
    looks: list[str] = []
    at = 1
    while pattern.startswith("^") and pattern.startswith(_AHEAD, at):
        looks.append(pattern[at : (end := _closing(pattern, at))])
        at = end
    rest = pattern[at:]
    separable = looks and not _divides(rest) and not rest.startswith(("*", "+", "?", "{"))
    return (looks, f"^{rest}") if separable else ([], pattern)


def _closing(pattern: str, opening: int) -> int:
    """The place after the bracket that closes one."""
    for at, depth in _depths(pattern, opening):
        if depth == 0:
            return at
    raise PatternError("a bracket is not closed")


def _divides(pattern: str) -> bool:
    """Whether a pattern is a choice of several."""
    return any(depth == 0 and pattern[at - 1] == "|" for at, depth in _depths(pattern, 0))


def _depths(pattern: str, begin: int) -> Iterator[tuple[int, int]]:
    """(place after it, depth after it) of each bracket and each bar."""
    depth = 0
    for sign in _SIGN.finditer(pattern, begin):
        if sign[0][0] in "()|":
            depth += sign[0].startswith("(") - (sign[0] == ")")
            yield sign.end(), depth


def _looks(pattern: str) -> bool:
    return any(sign[0] in _AROUND for sign in _SIGN.finditer(pattern))


def _converted(pattern: str, steps: Steps) -> str:
    inner = regular_expression(automaton(parsed(pattern), steps), LONGEST - len("^(?:)$"), steps)
    return f"^(?:{inner})$"
