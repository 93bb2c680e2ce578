"""English: numbers, dates, times, money, units and abbreviations as words. What no rule knows stays as it is.

The rules run one after the other over a clause; what one has replaced has no digits left for the next. Every quantifier
is bounded and every number begins where no digit is before it, so that the time is linear in the text. Since there are
eighty of them, one pattern finds out first whether any may apply.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from service.api.spoken_text.normalising.addresses import ADDRESSES
from service.api.spoken_text.normalising.dates import (
    day_first,
    days,
    decade,
    duration,
    hours,
    long_time,
    month_year,
    season,
    slash_date,
    spoken_date,
    spoken_time,
    spoken_year,
    years,
    years_short,
)
from service.api.spoken_text.normalising.english_words import (
    BEFORE_NUMBERS,
    CODES,
    CURRENCIES,
    DOLLARS,
    LARGE,
    MONTHS,
    PERIODS,
    TITLES,
    UNITS,
    WORDS,
)
from service.api.spoken_text.normalising.neighbours import LENGTHS, counts, is_adjective, is_answer, words_beside
from service.api.spoken_text.normalising.numbers import cardinal, decimal, digits, ordinal, plural, year
from service.api.spoken_text.normalising.roman import NAMES, NOUNS, ROMAN
from service.api.spoken_text.normalising.signs import DAY as WEEKDAY
from service.api.spoken_text.normalising.signs import MARKS, POWERS, SIGNS

Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]

BEGIN = r"(?<![\w.,:/@#$€£¥₹₩=&+%~^*\\-])(?<!\d['’′])"
"""No number begins inside a word, another number, an address or a formula."""
END = r"(?![\w/@=^*\\′″]|[.,:'’-]\d|-\w|:[\w:])"
COMPOUND_END = r"(?![\w/@=^*\\′″]|[.,:'’]\d|-\d|:[\w:])"
"""As END, but a hyphen and a word may follow: 3-year-old."""
NUMBER = r"(?:\d{1,3}(?:,\d{3}){1,4}|\d{1,15})(?:\.\d{1,12})?"
MINUS = r"(?P<minus>[-−](?=[\d$€£¥₹₩U]))?"

MONTH = (
    r"(?P<month>" + "|".join(rf"{name[:3]}(?:{name[3:]})?" if len(name) > 3 else name for name in MONTHS) + r"|Sept)"
)
DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"


def normalise_english(text: str) -> str:
    """text: a clause or more. Words and marks that no rule knows stay."""
    if TRIGGER.search(text):
        for pattern, replace in RULES:
            text = pattern.sub(replace, text)
    return text


def _signed(match: re.Match[str], words: str) -> str:
    return f"minus {words}" if match["minus"] else words


def _money_range(match: re.Match[str]) -> str:
    _, many, _, _ = CURRENCIES[match["currency"]]
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
    return _signed(match, f"{decimal(match['amount'])} {one if match['amount'] == '1' else many}")


def _money(match: re.Match[str]) -> str:
    one, many, cent, cents = CURRENCIES[match["currency"]]
    amount = match["amount"].replace(",", "")
    whole, _, fraction = amount.partition(".")
    many = one if is_adjective(match) else many
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
    if top == bottom and not match["whole"]:
        return f"{cardinal(top)} out of {cardinal(bottom)}"
    if not 0 < top < bottom or bottom > 10:
        return match[0]
    name = {2: "half", 4: "quarter"}.get(bottom) or ordinal(bottom)
    spoken = f"{cardinal(top)} {name if top == 1 else 'halves' if bottom == 2 else plural(name)}"
    return f"{cardinal(int(match['whole']))} and {spoken}" if match["whole"] else spoken


def _house(match: re.Match[str]) -> str:
    return year(int(match[1]))


def _sides(match: re.Match[str]) -> str:
    """3x4, 1920x1080."""
    return " by ".join(year(int(side)) if len(side) == 4 else cardinal(int(side)) for side in match.groups())


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


def _score(match: re.Match[str]) -> str:
    """3-2, 21–14: from more to less is no range."""
    return f"{cardinal(int(match[1]))} to {cardinal(int(match[2]))}"


def _times(match: re.Match[str]) -> str:
    """3x faster, 2-3x, 10x."""
    first = f"{decimal(match[1])} to " if match[1] else ""
    return f"{first}{decimal(match[2])} {'times ' if match[3] else 'x'}"


def _unit(match: re.Match[str]) -> str:
    unit = match["unit"]
    one, many = UNITS["sec" if unit == "s" else unit]
    attached = match[0][-len(unit) - 1].isdigit()
    single = match["amount"] == "1" or is_adjective(match, unit, attached=attached)
    return _signed(match, f"{decimal(match['amount'])} {one if single else many}")


def _named_number(match: re.Match[str]) -> str:
    if match[1].lower() == "no" and match[2] and is_answer(match):
        return f"{match[1]}. {decimal(match[3]).capitalize()}"
    word = BEFORE_NUMBERS[match[1].lower()]
    return f"{word.capitalize() if match[1][0].isupper() else word}{match[2] or ' '}{match[3]}"


def _ordinal(match: re.Match[str]) -> str:
    return ordinal(int(match[1].replace(",", "")))


def _plain(match: re.Match[str]) -> str:
    amount = match["amount"]
    long = len(amount) >= 10 and amount.isdigit()
    return _signed(match, digits(amount) if long else decimal(amount))


def _version(match: re.Match[str]) -> str:
    return "version " + " point ".join(cardinal(int(part)) for part in match[1].split("."))


def _compile(*rules: tuple[str | re.Pattern[str], Callable[[re.Match[str]], str]]) -> tuple[Rule, ...]:
    return tuple((re.compile(pattern), replace) for pattern, replace in rules)


YEAR = r"(?P<year>1[1-9]\d\d|20\d\d)"
ZONE = r"(?:[ECMP][SD]?T|GMT|UTC|BST|CES?T)\b"
HALF = rf"(?:[\s]?(?P<half>[aApP])(?:\.[mM](?:\.(?!\s(?!{ZONE})[A-Z]|\s?\Z)|(?=\.))|[mM]\b))"
AMOUNT = rf"(?P<amount>{NUMBER})"
SCALE = r"(?:\s?(?P<scale>thousand|million|billion|trillion|(?:[kKmMbB]|mn|bn|tn)(?!\w)))?"
UNIT = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
TITLE = "|".join(TITLES)
PAID_FOR = ("month", "year", "week", "day", "hour", "night", "person", "user", "seat", "unit", "token", *PERIODS)
PERIOD = "|".join(PAID_FOR)

HOURS = (
    r"(?:(\d{1,3}) ?h(?:rs?)? ?(\d{1,2}) ?m(?:ins?)?(?: ?(\d{1,2}) ?s(?:ecs?)?)?"
    r"|(\d{1,3}) ?m(?:ins?)? ?(\d{1,2}) ?s(?:ecs?)?)(?!\w)"
)

TERM = r"\d{1,4}(?:\.\d{1,2})?"
"""One end of a range."""
ANY_YEAR = r"(?:10[1-9]\d|1[1-9]\d\d|2\d{3})"
STREETS = r"Street|St|Avenue|Ave|Road|Rd|Boulevard|Blvd|Drive|Dr|Lane|Ln|Way|Court|Ct|Place|Pl|Parkway|Square"
PEOPLES = re.compile(r"[A-Z]\w{2,20}s")

RULES = _compile(
    *ADDRESSES,
    *ROMAN,
    *SIGNS,
    (rf"{BEGIN}(?P<year>1[1-9]\d\d|20\d\d)([-/])(?P<month>\d\d)\2(?P<day>\d\d){END}", spoken_date),
    (rf"{BEGIN}(\d{{1,2}})([-/.])(\d{{1,2}})\2(1[1-9]\d\d|20\d\d){END}", slash_date),
    (rf"\b{MONTH}\.? (?P<first>\d{{1,2}})\s?[-–]\s?(?P<last>\d{{1,2}})(?:,? {YEAR})?{END}", days),
    (rf"\b{MONTH}\.? {DAY}(?:,? {YEAR})?{END}", spoken_date),
    (rf"{BEGIN}(?:the )?{DAY} (?:of )?{MONTH}\b(?:,? {YEAR}{END})?", day_first),
    (rf"\b{MONTH}\.? {YEAR}{END}", month_year),
    (
        r"(?:(?<=\d[aApP][mM])|(?<=\d [aApP][mM])|(?<=[aApP]\.[mM]\.)|(?<=\d:\d\d)) ?[-–] ?"
        r"(?=\d{1,2}(?::\d\d(?!\w)|(?::\d\d)? ?[aApP]\.?[mM](?!\w)))",
        lambda match: " to ",
    ),
    (rf"{BEGIN}{HOURS}", duration),
    (rf"{BEGIN}(\d{{1,2}}):(\d\d):(\d\d){HALF}", long_time),
    (rf"{BEGIN}(\d{{1,2}}):(\d\d):(\d\d)(?P<half>){END}", long_time),
    (rf"{BEGIN}(\d{{1,2}})(?::(\d\d))?\s?[-–]\s?(?=\d{{1,2}}(?::\d\d)?\s?[aApP]\.?[mM]\b)", hours),
    (rf"{BEGIN}(?P<hour>\d{{1,2}}):(?P<minute>\d\d){HALF}", spoken_time),
    (rf"{BEGIN}(?P<hour>\d{{1,2}})(?P<minute>){HALF}", spoken_time),
    (rf"{BEGIN}(?P<hour>\d{{1,2}}):(?P<minute>\d\d)(?P<half>){END}", spoken_time),
    (r"(?<![\w.,])([$€£])\.(?=\d\d(?!\d))", lambda match: f"{match[1]}0."),
    (
        rf"{BEGIN}(?:US)?(?P<currency>[$€£¥₹₩]){AMOUNT}{SCALE}\s?[-–]\s?(?P=currency)?"
        rf"(?P<amount2>{NUMBER}){SCALE.replace('<scale>', '<scale2>')}{END}",
        _money_range,
    ),
    (
        rf"{BEGIN}{MINUS}(?P<country>US|AU?|CA?|HK|NZ|S)?(?P<currency>[$€£¥₹₩]){AMOUNT}{SCALE}"
        rf"(?:(?:/| per )(?P<per>{PERIOD})\b|{END})",
        _paid,
    ),
    (rf"{BEGIN}{MINUS}{AMOUNT}\s?(?P<code>{'|'.join(CODES)})\b", _coded),
    (rf"\b(?P<minus>)(?P<code>{'|'.join(CODES)})\s?{AMOUNT}{END}", _coded),
    (rf"{BEGIN}{MINUS}{AMOUNT}(?P<scale>)\s?(?P<currency>[$€£])(?![\w{{])", _money),
    (r"(?<![^\s(])\+(?=\d{1,6}(?:\.\d{1,4})?\s?[%°])", lambda match: "plus "),
    (rf"{BEGIN}({TERM})\s?%?\s?[-–~～]\s?({TERM})\s?(%)(?!\w)", _range),
    (rf"{BEGIN}{MINUS}{AMOUNT}\s?%(?!\w)", lambda match: _signed(match, f"{decimal(match['amount'])} percent")),
    (r"(?<![\w.])[vV](\d{1,6}(?:\.\d{1,6}){1,4})(?!\w|[.-]\d)", _version),
    (r"(?<![\w.,+-])(?:\+\d{1,3}[ -]|1-)?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[.-]\d{4}" + END, _phone),
    (r"(?<![\w.,+-])\+\d{1,3}(?:[ -]?\d{2,12}){1,4}" + END, _phone),
    (rf"{BEGIN}\d{{3}}-\d{{4}}{END}", _phone),
    (r"(?<![^\s(])\+(?=\d{1,6}(?:\.\d{1,4})?(?!\w|\.\d| ?[(-]))", lambda match: "plus "),
    (rf"(?:(?<=[Cc]all )|(?<=[Dd]ial ))(?:911|112|999){END}", _phone),
    (
        r"(?:(?<=xtension )|(?<=[Ee]xt )|(?<=[Ee]xt\. )|(?<=ZIP )|(?<=ode )|(?<=ode is )|(?<=ode: )|(?<=PIN )"
        rf"|(?<=PIN is )|(?<=PIN: )|(?<=OTP )|(?<=OTP is )|(?<=OTP: )|(?<=[Ee]rror )|(?<=[Pp]ort ))\d{{3,8}}{END}",
        _phone,
    ),
    (rf"{BEGIN}((?:\d{{1,3}}(?:,\d{{3}}){{1,4}})|\d{{1,9}})(?:st|nd|rd|th|ST|ND|RD|TH)\b", _ordinal),
    (rf"{BEGIN}24/7{END}", lambda match: "twenty-four seven"),
    (rf"{BEGIN}9/11{END}", lambda match: "nine eleven"),
    (rf"{BEGIN}50/50{END}", lambda match: "fifty-fifty"),
    (rf"{BEGIN}((?:1[1-9]|20)\d\d)/(\d\d){END}", season),
    (rf"{BEGIN}((?:1[1-9]|20)\d\d)[-–](\d\d){END}", years_short),
    (rf"{BEGIN}(\d{{1,3}}):(\d){END}", _score),
    (rf"{BEGIN}(?<![Oo]n )(?:(?P<whole>\d{{1,3}}) )?(?P<top>\d{{1,2}})/(?P<bottom>\d{{1,2}}){END}", _fraction),
    (rf"(?:{BEGIN}|(?<=[a-z]-))((?:1[1-9]|20)\d0|[2-9]0)s\b", decade),
    (rf"{BEGIN}(1[1-9]\d\d|20\d\d)\s?[-–]\s?(1[1-9]\d\d|20\d\d){END}", years),
    (rf"{BEGIN}(\d{{4}})(?= (?:[NSEW]\.? )?(?:[A-Z][a-z]{{1,20}} ){{1,3}}(?:{STREETS})\b)", _house),
    (rf"(?:(?<=Room )|(?<=Suite )|(?<=Flight )|(?<=Route ))([1-9]\d{{3}}){END}", _house),
    (
        rf"(?:{BEGIN}|(?<=[Mm]id-))({ANY_YEAR})(?:(?:, (?:and )?| (?:and|or|to|until|through) ){ANY_YEAR}){{0,8}}"
        rf"(?! ?(?:{UNIT})(?![\w'’])){END}",
        spoken_year,
    ),
    (rf"{BEGIN}(1\d{{3}}|20\d\d|[1-9]\d\d)(?= (?:AD|BC|CE|BCE)\b)", lambda match: year(int(match[1]))),
    (rf"{BEGIN}(\d{{1,3}}(?:\.\d{{1,2}})?)\s?(k|K|m|M|bn|B|b)(?= [A-Za-z])", _large),
    (
        rf"{BEGIN}(\d{{1,4}})[x×](\d{{1,4}}){END}",
        _sides,
    ),
    (rf"{BEGIN}({TERM})\s?[-–~～]\s?({TERM})\s?(?P<unit>{UNIT})(?![\w/²³°])", _unit_range),
    (rf"{BEGIN}(?:({TERM})\s?[-–]\s?)?({TERM}) ?[x×](?!\w)( (?=\w{{1,12}}er\b|more\b|less\b|as\b|the\b))?", _times),
    (rf"{BEGIN}{MINUS}{AMOUNT}(?:\s|-)?(?P<unit>{UNIT})(?![\w/²³°]|['’]s\b|-\d)", _unit),
    (rf"{BEGIN}{MINUS}{AMOUNT} (?P<unit>s)(?![\w'’])", _unit),
    *POWERS,
    (rf"\b((?i:{'|'.join(BEFORE_NUMBERS)}))\.( ?)(\d{{1,9}}(?!\d))", _named_number),
    (r"(?<=-to-)\d{1,3}(?!\w)", lambda match: cardinal(int(match[0]))),
    (r"(?<![\w&#])#(?=\d{1,6}\b)", lambda match: "number "),
    (rf"{BEGIN}({TERM})\s?[–-]\s?({TERM}(?![.\d]))(){END}", _range),
    (rf"{BEGIN}(\d{{1,3}})[–-](\d{{1,3}}){END}", _score),
    (r"(?<![\w.,:/$€£¥-])\.(\d{1,6})(?![\w.])", lambda match: f"point {digits(match[1])}"),
    (rf"{BEGIN}{MINUS}(?P<amount>{NUMBER}|\d{{10,24}}){COMPOUND_END}", _plain),
    (rf"\b({TITLE})\.(?= [A-Z&])", lambda match: TITLES[match[1]]),
    (r"(?<![\w.])(etc|Jr|Sr)\.(?=\s[A-Z]|\s?\Z)", lambda match: f"{WORDS[match[1] + '.']}."),  # ends a sentence, too
    (
        rf"(?<![\w.])({'|'.join(map(re.escape, WORDS))})(?!\w)",
        lambda match: WORDS[match[1]],
    ),
    (r"(?<=\w) & (?=\w)", lambda match: " and "),
)

SHORT = "|".join((*TITLES, *(word.removesuffix(".") for word in WORDS if word.count(".") == 1)))
TRIGGER = re.compile(
    rf"[\d&@#/<>{''.join(sorted(MARKS))}]|\.\w|\) ?[+*=×÷≠]"
    rf"|\b(?:(?:{SHORT})\.|(?:{WEEKDAY})\.?[-–]|(?:{NOUNS})s? [IVX]|(?:{NAMES}) [IVX])"
)
"""A text without a match is one that no rule changes."""
