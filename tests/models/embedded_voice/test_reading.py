"""What speech leaves out of its text and says again, seen in phones; no Flite is needed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from models.embedded.voices.decoder import Phones
from models.embedded.voices.flite import PHONES, SAMPLE_RATE, Utterance
from models.embedded.voices.reading import LEAST, Reading, edited, follow

COUNT = len(PHONES)
KNOWN = Phones(np.full(COUNT, 1.0 / COUNT), np.full(COUNT, 2), np.full(COUNT, 4.0))
PAUSE = PHONES.index("pau")
TEXT = np.array([phone for phone in range(COUNT) if phone != PAUSE][:20])
FRAMES = 4


def heard(said: np.ndarray, sure: float = 0.9) -> np.ndarray:
    """Log-probabilities of speech that says these phones, each for FRAMES."""
    logs = np.full((len(said) * FRAMES, COUNT), np.log((1.0 - sure) / (COUNT - 1)))
    logs[np.arange(len(logs)), np.repeat(said, FRAMES)] = np.log(sure)
    return logs


def cut(first: int, end: int) -> np.ndarray:
    return np.concatenate((TEXT[:first], TEXT[end:]))


@pytest.mark.parametrize(
    ("said", "reading"),
    [
        (TEXT, Reading(0, 0)),
        (np.insert(TEXT, [0, 7, 20], PAUSE), Reading(0, 0)),
        (cut(6, 11), Reading(5, 0)),
        (cut(0, 4), Reading(4, 0)),
        (np.concatenate((TEXT[:12], TEXT[8:])), Reading(0, 4)),
        (np.concatenate((TEXT, TEXT[15:])), Reading(0, 5)),
        (TEXT[:12], Reading(8, 0)),
    ],
    ids=["all", "with pauses", "left out", "late", "said twice", "the end twice", "broken off"],
)
def test_parts_that_are_left_out_or_said_again(said: np.ndarray, reading: Reading) -> None:
    assert follow(heard(said), TEXT, KNOWN) == reading


def test_what_is_hardly_heard_is_followed_through_all_the_same() -> None:
    logs = heard(TEXT)
    logs[6 * FRAMES : 10 * FRAMES] = -np.log(COUNT)
    assert follow(logs, TEXT, KNOWN) == Reading(0, 0)


def test_a_word_that_sounds_like_another_one_is_no_skip() -> None:
    said = TEXT.copy()
    said[6:8] = TEXT[[15, 16]]
    assert not follow(heard(said), TEXT, KNOWN).faulty(len(said), len(TEXT))


def test_a_part_counts_where_the_length_says_so_too() -> None:
    left_out, again, small = Reading(LEAST, 0), Reading(0, LEAST), Reading(LEAST - 1, LEAST - 1)
    assert left_out.faulty(9, 10) and not left_out.faulty(10, 10) and not left_out.faulty(11, 10)
    assert again.faulty(11, 10) and not again.faulty(10, 10) and not again.faulty(9, 10)
    assert not any(small.faulty(length, 10) for length in (9, 10, 11))


def test_edits_leave_words_out_and_say_them_twice() -> None:
    words = np.repeat(np.arange(5), 2)
    ends = np.arange(1, 11) * 0.1
    samples = np.arange(SAMPLE_RATE, dtype=np.int16)
    natural = Utterance(samples, TEXT[:10].astype(np.int8), ends.astype(np.float32), words, "a b c d e", ends)
    made = {name: (phones, wave) for name, phones, wave in edited(natural, random.Random(1))}
    assert {name: (phones, len(wave)) for name, (phones, wave) in made.items()} == {
        "a word left out": (2, 12_800),
        "a word said twice": (2, 19_200),
        "two words left out": (4, 9_600),
        "two words said twice": (4, 22_400),
    }
    for _, wave in made.values():
        assert (wave[:3200] == samples[:3200]).all() and (wave[-3200:] == samples[-3200:]).all()
