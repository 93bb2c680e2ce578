"""How segments were written of a text that arrives in chunks: the same as of the whole."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.speech.live_text import LiveText
from service.api.speech.script import Line
from service.api.spoken_text.lexicon import Lexicon
from service.api.spoken_text.text_splitting import Granularity
from tests.api.speech.test_script import job, script

LEXICON = Lexicon({"PG": "p g 13", "nginx": "engine x", "New York": "the city"})
TEXTS = [
    "# In 1999\n\nit cost **$3.50**. Dr. Lee 😀 paid   5% more! And then he left at 5:30 p.m. on Nov 22, 2026.",
    "PG nginx 2. In New York, nginx is PG. 3 times.",
    "(A whisper)Come closer. Now, 2 steps.",
    "[pause:1s] ... [pause:1s]One.[pause:2s]!?[pause:500ms]Two 2. Three.[pause:3s] ",
    "<speak>The <sub alias='World Health Organization'>WHO</sub> says: 5 kg.<break time='1s'/>wash &amp; dry.</speak>",
    "他在1999年买了3.5公斤苹果，花了￥20。然后PG 5%！这是<W3C>。",
    "12345678901234567890 " * 8 + "words after it, and 7 more.",
    "A sentence without any number. Another one! And a third?",
]


async def live(text: str, size: int, **changes: Any) -> list[Line]:
    writer = LiveText(cast(Any, None), job(**changes), ssml=True, written=True)
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    parts = [part for chunk in chunks for part in writer._cut(chunk, whole=False)]
    parts += writer._cut("", whole=True)
    await writer.close()
    assert writer._writing is not None and not any(writer._writing._steps), "nothing is kept of what was spoken"
    return [part for part in parts if isinstance(part, Line)]


def shown(lines: Any) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(line.text, line.written, tuple(word.text for word in line.words)) for line in lines]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("granularity", ["clause", "sentence", "none"])
@pytest.mark.parametrize("text", TEXTS)
async def test_chunks_are_written_as_the_whole(text: str, granularity: Granularity, size: int) -> None:
    changes: dict[str, Any] = {"granularity": granularity, "lexicons": (LEXICON,), "segment_length": 60}
    whole = script(text, **changes).lines
    lines = await live(text, size, **changes)
    assert shown(lines) == shown(whole)
    for one, other in zip(lines, whole, strict=True):
        assert [word.end for word in one.words] == pytest.approx([word.end for word in other.words], abs=0.2)


WORDS = st.lists(
    st.sampled_from(["It", "costs", "$5,", "nginx.", "PG", "1999", "Dr.", "Lee,", "so", "😀", "5%!"]), max_size=40
)


@given(WORDS, st.integers(1, 30), st.sampled_from(["clause", "sentence", "none"]))
async def test_any_chunks_are_written_as_the_whole(words: list[str], size: int, granularity: Granularity) -> None:
    changes: dict[str, Any] = {"granularity": granularity, "lexicons": (LEXICON,), "segment_length": 50}
    text = " ".join(["Well", *words])
    written = [line.written for line in await live(text, size, **changes)]
    assert written == [line.written for line in script(text, **changes).lines]


@pytest.mark.parametrize(
    ("chunks", "spoken"),
    [
        (["Hel", "lo"], [True, True]),
        (["", " ", "<b></b>", "[pause:1s]", "..."], [False] * 5),
        (["<speak>", "Yes", "</speak>"], [False, True, False]),
    ],
)
async def test_text_is_given_where_something_of_it_is_to_be_spoken(chunks: list[str], spoken: list[bool]) -> None:
    """A word of a chat model is, long before its sentence is complete."""
    writer = LiveText(cast(Any, None), job(granularity="sentence"), ssml=True)
    for chunk, counts in zip(chunks, spoken, strict=True):
        writer.given = -math.inf
        await writer.write(chunk, last=False)
        assert (writer.given > -math.inf) == counts, chunk
    await writer.close()
