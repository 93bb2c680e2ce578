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
"""The kind in front of the first word and behind the last one."""
_LEAST, _HASTY = 3, 0.02
"""Most frames that a phone has to last, and the share of a phone's occurrences that may be shorter."""
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
    """words: what is known of each; follows: how often a kind came after another, or after START; START comes after
    the last one of a text."""

    words: dict[str, Entry]
    follows: dict[str, dict[str, int]]

    def save(self, path: Path) -> None:
        words = {word: asdict(entry) for word, entry in self.words.items()}
        path.write_text(json.dumps({"words": words, "follows": self.follows}) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Language:
        read = json.loads(path.read_text(encoding="utf-8"))
        return Language({word: Entry(**entry) for word, entry in read["words"].items()}, read["follows"])


def learn_language(speaker: Flite, texts: list[str], sentences: list[str]) -> Language:
    """texts: read by the front end of a voice, which tells how words are said and how frequent they are. sentences:
    only counted, for what follows what; words that the texts do not have part them."""
    ways: dict[str, set[tuple[str, ...]]] = {}
    counts: Counter[str] = Counter()
    kinds: dict[str, str] = {}
    for text in texts:
        said, words = speaker.speak(text), text.split(" ")
        for number in range(len(words)):
            phones = tuple(PHONES[phone] for phone in said.phones[said.words == number])
            word = plain(words[number])
            if not phones or not word or any(sign.isdigit() for sign in words[number]):
                continue
            ways.setdefault(word, set()).add(phones)
            counts[word] += 1
            kinds.setdefault(word, kind_of(word))
    known_words = {word: Entry(sorted(map(list, ways[word])), counts[word], kinds[word]) for word in sorted(ways)}
    return Language(known_words, learn_order(kinds, sentences))


def learn_order(kinds: dict[str, str], sentences: list[str]) -> dict[str, dict[str, int]]:
    """kinds: of each known word -> Language.follows."""
    follows: dict[str, Counter[str]] = {}
    for sentence in sentences:
        before = START
        for written in sentence.split(" "):
            # A number in digits is said in words that nobody has counted here.
            kind = START if any(sign.isdigit() for sign in written) else kinds.get(plain(written), START)
            if kind != START:
                follows.setdefault(before, Counter())[kind] += 1
            before = kind
        if before != START:
            follows.setdefault(before, Counter())[START] += 1
    return {kind: dict(sorted(after.items())) for kind, after in sorted(follows.items())}


@dataclass(frozen=True)
class Weighing:
    """prior: how much of a phone's frequency is taken away; word: cost of each word; rarity: of the information that
    the model of language gives; kinds: its share that looks at the word before, the rest does not; lengths: of the
    information that the phones' lengths give."""

    prior: float = 0.3
    word: float = 2.0
    rarity: float = 0.8
    kinds: float = 0.8
    lengths: float = 0.5


@dataclass(frozen=True, eq=False)
class Phones:
    """What is known of the phones: frequency [phones] of each among frames; least [phones]: frames that nearly all of
    them last; mean [phones]: frames."""

    frequency: np.ndarray
    least: np.ndarray
    mean: np.ndarray


def learn_phones(sounds: np.ndarray) -> Phones:
    """sounds [frames]: phones of speech, one utterance after the other."""
    count = len(PHONES)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(sounds)) + 1))
    lengths, which = np.diff(np.concatenate((starts, [len(sounds)]))), sounds[starts]
    runs = np.maximum(np.bincount(which, minlength=count), 1)
    mean = np.maximum(np.bincount(which, lengths, count) / runs, 1.0)
    least = np.ones(count, np.int64)
    for frames in range(2, _LEAST + 1):
        shorter = np.bincount(which, lengths < frames, count) / runs
        least[(shorter < _HASTY) & (mean > frames)] = frames
    least[PHONES.index("pau")] = 1
    return Phones(np.bincount(sounds, minlength=count) / len(sounds), least, mean)


class Decoder:
    """Phones -> words.

    A word's states are its phones, each as often as the frames that it lasts at least, and a pause that may follow.
    Words are sorted by their kinds, and a word is entered from the best end of each kind."""

    def __init__(self, language: Language, phones: Phones, weighing: Weighing) -> None:
        entries = sorted(language.words.items(), key=lambda item: (item[1].kind, item[0]))
        ways = [("", ["pau"]), *((word, way) for word, entry in entries for way in entry.ways)]
        kinds = [START, *sorted({entry.kind for _, entry in entries})]
        self._words = [word for word, _ in ways]
        self._kind = np.array([0, *(kinds.index(language.words[word].kind) for word in self._words[1:])])
        numbers = [[PHONES.index(phone) for phone in (*way, "pau")] for _, way in ways]
        self._phones = np.array([phone for way in numbers for phone in way for _ in range(phones.least[phone])])
        lengths = np.array([int(phones.least[way].sum()) for way in numbers])
        self._pauses = lengths.cumsum() - 1
        self._begins = self._pauses - lengths + 1
        self._firsts = np.searchsorted(self._kind, np.arange(len(kinds)))
        # Of a phone's states the last one may be stayed in: a length above the least is a matter of chance each frame.
        last = np.concatenate([np.arange(phones.least[phone], 0, -1) == 1 for way in numbers for phone in way])
        more = phones.mean[self._phones] - phones.least[self._phones] + 0.5
        spoken = weighing.lengths * (self._phones != PHONES.index("pau"))
        self._stay = np.where(last, spoken * np.log(more / (more + 1.0)), -np.inf)
        self._leave = np.where(last, spoken * np.log(1.0 / (more + 1.0)), 0.0)
        self._prior = weighing.prior * np.log(phones.frequency + 1e-4)
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
            left = best + self._leave
            step, step_link = np.concatenate(([-np.inf], left[:-1])), np.concatenate(([-1], link[:-1]))
            best = best + self._stay
            entry = ended[:, None] - self._follows
            before = entry.argmax(0)
            step[self._begins] = entry[before, np.arange(len(before))][self._kind] - self._costs
            step_link[self._begins] = place[before][self._kind]
            moved = step > best
            best, link = np.where(moved, step, best) + frame, np.where(moved, step_link, link)
            ended, way, paused = self._ends(best)
            ways[moment], links[moment] = way, link[self._pauses[way] - ~paused]
            place = moment * len(ended) + np.arange(len(ended))
        at, words = int(place[(ended - self._follows[:, 0]).argmax()]) if len(heard) else -1, []
        while at >= 0:
            words.append(self._words[ways.flat[at]])
            at = int(links.flat[at])
        return " ".join(word for word in reversed(words) if word)

    def _ends(self, best: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each kind the best score of a word's end, its way, and whether the pause behind it had begun."""
        last, pause = best[self._pauses - 1] + self._leave[self._pauses - 1], best[self._pauses]
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
    # Of words alone nobody knows the end: every tenth is the last.
    spoken[0] = 0.1 * spoken.sum()
    alone = spoken / spoken.sum()
    rows = np.array([[language.follows.get(before, {}).get(after, 0) for after in kinds] for before in kinds], float)
    pairs = rows / np.maximum(rows.sum(1, keepdims=True), 1.0)
    share = np.where(rows.sum(1, keepdims=True) > 0, weighing.kinds, 0.0)
    with np.errstate(divide="ignore"):
        follows = -weighing.rarity * np.log(share * pairs + (1.0 - share) * alone)
    # Silence in front of the first word, or nothing but silence, costs nothing.
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
