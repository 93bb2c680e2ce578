"""Sentences for the embedded voice from a seed: a grammar of everyday English, numbers, the answers of the embedded
vision model, and strings of words, so that spelling is learned as well as sentences."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from models.embedded.voices import words as w

Rule = Callable[["Writer"], str]


@dataclass(frozen=True)
class Shares:
    """What share of the texts each kind has; the rest are sentences of the grammar."""

    known_words: float = 0.15
    other_words: float = 0.2
    numbers: float = 0.14
    echoes: float = 0.0


class Writer:
    """Writes texts with the numbers of one generator. other: words outside the known ones; may be empty."""

    def __init__(self, seed: int, other: Sequence[str] = ()) -> None:
        self.random = random.Random(seed)
        self.other = other

    def one(self, items: Sequence[str]) -> str:
        return self.random.choice(items)

    def maybe(self, chance: float) -> bool:
        return self.random.random() < chance

    def numbered(self) -> str:
        return finish(self.random.choice(_NUMBERED)(self))

    def known_words(self) -> str:
        return self.word_string(w.KNOWN)

    def sentence(self) -> str:
        """One sentence of known words."""
        rules = _NUMBERED if self.maybe(0.08) else _RULES
        return finish(self.random.choice(rules)(self))

    def text(self, shares: Shares = Shares()) -> str:
        """A text to train on, now and then without its full stop."""
        text = self._text(shares)
        return text[:-1] if text[-1] == "." and self.maybe(0.15) else text

    def _text(self, shares: Shares) -> str:
        if shares.echoes and self.maybe(shares.echoes):
            return self.echo()
        drawn = self.random.random()
        if drawn < shares.known_words:
            return self.word_string(w.KNOWN)
        drawn -= shares.known_words
        if self.other and drawn < shares.other_words:
            return self.word_string(self.other) if self.maybe(0.5) else self.mixed_string()
        drawn -= shares.other_words
        if drawn < shares.numbers:
            return self.numbered()
        return self.sentence()

    def word_string(self, source: Sequence[str], longest: int = 9) -> str:
        """Words that have nothing to do with each other, now and then with a comma."""
        count = 1 + int(longest * self.random.random() ** 1.3)
        words = [self.one(source) for _ in range(count)]
        for index in range(count - 1):
            if self.maybe(0.06):
                words[index] += ","
        return finish(" ".join(words), self.one(".....?!"))

    def mixed_string(self) -> str:
        """Other words among the small words that hold sentences together."""
        count = self.random.randint(2, 6)
        parts: list[str] = []
        for _ in range(count):
            if self.maybe(0.7):
                parts.append(self.one(w.FUNCTION))
            parts.append(self.one(self.other))
        return finish(" ".join(parts))

    def echo(self) -> str:
        """Where a voice loses its place: alike words in a row, known words with one or two of the smallest between
        them, or a sentence with one of its words, or one like it, put in a second time."""
        if self.maybe(0.25):
            words = [self.one(w.KNOWN)]
            for _ in range(self.random.randint(1, 4)):
                words += [self.one(_SMALLEST) for _ in range(self.random.randint(1, 2))]
                words.append(self.one(w.KNOWN))
            return finish(" ".join(words))
        if self.maybe(0.4):
            words = self.alike(self.one(w.KNOWN), self.random.randint(1, 4))
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
        person = self.one(("woman", "woman", "lady", "girl", "person", "speaker", "man", "voice"))
        kind = self.one(("young", "old", "calm", "happy", "friendly", "sad", "kind", "serious", "warm", "clear"))
        manner = self.one(
            ("slowly", "softly", "quickly", "clearly", "with a low voice", "with a soft voice", "cheerful")
        )
        return self.one(
            (
                f"a {person}",
                f"a {kind} {person}",
                f"a {kind} {person}, speaking {manner}",
                f"{kind} {person}",
                f"{kind}, {manner}",
                f"speak {manner}",
                person,
                kind,
            )
        )

    def thing(self) -> str:
        """A noun with its article."""
        noun = self.one(self.one((w.THINGS, w.PEOPLE, w.ANIMALS, w.PLACES)))  # type: ignore[arg-type]
        described = f"{self.one(w.ADJECTIVES)} {noun}" if self.maybe(0.45) else noun
        article = self.one(("the", "the", "the", "a", "my", "your", "his", "her", "our", "their", "this", "that"))
        return f"{article_of(described) if article == 'a' else article} {described}"

    def who(self) -> str:
        drawn = self.random.random()
        if drawn < 0.25:
            return self.one(w.NAMES)
        if drawn < 0.5:
            return self.one(("he", "she", "it", "they", "we", "you", "I", "everybody", "nobody", "somebody"))
        return f"{self.one(('the', 'the', 'my', 'our', 'his', 'her'))} {self.one(w.PEOPLE)}"

    def place(self) -> str:
        return f"{self.one(w.PREPOSITIONS)} {self.one(('the', 'the', 'a', 'our', 'this'))} {self.one(w.PLACES)}"

    def time(self) -> str:
        return self.one(
            (
                f"in the {self.one(('morning', 'afternoon', 'evening', 'summer', 'winter', 'spring', 'autumn'))}",
                f"on {self.one(w.DAYS)}",
                f"in {self.one(w.MONTHS)}",
                f"last {self.one(w.TIMES)}",
                f"every {self.one(w.TIMES)}",
                "yesterday",
                "today",
                "at night",
                "again and again",
                "a long time ago",
            )
        )

    def deed(self) -> str:
        """What somebody did, behind the subject."""
        drawn = self.random.random()
        if drawn < 0.35:
            return f"{self.one(w.MOTIONS)} {self.place()}"
        if drawn < 0.45:
            return f"{self.one(w.MOTIONS)} {self.one(w.ADVERBS)}"
        return f"{self.one(w.PAST)} {self.thing()}" + (f" {self.place()}" if self.maybe(0.3) else "")

    def shape(self) -> str:
        colour, shape = self.one(w.COLOURS[:11]), self.one(w.SHAPES[:8])
        described = (
            f"{self.one(('small', 'large', 'big', 'tiny'))} {colour} {shape}"
            if self.maybe(0.5)
            else (f"{colour} {shape}")
        )
        return f"{article_of(described)} {described}"

    def count(self) -> str:
        return self.one(w.NUMBER_WORDS[:13])


def article_of(word: str) -> str:
    return "an" if word[0] in "aeio" or word.startswith(("ugly", "uncle")) else "a"


def _grouped(part: slice) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for word in dict.fromkeys((*w.KNOWN, *w.FUNCTION)):
        groups.setdefault(word[part], []).append(word)
    return groups


_SMALLEST = tuple(word for word in w.FUNCTION if len(word) <= 3)
_BEGINNINGS, _ENDINGS = _grouped(slice(0, 2)), _grouped(slice(-2, None))
_PLURALS = {"man": "men", "woman": "women", "child": "children", "knife": "knives", "wife": "wives", "leaf": "leaves"}


def plural(noun: str) -> str:
    if noun in _PLURALS:
        return _PLURALS[noun]
    if noun.endswith(("s", "x", "sh", "ch")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


def finish(text: str, end: str = ".") -> str:
    """A capital letter in front and a full stop behind, unless the text ends in a sign already."""
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else end)


_SIDES = ("left of", "right of", "above", "below", "next to", "in front of")
_CORNERS = ("at the top left", "at the top right", "at the bottom left", "at the bottom right", "in the middle")

_RULES: tuple[Rule, ...] = (
    *(lambda s: f"{s.who()} {s.deed()}",) * 6,
    *(lambda s: f"{s.who()} {s.deed()} {s.time()}",) * 4,
    lambda s: f"{s.time()} {s.who()} {s.deed()}",
    lambda s: f"{s.who()} {s.deed()}, and {s.who()} {s.deed()}",
    lambda s: f"{s.who()} {s.deed()} because {s.who()} {s.deed()}",
    lambda s: f"when {s.who()} {s.deed()}, {s.who()} {s.deed()}",
    lambda s: (
        f"{s.who()} {s.one(('will', 'can', 'must', 'should', 'could', 'would', 'may'))} {s.one(w.VERBS)} {s.thing()}"
    ),
    lambda s: f"{s.thing()} is {s.one(w.ADJECTIVES)}",
    lambda s: f"{s.thing()} was {s.one(w.ADVERBS)} {s.one(w.ADJECTIVES)} and {s.one(w.ADJECTIVES)}",
    lambda s: f"there is {s.thing()} {s.place()}",
    lambda s: f"{s.thing()} and {s.thing()} are {s.place()}",
    lambda s: f"did {s.who()} {s.one(w.VERBS)} {s.thing()}?",
    lambda s: f"where is {s.thing()}?",
    lambda s: f"why did {s.who()} {s.one(w.VERBS)} {s.thing()} {s.time()}?",
    lambda s: f"what is {s.place()}?",
    lambda s: f"please {s.one(w.VERBS)} {s.thing()}",
    lambda s: f"do not {s.one(w.VERBS)} {s.thing()} {s.time()}!",
    lambda s: f"I think that {s.who()} {s.deed()}",
    lambda s: f"{s.one(w.NAMES)} said that {s.thing()} is {s.one(w.ADJECTIVES)}",
    lambda s: f"we traveled from {s.one(w.CITIES)} to {s.one(w.CITIES)} {s.time()}",
    lambda s: f"the weather in {s.one(w.CITIES)} is {s.one(w.ADJECTIVES)} {s.time()}",
    lambda s: (
        f"{s.one(w.NAMES)} and {s.one(w.NAMES)} are {s.one(w.ADJECTIVES)} {s.one(('friends', 'people', 'neighbors'))}"
    ),
    lambda s: s.one(
        (
            "yes",
            "no",
            "hello",
            "thank you",
            "good morning",
            "good night",
            "how are you today?",
            "I do not know",
            "hello, how can I help you?",
            "thank you very much",
            "you are welcome",
            "I am a small model, and I can speak",
            "nice to meet you",
            "see you tomorrow",
            "that is a good question",
            "I am sorry, I cannot see that",
        )
    ),
    lambda s: f"{s.shape()} {s.one(_SIDES)} {s.shape()}",
    lambda s: f"there is {s.shape()} {s.one(_CORNERS)}",
    lambda s: f"{s.shape()} {s.one(_CORNERS)}, {s.shape()} {s.one(_SIDES)} {s.shape()}",
    lambda s: f"the picture shows {s.shape()}, {s.shape()} and {s.shape()}",
    lambda s: f"there are {s.count()} {s.one(w.COLOURS[:11])} {plural(s.one(w.SHAPES[:8]))}",
    lambda s: f"the {s.one(('largest', 'smallest'))} shape is {s.shape()}",
    lambda s: f"I see {s.count()} shapes: {s.shape()} and {s.shape()}",
    lambda s: f"the word is {s.one(w.KNOWN)}",
    lambda s: f"the text says {s.one(w.KNOWN)} {s.one(w.KNOWN)}",
    lambda s: f"{s.shape()} moves to the {s.one(('left', 'right', 'top', 'bottom'))}",
    lambda s: f"{s.one(('yes', 'no'))}, there {s.one(('is', 'is not'))} {s.shape()} in the picture",
    lambda s: "I only know shapes, colors, numbers and short words",
    lambda s: f"the highest bar is {s.one(w.COLOURS[:11])}",
)
_NUMBERED: tuple[Rule, ...] = (
    lambda s: f"there are {s.random.randint(0, 20)} {plural(s.one(w.SHAPES[:8]))}",
    lambda s: f"{s.who()} {s.one(w.PAST)} {s.random.randint(2, 999)} {plural(s.one(w.THINGS))}",
    lambda s: f"it costs {s.random.randint(1, 9999)} dollars",
    lambda s: f"the number is {s.random.randint(0, 9999)}",
    lambda s: f"{s.random.randint(1, 99)} plus {s.random.randint(1, 99)} is {s.random.randint(2, 198)}",
    lambda s: f"{s.who()} waited {s.random.randint(2, 90)} {s.one(w.UNITS)}",
    lambda s: f"the train leaves at {s.random.randint(1, 12)} {s.one(('thirty', 'fifteen', 'forty five', 'oclock'))}",
    lambda s: f"{s.random.randint(1, 100)} percent of the {plural(s.one(w.PEOPLE))} {s.deed()}",
    lambda s: f"the red bar shows {s.random.randint(0, 100)}, the blue bar shows {s.random.randint(0, 100)}",
)
