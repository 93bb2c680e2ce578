"""English: numbers, dates, times, money, units and abbreviations as words, by english.rules.

The rules run one after the other over a clause; what one has replaced has no digits left for the next. Every quantifier
is bounded and every number begins where no digit is before it, so that the time is linear in the text. Since there are
a hundred of them, one pattern finds out first whether any may apply. What no rule knows stays as it is.
"""

from __future__ import annotations

import re

from service.api.spoken_text.normalising import dates
from service.api.spoken_text.normalising.english_words import (
    BEFORE_NUMBERS,
    CODES,
    CURRENCIES,
    DAYS,
    DOLLARS,
    LARGE,
    MONTHS,
    PERIODS,
    TABLES,
    TITLES,
    UNITS,
    WORDS,
)
from service.api.spoken_text.normalising.neighbours import LENGTHS, counts, is_adjective, is_answer, words_beside
from service.api.spoken_text.normalising.numbers import cardinal, decimal, digits, is_long, ordinal, plural, year

TRIGGER = re.compile(TABLES.pattern("{TRIGGER}"))
"""A text without a match is one that no rule changes."""
SIDES, FRACTIONS, OPERATORS = TABLES.table("SIDES"), TABLES.table("FRACTIONS"), TABLES.table("OPERATORS")
ADDRESS_SIGNS = TABLES.table("SIGNS")
ADDRESS_SIGN = re.compile(r"[.@_/+:~%=-]")
ENDING = ".,;:!?)"
"""Signs behind an address that belong to the sentence."""
NUMERAL = re.compile(TABLES.pattern(r"\b{NUMERAL}\b"))
ROMAN = {"I": 1, "V": 5, "X": 10}
PEOPLES = re.compile(r"[A-Z]\w{2,20}s")


def normalise_english(text: str) -> str:
    """text: a clause or more. Words and marks that no rule knows stay."""
    if TRIGGER.search(text):
        for pattern, replace in RULES:
            text = pattern.sub(replace, text)
    return text


def _minus(sign: str | None) -> str:
    return "minus " if sign else ""


def _money_range(match: re.Match[str]) -> str:
    many = CURRENCIES[match["currency"]][1]
    scales = [LARGE.get(scale, scale) for scale in (match["scale"] or "", match["scale2"] or "")]
    amounts = [decimal(match["amount"].replace(",", "")), decimal(match["amount2"].replace(",", ""))]
    if scales[0] == scales[1]:
        scales[0] = ""
    first, last = (f"{amount} {scale}".strip() for amount, scale in zip(amounts, scales, strict=True))
    return f"{first}{' ' + many if scales[0] else ''} to {last} {many}"


def _paid(match: re.Match[str]) -> str:
    """$19.99/month, A$20."""
    spoken = _money(match)
    if match["country"] in DOLLARS and match["currency"] == "$":
        spoken = spoken.replace("dollar", f"{DOLLARS[match['country']]} dollar", 1)
    return f"{spoken} per {PERIODS.get(match['per'], match['per'])}" if match["per"] else spoken


def _coded(match: re.Match[str]) -> str:
    """50 EUR."""
    one, many = CODES[match["code"]]
    return f"{_minus(match['minus'])}{decimal(match['amount'])} {one if match['amount'] == '1' else many}"


def _money(match: re.Match[str]) -> str:
    one, many, *hundredths = CURRENCIES[match["currency"]]
    minus, amount = _minus(match["minus"]), match["amount"].replace(",", "")
    whole, _, fraction = amount.partition(".")
    many = one if is_adjective(match) else many
    if scale := match["scale"]:
        return f"{minus}{decimal(amount)} {LARGE.get(scale, scale)} {many}"
    if len(fraction) != 2 or not hundredths:
        return f"{minus}{decimal(amount)} {one if amount == '1' else many}"
    units = f"{cardinal(int(whole))} {one if int(whole) == 1 else many}"
    if not int(fraction):
        return minus + units
    parts = f"{cardinal(int(fraction))} {hundredths[int(fraction) != 1]}"
    return f"{minus}{units} and {parts}" if int(whole) else minus + parts


def _fraction(match: re.Match[str]) -> str:
    top, bottom = int(match["top"]), int(match["bottom"])
    if top == bottom and not match["whole"]:
        return f"{cardinal(top)} out of {cardinal(bottom)}"
    if not 0 < top < bottom or bottom > 10:
        return match[0]
    name = {2: "half", 4: "quarter"}.get(bottom) or ordinal(bottom)
    spoken = f"{cardinal(top)} {name if top == 1 else 'halves' if bottom == 2 else plural(name)}"
    return f"{cardinal(int(match['whole']))} and {spoken}" if match["whole"] else spoken


def _large(match: re.Match[str]) -> str:
    """5m people, 100k users; 5m waves are meters."""
    _, _, after, then = words_beside(match)
    if not (counts(after, then) or (match[2] in ("m", "M") and PEOPLES.fullmatch(after))) or after in LENGTHS:
        return match[0]
    return f"{decimal(match[1])} {LARGE[match[2]]}"


def _range(match: re.Match[str]) -> str:
    first, last = match[1], match[2]
    if _spelled_out(first) or _spelled_out(last) or float(first) >= float(last):
        return match[0]
    return f"{decimal(first)} to {decimal(last)}{' percent' if match[3] else ''}"


def _spelled_out(number: str) -> bool:
    """007: no amount."""
    return len(number) > 1 and number[0] == "0" and number[1] != "."


def _unit_range(match: re.Match[str]) -> str:
    if _spelled_out(match[1]) or _spelled_out(match[2]):
        return match[0]
    return f"{decimal(match[1])} to {decimal(match[2])} {UNITS[match['unit']][1]}"


def _times(match: re.Match[str]) -> str:
    """3x faster, 2-3x, 10x."""
    first = f"{decimal(match[1])} to " if match[1] else ""
    return f"{first}{decimal(match[2])} {'times ' if match[3] else 'x'}"


def _unit(match: re.Match[str]) -> str:
    unit = match["unit"]
    one, many = UNITS["sec" if unit == "s" else unit]
    attached = match[0][-len(unit) - 1].isdigit()
    single = match["amount"] == "1" or is_adjective(match, unit, attached=attached)
    return f"{_minus(match['minus'])}{decimal(match['amount'])} {one if single else many}"


def _named_number(match: re.Match[str]) -> str:
    if match[1].lower() == "no" and match[2] and is_answer(match):
        return f"{match[1]}. {decimal(match[3]).capitalize()}"
    word = BEFORE_NUMBERS[match[1].lower()]
    return f"{word.capitalize() if match[1][0].isupper() else word}{match[2] or ' '}{match[3]}"


def _fraction_sign(match: re.Match[str]) -> str:
    before = " " if match.start() and match.string[match.start() - 1].isdigit() else ""
    return before + FRACTIONS[match[0]]


def _angle(match: re.Match[str]) -> str:
    spoken = f"{cardinal(int(match[1]))} degrees {cardinal(int(match[2]))} minutes"
    if match[3]:
        spoken += f" {cardinal(int(match[3]))} seconds"
    return f"{spoken} {SIDES[match[4]]}" if match[4] else spoken


def _power(match: re.Match[str]) -> str:
    exponent = match[2].replace("−", "-")
    if exponent in ("2", "3"):
        return f"{match[1]} {'squared' if exponent == '2' else 'cubed'}"
    minus = "minus " if exponent.startswith("-") else ""
    return f"{match[1]} to the power of {minus}{cardinal(int(exponent.lstrip('-')))}"


def _url(match: re.Match[str]) -> str:
    """Host and path of the address as words, then the signs behind it that belong to the sentence."""
    address = (match["host"] or match["domain"]) + match["path"]
    whole = match["query"] or address
    return _spelled(address.rstrip(ENDING).rstrip("/")) + whole[len(whole.rstrip(ENDING)) :]


def _dotted(match: re.Match[str]) -> str:
    """4.2.1 -> four point two point one, 192.168.0.1 -> ... dot ..."""
    parts = match["parts"].split(".")
    if len(parts) == 3 and all(len(part) == 3 for part in parts[1:]):
        return match[0]  # 1.000.000: thousands
    between = " dot " if len(parts) == 4 and all(int(part) < 256 for part in parts) else " point "
    spoken = between.join(cardinal(int(part)) for part in parts)
    if match["mask"]:
        spoken += f" slash {cardinal(int(match['mask']))}"
    if match["port"]:
        spoken += f" port {digits(match['port'])}"
    return match["before"] + spoken + (" plus" if match["more"] else "")


def _spelled(text: str) -> str:
    """a.b@c -> a dot b at c. Numbers stay, for the rules after this one."""
    return " ".join(ADDRESS_SIGN.sub(lambda sign: f" {ADDRESS_SIGNS[sign[0]]} ", text).split())


def _value(numeral: str) -> int:
    """XIV -> 14."""
    numbers = [ROMAN[sign] for sign in numeral]
    following = [*numbers[1:], 0]
    return sum(-one if one < other else one for one, other in zip(numbers, following, strict=True))


def _sum(text: str) -> str:
    """2+2=4."""
    return re.sub(r"[^\d.]", lambda sign: f" {OPERATORS[sign[0]]} ", text)


def _phone(text: str) -> str:
    plus = "plus " if text.startswith("+") else ""
    return plus + ", ".join(map(digits, re.findall(r"\d+", text)))


def _compared(text: str) -> str:
    """x<y, 5 > 3."""
    return "less than" if "<" in text else "greater than"


FUNCTIONS = (
    *(dates.spoken_date, dates.slash_date, dates.days, dates.day_first, dates.duration, dates.long_time, dates.hours),
    *(dates.spoken_time, dates.season, dates.years_short, dates.decade, dates.years, dates.spoken_year),
    *(_url, _dotted, _fraction_sign, _angle, _power, _money_range, _paid, _coded, _money, _range, _fraction, _large),
    *(_unit_range, _times, _unit, _named_number),
)
RULES = TABLES.rules(
    {function.__name__.lstrip("_"): function for function in FUNCTIONS},
    {
        "minus": _minus,
        "cardinal": lambda number: cardinal(int(number)),
        "ordinal": lambda number: ordinal(int(number.replace(",", ""))),
        "decimal": decimal,
        "digits": digits,
        "plain": lambda number: digits(number) if is_long(number) else decimal(number),
        "year": lambda number: year(int(number)),
        "side": lambda number: year(int(number)) if len(number) == 4 else cardinal(int(number)),
        "points": lambda version: " point ".join(cardinal(int(part)) for part in version.split(".")),
        "phone": _phone,
        "month": lambda name: MONTHS[dates.month_number(name) - 1],
        "weekday": DAYS.__getitem__,
        "title": TITLES.__getitem__,
        "word": WORDS.__getitem__,
        "stopped": lambda word: WORDS[word + "."],  # at the end of a sentence
        "feet": lambda number: "foot" if number == "1" else "feet",
        "joined": lambda number: number.replace(" ", ""),
        "sum": _sum,
        "operator": OPERATORS.__getitem__,
        "compared": _compared,
        "comparison": TABLES.table("COMPARISONS").__getitem__,
        "spelled": _spelled,
        "numerals": lambda text: NUMERAL.sub(lambda numeral: cardinal(_value(numeral[0])), text),
        "regnal": lambda numeral: ordinal(_value(numeral)).capitalize(),
    },
)
