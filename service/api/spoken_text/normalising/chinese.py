"""Chinese: numbers, dates, times, money and units in Han characters, by chinese.rules, in linear time as in english.py.

What no rule knows stays as it is.
"""

from __future__ import annotations

import re

from service.api.spoken_text.normalising.numbers import han_cardinal, han_decimal, han_digits, is_long
from service.api.spoken_text.normalising.tables import Tables

TABLES = Tables("chinese.rules")
CURRENCIES = TABLES.table("CURRENCIES")
DIGIT = re.compile(r"\d")
"""A text without one is one that no rule changes."""
NARROW = {0xFF10 + digit: str(digit) for digit in range(10)}
"""Digits of full width."""


def normalise_chinese(text: str) -> str:
    """text: a clause or more. Words and marks that no rule knows stay."""
    if DIGIT.search(text):
        text = text.translate(NARROW)
        for pattern, replace in RULES:
            text = pattern.sub(replace, text)
    return text


def _date(match: re.Match[str]) -> str:
    month, day = int(match[2]), int(match[3])
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return match[0]
    return f"{han_digits(match[1])}年{han_cardinal(month)}月{han_cardinal(day)}日"


def _time(match: re.Match[str]) -> str:
    hour, minute, second = int(match[1]), int(match[2]), match[3]
    if hour > 24 or minute > 59 or (second and int(second) > 59):
        return match[0]
    spoken = f"{'两' if hour == 2 else han_cardinal(hour)}点"
    if minute or second:
        spoken += f"{'零' if 0 < minute < 10 else ''}{han_cardinal(minute)}分"
    return f"{spoken}{han_cardinal(int(second))}秒" if second else spoken


def _money(match: re.Match[str]) -> str:
    amount = match["amount"]
    if "." in amount:
        amount = amount.rstrip("0").rstrip(".")
    return f"{_minus(match['minus'])}{han_decimal(amount)}{match['scale'] or ''}{CURRENCIES[match['currency']]}"


def _range(match: re.Match[str]) -> str:
    first, last = match[1], match[2]
    if first.startswith("0") or last.startswith("0") or int(first) >= int(last):
        return match[0]
    before = "百分之" if match[3] else ""
    return f"{before}{han_cardinal(int(first))}到{before}{han_cardinal(int(last))}"


def _fraction(match: re.Match[str]) -> str:
    top, bottom = int(match[1]), int(match[2])
    if not 0 < top < bottom:
        return match[0]
    return f"{han_cardinal(bottom)}分之{han_cardinal(top)}"


def _minus(sign: str | None) -> str:
    return "负" if sign else ""


RULES = TABLES.rules(
    {"date": _date, "time": _time, "money": _money, "range": _range, "fraction": _fraction},
    {
        "minus": _minus,
        "cardinal": lambda number: han_cardinal(int(number)),
        "decimal": han_decimal,
        "digits": han_digits,
        "plain": lambda number: han_digits(number) if is_long(number) else han_decimal(number),
        "term": lambda amount: _minus(amount.rstrip("0123456789.")) + han_decimal(amount.lstrip("-−")),
        "code": lambda text: re.sub(r"\d+", lambda number: han_digits(number[0]), text),
        "phone": lambda text: "，".join(map(han_digits, re.findall(r"\d+", text))),
        "operator": TABLES.table("OPERATORS").__getitem__,
        "unit": TABLES.table("UNITS").__getitem__,
    },
)
