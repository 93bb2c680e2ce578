"""Pronunciations of words that the model would read differently: the server's list, and that of a request."""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path

import yaml

from models.interfaces.errors import InputError
from service.api.spoken_text.markup import STRAIGHT_QUOTES
from service.api.spoken_text.text_splitting import is_wide
from service.settings.reading import TextLoader

MAX_FILE_ENTRIES = 5000
MAX_WORD, MAX_SPOKEN = 64, 200
"""Characters at most of a word (or of several with spaces between them), and of what is said for it."""
MAX_GROWTH = 65_536
"""Characters by which a text may become longer; further words are not replaced."""


class Lexicon:
    """Whole words, each with what is said for it. A word without capitals matches with any capitals, a word with
    capitals only itself. InputError for a word that could never be found."""

    def __init__(self, entries: Mapping[str, str]) -> None:
        for word in entries:
            if word != word.strip() or not any(map(str.isalnum, word)):
                raise InputError("lexicon", "a word needs a letter or digit, and no space at its ends")
        # Quotes of a text are straight by now, unless it keeps its markup.
        entries = {word.translate(STRAIGHT_QUOTES): spoken for word, spoken in entries.items()} | dict(entries)
        self._any_case = {word: spoken for word, spoken in entries.items() if word == fold(word)}
        self._as_written = {word: spoken for word, spoken in entries.items() if word != fold(word)}
        self._keys = sorted({fold(word) for word in entries})
        self._lengths: dict[str, list[int]] = {}
        for length, first in sorted({(len(key), key[0]) for key in self._keys}, reverse=True):
            self._lengths.setdefault(first, []).append(length)

    @property
    def longest(self) -> int:
        return max(map(len, self._keys), default=0)

    @property
    def first_characters(self) -> frozenset[str]:
        return frozenset(self._lengths)

    def find(self, text: str, folded: str, start: int) -> tuple[int, str] | None:
        """(end, what is said) of the longest word that begins at start."""
        for length in self._lengths.get(folded[start], ()):
            end = start + length
            if end > len(text) or (end < len(text) and _joined(text[end - 1], text[end])):
                continue
            spoken = self._as_written.get(text[start:end]) or self._any_case.get(folded[start:end])
            if spoken is not None:
                return end, spoken
        return None

    def continues(self, folded: str) -> bool:
        """Whether a word begins with, or is, this text."""
        index = bisect_left(self._keys, folded)
        return index < len(self._keys) and self._keys[index].startswith(folded)


class LexiconFilter:
    """Replace words by what is said for them, in a text that arrives in chunks: the output does not depend on how it
    is cut. If several lexicons have a word, the first one counts."""

    def __init__(self, *lexicons: Lexicon) -> None:
        self.full = False
        """Whether words were not replaced because the text would have become too long."""
        self._lexicons = lexicons
        self._longest = max(lexicon.longest for lexicon in lexicons)
        self._firsts = frozenset[str]().union(*(lexicon.first_characters for lexicon in lexicons))
        self._pending = ""
        self._before = " "
        """The character in front of the pending text."""
        self._growth = 0

    def feed(self, text: str, *, final: bool = False) -> str:
        """Return what later chunks cannot change. final: the text ends here, and a new one may follow."""
        text = self._before + self._pending + text
        folded = fold(text)
        said = ""
        kept = at = 1
        while at < len(text):
            if folded[at] in self._firsts and not _joined(text[at - 1], text[at]):
                may_go_on = not final and len(text) - at <= self._longest
                if may_go_on and any(lexicon.continues(folded[at:]) for lexicon in self._lexicons):
                    break
                matches = (lexicon.find(text, folded, at) for lexicon in self._lexicons)
                found = max(filter(None, matches), key=itemgetter(0), default=None)
                if found is not None and self._grow(found[0] - at, len(found[1])):
                    end, spoken = found
                    said += text[kept:at] + spoken
                    kept = at = end
                    continue
            at += 1
        said += text[kept:at]
        self._before, self._pending = " " if final else text[at - 1], text[at:]
        return said

    def _grow(self, before: int, after: int) -> bool:
        """Whether the text may still become this much longer."""
        growth = self._growth + after - before
        self.full = self.full or growth > MAX_GROWTH
        self._growth = growth if growth <= MAX_GROWTH else self._growth
        return growth <= MAX_GROWTH


def fold(text: str) -> str:
    """The text in lower case, character by character, so that places stay the same."""
    if text.isascii():
        return text.lower()
    return "".join(lower if len(lower := character.lower()) == 1 else character for character in text)


def load_lexicon(path: Path) -> Lexicon:
    """Read a lexicon from a YAML (or JSON) file, `word: what is said`. ValueError names the entry that does
    not fit."""
    try:
        entries = yaml.load(path.read_text("utf-8"), TextLoader)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: not a YAML file ({type(error).__name__})") from error
    if not isinstance(entries, dict) or not entries:
        raise ValueError(f"{path}: expected lines of `word: what is said`")
    if len(entries) > MAX_FILE_ENTRIES:
        raise ValueError(f"{path}: {len(entries)} words given, at most {MAX_FILE_ENTRIES} allowed")
    for word, spoken in entries.items():
        if not isinstance(word, str) or not isinstance(spoken, str):
            raise ValueError(f"{path}: {word!r}: word and what is said must be texts")
        if not 0 < len(word) <= MAX_WORD or not 0 < len(spoken) <= MAX_SPOKEN:
            limits = f"1 to {MAX_WORD} characters, what is said for it 1 to {MAX_SPOKEN}"
            raise ValueError(f"{path}: {word[:MAX_WORD]!r}: a word has {limits}")
    try:
        return Lexicon(entries)
    except InputError as error:
        raise ValueError(f"{path}: {error}") from error


def _joined(left: str, right: str) -> bool:
    """Whether no word ends between the two characters. Han, kana and hangul are written without spaces."""
    if unicodedata.category(right).startswith("M"):
        return True
    return _of_word(left) and _of_word(right)


def _of_word(character: str) -> bool:
    return character == "_" or (character.isalnum() and not is_wide(character))
