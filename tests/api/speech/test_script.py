"""Segments of an input, whole or in chunks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from service.api.speech.delivery import Script
from service.api.speech.live_text import ScriptReader
from service.api.speech.request import SpeechJob
from service.api.speech.speaker import Speaker
from service.api.spoken_text.lexicon import Lexicon
from service.api.spoken_text.text_splitting import words_of
from tests.support.rows import rows


def job(**changes: Any) -> SpeechJob:
    """With what a script depends on."""
    unused = dict.fromkeys(SpeechJob.__dataclass_fields__, cast(Any, None))
    fields = {"speaker": Speaker(), "normalised": True, "lexicons": ()}
    return SpeechJob(**{**unused, **fields, "granularity": "none", "segment_length": 400, **changes})


def script(*chunks: str, **changes: Any) -> Script:
    reader, told = ScriptReader(job(**changes)), Script()
    for index, chunk in enumerate(chunks, 1):
        for part in reader.feed(chunk, final=index == len(chunks)):
            told.add(part)
    assert reader.error is None
    return told


def lines(text: str, **changes: Any) -> list[str]:
    return [line.text for line in script(text, **changes).lines]


def test_segments_are_without_markup_and_with_numbers_in_words() -> None:
    text = "# In 1999\n\nit cost **$3.50**. Dr. Lee 😀 paid   5% more!"
    assert lines(text, granularity="sentence") == [
        "In nineteen ninety-nine",
        "it cost three dollars and fifty cents.",
        "Doctor Lee paid five percent more!",
    ]
    assert lines(text, granularity="sentence", normalised=False) == [
        "In 1999",
        "it cost $3.50.",
        "Dr. Lee paid 5% more!",
    ]


def test_lexicon_then_numbers() -> None:
    entries = {"PG": "p g 13", "nginx": "engine x"}
    assert lines("PG nginx 2.", lexicons=(Lexicon(entries),)) == ["p g thirteen engine x two."]
    assert lines("PG", lexicons=(Lexicon(entries),), normalised=False) == ["p g 13"]


def test_pauses_lie_between_what_is_spoken() -> None:
    told = script(
        "[pause:1s] ... [pause:1s]One.[pause:2s]!?[pause:500ms]Two. Three.[pause:3s] ", granularity="sentence"
    )
    assert [(line.text, line.pause) for line in told.lines] == [("One.", 2.0), ("Two.", 2.5), ("Three.", 0.0)]
    assert told.pause == 3.0 and told.pauses == 7.5


LEXICON = Lexicon({"PG": "p g 13", "nginx": "engine x", "New York": "the city"})
CUT: list[str] = rows(__file__, "cut_texts.jsonl")
MIXED = st.lists(st.sampled_from([*CUT[:11], "It costs $5,", "nginx.", "PG", "Dr.", "so"]), max_size=6).map(" ".join)


@given(st.sampled_from(CUT) | MIXED, st.lists(st.integers(0, 300)), st.sampled_from(["clause", "sentence", "none"]))
def test_however_a_text_is_cut_it_is_the_same_script(text: str, cuts: list[int], granularity: str) -> None:
    text = text if text.strip() else f"{text} so"
    changes: dict[str, Any] = {"granularity": granularity, "lexicons": (LEXICON,), "segment_length": 60}
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert script(*(text[begin:end] for begin, end in pairwise(places)), **changes) == script(text, **changes)


def test_a_clause_is_released_with_the_first_word_behind_it() -> None:
    """What a listener waits for."""
    for text, *after in (
        ("First of all we paid $5, then Dr. Lee left. And on", "$5, the", "left. An"),
        ("One.[pause:1s] Two three, four. Five", "[pause:1s] ", "four. Fiv"),
        ("<speak>Is it 5 kg?<break/>Yes, it is. So</speak>", "<break/>", "is. So"),
        ("今天是2026年11月22日，我们去公园吧。好", "日，我", "吧。好"),
    ):
        reader = ScriptReader(job(granularity="clause", lexicons=(LEXICON,)))
        released = [at for at, sign in enumerate(text, 1) if any(isinstance(part, str) for part in reader.feed(sign))]
        assert released == [text.index(end) + len(end) for end in after]


def test_a_chunk_tells_whether_it_has_something_to_speak() -> None:
    """A word of a chat model has, long before its sentence is complete."""
    for chunks in (("Hel", "lo"), ("", " ", "<b></b>", "[pause:1s]", "..."), ("<speak>", "Yes", "</speak>")):
        reader = ScriptReader(job(granularity="sentence"))
        for chunk in chunks:
            reader.feed(chunk)
            assert reader.speakable == (chunk in ("Hel", "lo", "Yes")), chunk


def test_chinese_words_are_characters_with_their_signs() -> None:
    assert words_of('"你好"，Bob！5个。 안녕 세계') == ['"你', '好"，', "Bob！", "5", "个。", "안녕", "세계"]
