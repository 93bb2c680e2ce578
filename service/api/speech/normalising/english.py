"""English: numbers, dates, times, money, units and abbreviations as words. What no rule knows stays as it is.

The rules run one after the other over a clause; what one has replaced has no digits left for the next. Every quantifier
is bounded and every number begins where no digit is before it, so that the time is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from service.api.speech.normalising.numbers import cardinal, decimal, digits, ordinal, plural, year

Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]

BEGIN = r"(?<![\w.,:/@#$€£¥=&+%~^*\\-])(?<!\d['’′])"
"""No number begins inside a word, another number, an address or a formula."""
END = r"(?![\w/@=^*\\′″]|[.,:'’-]\d|-\w)"
COMPOUND_END = r"(?![\w/@=^*\\′″]|[.,:'’]\d|-\d)"
"""As END, but a hyphen and a word may follow: 3-year-old."""
NUMBER = r"(?:\d{1,3}(?:,\d{3}){1,4}|\d{1,15})(?:\.\d{1,12})?"
MINUS = r"(?P<minus>[-−](?=[\d$€£¥U]))?"

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
MONTH = (
    r"(?P<month>" + "|".join(rf"{name[:3]}(?:{name[3:]})?" if len(name) > 3 else name for name in MONTHS) + r"|Sept)"
)
DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "€": ("euro", "euros", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "¥": ("yen", "yen", "", ""),
}
LARGE = {"k": "thousand", "K": "thousand", "M": "million", "B": "billion"}

UNITS = {
    "km/h": ("kilometer per hour", "kilometers per hour"),
    "kph": ("kilometer per hour", "kilometers per hour"),
    "m/s": ("meter per second", "meters per second"),
    "mph": ("mile per hour", "miles per hour"),
    "km²": ("square kilometer", "square kilometers"),
    "m²": ("square meter", "square meters"),
    "m³": ("cubic meter", "cubic meters"),
    "km": ("kilometer", "kilometers"),
    "cm": ("centimeter", "centimeters"),
    "mm": ("millimeter", "millimeters"),
    "m": ("meter", "meters"),
    "mi": ("mile", "miles"),
    "ft": ("foot", "feet"),
    "yd": ("yard", "yards"),
    "kg": ("kilogram", "kilograms"),
    "mg": ("milligram", "milligrams"),
    "g": ("gram", "grams"),
    "lbs": ("pound", "pounds"),
    "lb": ("pound", "pounds"),
    "oz": ("ounce", "ounces"),
    "ml": ("milliliter", "milliliters"),
    "mL": ("milliliter", "milliliters"),
    "L": ("liter", "liters"),
    "°C": ("degree Celsius", "degrees Celsius"),
    "°F": ("degree Fahrenheit", "degrees Fahrenheit"),
    "°": ("degree", "degrees"),
    "TB": ("terabyte", "terabytes"),
    "GB": ("gigabyte", "gigabytes"),
    "MB": ("megabyte", "megabytes"),
    "KB": ("kilobyte", "kilobytes"),
    "kB": ("kilobyte", "kilobytes"),
    "GHz": ("gigahertz", "gigahertz"),
    "MHz": ("megahertz", "megahertz"),
    "kHz": ("kilohertz", "kilohertz"),
    "Hz": ("hertz", "hertz"),
    "kWh": ("kilowatt hour", "kilowatt hours"),
    "kW": ("kilowatt", "kilowatts"),
    "MW": ("megawatt", "megawatts"),
    "W": ("watt", "watts"),
    "V": ("volt", "volts"),
    "hrs": ("hour", "hours"),
    "hr": ("hour", "hours"),
    "mins": ("minute", "minutes"),
    "min": ("minute", "minutes"),
    "secs": ("second", "seconds"),
    "sec": ("second", "seconds"),
    "ms": ("millisecond", "milliseconds"),
}

BEFORE_NUMBERS = {
    "no": "number",
    "nos": "numbers",
    "nr": "number",
    "fig": "figure",
    "figs": "figures",
    "vol": "volume",
    "ch": "chapter",
    "sec": "section",
    "eq": "equation",
    "p": "page",
    "pp": "pages",
    "approx": "approximately",
}
TITLES = {"Dr": "Doctor", "Mr": "Mister", "Mrs": "Missus", "Ms": "Miz", "Prof": "Professor", "St": "Saint"}
WORDS = {
    "e.g.": "for example",
    "i.e.": "that is",
    "etc.": "et cetera",
    "vs.": "versus",
    "approx.": "approximately",
    "Jr.": "Junior",
    "Sr.": "Senior",
}
YEAR_CONTEXT = r"in|since|until|till|during|before|after|by|from|of|year|summer|winter|Q[1-4]|spring|autumn|fall|circa"


def normalise_english(text: str) -> str:
    """text: a clause or more. Words and marks that no rule knows stay."""
    for pattern, replace in RULES:
        text = pattern.sub(replace, text)
    return text


def _signed(match: re.Match[str], words: str) -> str:
    return f"minus {words}" if match["minus"] else words


def _month(name: str) -> int:
    return next(index for index, month in enumerate(MONTHS, 1) if month[:3] == name[:3])


def _date(match: re.Match[str]) -> str:
    """Groups month (a number or a name), day, and perhaps year; an impossible date stays."""
    name, day = match["month"], int(match["day"])
    month = int(name) if name.isdigit() else _month(name)
    if not (1 <= month <= 12 and 1 <= day <= DAYS[month - 1]):
        return match[0]
    spoken = f"{MONTHS[month - 1]} {ordinal(day)}"
    return f"{spoken} {year(int(match['year']))}" if match["year"] else spoken


def _day_first(match: re.Match[str]) -> str:
    month, day = _month(match["month"]), int(match["day"])
    if not 1 <= day <= DAYS[month - 1]:
        return match[0]
    spoken = f"the {ordinal(day)} of {MONTHS[month - 1]}"
    return f"{spoken} {year(int(match['year']))}" if match["year"] else spoken


def _slash_date(match: re.Match[str]) -> str:
    """11/22/2026 or 22/11/2026; a date that can be read both ways stays."""
    first, second = int(match[1]), int(match[2])
    month, day = (first, second) if first <= 12 else (second, first)
    if (first <= 12 and second <= 12) or not (1 <= month <= 12 and 1 <= day <= DAYS[month - 1]):
        return match[0]
    return f"{MONTHS[month - 1]} {ordinal(day)} {year(int(match[3]))}"


def _month_year(match: re.Match[str]) -> str:
    return f"{MONTHS[_month(match['month']) - 1]} {year(int(match['year']))}"


def _time(match: re.Match[str]) -> str:
    hour, minute = int(match["hour"]), int(match["minute"] or 0)
    half = match["half"]
    if minute > 59 or hour > (12 if half else 23) or (half and not hour):
        return match[0]
    if minute:
        spoken = f"{cardinal(hour)} {'oh ' if minute < 10 else ''}{cardinal(minute)}"
    elif half:
        spoken = cardinal(hour)
    else:
        spoken = f"{cardinal(hour)} o'clock" if 0 < hour <= 12 else f"{cardinal(hour)} hundred"
    return f"{spoken} {half.upper()}M" if half else spoken


def _money(match: re.Match[str]) -> str:
    one, many, cent, cents = CURRENCIES[match["currency"]]
    amount = match["amount"].replace(",", "")
    whole, _, fraction = amount.partition(".")
    if scale := match["scale"]:
        return _signed(match, f"{decimal(amount)} {LARGE.get(scale, scale)} {many}")
    if len(fraction) != 2 or not cent:
        return _signed(match, f"{decimal(amount)} {one if amount == '1' else many}")
    units = f"{cardinal(int(whole))} {one if int(whole) == 1 else many}"
    parts = f"{cardinal(int(fraction))} {cent if int(fraction) == 1 else cents}"
    if not int(fraction):
        return _signed(match, units)
    return _signed(match, f"{units} and {parts}" if int(whole) else parts)


def _phone(match: re.Match[str]) -> str:
    groups = re.findall(r"\d+", match[0])
    plus = "plus " if match[0].startswith("+") else ""
    return plus + ", ".join(map(digits, groups))


def _fraction(match: re.Match[str]) -> str:
    top, bottom = int(match["top"]), int(match["bottom"])
    if not 0 < top < bottom or bottom > 10:
        return match[0]
    name = {2: "half", 4: "quarter"}.get(bottom) or ordinal(bottom)
    spoken = f"{cardinal(top)} {name if top == 1 else 'halves' if bottom == 2 else plural(name)}"
    return f"{cardinal(int(match['whole']))} and {spoken}" if match["whole"] else spoken


def _decade(match: re.Match[str]) -> str:
    number = int(match[1])
    if number % 100 == 0:
        return plural(year(number)) if number >= 1000 else match[0]
    century = f"{cardinal(number // 100)} " if number >= 100 else ""
    return century + plural(cardinal(number % 100))


def _years(match: re.Match[str]) -> str:
    return f"{year(int(match[1]))} to {year(int(match[2]))}"


def _range(match: re.Match[str]) -> str:
    first, last = match[1], match[2]
    if first.startswith("0") or last.startswith("0") or int(first) >= int(last):
        return match[0]
    return f"{cardinal(int(first))} to {cardinal(int(last))}{' percent' if match[3] else ''}"


def _unit(match: re.Match[str]) -> str:
    one, many = UNITS[match["unit"]]
    return _signed(match, f"{decimal(match['amount'])} {one if match['amount'] == '1' else many}")


def _named_number(match: re.Match[str]) -> str:
    word = BEFORE_NUMBERS[match[1].lower()]
    return word.capitalize() if match[1][0].isupper() else word


def _ordinal(match: re.Match[str]) -> str:
    return ordinal(int(match[1].replace(",", "")))


def _plain(match: re.Match[str]) -> str:
    amount = match["amount"]
    long = len(amount) >= 10 and amount.isdigit()
    return _signed(match, digits(amount) if long else decimal(amount))


def _version(match: re.Match[str]) -> str:
    return "version " + " point ".join(cardinal(int(part)) for part in match[1].split("."))


def _compile(*rules: tuple[str, Callable[[re.Match[str]], str]]) -> tuple[Rule, ...]:
    return tuple((re.compile(pattern), replace) for pattern, replace in rules)


YEAR = r"(?P<year>1[1-9]\d\d|20\d\d)"
HALF = r"(?:[\s]?(?P<half>[aApP])(?:\.[mM](?:\.(?!\s[A-Z]|\s?\Z)|(?=\.))|[mM]\b))"
AMOUNT = rf"(?P<amount>{NUMBER})"
SCALE = r"(?:\s?(?P<scale>thousand|million|billion|trillion|[kKMB](?!\w)))?"
UNIT = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
TITLE = "|".join(TITLES)

RULES = _compile(
    (rf"{BEGIN}(?P<year>1[1-9]\d\d|20\d\d)-(?P<month>\d\d)-(?P<day>\d\d){END}", _date),
    (rf"{BEGIN}(\d{{1,2}})/(\d{{1,2}})/(1[1-9]\d\d|20\d\d){END}", _slash_date),
    (rf"\b{MONTH}\.? {DAY}(?:,? {YEAR})?{END}", _date),
    (rf"{BEGIN}(?:the )?{DAY} (?:of )?{MONTH}\b(?:,? {YEAR}{END})?", _day_first),
    (rf"\b{MONTH}\.? {YEAR}{END}", _month_year),
    (r"(?:(?<=\d[aApP][mM])|(?<=\d:\d\d)) ?[-–] ?(?=\d{1,2}(?::\d\d|[aApP][mM])(?!\w))", lambda match: " to "),
    (rf"{BEGIN}(?P<hour>\d{{1,2}}):(?P<minute>\d\d){HALF}", _time),
    (rf"{BEGIN}(?P<hour>\d{{1,2}})(?P<minute>){HALF}", _time),
    (rf"{BEGIN}(?P<hour>\d{{1,2}}):(?P<minute>\d\d)(?P<half>){END}", _time),
    (rf"{BEGIN}{MINUS}(?:US)?(?P<currency>[$€£¥]){AMOUNT}{SCALE}{END}", _money),
    (rf"{BEGIN}{MINUS}{AMOUNT}(?P<scale>)\s?(?P<currency>[€£])(?!\w)", _money),
    (rf"{BEGIN}(\d{{1,4}})\s?[-–]\s?(\d{{1,4}})\s?(%)(?!\w)", _range),
    (rf"{BEGIN}{MINUS}{AMOUNT}\s?%(?!\w)", lambda match: _signed(match, f"{decimal(match['amount'])} percent")),
    (r"(?<![\w.])[vV](\d{1,6}(?:\.\d{1,6}){1,4})(?!\w|[.-]\d)", _version),
    (r"(?<![\w.,+-])(?:\+\d{1,3}[ -]|1-)?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[.-]\d{4}" + END, _phone),
    (r"(?<![\w.,+-])\+\d{1,3}(?:[ -]?\d{2,12}){1,4}" + END, _phone),
    (rf"{BEGIN}\d{{3}}-\d{{4}}{END}", _phone),
    (rf"(?<=[Cc]all )(?:911|112|999){END}", _phone),
    (rf"{BEGIN}((?:\d{{1,3}}(?:,\d{{3}}){{1,4}})|\d{{1,9}})(?:st|nd|rd|th)\b", _ordinal),
    (rf"{BEGIN}24/7{END}", lambda match: "twenty-four seven"),
    (rf"{BEGIN}(?:(?P<whole>\d{{1,3}}) )?(?P<top>\d{{1,2}})/(?P<bottom>\d{{1,2}}){END}", _fraction),
    (rf"{BEGIN}((?:1[1-9]|20)\d0|[2-9]0)s\b", _decade),
    (rf"{BEGIN}(1[1-9]\d\d|20\d\d)\s?[-–]\s?(1[1-9]\d\d|20\d\d){END}", _years),
    (rf"\b(?i:({YEAR_CONTEXT})) (1[1-9]\d\d|20\d\d){END}", lambda match: f"{match[1]} {year(int(match[2]))}"),
    (rf"{BEGIN}(1\d{{3}}|20\d\d|[1-9]\d\d)(?= (?:AD|BC|CE|BCE)\b)", lambda match: year(int(match[1]))),
    (rf"{BEGIN}{MINUS}{AMOUNT}(?:\s|-)?(?P<unit>{UNIT})(?![\w/²³°])", _unit),
    (rf"\b((?i:{'|'.join(BEFORE_NUMBERS)}))\.(?= ?\d)", _named_number),
    (r"(?<![\w&#])#(?=\d{1,6}\b)", lambda match: "number "),
    (rf"{BEGIN}(\d{{1,4}})\s?[–-]\s?(\d{{1,4}}(?!\d))(){END}", _range),
    (rf"{BEGIN}{MINUS}(?P<amount>{NUMBER}|\d{{10,24}}){COMPOUND_END}", _plain),
    (rf"\b({TITLE})\.(?= [A-Z])", lambda match: TITLES[match[1]]),
    (r"(?<![\w.])(etc|Jr|Sr)\.(?=\s[A-Z]|\s?\Z)", lambda match: f"{WORDS[match[1] + '.']}."),  # ends a sentence, too
    (
        rf"(?<![\w.])({'|'.join(map(re.escape, WORDS))})(?!\w)",
        lambda match: WORDS[match[1]],
    ),
    (r"(?<=\w) & (?=\w)", lambda match: " and "),
)
