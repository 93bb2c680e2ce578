"""Words from phones: the likeliest sequence of known words (Viterbi) under a weak model of language.

The model of language knows kinds of words, not words: of a noun it knows that a verb may follow, and how frequent each
noun is. So it never prefers a word of a kind to another of as frequent use, and a wrong word that was said is heard.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from models.embedded.voices import words as w
from models.embedded.voices.flite import PHONES, Flite

START = ""
"""The kind in front of the first word."""
_LISTS = (
    w.COLOURS, w.SHAPES, w.PLACES, w.THINGS, w.PEOPLE, w.ANIMALS, w.NAMES, w.CITIES, w.ADJECTIVES, w.PAST, w.VERBS,
    w.MOTIONS, w.ADVERBS, w.TIMES, w.DAYS, w.MONTHS, w.UNITS, w.NUMBER_WORDS,
)  # fmt: skip
_MEMBERS = tuple(frozenset(word.lower() for word in words) for words in _LISTS)


def plain(text: str) -> str:
    """Small letters, apostrophes and single blanks: what is compared."""
    text = re.sub(r"[^a-z' ]+", " ", text.lower().replace(" '", "'"))
    return re.sub(r"\s+", " ", text).strip()


def kind_of(word: str) -> str:
    """The numbers of the lists that hold it; a small word of FUNCTION, or of no list, is its own kind."""
    lists = [str(number) for number, members in enumerate(_MEMBERS) if word in members]
    return "+".join(lists) if lists and word not in w.FUNCTION else word


@dataclass(frozen=True)
class Entry:
    """A word's phones in each way that it is said, and how often it was met."""

    ways: list[list[str]]
    count: int
    kind: str


@dataclass(frozen=True)
class Language:
    """words: what is known of each; follows: how often a kind came after another, or after START."""

    words: dict[str, Entry]
    follows: dict[str, dict[str, int]]

    def save(self, path: Path) -> None:
        words = {word: asdict(entry) for word, entry in self.words.items()}
        path.write_text(json.dumps({"words": words, "follows": self.follows}) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Language:
        read = json.loads(path.read_text(encoding="utf-8"))
        return Language({word: Entry(**entry) for word, entry in read["words"].items()}, read["follows"])


def learn_language(speaker: Flite, texts: list[str]) -> Language:
    """The words of the texts as the front end of a voice says them."""
    ways: dict[str, set[tuple[str, ...]]] = {}
    counts: Counter[str] = Counter()
    kinds: dict[str, str] = {}
    follows: dict[str, Counter[str]] = {}
    for text in texts:
        said, words, before = speaker.speak(text), text.split(" "), START
        for number in range(len(words)):
            phones = tuple(PHONES[phone] for phone in said.phones[said.words == number])
            word = plain(words[number])
            if not phones or not word or any(sign.isdigit() for sign in words[number]):
                before = START
                continue
            ways.setdefault(word, set()).add(phones)
            counts[word] += 1
            kind = kinds.setdefault(word, kind_of(word))
            follows.setdefault(before, Counter())[kind] += 1
            before = kind
    known_words = {word: Entry(sorted(map(list, ways[word])), counts[word], kinds[word]) for word in sorted(ways)}
    return Language(known_words, {kind: dict(sorted(after.items())) for kind, after in sorted(follows.items())})


@dataclass(frozen=True)
class Weighing:
    """prior: how much of a phone's frequency is taken away; word: cost of each word; rarity: of the information that
    the model of language gives; kinds: its share that looks at the word before, the rest does not."""

    prior: float = 0.3
    word: float = 2.0
    rarity: float = 0.8
    kinds: float = 0.8


WEIGHING = Weighing()


class Decoder:
    """Phones -> words. prior [phones]: their frequencies.

    A word's states are its phones and a pause that may follow. Words are sorted by their kinds, and a word is entered
    from the best end of each kind."""

    def __init__(self, language: Language, prior: np.ndarray, weighing: Weighing) -> None:
        entries = sorted(language.words.items(), key=lambda item: (item[1].kind, item[0]))
        ways = [("", ["pau"]), *((word, way) for word, entry in entries for way in entry.ways)]
        kinds = [START, *sorted({entry.kind for _, entry in entries})]
        self._words = [word for word, _ in ways]
        self._kind = np.array([0, *(kinds.index(language.words[word].kind) for word in self._words[1:])])
        self._phones = np.array([PHONES.index(phone) for _, way in ways for phone in (*way, "pau")])
        lengths = np.array([len(way) + 1 for _, way in ways])
        self._pauses = lengths.cumsum() - 1
        self._begins = self._pauses - lengths + 1
        self._firsts = np.searchsorted(self._kind, np.arange(len(kinds)))
        self._prior = weighing.prior * np.log(prior + 1e-4)
        self._costs, self._follows = _costs(language, self._words, kinds, self._kind, weighing)

    def __call__(self, logs: np.ndarray) -> str:
        """logs [frames, phones] -> words joined by blanks."""
        heard = (logs - self._prior)[:, self._phones]
        count = heard.shape[1]
        best, link = np.full(count, -np.inf), np.full(count, -1)
        # Of each moment and kind: the way that ended there and where it was entered from.
        ways, links = np.empty((2, len(heard), len(self._firsts)), np.int64)
        ended, place = np.full(len(self._firsts), -np.inf), np.full(len(self._firsts), -1)
        ended[0] = 0.0
        for moment, frame in enumerate(heard):
            step, step_link = np.concatenate(([-np.inf], best[:-1])), np.concatenate(([-1], link[:-1]))
            entry = ended[:, None] - self._follows
            before = entry.argmax(0)
            step[self._begins] = entry[before, np.arange(len(before))][self._kind] - self._costs
            step_link[self._begins] = place[before][self._kind]
            moved = step > best
            best, link = np.where(moved, step, best) + frame, np.where(moved, step_link, link)
            ended, way, paused = self._ends(best)
            ways[moment], links[moment] = way, link[self._pauses[way] - ~paused]
            place = moment * len(ended) + np.arange(len(ended))
        at, words = int(place[ended.argmax()]) if len(heard) else -1, []
        while at >= 0:
            words.append(self._words[ways.flat[at]])
            at = int(links.flat[at])
        return " ".join(word for word in reversed(words) if word)

    def _ends(self, best: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each kind the best score of a word's end, its way, and whether the pause behind it had begun."""
        last, pause = best[self._pauses - 1], best[self._pauses]
        either = np.maximum(last, pause)
        scores = np.maximum.reduceat(either, self._firsts)
        # The first way of a kind that has its best score.
        hits = np.flatnonzero(either == scores[self._kind])
        way = hits[np.searchsorted(self._kind[hits], np.arange(len(scores)))]
        return scores, way, pause[way] >= last[way]


def _costs(
    language: Language, words: list[str], kinds: list[str], kind: np.ndarray, weighing: Weighing
) -> tuple[np.ndarray, np.ndarray]:
    """Cost of each way within its kind, and of each kind behind another [before, after]."""
    counts = np.array([1.0, *(language.words[word].count for word in words[1:])])
    spoken = np.zeros(len(kinds))
    for entry in language.words.values():
        spoken[kinds.index(entry.kind)] += entry.count
    within = np.log(counts / np.maximum(spoken[kind], 1.0))
    within[0] = 0.0
    alone = spoken / spoken.sum()
    rows = np.array([[language.follows.get(before, {}).get(after, 0) for after in kinds] for before in kinds], float)
    pairs = rows / np.maximum(rows.sum(1, keepdims=True), 1.0)
    share = np.where(rows.sum(1, keepdims=True) > 0, weighing.kinds, 0.0)
    with np.errstate(divide="ignore"):
        follows = -weighing.rarity * np.log(share * pairs + (1.0 - share) * alone)
    # Silence in front of the first word costs nothing.
    follows[0, 0] = 0.0
    costs = weighing.word - weighing.rarity * within
    costs[0] = 0.0
    return costs, follows


def homophones(lexicon: dict[str, Entry]) -> dict[str, str]:
    """Word -> the first one of the alphabet among those that sound like it, or like one that does."""
    name = {word: word for word in lexicon}
    changed = True
    while changed:
        first: dict[tuple[str, ...], str] = {}
        for word, entry in lexicon.items():
            for way in map(tuple, entry.ways):
                first[way] = min(first.get(way, name[word]), name[word])
        new = {word: min(first[tuple(way)] for way in entry.ways) for word, entry in lexicon.items()}
        name, changed = new, new != name
    return name
