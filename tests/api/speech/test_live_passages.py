"""Pauses and SSML of a text that arrives in chunks: the same passages as of the whole, however it is cut."""

from __future__ import annotations

import pytest

from models.interfaces.errors import InputError
from service.api.spoken_text.live_passages import LivePassages
from service.api.spoken_text.passages import Passage, marked_passages
from service.api.spoken_text.ssml import is_ssml, ssml_passages

TEXTS = [
    "",
    "  ",
    "One. [pause:1.5s]Two [pause:300ms] [PAUSE:.5s]three[pause:1s]",
    "[pause:1s](softly) hello",
    "[pause:1s][a link](http://x.y/z) and [pa](http://x.y) [pausing: a while](http://x.y)",
    "**[pause:250ms]** a [b] [p] [pause] c [",
    "# [pause:1s] Title\n\n- [x](y)[pause:2s]",
    "<b>bold</b> < 5 <!-- gone --> <speak>no SSML here",
    "<speak>Hi.</speak>",
    " \n<?xml version='1.0'?>\n<speak>Ready?<break time='500ms'/>Go to <sub alias=\"gate > seven\">G7</sub>.</speak>",
    "<speak>A &amp; B &#8364;5<!-- a > b --> <p><s>One.</s><s>Two.</s></p></speak>\n",
    "<speak>The <say-as interpret-as='characters'>W3C</say-as> is here.<break/></speak>",
    "<speak>这是<say-as interpret-as='characters'>W3C</say-as>。<break strength='weak'/></speak>",
    "<speaker>no SSML</speaker>",
    "<?xml but no speak",
]


def live(text: str, size: int) -> list[str | float]:
    """Texts joined, pauses as they are."""
    passages = LivePassages(markup=True, ssml=True)
    pieces: list[str | float] = []
    for start in range(0, len(text), size):
        pieces += spoken(passages, text[start : start + size])
        assert passages.error is None
    pieces += spoken(passages, "", whole=True)
    assert passages.error is None
    return joined(pieces)


def spoken(passages: LivePassages, text: str, *, whole: bool = False) -> list[str | float]:
    return [piece if isinstance(piece, float) else piece[1] for piece in passages.feed(text, whole=whole)]


def joined(pieces: list[str | float]) -> list[str | float]:
    result: list[str | float] = []
    for piece in pieces:
        if isinstance(piece, str) and result and isinstance(result[-1], str):
            result[-1] += piece
        elif piece:
            result.append(piece)
    return [" ".join(piece.split(" ")) if isinstance(piece, str) else piece for piece in result]


def whole(text: str) -> list[str | float]:
    passages: list[Passage] = [*(ssml_passages(text) if is_ssml(text) else marked_passages(text, markup=True))]
    pieces: list[str | float] = []
    for passage in passages:
        pieces += [passage.pause, *(spoken for _, spoken in passage.parts)]
    return joined(pieces)


def words(pieces: list[str | float]) -> list[str | float]:
    """Without the number of spaces, which does not count."""
    return [" ".join(piece.split()) if isinstance(piece, str) else piece for piece in pieces]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("text", TEXTS)
def test_chunks_are_read_as_the_whole(text: str, size: int) -> None:
    assert words(live(text, size)) == words(whole(text))


def test_a_pause_before_parentheses_is_no_link() -> None:
    assert whole("[pause:1s](softly) hello") == [1.0, "(softly) hello"]
    assert whole("[Pause: 20 ms ](a)") == [0.02, "(a)"]
    assert whole("[pause:now](http://x.y) b") == ["pause:now b"], "a link all the same"


def test_what_is_decided_is_not_held_back() -> None:
    marked = LivePassages(markup=True, ssml=True)
    assert spoken(marked, "One two. ") == ["One two."]
    assert spoken(marked, "[pause:1s] three") == [" ", 1.0, " three"]
    ssml = LivePassages(markup=True, ssml=True)
    assert spoken(ssml, "<speak>One two. <bre") == ["One two. "]
    assert spoken(ssml, "ak time='1s'/>Three &am") == [1.0, "Three "]
    assert spoken(ssml, "p; four") == ["& four"]


@pytest.mark.parametrize(
    ("text", "rest", "error"),
    [
        ("[pause:11s]One", ["One"], "at most 10 s"),
        ("[pause:soon]One", ["One"], r"written \[pause:1.5s\]"),
        ("[pause:10s]" * 13 + "One", [*[10.0] * 12, "One"], "longer than 120 s together"),
    ],
)
def test_the_text_goes_on_behind_a_pause_that_does_not_fit(text: str, rest: list[str | float], error: str) -> None:
    passages = LivePassages(markup=True, ssml=True)
    pieces = spoken(passages, text + " two. ")
    assert passages.error is not None
    with pytest.raises(InputError, match=error):
        raise passages.error
    more = spoken(passages, "Three", whole=True)
    assert words(joined([*pieces, *more])) == [*rest[:-1], f"{rest[-1]} two. Three"]
    assert passages.error is None


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        (["<speak>One ", "<audio src='x'/>", " two</speak>"], "<audio> is not supported"),
        (["<speak>One", " < two"], "not well formed"),
        (["<speak>One"], "<speak> is not closed"),
        (["<speak>One &nbsp", "; two</speak>"], "entity &nbsp; is not supported"),
        (["<speak><!-- ", "x" * 5000], "not supported"),
        (["<speak><sub alias='", "x" * 5000], "not well formed"),
    ],
)
def test_nothing_is_read_behind_ssml_that_does_not_fit(chunks: list[str], error: str) -> None:
    passages = LivePassages(markup=True, ssml=True)
    errors = []
    for chunk in chunks:
        passages.feed(chunk, whole=False)
        errors += [passages.error] if passages.error else []
    passages.feed("", whole=True)
    errors += [passages.error] if passages.error else []
    assert len(errors) == 1 and error in str(errors[0])
    assert passages.feed("more", whole=True) == []


def test_what_is_written_goes_along() -> None:
    passages = LivePassages(markup=True, ssml=True)
    passages.feed("<speak>The <sub alias='World Health", whole=False)
    assert passages.feed(" Organization'>WHO</sub>.", whole=False)[0] == ("WHO", "World Health Organization")


def test_where_no_ssml_is_read_its_tags_are_those_of_html() -> None:
    passages = LivePassages(markup=True, ssml=False)
    assert joined(spoken(passages, "<speak>One <break/>two.</speak>", whole=True)) == ["One two."]
