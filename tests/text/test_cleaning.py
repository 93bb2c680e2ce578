from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.text.cleaning import clean_text, strip_markup


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("# Title\n## Sub #1", "Title\nSub #1"),
        (
            "a **bold** and *slanted* and __both__ and _low_ and ~~gone~~",
            "a bold and slanted and both and low and gone",
        ),
        ("snake_case and 2*3*4 and 5 * 6", "snake_case and 2*3*4 and 5 * 6"),
        ("- one\n* two\n+ three", "one\ntwo\nthree"),
        ("well-known - yes", "well-known - yes"),
        ("> quoted\ntext", "quoted\ntext"),
        ("see [the page](https://x.example/a_(b)?c=d) now", "see the page now"),
        ("![alt text](x.png)look", "look"),
        ("run `rm -rf` now", "run  now"),
        ("before\n```python\nx = 1\n```\nafter", "before\n\nafter"),
        ("before ```never closed", "before "),
        ("<b>hi</b> <br/>there<!-- hidden > -->", "hi there"),
        ("a < b and c > d", "a < b and c > d"),
        ("above\n---\nbelow", "above\n\nbelow"),
        ("“Hi,” she said, ‘it’s me’", "\"Hi,\" she said, 'it's me'"),
        ("[not a link] (really)", "[not a link] (really)"),
    ],
)
def test_markup(written: str, spoken: str) -> None:
    assert strip_markup(written) == spoken


@pytest.mark.parametrize("emoji", ["😀", "👍🏽", "👨‍👩‍👧‍👦", "🇩🇪", "❤️", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "✅", "⭐", "🤖", "☀️", "⏰"])
def test_emoji_go_whole(emoji: str) -> None:
    assert strip_markup(f"a{emoji}b") == "ab"


@pytest.mark.parametrize("text", ["100 €, 5 % & more", "नमस्ते क्‍ष", "می‌خواهم", "你好，世界！", "1️", "©®™", "→ 3²"])
def test_writing_stays(text: str) -> None:
    assert strip_markup(text) == text.replace("\ufe0f", "")


def test_whitespace_rule() -> None:
    assert clean_text(" a\r\n\n b\tc\u3000d  ", markup=False) == " a b c d "
    assert clean_text("# a\n\n**b** 😀", markup=True) == "a b "
    assert clean_text("# a\n**b** 😀", markup=False) == "# a **b** 😀"


def test_what_cannot_be_encoded_goes() -> None:
    assert clean_text("a\x00b\ud800c\ufeffd\x7f", markup=False) == "abcd"


@given(st.text(alphabet=st.characters() | st.sampled_from("*_`[]()<>#!-~ \n\ud800"), max_size=80))
def test_result_is_clean(text: str) -> None:
    for markup in (False, True):
        cleaned = clean_text(text, markup=markup)
        cleaned.encode()
        assert "\n" not in cleaned and "  " not in cleaned
        assert len(cleaned) <= len(text)


@pytest.mark.parametrize(
    "unit",
    ["[", "[a](", "**a ", "`", "```", "<a", "<!--", "(", "*a", "_a", "- ", "> ", "![", "[a](((((", "#", " ", "\n- "],
)
def test_time_is_linear(unit: str) -> None:
    begin = time.process_time()
    clean_text(unit * (100_000 // len(unit)), markup=True)
    assert time.process_time() - begin < 2
