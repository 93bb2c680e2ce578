"""What of a spoken answer has been heard."""

from __future__ import annotations

from service.api.realtime.conversation import Playback, heard

TEXTS = ("One two three,", "four five six.")
SPOKEN = " ".join(TEXTS)


def test_words_are_heard_one_after_another() -> None:
    """Those of a segment by their length, and at the end what is not spoken, too."""
    written = f"**One** 2 3, {TEXTS[1]}\n```\nx\n```"
    playback = Playback(TEXTS, ((0.0, 1.0), (1.5, 2.5)), 2.5, whole=True)
    said = {0.0: "", 0.2: "", 0.3: "One", 0.93: "One two", 1.0: TEXTS[0], 1.5: TEXTS[0], 2.0: f"{TEXTS[0]} four"}
    for seconds, expected in {**said, 2.49: f"{TEXTS[0]} four five", 2.5: written}.items():
        assert heard(written, playback, seconds) == expected, seconds


def test_scripts_without_spaces_are_cut_between_characters() -> None:
    playback = Playback(("今天天气很好。", "我们走吧。"), ((0.0, 1.0), (1.0, 2.0)), 2.0, whole=True)
    assert heard("", playback, 1.5) == "今天天气很好。 我们"


def test_of_an_answer_that_was_cut_off_no_more_than_its_audio_is_heard() -> None:
    texts = (*TEXTS, "Seven eight nine.")
    assert heard("", Playback(texts, ((0.0, 1.0), (1.0, 2.0)), 2.5, whole=False), 2.5) == f"{SPOKEN} Seven"
    begun = Playback(texts, ((0.0, 1.0), (1.0, 2.0)), 2.5, whole=False, begun=2.3)
    assert heard("", begun, 2.5) == SPOKEN, "behind a pause"
    first = Playback(("One two three four five six seven eight nine ten.",), (), 1.0, whole=False)
    assert heard("", first, 1.0) == "One two three"
    assert heard("***", Playback((), (), 0.0, whole=False), 0.0) == ""
