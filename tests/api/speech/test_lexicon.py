"""What is said for words: found as wholes, however the text is cut into chunks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.spoken_text.lexicon import MAX_FILE_ENTRIES, MAX_GROWTH, Lexicon, LexiconFilter, load_lexicon
from tests.support.rows import rows

ENTRIES: dict[str, str] = dict(rows(__file__, "entries.jsonl"))


def said(text: str, *lexicons: Lexicon) -> str:
    return LexiconFilter(*(lexicons or (Lexicon(ENTRIES),))).feed(text, final=True)


def test_whole_words() -> None:
    for text, expected in rows(__file__, "whole_words.jsonl"):
        assert said(text) == expected


def test_the_first_lexicon_counts_and_what_is_said_is_not_read_again() -> None:
    own, servers = Lexicon({"b": "c", "x": "own"}), Lexicon({"x": "theirs", "a": "b", "x y": "longer"})
    assert said("a b x, x y", own, servers) == "b c own, longer"


def test_a_word_is_found_with_the_quotes_of_a_text_with_and_without_markup() -> None:
    curly = Lexicon({"rock ’n’ roll": "rocking"})
    assert said("rock 'n' roll, Rock ’n’ roll", curly) == "rocking, rocking"
    both = Lexicon({"don’t": "curly", "don't": "straight"})
    assert said("don't don’t", both) == "straight curly"


TEXTS = st.lists(
    st.sampled_from([*ENTRIES, "a", "b", "new", " ", ",", "x", "İ", "Σ", "it", "\u0301", "1", "+", "New Yor"]),
    max_size=12,
).map("".join)


@given(TEXTS, st.lists(st.integers(0, 60), max_size=5))
def test_chunks_do_not_matter(text: str, cuts: list[int]) -> None:
    spoken = LexiconFilter(Lexicon(ENTRIES))
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    chunks = [text[begin:end] for begin, end in pairwise(places)]
    assert "".join(map(spoken.feed, chunks)) + spoken.feed("", final=True) == said(text)


def test_only_what_may_become_a_word_is_held_back() -> None:
    spoken = LexiconFilter(Lexicon(ENTRIES))
    assert spoken.feed("The city of New") == "The city of "
    assert spoken.feed(" Zealand, ") == "New Zealand, "


def test_a_text_grows_within_limits() -> None:
    lexicon = Lexicon({"a": "x" * 200})
    text = "a " * (MAX_GROWTH // 100)
    spoken = said(text, lexicon)
    assert MAX_GROWTH - 200 < len(spoken) - len(text) <= MAX_GROWTH and spoken.endswith("a a "), "as it is written"


def test_the_file_of_a_server(tmp_path: Path) -> None:
    path = tmp_path / "lexicon.yaml"
    path.write_text("nginx: engine x\n1: one\n# a comment\n", "utf-8")
    assert said("nginx 1", load_lexicon(path)) == "engine x one"
    path.write_text('{"GIF": "jif"}', "utf-8")
    assert said("GIF", load_lexicon(path)) == "jif"
    path.write_text("e-mail: a\ne_mail: b\nE-mail: c\n", "utf-8")
    assert said("e-mail e_mail E-mail", load_lexicon(path)) == "a b c", "three words"


def test_what_does_not_fit_in_a_file_is_named(tmp_path: Path) -> None:
    path, many = tmp_path / "lexicon.yaml", "".join(f"w{n}: x\n" for n in range(MAX_FILE_ENTRIES + 1))
    for content, says in [*rows(__file__, "refused_lexicons.jsonl"), (many, "at most 5000")]:
        path.write_text(content, "utf-8")
        with pytest.raises(ValueError, match=says):
            load_lexicon(path)
    with pytest.raises(ValueError, match="cannot be read"):
        load_lexicon(tmp_path / "nowhere.yaml")
