"""Wordings of the questions: grammars, expanded. One in seven wordings is held out of training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from random import Random
from zlib import crc32

from models.embedded.world.grammars import AFTER, BEFORE, GRAMMARS, JSON_WISHES, KEY_WISHES, KEY_WORDS

_HELD_OUT = 7
_CONTRACTED = re.compile(r"\b(what|where|who|how) is\b")


@cache
def wordings(task: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All wordings of a task: those of training, and those held out."""
    every = sorted({re.sub(" +", " ", text).strip() for grammar in GRAMMARS[task] for text in _expanded(grammar)})
    return _parted(every)


@cache
def json_wordings() -> tuple[tuple[str, ...], tuple[str, ...]]:
    return _parted(sorted({text for grammar in JSON_WISHES for text in _expanded(grammar)}))


@cache
def key_wordings() -> tuple[tuple[str, ...], tuple[str, ...]]:
    return _parted(sorted({text for grammar in KEY_WISHES for text in _expanded(grammar)}))


def named_keys(random: Random, keys: Sequence[str]) -> str:
    """'the keys "name" and "color"', "fields name, color", ..."""
    word = random.choice(KEY_WORDS)
    names = [f'"{key}"' for key in keys] if random.random() < 0.5 else list(keys)
    last = random.choice((", ", " and "))
    listed = ", ".join(names[:-1]) + last + names[-1] if len(names) > 1 else names[0]
    return f"{random.choice(('the ', 'the ', ''))}{word if len(names) == 1 else word + 's'} {listed}"


def _parted(every: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    held_out = tuple(text for text in every if not crc32(text.encode()) % _HELD_OUT)
    return tuple(text for text in every if crc32(text.encode()) % _HELD_OUT), held_out


def ask(
    random: Random, task: str, *, held_out: bool, json: bool = False, keys: Sequence[str] = (), **slots: str
) -> str:
    """A question of the task in one of its wordings, perhaps with a word before or after it. json: it ends with a wish
    for that, which names `keys` if there are any."""
    text = random.choice(wordings(task)[held_out]).format(**slots)
    if not held_out and random.random() < 0.15:
        text = random.choice(BEFORE) + text
    elif not held_out and random.random() < 0.08:
        text += random.choice(AFTER)
    if random.random() < 0.15:
        text = _CONTRACTED.sub(r"\1's", text)
    if random.random() < 0.75:
        text = text[0].upper() + text[1:]
    asks = task not in ("hello", "thanks")
    ending = random.random()
    text += ("?" if asks else random.choice("!.")) if ending < 0.85 else "." if ending < 0.9 else ""
    if json:
        wish = random.choice((key_wordings() if keys else json_wordings())[held_out])
        if keys:
            wish = wish.format(keys=named_keys(random, keys))
        if random.random() < 0.7:
            wish = wish[0].upper() + wish[1:]
        if random.random() < 0.25:
            return f"{wish}: {text}"
        text += ("" if text[-1] in "?.!" else ".") + " " + wish + random.choice((".", ".", ""))
    return text


def _expanded(grammar: str) -> list[str]:
    """Every text of a grammar; the innermost brackets first."""
    match = re.search(r"\(([^()\[\]]*)\)|\[([^()\[\]]*)\]", grammar)
    if not match:
        return [grammar]
    options = match[1].split("|") if match[1] is not None else ["", *match[2].split("|")]
    return [
        text for option in options for text in _expanded(grammar[: match.start()] + option + grammar[match.end() :])
    ]
