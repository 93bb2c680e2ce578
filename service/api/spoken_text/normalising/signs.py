"""Signs between and beside numbers, in English: fractions, arithmetic, comparisons, powers, angles, short forms."""

from __future__ import annotations

import re
from collections.abc import Callable

from service.api.spoken_text.normalising.numbers import cardinal

Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]

FRACTIONS = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5",
    "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8",
}  # fmt: skip
OPERATORS = {
    "+": "plus",
    "×": "times",
    "*": "times",
    "÷": "divided by",
    "/": "divided by",
    "=": "equals",
    "≠": "is not",
    "-": "minus",
    "−": "minus",
}
TERM = r"\d{1,6}(?:\.\d{1,4})?"
"""Of a sum without spaces."""
COMPARISONS = {
    ">": "more than", "<": "less than", ">=": "at least", "≥": "at least", "<=": "at most", "≤": "at most",
    "~": "about", "≈": "about", "±": "plus or minus", "+/-": "plus or minus",
}  # fmt: skip
DAYS = {
    "Mon": "Monday", "Tue": "Tuesday", "Tues": "Tuesday", "Wed": "Wednesday", "Thu": "Thursday", "Thur": "Thursday",
    "Thurs": "Thursday", "Fri": "Friday", "Sat": "Saturday", "Sun": "Sunday",
}  # fmt: skip
DAY = "|".join(sorted(DAYS, key=len, reverse=True))
SIDES = {"N": "north", "S": "south", "E": "east", "W": "west"}
MARKS = frozenset("½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞§©²³#@^")
"""Signs that bring a rule into play where there is no digit."""


def _fraction(match: re.Match[str]) -> str:
    before = " " if match.start() and match.string[match.start() - 1].isdigit() else ""
    return before + FRACTIONS[match[0]]


def _sum(match: re.Match[str]) -> str:
    """2+2=4."""
    return re.sub(r"[^\d.]", lambda sign: f" {OPERATORS[sign[0]]} ", match[0])


def _angle(match: re.Match[str]) -> str:
    spoken = f"{cardinal(int(match[1]))} degrees {cardinal(int(match[2]))} minutes"
    if match[3]:
        spoken += f" {cardinal(int(match[3]))} seconds"
    return f"{spoken} {SIDES[match[4]]}" if match[4] else spoken


def _compared(match: re.Match[str]) -> str:
    """x<y, 5 > 3."""
    return " less than " if "<" in match[0] else " greater than "


def _power(match: re.Match[str]) -> str:
    exponent = match[2].replace("−", "-")
    if exponent in ("2", "3"):
        return f"{match[1]} {'squared' if exponent == '2' else 'cubed'}"
    minus = "minus " if exponent.startswith("-") else ""
    return f"{match[1]} to the power of {minus}{cardinal(int(exponent.lstrip('-')))}"


SIGNS: tuple[Rule, ...] = tuple(
    (re.compile(pattern), replace)
    for pattern, replace in (
        ("|".join(FRACTIONS), _fraction),
        (rf"\b({DAY})\.?[-–]({DAY})\b", lambda match: f"{DAYS[match[1]]} to {DAYS[match[2]]}"),
        (r"(?<![\w.])(\d{1,3})° ?(\d{1,2})['’′](?: ?(\d{1,2})[\"”″])? ?([NSEW](?!\w))?", _angle),
        (r"(?<![\w.])(\d)['’′] ?(\d{1,2})[\"”″]", lambda match: f"{cardinal(int(match[1]))} foot {match[2]}"),
        (
            r"(?<![\w.])(\d{1,2}) ?ft\.? (\d{1,2}) ?in\b",
            lambda match: f"{match[1]} {'foot' if match[1] == '1' else 'feet'} {match[2]} inches",
        ),
        (r"(?<![\w.,])\d{1,3}(?: 000){1,4}(?!\w|[.,]\d)", lambda match: match[0].replace(" ", "")),
        (rf"(?<![^\s(\"']){TERM}(?:[-−+*/×÷]{TERM}){{1,4}}=(?=\s?[-−\d?x]|\s?\Z)", _sum),
        (rf"(?<![^\s(\"']){TERM}(?:[+×]{TERM}){{1,4}}(?![\w=+*/×÷^%-]|[.,:]\d)", _sum),
        (r"(?<=\d) [-−] (?=\d[\d., ]{0,20}=)", lambda match: " minus "),
        (r"(?<=[\d)]) ?([×÷≠]) ?(?=[-\d(])", lambda match: f" {OPERATORS[match[1]]} "),
        (r"(?<![A-Za-z_]\d)(?<=[\d)])=(?=-?\d)", lambda match: " equals "),
        (r"(?<=[\d)]) ([+*/=]) (?=[-\d(?])", lambda match: f" {OPERATORS[match[1]]} "),
        (r"(?<=[\w)])([<>])(?=[a-z\d$(])|(?<=\d) ([<>]) (?=[\w$(])|(?<=\b[a-z]) ([<>]) (?=[a-z\d(])", _compared),
        (r"(?<=\d)\+(?=[\s,;!?)]|\.(?!\d)|\Z)|(?<=\d%)\+(?!\w)", lambda match: " plus"),
        (
            r"(?<![\w<>=~+/%-])(?!<3 (?:you|u|this|it|him|her)\b|<3[\s.!]{0,4}\Z)(>=|<=|\+/-|[<>≥≤~≈±]) ?(?=[$€£¥]?\d)",
            lambda match: f"{COMPARISONS[match[1]]} ",
        ),
        (r"(?<![\w^.])(\d{1,6}|[A-Za-z]{1,3}|\))\^([-−]?\d{1,3})(?![\w^])", _power),
        (r"§§? ?(?=\d)", lambda match: "section "),
        (r"© ?(?=\d|[A-Z])", lambda match: "copyright "),
        (r"(?<!\S)w/o(?= )", lambda match: "without"),
        (r"(?<!\S)w/(?= ?[A-Za-z])", lambda match: "with"),
    )
)
POWERS: tuple[Rule, ...] = (
    (re.compile(r"(?<=[A-Za-z\d)])²(?!\w)"), lambda match: " squared"),
    (re.compile(r"(?<=[A-Za-z\d)])³(?!\w)"), lambda match: " cubed"),
)
"""After units, of which some are squares."""
