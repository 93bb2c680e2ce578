"""Text as a speech model gets it: without control characters, with single spaces."""

from __future__ import annotations

import re

UNSPEAKABLE = re.compile("[\x00-\x08\x0e-\x1f\x7f\ufeff\ud800-\udfff]")
WHITESPACE = re.compile(r"\s+")


def clean_text(text: str) -> str:
    """Text as the model gets it: runs of whitespace become one space, control characters are removed.

    A space at either end stays, as in the reference implementation.
    """
    return WHITESPACE.sub(" ", UNSPEAKABLE.sub("", text))


def speakable(text: str) -> bool:
    """Whether the text has a letter or digit."""
    return any(character.isalnum() for character in text)
