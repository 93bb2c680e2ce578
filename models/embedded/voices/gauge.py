"""Measures of generated speech against natural speech of the same texts, through a recogniser."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

from models.embedded.voices.decoder import plain
from models.embedded.voices.reading import Reading
from models.embedded.voices.recogniser import distance
from models.embedded.voices.words import KNOWN


@dataclass(frozen=True)
class Take:
    """One sentence: what should be heard, what was heard of it as generated, how its phones are followed, patches, and
    whether it ended by itself; the same of natural speech."""

    spoken: str
    heard: str
    reading: Reading
    patches: int
    stopped: bool
    natural_heard: str
    natural_patches: int

    @property
    def repeats_or_skips(self) -> bool:
        return self.reading.faulty(self.patches, self.natural_patches)


@dataclass(frozen=True)
class Scores:
    """Shares of characters and words, not percents; lengths are those of generated over natural speech."""

    sentences: int
    characters: float
    natural_characters: float
    words: float
    natural_words: float
    faultless: float
    stop_failures: float
    repeats_and_skips: float
    length: float
    shortest: float
    longest: float

    def passed(self) -> bool:
        """The gates of the model's card."""
        return (
            self.natural_words <= 0.05
            and self.characters <= self.natural_characters + 0.03
            and self.stop_failures < 0.005
            and self.repeats_and_skips < 0.01
            and 0.85 <= self.length <= 1.15
        )

    def as_json(self) -> dict[str, float | bool]:
        return {**{name: round(value, 4) for name, value in asdict(self).items()}, "passed": self.passed()}


def score(takes: list[Take]) -> Scores:
    def errors(heard: list[str], words: bool) -> float:
        wanted = [plain(take.spoken) for take in takes]
        pairs = [(w.split(), h.split()) if words else (w, h) for w, h in zip(wanted, heard, strict=True)]
        return sum(distance(w, h) for w, h in pairs) / sum(len(w) for w, _ in pairs)

    generated, natural = [take.heard for take in takes], [take.natural_heard for take in takes]
    ratios = sorted(take.patches / take.natural_patches for take in takes)
    count = len(takes)
    return Scores(
        sentences=count,
        characters=errors(generated, False),
        natural_characters=errors(natural, False),
        words=errors(generated, True),
        natural_words=errors(natural, True),
        faultless=sum(plain(take.spoken) == take.heard for take in takes) / count,
        stop_failures=sum(not take.stopped for take in takes) / count,
        repeats_and_skips=sum(take.repeats_or_skips for take in takes) / count,
        length=sum(take.patches for take in takes) / sum(take.natural_patches for take in takes),
        shortest=ratios[0],
        longest=ratios[-1],
    )


def exchanged(text: str, drawn: random.Random) -> str:
    """The text with another known word in the place of one of its words, whose stops stay."""
    words = text.split(" ")
    place = drawn.randrange(len(words))
    said = words[place].strip(".,:?!")
    other = drawn.choice([word for word in KNOWN if word != said.lower()])
    words[place] = words[place].replace(said, other.capitalize() if said[0].isupper() else other)
    return " ".join(words)


def nearer(heard: str, said: str, written: str) -> bool:
    """Whether fewer words must be changed to get what was said than to get what was written."""
    words = heard.split()
    return distance(said.split(), words) < distance(written.split(), words)
