"""What of a spoken answer has been heard."""

from __future__ import annotations

import pytest

from service.api.realtime.conversation import Playback, heard

TEXTS = ("One two three,", "four five six.")
SPOKEN = "One two three, four five six."


def playback(texts: tuple[str, ...] = TEXTS, *, whole: bool = True, **fields: float) -> Playback:
    segments = tuple((float(number), float(number + 1)) for number in range(len(texts)))
    return Playback(texts, segments, fields.get("seconds", float(len(texts))), whole)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, ""),
        (0.2, ""),
        (0.3, "One"),
        (0.93, "One two three,"),
        (1.0, "One two three,"),
        (1.5, "One two three, four"),
        (1.99, SPOKEN),
        (2.0, SPOKEN),
    ],
)
def test_words_are_heard_one_after_another(seconds: float, expected: str) -> None:
    assert heard(SPOKEN, playback(), seconds) == expected


def test_what_comes_after_the_last_segment_is_heard_at_the_end() -> None:
    assert heard(SPOKEN + " \N{SMILING FACE WITH SUNGLASSES}\n```\nx\n```", playback(), 2.0).endswith("```")
    assert heard(SPOKEN + "\n```\nx\n```", playback(), 1.99) == SPOKEN


def test_markup_and_what_is_not_spoken_is_passed_over() -> None:
    code = "```\n" + "x = 1\n" * 60 + "```\n"
    written = f"It is **very** big:\n{code}- See [the page](http://a.b/c) now."
    texts = ("It is very big:", "See the page now.")
    assert heard(written, playback(texts), 1.4).endswith("See")
    assert heard(written, playback(texts), 1.8).endswith("[the page")
    assert heard(written, playback(texts), 0.7) == "It is **very"


def test_numbers_that_are_spoken_as_words_do_not_lose_the_place() -> None:
    written = "The year 1984 was fine. Then came three more."
    texts = ("The year nineteen eighty four was fine.", "Then came three more.")
    assert heard(written, playback(texts), 0.5) == "The year"
    assert heard(written, playback(texts), 1.0) == "The year 1984 was fine."
    assert heard(written, playback(texts), 1.5) == "The year 1984 was fine. Then came"


def test_scripts_without_spaces_are_cut_between_characters() -> None:
    assert heard("今天天气很好。我们走吧。", playback(("今天天气很好。", "我们走吧。")), 1.5) == "今天天气很好。我们"


def test_of_an_answer_that_was_cut_off_no_more_than_its_audio_is_heard() -> None:
    texts = (*TEXTS, "Seven eight nine.")
    cut = Playback(texts, ((0.0, 1.0), (1.0, 2.0)), 2.5, whole=False)
    assert heard(f"{SPOKEN} Seven eight nine. And ten.", cut, 2.5) == f"{SPOKEN} Seven"
    first = Playback(("One two three four five six seven eight nine ten.",), (), 1.0, whole=False)
    assert heard("One two three four five six seven eight nine ten.", first, 1.0) == "One two three"


def test_nothing_is_heard_of_a_transcript_without_speech() -> None:
    assert heard("***", Playback((), (), 0.0, whole=False), 0.0) == ""


def test_signs_between_words_are_searched_once() -> None:
    """With words that could lie between words, too, this search would take minutes."""
    transcript = "_ _ 5 apples. " + "_" * 8000
    cut = Playback(("_ _ five apples.",), ((0.0, 3.0),), 3.0, whole=False)
    assert heard(transcript, cut, 3.0).startswith("_ _ 5 apples.")
    text = "snake_case is _one_ word"
    assert heard(text, Playback((text,), ((0.0, 3.0),), 3.0, whole=False), 1.4) == "snake_case"
