"""Pauses and SSML in the input: what is said, what is written, where silence lies, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.interfaces.errors import InputError
from service.api.spoken_text.passages import MAX_PAUSE, MAX_PAUSES, marked_passages
from service.api.spoken_text.ssml import is_ssml, may_be_ssml, spelled, ssml_passages

Spoken = list[tuple[float, str]]


def spoken(text: str) -> Spoken:
    """(pause, what is said) of each passage; runs of spaces as one."""
    passages = ssml_passages(text) if is_ssml(text) else marked_passages(text, markup=True)
    return [(passage.pause, " ".join("".join(said for _, said in passage.parts).split())) for passage in passages]


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


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ("One &lt; two &amp; &#65;&#x42;.", [(0, "One < two & AB.")]),
        ("One.<break/>Two.", [(0, "One."), (0.75, "Two.")]),
        ('One.<break time="1.5s"/>Two.', [(0, "One."), (1.5, "Two.")]),
        ("One.<break strength='x-strong' ></break>Two.", [(0, "One."), (1.25, "Two.")]),
        ('One,<break strength="none"/> two.', [(0, "One, two.")]),
        ('One.<break time="200ms" strength="strong"/>Two.', [(0, "One."), (0.2, "Two.")]),
        ('The <sub alias="World Wide &quot;Web&quot;">WWW</sub>.', [(0, 'The World Wide "Web".')]),
        ('<say-as interpret-as="characters">w3c-7</say-as>.', [(0, "W three C dash seven.")]),
        ("<p><s>One</s><s>Two</s></p><!-- <not> & read -->", [(0, "One Two")]),
        ("**kept** [pause:1s]", [(0, "**kept** [pause:1s]")]),
    ],
)
def test_ssml(inner: str, expected: Spoken) -> None:
    for begin in ("<speak>", ' \n<?xml version="1.0"?>\n<speak version="1.1" xmlns="http://x" xml:lang="en-US">'):
        assert spoken(f"{begin}{inner}</speak>\n") == expected


def test_what_is_written_stays_beside_what_is_said() -> None:
    (passage,) = ssml_passages('<speak>A <sub alias="b c">D</sub><say-as interpret-as="characters">x1</say-as></speak>')
    assert passage.parts == [("A ", "A "), ("D", "b c"), ("x1", "X one")]


def test_paragraphs_and_sentences_end_where_blank_lines_do() -> None:
    (passage,) = ssml_passages("<speak><p>One</p><p>Two</p></speak>")
    assert "".join(said for _, said in passage.parts) == "\n\nOne\n\n\n\nTwo\n\n"


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("W3C", "english", "W three C"),
        ("a.b@c", "english", "A dot B at C"),
        ("A 1", "chinese", "A 一"),
        ("A1-ß", "other", "A 1 - SS"),
    ],
)
def test_spelling(text: str, language: str, expected: str) -> None:
    assert spelled(text, language) == expected  # type: ignore[arg-type]


def test_the_language_of_digits_is_that_of_the_text() -> None:
    assert spoken('<speak>房间号是 <say-as interpret-as="characters">B2</say-as></speak>') == [(0, "房间号是 B 二")]


@pytest.mark.parametrize("text", ["<speaker>", "x <speak>", "<speak", "<SPEAK>", "", "<speaking/>"])
def test_other_texts_are_no_ssml(text: str) -> None:
    assert not is_ssml(text)


BILLION_LAUGHS = '<?xml version="1.0"?><!DOCTYPE lolz [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><speak>&b;</speak>'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<speak><prosody rate='slow'>x</prosody></speak>", "<prosody> is not supported"),
        ("<speak><audio src='file:///etc/passwd'/></speak>", "<audio> is not supported"),
        ("<speak><break pitch='x'/></speak>", "attribute pitch of <break>"),
        ("<speak><break time='1s' time='2s'/></speak>", "time twice"),
        ("<speak><break time='soon'/></speak>", "time of <break>"),
        ("<speak><break time='-1s'/></speak>", "time of <break>"),
        ("<speak><break time='11s'/></speak>", "at most 10 s"),
        ("<speak><break time='999999s'/></speak>", "at most 10 s"),
        ("<speak><break strength='huge'/></speak>", "strength of <break>"),
        ("<speak><break>x</break></speak>", "<break> holds no text"),
        ("<speak><sub>x</sub></speak>", "attribute alias"),
        ("<speak><sub alias=' '>x</sub></speak>", "attribute alias"),
        ("<speak><sub alias='y'><break/></sub></speak>", "<break> cannot stand inside <sub>"),
        ("<speak><say-as interpret-as='date'>x</say-as></speak>", "only characters"),
        ("<speak><say-as>x</say-as></speak>", "attribute interpret-as"),
        ("<speak><speak>x</speak></speak>", "<speak> cannot stand inside <speak>"),
        ("<speak><p><p>x</p></p></speak>", "<p> cannot stand inside <p>"),
        ("<speak>x", "<speak> is not closed"),
        ("<speak><p>x</speak></p>", "</speak> does not close <p>"),
        ("<speak>x</speak></speak>", "</speak> does not close anything"),
        ("<speak>x</speak><speak>y</speak>", "<speak> cannot stand outside"),
        ("<speak>x</speak> y", "outside of <speak>"),
        ("<speak>x</speak a='b'>", "does not close"),
        ("<speak>a < b</speak>", "write &lt;"),
        ("<speak><p a=b>x</p></speak>", "not well formed"),
        ("<speak>AT&T</speak>", "&amp;"),
        ("<speak>&nbsp;</speak>", "the entity &nbsp; is not supported"),
        ("<speak>&#0;</speak>", "no character"),
        ("<speak>&#xD800;</speak>", "no character"),
        ("<speak>&#x110000;</speak>", "no character"),
        ("<speak><![CDATA[x]]></speak>", "declarations"),
        ("<speak><?php x ?></speak>", "processing instructions"),
        ("<speak><!DOCTYPE x [<!ENTITY a 'b'>]>&a;</speak>", "declarations"),
        ("<speak><!-- never closed</speak>", "declarations"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says.replace("[", r"\[")) as refused:
        ssml_passages(text)
    assert refused.value.field == "input" and len(str(refused.value)) < 300


@pytest.mark.parametrize("before", ["", '<?xml version="1.0"?>\n'])
def test_ssml_with_a_dtd_is_refused_not_spoken_without_its_breaks(before: str) -> None:
    text = f'{before}<!DOCTYPE speak PUBLIC "-//W3C//DTD SYNTHESIS 1.0//EN" "x.dtd">\n<speak>Hi<break/></speak>'
    assert is_ssml(text) and all(may_be_ssml(text[:length]) for length in range(len(before) + 16))
    with pytest.raises(InputError, match="declarations"):
        ssml_passages(text)


def test_no_entity_is_declared_in_front_of_ssml() -> None:
    """With another DOCTYPE in front it is a text, whose tags are taken out and whose entities are not read."""
    assert not is_ssml(BILLION_LAUGHS)
    said = spoken(BILLION_LAUGHS)
    assert len(str(said)) < 2 * len(BILLION_LAUGHS)


@pytest.mark.parametrize("text", ["[pause:]", "[pause:soon]", "[pause:-1s]", "[pause:1m]", "[pause:1e9s]"])
def test_a_pause_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"pause:1\.5s"):
        marked_passages(f"One. {text} Two.", markup=True)


def test_pauses_have_a_budget() -> None:
    longest = f"[pause:{MAX_PAUSE:g}s]"
    full = int(MAX_PAUSES / MAX_PAUSE)
    assert len(marked_passages(longest * full, markup=True)) == full + 1
    for text in (longest * full + "[pause:1ms]", "[pause:10.1s]", "[pause:20000ms]"):
        with pytest.raises(InputError, match="pause"):
            marked_passages(text, markup=True)


PIECES = st.sampled_from(
    [
        *("<p>", "</p>", "<s>", "</s>", "<break/>", "<break time='1s'/>", "<sub alias='a'>", "</sub>", "&amp;", "&"),
        *("<!--", "-->", "</speak>", "<say-as interpret-as='characters'>", "</say-as>", "<x ", "<", "=", "'", '"'),
        *" \nabcd",
    ]
)


@given(st.lists(PIECES, max_size=30).map("".join))
def test_any_text_is_read_or_refused(inner: str) -> None:
    try:
        passages = ssml_passages(f"<speak>{inner}</speak>")
    except InputError as refused:
        assert refused.field == "input"
    else:
        assert sum(passage.pause for passage in passages) <= MAX_PAUSES


@pytest.mark.parametrize(
    "inner",
    [
        "<p>" * 10_000,
        "<x" * 20_000,
        "<p" + " " * 60_000 + "!",
        "<p " + "a='b' " * 10_000 + "!",
        "<!-- " * 10_000,
        "&" * 60_000,
        "&a" * 30_000,
        "<sub alias='" + "x" * 60_000,
    ],
)
def test_hostile_texts_are_refused_in_linear_time(inner: str) -> None:
    """Any of them takes minutes where a pattern goes back and forth over it."""
    with pytest.raises(InputError):
        ssml_passages(f"<speak>{inner}</speak>")


@pytest.mark.parametrize("element", ["<say-as interpret-as='characters'>{}</say-as>", "<sub alias='{}'>x</sub>" * 2])
def test_what_is_said_for_elements_has_a_limit(element: str) -> None:
    with pytest.raises(InputError, match="more than 65536 characters longer"):
        ssml_passages("<speak>" + element.replace("{}", "!" * 33_000) + "</speak>")
    assert ssml_passages("<speak>" + element.replace("{}", "!" * 900) + "</speak>")
