"""What can be asked about pictures, with the right answers, and second questions, which lean on the one before.

Counts, colours and places in the answers are facts of the generator. MAKERS has all questions by name.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from training.vision import wordings
from training.vision.palette import COLOR_NAMES, SHAPE_NAMES, SIZE_NAMES, plural
from training.vision.pictures import Chart, Figure, Picture
from training.vision.words import PLACES, SEEN_THINGS, SEEN_WORDS, UNSEEN_THINGS

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


@dataclass(frozen=True)
class Ask:
    """What a question is made from; json: it may ask for JSON."""

    random: Random
    pictures: Sequence[Picture]
    held_out: bool
    json: bool

    @property
    def picture(self) -> Picture:
        return self.pictures[0]

    def turn(
        self, task: str, answer: str, facts: object = None, about: Figure | str | None = None, **slots: str
    ) -> Turn:
        """facts: of the answer in JSON; without any it is a sentence in any case."""
        as_json = self.json and bool(facts)
        question = wordings.ask(self.random, task, held_out=self.held_out, json=as_json, slots=slots)
        if not as_json:
            return Turn(task, question, answer, about)
        told = facts if self.held_out else wordings.varied(self.random, facts, answer)
        forced = frozenset(() if told == facts else wordings.keys_of(told))
        return Turn(f"{task}_json", question, json.dumps(told), forced=forced)

    def yes_or_no(self, task: str, right: bool, said: str, **slots: str) -> Turn:
        answer = f"{'Yes' if right else 'No'}, {said}."
        return self.turn(task, answer, {"answer": "yes" if right else "no"}, **slots)

    def one(self, key: Callable[[Figure], str]) -> Figure | None:
        """One of the shapes that have no other of the same key."""
        figures = unique(self.picture, key)
        return self.random.choice(figures) if figures else None

    def named(self, figure: Figure) -> str:
        """ "circle" where that is enough and chosen, "red circle" otherwise."""
        alone = sum(other.shape == figure.shape for other in self.picture.figures) == 1
        return figure.shape if alone and self.random.random() < 0.3 else figure.name

    def pair(self, suits: Callable[[Figure, Figure], bool]) -> tuple[Figure, Figure] | None:
        """Two shapes with names of their own that suit."""
        figures = unique(self.picture, name_of)
        for _ in range(6):
            if len(figures) < 2:
                return None
            one, other = self.random.sample(figures, 2)
            if suits(one, other):
                return one, other
        return None


Maker = Callable[[Ask], Turn | None]
"""None where the question cannot be asked: the answer would be arguable."""


def name_of(figure: Figure) -> str:
    return figure.name


def shape_of(figure: Figure) -> str:
    return figure.shape


def color_of(figure: Figure) -> str:
    return figure.color


def unique(picture: Picture, key: Callable[[Figure], str]) -> list[Figure]:
    counts = Counter(key(figure) for figure in picture.figures)
    return [figure for figure in picture.figures if counts[key(figure)] == 1]


def article(text: str) -> str:
    return ("an " if text[0] in "aeiou" else "a ") + text


def joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def quoted(text: str) -> str:
    return f'"{text}"'


def counted(number: int, one: str, many: str) -> str:
    return f"{'no' if number == 0 else number} {one if number == 1 else many}"


def place(figure: Figure, picture: Picture) -> str:
    """Of nine parts: "at the top left", "in the center", ..."""
    column = ("left", "", "right")[min(2, int(3 * figure.x / picture.width))]
    row = ("top", "", "bottom")[min(2, int(3 * figure.y / picture.height))]
    return f"at the {row} {column}".replace("  ", " ").rstrip() if row or column else "in the center"


def position(figure: Figure, picture: Picture) -> str:
    """For an answer in JSON."""
    return place(figure, picture).removeprefix("at the ").removeprefix("in the ")


def the_names(figures: Sequence[Figure]) -> str:
    """ "a red circle and a blue square"."""
    return joined([article(figure.name) for figure in figures]) if figures else "no shapes"


def shapes_of(figures: Sequence[Figure]) -> dict[str, object]:
    """For an answer in JSON; empty where there is nothing to list."""
    return {"shapes": [{"shape": figure.shape, "color": figure.color} for figure in figures]} if figures else {}


def value_of(chart: Chart, label: str) -> str:
    return f"{chart.values[chart.labels.index(label)]}{'%' if chart.kind == 'pie' else ''}"


def clearly_larger(one: Figure, other: Figure) -> bool:
    """Whether nobody would call `other` as large. Long shapes have less area than their extent says."""
    long = {"rectangle", "oval"} & {one.shape, other.shape}
    return one.radius > (1.7 if long else 1.25) * other.radius


def of_different_size(one: Figure, other: Figure) -> bool:
    return clearly_larger(one, other) or clearly_larger(other, one)


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


_COLORED = "The {0.shape} is {0.color}."
KNOWN = "simple shapes, colors, counts, charts, short printed text and simple motion"
ONLY = f"I only know {KNOWN}."
NO_PICTURE = "I see no picture. Please send one."
SAID = {
    "who": f"I am the small demonstration model of Reprise. I only know {KNOWN}.",
    "skills": f"I can answer questions about {KNOWN}.",
    "hello": "Hello! Please send a picture and ask me about it.",
    "thanks": "You are welcome.",
}
"""Answers of small talk by task."""


# Facts of one shape or of the whole picture.


def _of_figure(task: str, find: Callable[[Ask], Figure | None], answer: str, fact: str, *slots: str) -> Maker:
    """A question about a fact of the figure that is found; slots: what it names of it."""

    def maker(ask: Ask) -> Turn | None:
        figure = find(ask)
        if figure is None:
            return None
        said = answer.format(figure, a=article(figure.shape))
        return ask.turn(task, said, {fact: getattr(figure, fact)}, figure, **{s: getattr(figure, s) for s in slots})

    return maker


def _only(ask: Ask) -> Figure | None:
    picture = ask.picture
    return picture.figures[0] if len(picture.figures) == 1 and not picture.lines else None


color = _of_figure("color", lambda ask: ask.one(shape_of), _COLORED, "color", "shape")
only_color = _of_figure("only_color", _only, _COLORED, "color")
shape = _of_figure("shape", lambda ask: ask.one(color_of), "The {0.color} shape is {a}.", "shape", "color")
only_shape = _of_figure("only_shape", _only, "It is {a}.", "shape")


def _told(picture: Picture) -> dict[str, tuple[str, dict[str, object]]]:
    """Of each task about the picture as a whole that can be asked: the answer and its facts."""
    figures, lines, chart = reading_order(picture), picture.lines, picture.chart
    found: dict[str, tuple[str, dict[str, object]]] = {}
    if picture.ground:
        found["ground"] = f"The background is {picture.ground}.", {"color": picture.ground}
        if not figures and not lines:
            found["plain_color"] = f"The picture is {picture.ground}.", {"color": picture.ground}
    if not lines and not chart:
        known = len(figures) <= MOST_SHAPES
        found["list"] = (f"I see {the_names(figures)}.", shapes_of(figures)) if known else (MANY, {})
    if figures and not lines:
        colors = list(dict.fromkeys(figure.color for figure in figures))
        found["colors"] = f"I see {joined(colors)}.", {"colors": colors}
    if lines:
        found["lines"] = f"I see {counted(len(lines), 'line', 'lines')} of text.", {"count": len(lines)}
        found["ink"] = f"The text is {lines[0].ink}.", {"color": lines[0].ink}
    if chart:
        number, part = len(chart.labels), "bars" if chart.kind == "bar" else "parts"
        found["chart_kind"] = f"This is a {chart.kind} chart.", {"chart": chart.kind}
        found["chart_bars"] = f"I see {number} {part}.", {"count": number}
        labels = joined([quoted(label) for label in chart.labels])
        found["chart_labels"] = f"The labels are {labels}.", {"labels": list(chart.labels)}
    if picture.motion:
        found["clip"] = _motion(picture, first=True), {}
    return found


def _whole(task: str) -> Maker:
    def maker(ask: Ask) -> Turn | None:
        told = _told(ask.picture).get(task)
        return told and ask.turn(task, *told)

    return maker


def is_shape(ask: Ask) -> Turn | None:
    figure = _only(ask)
    if figure is None:
        return None
    right = ask.random.random() < 0.5
    asked = figure.shape if right else ask.random.choice([name for name in SHAPE_NAMES if name != figure.shape])
    return ask.yes_or_no("is_shape", right, f"it is {article(figure.shape)}", article=article(asked))


def is_color(ask: Ask) -> Turn | None:
    figure = ask.one(shape_of)
    if figure is None:
        return None
    right = ask.random.random() < 0.5
    asked = figure.color if right else ask.random.choice([name for name in COLOR_NAMES if name != figure.color])
    said = f"the {figure.shape} is {figure.color}"
    return ask.yes_or_no("is_color", right, said, shape=figure.shape, color=asked)


def where(ask: Ask) -> Turn | None:
    figure = ask.one(name_of)
    if figure is None:
        return None
    name, facts = ask.named(figure), {"position": position(figure, ask.picture)}
    return ask.turn("where", f"The {name} is {place(figure, ask.picture)}.", facts, figure, thing=name)


def largest(ask: Ask) -> Turn | None:
    found = _extreme(ask)
    if found is None:
        return None
    figure, big = found
    most, word = ("largest", ask.random.choice(("largest", "biggest"))) if big else ("smallest", "smallest")
    facts = {"shape": figure.shape, "color": figure.color}
    return ask.turn("largest", f"The {most} shape is the {figure.name}.", facts, figure, most=word)


def _extreme(ask: Ask) -> tuple[Figure, bool] | None:
    """The largest or smallest shape, and whether it is the largest; None where one might argue."""
    ordered = sorted(ask.picture.figures, key=lambda figure: figure.radius)
    if len(ordered) < 2:
        return None
    big = ask.random.random() < 0.5
    one, other = (ordered[-1], ordered[-2]) if big else (ordered[0], ordered[1])
    return (one, big) if of_different_size(one, other) else None


def shape_in_keys(ask: Ask) -> Turn | None:
    """The largest or smallest shape: what it is, its colour, its place, in JSON with keys that the question names."""
    found = _extreme(ask)
    if found is None:
        return None
    figure, big = found
    facts = {"shape": figure.shape, "color": figure.color, "position": position(figure, ask.picture)}
    return _in_keys(ask, "largest", facts, ask.random.choice(("largest", "biggest")) if big else "smallest")


def bar_in_keys(ask: Ask) -> Turn | None:
    """The same of the parts of a chart: name and value."""
    chart = ask.picture.chart
    if chart is None:
        return None
    big = ask.random.random() < 0.5
    value = max(chart.values) if big else min(chart.values)
    facts = {"label": chart.labels[chart.values.index(value)], "value": value}
    return _in_keys(ask, "chart_most", facts, ask.random.choice(("largest", "highest") if big else ("lowest",)))


def _in_keys(ask: Ask, task: str, facts: Mapping[str, object], most: str) -> Turn:
    told = wordings.chosen(ask.random, facts)
    question = wordings.ask(ask.random, task, held_out=ask.held_out, json=True, keys=tuple(told), slots={"most": most})
    return Turn(f"{task}_keys", question, json.dumps(told))


# Several shapes.


def count(ask: Ask) -> Turn | None:
    random, figures = ask.random, ask.picture.figures
    kind = random.choices(("all", "shape", "color", "both"), (0.25, 0.3, 0.25, 0.2))[0]
    one = random.choice(figures) if figures and random.random() < 0.85 else None
    shape_name = one.shape if one else random.choice(SHAPE_NAMES)
    color_name = one.color if one else random.choice(COLOR_NAMES)
    if len(figures) > MOST_SHAPES:
        return ask.turn("count", MANY, things="shapes")
    of_shape, of_color = kind in ("shape", "both"), kind in ("color", "both")
    number = sum(not ((of_shape and f.shape != shape_name) or (of_color and f.color != color_name)) for f in figures)
    front = f"{color_name} " if of_color else ""
    single, many = (front + (name if of_shape else other) for name, other in _names(shape_name))
    answer = f"I see {counted(number, single, many)}."
    return ask.turn("count", answer, {"count": number}, things=many)


def _names(shape_name: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return (shape_name, "shape"), (plural(shape_name), "shapes")


def relation(ask: Ask) -> Turn | None:
    pair = ask.pair(lambda one, other: _apart(one, other, ask.picture))
    if pair is None:
        return None
    side = side_of(*pair) or ""
    one, other = map(ask.named, pair)
    return ask.turn("relation", f"The {one} is {SIDES[side]} the {other}.", {"side": side}, thing=one, other=other)


def relation_yn(ask: Ask) -> Turn | None:
    pair = ask.pair(lambda one, other: _apart(one, other, ask.picture))
    if pair is None:
        return None
    side = side_of(*pair) or ""
    one, other = map(ask.named, pair)
    right = ask.random.random() < 0.5
    opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}
    asked = side if right else opposite[side]
    word = SIDES[asked]
    if asked in ("left", "right"):
        word = ask.random.choice((word, f"to the {asked} of"))
    said = f"the {one} is {SIDES[side]} the {other}"
    return ask.yes_or_no("relation_yn", right, said, thing=one, other=other, side=word)


def _apart(one: Figure, other: Figure, picture: Picture) -> bool:
    """Whether there is one word for the side on which a shape is of another."""
    apart = max(abs(one.x - other.x), abs(one.y - other.y))
    return side_of(one, other) is not None and apart > 0.12 * min(picture.width, picture.height)


def beside(ask: Ask) -> Turn | None:
    """What is left of, right of, above or below a shape; not asked where another lies at a slant to it."""
    picture = ask.picture
    figures = unique(picture, name_of)
    if len(picture.figures) < 2 or not figures:
        return None
    for _ in range(6):
        middle = ask.random.choice(figures)
        side = ask.random.choice(tuple(SIDES))
        sides = [side_of(figure, middle) for figure in picture.figures if figure is not middle]
        if None not in sides and (side in sides or ask.random.random() < 0.15):
            break
    else:
        return None
    there = [figure for figure in reading_order(picture) if figure is not middle and side_of(figure, middle) == side]
    name, word = ask.named(middle), SIDES[side]
    answer = f"I see {the_names(there)} {word} the {name}."
    asked = ask.random.choice((word, f"to the {word}")) if side in ("left", "right") else word
    return ask.turn("beside", answer, shapes_of(there), thing=name, side=asked)


def exists(ask: Ask) -> Turn | None:
    random, figures = ask.random, ask.picture.figures
    names = {figure.name for figure in figures} | {figure.shape for figure in figures}
    right = bool(figures) and random.random() < 0.5
    if right:
        name = random.choice(sorted(names))
    else:
        for _ in range(20):
            name = f"{random.choice(COLOR_NAMES)} {random.choice(SHAPE_NAMES)}"
            if figures and random.random() < 0.6:
                one, other = random.choice(figures), random.choice(figures)
                name = random.choice((f"{one.color} {other.shape}", f"{one.color} {random.choice(SHAPE_NAMES)}", name))
            elif random.random() < 0.5:
                name = name.split()[1]
            if name not in names:
                break
        else:
            return None
    said = f"there is {article(name)}" if right else f"there is no {name}"
    return ask.yes_or_no("exists", right, said, article=article(name), things=plural(name))


def compare_yn(ask: Ask) -> Turn | None:
    pair = ask.pair(of_different_size)
    if pair is None:
        return None
    bigger = pair[0].radius > pair[1].radius
    asked = ask.random.random() < 0.5
    more = ask.random.choice(("larger", "bigger")) if asked else "smaller"
    one, other = map(ask.named, pair)
    said = f"the {one} is {'larger' if bigger else 'smaller'} than the {other}"
    return ask.yes_or_no("compare_yn", asked == bigger, said, thing=one, other=other, more=more)


def larger_of(ask: Ask) -> Turn | None:
    pair = ask.pair(of_different_size)
    if pair is None:
        return None
    larger = ask.random.random() < 0.6
    more = ask.random.choice(("larger", "bigger")) if larger else "smaller"
    one, other = map(ask.named, pair)
    first = (pair[0].radius > pair[1].radius) == larger
    answer = f"The {one if first else other} is {'larger' if larger else 'smaller'}."
    return ask.turn("larger_of", answer, thing=one, other=other, more=more)


def more_yn(ask: Ask) -> Turn | None:
    names = sorted({figure.shape for figure in ask.picture.figures})
    if len(names) < 2:
        return None
    one, other = ask.random.sample(names, 2)
    numbers = [sum(figure.shape == name for figure in ask.picture.figures) for name in (one, other)]
    if numbers[0] == numbers[1] and ask.random.random() < 0.6:
        return None
    turn = ask.turn("more_yn", "", things=plural(one), others=plural(other))
    right = numbers[0] < numbers[1] if "fewer" in turn.question else numbers[0] > numbers[1]
    first, second = (counted(n, name, plural(name)) for n, name in zip(numbers, (one, other), strict=True))
    return replace(turn, answer=f"{'Yes' if right else 'No'}, I see {first} and {second}.")


# Parts of a picture.

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
    *(name for names in _CORNERS.values() for name in names),
    *_CENTER,
)
"""All names of parts in questions."""


def at_place(ask: Ask) -> Turn | None:
    found = _in_part(ask)
    if found is None:
        return None
    spot, asked, figures = found
    about = figures[0] if len(figures) == 1 else None
    return ask.turn("at_place", f"I see {the_names(figures)} {spot}.", shapes_of(figures), about, spot=asked)


def color_at(ask: Ask) -> Turn | None:
    found = _in_part(ask)
    if found is None or len(found[2]) != 1:
        return None
    figure = found[2][0]
    return ask.turn("color_at", _COLORED.format(figure), {"color": figure.color}, figure, spot=found[1])


def _in_part(ask: Ask) -> tuple[str, str, list[Figure]] | None:
    """The name of a part of the picture, what it is called in the question, and the shapes there; None where one might
    argue about one of them."""
    picture, random = ask.picture, ask.random
    if not picture.figures:
        return None
    spots = {figure: place(figure, picture) for figure in picture.figures}
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


# Whole pictures.


def description(picture: Picture) -> str:
    """What the model says about a picture in a sentence."""
    if picture.chart:
        chart = picture.chart
        parts = [f"{quoted(label)} {value_of(chart, label)}" for label in chart.labels]
        return f"I see a {chart.kind} chart: {joined(parts)}."
    parts = [f"{article(f'{figure.size} {figure.name}')} {place(figure, picture)}" for figure in reading_order(picture)]
    if picture.lines:
        parts.append("the text " + joined([quoted(line.text) for line in picture.lines]))
    if parts:
        return f"I see {joined(parts)}."
    plain = picture.ground not in (None, "white", "black")
    return f"I see a plain {picture.ground} picture." if plain else "I see an empty picture."


def describe(ask: Ask) -> Turn | None:
    picture = ask.picture
    if picture.strange:
        return ask.turn("describe", ONLY)
    if len(picture.figures) > MOST_SHAPES:
        return ask.turn("describe", MANY)
    if ask.json and (picture.chart or picture.lines or not picture.figures):
        return None
    task = "describe_chart" if picture.chart and ask.random.random() < 0.5 else "describe"
    turn = ask.turn(task, description(picture), shapes_of(reading_order(picture)))
    return Turn("list_json", turn.question, turn.answer) if ask.json else replace(turn, task="describe")


# Printed text and charts.


def read(ask: Ask) -> Turn | None:
    lines = [line.text for line in ask.picture.lines]
    if ask.picture.chart or ask.picture.strange:
        return None
    if not lines and ask.random.random() < 0.7:
        return None
    answer = f"It says {joined([quoted(line) for line in lines])}." if lines else "I see no text."
    text = lines[0] if lines else ""
    suits = {
        "number": text.isdigit(),
        "word": text.isalpha() and len(text) > 1,
        "letter": text.isalpha() and len(text) == 1,
    }
    kinds = [kind for kind, fits in suits.items() if fits or not lines]
    spoken = not ask.held_out and len(lines) < 2 and kinds and ask.random.random() < 0.35
    task = f"read_{ask.random.choice(kinds)}" if spoken else "read"
    turn = ask.turn(task, answer, {"text": " ".join(lines)})
    return Turn("read_json" if ask.json else "read" if len(lines) < 2 else "read_lines", turn.question, turn.answer)


def read_line(ask: Ask) -> Turn | None:
    lines = ask.picture.lines
    if len(lines) < 2:
        return None
    index = ask.random.randrange(len(lines))
    nth = ask.random.choice((ORDINALS[index], "last" if index == len(lines) - 1 else ORDINALS[index]))
    answer = f"The {nth} line says {quoted(lines[index].text)}."
    return ask.turn("read_line", answer, {"text": lines[index].text}, nth=nth)


def chart_most(ask: Ask) -> Turn | None:
    chart = ask.picture.chart
    if chart is None:
        return None
    big = ask.random.random() < 0.5
    words = ("largest", "highest", "biggest") + (("tallest",) if chart.kind == "bar" else ())
    words = words if big else ("smallest", "lowest") + (("shortest",) if chart.kind == "bar" else ())
    label = chart.labels[chart.values.index(max(chart.values) if big else min(chart.values))]
    answer = f"The {'largest' if big else 'smallest'} is {quoted(label)}."
    return ask.turn("chart_most", answer, {"label": label}, label, most=ask.random.choice(words))


def chart_value(ask: Ask) -> Turn | None:
    chart = ask.picture.chart
    if chart is None:
        return None
    label = chart.labels[ask.random.randrange(len(chart.labels))]
    asked = quoted(label) if ask.random.random() < 0.4 else label
    facts = {"value": chart.values[chart.labels.index(label)]}
    return ask.turn("chart_value", f"{quoted(label)} is {value_of(chart, label)}.", facts, label, label=asked)


def chart_title(ask: Ask) -> Turn | None:
    chart = ask.picture.chart
    if chart is None or (not chart.title and ask.random.random() < 0.6):
        return None
    if not chart.title:
        return ask.turn("chart_title", "The chart has no title.")
    return ask.turn("chart_title", f"The title is {quoted(chart.title)}.", {"title": chart.title})


def says_yn(ask: Ask) -> Turn | None:
    if len(ask.picture.lines) != 1 or ask.picture.figures:
        return None
    text, right = ask.picture.lines[0].text, ask.random.random() < 0.5
    asked = text if right else ask.random.choice((ask.random.choice(SEEN_WORDS), str(ask.random.randrange(100))))
    if right != (asked == text):
        return None
    label = quoted(asked) if ask.random.random() < 0.5 else asked
    return ask.yes_or_no("says_yn", right, f"it says {quoted(text)}", label=label)


def greater(ask: Ask) -> Turn | None:
    """Which of two parts of a chart is larger, or whether one is."""
    chart = ask.picture.chart
    labels = ask.random.sample(chart.labels, 2) if chart else ["", ""]
    values = [chart.values[chart.labels.index(label)] for label in labels] if chart else [0, 0]
    if values[0] == values[1]:
        return None
    slots = {"label": labels[0], "other": labels[1], "more": ask.random.choice(("larger", "bigger", "higher", "more"))}
    if ask.random.random() < 0.5:
        return ask.turn("which_greater", f"{quoted(labels[values[0] < values[1]])} is larger.", **slots)
    if ask.random.random() < 0.3:
        slots["more"] = ask.random.choice(("smaller", "lower", "less"))
    right = (values[0] < values[1]) == (slots["more"] in ("smaller", "lower", "less"))
    said = " and ".join(f"{quoted(label)} is {value_of(chart, label)}" for label in labels) if chart else ""
    return ask.yes_or_no("greater_yn", right, said, **slots)


# What people ask without naming what they see: sizes, "the left one", "which is bigger", "the same color".


def size(ask: Ask) -> Turn | None:
    figure = _only(ask)
    if figure and ask.random.random() < 0.5:
        return ask.turn("only_size", f"The {figure.shape} is {figure.size}.", about=figure)
    figure = ask.one(shape_of)
    if figure is None:
        return None
    return ask.turn("size", f"The {figure.shape} is {figure.size}.", about=figure, shape=figure.shape)


def only_place(ask: Ask) -> Turn | None:
    figure = _only(ask)
    answer = f"The {figure.name} is {place(figure, ask.picture)}." if figure else ""
    return ask.turn("only_place", answer, about=figure) if figure else None


def size_yn(ask: Ask) -> Turn | None:
    figure = _only(ask) or ask.one(shape_of)
    if figure is None:
        return None
    asked = figure.size if ask.random.random() < 0.5 else ask.random.choice(SIZE_NAMES)
    slots = {"shape": figure.shape, "more": wordings.word(ask.random, "sizes", asked)}
    turn = ask.yes_or_no("size_yn", asked == figure.size, f"the {figure.shape} is {figure.size}", **slots)
    return turn if _only(ask) or figure.shape in turn.question else None


def round_yn(ask: Ask) -> Turn | None:
    figure = _only(ask)
    if figure is None:
        return None
    return ask.yes_or_no("round_yn", figure.shape in ("circle", "ring", "oval"), f"it is {article(figure.shape)}")


def either(ask: Ask) -> Turn | None:
    """This or that, one of which is right."""
    random, figure = ask.random, _only(ask)
    if figure and random.random() < 0.5:
        one, other = random.sample((figure.shape, random.choice([n for n in SHAPE_NAMES if n != figure.shape])), 2)
        return ask.turn("either_shape", f"It is {article(figure.shape)}.", article=article(one), other=article(other))
    figure = ask.one(shape_of)
    if figure is None:
        return None
    one, other = random.sample((figure.color, random.choice([n for n in COLOR_NAMES if n != figure.color])), 2)
    turn = ask.turn("either_color", _COLORED.format(figure), about=figure, shape=figure.shape, color=one, other=other)
    return turn if _only(ask) or figure.shape in turn.question else None


def of_two(ask: Ask) -> Turn | None:
    """Of two shapes: which is larger, what the left one is, whether it is larger."""
    if len(ask.picture.figures) != 2:
        return None
    random = ask.random
    figure, other = random.sample(ask.picture.figures, 2)
    side, differ = side_of(figure, other), of_different_size(figure, other)
    larger = random.random() < 0.6
    slots = {"more": random.choice(("larger", "bigger") if larger else ("smaller",))}
    if differ and random.random() < 0.4:
        found = max((figure, other), key=lambda f: f.radius if larger else -f.radius)
        return ask.turn(
            "which_larger", f"The {found.name} is {'larger' if larger else 'smaller'}.", about=found, **slots
        )
    if side is None:
        return None
    slots["side"] = wordings.word(random, "sides", side)
    slots["other"] = wordings.word(random, "sides", side_of(other, figure) or "")
    if differ and random.random() < 0.3 and figure.name != other.name:
        bigger = figure.radius > other.radius
        said = f"the {figure.name} is {'larger' if bigger else 'smaller'} than the {other.name}"
        return ask.yes_or_no("side_yn", bigger == larger, said, **slots)
    if random.random() < 0.5:
        return ask.turn("side_color", _COLORED.format(figure), about=figure, **slots)
    return ask.turn("side_shape", f"It is {article(figure.name)}.", about=figure, **slots)


def together(ask: Ask) -> Turn | None:
    """What all shapes or most have in common, how many colours there are, whether any overlap."""
    figures, random = reading_order(ask.picture), ask.random
    if not 2 <= len(figures) <= MOST_SHAPES:
        return None
    colors, shapes = (Counter(map(key, figures)) for key in (color_of, shape_of))
    task = random.choice(("same_color", "same_shape", "most_color", "most_shape", "number_of_colors", "overlap_yn"))
    if task == "number_of_colors":
        return ask.turn(task, f"I see {counted(len(colors), 'color', 'colors')}.")
    if task == "overlap_yn":
        pairs = [(one, other) for one in figures for other in figures if one is not other]
        reach = min(math.hypot(a.x - b.x, a.y - b.y) / (a.radius + b.radius) for a, b in pairs)
        if 0.8 < reach < 1.15 or (reach > 1 and random.random() < 0.6):
            return None
        return ask.yes_or_no(task, reach < 1, "they overlap" if reach < 1 else "they do not overlap")
    held = colors if task.endswith("color") else shapes
    (most, number), *others = held.most_common()
    named = [most if held is colors else plural(most)]
    if task.startswith("most"):
        alone = number > 1 and all(count < number for _, count in others)
        return ask.turn(task, f"Most are {named[0]}.") if alone else None
    if others and random.random() < 0.7:
        return None
    each = list(colors) if held is colors else [counted(number, name, plural(name)) for name, number in shapes.items()]
    return ask.yes_or_no(task, not others, f"I see {joined(each)}" if others else f"all are {named[0]}")


def in_order(ask: Ask) -> Turn | None:
    """The shapes along an axis, or the one at an end of it."""
    picture, random = ask.picture, ask.random
    axis = random.choice(("x", "-x", "y", "-y"))
    sign, across = (-1 if axis[0] == "-" else 1), axis[-1] == "x"
    places = {f: sign * (f.x / picture.width if across else f.y / picture.height) for f in picture.figures}
    ordered = sorted(places, key=lambda figure: places[figure])
    gaps = [places[b] - places[a] for a, b in pairwise(ordered)]
    if not 2 <= len(ordered) <= MOST_SHAPES or gaps[0] < 0.06:
        return None
    if random.random() < 0.4 and min(gaps) > 0.05:
        return ask.turn("in_order", f"I see {the_names(ordered)}.", spot=wordings.word(random, "orders", axis))
    figure, spot = (
        ordered[0],
        {"x": "at the left", "-x": "at the right", "y": "at the top", "-y": "at the bottom"}[axis],
    )
    most = wordings.word(random, "ends", spot)
    if random.random() < 0.4:
        return ask.turn("color_first_at", _COLORED.format(figure), about=figure, most=most)
    return ask.turn("first_at", f"I see {article(figure.name)} {spot}.", about=figure, most=most)


def ground_yn(ask: Ask) -> Turn | None:
    ground = ask.picture.ground
    if ground is None or ask.picture.strange:
        return None
    asked = ground if ask.random.random() < 0.5 else ask.random.choice(COLOR_NAMES)
    return ask.yes_or_no("ground_yn", asked == ground, f"the background is {ground}", color=asked)


# Short videos and two pictures at once.


def _motion(picture: Picture, *, first: bool) -> str:
    """A sentence, of what is seen for the first time or is known from the question."""
    figure, motion = picture.figures[0], picture.motion or ("stands",)
    name = figure.shape if motion[0] == "changes" or not first else figure.name
    subject = article(name).capitalize() if first else f"The {name}"
    if motion[0] == "moves":
        return f"{subject} moves {_toward(motion[1])}."
    if motion[0] == "stands":
        return f"{subject} does not move."
    return f"{subject} changes from {motion[1]} to {motion[2]}."


def _toward(direction: str) -> str:
    return direction if direction in ("up", "down") else f"to the {direction}"


def direction(ask: Ask) -> Turn | None:
    motion = ask.picture.motion
    if motion is None or motion[0] == "changes":
        return None
    facts = {"direction": motion[1] if motion[0] == "moves" else "none"}
    sentence = _motion(ask.picture, first=False)
    return ask.turn("direction", sentence, facts, shape=ask.picture.figures[0].shape)


def moves_yn(ask: Ask) -> Turn | None:
    motion = ask.picture.motion
    if motion is None or motion[0] == "changes" or (motion[0] == "moves" and ask.random.random() < 0.6):
        return None
    figure, moves = ask.picture.figures[0], motion[0] == "moves"
    turn = ask.turn("moves_yn", "", shape=figure.shape)
    right = moves != ("stand still" in turn.question)
    sentence = f"moves {_toward(motion[1])}" if moves else "does not move"
    return replace(turn, answer=f"{'Yes' if right else 'No'}, the {figure.shape} {sentence}.")


def which_more(ask: Ask) -> Turn | None:
    numbers = [len(picture.figures) for picture in ask.pictures]
    if len(numbers) != 2 or numbers[0] == numbers[1]:
        return None
    nth = "first" if numbers[0] > numbers[1] else "second"
    return ask.turn("which_more", f"The {nth} picture has more shapes.", {"picture": nth})


def which_has(ask: Ask) -> Turn | None:
    names = [{figure.name for figure in picture.figures} for picture in ask.pictures]
    choices = [(name, ORDINALS[nth]) for nth in (0, 1) for name in sorted(names[nth] - names[1 - nth])]
    if not choices:
        return None
    name, nth = ask.random.choice(choices)
    return ask.turn("which_has", f"The {name} is in the {nth} picture.", {"picture": nth}, article=article(name))


def in_nth(ask: Ask) -> Turn | None:
    """A question about one of two pictures, which it names."""
    nth = ask.random.randrange(2)
    one = replace(ask, pictures=[ask.pictures[nth]], json=False)
    turn = ask.random.choice((color, shape, count, read, describe) if one.picture.figures else (read, count))(one)
    if turn is None or (turn.task.startswith("read") and not one.picture.lines):
        return None
    question = turn.question
    for word in ("this picture", "the picture", "this image", "the image"):
        if word in question:
            named = f"the {ORDINALS[nth]} {word.split()[1]}"
            return Turn("in_nth", question.replace(word, named, 1), turn.answer)
    named = f"n the {ORDINALS[nth]} {ask.random.choice(('picture', 'image'))}"
    if ask.random.random() < 0.3 and question[0].isalpha():
        return Turn("in_nth", f"I{named}, {question[0].lower()}{question[1:]}", turn.answer)
    ending = question[-1] if question[-1] in "?.!" else ""
    return Turn("in_nth", f"{question.removesuffix(ending)} i{named}{ending}", turn.answer)


# What no picture answers: who the model is, and what it does not know.


def thing(ask: Ask) -> Turn | None:
    """Asked for what this world does not hold."""
    noun = ask.random.choice(UNSEEN_THINGS if ask.held_out else SEEN_THINGS)
    return ask.turn("thing", ONLY, noun=noun, nouns=noun + "s", article=article(noun))


def knowledge(ask: Ask) -> Turn | None:
    noun = ask.random.choice(UNSEEN_THINGS if ask.held_out else SEEN_THINGS)
    where, digit = ask.random.choice(PLACES), str(ask.random.randint(0, 99))
    return ask.turn("knowledge", ONLY, noun=noun, article=article(noun), place=where, digit=digit)


def unknown(ask: Ask) -> Turn | None:
    """What is asked about many pictures and no answer here says."""
    return ask.turn("unknown", ONLY, place=ask.random.choice(PLACES), article=article(ask.random.choice(SEEN_THINGS)))


_SEEING = (
    *("color", "shape", "count", "where", "relation", "exists", "largest", "describe", "read"),
    *("only_color", "only_shape", "is_shape", "ground"),
)


def no_picture(ask: Ask) -> Turn | None:
    """A question of seeing where nothing is to be seen."""
    spoken = not ask.held_out and ask.random.random() < 0.3
    return Turn("no_picture", _of_seeing(ask, ask.random.choice(_NAMING if spoken else _SEEING)), NO_PICTURE)


def not_known(ask: Ask) -> Turn | None:
    """A question of seeing about a picture of what this world does not hold."""
    if not ask.picture.strange:
        return None
    tasks: tuple[str, ...] = (
        _MOVING
        if ask.picture.motion and ask.random.random() < 0.4
        else (*_SEEING, "count", "count", "exists", *_CHARTS)
    )
    if not ask.held_out and ask.random.random() < 0.4:
        tasks = _SPOKEN
    return Turn("not_known", _of_seeing(ask, ask.random.choice(tasks)), ONLY)


_NAMING = ("size", "largest", "list", "colors", "which_larger", "most_color", "read_word", "read_number", "in_order")
_CHARTS = (
    "list",
    "colors",
    "chart_title",
    "chart_kind",
    "describe_chart",
    "chart_most",
    "chart_bars",
    "read_line",
    "ink",
)
_MOVING = ("clip", "direction", "moves_yn", "change")
_SPOKEN = tuple(
    task
    for task in wordings.SPOKEN
    if task not in (*SAID, *_MOVING, "knowledge", "next", "what_else") and not task.startswith(("its_", "which_has"))
)


def _of_seeing(ask: Ask, task: str) -> str:
    """A question about shapes, print or charts that no picture needs to have."""
    random = ask.random
    names, shades = random.sample(SHAPE_NAMES, 2), random.sample(COLOR_NAMES, 2)
    slots = {
        "shape": names[0],
        "color": shades[0],
        "things": random.choice(("shapes", plural(names[0]), f"{shades[0]} {plural(names[0])}")),
        "others": plural(names[1]),
        "thing": random.choice((names[0], f"{shades[0]} {names[0]}")),
        "other": f"{shades[1]} {names[1]}",
        "article": article(f"{shades[0]} {names[0]}"),
        "most": random.choice(("largest", "smallest", "biggest")),
        "more": random.choice(("larger", "bigger", "smaller")),
        "side": random.choice(("left", "right", "above", "below")),
        "spot": wordings.word(random, "orders", "x") if task == "in_order" else random.choice(SPOTS),
        "nth": random.choice(ORDINALS),
        "label": random.choice(SEEN_WORDS),
        "place": random.choice(PLACES),
    }
    return wordings.ask(random, task, held_out=ask.held_out, slots=slots)


# Second questions, which mean nothing without the first: "and the square?", "where is it?".


def follow_up(ask: Ask, before: Turn) -> Turn | None:
    """A question that leans on `before`, or None where there is none with one right answer."""
    turn = _follow_up(ask, before)
    return turn and replace(turn, task="second_turn")


def _follow_up(ask: Ask, before: Turn) -> Turn | None:
    about = before.about
    if before.task == "count":
        return _next_count(ask, before)
    if before.task in ("chart_value", "chart_most") and isinstance(about, str) and ask.picture.chart:
        return _next_value(ask, before, about)
    if not isinstance(about, Figure):
        return None
    if before.task in ("color", "shape", "where") and ask.random.random() < 0.6:
        return _next_figure(ask, before)
    if not ask.held_out and ask.random.random() < 0.5:
        others = [figure for figure in reading_order(ask.picture) if figure is not about]
        if others and len(others) < MOST_SHAPES and not ask.picture.lines and ask.random.random() < 0.4:
            return _lean(ask, "what_else", f"I see {the_names(others)}.")
        if before.task in ("color", "where", "only_color", "color_at") and ask.random.random() < 0.4:
            return _lean(ask, "its_shape", f"It is {article(about.shape)}.")
        if before.task not in ("size", "only_size"):
            return _lean(ask, "its_size", f"The {about.shape} is {about.size}.")
    if before.task in ("shape", "where", "color", "largest", "direction"):
        options = {"color": ("place",), "where": ("color",)}.get(before.task, ("color", "place"))
        if ask.random.choice(options) == "color":
            return _lean(ask, "its_color", f"The {about.shape} is {about.color}.")
        return _lean(ask, "its_place", f"The {about.name} is {place(about, ask.picture)}.")
    return None


def _lean(ask: Ask, task: str, answer: str, **slots: str) -> Turn:
    return Turn("", wordings.ask(ask.random, task, held_out=ask.held_out, slots=slots), answer)


def _next_count(ask: Ask, before: Turn) -> Turn | None:
    names = sorted({figure.shape for figure in ask.picture.figures})
    others = [name for name in names if plural(name) not in before.question and name not in before.answer]
    if not others:
        return None
    name = ask.random.choice(others)
    number = sum(figure.shape == name for figure in ask.picture.figures)
    return _lean(ask, "next", f"I see {counted(number, name, plural(name))}.", next=f"the {plural(name)}")


def _next_figure(ask: Ask, before: Turn) -> Turn | None:
    key = {"shape": color_of, "color": shape_of}.get(before.task, name_of)
    others = [figure for figure in unique(ask.picture, key) if figure is not before.about]
    if not others:
        return None
    figure = ask.random.choice(others)
    if before.task == "shape":
        thing, answer = f"the {figure.color} one", f"The {figure.color} shape is a {figure.shape}."
    elif before.task == "color":
        thing, answer = f"the {figure.shape}", f"The {figure.shape} is {figure.color}."
    else:
        thing, answer = f"the {figure.name}", f"The {figure.name} is {place(figure, ask.picture)}."
    if len(ask.picture.figures) == 2 and not ask.held_out and ask.random.random() < 0.4:
        thing = ask.random.choice(("the other one", "the other", "the other shape"))
    return _lean(ask, "next", answer, next=thing)


def _next_value(ask: Ask, before: Turn, about: str) -> Turn | None:
    chart = ask.picture.chart
    if chart is None:
        return None
    if before.task == "chart_most":
        return _lean(ask, "its_value", f"{quoted(about)} is {value_of(chart, about)}.")
    label = ask.random.choice([name for name in chart.labels if name != about])
    return _lean(ask, "next", f"{quoted(label)} is {value_of(chart, label)}.", next=label)


def change(ask: Ask) -> Turn | None:
    motion = ask.picture.motion
    if motion is None or motion[0] != "changes":
        return None
    return ask.turn("change", _motion(ask.picture, first=False), shape=ask.picture.figures[0].shape)


def _small_talk(task: str) -> Maker:
    return lambda ask: ask.turn(task, SAID[task])


MAKERS: dict[str, Maker] = {
    "color": color,
    "only_color": only_color,
    "shape": shape,
    "only_shape": only_shape,
    **{task: _whole(task) for task in ("ground", "plain_color", "colors", "ink", "clip")},
    **{task: _whole(task) for task in ("chart_kind", "chart_bars", "chart_labels")},
    "shapes": _whole("list"),
    "lines_of_text": _whole("lines"),
    **{task: _small_talk(task) for task in SAID},
    **{
        function.__name__: function
        for function in (
            *(is_shape, is_color, where, largest, shape_in_keys, bar_in_keys, count, relation, relation_yn, beside),
            *(exists, compare_yn, larger_of, more_yn, at_place, color_at, describe, read, read_line, chart_most),
            *(chart_value, chart_title, direction, moves_yn, change, which_more, which_has, in_nth, thing, knowledge),
            *(
                no_picture,
                not_known,
                unknown,
                says_yn,
                greater,
                size,
                only_place,
                size_yn,
                round_yn,
                either,
                of_two,
                together,
            ),
            *(in_order, ground_yn),
        )
    },
}
