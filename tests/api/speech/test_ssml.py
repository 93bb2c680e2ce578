"""Pauses and SSML in the input: what is said, what is written, where silence lies, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.interfaces.errors import InputError
from service.api.spoken_text.passages import MAX_PAUSE, MAX_PAUSES, PassageReader, is_ssml, may_be_ssml
from tests.support.rows import rows

Spoken = list[tuple[float, str]]


def read(text: str) -> list[str | float]:
    """The whole text; InputError for what cannot be read."""
    reader = PassageReader(ssml=True)
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


def test_what_is_said_and_where_pauses_lie() -> None:
    long = ' \n<?xml version="1.0"?>\n<speak version="1.1" xmlns="http://x" xml:lang="en-US">'
    for text, *passages in rows(__file__, "passages.jsonl"):
        for form in (text, text.replace("<speak>", long) + "\n"):
            assert spoken(form) == list(map(tuple, passages)), form


def test_paragraphs_and_sentences_end_where_blank_lines_do() -> None:
    assert "".join(map(str, read("<speak><p>One</p><p>Two</p></speak>"))) == "\n\nOne\n\n\n\nTwo\n\n"


def test_what_is_not_supported_is_refused_by_name() -> None:
    for line in Path(__file__).with_name("refused_ssml.tsv").read_text().splitlines():
        says, text = line.split("\t")
        with pytest.raises(InputError, match=re.escape(says)) as refused:
            read(text)
        assert refused.value.field == "input" and len(str(refused.value)) < 300


BILLION_LAUGHS = '<!DOCTYPE lolz [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><speak>&b;</speak>'


def test_no_entity_is_declared_in_front_of_ssml() -> None:
    """With a DTD it is refused, not spoken without its breaks."""
    for before in ("", '<?xml version="1.0"?>\n'):
        for text in (f'{before}<!DOCTYPE speak SYSTEM "x.dtd">\n<speak>Hi<break/></speak>', before + BILLION_LAUGHS):
            assert is_ssml(text) and all(may_be_ssml(text[:length]) for length in range(6))
            with pytest.raises(InputError, match="DTD"):
                read(text)
    for text in ("<speaker>", "x <speak>", "<speak", "<SPEAK>", "", "<speaking/>", "<?xmlns>"):
        assert not is_ssml(text)


def test_pauses_have_a_budget() -> None:
    longest = f"[pause:{MAX_PAUSE:g}s]"
    full = int(MAX_PAUSES / MAX_PAUSE)
    assert read(longest * full) == [MAX_PAUSE] * full
    for text in (longest * full + "[pause:1ms]", "[pause:10.1s]", "[pause:20000ms]"):
        with pytest.raises(InputError, match="pause"):
            read(text)


def test_the_text_goes_on_behind_a_pause_that_does_not_fit() -> None:
    written = r"written \[pause:1.5s\]"
    for text, pauses, error in (
        *((f"[pause:{wrong}]", [], written) for wrong in ("", "soon", "-1s", "1m", "1e9s")),
        ("[pause:11s]", [], "at most 10 s"),
        ("[pause:soon][pause:11s]", [], written),  # the first
        ("[pause:10s]" * 13, [10.0] * 12, "longer than 120 s together"),
    ):
        reader = PassageReader(ssml=True)
        assert reader.feed(f"{text}One.") == [*pauses, "One."]
        assert reader.error is not None and re.search(error, str(reader.error)), text
        assert reader.feed(" Two.", final=True) == [" Two."] and reader.error is None


PIECES = st.sampled_from(
    [
        *("<p>", "</p>", "<s>", "</s>", "<break/>", "<break time='1s'/>", "<sub alias='a'>", "</sub>", "&amp;", "&"),
        *("<!--", "-->", "</speak>", "<x ", "<", "=", "'", '"'),
        *" \nabcd",
    ]
)


@given(st.lists(PIECES, max_size=30).map("".join))
def test_any_text_is_read_or_refused(inner: str) -> None:
    try:
        parts = read(f"<speak>{inner}</speak>")
    except InputError as refused:
        assert refused.field == "input"
    else:
        assert sum(part for part in parts if isinstance(part, float)) <= MAX_PAUSES


def test_hostile_texts_are_refused_in_linear_time() -> None:
    """Any of them takes minutes where a pattern goes back and forth over it."""
    units = [("", "<p>"), ("", "<x"), ("", "<!-- "), ("", "&"), ("", "&a")]
    for begin, unit in [*units, ("<p", " "), ("<p ", "a='b' "), ("<sub alias='", "x")]:
        with pytest.raises(InputError):
            read(f"<speak>{begin}{unit * (60_000 // len(unit))}!</speak>")


def test_a_pause_before_parentheses_is_no_link() -> None:
    assert spoken("[pause:1s](softly) hello") == [(0, ""), (1, "(softly) hello")]
    assert spoken("[Pause: 20 ms ](a)") == [(0, ""), (0.02, "(a)")]
    assert spoken("[pause:now](http://x.y) b") == [(0, "pause:now b")], "a link all the same"


def test_nothing_is_read_behind_ssml_that_does_not_fit() -> None:
    for error, *chunks in (
        ("<audio> is not supported", "<speak>One ", "<audio src='x'/>", " two</speak>"),
        ("not well formed", "<speak>One", " < two"),
        ("no element found", "<speak>One"),
        ("undefined entity", "<speak>One &nbsp", "; two</speak>"),
        ("unclosed token", "<speak><!-- ", "x" * 5000),
        ("not well formed", "<speak><sub alias='", "x" * 5000),
    ):
        reader, errors = PassageReader(ssml=True), []
        for chunk in [*chunks, ""]:
            reader.feed(chunk, final=not chunk)
            errors += [reader.error] if reader.error else []
        assert len(errors) == 1 and error in str(errors[0])
        assert reader.feed("more", final=True) == []


def test_where_no_ssml_is_read_its_tags_are_those_of_html() -> None:
    reader = PassageReader(ssml=False)
    assert "".join(map(str, reader.feed("<speak>One <break/>two.</speak>", final=True))) == "One two."
