"""Keys of answers in JSON other than the usual ones: a request's schema may demand any of them, and the value has to be
right under each. A question may also name them."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

_SHARE = 0.35
_ALONE = ("answer", "result", "response")
_OTHER = {
    "shape": ("name", "type", "kind", "object", "figure", "form", "label"),
    "color": ("colour", "fill"),
    "colors": ("colours", "palette"),
    "count": ("number", "total", "amount", "quantity", "num"),
    "text": ("content", "words", "transcription", "line"),
    "label": ("name", "category", "bar"),
    "labels": ("names", "categories", "bars"),
    "title": ("heading", "name", "text"),
    "value": ("number", "percentage", "amount", "count"),
    "position": ("place", "location", "where"),
    "side": ("direction", "relation", "position"),
    "direction": ("motion", "movement"),
    "shapes": ("objects", "items", "figures", "things"),
    "chart": ("type", "kind", "chart_type"),
    "answer": ("result", "exists", "present", "correct", "is_true", "yes_or_no"),
    "picture": ("image", "which", "index"),
}
_SENTENCES = ("description", "caption", "sentence")
NAMES = tuple(sorted({*_ALONE, *_SENTENCES, *_OTHER, *(name for names in _OTHER.values() for name in names)}))
"""All keys."""


def varied(random: Random, facts: object, sentence: str) -> object:
    """`facts`, sometimes under other keys, or the sentence that says the same."""
    if random.random() > _SHARE or not isinstance(facts, dict) or not facts:
        return facts
    kind = random.random()
    if kind < 0.12:
        return {random.choice(_SENTENCES): sentence}
    if len(facts) == 1:
        ((key, value),) = facts.items()
        if value in ("yes", "no"):
            name = random.choice((key, *_OTHER[key]))
            return {name: value == "yes"} if random.random() < 0.6 else {name: value}
        if kind < 0.35 and not isinstance(value, list):
            return {random.choice(_ALONE): value}
        if kind < 0.4 and isinstance(value, list):
            return dict(random.sample([(key, value), ("count", len(value))], 2))
    names = {key: random.choice((key, *others)) for key, others in _OTHER.items()}
    return _renamed(facts, names, random.random() < 0.3)


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
        names = [random.choice((key, key, *_OTHER[key])) for key in kept]
        if len(set(names)) == len(names):
            return {name: facts[key] for name, key in zip(names, kept, strict=True)}


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
