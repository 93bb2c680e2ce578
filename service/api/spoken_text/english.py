"""English: numbers, dates, times, money, units and abbreviations as words, by english.rules.

The rules run one after the other over a clause; what one has replaced has no digits left for the next. Every quantifier
is bounded and every number begins where no digit is before it, so that the time is linear in the text. Since there are
a hundred of them, one pattern finds out first whether any may apply. What no rule knows stays as it is.
"""

from __future__ import annotations

import re

from service.api.spoken_text.tables import Tables

ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
SCALES = ("", "thousand", "million", "billion", "trillion", "quadrillion")
ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth",
    "twelve": "twelfth",
}  # fmt: skip
TABLES = Tables("english.rules")
MONTHS = TABLES.words("MONTHS")
CURRENCIES, CODES = TABLES.forms("CURRENCIES"), TABLES.forms("CODES")
DOLLARS, PERIODS, LARGE = TABLES.table("DOLLARS"), TABLES.table("PERIODS"), TABLES.table("LARGE")
BEFORE_NUMBERS, TITLES, WORDS = TABLES.table("BEFORE_NUMBERS"), TABLES.table("TITLES"), TABLES.table("WORDS")
DAYS = TABLES.table("DAYS")


def _plural(one: str) -> str:
    """square meter -> square meters, mile per hour -> miles per hour."""
    head, per, rest = one.partition(" per ")
    if head.endswith(("hertz", "power")) or one == "per mille":
        return one
    first, space, last = head.partition(" ") if head.startswith("degree") else ("", "", head)
    plural = f"{first}s{space}{last}" if first else re.sub("foots$", "feet", f"{last}s")
    return plural + per + rest


UNITS = {unit: (one, _plural(one)) for unit, one in TABLES.table("UNITS").items()}
"""Each symbol with one and many of it."""


def cardinal(number: int) -> str:
    """42 -> forty-two. 0 to 10**18 - 1."""
    groups: list[str] = []
    scale = 0
    while number:
        number, group = divmod(number, 1000)
        if group:
            groups.append(f"{_below_thousand(group)} {SCALES[scale]}".strip())
        scale += 1
    return " ".join(reversed(groups)) or ONES[0]


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    words = [ONES[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        tens, ones = divmod(rest, 10)
        words.append(f"{TENS[tens]}-{ONES[ones]}" if ones else TENS[tens])
    elif rest:
        words.append(ONES[rest])
    return " ".join(words)


def ordinal(number: int) -> str:
    """42 -> forty-second."""
    words = cardinal(number)
    cut = max(words.rfind(" "), words.rfind("-")) + 1
    last = words[cut:]
    if last in ORDINALS:
        return words[:cut] + ORDINALS[last]
    return f"{words[:cut]}{last[:-1]}ieth" if last.endswith("y") else f"{words}th"


def plural(words: str) -> str:
    """twenty -> twenties, third -> thirds."""
    return f"{words[:-1]}ies" if words.endswith("y") else f"{words}s"


def digits(text: str) -> str:
    """07 -> zero seven."""
    return " ".join(ONES[int(digit)] for digit in text)


def decimal(text: str) -> str:
    """1,234.50 -> one thousand two hundred thirty-four point five zero. Leading zeros are spoken: 007."""
    whole, _, fraction = text.replace(",", "").partition(".")
    spelled = len(whole) > 1 and whole[0] == "0"
    words = digits(whole) if spelled else cardinal(int(whole))
    return f"{words} point {digits(fraction)}" if fraction else words


def is_long(amount: str) -> bool:
    """Whether it has so many digits that they are spoken one by one."""
    return len(amount) >= 10 and amount.isdigit()


def year(number: int) -> str:
    """1999 -> nineteen ninety-nine, 2005 -> two thousand five, 1900 -> nineteen hundred."""
    century, rest = divmod(number, 100)
    if number < 1000 or (century % 10 == 0 and rest < 10):
        return cardinal(number)
    if not rest:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


# What the words beside a number say about it: a year, an amount, or a measure of what follows.

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


# Dates, years, times and durations

MONTH_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
BEFORE_TIMES = frozenset("at by until from before after around since till".split())  # noqa: SIM905
DURATION = ("hour", "minute", "second", "minute", "second")
"""Units of the groups of a duration."""


def month_number(name: str) -> int:
    return int(name) if name.isdigit() else next(n for n, month in enumerate(MONTHS, 1) if month[:3] == name[:3])


def is_day(month: int, day: int) -> bool:
    return 1 <= month <= 12 and 1 <= day <= MONTH_DAYS[month - 1]


def _year_of(match: re.Match[str]) -> str:
    return f" {year(int(match['year']))}" if match["year"] else ""


def spoken_date(match: re.Match[str]) -> str:
    """Groups month (a number or a name), day, and perhaps year; an impossible date stays."""
    month, day = month_number(match["month"]), int(match["day"])
    return f"{MONTHS[month - 1]} {ordinal(day)}{_year_of(match)}" if is_day(month, day) else match[0]


def day_first(match: re.Match[str]) -> str:
    month, day = month_number(match["month"]), int(match["day"])
    return f"the {ordinal(day)} of {MONTHS[month - 1]}{_year_of(match)}" if is_day(month, day) else match[0]


def days(match: re.Match[str]) -> str:
    """Nov 3-5, 2026."""
    month, first, last = month_number(match["month"]), int(match["first"]), int(match["last"])
    if not (1 <= first < last and is_day(month, last)):
        return match[0]
    return f"{MONTHS[month - 1]} {ordinal(first)} to {ordinal(last)}{_year_of(match)}"


def slash_date(match: re.Match[str]) -> str:
    """11/22/2026, 22/11/2026 or 22.11.2026; a date that can be read both ways stays."""
    first, second = int(match[1]), int(match[3])
    month, day = (first, second) if first <= 12 else (second, first)
    if (first <= 12 and second <= 12) or not is_day(month, day):
        return match[0]
    return f"{MONTHS[month - 1]} {ordinal(day)} {year(int(match[4]))}"


def clock(hour: int, minute: int) -> str:
    """(3, 5) -> three oh five, (3, 0) -> three."""
    return f"{cardinal(hour)} {'oh ' if minute < 10 else ''}{cardinal(minute)}" if minute else cardinal(hour)


def spoken_time(match: re.Match[str]) -> str:
    hour, minute = int(match["hour"]), int(match["minute"] or 0)
    half = match["half"]
    _, before, after, _ = words_beside(match)
    if match[0].endswith(" am") and after == "I" and before.lower() not in BEFORE_TIMES:
        return match[0]  # Of these 10 am I the only one?
    if minute > 59 or hour > (12 if half else 23) or (half and not hour):
        return match[0]
    if half:
        return f"{clock(hour, minute)} {half.upper()}M"
    if minute:
        return clock(hour, minute)
    return f"{cardinal(hour)} o'clock" if 0 < hour <= 12 else f"{cardinal(hour)} hundred"


def long_time(match: re.Match[str]) -> str:
    """11:59:59 PM; without AM or PM it may be a duration."""
    hour, minute, second = (int(match[n]) for n in (1, 2, 3))
    half = match["half"]
    if minute > 59 or second > 59 or (half and not 1 <= hour <= 12):
        return match[0]
    seconds = counted(second, "second")
    if half:
        return f"{clock(hour, minute)} and {seconds} {half.upper()}M"
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
    hour, minute = int(match[1]), int(match[2] or 0)
    return f"{clock(hour, minute)} to " if 1 <= hour <= 12 and minute <= 59 else match[0]


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


# Money, measures, addresses, and the rules

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
    compound = match.string[match.end() : match.end() + 1] == "-"  # 5m-long
    single = compound or match["amount"] == "1" or is_adjective(match, unit, attached=attached)
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


FUNCTIONS = (
    *(spoken_date, slash_date, days, day_first, duration, long_time, hours),
    *(spoken_time, season, years_short, decade, years, spoken_year),
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
        "phone": lambda text: "plus " * text.startswith("+") + ", ".join(map(digits, re.findall(r"\d+", text))),
        "month": lambda name: MONTHS[month_number(name) - 1],
        "weekday": DAYS.__getitem__,
        "title": TITLES.__getitem__,
        "word": WORDS.__getitem__,
        "stopped": lambda word: WORDS[word + "."],  # at the end of a sentence
        "feet": lambda number: "foot" if number == "1" else "feet",
        "joined": lambda number: number.replace(" ", ""),
        "sum": lambda text: re.sub(r"[^\d.]", lambda sign: f" {OPERATORS[sign[0]]} ", text),
        "operator": OPERATORS.__getitem__,
        "compared": lambda text: "less than" if "<" in text else "greater than",
        "comparison": TABLES.table("COMPARISONS").__getitem__,
        "spelled": _spelled,
        "numerals": lambda text: NUMERAL.sub(lambda numeral: cardinal(_value(numeral[0])), text),
        "regnal": lambda numeral: ordinal(_value(numeral)).capitalize(),
    },
)
