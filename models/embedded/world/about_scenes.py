"""Questions about several shapes at once: which there are, their colours, what is in a part of the picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from models.embedded.world.pictures import Figure, Picture
from models.embedded.world.questions import (
    MANY,
    MOST_SHAPES,
    SIDES,
    Turn,
    joined,
    named,
    of_different_size,
    place,
    reading_order,
    shapes_of,
    side_of,
    the_names,
    turn_of,
    unique,
)

_NOTHING = "no shapes"
_UNCLEAR = 0.07
"""Of the picture's side: so near to the line between two halves nobody should be asked for one of them."""
_HALVES: dict[str, tuple[Callable[[Figure, Picture], float], tuple[str, ...]]] = {
    "at the left": (
        lambda figure, picture: 0.5 - figure.x / picture.width,
        ("at the left", "on the left", "to the left", "on the left side", "in the left half", "on the left hand side"),
    ),
    "at the right": (
        lambda figure, picture: figure.x / picture.width - 0.5,
        ("at the right", "on the right", "to the right", "on the right side", "in the right half"),
    ),
    "at the top": (
        lambda figure, picture: 0.5 - figure.y / picture.height,
        ("at the top", "on top", "in the top half", "in the upper half", "in the upper part"),
    ),
    "at the bottom": (
        lambda figure, picture: figure.y / picture.height - 0.5,
        ("at the bottom", "on the bottom", "in the bottom half", "in the lower half", "in the lower part"),
    ),
}
"""The name of a half, how far a shape is inside it, and what it is called in questions."""
_CORNERS = {
    f"at the {row} {column}": tuple(
        f"{word} {other} {column}{ending}"
        for word in ("at the", "in the")
        for other in (row, "upper" if row == "top" else "lower")
        for ending in ("", " corner")
    )
    for row in ("top", "bottom")
    for column in ("left", "right")
}
_CENTER = ("in the center", "in the middle", "at the center", "in the middle part")
SPOTS = (
    *(name for _, names in _HALVES.values() for name in names),
    *(n for c in _CORNERS.values() for n in c),
    *_CENTER,
)
"""All names of parts in questions."""


def shapes(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    if pictures[0].lines or pictures[0].chart:
        return None
    figures = reading_order(pictures[0])
    if len(figures) > MOST_SHAPES:
        return turn_of(random, "list", MANY, {}, held_out, False)
    return turn_of(
        random,
        "list",
        f"I see {the_names(figures, _NOTHING)}.",
        shapes_of(figures),
        held_out,
        as_json and bool(figures),
    )


def colors(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    if not pictures[0].figures or pictures[0].lines:
        return None
    names = list(dict.fromkeys(figure.color for figure in reading_order(pictures[0])))
    return turn_of(random, "colors", f"I see {joined(names)}.", {"colors": names}, held_out, as_json)


def at_place(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    found = _in_part(random, pictures[0])
    if found is None:
        return None
    spot, asked, figures = found
    answer = f"I see {the_names(figures, _NOTHING)} {spot}."
    about = figures[0] if len(figures) == 1 else None
    return turn_of(
        random, "at_place", answer, shapes_of(figures), held_out, as_json and bool(figures), about, spot=asked
    )


def color_at(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    found = _in_part(random, pictures[0])
    if found is None or len(found[2]) != 1:
        return None
    figure = found[2][0]
    answer = f"The {figure.shape} is {figure.color}."
    return turn_of(random, "color_at", answer, {"color": figure.color}, held_out, as_json, figure, spot=found[1])


def _in_part(random: Random, picture: Picture) -> tuple[str, str, list[Figure]] | None:
    """The name of a part of the picture, what it is called in the question, and the shapes there; None where one might
    argue about one of them."""
    if not picture.figures:
        return None
    spots = {figure: place(figure.x, figure.y, picture.width, picture.height) for figure in picture.figures}
    kind = random.random()
    if kind < 0.6:
        spot = random.choice(tuple(_HALVES))
        inside, names = _HALVES[spot]
        if any(abs(inside(figure, picture)) < _UNCLEAR for figure in spots):
            return None
        there = [figure for figure in spots if inside(figure, picture) > 0]
    elif kind < 0.9:
        spot = random.choice(tuple(_CORNERS))
        names = _CORNERS[spot]
        there = [figure for figure, found in spots.items() if found == spot]
        halves = [_HALVES[f"at the {word}"][0] for word in spot.split()[2:]]
        if any(min(half(figure, picture) for half in halves) > 0 for figure in spots if figure not in there):
            return None
    else:
        spot, names = "in the center", _CENTER
        there = [figure for figure, found in spots.items() if found == spot]
    if not there and random.random() < 0.7:
        return None
    return spot, random.choice(names), [figure for figure in reading_order(picture) if figure in there]


def larger_of(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    pair = of_different_size(random, pictures[0])
    if pair is None:
        return None
    one, other = pair
    larger = random.random() < 0.6
    more = random.choice(("larger", "bigger")) if larger else "smaller"
    names = [named(random, pictures[0], figure) for figure in (one, other)]
    first = (one.radius > other.radius) == larger
    answer = f"The {names[0 if first else 1]} is {'larger' if larger else 'smaller'}."
    return turn_of(random, "larger_of", answer, {}, held_out, False, thing=names[0], other=names[1], more=more)


def beside(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    """What is left of, right of, above or below a shape; not asked where another lies at a slant to it."""
    picture = pictures[0]
    figures = unique(picture, lambda figure: figure.name)
    if len(picture.figures) < 2 or not figures:
        return None
    for _ in range(6):
        middle = random.choice(figures)
        side = random.choice(tuple(SIDES))
        sides = [side_of(figure, middle) for figure in picture.figures if figure is not middle]
        if None not in sides and (side in sides or random.random() < 0.15):
            break
    else:
        return None
    there = [figure for figure in reading_order(picture) if figure is not middle and side_of(figure, middle) == side]
    name, word = named(random, picture, middle), SIDES[side]
    answer = f"I see {the_names(there, _NOTHING)} {word} the {name}."
    asked = random.choice((word, f"to the {word}")) if side in ("left", "right") else word
    facts = shapes_of(there)
    return turn_of(random, "beside", answer, facts, held_out, as_json and bool(there), thing=name, side=asked)
