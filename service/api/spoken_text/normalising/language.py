"""The language of a clause, as far as its numbers are concerned."""

from __future__ import annotations

import re
from typing import Literal

from service.api.spoken_text.normalising.english_words import UNITS, WORDS
from service.api.spoken_text.normalising.tables import Tables

Language = Literal["english", "chinese", "other", "code"]
"""other: numbers are left to the model, which speaks many languages. code: read digit by digit."""

ADDRESS = re.compile(r"(?:https?://|www\.)\S{1,2000}|(?<![\w.+-])[\w.+-]{1,64}@[\w.-]{1,255}")
"""Its parts are no words of a language."""
SYMBOLS = frozenset(unit for unit in UNITS if unit.isalpha() and not unit.isascii())
"""µg, kΩ: letters of another script in every language."""
CHINESE_SIGNS = re.compile("[，；￥]")
HAN = re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
KANA_OR_HANGUL = re.compile("[\u3040-\u30ff\u1100-\u11ff\uac00-\ud7af]")
NUMERALS = "²³¹¼-¾⁰-₟⅐-↏"
"""Part of a class of characters: superscripts and fractions, which \\w takes for letters."""
WORD = re.compile(rf"(?<![^\W_])[^\W\d_{NUMERALS}]+")
"""A unit right behind its number is no word."""
NEUTRAL = re.compile(
    rf"(?<![\w.])(?:{'|'.join(map(re.escape, WORDS))})(?!\w)|\bo['’]clock\b|\b(?:El|Los|Las|Costa)(?= [A-Z])"
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
    english = sum(word in ENGLISH for word in words)
    if GERMAN_ORDINAL.search(clause):
        return "other"
    foreign = [word for word in words if word in FOREIGN or not word.isascii()]
    if len(set(foreign)) == 1 and foreign[0] in AMBIGUOUS:
        foreign = []
    if english != len(foreign):
        return "english" if english > len(foreign) else "other"
    return before


def _shouted(words: list[str]) -> bool:
    """Whether nothing but units is in lower case, so that words in capitals need not be abbreviations: UN JOUR DE 24 H,
    IL EST 5 H. Few short ones are: OS 11."""
    if any(len(word) > 1 and not word.isupper() and word not in UNITS for word in words):
        return False
    foreign = {word for word in words if word.lower() in FOREIGN}
    return len(foreign) > 1 or any(len(word) >= LONG_WORD for word in words)
