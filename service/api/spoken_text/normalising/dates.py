"""English: dates, years, times and durations, from the matches of the rules of english.py."""

from __future__ import annotations

import re

from service.api.spoken_text.normalising.english_words import MONTHS
from service.api.spoken_text.normalising.neighbours import counts, is_year, words_beside
from service.api.spoken_text.normalising.numbers import cardinal, ordinal, plural, year

DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
BEFORE_TIMES = frozenset("at by until from before after around since till".split())  # noqa: SIM905
DURATION = ("hour", "minute", "second", "minute", "second")
"""Units of the groups of a duration."""


def month_number(name: str) -> int:
    return next(index for index, month in enumerate(MONTHS, 1) if month[:3] == name[:3])


def _year_of(match: re.Match[str]) -> str:
    return f" {year(int(match['year']))}" if match["year"] else ""


def spoken_date(match: re.Match[str]) -> str:
    """Groups month (a number or a name), day, and perhaps year; an impossible date stays."""
    name, day = match["month"], int(match["day"])
    month = int(name) if name.isdigit() else month_number(name)
    if not (1 <= month <= 12 and 1 <= day <= DAYS[month - 1]):
        return match[0]
    return f"{MONTHS[month - 1]} {ordinal(day)}{_year_of(match)}"


def day_first(match: re.Match[str]) -> str:
    month, day = month_number(match["month"]), int(match["day"])
    if not 1 <= day <= DAYS[month - 1]:
        return match[0]
    return f"the {ordinal(day)} of {MONTHS[month - 1]}{_year_of(match)}"


def days(match: re.Match[str]) -> str:
    """Nov 3-5, 2026."""
    month, first, last = month_number(match["month"]), int(match["first"]), int(match["last"])
    if not 1 <= first < last <= DAYS[month - 1]:
        return match[0]
    return f"{MONTHS[month - 1]} {ordinal(first)} to {ordinal(last)}{_year_of(match)}"


def slash_date(match: re.Match[str]) -> str:
    """11/22/2026, 22/11/2026 or 22.11.2026; a date that can be read both ways stays."""
    first, second = int(match[1]), int(match[3])
    month, day = (first, second) if first <= 12 else (second, first)
    if (first <= 12 and second <= 12) or not (1 <= month <= 12 and 1 <= day <= DAYS[month - 1]):
        return match[0]
    return f"{MONTHS[month - 1]} {ordinal(day)} {year(int(match[4]))}"


def spoken_time(match: re.Match[str]) -> str:
    hour, minute = int(match["hour"]), int(match["minute"] or 0)
    half = match["half"]
    _, before, after, _ = words_beside(match)
    if match[0].endswith(" am") and after == "I" and before.lower() not in BEFORE_TIMES:
        return match[0]  # Of these 10 am I the only one?
    if minute > 59 or hour > (12 if half else 23) or (half and not hour):
        return match[0]
    if minute:
        spoken = f"{cardinal(hour)} {'oh ' if minute < 10 else ''}{cardinal(minute)}"
    elif half:
        spoken = cardinal(hour)
    else:
        spoken = f"{cardinal(hour)} o'clock" if 0 < hour <= 12 else f"{cardinal(hour)} hundred"
    return f"{spoken} {half.upper()}M" if half else spoken


def long_time(match: re.Match[str]) -> str:
    """11:59:59 PM; without AM or PM it may be a duration."""
    hour, minute, second = (int(match[n]) for n in (1, 2, 3))
    half = match["half"]
    if minute > 59 or second > 59 or (half and not 1 <= hour <= 12):
        return match[0]
    seconds = counted(second, "second")
    if half:
        spoken = f"{cardinal(hour)} {'oh ' if 0 < minute < 10 else ''}{cardinal(minute) if minute else ''}".strip()
        return f"{spoken} and {seconds} {half.upper()}M"
    return f"{counted(hour, 'hour')} {counted(minute, 'minute')} and {seconds}"


def duration(match: re.Match[str]) -> str:
    """3h 20m, 1h 5m 30s, 5m 30s: m is no meter beside h or s."""
    parts = [(int(number), unit) for number, unit in zip(match.groups(), DURATION, strict=True) if number is not None]
    if any(number > 59 for number, _ in parts[1:]):
        return match[0]
    return " ".join(counted(number, unit) for number, unit in parts)


def counted(number: int, unit: str) -> str:
    return f"{cardinal(number)} {unit}{'' if number == 1 else 's'}"


def hours(match: re.Match[str]) -> str:
    """9-5pm, 10:30-12am: the first of two times."""
    minute = int(match[2] or 0)
    if not 1 <= int(match[1]) <= 12 or minute > 59:
        return match[0]
    return f"{cardinal(int(match[1]))}{' ' + ('oh ' if minute < 10 else '') + cardinal(minute) if minute else ''} to "


def decade(match: re.Match[str]) -> str:
    number = int(match[1])
    if number % 100 == 0:
        return plural(year(number)) if number >= 1000 else match[0]
    century = f"{cardinal(number // 100)} " if number >= 100 else ""
    return century + plural(cardinal(number % 100))


def years(match: re.Match[str]) -> str:
    """1990-2000, but 1200-1500 people."""
    spoken = cardinal if counts(*words_beside(match)[2:]) else year
    return f"{spoken(int(match[1]))} to {spoken(int(match[2]))}"


def spoken_year(match: re.Match[str]) -> str:
    """A year, or several: 2008, 2012 and 2016."""
    listed, comma, last = match[0].rpartition(", ")
    if not (comma and counts(*words_beside(match)[2:])):
        listed, comma, last = match[0], "", ""  # unlike "In 1981, 1200 miners"
    if not is_year(match, int(match[1]), followed=not comma):
        return match[0]
    return re.sub(r"\d{4}", lambda number: year(int(number[0])), listed) + comma + last


def years_short(match: re.Match[str]) -> str:
    """1914-18; but 2026-11 may be a month."""
    first, last = int(match[1]), int(match[2])
    if last <= max(first % 100, 12):
        return match[0]
    return f"{year(first)} to {cardinal(last)}"


def season(match: re.Match[str]) -> str:
    """1990/91."""
    if int(match[2]) != (int(match[1]) + 1) % 100:
        return match[0]
    last = year(int(match[1]) + 1)
    return f"{year(int(match[1]))} to {last.split()[-1] if int(match[2]) else last}"
