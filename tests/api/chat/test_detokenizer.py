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


def test_a_cut_character_at_the_end_shows_as_a_replacement() -> None:
    assembler = TextAssembler(_detokenize, ())
    assert assembler.feed(ChatDelta("r", tuple("é".encode()[:1]))).content == ""
    assert assembler.feed(ChatDelta("r", (), finish_reason="length")).content == "\ufffd"


def test_a_stop_string_across_token_borders_ends_the_answer() -> None:
    assembler = TextAssembler(_detokenize, ["END"])
    assert assembler.feed(ChatDelta("r", tuple(b"one E"))).content == "one "
    assert assembler.feed(ChatDelta("r", tuple(b"N"))).content == ""
    end = assembler.feed(ChatDelta("r", tuple(b"D and more")))
    assert (end.content, end.finish_reason) == ("", "stop")
    assert assembler.tokens == 7


def test_held_text_is_shown_when_the_stop_string_does_not_come() -> None:
    assembler = TextAssembler(_detokenize, ["END"])
    first = assembler.feed(ChatDelta("r", tuple(b"one EN")))
    end = assembler.feed(ChatDelta("r", (), finish_reason="stop"))
    assert first.content + end.content == "one EN"


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


def test_logprobs_of_tokens_without_text_come_at_the_end() -> None:
    assembler = TextAssembler(_detokenize, ())
    delta = assembler.feed(ChatDelta("r", (97, 300), (TokenInfo(-1.0), TokenInfo(-2.0)), "length"))
    assert [(entry.logprob, entry.bytes) for entry in delta.logprobs] == [(-1.0, [97]), (-2.0, [])]
    top = TextAssembler(_detokenize, ()).feed(ChatDelta("r", (97,), (TokenInfo(-1.0, ((98, float("-inf")),)),)))
    assert top.logprobs[0].top_logprobs[0].logprob == -9999.0


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


def test_without_markers_everything_is_the_answer() -> None:
    splitter = ReasoningSplitter(None)
    assert splitter.feed("<t>x") == ("", "<t>x") and splitter.flush() == ("", "")
