"""Tokens become text: whole characters, stop strings, reasoning and logprobs, however tokens and pieces fall."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.chat.detokenizer import ReasoningSplitter, StopCutter, TextAssembler
from service.link.messages import ChatDelta, TokenInfo

texts = st.text(alphabet="ab<é", max_size=24)
stops = st.lists(st.text(alphabet="ab<é", min_size=1, max_size=4), max_size=4)


def _detokenize(ids: Sequence[int]) -> bytes:
    return bytes(token for token in ids if token < 256)


def _pieces(text: str, cuts: Sequence[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(borders)]


def _cut_by_definition(text: str, stops: Sequence[str]) -> str:
    """The stop string that is complete first counts; of those that end together, the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(texts, stops, st.lists(st.integers(0, 100), max_size=6))
def test_the_cut_does_not_depend_on_the_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    cutter = StopCutter(stops)
    shown = "".join(cutter.feed(piece) for piece in _pieces(text, cuts)) + cutter.flush()
    assert shown == _cut_by_definition(text, stops)
    assert cutter.stopped == any(stop in text for stop in stops)


@given(texts, stops)
def test_text_that_cannot_begin_a_stop_is_not_held_back(text: str, stops: list[str]) -> None:
    cutter = StopCutter(stops)
    shown = "".join(cutter.feed(character) for character in text)
    if not cutter.stopped:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@given(st.text(max_size=20), st.lists(st.integers(1, 4), max_size=30))
def test_utf8_is_whole_whatever_the_token_borders(text: str, sizes: list[int]) -> None:
    assembler = TextAssembler(_detokenize, ())
    raw, shown, start = text.encode(), "", 0
    for size in [*sizes, len(raw)]:
        shown += assembler.feed(ChatDelta("r", tuple(raw[start : start + size]))).content
        start += size
    end = assembler.feed(ChatDelta("r", (), finish_reason="length"))
    assert shown + end.content == text
    assert end.finish_reason == "length"
    assert assembler.tokens == len(raw)


def test_stop_strings_wait_for_min_tokens() -> None:
    assembler = TextAssembler(_detokenize, ["a"], min_tokens=3)
    end = assembler.feed(ChatDelta("r", tuple(b"aabba")))
    assert (end.content, end.finish_reason, assembler.tokens) == ("aabb", "stop", 5)


def test_logprobs_come_with_their_text_and_stop_where_it_stops() -> None:
    assembler = TextAssembler(_detokenize, ["ST"])

    def feed(text: bytes) -> list[str]:
        infos = tuple(TokenInfo(-0.25, ((65, -1.0), (300, float("-inf")))) for _ in text)
        return [entry.token for entry in assembler.feed(ChatDelta("r", tuple(text), infos)).logprobs]

    assert feed(b"ab") == ["a", "b"]
    assert feed(b"S") == []
    assert feed(b"x") == ["S", "x"]
    assert feed(b"yST") == ["y"]


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<t>why</t>\n\nbecause", False, ("why", "because")),
        ("\n<t>why</t>because", False, ("why", "because")),
        ("plain answer", False, ("", "plain answer")),
        ("<tx not a marker", False, ("", "<tx not a marker")),
        ("why</t>because", True, ("why", "because")),
        ("never closed </", True, ("never closed </", "")),
        ("<t>never closed", False, ("never closed", "")),
        ("answer then <t>x</t>", False, ("", "answer then <t>x</t>")),
        ("<t>", False, ("", "")),
        ("<", False, ("", "<")),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_reasoning_is_split_whatever_the_pieces(text: str, opened: bool, expected: tuple[str, str], size: int) -> None:
    splitter = ReasoningSplitter(("<t>", "</t>"), opened=opened)
    pairs = [splitter.feed(text[n : n + size]) for n in range(0, len(text), size)]
    pairs.append(splitter.flush())
    assert ("".join(r for r, _ in pairs), "".join(a for _, a in pairs)) == expected
