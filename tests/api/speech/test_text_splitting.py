"""Where a text is cut into segments, whole or in pieces."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.api.spoken_text.text_splitting import Granularity, TextSplitter, spoken_length
from tests.support.growth import is_linear
from tests.support.rows import rows
from tests.support.slow import slow

GRANULARITIES: list[Granularity] = ["none", "sentence", "clause"]

PIECES = [
    *"Hello world Mr. e.g. U.S. 3.14 1,000 10:30 No. 5 www.example.com . ! ? ... … , ; : —".split(),  # noqa: SIM905
    *"\" ' ( ) ” “ ؟ 你好 世界 。 ！ ？ ， 、 」 「 です 안녕 é e\u0301 👨‍👩‍👧 😀 नमस्ते।".split(),  # noqa: SIM905
    *("x" * 30, " ", " ", " ", "  ", "\n", "\n\n", " - "),
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=40).map("".join)


def split_text(text: str, *, max_length: int, granularity: Granularity = "none") -> list[str]:
    return TextSplitter(granularity, max_length=max_length).feed(text, final=True)


def sentences(text: str) -> list[str]:
    return split_text(text, max_length=1000, granularity="sentence")


def test_sentences() -> None:
    """What stands between sentences, and these."""
    for between, *expected in rows(__file__, "sentences.jsonl"):
        assert sentences(between.join(expected)) == expected


def test_a_blank_line_ends_a_sentence() -> None:
    assert sentences("Title\n\nText that\ngoes on") == ["Title", "Text that goes on"]
    assert sentences("Title \r\n \r\n Text") == ["Title", "Text"]


def test_clauses() -> None:
    for between, *expected in (
        (" ", "When the rain had stopped,", "we went out: all of us;", "even, well, the 1,000 others at 10:30."),
        ("", "今天天气很好，", "我们去公园吧，", "好不好？"),
    ):
        assert split_text(between.join(expected), max_length=1000, granularity="clause") == expected


def test_long_text_is_filled_up_with_whole_sentences() -> None:
    parts = [f"This is sentence number {number}." for number in range(10)]
    assert split_text(" ".join(parts), max_length=70) == [" ".join(parts[at : at + 2]) for at in range(0, 10, 2)]


def test_too_long_sentences_end_at_clauses_then_words_then_characters() -> None:
    for length, between, *expected in (
        (30, " ", "one two three,", "four five six seven eight"),
        (12, " ", "one two", "three four", "five six"),
        (10, "", "a" * 10, "a" * 10, "a" * 5),
        (9, "", "啊啊啊", "啊啊啊", "啊"),
        (9, "", "x" * 8, "e\u0301e\u0301"),
    ):
        assert split_text(between.join(expected), max_length=length) == expected


def test_nothing_to_say() -> None:
    for text in ("", "   ", "...", "?!", '"', "— — —", "😀"):
        for granularity in GRANULARITIES:
            assert split_text(text, max_length=50, granularity=granularity) == []
    assert sentences("... Yes. !!!") == ["... Yes."]


def in_pieces(text: str, sizes: list[int], granularity: Granularity, max_length: int) -> list[str]:
    splitter = TextSplitter(granularity, max_length=max_length)
    segments: list[str] = []
    at = 0
    for size in [*sizes, len(text)]:
        segments += splitter.feed(text[at : at + size])
        at += size
    return segments + splitter.feed("", final=True)


@given(texts, st.lists(st.integers(0, 9), max_size=60), st.sampled_from(GRANULARITIES), st.integers(1, 60))
@example("a.\nb", [1, 1, 1, 1], "sentence", 50)
@settings(max_examples=100, deadline=None)
def test_pieces_do_not_matter(text: str, sizes: list[int], granularity: Granularity, max_length: int) -> None:
    whole = split_text(text, max_length=max_length, granularity=granularity)
    assert in_pieces(text, sizes, granularity, max_length) == whole
    assert in_pieces(text, [1] * len(text), granularity, max_length) == whole


@given(texts, st.sampled_from(GRANULARITIES), st.integers(3, 60))
@settings(max_examples=100, deadline=None)
def test_segments(text: str, granularity: Granularity, max_length: int) -> None:
    segments = split_text(text, max_length=max_length, granularity=granularity)
    for segment in segments:
        assert segment == " ".join(segment.split()) != ""
        assert any(character.isalnum() for character in segment)
        assert spoken_length(segment) <= max_length
    # Nothing that can be spoken is lost, added or moved.
    spoken = "".join(character for segment in segments for character in segment if character.isalnum())
    assert spoken == "".join(character for character in text if character.isalnum())


@given(texts)
@settings(deadline=None)
def test_words_that_fit_are_never_cut(text: str) -> None:
    words = {word for word in text.split() if word.isascii()}
    if all(len(word) <= 40 for word in text.split()):
        split_words = [word for segment in split_text(text, max_length=120) for word in segment.split()]
        assert {word for word in words if word.isalnum()} <= set(split_words)


def test_a_splitter_can_be_used_again() -> None:
    splitter = TextSplitter("clause", max_length=50)
    for _ in range(2):
        assert [*splitter.feed("One, two. Thr"), *splitter.feed("ee")] == ["One, two."]
        assert splitter.feed("", final=True) == ["Three"]
        assert splitter.feed("", final=True) == []


@pytest.mark.parametrize(
    "unit", ["a", ".", "1. ", *map(slow, [" ", ",", "\n", '"', "\u0301", "你", "Mr. ", "a.b", "!", "\u200d"])]
)
def test_time_is_linear(unit: str) -> None:
    def split(size: int) -> None:
        text = unit * (size // len(unit))
        split_text(text, max_length=300)
        in_pieces(text[: size // 3], [7] * (size // 20), "clause", 300)

    assert is_linear(split, 20_000)


@pytest.mark.parametrize("piece", [1, 3, 200])
def test_a_description_in_front_is_not_cut_off(piece: int) -> None:
    for text, first in (
        ("(A young woman, gentle) Hello there, my friend. So.", "(A young woman, gentle) Hello there,"),
        ("(Calm, slow. Very slow.) One two three four, five.", "(Calm, slow. Very slow.) One two three four,"),
        ("(No end, and no end of it. So it goes", "(No end, and no end of it. So it goes"),
        ("One two three four, five. (Six, seven, eight, nine ten.) So.", "One two three four,"),
    ):
        splitter = TextSplitter("clause", max_length=400)
        segments = [segment for at in range(0, len(text), piece) for segment in splitter.feed(text[at : at + piece])]
        assert [*segments, *splitter.feed("", final=True)][0] == first
    assert splitter.feed("(Calm, still and slow) yes, it is so. A") == ["(Calm, still and slow) yes,", "it is so."]
