"""Texts that were tokenized lately are not tokenized again."""

from __future__ import annotations

import threading

from models.text.recent_texts import OVERHEAD, RecentTexts
from tests.support.waiting import GENEROUS


class Counting:
    """Codes of the characters, and the texts that they were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.asked.append(text)
        return list(map(ord, text))


def test_a_text_is_tokenized_once_and_its_ids_are_the_callers_own() -> None:
    encode = Counting()
    recent, text = RecentTexts(encode), "words"
    first = recent.ids(text)
    first.append(7)
    recent.ids(text).clear()
    assert recent.ids(text) == list(map(ord, text)) and encode.asked == [text]


def test_the_text_that_was_used_longest_ago_makes_room() -> None:
    encode = Counting()
    recent = RecentTexts(encode, characters=2 * (10 + OVERHEAD))
    a, b, c = (10 * letter for letter in "abc")
    for text in (a, b, a, c, a, b):
        assert recent.ids(text) == list(map(ord, text))
    assert encode.asked == [a, b, c, b]


def test_one_thread_does_not_wait_for_the_text_of_another() -> None:
    begun, go_on = threading.Event(), threading.Event()
    slow, fast = "slow", "fast"

    def encode(text: str) -> list[int]:
        if text == slow:
            begun.set()
            assert go_on.wait(GENEROUS), "the other text waits for this one"
        return [len(text)]

    recent = RecentTexts(encode)
    thread = threading.Thread(target=recent.ids, args=(slow,))
    thread.start()
    assert begun.wait(GENEROUS)
    assert recent.ids(fast) == [4]
    go_on.set()
    thread.join()
    assert recent.ids(slow) == [4]
