"""Numbers as words, and the language of each clause."""

from __future__ import annotations

import pytest

from service.api.spoken_text.chinese import han_cardinal
from service.api.spoken_text.english import cardinal, ordinal, year
from service.api.spoken_text.normaliser import normalise

NINES = "nine hundred ninety-nine"


def test_each_sentence_has_its_language() -> None:
    assert normalise("我有5个。You have 5 of them. Ich habe 5.") == "我有五个。You have five of them. Ich habe 5."


@pytest.mark.parametrize("clause", ["AI 5%", "UN 2030", "OS 11", "CPU 80 °C", "MIT 5"])
def test_between_clauses_of_a_language_they_are_of_it(clause: str) -> None:
    german = f"Das ist nicht neu: {clause}, und es ist gut."
    assert normalise(german) == german
    assert clause not in normalise(f"There is more of it: {clause}, and that is good.")


def test_numbers() -> None:
    words = {0: "zero", 13: "thirteen", 40: "forty", 101: "one hundred one", 1_000_000: "one million"}
    words[10**18 - 1] = f"{NINES} quadrillion {NINES} trillion {NINES} billion {NINES} million {NINES} thousand {NINES}"
    assert {number: cardinal(number) for number in words} == words
    words = {1: "first", 12: "twelfth", 20: "twentieth", 42: "forty-second", 100: "one hundredth"}
    words[1003] = "one thousand third"
    assert {number: ordinal(number) for number in words} == words
    words = {1900: "nineteen hundred", 1066: "ten sixty-six", 2000: "two thousand", 2005: "two thousand five"}
    words[2010] = "twenty ten"
    assert {number: year(number) for number in words} == words


def test_han_numbers() -> None:
    words = {0: "零", 10: "十", 15: "十五", 20: "二十", 105: "一百零五", 110: "一百一十", 1001: "一千零一"}
    words |= {1010: "一千零一十", 10_000: "一万", 10_010: "一万零一十", 100_000: "十万", 100_000_001: "一亿零一"}
    words[12_0345_6789] = "十二亿零三百四十五万六千七百八十九"
    assert {number: han_cardinal(number) for number in words} == words
