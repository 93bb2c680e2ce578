"""Questions about shapes: colour, kind, number, place, relations, sizes; and what a whole picture shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from models.embedded.world.palette import COLOR_NAMES, SHAPE_NAMES, plural
from models.embedded.world.pictures import Figure, Picture
from models.embedded.world.questions import (
    MANY,
    MOST_SHAPES,
    SIDES,
    Turn,
    article,
    clearly_larger,
    counted,
    joined,
    named,
    of_different_size,
    place,
    quoted,
    reading_order,
    shapes_of,
    side_of,
    turn_of,
    unique,
)
from models.embedded.world.small_talk import ONLY

_OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above"}


def color(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    figures = unique(pictures[0], lambda figure: figure.shape)
    if not figures:
        return None
    figure = random.choice(figures)
    answer = f"The {figure.shape} is {figure.color}."
    return turn_of(random, "color", answer, {"color": figure.color}, held_out, as_json, figure, shape=figure.shape)


def shape(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    figures = unique(pictures[0], lambda figure: figure.color)
    if not figures:
        return None
    figure = random.choice(figures)
    answer = f"The {figure.color} shape is {article(figure.shape)}."
    return turn_of(random, "shape", answer, {"shape": figure.shape}, held_out, as_json, figure, color=figure.color)


def only_color(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    """Of the only shape, which the question need not name."""
    figure = _only(pictures[0])
    if figure is None:
        return None
    answer = f"The {figure.shape} is {figure.color}."
    return turn_of(random, "only_color", answer, {"color": figure.color}, held_out, as_json, figure)


def only_shape(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    figure = _only(pictures[0])
    if figure is None:
        return None
    return turn_of(
        random, "only_shape", f"It is {article(figure.shape)}.", {"shape": figure.shape}, held_out, as_json, figure
    )


def is_shape(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    figure = _only(pictures[0])
    if figure is None:
        return None
    right = random.random() < 0.5
    asked = figure.shape if right else random.choice([name for name in SHAPE_NAMES if name != figure.shape])
    answer = f"{'Yes' if right else 'No'}, it is {article(figure.shape)}."
    facts = {"answer": "yes" if right else "no"}
    return turn_of(random, "is_shape", answer, facts, held_out, as_json, article=article(asked))


def _only(picture: Picture) -> Figure | None:
    return picture.figures[0] if len(picture.figures) == 1 and not picture.lines else None


def ground(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    color = pictures[0].ground
    if color is None:
        return None
    return turn_of(random, "ground", f"The background is {color}.", {"color": color}, held_out, as_json)


def plain_color(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    """Of a picture that shows nothing else."""
    picture = pictures[0]
    if picture.ground is None or picture.figures or picture.lines:
        return None
    answer, facts = f"The picture is {picture.ground}.", {"color": picture.ground}
    return turn_of(random, "plain_color", answer, facts, held_out, as_json)


def is_color(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    figures = unique(pictures[0], lambda figure: figure.shape)
    if not figures:
        return None
    figure = random.choice(figures)
    right = random.random() < 0.5
    asked = figure.color if right else random.choice([name for name in COLOR_NAMES if name != figure.color])
    answer = f"{'Yes' if right else 'No'}, the {figure.shape} is {figure.color}."
    facts = {"answer": "yes" if right else "no"}
    return turn_of(random, "is_color", answer, facts, held_out, as_json, shape=figure.shape, color=asked)


def count(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    picture = pictures[0]
    kind = random.choices(("all", "shape", "color", "both"), (0.25, 0.3, 0.25, 0.2))[0]
    one = random.choice(picture.figures) if picture.figures and random.random() < 0.85 else None
    shape_name = one.shape if one else random.choice(SHAPE_NAMES)
    color_name = one.color if one else random.choice(COLOR_NAMES)
    if len(picture.figures) > MOST_SHAPES:
        return turn_of(random, "count", MANY, {}, held_out, False, things="shapes")
    if kind == "all":
        number, single, many = len(picture.figures), "shape", "shapes"
    elif kind == "shape":
        number = sum(f.shape == shape_name for f in picture.figures)
        single, many = shape_name, plural(shape_name)
    elif kind == "color":
        number = sum(f.color == color_name for f in picture.figures)
        single, many = f"{color_name} shape", f"{color_name} shapes"
    else:
        number = sum(f.color == color_name and f.shape == shape_name for f in picture.figures)
        single, many = f"{color_name} {shape_name}", f"{color_name} {plural(shape_name)}"
    answer = f"I see {counted(number, single, many)}."
    return turn_of(random, "count", answer, {"count": number}, held_out, as_json, things=many)


def where(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    picture = pictures[0]
    figures = unique(picture, lambda figure: figure.name)
    if not figures:
        return None
    figure = random.choice(figures)
    spot = place(figure.x, figure.y, picture.width, picture.height)
    name = named(random, picture, figure)
    facts = {"position": spot.removeprefix("at the ").removeprefix("in the ")}
    return turn_of(random, "where", f"The {name} is {spot}.", facts, held_out, as_json, figure, thing=name)


def _pair(random: Random, picture: Picture) -> tuple[Figure, Figure, str] | None:
    """Two figures with names of their own, and the side of the second one on which the first is."""
    figures = unique(picture, lambda figure: figure.name)
    for _ in range(6):
        if len(figures) < 2:
            return None
        one, other = random.sample(figures, 2)
        apart = max(abs(one.x - other.x), abs(one.y - other.y))
        side = side_of(one, other)
        if side is not None and apart > 0.12 * min(picture.width, picture.height):
            return one, other, side
    return None


def relation(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    pair = _pair(random, pictures[0])
    if pair is None:
        return None
    one, other = (named(random, pictures[0], figure) for figure in pair[:2])
    answer = f"The {one} is {SIDES[pair[2]]} the {other}."
    return turn_of(random, "relation", answer, {"side": pair[2]}, held_out, as_json, thing=one, other=other)


def relation_yn(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    pair = _pair(random, pictures[0])
    if pair is None:
        return None
    one, other = (named(random, pictures[0], figure) for figure in pair[:2])
    right = random.random() < 0.5
    asked = pair[2] if right else _OPPOSITE[pair[2]]
    answer = f"{'Yes' if right else 'No'}, the {one} is {SIDES[pair[2]]} the {other}."
    side = random.choice((SIDES[asked], f"to the {asked} of")) if asked in ("left", "right") else SIDES[asked]
    facts = {"answer": "yes" if right else "no"}
    return turn_of(random, "relation_yn", answer, facts, held_out, as_json, thing=one, other=other, side=side)


def exists(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    picture = pictures[0]
    names = {figure.name for figure in picture.figures} | {figure.shape for figure in picture.figures}
    right = bool(picture.figures) and random.random() < 0.5
    if right:
        name = random.choice(sorted(names))
    else:
        for _ in range(20):
            name = f"{random.choice(COLOR_NAMES)} {random.choice(SHAPE_NAMES)}"
            if picture.figures and random.random() < 0.6:
                one, other = random.choice(picture.figures), random.choice(picture.figures)
                name = random.choice((f"{one.color} {other.shape}", f"{one.color} {random.choice(SHAPE_NAMES)}", name))
            elif random.random() < 0.5:
                name = name.split()[1]
            if name not in names:
                break
        else:
            return None
    answer = f"Yes, there is {article(name)}." if right else f"No, there is no {name}."
    facts = {"answer": "yes" if right else "no"}
    return turn_of(random, "exists", answer, facts, held_out, as_json, article=article(name))


def largest(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    ordered = sorted(pictures[0].figures, key=lambda figure: figure.radius)
    if len(ordered) < 2:
        return None
    big = random.random() < 0.5
    one, other = (ordered[-1], ordered[-2]) if big else (ordered[0], ordered[1])
    if not (clearly_larger(one, other) or clearly_larger(other, one)):
        return None
    most, word = ("largest", random.choice(("largest", "biggest"))) if big else ("smallest", "smallest")
    facts = {"shape": one.shape, "color": one.color}
    return turn_of(random, "largest", f"The {most} shape is the {one.name}.", facts, held_out, as_json, one, most=word)


def compare_yn(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    pair = of_different_size(random, pictures[0])
    if pair is None:
        return None
    one, other = pair
    bigger = one.radius > other.radius
    asked = random.random() < 0.5
    more = random.choice(("larger", "bigger")) if asked else "smaller"
    names = [named(random, pictures[0], figure) for figure in (one, other)]
    right = asked == bigger
    answer = f"{'Yes' if right else 'No'}, the {names[0]} is {'larger' if bigger else 'smaller'} than the {names[1]}."
    facts = {"answer": "yes" if right else "no"}
    return turn_of(random, "compare_yn", answer, facts, held_out, as_json, thing=names[0], other=names[1], more=more)


def more_yn(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    shapes = sorted({figure.shape for figure in pictures[0].figures})
    if len(shapes) < 2:
        return None
    one, other = random.sample(shapes, 2)
    numbers = [sum(figure.shape == name for figure in pictures[0].figures) for name in (one, other)]
    if numbers[0] == numbers[1] and random.random() < 0.6:
        return None
    turn = turn_of(random, "more_yn", "", {}, held_out, False, things=plural(one), others=plural(other))
    right = numbers[0] < numbers[1] if "fewer" in turn.question else numbers[0] > numbers[1]
    first, second = (counted(n, name, plural(name)) for n, name in zip(numbers, (one, other), strict=True))
    return Turn("more_yn", turn.question, f"{'Yes' if right else 'No'}, I see {first} and {second}.")


def description(picture: Picture) -> str:
    """What the model says about a picture in a sentence."""
    if picture.chart:
        chart = picture.chart
        ending = "%" if chart.kind == "pie" else ""
        parts = [f"{quoted(label)} {value}{ending}" for label, value in zip(chart.labels, chart.values, strict=True)]
        return f"I see a {chart.kind} chart: {joined(parts)}."
    parts = [
        f"{article(f'{figure.size} {figure.name}')} {place(figure.x, figure.y, picture.width, picture.height)}"
        for figure in reading_order(picture)
    ]
    if picture.lines:
        parts.append("the text " + joined([quoted(line.text) for line in picture.lines]))
    if parts:
        return f"I see {joined(parts)}."
    plain = picture.ground not in (None, "white", "black")
    return f"I see a plain {picture.ground} picture." if plain else "I see an empty picture."


def describe(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    picture = pictures[0]
    if picture.strange:
        return turn_of(random, "describe", ONLY, {}, held_out, False)
    if len(picture.figures) > MOST_SHAPES:
        return turn_of(random, "describe", MANY, {}, held_out, False)
    if as_json and (picture.chart or picture.lines or not picture.figures):
        return None
    task = "describe_chart" if picture.chart and random.random() < 0.5 else "describe"
    facts = shapes_of(reading_order(picture))
    turn = turn_of(random, task, description(picture), facts, held_out, as_json)
    return Turn("list_json", turn.question, turn.answer) if as_json else replace(turn, task="describe")
