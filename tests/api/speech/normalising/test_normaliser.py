"""What is spoken for a text, case by case, and in chunks as for the whole; numbers; hostile texts cost little."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.spoken_text.chinese import DIGIT
from service.api.spoken_text.chinese import RULES as CHINESE
from service.api.spoken_text.english import RULES as ENGLISH
from service.api.spoken_text.english import TABLES, TRIGGER
from service.api.spoken_text.markup import clean_text
from service.api.spoken_text.normaliser import LONGEST, TextNormaliser, normalise
from service.api.spoken_text.passages import PassageReader
from service.api.spoken_text.tables import Rule


def spoken(text: str, size: int) -> str:
    passages, normaliser = PassageReader(ssml=False), TextNormaliser()
    said = ""
    for at in range(0, len(text), size):
        parts = passages.feed(text[at : at + size], final=at + size >= len(text))
        passage = "".join(part for part in parts if isinstance(part, str))
        said += normaliser.feed(passage, final=at + size >= len(text))
    return clean_text(said).strip()


@pytest.mark.parametrize(("language", "fewest"), [("english", 400), ("chinese", 300)])
def test_what_is_spoken(language: str, fewest: int) -> None:
    lines = (Path(__file__).parent / f"{language}.tsv").read_text("utf-8").splitlines()
    cases = [line.split("\t") for line in lines if "\t" in line]
    assert len(cases) >= fewest
    wrong = []
    for written, expected in cases:
        text = written.replace("\\n", "\n")
        heard = {size: spoken(text, size) for size in (1, 3, len(text))}
        wrong += [
            f"{written!r} in pieces of {size}: {said!r}, not {expected!r}"
            for size, said in heard.items()
            if said != expected
        ]
    assert not wrong, "\n".join(wrong)


def test_each_sentence_has_its_language() -> None:
    assert normalise("我有5个。You have 5 of them. Ich habe 5.") == "我有五个。You have five of them. Ich habe 5."


@pytest.mark.parametrize("clause", ["AI 5%", "UN 2030", "OS 11", "CPU 80 °C", "MIT 5"])
def test_between_clauses_of_a_language_they_are_of_it(clause: str) -> None:
    german = f"Das ist nicht neu: {clause}, und es ist gut."
    assert normalise(german) == german
    assert clause not in normalise(f"There is more of it: {clause}, and that is good.")


PIECES = st.sampled_from(
    [
        *"0123456789.,:;-/$€¥%#+() \n'\"&年月日个。，A我é ",
        *("the ", "Dr. ", "Am 12. ", "May ", "No. ", "pm", "km", "in ", "US", "e.g. ", "Dec ", "Jan", "v1"),
    ]
)
SECTIONS = "BEFORE_NUMBERS CODES CURRENCIES DAYS LARGE MONTHS PERIODS TITLES UNITS WORDS".split()  # noqa: SIM905
WORDS = [word for section in SECTIONS for word in TABLES.words(section)]
PARTS = TABLES.pattern("{NAMES}|{NOUNS}|{DOMAINS}|{FILES}|{PRODUCTS}").split("|")
SIGNS = [*" .,;:-–—/&@#%°'\"’()[]~^=+*×sIVXAaéž我年1", ". "]
VOCABULARY = st.sampled_from([*(word.removesuffix(".") for word in [*WORDS, *PARTS]), *SIGNS])
"""What the rules look for, and what they do not."""
TEXTS = st.lists(PIECES, max_size=40).map("".join)


@given(st.text(max_size=200))
def test_any_text_can_be_normalised(text: str) -> None:
    assert isinstance(normalise(text), str)


@given(st.text(st.characters(categories=["L", "M", "Zs"]), max_size=200))
def test_words_stay(text: str) -> None:
    assert normalise(text) == text


def changed(rules: tuple[Rule, ...], text: str) -> str:
    for pattern, replace in rules:
        text = pattern.sub(replace, text)
    return text


@given(st.lists(VOCABULARY, max_size=12).map("".join))
def test_no_rule_changes_what_brings_none_into_play(text: str) -> None:
    """Rules are not tried then."""
    assert TRIGGER.search(text) or changed(ENGLISH, text) == text
    assert DIGIT.search(text) or changed(CHINESE, text) == text


@given(TEXTS, st.lists(st.sampled_from(["zebra", "lemon", "Quartz"]), min_size=1, max_size=3))
def test_words_between_numbers_stay_in_order(text: str, words: list[str]) -> None:
    mixed = " ".join(f"{text} {word}" for word in words)
    assert re.findall("zebra|lemon|Quartz", normalise(mixed)) == words


def test_a_clause_is_spoken_once_the_next_has_begun() -> None:
    normaliser = TextNormaliser()
    chunks = ["It costs $5, ", "so Dr. Lee ", "thinks. ", "Y", "es, D"]
    given_ = [normaliser.feed(chunk) for chunk in chunks]
    assert given_ == ["It costs ", "five dollars, so ", "", "Doctor Lee thinks. Y", "es, "]
    assert normaliser.feed("", final=True) == "D"


def test_a_text_without_clauses_is_not_held_back_for_ever() -> None:
    normaliser = TextNormaliser()
    text = "word " * 1000
    assert len(text) - len(normaliser.feed(text)) < LONGEST


@pytest.mark.parametrize("pattern", [rule[0].pattern for rule in (*ENGLISH, *CHINESE)])
def test_no_rule_repeats_without_a_bound(pattern: str) -> None:
    """Linear time by construction: no quantifier is open, so a match looks at a bounded stretch of text."""
    bare = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "x", pattern)
    assert not re.search(r"[*+]|\{\d*,\}", bare)


@pytest.mark.parametrize(
    "unit", ["9", "1,", "1/", "1-", "(", "[", "$1", "1 ", "1:11 ", "Dr. ", "2026-", "+1 ", ". ", "1.1.", "第2"]
)
def test_hostile_texts_stay_short(unit: str) -> None:
    text = (unit * 4096)[:4096]
    assert len(normalise(text)) <= 14 * len(text)
