"""Roman numerals where an English text can only mean a number: Chapter IV, Louis XIV."""

from __future__ import annotations

import re
from collections.abc import Callable

from service.api.spoken_text.normalising.numbers import cardinal, ordinal

Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]

NUMERAL = r"(?:X{1,3}(?:IX|IV|V?I{0,3})|IX|IV|VI{0,3}|I{1,3})"
"""1 to 39."""
VALUES = {"I": 1, "V": 5, "X": 10}
NOUNS = (
    "Act|Appendix|Article|Book|Chapter|Class|Episode|Grade|Level|Part|Phase|Scene|Season|Section|Stage|Tier|Title|Type|"
    "Vatican|Volume|World War"
)
NAMES = (
    "Alexander|Benedict|Catherine|Charles|Clement|Constantine|Darius|Edward|Elizabeth|Ferdinand|Francis|Frederick|"
    "George|Gregory|Gustav|Henry|Innocent|Ivan|James|John|Leo|Leopold|Louis|Napoleon|Nicholas|Paul|Peter|Philip|Pius|"
    "Ptolemy|Ramses|Richard|Thutmose|Urban|Wilhelm|William"
)
NEXT = r"(?:(?:,| and| to| of| or|[-–]) ?)"
CONTEXT = re.compile(rf"\b(?:{NOUNS}|{NAMES})\s(?:[IVX]|\Z)")
"""What may begin a rule's match: words behind it cannot be told yet."""


def value(numeral: str) -> int:
    """XIV -> 14."""
    numbers = [VALUES[sign] for sign in numeral]
    following = [*numbers[1:], 0]
    return sum(-one if one < other else one for one, other in zip(numbers, following, strict=True))


def _numbered(match: re.Match[str]) -> str:
    """Chapter IV, and every numeral that is counted with it: Parts I to III."""
    return re.sub(rf"\b{NUMERAL}\b", lambda numeral: cardinal(value(numeral[0])), match[0])


def _regnal(match: re.Match[str]) -> str:
    return f"{match[1]} the {ordinal(value(match[2])).capitalize()}"


ROMAN: tuple[Rule, ...] = (
    (re.compile(rf"(?<=\b)(?:{NOUNS})s? {NUMERAL}\b(?:{NEXT}{NUMERAL}\b){{0,8}}(?!['’-]\w?[a-z])"), _numbered),
    # Of the first of a name, "I" may be the pronoun.
    (re.compile(rf"\b({NAMES}) ((?!I\b){NUMERAL})\b"), _regnal),
)
