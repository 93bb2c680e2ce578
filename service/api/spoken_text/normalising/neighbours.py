"""English: what the words before and after a number say about it: a year, an amount, or a measure of what follows."""

from __future__ import annotations

import re

from service.api.spoken_text.normalising.english_words import TABLES

BEFORE = re.compile(r"(?:([\w.'’]+)[\s(-]{1,2})?([\w.'’]+|[©(])[\s(:-]{0,2}\Z")
AFTER = re.compile(r"[ -]([^\W\d_][\w'’]*)(?: ([^\W\d_][\w'’]*))?")
REACH = 48
"""Characters before a number that may hold the two words."""


_SETS = TABLES.sets("WORD SETS")
ARTICLES, CONTEXT, NAMED, AMOUNTS, TOTALS, VERBS, SAID = (
    _SETS[name] for name in ("ARTICLES", "CONTEXT", "NAMED", "AMOUNTS", "TOTALS", "VERBS", "SAID")
)
IRREGULAR, SINGULAR, ADJECTIVES = _SETS["IRREGULAR"], _SETS["SINGULAR"], _SETS["ADJECTIVES"]
UNCOUNTED, SUBSTANCES, LENGTHS = _SETS["UNCOUNTED"], _SETS["SUBSTANCES"], _SETS["LENGTHS"]
PAIRS = frozenset(
    [("back", "to"), ("early", "as"), ("late", "as"), ("recently", "as"), ("year", "was"), ("year", "is")]
)


def words_beside(match: re.Match[str]) -> tuple[str, str, str, str]:
    """The two words before the match and the two after it; empty where there is none."""
    before = BEFORE.search(match.string[max(0, match.start() - REACH) : match.start()])
    after = AFTER.match(match.string, match.end())
    return (
        (before[1] or "") if before else "",
        before[2] if before else "",
        after[1] if after else "",
        (after[2] or "") if after else "",
    )


def is_plural(word: str) -> bool:
    return word in IRREGULAR or (
        len(word) > 3 and word.islower() and word.endswith("s") and word not in SINGULAR and word[-2] not in "su'’"
    )


def counts(after: str, then: str) -> bool:
    """Whether the words after a number are what it counts: 1350 (different) schools."""
    return is_plural(after) or (after in ADJECTIVES and is_plural(then))


def is_year(match: re.Match[str], number: int, *, followed: bool = True) -> bool:
    """Whether the number of four digits at the begin of the match names a year. followed: the words after the match
    are those after its last year."""
    earlier, before, after, then = words_beside(match)
    if not followed:
        after = then = ""
    word = before.lower()
    usual = 1800 <= number < 2050
    if word in NAMED:
        return True
    if counts(after, then):
        # the 2024 elections; In 1990 sales doubled
        named = word == "the" or (before == "In" and not earlier)
        return named and usual and number % 100 > 0 and after not in IRREGULAR
    if word == "of":
        return earlier.lower() not in TOTALS and number < 2100
    if word in CONTEXT or (earlier.lower(), word) in PAIRS:
        return number < 2100
    if word in AMOUNTS or word in TOTALS or not 1400 <= number < 2100:
        return False
    if match.string[match.start() - 1 : match.start()] == "(":
        return usual and match.string[match.end() : match.end() + 1] in (")", ",", ";", ":")
    owned = word in ARTICLES or word.endswith(("'s", "’s", "s'")) or (usual and earlier.lower() in ARTICLES)
    if owned and after and after.lower() not in UNCOUNTED:
        return True
    if word in ("", "and", "but"):
        alone = match.string[match.end() :].strip(" .,;:!?\n\"')") == ""
        titled = after == "by" and then[:1].isupper()
        return usual and (alone or titled or after in VERBS or (after != "" and after.lower() not in UNCOUNTED))
    return usual and before[0].isupper() and not counts(word, "") and word not in ARTICLES


def is_adjective(match: re.Match[str], unit: str = "", *, attached: bool = False) -> bool:
    """Whether an amount tells something of the next word: a 12V battery, but 12 V of tension. unit, attached: that of
    a measure, and whether it stands right behind the number."""
    earlier, before, after, _ = words_beside(match)
    if (
        not after
        or after.lower() in UNCOUNTED
        or (after.endswith("ly") and after not in ("supply", "family", "assembly"))
    ):
        return False
    if before.lower() in ARTICLES or (earlier.lower() in ARTICLES and before.islower() and before not in UNCOUNTED):
        return True
    alone = not before or before.lower() in ("and", "or", "with", "of", "for", "new", "use", "using", "two", "three")
    return attached and alone and unit not in SUBSTANCES


def is_answer(match: re.Match[str]) -> bool:
    """Whether "no." before a number ends a sentence: "I said no. 5 came." but "He is no. 1."."""
    earlier, before, after, then = words_beside(match)
    word = before.lower()
    if after == "of":
        return then in ("them", "us", "you", "the", "these", "those")
    if not word:
        return is_plural(after) and (then.endswith("ed") or then in VERBS)  # No. 6 tests failed; but No. 1 hits
    if word in ("is", "was", "are", "were"):
        return earlier.lower() in ("answer", "vote", "reply", "response") or (counts(after, then) and is_plural(after))
    return word in SAID and after.islower() and after not in ("in", "on", "at", "for")
