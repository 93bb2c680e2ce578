"""Properties of normalising: nothing else changes, chunks do not matter, hostile texts cost little."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.spoken_text.chinese import DIGIT
from service.api.spoken_text.chinese import RULES as CHINESE
from service.api.spoken_text.english import RULES as ENGLISH
from service.api.spoken_text.english import TABLES, TRIGGER
from service.api.spoken_text.normaliser import LONGEST, TextNormaliser, normalise
from service.api.spoken_text.tables import Rule
from service.api.spoken_text.writing import spoken_of

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


@given(TEXTS, st.lists(st.integers(0, 200), max_size=6))
def test_chunks_do_not_matter(text: str, cuts: list[int]) -> None:
    normaliser = TextNormaliser()
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [pair for begin, end in itertools.pairwise(places) for pair in normaliser.feed(text[begin:end])]
    parts += normaliser.feed("", final=True)
    assert spoken_of(parts) == normalise(text) and "".join(source for source, _ in parts) == text


class Patient(TextNormaliser):
    """Lets no word pass before its clause has ended."""

    def _plain(self) -> int:
        return 0


@given(TEXTS)
def test_words_that_pass_early_are_those_that_would_pass_late(text: str) -> None:
    patient = Patient()
    assert spoken_of([*patient.feed(text), *patient.feed("", final=True)]) == normalise(text)


def test_a_clause_is_spoken_once_the_next_has_begun() -> None:
    normaliser = TextNormaliser()
    chunks = ["It costs $5, ", "so Dr. Lee ", "thinks. ", "Y", "es, D"]
    given_ = [spoken_of(normaliser.feed(chunk)) for chunk in chunks]
    assert given_ == ["It costs ", "five dollars, so ", "", "Doctor Lee thinks. Y", "es, "]
    assert spoken_of(normaliser.feed("", final=True)) == "D"


def test_a_text_without_clauses_is_not_held_back_for_ever() -> None:
    normaliser = TextNormaliser()
    text = "word " * 1000
    assert len(text) - len(spoken_of(normaliser.feed(text))) < LONGEST


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
