"""The recogniser that judges the embedded voice; no Flite is needed."""

from __future__ import annotations

import numpy as np
import pytest

from training.voice.flite import PHONES
from training.voice.gates import Reading, follow
from training.voice.recogniser import Decoder, Entry, Language, Phones, Weighing

pytestmark = pytest.mark.slow
PLAIN = Weighing(kinds=0.0)
ONES = np.ones(len(PHONES))
EVEN = Phones(ONES / len(PHONES), ONES.astype(np.int64), 3.0 * ONES)
"""Phones that are as frequent and as long as each other."""


def language(ways: dict[str, list[str]], kinds: dict[str, str] | None = None) -> Language:
    entries = {
        word: Entry([way.split(" ") for way in said], 2, (kinds or {}).get(word, word)) for word, said in ways.items()
    }
    return Language(entries, {})


def logs_of(names: list[str], frames: int = 2) -> np.ndarray:
    said = [PHONES.index(phone) for name in names for phone in [name] * frames]
    logs = np.full((len(said), len(PHONES)), -5.0)
    logs[np.arange(len(said)), said] = -0.1
    return logs


FOXES = language(
    {"red": ["r eh d"], "fox": ["f aa k"], "fog": ["f aa g"], "a": ["ax", "ey"], "read": ["r iy d", "r eh d"]}
)


def test_words_are_found_in_phones() -> None:
    """Each phone for two frames, one frame of it misheard; pauses are nobody's."""
    logs = logs_of(["pau", "ey", "r", "eh", "d", "pau", "f", "aa", "k", "pau"])
    logs[4, PHONES.index("r")], logs[4, PHONES.index("f")] = -5.0, -0.1
    decoder = Decoder(FOXES, EVEN, PLAIN)
    assert decoder(logs) in ("a red fox", "a read fox")
    assert decoder(logs[-2:]) == ""
    assert decoder(logs[:0]) == ""


COUNT = len(PHONES)
HEARD = Phones(np.full(COUNT, 1.0 / COUNT), np.full(COUNT, 2), np.full(COUNT, 4.0))
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
    assert follow(heard(said), TEXT, HEARD) == reading
