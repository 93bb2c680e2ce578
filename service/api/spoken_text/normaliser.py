"""Numbers, dates, times, money, units and abbreviations of a text -> words, clause by clause, before it is spoken.

The text may arrive in chunks. Segments end at clauses at the earliest, so that holding back the rest of a clause delays
nothing; words that no rule can change any more pass at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from service.api.spoken_text import english
from service.api.spoken_text.chinese import normalise_chinese
from service.api.spoken_text.tables import Tables
from service.api.spoken_text.text_splitting import ABBREVIATIONS

Language = Literal["english", "chinese", "other", "code"]
"""other: numbers are left to the model, which speaks many languages. code: read digit by digit."""

ADDRESS = re.compile(r"(?:https?://|www\.)\S{1,2000}|(?<![\w.+-])[\w.+-]{1,64}@[\w.-]{1,255}")
"""Its parts are no words of a language."""
SYMBOLS = frozenset(unit for unit in english.UNITS if unit.isalpha() and not unit.isascii())
"""µg, kΩ: letters of another script in every language."""
CHINESE_SIGNS = re.compile("[，；￥]")
HAN = re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
KANA_OR_HANGUL = re.compile("[\u3040-\u30ff\u1100-\u11ff\uac00-\ud7af]")
NUMERALS = "²³¹¼-¾⁰-₟⅐-↏"
"""Part of a class of characters: superscripts and fractions, which \\w takes for letters."""
WORD = re.compile(rf"(?<![^\W_])[^\W\d_{NUMERALS}]+")
"""A unit right behind its number is no word."""
NEUTRAL = re.compile(
    rf"(?<![\w.])(?:{'|'.join(map(re.escape, english.WORDS))})(?!\w)|\bo['’]clock\b|\b(?:El|Los|Las|Costa)(?= [A-Z])"
    r"|(?<!\w)(?<!\w['’])AI(?!\w)|\b(?:EST|Est)\.|(?<=\d )(?:AU|CE)(?!\w| \d)"
    r"|(?:(?<=[AaPp][Mm] )|(?<=[AaPp]\.[Mm]\. ))(?:EST|ET|IST)(?!\w)"
)
"""English that looks foreign: e.g., o'clock, Los Angeles, AI (but not J'AI), Est. 1995, 40 AU, 1066 CE, 8 PM EST."""

_WORDS = Tables("languages.words").sets("WORD SETS")
ENGLISH = _WORDS.pop("ENGLISH")
FOREIGN = frozenset().union(*_WORDS.values())
AMBIGUOUS = frozenset({"met", "van", "pour", "er"})
"""Foreign words that are English ones, too."""
ABBREVIATION = re.compile(r"(?<!\w)(?<!\w['’])(?:DOS|IL|MIT|OS|SE|UN)(?!\w)")
"""Foreign words that are abbreviations where they stand out in capitals."""
GERMAN_ORDINAL = re.compile(
    r"(?<![\w'’])(?:(?<!\bI )(?<!\d )am|vom|zum|beim|im|der|dem|seit) \d{1,2}(?=\. |\.?$)", re.I
)
"""Am 12. März, der 1. Zug: not I am 12."""
LONG_WORD = 4
"""Letters. With a word of so many in capitals, a clause without small letters may be a foreign heading."""


def language_of(clause: str, before: Language | None) -> Language | None:
    """before: the language of the clauses before this one, which holds where this one says nothing about its own."""
    if KANA_OR_HANGUL.search(clause):
        return "other"
    if HAN.search(clause) or (before is None and CHINESE_SIGNS.search(clause)):
        return "chinese"
    if "@" in clause or "://" in clause or "www." in clause:
        clause = ADDRESS.sub(" ", clause)
    clause = NEUTRAL.sub(" ", clause)
    found = WORD.findall(clause)
    if not _shouted(found):
        found = WORD.findall(ABBREVIATION.sub(" ", clause))
    # A capital or a Greek letter by itself is a name or a variable: E = mc², α = 0.05.
    words = [
        word.lower()
        for word in found
        if (len(word) > 1 or (word.islower() and not "α" <= word <= "ω") or word in "IA") and word not in SYMBOLS
    ]
    known = sum(word in ENGLISH for word in words)
    if GERMAN_ORDINAL.search(clause):
        return "other"
    foreign = [word for word in words if word in FOREIGN or not word.isascii()]
    if len(set(foreign)) == 1 and foreign[0] in AMBIGUOUS:
        foreign = []
    if known != len(foreign):
        return "english" if known > len(foreign) else "other"
    return before


def _shouted(words: list[str]) -> bool:
    """Whether nothing but units is in lower case, so that words in capitals need not be abbreviations: UN JOUR DE 24 H,
    IL EST 5 H. Few short ones are: OS 11."""
    if any(len(word) > 1 and not word.isupper() and word not in english.UNITS for word in words):
        return False
    foreign = {word for word in words if word.lower() in FOREIGN}
    return len(foreign) > 1 or any(len(word) >= LONG_WORD for word in words)


PREFIXES = ("us", "au", "ca", "hk", "nz", "s", "v", "w", "www", "http", "https", *map(str.lower, english.CODES))
ENDS = re.compile(r"[。！？；，、]|\n|[.!?,;:…]['\")\]]{0,2}\s")
PLAIN = re.compile(rf"(?:[^\W\d_{NUMERALS}]|[ \"'])*")
_CHANGED = (english.BEFORE_NUMBERS, english.TITLES, english.WORDS, english.MONTHS, english.DAYS, PREFIXES)
CHANGING = tuple(word.lower() for words in _CHANGED for word in words)
BEGINS = frozenset(word[:length] for word in CHANGING for length in range(len(word) + 1))
"""Begins of what rules may change and that is no number."""
RULES: dict[Language, Callable[[str], str]] = {
    "english": english.normalise_english,
    "chinese": normalise_chinese,
    "other": lambda clause: clause,
    "code": lambda clause: re.sub(r"\d+", lambda number: english.digits(number[0]), clause),
}
REGNAL = re.compile(english.TABLES.pattern(r"\b(?:{NOUNS}|{NAMES})\s(?:[IVX]|\Z)"))
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

    def feed(self, text: str, *, final: bool = False) -> str:
        """Return what is decided: whole clauses, and words at the begin of the next. final: the text ends here, and a
        new one may follow."""
        self._pending += text
        said = self._clauses(final=final)
        if final:
            said += self._normalise(self._pending)
            self._pending, self._language, self._starts = "", None, False
        elif (plain := self._plain()) > self._released:
            said += self._pending[self._released : plain]
            self._released = plain
        return said

    def _clauses(self, *, final: bool) -> str:
        """The clauses that are complete; none while their language is not known."""
        self._language = self._language or self._first_language(final=final)
        if self._language is None:
            return ""
        said, begin = "", 0
        while (end := self._end(begin)) is not None:
            said += self._normalise(self._pending[begin:end])
            begin = end
        self._pending = self._pending[begin:]
        return said

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
        shortened = len(word) == 1 or word in ABBREVIATIONS or word in english.BEFORE_NUMBERS
        return ordinal or shortened or bool(re.fullmatch(r"\w(\.\w)+", word))

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

    def _normalise(self, clause: str) -> str:
        """The rest of a clause, in words."""
        self._language = language_of(clause, self._language) or "english"
        words = RULES[self._language](clause)
        if self._starts and words != clause and not clause.lstrip()[0].isalpha():
            # "It is. 5 came": a word in lower case would not begin a sentence.
            begin = len(words) - len(words.lstrip())
            words = words[:begin] + words[begin : begin + 1].upper() + words[begin + 1 :]
        self._starts = clause.rstrip()[-1:] in SENTENCE if clause.strip() else self._starts
        rest, self._released = words[self._released :], 0
        return rest


def normalise(text: str) -> str:
    """A whole text, in words. Line breaks and whatever no rule knows stay."""
    return TextNormaliser().feed(text, final=True)
