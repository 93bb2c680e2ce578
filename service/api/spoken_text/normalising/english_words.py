"""English: what words, signs and abbreviations stand for."""

from __future__ import annotations

import re

from service.api.spoken_text.normalising.tables import Tables

TABLES = Tables("english.rules")
MONTHS = TABLES.words("MONTHS")
CURRENCIES, CODES = TABLES.forms("CURRENCIES"), TABLES.forms("CODES")
DOLLARS, PERIODS, LARGE = TABLES.table("DOLLARS"), TABLES.table("PERIODS"), TABLES.table("LARGE")
BEFORE_NUMBERS, TITLES, WORDS = TABLES.table("BEFORE_NUMBERS"), TABLES.table("TITLES"), TABLES.table("WORDS")
DAYS = TABLES.table("DAYS")


def _plural(one: str) -> str:
    """square meter -> square meters, mile per hour -> miles per hour."""
    head, per, rest = one.partition(" per ")
    if head.endswith("hertz") or one == "per mille":
        return one
    first, space, last = head.partition(" ") if head.startswith("degree") else ("", "", head)
    plural = f"{first}s{space}{last}" if first else re.sub("foots$", "feet", f"{last}s")
    return plural + per + rest


UNITS = {unit: (one, _plural(one)) for unit, one in TABLES.table("UNITS").items()}
"""Each symbol with one and many of it."""
