"""Numbers as words, in English and Chinese. Pure functions of decimal digits (ASCII)."""

from __future__ import annotations

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
LARGEST = 10**18 - 1

HAN_DIGITS = "零一二三四五六七八九"
HAN_PLACES = ("", "十", "百", "千")
HAN_SCALES = ("", "万", "亿", "万亿")


def cardinal(number: int) -> str:
    """42 -> forty-two. 0 to LARGEST."""
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
