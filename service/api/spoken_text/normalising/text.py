"""A text, perhaps arriving in chunks, normalised clause by clause.

Segments end at clauses at the earliest, and where a clause ends is known at the character after it, as it is for the
splitter: words that no rule can change any more pass at once, so that holding back the rest of a clause delays nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from service.api.spoken_text.alignment import Pair, spoken_of
from service.api.spoken_text.normalising.chinese import normalise_chinese
from service.api.spoken_text.normalising.english import normalise_english
from service.api.spoken_text.normalising.english_words import BEFORE_NUMBERS, CODES, DAYS, MONTHS, TABLES, TITLES, WORDS
from service.api.spoken_text.normalising.language import GERMAN_ORDINAL, NUMERALS, WORD, Language, language_of
from service.api.spoken_text.normalising.numbers import digits
from service.api.spoken_text.text_splitting import ABBREVIATIONS

PREFIXES = ("us", "au", "ca", "hk", "nz", "s", "v", "w", "www", "http", "https", *(code.lower() for code in CODES))
ENDS = re.compile(r"[。！？；，、]|\n|[.!?,;:…]['\")\]]{0,2}\s")
PLAIN = re.compile(rf"(?:[^\W\d_{NUMERALS}]|[ \"'])*")
CHANGING = tuple(word.lower() for word in (*BEFORE_NUMBERS, *TITLES, *WORDS, *MONTHS, *DAYS, *PREFIXES))
BEGINS = frozenset(word[:length] for word in CHANGING for length in range(len(word) + 1))
"""Begins of what rules may change and that is no number."""
RULES: dict[Language, Callable[[str], str]] = {
    "english": normalise_english,
    "chinese": normalise_chinese,
    "other": lambda clause: clause,
    "code": lambda clause: re.sub(r"\d+", lambda number: digits(number[0]), clause),
}
REGNAL = re.compile(TABLES.pattern(r"\b(?:{NOUNS}|{NAMES})\s(?:[IVX]|\Z)"))
"""What may begin a Roman numeral: words behind it cannot be told yet."""
SENTENCE = frozenset(".!?…。！？")
WIDE_SIGN = re.compile("[。！？：、（）％]")
CODE = re.compile(r"\s?\d{5,9}(?<!00)[.\s]{0,2}")
"""A whole text that is a number without end or comma is no amount."""
LONGEST_WAIT = 200
"""Characters at the begin of a text that wait for its language."""
LONGEST = 600
"""Characters of a clause that are looked at together."""


class TextNormaliser:
    """Joined output does not depend on how the text is cut into chunks."""

    def __init__(self) -> None:
        self._pending = ""
        """The current clause."""
        self._released = 0
        """Characters of it that have been returned."""
        self._language: Language | None = None
        """None: no clause has told it yet."""
        self._starts = False
        """The current clause is the first of a sentence, and not of the text."""

    def feed(self, text: str, *, final: bool = False) -> list[Pair]:
        """Return what is decided, as it was and in words: whole clauses, and words at the begin of the next. final: the
        text ends here, and a new one may follow."""
        self._pending += text
        pairs = self._clauses(final=final)
        if final:
            pairs.append(self._normalise(self._pending))
            self._pending, self._language, self._starts = "", None, False
        elif (plain := self._plain()) > self._released:
            words = self._pending[self._released : plain]
            pairs.append((words, words))
            self._released = plain
        return pairs

    def _clauses(self, *, final: bool) -> list[Pair]:
        """The clauses that are complete; none while their language is not known."""
        self._language = self._language or self._first_language(final=final)
        pairs: list[Pair] = []
        if self._language is None:
            return pairs
        begin = 0
        while (end := self._end(begin)) is not None:
            pairs.append(self._normalise(self._pending[begin:end]))
            begin = end
        self._pending = self._pending[begin:]
        return pairs

    def _first_language(self, *, final: bool) -> Language | None:
        """Of a text that begins with a clause of numbers alone, the language of the first clause that has one. None:
        later text will tell."""
        end = self._end(0)
        while end is not None:
            if (language := language_of(self._pending[:end], None)) is not None:
                return language
            if end > LONGEST_WAIT or WORD.search(self._pending, 0, end):
                return "english"
            end = self._end(end)
        if not final:
            return None
        if CODE.fullmatch(self._pending):
            return "code"
        return language_of(self._pending, None) or ("chinese" if WIDE_SIGN.search(self._pending) else "english")

    def _end(self, begin: int) -> int | None:
        """Where the clause that starts at begin ends; None while later text can change that."""
        pending = self._pending
        limit = begin + LONGEST
        for match in ENDS.finditer(pending, begin, limit):
            end = match.end()
            if not match[0][-1].isspace() or match[0] == "\n":
                return end
            if end == len(pending):
                return None
            if end < limit and not self._goes_on(match.start(), end, begin):
                return end
        if len(pending) < limit:
            return None
        space = pending.rfind(" ", begin, limit)
        return limit if space <= begin else space + 1

    def _goes_on(self, stop: int, end: int, begin: int) -> bool:
        """Whether the mark at stop is inside an abbreviation, a date or an entry: "Dr. Smith", "May 22, 2026",
        "am 12. März", "Code: 12"."""
        mark = self._pending[stop]
        before = self._pending[max(begin, stop - 12) : stop]
        if mark != ".":
            # A heading in capitals would hide the language of what follows.
            named = mark == ":" and (not before.isupper() or before.endswith(("PIN", "OTP")))
            return (mark == "," or named) and self._pending[end].isdigit()
        word = re.split(r"[\s(\[\"']", before)[-1].lower()
        ordinal = any(match.end() == len(before) for match in GERMAN_ORDINAL.finditer(before))
        return ordinal or (
            len(word) == 1 or word in ABBREVIATIONS or word in BEFORE_NUMBERS or bool(re.fullmatch(r"\w(\.\w)+", word))
        )

    def _plain(self) -> int:
        """How much of the current clause stays, whatever follows: its words up to a number or an abbreviation."""
        match = PLAIN.match(self._pending, 0, LONGEST)
        words = match[0] if match else ""
        complete = words.rstrip(" \"'")
        if (numeral := REGNAL.search(complete)) is not None:
            return numeral.end() - 1
        begin = max(complete.rfind(mark) for mark in " \"'") + 1
        last = complete[begin:].lower()
        return begin if last in BEGINS else len(words)

    def _normalise(self, clause: str) -> Pair:
        """The rest of a clause, as it was and in words."""
        self._language = language_of(clause, self._language) or "english"
        words = RULES[self._language](clause)
        if self._starts and words != clause and not clause.lstrip()[0].isalpha():
            # "It is. 5 came": a word in lower case would not begin a sentence.
            begin = len(words) - len(words.lstrip())
            words = words[:begin] + words[begin : begin + 1].upper() + words[begin + 1 :]
        self._starts = clause.rstrip()[-1:] in SENTENCE if clause.strip() else self._starts
        rest = clause[self._released :], words[self._released :]
        self._released = 0
        return rest


def normalise(text: str) -> str:
    """A whole text, in words. Line breaks and whatever no rule knows stay."""
    return spoken_of(TextNormaliser().feed(text, final=True))
