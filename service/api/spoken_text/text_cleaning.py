"""Text as a speech model gets it: without control characters, with single spaces."""

from __future__ import annotations

import re

INVISIBLE = "[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069]"
"""Soft hyphens, spaces without width and marks of direction. Joiners (U+200C, U+200D) shape words of some scripts."""
UNSPEAKABLE = re.compile(f"[\x00-\x08\x0e-\x1f\x7f\ufeff\ud800-\udfff]|{INVISIBLE}")
WHITESPACE = re.compile(r"\s+")


def clean_text(text: str) -> str:
    """Text as the model gets it: runs of whitespace become one space, control and invisible characters are removed.

    A space at either end stays, as in the reference implementation.
    """
    return WHITESPACE.sub(" ", UNSPEAKABLE.sub("", text))


def speakable(text: str) -> bool:
    """Whether the text has a letter or digit."""
    return any(character.isalnum() for character in text)
