"""Pauses in the input: what is said, where silence lies, and what is refused."""

from __future__ import annotations

import re

import pytest

from models.interfaces.errors import InputError
from service.api.spoken_text.passages import MAX_PAUSE, MAX_PAUSES, PassageReader

Spoken = list[tuple[float, str]]


def read(text: str) -> list[str | float]:
    """The whole text; InputError for what cannot be read."""
    reader = PassageReader()
    parts = reader.feed(text, final=True)
    if reader.error is not None:
        raise reader.error
    return parts


def spoken(text: str) -> Spoken:
    """(pause, what is said) of each passage; runs of spaces as one."""
    passages: list[tuple[float, list[str]]] = [(0.0, [])]
    for part in read(text):
        if isinstance(part, float):
            passages.append((part, []))
        else:
            passages[-1][1].append(part)
    return [(pause, " ".join("".join(said).split())) for pause, said in passages]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One.", [(0, "One.")]),
        ("One. [pause:1.5s] Two.", [(0, "One."), (1.5, "Two.")]),
        ("One. [PAUSE: 300ms ]Two.[pause:.25s]", [(0, "One."), (0.3, "Two."), (0.25, "")]),
        ("[pause:2s]One.[pause:0s]Two.", [(0, ""), (2, "One.Two.")]),
        ("**One.** [pause:1s] `code` [link](x)", [(0, "One."), (1, "code link")]),
        ("An [aside] and [pause 1s].", [(0, "An [aside] and [pause 1s].")]),
    ],
)
def test_pauses_are_marks_in_a_text(text: str, expected: Spoken) -> None:
    assert spoken(text) == expected


@pytest.mark.parametrize("text", ["[pause:]", "[pause:soon]", "[pause:-1s]", "[pause:1m]", "[pause:1e9s]"])
def test_a_pause_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"pause:1\.5s"):
        read(f"One. {text} Two.")


def test_pauses_have_a_budget() -> None:
    longest = f"[pause:{MAX_PAUSE:g}s]"
    full = int(MAX_PAUSES / MAX_PAUSE)
    assert read(longest * full) == [MAX_PAUSE] * full
    for text in (longest * full + "[pause:1ms]", "[pause:10.1s]", "[pause:20000ms]"):
        with pytest.raises(InputError, match="pause"):
            read(text)


def test_a_pause_before_parentheses_is_no_link() -> None:
    assert spoken("[pause:1s](softly) hello") == [(0, ""), (1, "(softly) hello")]
    assert spoken("[Pause: 20 ms ](a)") == [(0, ""), (0.02, "(a)")]
    assert spoken("[pause:now](http://x.y) b") == [(0, "pause:now b")], "a link all the same"


def test_what_is_decided_is_not_held_back() -> None:
    marked = PassageReader()
    assert marked.feed("One two. ") == ["One two."]
    assert marked.feed("[pause:1s] three") == [" ", 1.0, " three"]


@pytest.mark.parametrize(
    ("text", "parts", "error"),
    [
        ("[pause:11s]One.", ["One."], "at most 10 s"),
        ("[pause:soon][pause:11s]One.", ["One."], r"written \[pause:1.5s\]"),
        ("[pause:10s]" * 13 + "One.", [*[10.0] * 12, "One."], "longer than 120 s together"),
    ],
)
def test_the_text_goes_on_behind_a_pause_that_does_not_fit(text: str, parts: list[str | float], error: str) -> None:
    reader = PassageReader()
    assert reader.feed(text) == parts
    assert reader.error is not None and re.search(error, str(reader.error)), "the first"
    assert reader.feed(" Two.", final=True) == [" Two."] and reader.error is None


def test_tags_of_ssml_are_those_of_html() -> None:
    reader = PassageReader()
    assert "".join(map(str, reader.feed("<speak>One <break/>two.</speak>", final=True))) == "One two."
