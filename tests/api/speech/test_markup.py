"""Markdown and emoji are not spoken; everything else of a text stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.api.spoken_text.markup import MarkupStripper, clean_text, strip_markup
from tests.support.growth import is_linear
from tests.support.rows import rows
from tests.support.slow import slow


def test_markup() -> None:
    for written, spoken in rows(__file__, "markup.jsonl"):
        assert strip_markup(written) == spoken


def test_emoji_go_whole_and_writing_stays() -> None:
    for emoji in ("😀", "👍🏽", "👨‍👩‍👧‍👦", "🇩🇪", "❤️", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "✅", "⭐", "🤖", "☀️", "⏰"):
        assert strip_markup(f"a{emoji}b") == "ab"
    for text in ("100 €, 5 % & more", "नमस्ते क्‍ष", "می‌خواهم", "你好，世界！", "1️", "©®™", "→ 3²"):
        assert strip_markup(text) == text.replace("\ufe0f", "")


def test_whitespace_rule() -> None:
    assert clean_text(" a\r\n\n b\tc\u3000d  ") == " a b c d "
    assert clean_text(strip_markup("# a\n\n**b** 😀")) == "a b "
    assert clean_text("# a\n**b** 😀") == "# a **b** 😀"


def test_what_cannot_be_encoded_goes() -> None:
    assert clean_text("a\x00b\ud800c\ufeffd\x7f") == "abcd"


@given(st.text(alphabet=st.characters() | st.sampled_from("*_`[]()<>#!-~ \n\ud800"), max_size=80))
def test_result_is_clean(text: str) -> None:
    for given_ in (text, strip_markup(text)):
        cleaned = clean_text(given_)
        cleaned.encode()
        assert "\n" not in cleaned and "  " not in cleaned
        assert len(cleaned) <= len(text)


UNITS = ["<a b='", "<a b=c ", "[a]: /", "[a][", "<Ab ", "[a](", "**a ", "```", "<a", "<!--", "*a", "_a", "- ", "> "]
UNITS += ["![", "[a](((((", "\n- ", "| a ", "$a ", "&a", "= ", *"|\\=[`(# "]


@pytest.mark.parametrize("unit", UNITS)
def test_time_is_linear(unit: str) -> None:
    assert is_linear(lambda size: clean_text(strip_markup(unit * (size // len(unit)))), 30_000)


MARKDOWN = Path(__file__).with_name("written.md").read_text("utf-8")
PIECES = st.lists(st.integers(1, 9), min_size=1, max_size=8)
SIGNS = [
    *"** * _ ` ``` [ ] ]( ) ( ![ < <b> </ > <!-- --> --- === == = | \\ $ & ; { }".split(),  # noqa: SIM905
    *("&amp;", "[^1]", "\\(", "x^2", "<NAME>", "- ", "# ", "[x] ", "]: http://", "1) ", "<a b='"),
]
WRITTEN = st.lists(
    st.sampled_from([*SIGNS, "\n", " ", "a", "1", "so ", "你好，", ". ", "😀", "\ufe0f", "\u200d", "“"]), max_size=40
)


def in_pieces(text: str, sizes: list[int], **options: int) -> list[str]:
    stripper, out, at = MarkupStripper(**options), [], 0
    while at < len(text):
        size = sizes[len(out) % len(sizes)]
        out.append(stripper.feed(text[at : at + size]))
        at += size
    return [*out, stripper.feed("", final=True)]


@settings(deadline=None)
@given(WRITTEN.map("".join), PIECES)
@example(MARKDOWN, [1])
@example("foo```code```bar", [4])
@example("a `x` b*<b>* c", [2])
@example("[1](`) `", [1])
def test_markup_goes_from_text_in_pieces_as_from_the_whole(text: str, sizes: list[int]) -> None:
    assert "".join(in_pieces(text, sizes)) == strip_markup(text)


def test_text_in_pieces_is_not_held_back() -> None:
    stripper = MarkupStripper()
    assert stripper.feed("One two. Thr") == "One two. Thr"
    assert stripper.feed("ee **four") == "ee four"
    assert stripper.feed("** [fi") == ""
    assert stripper.feed("ve](x) six，七") == " five six，七"
    assert stripper.feed(" `") + stripper.feed("", final=True) == " `"
    assert stripper.feed("# A new text") == "A new text"


def test_what_is_held_back_is_bounded() -> None:
    stripper = MarkupStripper(longest=100)
    for unit in ("```", "x = 1; " * 50):
        assert stripper.feed(unit) == ""
    assert len(stripper._pending) < 10
    assert stripper.feed("``` so") == " so"
    out = "".join(stripper.feed("[ab ") for _ in range(60))
    assert len(out) > 100 and len(out + stripper.feed("", final=True)) == 240


@pytest.mark.parametrize(
    "unit", ["[", "`", "<a ", *map(slow, ["](", "<!-- ", "a ", "[a](b) ", "# ", "| ", "$a ", "&a", "<a b="])]
)
def test_dribbled_text_costs_a_bounded_time_a_piece(unit: str) -> None:
    def feed(pieces: int) -> None:
        stripper = MarkupStripper(longest=200)
        for _ in range(pieces):
            stripper.feed(unit)

    assert is_linear(feed, 1000)
