"""English: what the words before and after a number say about it: a year, an amount, or a measure of what follows."""

from __future__ import annotations

import re

BEFORE = re.compile(r"(?:([\w.'’]+)[\s(-]{1,2})?([\w.'’]+|[©(])[\s(:-]{0,2}\Z")
AFTER = re.compile(r"[ -]([^\W\d_][\w'’]*)(?: ([^\W\d_][\w'’]*))?")
REACH = 48
"""Characters before a number that may hold the two words."""


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


ARTICLES = _set("a an the this that each every another his her its their our my your one's no first second last next")
CONTEXT = _set(
    "in since until till during before after by from of born founded "
    "established early late mid mid- throughout between ca c."
)
NAMED = _set("year summer winter spring autumn fall circa copyright © q1 q2 q3 q4")
"""Only a year stands behind these, whatever comes after it: Q4 2025 results."""
AMOUNTS = _set("about over than nearly almost approximately exactly around to up only least most total some roughly")
TOTALS = _set(
    "total population sum average maximum minimum number height length depth weight speed score crowd distance value "
    "capacity range cost price rate count amount altitude elevation"
)
"""Of which there is an amount."""
VERBS = _set("was were is are saw will has have had brought marked began ended became came left went did")
IRREGULAR = _set(
    "people men women children feet miles percent dollars euros yen pounds meters metres kilometers kilometres tons "
    "tonnes hours minutes seconds calories points degrees words staff police sheep fish dozen hundred thousand million "
    "billion trillion"
)
SINGULAR = _set(
    "was is has his its this as us yes series census news politics besides perhaps "
    "towards onwards upwards afterwards always sometimes levels standards"
)
"""Words in -s that are no plural, and plurals that are named after a year."""
ADJECTIVES = _set(
    "new more other different active monthly daily registered extra additional separate individual young small large "
    "foreign local paying older public private"
)
UNCOUNTED = _set(
    "of to in on at by for from with without and or but than as per is are was were be been has have had will "
    "would can could should may might do does did a an the this that these those it he she we they you i who "
    "which when where while if so not no away ahead apart long wide tall high deep thick old across around above "
    "below under over behind before after later earlier ago more less each every today yesterday tomorrow daily "
    "weekly north south east west up down left right off out only just too again there here now then until till "
    "since into onto through during within between plus minus times ram memory storage data space vram because "
    "about both all"
)
"""Words before which an amount stands by itself: 5 km of road, 5 km away."""
SUBSTANCES = _set("g mg kg ml mL L oz lb lbs tsp tbsp µg μg")
"""Units in which ingredients are given: 200g flour."""
LENGTHS = _set(
    "hurdles races heats sprints waves swells cables boards poles walls ropes pools laps intervals strips dives towers "
    "steps finals swims jumps fences trees whales"
)
"""What has meters more often than it is counted in millions."""
PAIRS = frozenset(
    [("back", "to"), ("early", "as"), ("late", "as"), ("recently", "as"), ("year", "was"), ("year", "is")]
)
SAID = _set("said say says answered replied voted is was are were means meant a but and or so")


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
