"""Texts for the embedded voice from a seed: a grammar of everyday English (rules.json) over the words that it is made
to say well (words.json), numbers, the answers of the embedded vision model, what people type first (first_words.json),
and strings of words, so that spelling is learned as well as sentences."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_HERE = Path(__file__).parent
_RULES, _FIRST, _WORDS = (
    json.loads((_HERE / f"{name}.json").read_text(encoding="utf-8")) for name in ("rules", "first_words", "words")
)
FIRST_WORDS, PROJECT = tuple(_FIRST.pop("phrases")), tuple(_FIRST.pop("project"))
"""What people type first into a page that speaks, and sentences of the project's own documents."""
_FIRST_RULES = tuple(_FIRST.pop("rules"))
WORDS = {kind: tuple(" ".join(lines).split()) for kind, lines in _WORDS.items()}
"""By kind."""
_MORE = {kind: tuple(" ".join(lines).split()) for kind, lines in _FIRST.items()}
"""Words that are no part of the grammar, by kind."""
FUNCTION = WORDS["FUNCTION"]
KNOWN: tuple[str, ...] = tuple(dict.fromkeys(word.lower() for words in WORDS.values() for word in words))
"""All of them in lower case, without doubles."""
_LISTS: dict[str, Sequence[str]] = {
    **WORDS,
    **_MORE,
    "PROJECT": PROJECT,
    **{kind: listed for kind, listed in _RULES.items() if kind.isupper()},
    "KNOWN": KNOWN,
    "SHAPE COLOURS": WORDS["COLOURS"][:11],
    "SEEN SHAPES": WORDS["SHAPES"][:8],
    "SMALL NUMBERS": WORDS["NUMBER WORDS"][:13],
}
SENTENCES, NUMBERS, _TIMES = (
    tuple(rule for weight, rule in _RULES[name] for _ in range(weight)) for name in ("sentences", "numbers", "times")
)
_SMALLEST = tuple(word for word in FUNCTION if len(word) <= 3)
_PLURALS = {"man": "men", "woman": "women", "child": "children", "knife": "knives", "wife": "wives", "leaf": "leaves"}


def dictionary(path: Path, *, unheard: bool = False) -> tuple[str, ...]:
    """Words of 2 to 12 plain small letters of a word list, one a line, in its order. unheard: each fortieth instead of
    the others, which the training never speaks."""
    words = path.read_text(encoding="utf-8").split()
    fit = [w for w in words if 2 <= len(w) <= 12 and w.isascii() and w.isalpha() and w.islower()]
    known = {*KNOWN, *FUNCTION, *(word.lower() for words in _MORE.values() for word in words)}
    return tuple(w for number, w in enumerate(fit) if (number % 40 == 0 and w not in known) == unheard)


@dataclass(frozen=True)
class Shares:
    """What share of the texts each kind has; the rest are sentences of the grammar."""

    known_words: float = 0.1
    other_words: float = 0.28
    numbers: float = 0.1
    echoes: float = 0.0
    first_words: float = 0.18
    long: float = 0.04


class Writer:
    """Writes texts with the numbers of one generator. other: words outside the known ones; may be empty."""

    def __init__(self, seed: int, other: Sequence[str] = ()) -> None:
        self.random = random.Random(seed)
        self.other = other

    def one(self, items: Sequence[str]) -> str:
        return self.random.choice(items)

    def maybe(self, chance: float) -> bool:
        return self.random.random() < chance

    def filled(self, rule: str) -> str:
        """A rule with its slots filled from left to right: {KIND} is a word of a list, {KIND:s} its plural, {a|b} a
        choice, {1..9} a number, {who} what the method of that name says."""
        return re.sub(r"\{([^{}]+)\}", lambda slot: self._slot(slot[1]), rule)

    def _slot(self, slot: str) -> str:
        if ".." in slot:
            first, last = slot.split("..")
            return str(self.random.randint(int(first), int(last)))
        if slot.endswith(":s"):
            return plural(self.one(_LISTS[slot[:-2]]))
        if slot in _LISTS:
            return self.one(_LISTS[slot])
        return self.one(slot.split("|")) if "|" in slot else str(getattr(self, slot)())

    def numbered(self) -> str:
        return finish(self.filled(self.one(NUMBERS)))

    def known_words(self) -> str:
        return self.word_string(KNOWN)

    def sentence(self) -> str:
        """One sentence of known words."""
        return finish(self.filled(self.one(NUMBERS if self.maybe(0.08) else SENTENCES)))

    def text(self, shares: Shares = Shares()) -> str:
        """A text to train on, now and then without its full stop."""
        text = self._text(shares)
        return text[:-1] if text[-1] == "." and self.maybe(0.15) else text

    def _text(self, shares: Shares) -> str:
        if shares.echoes and self.maybe(shares.echoes):
            return self.echo()
        if self.maybe(shares.long):
            return self.long(replace(shares, long=0.0))
        if self.maybe(shares.first_words):
            return self.first_words()
        drawn = self.random.random()
        if drawn < shares.known_words:
            return self.known_words()
        drawn -= shares.known_words
        if self.other and drawn < shares.other_words:
            return self.word_string(self.other) if self.maybe(0.5) else self.mixed_string()
        return self.numbered() if drawn - shares.other_words < shares.numbers else self.sentence()

    def first_words(self) -> str:
        """What people type first, with and without signs, also two in a row."""
        text = self.one(FIRST_WORDS) if self.maybe(0.4) else self.filled(self.one(_FIRST_RULES))
        if self.maybe(0.4):
            text = text.rstrip(".!?") + self.one(("", "", ".", "!", "?"))
        return f"{finish(text)} {self.first_words()}" if self.maybe(0.15) else text

    def alphabet(self) -> str:
        """Some of it, from any letter on."""
        first = 0 if self.maybe(0.4) else self.random.randrange(23)
        end = 26 if self.maybe(0.5) else self.random.randint(first + 3, 26)
        return self.one((", ", " ")).join(_MORE["LETTERS"][first:end])

    def spelled(self) -> str:
        """A word by the names of its letters."""
        word = self.one(KNOWN + _MORE["FIRST NAMES"] + _MORE["COMMON"])[:9]
        letters = self.one((", ", " ")).join(word.upper())
        return self.one((letters, f"{word}, {letters}", f"{word} is spelled {letters}", f"my name is {letters}"))

    def long(self, shares: Shares, least: int = 130) -> str:
        """Texts in a row, as many as a segment of the server holds."""
        text, length = finish(self._text(shares)), self.random.randint(least, 400)
        while len(longer := f"{text} {finish(self._text(shares))}") <= length:
            text = longer
        return text

    def word_string(self, source: Sequence[str]) -> str:
        """Words that have nothing to do with each other, now and then with a comma."""
        count = 1 + int(9 * self.random.random() ** 1.3)
        words = [self.one(source) for _ in range(count)]
        for index in range(count - 1):
            if self.maybe(0.06):
                words[index] += ","
        return finish(" ".join(words), self.one(".....?!"))

    def mixed_string(self) -> str:
        """Other words among the small words that hold sentences together."""
        parts: list[str] = []
        for _ in range(self.random.randint(2, 6)):
            if self.maybe(0.7):
                parts.append(self.one(FUNCTION))
            parts.append(self.one(self.other))
        return finish(" ".join(parts))

    def echo(self) -> str:
        """Where a voice loses its place: alike words in a row, known words with one or two of the smallest between
        them, or a sentence with one of its words, or one like it, put in a second time."""
        if self.maybe(0.25):
            words = [self.one(KNOWN)]
            for _ in range(self.random.randint(1, 4)):
                words += [self.one(_SMALLEST) for _ in range(self.random.randint(1, 2))]
                words.append(self.one(KNOWN))
            return finish(" ".join(words))
        if self.maybe(0.4):
            words = self.alike(self.one(KNOWN), self.random.randint(1, 4))
            if self.maybe(0.5):
                joint = self.one(("and", "or", "by", "after", "to", "with"))
                words = [part for word in words for part in (word, joint)][:-1]
            return finish(" ".join(words))
        words = self.sentence().split(" ")
        for _ in range(self.random.randint(1, 2)):
            source = self.random.randrange(len(words))
            word = words[source].strip(".,?!").lower()
            put_in = word if self.maybe(0.6) else self.alike(word, 1)[1]
            words.insert(min(len(words) - 1, max(0, source + self.random.randint(-1, 3))), put_in)
        return finish(" ".join(words))

    def alike(self, word: str, count: int) -> list[str]:
        """The word, and known ones that begin or end as it does; without one the word again."""
        found = [word]
        for _ in range(count):
            like = _BEGINNINGS.get(word[:2], ()) if self.maybe(0.6) else _ENDINGS.get(word[-2:], ())
            found.append(self.one(like or (word,)))
            word = self.one(found)
        return found

    def description(self) -> str:
        """Of a voice, as a request may have it in front of its text."""
        return self.filled(self.one(_RULES["descriptions"]))

    def thing(self) -> str:
        """A noun with its article."""
        noun = self.one(WORDS[self.one(("THINGS", "PEOPLE", "ANIMALS", "PLACES"))])
        described = self.filled("{ADJECTIVES} ") + noun if self.maybe(0.45) else noun
        article = self.one(("the", "the", "the", "a", "my", "your", "his", "her", "our", "their", "this", "that"))
        return f"{article_of(described) if article == 'a' else article} {described}"

    def who(self) -> str:
        drawn = self.random.random()
        if drawn < 0.25:
            return self.one(WORDS["NAMES"])
        if drawn < 0.5:
            return self.one(("he", "she", "it", "they", "we", "you", "I", "everybody", "nobody", "somebody"))
        return self.filled("{the|the|my|our|his|her} {PEOPLE}")

    def place(self) -> str:
        return self.filled("{PREPOSITIONS} {the|the|a|our|this} {PLACES}")

    def time(self) -> str:
        return self.one([self.filled(rule) for rule in _TIMES])

    def deed(self) -> str:
        """What somebody did, behind the subject."""
        drawn = self.random.random()
        if drawn < 0.45:
            return self.filled("{MOTIONS} {place}" if drawn < 0.35 else "{MOTIONS} {ADVERBS}")
        return self.filled("{PAST} {thing}") + (f" {self.place()}" if self.maybe(0.3) else "")

    def shape(self) -> str:
        colour, shape = self.one(_LISTS["SHAPE COLOURS"]), self.one(_LISTS["SEEN SHAPES"])
        size = ("small", "large", "big", "tiny")
        described = f"{self.one(size)} {colour} {shape}" if self.maybe(0.5) else f"{colour} {shape}"
        return f"{article_of(described)} {described}"


def article_of(word: str) -> str:
    return "an" if word[0] in "aeio" or word.startswith(("ugly", "uncle")) else "a"


def plural(noun: str) -> str:
    if noun in _PLURALS:
        return _PLURALS[noun]
    if noun.endswith(("s", "x", "sh", "ch")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


def finish(text: str, end: str = ".") -> str:
    """A capital letter in front and a full stop behind, unless the text ends in a sign already."""
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else end)


def _grouped(part: slice) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for word in dict.fromkeys((*KNOWN, *FUNCTION)):
        groups.setdefault(word[part], []).append(word)
    return groups


_BEGINNINGS, _ENDINGS = _grouped(slice(0, 2)), _grouped(slice(-2, None))
