"""Wordings of the questions: the grammars of wordings.json and, as people also ask, of natural.json, expanded. One in
seven wordings is held out of training. Words that only natural.json has are no tokens, but spelled.

In a grammar (a|b) is a choice, [a] may be left out, {slot} is filled in later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random

from training.vision.words import JSON_KEYS, parted

GRAMMARS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
QUESTIONS: dict[str, list[str]] = GRAMMARS["questions"]
"""By task."""
NATURAL = json.loads(Path(__file__).with_name("natural.json").read_text(encoding="utf-8"))
SPOKEN: dict[str, list[str]] = NATURAL["questions"]
"""More wordings by task, and those of tasks that have no others."""
KEY_WORDS = ("key", "field")
_HELD_OUT = 7
_CONTRACTED = re.compile(r"\b(what|where|who|how) is\b")
_OTHER_KEYS_SHARE, _SPOKEN_SHARE, _SYNONYM_SHARE = 0.35, 0.4, 0.12
_ALONE = ("answer", "result", "response")
_SENTENCES = ("description", "caption", "sentence")
KEYS = tuple(sorted({*_ALONE, *_SENTENCES, *JSON_KEYS, *(name for names in JSON_KEYS.values() for name in names)}))
"""All keys of answers in JSON."""


@cache
def wordings(task: str, *, spoken: bool = False) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All wordings of a task: those of training, and those held out."""
    grammars = (SPOKEN if spoken else QUESTIONS)[task]
    texts = {re.sub(" +", " ", text).strip() for grammar in grammars for text in _expanded(grammar)}
    return parted(sorted(texts), _HELD_OUT)


@cache
def wishes(kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """As `wordings`, of the wishes for "json" or for "json with keys"."""
    return parted(sorted({text for grammar in GRAMMARS[kind] for text in _expanded(grammar)}), _HELD_OUT)


def _expanded(grammar: str) -> list[str]:
    """Every text of a grammar; the innermost brackets first."""
    match = re.search(r"\(([^()\[\]]*)\)|\[([^()\[\]]*)\]", grammar)
    if not match:
        return [grammar]
    options = match[1].split("|") if match[1] is not None else ["", *match[2].split("|")]
    before, behind = grammar[: match.start()], grammar[match.end() :]
    return [text for option in options for text in _expanded(before + option + behind)]


def ask(
    random: Random, task: str, slots: Mapping[str, str], *, held_out: bool, json: bool = False, keys: Sequence[str] = ()
) -> str:
    """A question of the task in one of its wordings, perhaps with a word before or after it. json: it ends with a wish
    for that, which names `keys` if there are any."""
    spoken = task not in QUESTIONS or (task in SPOKEN and not held_out and random.random() < _SPOKEN_SHARE)
    text = random.choice(wordings(task, spoken=spoken)[held_out]).format(**slots)
    if not held_out and random.random() < _SYNONYM_SHARE:
        text = _with_synonym(random, text)
    if not held_out and random.random() < 0.15:
        text = random.choice(GRAMMARS["before"]) + text
    elif not held_out and random.random() < 0.08:
        text += random.choice(GRAMMARS["after"])
    if random.random() < 0.15:
        text = _CONTRACTED.sub(r"\1's", text)
    if random.random() < 0.75:
        text = text[0].upper() + text[1:]
    asks = task not in ("hello", "thanks")
    ending = random.random() * (1.15 if spoken else 1)
    text += ("?" if asks else random.choice("!.")) if ending < 0.85 else "." if ending < 0.9 else ""
    if json:
        wish = random.choice(wishes("json with keys" if keys else "json")[held_out])
        if keys:
            wish = wish.format(keys=_named(random, keys))
        if not keys and random.random() < 0.2:
            return text.rstrip("?.!") + random.choice((" as JSON", " in JSON"))
        if random.random() < 0.7:
            wish = wish[0].upper() + wish[1:]
        if task == "overview" and random.random() < 0.6:
            return wish
        if random.random() < 0.25:
            return f"{wish}: {text}"
        text += ("" if text[-1] in "?.!" else ".") + " " + wish + random.choice((".", ".", ""))
    return text


def word(random: Random, table: str, name: str) -> str:
    """A wording of `name` from a table of natural.json."""
    return random.choice(NATURAL[table][name].split("|"))


def _with_synonym(random: Random, text: str) -> str:
    """`text` with one of its words by another name, in the plural and with the article where it was."""
    found = [name for name in NATURAL["synonyms"] if re.search(rf"\b{name}(e?s)?\b", text)]
    if not found:
        return text
    name = random.choice(found)
    other = word(random, "synonyms", name)

    def renamed(match: re.Match[str]) -> str:
        article = match[1] and ("an " if other[0] in "aeiou" else "a ")
        return f"{article or ''}{other}{(match[2] and ('es' if other[-1] in 'sx' else 's')) or ''}"

    return re.sub(rf"\b(an? )?{name}(e?s)?\b", renamed, text)


def _named(random: Random, keys: Sequence[str]) -> str:
    """'the keys "name" and "color"', "fields name, color", ..."""
    word = random.choice(KEY_WORDS)
    names = [f'"{key}"' for key in keys] if random.random() < 0.5 else list(keys)
    last = random.choice((", ", " and "))
    listed = ", ".join(names[:-1]) + last + names[-1] if len(names) > 1 else names[0]
    return f"{random.choice(('the ', 'the ', ''))}{word if len(names) == 1 else word + 's'} {listed}"


def varied(random: Random, facts: object, sentence: str) -> object:
    """`facts` of an answer in JSON, sometimes under other keys, or the sentence that says the same."""
    if random.random() > _OTHER_KEYS_SHARE or not isinstance(facts, dict) or not facts:
        return facts
    kind = random.random()
    if kind < 0.12:
        return {random.choice(_SENTENCES): sentence}
    if len(facts) == 1:
        ((key, value),) = facts.items()
        if value in ("yes", "no"):
            name = random.choice((key, *JSON_KEYS[key]))
            return {name: value == "yes"} if random.random() < 0.6 else {name: value}
        if kind < 0.35 and not isinstance(value, list):
            return {random.choice(_ALONE): value}
        if kind < 0.4 and isinstance(value, list):
            return dict(random.sample([(key, value), ("count", len(value))], 2))
    names = {key: random.choice((key, *others)) for key, others in JSON_KEYS.items()}
    return _renamed(facts, names, random.random() < 0.3)


def _renamed(facts: object, names: Mapping[str, str], backwards: bool) -> object:
    """Every key by its other name, in all items of a list; `facts` where two keys would be the same."""
    if isinstance(facts, list):
        return [_renamed(item, names, backwards) for item in facts]
    if not isinstance(facts, dict):
        return facts
    entries = [(names.get(key, key), _renamed(value, names, backwards)) for key, value in facts.items()]
    if len({name for name, _ in entries}) < len(entries):
        return facts
    return dict(reversed(entries) if backwards else entries)


def keys_of(facts: object) -> set[str]:
    """At every depth."""
    if isinstance(facts, list):
        return set().union(*map(keys_of, facts))
    if not isinstance(facts, dict):
        return set()
    return set(facts).union(*map(keys_of, facts.values()))


def chosen(random: Random, facts: Mapping[str, object]) -> dict[str, object]:
    """Some of `facts` in any order, each under its usual key or another one that means the same."""
    kept = random.sample(sorted(facts), random.randint(1, len(facts)))
    while True:
        others = {key: (*JSON_KEYS.get(key, ()), *NATURAL["key names"].get(key, "").split()) for key in kept}
        names = [random.choice((key, key, *others[key])) for key in kept]
        if len(set(names)) == len(names):
            return {name: facts[key] for name, key in zip(names, kept, strict=True)}
