"""Tokens become text: whole characters, stop strings, reasoning and logprobs, however tokens and pieces fall."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.chat.detokenizer import ReasoningSplitter, StopCutter, TextAssembler, ToolCallParser, joined
from service.api.chat.schema import ToolCallDelta
from service.link.messages import ChatDelta, TokenInfo
from tests.support.rows import rows
from tests.support.tool_samples import call_text

texts = st.text(alphabet="ab<é", max_size=24)
stops = st.lists(st.text(alphabet="ab<é", min_size=1, max_size=4), max_size=4)


def _detokenize(ids: Sequence[int]) -> bytes:
    return bytes(token for token in ids if token < 256)


places = st.lists(st.integers(0, 10_000), max_size=12)


def pieces(text: str, places: Sequence[int]) -> list[str]:
    """The text, cut at these places."""
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(borders)]


def _cut_by_definition(text: str, stops: Sequence[str]) -> str:
    """The stop string that is complete first counts; of those that end together, the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(texts, stops, places)
def test_the_cut_does_not_depend_on_the_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    cutter = StopCutter(stops)
    shown = "".join(cutter.feed(piece) for piece in pieces(text, cuts)) + cutter.flush()
    assert shown == _cut_by_definition(text, stops)
    assert cutter.stopped == any(stop in text for stop in stops)


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


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_reasoning_is_split_whatever_the_pieces(size: int) -> None:
    for text, opened, *expected in rows(__file__, "reasoning.jsonl"):
        splitter = ReasoningSplitter(("<t>", "</t>"), opened=opened)
        pairs = [*(splitter.feed(text[n : n + size]) for n in range(0, len(text), size)), splitter.flush()]
        assert ["".join(parts) for parts in zip(*pairs, strict=True)] == expected, text


@pytest.mark.parametrize("size", [1, 4, 100])
def test_tokens_up_to_the_closing_marker_are_reasoning(size: int) -> None:
    thought, answer = "\n<t>why é</t>".encode(), b"\n\nso"
    assembler = TextAssembler(_detokenize, (), reasoning_markers=("<t>", "</t>"))
    pieces = [assembler.feed(ChatDelta("r", tuple(thought[n : n + size]))) for n in range(0, len(thought), size)]
    pieces.append(assembler.feed(ChatDelta("r", tuple(answer), finish_reason="stop")))
    assert ("".join(one.reasoning for one in pieces), "".join(one.content for one in pieces)) == ("why é", "so")
    assert (assembler.tokens, assembler.reasoning_tokens) == (len(thought + answer), len(thought))


def parse(chunks: list[str], **options: bool) -> tuple[str, list[ToolCallDelta]]:
    parser = ToolCallParser(**options)
    said, deltas = "", []
    for chunk in chunks:
        text, calls = parser.feed(chunk)
        said += text
        deltas += calls
    return said + parser.flush(), deltas


def calls(deltas: list[ToolCallDelta]) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in joined(deltas)]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('{}[]"\\:, <tool_call>/é\n')),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a{}"\\</>', max_size=4), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text('ab{}"\\', max_size=5), values, max_size=4)
split_texts = st.text(st.sampled_from("ab <tool_cal>\n{}é"), max_size=30).filter(lambda text: "<tool_call>" not in text)


@given(split_texts, st.lists(st.tuples(st.sampled_from(["add", "get-x_1"]), arguments), max_size=3), places)
def test_any_split_gives_the_same(text: str, made: list[tuple[str, dict[str, object]]], where: list[int]) -> None:
    answer = text + "\n".join(call_text(name, **{"": 0} | values) for name, values in made)
    said, deltas = parse(pieces(answer, where))
    assert said == (text.rstrip() if made else text)
    wanted = [(name, json.dumps({"": 0} | values, ensure_ascii=False)) for name, values in made]
    assert calls(deltas) == wanted
    assert parse(list(answer))[0] == said


def test_an_answer_that_is_cut_short_is_a_beginning() -> None:
    whole = call_text("add", a=1, b="}")
    for end in range(1, len(whole)):
        said, deltas = parse([whole[:end]])
        named = '"arguments": ' in whole[:end]
        assert len(calls(deltas)) == named
        if named:
            assert '{"a": 1, "b": "}"}'.startswith(calls(deltas)[0][1])
        assert said == (whole[:end] if end < len("<tool_call>") else "")


@given(st.text(st.sampled_from("ab<tool_call>/\n{}é"), max_size=30), st.booleans(), places)
def test_an_answer_with_a_format_is_text_to_its_end_or_calls(text: str, whole: bool, where: list[int]) -> None:
    tag = "<tool_call>" if whole else ""
    for answer in (f"x{text}{tag}{text}", f"\n{tag}{text}x", f"{tag}{text}"):
        parser, said = ToolCallParser(either=True), ""
        for chunk in pieces(answer, where):
            more, deltas = parser.feed(chunk)
            said += more
            assert not deltas
        assert said + parser.flush(complete=True) == answer
    made = "\n".join(call_text("add", text=text) for _ in range(2))
    said, deltas = parse(pieces("\n\n" + made, where), either=True)
    assert said == "" and calls(deltas) == [("add", json.dumps({"text": text}, ensure_ascii=False))] * 2


def assemble(
    answer: str, *, size: int = 1, stops: tuple[str, ...] = (), end: str = "stop"
) -> tuple[str, list[str], str]:
    """(content, arguments of the calls, finish_reason) of tokens of `size` bytes."""
    raw = answer.encode()
    tokens = [raw[start : start + size] for start in range(0, len(raw), size)]
    assembler = TextAssembler(lambda ids: b"".join(tokens[id] for id in ids), stops, calls=ToolCallParser())
    content, deltas = "", []
    for id in range(len(tokens)):
        text = assembler.feed(ChatDelta("r", (id,)))
        content += text.content
        deltas += text.calls
        if text.finish_reason:
            return content, [arguments for _, arguments in calls(deltas)], text.finish_reason
    text = assembler.feed(ChatDelta("r", (), finish_reason=end))
    assert text.finish_reason
    return content + text.content, [arguments for _, arguments in calls([*deltas, *text.calls])], text.finish_reason


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40, 1000])
def test_stop_strings_end_text_and_not_calls(size: int) -> None:
    call = call_text("add", text="STOP é {")
    arguments = '{"text": "STOP é {"}'
    assert assemble("Hm. " + call, size=size, stops=("STOP", "{", "\n{")) == ("Hm.", [arguments], "tool_calls")
    assert assemble("Hm. STOP " + call, size=size, stops=("STOP",)) == ("Hm. ", [], "stop")
    assert assemble("No call.", size=size) == ("No call.", [], "stop")
    assert assemble(call, size=size, end="length")[2] == "length"
