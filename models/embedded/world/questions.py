"""What a question is, and the words that answers are made of.

A maker takes (random, pictures, held_out, json) and returns a Turn, or None where the question cannot be asked: the
answer would be arguable. Counts, colours and places in the answers are facts of the generator.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from models.embedded.world import wordings
from models.embedded.world.keys import keys_of, varied
from models.embedded.world.pictures import Figure, Picture

ORDINALS = ("first", "second", "third")
MOST_SHAPES = 6
"""That are counted and named."""
MANY = f"I see more than {MOST_SHAPES} shapes."
SIDES = {"left": "left of", "right": "right of", "above": "above", "below": "below"}
"""What is said of a shape on each side of another."""


@dataclass(frozen=True)
class Turn:
    task: str
    question: str
    answer: str
    about: Figure | str | None = None
    """The figure or label of a chart that the answer names, for the next question's "it"."""
    forced: frozenset[str] = frozenset()
    """Keys of an answer in JSON that only a schema could have asked for: training does not want them from the model."""


Maker = Callable[[Random, Sequence[Picture], bool, bool], Turn | None]


def article(text: str) -> str:
    return ("an " if text[0] in "aeiou" else "a ") + text


def joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def quoted(text: str) -> str:
    return f'"{text}"'


def counted(number: int, one: str, many: str) -> str:
    return f"{'no' if number == 0 else number} {one if number == 1 else many}"


def place(x: float, y: float, width: float, height: float) -> str:
    """Of nine parts: "at the top left", "in the center", ..."""
    column = ("left", "", "right")[min(2, int(3 * x / width))]
    row = ("top", "", "bottom")[min(2, int(3 * y / height))]
    return f"at the {row} {column}".replace("  ", " ").rstrip() if row or column else "in the center"


def the_names(figures: Sequence[Figure], nothing: str) -> str:
    """ "a red circle and a blue square", or `nothing`."""
    return joined([article(figure.name) for figure in figures]) if figures else nothing


def shapes_of(figures: Sequence[Figure]) -> dict[str, list[dict[str, str]]]:
    """For an answer in JSON."""
    return {"shapes": [{"shape": figure.shape, "color": figure.color} for figure in figures]}


def clearly_larger(one: Figure, other: Figure) -> bool:
    """Whether nobody would call `other` as large. Long shapes have less area than their extent says."""
    long = {"rectangle", "oval"} & {one.shape, other.shape}
    return one.radius > (1.7 if long else 1.25) * other.radius


def of_different_size(random: Random, picture: Picture) -> tuple[Figure, Figure] | None:
    """Two shapes with names of their own, of which nobody would call one as large as the other."""
    figures = unique(picture, lambda figure: figure.name)
    for _ in range(6):
        if len(figures) < 2:
            return None
        one, other = random.sample(figures, 2)
        if clearly_larger(one, other) or clearly_larger(other, one):
            return one, other
    return None


def side_of(figure: Figure, other: Figure) -> str | None:
    """The key of SIDES on which `figure` is of `other`; None where it lies at a slant to it."""
    across, down = figure.x - other.x, figure.y - other.y
    wide, narrow = max(abs(across), abs(down)), min(abs(across), abs(down))
    if wide <= 1.4 * narrow:
        return None
    if abs(across) > abs(down):
        return "left" if across < 0 else "right"
    return "above" if down < 0 else "below"


def reading_order(picture: Picture) -> list[Figure]:
    """Thirds from top to bottom, within them from left to right."""
    return sorted(picture.figures, key=lambda f: (min(2, int(3 * f.y / picture.height)), f.x))


def turn_of(
    random: Random,
    task: str,
    answer: str,
    facts: object,
    held_out: bool,
    as_json: bool,
    about: Figure | str | None = None,
    **slots: str,
) -> Turn:
    question = wordings.ask(random, task, held_out=held_out, json=as_json, **slots)
    if not as_json:
        return Turn(task, question, answer, about)
    told = facts if held_out else varied(random, facts, answer)
    return Turn(f"{task}_json", question, json.dumps(told), forced=frozenset(() if told == facts else keys_of(told)))


def unique(picture: Picture, key: Callable[[Figure], str]) -> list[Figure]:
    counts = Counter(key(figure) for figure in picture.figures)
    return [figure for figure in picture.figures if counts[key(figure)] == 1]


def named(random: Random, picture: Picture, figure: Figure) -> str:
    """ "circle" where that is enough and chosen, "red circle" otherwise."""
    alone = sum(other.shape == figure.shape for other in picture.figures) == 1
    return figure.shape if alone and random.random() < 0.3 else figure.name
