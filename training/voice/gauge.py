"""Measures of generated speech against natural speech of the same texts, through a recogniser.

Whether speech says its text from the beginning to the end: the phones of the text are followed through what the
recogniser's network hears, one after the other, with an option to jump to any other place at a cost. Which words a
listener would understand does not matter: a word that sounds like another one is followed through all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.voice.flite import PHONES
from training.voice.recogniser import Phones, distance, plain

JUMP_COST = 10.0
"""In nats: of 4 to 32 what was tried on natural speech, as it is and with words left out or said twice."""
_PRIOR = 0.3
"""How much of a phone's frequency is taken away."""
_PAUSE = PHONES.index("pau")
_PAUSE_COST = 1.0
"""Of each frame of silence within the text, in nats."""
_JUMP = 2
"""Beside 1, a step from the state before, and 0, another frame in the same one."""


LEAST = 3
"""Phones of a part that counts: most words have more."""


@dataclass(frozen=True)
class Reading:
    """skipped, repeated: phones of the longest part of the text that was left out, and that was said again."""

    skipped: int
    repeated: int

    def faulty(self, length: int, natural: int) -> bool:
        """Whether a part is left out and the speech shorter for it, or said again and longer. Speech of natural length
        in which the path jumps is a word that sounds like another one, which is an error of its characters alone.
        length, natural: of the speech and of natural speech of the text, in any unit."""
        return (self.skipped >= LEAST and length < natural) or (self.repeated >= LEAST and length > natural)


def follow(heard: np.ndarray, text: np.ndarray, known: Phones) -> Reading:
    """heard: log-probabilities [frames, phones]; text [n]: its phones, whose pauses do not matter."""
    phones = np.concatenate(([_PAUSE], text[text != _PAUSE], [_PAUSE]))
    # A phone has as many states as frames that it lasts at least; in the last one it may stay.
    phone_of = np.repeat(np.arange(len(phones)), known.least[phones])
    firsts = np.flatnonzero(np.diff(phone_of, prepend=-1))
    lasts = np.append(firsts[1:], len(phone_of)) - 1
    logs = heard - _PRIOR * np.log(known.frequency + 1e-4)
    emitted = logs[:, phones[phone_of]]
    emitted[:, lasts] = np.maximum(emitted[:, lasts], logs[:, [_PAUSE]] - _PAUSE_COST)
    may_stay = np.full(len(phone_of), -np.inf)
    may_stay[lasts] = 0.0
    best = np.full(len(phone_of), -np.inf)
    best[0] = emitted[0, 0]
    ways = np.zeros(emitted.shape, np.int8)
    ends = np.zeros(len(emitted), np.int64)
    """The phone from whose end a jump at that frame comes."""
    for moment in range(1, len(emitted)):
        ways[moment, 1:] = best[:-1] > best[1:] + may_stay[1:]
        reached = np.maximum(best + may_stay, np.concatenate(([-np.inf], best[:-1])))
        ends[moment] = best[lasts].argmax()
        jumped = best[lasts[ends[moment]]] - JUMP_COST
        far = firsts[reached[firsts] < jumped]
        reached[far], ways[moment, far] = jumped, _JUMP
        best = reached + emitted[moment]
    said = _said(best, phone_of, lasts, ways, ends)[1:-1]
    return Reading(_longest(said == 0), _longest(said > 1))


def _said(best: np.ndarray, phone_of: np.ndarray, lasts: np.ndarray, ways: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """How often each phone was gone through. From the end of the text, or from where it was left if that costs less."""
    left = int(best[lasts].argmax())
    state = int(lasts[left] if best[lasts[left]] - JUMP_COST > best[lasts[-1]] else lasts[-1])
    said = np.zeros(len(lasts), np.int64)
    said[phone_of[state]] = 1
    for moment in range(len(ways) - 1, 0, -1):
        here, jumped = phone_of[state], ways[moment, state] == _JUMP
        state = int(lasts[ends[moment]]) if jumped else state - int(ways[moment, state])
        said[phone_of[state]] += jumped or phone_of[state] != here
    return said


def _longest(marked: np.ndarray) -> int:
    """Most in a row."""
    ends = np.flatnonzero(np.diff(marked.astype(np.int8), prepend=0, append=0))
    return int(np.diff(ends)[::2].max(initial=0))


def one_each(phones: np.ndarray) -> np.ndarray:
    """Phones frame by frame -> each once."""
    return phones[np.flatnonzero(np.diff(phones.astype(int), prepend=-1))]


def wrong_phones(heard: np.ndarray, text: np.ndarray) -> float:
    """Share of the text's phones, as the network hears them without knowing words or the text."""
    said, wanted = (phones[phones != _PAUSE].tolist() for phones in (one_each(heard.argmax(1)), text))
    return distance(wanted, said) / len(wanted)


@dataclass(frozen=True)
class Heard:
    """What was heard of speech: words, how its phones are followed, and the share of them that is wrong."""

    words: str
    reading: Reading
    phones: float


@dataclass(frozen=True)
class Take:
    """One sentence: what should be heard, what was heard of it as generated, patches, and whether it ended by itself;
    the same of natural speech."""

    spoken: str
    heard: Heard
    patches: int
    stopped: bool
    natural_heard: Heard
    natural_patches: int

    @property
    def repeats_or_skips(self) -> bool:
        return self.heard.reading.faulty(self.patches, self.natural_patches)


def score(takes: list[Take], natural_words: float = 0.05) -> dict[str, float | bool]:
    """Shares of characters and words, not percents; lengths are those of generated over natural speech; passed: the
    gates of the model's card, with at most so many words of natural speech wrong."""

    def errors(heard: list[str], words: bool) -> float:
        wanted = [plain(take.spoken) for take in takes]
        pairs = [(w.split(), h.split()) if words else (w, h) for w, h in zip(wanted, heard, strict=True)]
        return sum(distance(w, h) for w, h in pairs) / sum(len(w) for w, _ in pairs)

    generated, natural = [take.heard.words for take in takes], [take.natural_heard.words for take in takes]
    ratios = sorted(take.patches / take.natural_patches for take in takes)
    count = len(takes)
    found = {
        "sentences": count,
        "characters": errors(generated, False),
        "natural_characters": errors(natural, False),
        "words": errors(generated, True),
        "natural_words": errors(natural, True),
        "phones": sum(take.heard.phones for take in takes) / count,
        "natural_phones": sum(take.natural_heard.phones for take in takes) / count,
        "faultless": sum(plain(take.spoken) == take.heard.words for take in takes) / count,
        "stop_failures": sum(not take.stopped for take in takes) / count,
        "repeats_and_skips": sum(take.repeats_or_skips for take in takes) / count,
        "length": sum(take.patches for take in takes) / sum(take.natural_patches for take in takes),
        "shortest": ratios[0],
        "longest": ratios[-1],
    }
    passed = (
        found["natural_words"] <= natural_words
        and found["characters"] <= found["natural_characters"] + 0.03
        and found["stop_failures"] < 0.005
        and found["repeats_and_skips"] < 0.01
        and 0.85 <= found["length"] <= 1.15
    )
    return {**{name: round(value, 4) for name, value in found.items()}, "passed": passed}
