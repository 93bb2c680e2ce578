"""What names voices may have, and when two names are the same."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

LONGEST_NAME = 64
"""Characters of a voice's name, before it is normalised; ids are shorter."""
NAME = re.compile(r"\w(?:[\w .'-]{0,62}[\w.'])?")
INVISIBLE = re.compile("[\u034f\u17b4\u17b5\u180b-\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef]")
"""Marks that nobody sees: with them, two names would look the same."""


def is_name(name: str) -> bool:
    """Whether a voice may have this name, which is in the composed form (NFC). The vowel signs and tones of letters
    outside ASCII, as Hindi and Thai have them, belong to their letters."""
    letters = "".join("x" if _is_sign(mark) and not before.isascii() else mark for before, mark in pairwise(f" {name}"))
    return NAME.fullmatch(letters) is not None


def _is_sign(character: str) -> bool:
    return unicodedata.category(character) in ("Mn", "Mc") and not INVISIBLE.match(character)


def name_key(name: str) -> str:
    """Equal for names that differ only in case or in compatible characters (ligatures, full-width letters, long s)."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
