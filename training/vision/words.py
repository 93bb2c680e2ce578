"""Words that are printed in pictures, names for the parts of charts, things that the world does not hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from zlib import crc32

_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def listed(name: str) -> tuple[str, ...]:
    """The words of a list in words.json."""
    return tuple(" ".join(_DATA[name]).split())


def parted(words: Sequence[str], one_in: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words of training, and those held out."""
    held_out = {word for word in words if not crc32(word.encode()) % one_in}
    return tuple(w for w in words if w not in held_out), tuple(w for w in words if w in held_out)


_SAME_IN_BOTH_CASES = set("cosuvwxzp")
SEEN_WORDS, UNSEEN_WORDS = parted([w for w in listed("signs") if not set(w) <= _SAME_IN_BOTH_CASES], 8)
# "ring" is a shape, "sign" what questions call printed text.
SEEN_THINGS, UNSEEN_THINGS = parted([w for w in listed("things") if w not in ("ring", "sign")], 6)
PLACES = listed("places")
CHART_LABELS = tuple(tuple(labels.split()) for labels in _DATA["chart labels"])
CHART_TITLES = tuple(_DATA["chart titles"])
JSON_KEYS = {key: tuple(others.split()) for key, others in _DATA["json keys"].items()}
"""By usual key the others that mean the same: a request's schema may demand any of them."""

# Without O, I, l and with them 0 and 1 only among digits: in many fonts they look alike.
_ALPHABETS = ("ABCDEFGHJKLMNPQRSTUVWXYZ23456789", "abcdefghijkmnpqrstuvwxyz23456789", "0123456789")


def random_string(random: Random) -> str:
    alphabet = random.choices(_ALPHABETS, (0.45, 0.35, 0.2))[0]
    return "".join(random.choices(alphabet, k=random.randint(3, 8)))


def styled(random: Random, word: str) -> str:
    return random.choice((word.upper(), word.lower(), word.capitalize()))


def number_text(random: Random) -> str:
    """A price, time, date, percentage or plain number."""
    return (
        lambda: f"{random.choice('$€£')}{random.randint(0, 99)}.{random.randint(0, 99):02}",
        lambda: f"{random.randint(0, 23)}:{random.randint(0, 59):02}",
        lambda: f"{random.randint(1, 31)}.{random.randint(1, 12)}.{random.randint(2000, 2039)}",
        lambda: f"{random.randint(1, 100)}%",
        lambda: f"{random.randint(1, 999)},{random.randint(0, 999):03}",
        lambda: str(random.randint(0, 10 ** random.randint(1, 6))),
    )[random.randrange(6)]()


LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZabdefghjkmnqrty"


def short_text(random: Random) -> str:
    """A letter, or a number of one to three digits. Letters that are alike in both cases are large."""
    if random.random() < 0.4:
        return random.choice(LETTERS)
    return str(random.randint(0, 10 ** random.randint(1, 3) - 1))


def made_up_word(random: Random) -> str:
    word = ""
    for _ in range(random.randint(1, 3)):
        word += random.choice("bcdfghjklmnprstvwyz") + random.choice("aeiou")
        word += random.choice("lmnrstkpd") if random.random() < 0.4 else ""
    return word
