"""Chinese: numbers, dates, times, money and units in Han characters, by chinese.rules, in linear time as in english.py.

What no rule knows stays as it is.
"""

from __future__ import annotations

import re

from service.api.spoken_text.english import is_long
from service.api.spoken_text.tables import Tables

HAN_DIGITS = "零一二三四五六七八九"
HAN_PLACES = ("", "十", "百", "千")
HAN_SCALES = ("", "万", "亿", "万亿")
TABLES = Tables("chinese.rules")
CURRENCIES = TABLES.table("CURRENCIES")
DIGIT = re.compile(r"\d")
"""A text without one is one that no rule changes."""
NARROW = {0xFF10 + digit: str(digit) for digit in range(10)}
"""Digits of full width."""


def han_digits(text: str) -> str:
    """2026 -> 二零二六."""
    return "".join(HAN_DIGITS[int(digit)] for digit in text)


def han_cardinal(number: int) -> str:
    """10 -> 十, 105 -> 一百零五, 20000 -> 二万. 0 to 10**16 - 1."""
    if not number:
        return HAN_DIGITS[0]
    words = ""
    gap = False
    for scale in range(len(HAN_SCALES) - 1, -1, -1):
        group = number // 10_000**scale % 10_000
        if group:
            words += (HAN_DIGITS[0] if words and (gap or group < 1000) else "") + _han_group(group) + HAN_SCALES[scale]
        gap = group == 0
    return words.removeprefix("一") if words.startswith("一十") else words


def _han_group(number: int) -> str:
    words = ""
    for place in (3, 2, 1, 0):
        digit = number // 10**place % 10
        if digit:
            words += HAN_DIGITS[digit] + HAN_PLACES[place]
        elif words and number % 10**place and not words.endswith(HAN_DIGITS[0]):
            words += HAN_DIGITS[0]
    return words


def han_decimal(text: str) -> str:
    """3.14 -> 三点一四. Leading zeros are spoken."""
    whole, _, fraction = text.replace(",", "").partition(".")
    spelled = len(whole) > 1 and whole[0] == "0"
    words = han_digits(whole) if spelled else han_cardinal(int(whole))
    return f"{words}点{han_digits(fraction)}" if fraction else words


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
        "paired": lambda text: han_digits(text.replace("·", "")),
        "dotted": lambda text: "点".join(map(han_digits, text.split("."))),
        "currency": CURRENCIES.__getitem__,
        "phone": lambda text: "，".join(map(han_digits, re.findall(r"\d+", text))),
        "operator": TABLES.table("OPERATORS").__getitem__,
        "unit": TABLES.table("UNITS").__getitem__,
    },
)
