"""What can be asked about pictures, with the right answers, and second questions, which lean on the one before.

Counts, colours and places in the answers are facts of the generator. MAKERS has all questions by name.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from operator import attrgetter
from random import Random

from training.vision import wordings
from training.vision.pictures import COLOR_NAMES, INKS, SHAPE_NAMES, SIZE_NAMES, Chart, Figure, Picture, plural
from training.vision.words import LETTERS, PLACES, SEEN_THINGS, SEEN_WORDS, UNSEEN_THINGS

ORDINALS = ("first", "second", "third")
MOST_SHAPES = 6
"""That are counted and named."""
MANY = f"I see more than {MOST_SHAPES} shapes."
SIDES = {"left": "left of", "right": "right of", "above": "above", "below": "below"}
"""What is said of a shape on each side of another."""
About = Figure | str | tuple[Figure, ...] | None


@dataclass(frozen=True)
class Turn:
    task: str
    question: str
    answer: str
    about: About = None
    """The figures or label of a chart that the answer names, for the next question's "it", or its whole answer."""
    forced: frozenset[str] = frozenset()
    """Keys of an answer in JSON that only a schema could have asked for: training does not want them from the model."""
    shows: int = 0
    """How many more pictures come with the question, after the first one."""


Option = tuple[str, str, About, object, dict[str, str]]
"""What can be asked: a task, the answer, what that names, its facts in JSON, and slots of the question."""


def option(task: str, answer: str, about: About = None, facts: object = None, **slots: str) -> Option:
    """Without facts those of an answer that begins with yes or no."""
    sure = {"Yes,": "yes", "No,": "no"}.get(answer.split()[0])
    return task, answer, about, facts or (sure and {"answer": sure}), slots


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

    def turn(self, task: str, answer: str, facts: object = None, about: About = None, **slots: str) -> Turn:
        """facts: of the answer in JSON; without any it is a sentence in any case."""
        facts = UNKNOWN if answer == ONLY else facts
        as_json = self.json and bool(facts)
        question = wordings.ask(self.random, task, held_out=self.held_out, json=as_json, slots=slots)
        if not as_json:
            return Turn(task, question, answer, about)
        told = facts if self.held_out else wordings.varied(self.random, facts, answer)
        forced = frozenset(() if told == facts else wordings.keys_of(told))
        return Turn(f"{task}_json", question, json.dumps(told), forced=forced)

    def called(self, figure: Figure) -> str:
        """The name of its shape; many people call a ring a circle."""
        alone = figure.shape == "ring" and all(other.shape != "circle" for other in self.picture.figures)
        return "circle" if alone and not self.held_out and self.random.random() < 0.25 else figure.shape

    def asked(self, right: str, names: Sequence[str]) -> str:
        """What is asked for: what is right, or just as often another one."""
        return self.random.choice((right, self.random.choice([name for name in names if name != right])))

    def named(self, figure: Figure) -> str:
        """ "circle" where that is enough and chosen, "red circle" otherwise."""
        alone = sum(other.shape == figure.shape for other in self.picture.figures) == 1
        return figure.shape if alone and self.random.random() < 0.3 else figure.name


Maker = Callable[[Ask], Turn | None]
"""None where the question cannot be asked: the answer would be arguable."""


name_of, shape_of, color_of = attrgetter("name"), attrgetter("shape"), attrgetter("color")


def unique(picture: Picture, key: Callable[[Figure], str]) -> list[Figure]:
    counts = Counter(key(figure) for figure in picture.figures)
    return [figure for figure in picture.figures if counts[key(figure)] == 1]


def yes(right: bool) -> str:
    return "Yes" if right else "No"


def colors_of(figures: Sequence[Figure]) -> str:
    return joined(list(dict.fromkeys(map(color_of, figures))))


def filling(figure: Figure) -> str:
    return "only an outline" if figure.hollow else "filled"


def _of(find: Callable[[Ask], Iterable[Option]], *tasks: str) -> Maker:
    """Any of what is found, or of these tasks."""

    def maker(ask: Ask) -> Turn | None:
        found = [option for option in find(ask) if not tasks or option[0] in tasks]
        if not found:
            return None
        task, answer, about, facts, slots = ask.random.choice(found)
        return ask.turn(task, answer, facts, about, **slots)

    return maker


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


def data_of(chart: Chart) -> dict[str, object]:
    """For an answer in JSON."""
    return {"labels": list(chart.labels), "values": list(chart.values)}


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
UNKNOWN = {"answer": "unknown"}
"""The same in JSON."""
NO_PICTURE = "I see no picture. Please send one."
SAID: dict[str, str] = {task: said.format(known=KNOWN) for task, said in wordings.NATURAL["said"].items()}
"""Answers of small talk by task."""


_BROAD = 0.2
"""Of the radius: broader outlines are neither thin lines nor filled shapes."""


def _one(ask: Ask) -> Iterator[Option]:
    """Of a shape that has no other of its kind, or is the only one."""
    picture, only = ask.picture, _only(ask)
    for f in () if picture.motion and picture.motion[0] == "changes" else unique(picture, shape_of):
        asked = ask.asked(f.color, COLOR_NAMES)
        name = ask.called(f)
        yield option("color", _COLORED.format(f), f, {"color": f.color}, shape=name)
        yield option("is_color", f"{yes(asked == f.color)}, the {f.shape} is {f.color}.", shape=name, color=asked)
    for f in unique(picture, color_of):
        said = f"The {f.color} shape is {article(f.shape)}."
        yield option("shape", said, f, {"shape": f.shape}, color=f.color)
    for f in unique(picture, name_of):
        name, facts = ask.named(f), {"position": position(f, picture)}
        yield option("where", f"The {name} is {place(f, picture)}.", f, facts, thing=name)
    if only:
        yield option("only_color", _COLORED.format(only), only, {"color": only.color})
        yield option("only_shape", f"It is {article(only.shape)}.", only, {"shape": only.shape})
        asked = ask.asked(only.shape, SHAPE_NAMES)
        yield option("is_shape", f"{yes(asked == only.shape)}, it is {article(only.shape)}.", article=article(asked))


def _plain(ask: Ask) -> Iterator[Option]:
    """What people ask of one shape: its size and place, whether it is this or that, whether it is filled."""
    only, random = _only(ask), ask.random
    for f in unique(ask.picture, shape_of):
        asked, said = ask.asked(f.size, SIZE_NAMES), f"the {f.shape} is {f.size}."
        yield option("only_size" if only and random.random() < 0.5 else "size", "T" + said[1:], f, shape=f.shape)
        more = wordings.word(random, "sizes", asked)
        yield option("size_yn", f"{yes(asked == f.size)}, {said}", shape=f.shape, more=more)
        one, other = random.sample((f.color, random.choice([n for n in COLOR_NAMES if n != f.color])), 2)
        yield option("either_color", _COLORED.format(f), f, shape=f.shape, color=one, other=other)
        if f.hollow <= _BROAD and (f.hollow or random.random() < 0.4):
            name, said = ask.called(f), f"the {f.shape} is {filling(f)}."
            if f in unique(ask.picture, color_of) and random.random() < 0.25:
                name = f"{f.color} {random.choice(('one', 'shape', 'thing'))}"
            yield option("filled_yn", f"{yes(not f.hollow)}, {said}", f, shape=name)
            yield option("outline_yn", f"{yes(f.hollow > 0)}, {said}", f, shape=name)
    if only:
        one, other = random.sample((only.shape, random.choice([n for n in SHAPE_NAMES if n != only.shape])), 2)
        said = f"t is {article(only.shape)}."
        yield option("either_shape", "I" + said, article=article(one), other=article(other))
        yield option("only_place", f"The {only.name} is {place(only, ask.picture)}.", only)
        yield option("round_yn", f"{yes(only.shape in ('circle', 'ring', 'oval'))}, i{said}")
        asked = ask.asked(only.color, COLOR_NAMES)
        yield option("it_is_color", f"{yes(asked == only.color)}, the {only.shape} is {only.color}.", only, color=asked)


def of_shape(ask: Ask) -> Turn | None:
    """ "It" is understood where there is one shape."""
    turn = _of(_plain)(ask)
    return turn if turn is None or _only(ask) or any(name in turn.question for name in SHAPE_NAMES) else None


def _only(ask: Ask) -> Figure | None:
    picture = ask.picture
    return picture.figures[0] if len(picture.figures) == 1 and not picture.lines else None


def _told(ask: Ask) -> Iterator[Option]:
    """Of the picture as a whole."""
    picture = ask.picture
    figures, lines, chart = reading_order(picture), picture.lines, picture.chart
    if picture.ground:
        yield option("ground", f"The background is {picture.ground}.", None, {"color": picture.ground})
        if not figures and not lines:
            yield option("plain_color", f"The picture is {picture.ground}.", None, {"color": picture.ground})
    if not lines and not chart:
        known = len(figures) <= MOST_SHAPES
        yield option("list", f"I see {the_names(figures)}." if known else MANY, None, known and shapes_of(figures))
    if figures and not lines:
        colors = list(dict.fromkeys(figure.color for figure in figures))
        yield option("colors", f"I see {joined(colors)}.", None, {"colors": colors})
    if lines:
        yield option("lines", f"I see {counted(len(lines), 'line', 'lines')} of text.", None, {"count": len(lines)})
        yield option("ink", f"The text is {lines[0].ink}.", None, {"color": lines[0].ink})
    if chart:
        number, part = len(chart.labels), "bars" if chart.kind == "bar" else "parts"
        yield option("chart_kind", f"This is a {chart.kind} chart.", None, {"chart": chart.kind})
        yield option("chart_bars", f"I see {number} {part}.", None, {"count": number})
        labels = joined([quoted(label) for label in chart.labels])
        yield option("chart_labels", f"The labels are {labels}.", None, {"labels": list(chart.labels)})
    if picture.motion:
        yield option("clip", _motion(picture, first=True))


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


def overview_in_keys(ask: Ask) -> Turn | None:
    """How many shapes there are, the largest and smallest one and the colours, under keys that the question names."""
    figures, found = ask.picture.figures, _extreme(ask)
    if found is None or len(figures) > MOST_SHAPES:
        return None
    colors = list(dict.fromkeys(figure.color for figure in reading_order(ask.picture)))
    facts = {"count": len(figures), "largest" if found[1] else "smallest": found[0].name, "colors": colors}
    return _in_keys(ask, "overview", facts, "")


def _in_keys(ask: Ask, task: str, facts: Mapping[str, object], most: str) -> Turn:
    told = wordings.chosen(ask.random, facts)
    question = wordings.ask(ask.random, task, held_out=ask.held_out, json=True, keys=tuple(told), slots={"most": most})
    return Turn(f"{task}_keys", question, json.dumps(told))


def _pairs(ask: Ask) -> Iterator[Option]:
    """On which side of another shape one is, and which is larger."""
    picture, random = ask.picture, ask.random
    opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}
    for first, second in permutations(unique(picture, name_of), 2):
        one, other, side = ask.named(first), ask.named(second), side_of(first, second)
        apart = max(abs(first.x - second.x), abs(first.y - second.y))
        if side and apart > 0.12 * min(picture.width, picture.height):
            said = f"the {one} is {SIDES[side]} the {other}."
            yield option("relation", "T" + said[1:], None, {"side": side}, thing=one, other=other)
            asked = random.choice((side, opposite[side]))
            to = random.choice(("", "to the ")) if asked in ("left", "right") else ""
            said = f"{yes(asked == side)}, {said}"
            yield option("relation_yn", said, thing=one, other=other, side=f"{to}{SIDES[asked]}")
        if of_different_size(first, second):
            bigger, more = first.radius > second.radius, random.choice(("larger", "bigger", "smaller", "smaller"))
            right, word = bigger == (more != "smaller"), "larger" if bigger else "smaller"
            said = f"{yes(right)}, the {one} is {word} than the {other}."
            yield option("compare_yn", said, thing=one, other=other, more=more)
            said = f"The {one if right else other} is {'smaller' if more == 'smaller' else 'larger'}."
            yield option("larger_of", said, thing=one, other=other, more=more)


def outlines(ask: Ask) -> Iterator[Option]:
    """Which of several shapes is filled and which is only an outline."""
    figures = ask.picture.figures
    hollow, filled = [f for f in figures if f.hollow], [f for f in figures if not f.hollow]
    if not 2 <= len(figures) <= MOST_SHAPES or max(figure.hollow for figure in figures) > _BROAD:
        return
    for task, there in (("which_filled", filled), ("which_outline", hollow)):
        if len(there) == 1:
            yield option(task, f"The {there[0].name} is {filling(there[0])}.", there[0])
    if len(hollow) == 1:
        yield option("outline_color", f"The outline is {hollow[0].color}.", hollow[0])
    if not filled or (not hollow and ask.random.random() < 0.2):
        yield option("filled", "They are only outlines." if hollow else "They are filled.")


_LEAST_COVER = 0.06
"""Of a shape: one might argue whether less is covered at all."""


def overlaps(ask: Ask) -> Iterator[Option]:
    """Which of two shapes lies in front of the other."""
    covers, named = ask.picture.covers, {figure for figure in unique(ask.picture, name_of) if not figure.hollow}
    if min(covers.values(), default=0.0) < _LEAST_COVER:
        return
    for front, behind in filter(named.issuperset, covers):
        one, other = ask.named(front), ask.named(behind)
        under, over = ([f[nth] for f in covers if f[1 - nth] == of] for nth, of in ((1, front), (0, behind)))
        yield option("behind", f"I see {the_names(under)} behind the {one}.", thing=one)
        yield option("in_front_of", f"I see {the_names(over)} in front of the {other}.", thing=other)
        yield option("front_yn", f"Yes, the {one} is in front of the {other}.", thing=one, other=other)
        yield option("front_yn", f"No, the {other} is behind the {one}.", thing=other, other=one)
        if len(ask.picture.figures) == 2:
            yield option("which_front", f"The {front.name} is in front.", front)
            yield option("which_behind", f"The {behind.name} is behind.", behind)


def group(ask: Ask) -> Iterator[Option]:
    """Of shapes of a kind, or of all: their colours, whether all or any have one, how many are not of a kind."""
    picture, random, figures = ask.picture, ask.random, tuple(reading_order(ask.picture))
    if not 0 < len(figures) <= MOST_SHAPES:
        return
    one = max(random.choices(figures, k=3), key=lambda figure: sum(figure.shape == other.shape for other in figures))
    things, asked = plural(one.shape), ask.asked(one.color, COLOR_NAMES)
    for kind, key in ((one.color, color_of), (things, shape_of))[random.randrange(3) :]:
        others = tuple(figure for figure in figures if key(figure) != key(one))
        number = counted(len(others), "shape that is", "shapes that are")
        yield option("count_not", f"I see {number} not {kind}.", others, {"count": len(others)}, kind=kind)
    there = tuple(figure for figure in figures if figure.color == asked)
    if not picture.lines and picture.ground not in (None, asked):
        said = f"Yes, I see {the_names(there)}." if there else f"No, nothing is {asked}."
        yield option("anything", said, there[0] if len(there) == 1 else there or None, color=asked)
    if picture.ground and random.random() < 0.3:
        said = f"{yes(picture.ground == asked)}, the background is {picture.ground}."
        yield option("ground_yn", said, color=asked)
    same = tuple(figure for figure in figures if figure.shape == one.shape)
    for task, there in (("group", same), ("all", figures)):
        colors = colors_of(there)
        if len(there) > 1 and (colors == one.color or random.random() < 0.5):
            said = f"Yes, all are {asked}." if colors == asked else f"No, they are {colors}."
            yield option(f"{task}_yn", said, things=things, color=asked)
    if len(same) > 1:
        yield option("group_color", f"The {things} are {colors_of(same)}.", same, things=things)


def of_two(ask: Ask) -> Iterator[Option]:
    """Of two shapes: which is larger, what the left one is, whether it is larger."""
    random = ask.random
    for figure, other in permutations(ask.picture.figures, 2) if len(ask.picture.figures) == 2 else ():
        more = random.choice(("larger", "bigger", "smaller"))
        larger, bigger = more != "smaller", figure.radius > other.radius
        side, differ, word = side_of(figure, other), of_different_size(figure, other), "larger" if bigger else "smaller"
        if differ and bigger == larger:
            yield option("which_larger", f"The {figure.name} is {word}.", figure, more=more)
        if side is None:
            continue
        named = wordings.word(random, "sides", side)
        yield option("side_color", _COLORED.format(figure), figure, side=named)
        yield option("side_shape", f"It is {article(figure.name)}.", figure, side=named)
        if differ and figure.name != other.name:
            said = f"{yes(bigger == larger)}, the {figure.name} is {word} than the {other.name}."
            opposite = wordings.word(random, "sides", side_of(other, figure) or "")
            yield option("side_yn", said, side=named, other=opposite, more=more)


def together(ask: Ask) -> Iterator[Option]:
    """What all shapes or most have in common, how many colours there are, whether any overlap."""
    figures, random = reading_order(ask.picture), ask.random
    if not 2 <= len(figures) <= MOST_SHAPES:
        return
    colors, shapes = (Counter(map(key, figures)) for key in (color_of, shape_of))
    yield option("number_of_colors", f"I see {counted(len(colors), 'color', 'colors')}.")
    pairs = permutations(figures, 2)
    reach = min(math.hypot(a.x - b.x, a.y - b.y) / (a.radius + b.radius) for a, b in pairs)
    if reach <= 0.8 or (reach >= 1.15 and random.random() < 0.4):
        yield option("overlap_yn", "Yes, they overlap." if reach < 1 else "No, they do not overlap.")
    numbers = [counted(number, name, plural(name)) for name, number in shapes.items()]
    for kind, held, each in (("color", colors, [*colors]), ("shape", shapes, numbers)):
        (most, number), *others = held.most_common()
        named = most if kind == "color" else plural(most)
        if number > 1 and all(count < number for _, count in others):
            yield option(f"most_{kind}", f"Most are {named}.")
        if not others or random.random() < 0.3:
            yield option(f"same_{kind}", f"No, I see {joined(each)}." if others else f"Yes, all are {named}.")


def count(ask: Ask) -> Turn | None:
    random, figures = ask.random, ask.picture.figures
    kind = random.choices(("all", "shape", "color", "both"), (0.25, 0.3, 0.25, 0.2))[0]
    one = random.choice(figures) if figures and random.random() < 0.85 else None
    shape_name = one.shape if one else random.choice(SHAPE_NAMES)
    color_name = one.color if one else random.choice(COLOR_NAMES)
    if len(figures) > MOST_SHAPES:
        return ask.turn("count", MANY, things="shapes")
    shapes = SHAPE_NAMES if kind in ("all", "color") else (shape_name,)
    colors = COLOR_NAMES if kind in ("all", "shape") else (color_name,)
    there = tuple(figure for figure in reading_order(ask.picture) if figure.shape in shapes and figure.color in colors)
    front, single = "" if len(colors) > 1 else f"{color_name} ", "shape" if len(shapes) > 1 else shape_name
    answer = f"I see {counted(len(there), front + single, front + plural(single))}."
    return ask.turn("count", answer, {"count": len(there)}, there, things=front + plural(single))


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
        name = ""
        while not name or name in names:
            name = f"{random.choice(COLOR_NAMES)} {random.choice(SHAPE_NAMES)}"
            if figures and random.random() < 0.6:
                one, other = random.choice(figures), random.choice(figures)
                name = random.choice((f"{one.color} {other.shape}", f"{one.color} {random.choice(SHAPE_NAMES)}", name))
            elif random.random() < 0.5:
                name = name.split()[1]
    said = f"{yes(right)}, there is {article(name) if right else f'no {name}'}."
    return ask.turn("exists", said, {"answer": yes(right).lower()}, article=article(name), things=plural(name))


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
    return replace(turn, answer=f"{yes(right)}, I see {first} and {second}.")


_UNCLEAR = 0.07
"""Of the picture's side: so near to the line between two halves nobody should be asked for one of them."""
_HALVES = ("at the left", "at the right", "at the top", "at the bottom")


def _inside(half: str, figure: Figure, picture: Picture) -> float:
    """How far a shape is inside a half."""
    right, down = figure.x / picture.width - 0.5, figure.y / picture.height - 0.5
    return dict(zip(_HALVES, (-right, right, -down, down), strict=True))[half]


_PARTS: dict[str, str] = wordings.NATURAL["parts"]
"""The corners, and last the center."""
SPOTS = tuple("|".join((*wordings.NATURAL["halves"].values(), *_PARTS.values())).split("|"))
"""All names of parts in questions."""


def _in_part(ask: Ask) -> tuple[str, str, list[Figure]] | None:
    """The name of a part of the picture, what it is called in the question, and the shapes there; None where one might
    argue about one of them."""
    picture, random = ask.picture, ask.random
    if not picture.figures:
        return None
    spots = {figure: place(figure, picture) for figure in picture.figures}
    kind = random.random()
    if kind < 0.6:
        spot = random.choice(_HALVES)
        if any(abs(_inside(spot, figure, picture)) < _UNCLEAR for figure in spots):
            return None
        there = [figure for figure in spots if _inside(spot, figure, picture) > 0]
    elif kind < 0.9:
        spot = random.choice(tuple(_PARTS)[:4])
        there = [figure for figure, found in spots.items() if found == spot]
        halves = [f"at the {word}" for word in spot.split()[2:]]
        if any(min(_inside(half, f, picture) for half in halves) > 0 for f in spots if f not in there):
            return None
    else:
        spot = "in the center"
        there = [figure for figure, found in spots.items() if found == spot]
    if not there and random.random() < 0.7:
        return None
    asked = wordings.word(random, "halves" if spot in _HALVES else "parts", spot)
    return spot, asked, [figure for figure in reading_order(picture) if figure in there]


def _parts(ask: Ask) -> Iterator[Option]:
    found = _in_part(ask)
    if found is None:
        return
    spot, asked, figures = found
    about = figures[0] if len(figures) == 1 else None
    yield option("at_place", f"I see {the_names(figures)} {spot}.", about, shapes_of(figures), spot=asked)
    if about:
        yield option("color_at", _COLORED.format(about), about, {"color": about.color}, spot=asked)


def in_order(ask: Ask) -> Iterator[Option]:
    """The shapes along an axis, or the one at an end of it."""
    picture, random = ask.picture, ask.random
    for axis, spot in (("x", "left"), ("-x", "right"), ("y", "top"), ("-y", "bottom")):
        inside = {figure: _inside(f"at the {spot}", figure, picture) for figure in picture.figures}
        ordered = sorted(picture.figures, key=lambda figure: -inside[figure])
        gaps = [inside[a] - inside[b] for a, b in pairwise(ordered)]
        if not 2 <= len(ordered) <= MOST_SHAPES or gaps[0] < 0.06:
            continue
        if min(gaps) > 0.05:
            yield option("in_order", f"I see {the_names(ordered)}.", spot=wordings.word(random, "orders", axis))
        most, figure = wordings.word(random, "ends", f"at the {spot}"), ordered[0]
        yield option("color_first_at", _COLORED.format(figure), figure, most=most)
        said = f"I see {article(figure.name)} at the {spot}."
        yield option("first_at", said, figure, most=most)
        if inside[figure] > _UNCLEAR and all(f.shape != figure.shape or inside[f] < -_UNCLEAR for f in ordered[1:]):
            asked = wordings.word(random, "halves", f"at the {spot}")
            yield option("shape_at", said, figure, shape=figure.shape, spot=asked)


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
    facts = data_of(picture.chart) if picture.chart else shapes_of(reading_order(picture))
    if ask.json and (picture.lines or not facts):
        return None
    task = "describe_chart" if picture.chart and ask.random.random() < 0.5 else "describe"
    turn = ask.turn(task, description(picture), facts)
    return Turn("list_json", turn.question, turn.answer) if ask.json else replace(turn, task="describe")


def read(ask: Ask) -> Turn | None:
    lines = [line.text for line in ask.picture.lines]
    if not lines and ask.random.random() < 0.7:
        return None
    answer = f"It says {joined([quoted(line) for line in lines])}." if lines else "I see no text."
    text = lines[0] if lines else ""
    letters = text.isalpha() and len(text)
    suits = {"number": text.isdigit(), "word": letters > 1, "letter": letters == 1}
    kinds = [kind for kind, fits in suits.items() if fits or not lines]
    spoken = not ask.held_out and len(lines) < 2 and kinds and ask.random.random() < 0.35
    task = f"read_{ask.random.choice(kinds)}" if spoken else "read"
    turn = ask.turn(task, answer, {"text": " ".join(lines)})
    return Turn("read_json" if ask.json else "read" if len(lines) < 2 else "read_lines", turn.question, turn.answer)


def of_text(ask: Ask) -> Iterator[Option]:
    """Of print: whether it has a colour or says something, how many letters it has, whether it has a certain one."""
    lines, random = ask.picture.lines, ask.random
    text, ink = lines[0].text, lines[0].ink
    asked, kind = ask.asked(ink, INKS), "letter" if text.isalpha() else "digit"
    for nth, line in enumerate(lines if len(lines) > 1 else ()):
        named = random.choice((ORDINALS[nth], "last" if nth == len(lines) - 1 else ORDINALS[nth]))
        said = f"The {named} line says {quoted(line.text)}."
        yield option("read_line", said, None, {"text": line.text}, nth=named)
    yield option("ink_yn", f"{yes(asked == ink)}, the text is {ink}.", color=asked)
    if len(lines) == 1:
        other = random.choice((text, random.choice(SEEN_WORDS), str(random.randrange(100))))
        yield option("says_yn", f"{yes(text == other)}, it says {quoted(text)}.", label=quoted(other))
    if len(lines) == 1 and (text.isalpha() or text.isdigit()):
        said = f"It has {counted(len(text), kind, kind + 's')}."
        yield option("letters", said, None, {"count": len(text)}, things=kind + "s")
        one = random.choice((random.choice(text), random.choice(LETTERS if text.isalpha() else "0123456789"))).upper()
        said = f"Yes, I see the {kind}" if one in text.upper() else f"No, I see no {kind}"
        a = "an " if one in "AEFHILMNORSX8" else "a "
        yield option("letter_yn", f"{said} {quoted(one)}.", article=a + one, label=f"{kind} {one}")


def _chart(ask: Ask) -> Iterator[Option]:
    """Its title, the largest or smallest part, the value of one."""
    chart, random = ask.picture.chart, ask.random
    if chart is None:
        return
    word, upright = ("smallest", "largest")[random.random() < 0.5], chart.kind == "bar"
    words = ("largest", "highest", "biggest", "tallest") if word == "largest" else ("smallest", "lowest", "shortest")
    label = chart.labels[chart.values.index((max if word == "largest" else min)(chart.values))]
    said, most = f"The {word} is {quoted(label)}.", random.choice(words if upright else words[: 3 - (word[0] == "s")])
    yield option("chart_most", said, label, {"label": label}, most=most)
    if not ask.held_out:
        yield option("chart_top" if word == "largest" else "chart_bottom", said, label)
    label = random.choice(chart.labels)
    asked = quoted(label) if random.random() < 0.4 else _spoken(ask, label)
    facts = {"value": chart.values[chart.labels.index(label)]}
    yield option("chart_value", f"{quoted(label)} is {value_of(chart, label)}.", label, facts, label=asked)
    if chart.title:
        yield option("chart_title", f"The title is {quoted(chart.title)}.", None, {"title": chart.title})
    elif random.random() < 0.4:
        yield option("chart_title", "The chart has no title.")


def of_parts(ask: Ask) -> Iterator[Option]:
    """Of two parts of a chart: which is larger, how much, their colours; or the whole data in JSON."""
    chart, random = ask.picture.chart, ask.random
    if chart is None:
        return
    label, second = names = random.sample(chart.labels, 2)
    one, other = (chart.values[chart.labels.index(name)] for name in names)
    words = ("larger", "bigger", "higher", "more", "smaller", "lower", "less")
    more = random.choice(words)
    slots = {"label": _spoken(ask, label), "other": _spoken(ask, second), "more": more}
    less, percent = more in ("smaller", "lower", "less"), "%" if chart.kind == "pie" else ""
    said = " and ".join(f"{quoted(name)} is {value_of(chart, name)}" for name in names)
    yield option("chart_data", json.dumps(data_of(chart)))
    if chart.kind == "bar" and (len(set(chart.colors)) == 1 or random.random() < 0.3):
        yield option("bar_colors", f"The bars are {joined(list(dict.fromkeys(chart.colors)))}.")
    yield option("chart_color", f"{quoted(label)} is {chart.colors[chart.labels.index(label)]}.", **slots)
    yield option("chart_apart", f"{said}, a difference of {abs(one - other)}{percent}.", **slots)
    if one != other:
        yield option("greater_yn", f"{yes((one < other) == less)}, {said}.", **slots)
        yield option(
            "which_greater",
            f"{quoted(label if one > other else second)} is larger.",
            **slots | {"more": random.choice(words[:4])},
        )


def _spoken(ask: Ask, label: str) -> str:
    """As people write it: "Tuesday", "dogs"."""
    said = str(wordings.NATURAL["aliases"].get(label, label.lower()))
    return label if ask.held_out else ask.random.choice((label, said))


# Short videos and two pictures at once.


def _motion(picture: Picture, *, first: bool) -> str:
    """A sentence, of what is seen for the first time or is known from the question."""
    figure, motion = picture.figures[0], picture.motion or ("stands",)
    name = figure.shape if motion[0] == "changes" or not first else figure.name
    return f"{article(name).capitalize() if first else f'The {name}'} {_does(motion)}."


def _does(motion: Sequence[str]) -> str:
    kind, *how = motion
    if kind == "changes":
        return f"changes from {how[0]} to {how[1]}"
    return f"moves {_toward(how[0])}" if kind == "moves" else "does not move"


def _toward(direction: str) -> str:
    return direction if direction in ("up", "down") else f"to the {direction}"


def of_clip(ask: Ask) -> Iterator[Option]:
    """Where it moves, whether it moves there or changes its colour; its colour and place at the start and the end."""
    picture, last, motion = ask.picture, ask.picture.end, ask.picture.motion
    if last is None or motion is None:
        return
    name, moves, changes = last.shape, motion[0] == "moves", motion[0] == "changes"
    if not changes:
        said = _motion(picture, first=False)
        yield option("direction", said, None, {"direction": motion[1] if moves else "none"}, shape=name)
    asked = ask.asked(motion[1] if moves else "left", ("left", "right", "up", "down"))
    said = _does(motion) if moves else "does not move"
    said = f"{yes(moves and asked == motion[1])}, the {name} {said}."
    yield option("toward_yn", said, shape=name, side=_toward(asked))
    said = _does(motion) if changes else f"stays {last.color}"
    yield option("change_yn", f"{yes(changes)}, the {name} {said}.", shape=name)
    ends = {"start": picture.figures[0], "end": last}
    spots = [3 * v for f in ends.values() for v in (f.x / picture.width, f.y / picture.height)]
    for one, other in permutations(ends):
        said, then = (f"The {name} is {ends[nth].color} at the {nth}." for nth in (one, other))
        yield option(f"color_{one}", said, then, shape=name)
        if all(min(abs(spot - 1), abs(spot - 2)) > 0.1 for spot in spots):
            said, then = (f"The {name} {nth}s {place(ends[nth], picture)}." for nth in (one, other))
            yield option(f"place_{one}", said, then, shape=name)


def moves_yn(ask: Ask) -> Turn | None:
    motion = ask.picture.motion
    if motion is None or motion[0] == "changes" or (motion[0] == "moves" and ask.random.random() < 0.6):
        return None
    shape = ask.picture.figures[0].shape
    turn = ask.turn("moves_yn", "", shape=shape)
    right = (motion[0] == "moves") != ("stand still" in turn.question)
    return replace(turn, answer=f"{yes(right)}, the {shape} {_does(motion)}.")


def both(ask: Ask) -> Iterator[Option]:
    """Which of two pictures has more, which has a shape, and what differs."""
    shown, same = [*map(_shown, ask.pictures)], ask.pictures[0] is ask.pictures[1]
    first, second = (len(picture.figures) for picture in ask.pictures)
    one, other = (counted(number, "shape", "shapes") for number in (first, second))
    yield option("each_count", f"I see {one} in the first picture and {other} in the second.")
    said = f"I see {shown[0]} in {'both pictures' if same else f'the first picture and {shown[1]} in the second'}."
    if same or shown[0] != shown[1]:
        yield option("differ", said)
        yield option("same_yn", f"{yes(same)}, {said}")
    if first != second:
        nth = "first" if first > second else "second"
        yield option("which_more", f"The {nth} picture has more shapes.", None, {"picture": nth})
    names = [{figure.name for figure in picture.figures} for picture in ask.pictures]
    for name in sorted(names[0] ^ names[1]):
        nth = ORDINALS[name in names[1]]
        said = f"The {name} is in the {nth} picture."
        yield option("which_has", said, None, {"picture": nth}, article=article(name))


def _shown(picture: Picture) -> str:
    parts = [article(figure.name) for figure in reading_order(picture)]
    return joined([*parts, *(f"the text {quoted(line.text)}" for line in picture.lines)] or ["no shapes"])


def in_nth(ask: Ask) -> Turn | None:
    """A question about one of two pictures, which it names."""
    nth = ask.random.randrange(2)
    one = replace(ask, pictures=[ask.pictures[nth]], json=False)
    tasks = ("read", "count", *(("color", "shape", "describe") if one.picture.figures else ()))
    turn = MAKERS[ask.random.choice(tasks)](one)
    if turn is None or (turn.task.startswith("read") and not one.picture.lines):
        return None
    question, about = turn.question, _same_of(turn, ask.pictures[1 - nth])
    for word in ("this picture", "the picture", "this image", "the image"):
        if word in question:
            named = f"the {ORDINALS[nth]} {word.split()[1]}"
            return Turn("in_nth", question.replace(word, named, 1), turn.answer, about)
    named = f"n the {ORDINALS[nth]} {ask.random.choice(('picture', 'image'))}"
    if ask.random.random() < 0.3 and question[0].isalpha():
        return Turn("in_nth", f"I{named}, {question[0].lower()}{question[1:]}", turn.answer, about)
    ending = question[-1] if question[-1] in "?.!" else ""
    return Turn("in_nth", f"{question.removesuffix(ending)} i{named}{ending}", turn.answer, about)


def _same_of(turn: Turn, other: Picture) -> str | None:
    """The answer to the same question about the other picture."""
    if turn.task == "describe":
        return description(other)
    if turn.task == "color" and isinstance(turn.about, Figure):
        shape_name = turn.about.shape
        same = [figure for figure in other.figures if figure.shape == shape_name]
        return _COLORED.format(same[0]) if len(same) == 1 else None if same else f"I see no {shape_name}."
    if turn.task == "count" and turn.answer.endswith((" shape.", " shapes.")) and len(turn.answer.split()) == 4:
        return f"I see {counted(len(other.figures), 'shape', 'shapes')}."
    return None


def _talk(ask: Ask) -> Iterator[Option]:
    """Small talk, what is asked about many pictures and no answer here says, and what this world does not hold."""
    noun = ask.random.choice(UNSEEN_THINGS if ask.held_out else SEEN_THINGS)
    slots = {"noun": noun, "nouns": noun + "s", "article": article(noun), "place": ask.random.choice(PLACES)}
    for task in ("thing", "knowledge", "unknown"):
        yield option(task, ONLY, digit=str(ask.random.randint(0, 99)), **slots)
    for task, said in SAID.items():
        yield option(task, said)


_SEEING, _NAMING, _CHARTS, _MOVING = (
    tuple(wordings.NATURAL["seeing"][kind].split()) for kind in ("usual", "spoken", "chart", "clip")
)
"""Tasks that need something to be seen."""


def no_picture(ask: Ask) -> Turn | None:
    """A question of seeing where nothing is to be seen."""
    spoken = not ask.held_out and ask.random.random() < 0.3
    return Turn("no_picture", _of_seeing(ask, ask.random.choice(_NAMING if spoken else _SEEING)), NO_PICTURE)


def not_known(ask: Ask) -> Turn | None:
    """A question of seeing about a picture of what this world does not hold."""
    tasks: tuple[str, ...] = (*_SEEING, "count", "count", "exists", *_CHARTS)
    if ask.picture.motion and ask.random.random() < 0.4:
        tasks = _MOVING
    if not ask.held_out and ask.random.random() < 0.4:
        tasks = _SPOKEN
    question = _of_seeing(ask, ask.random.choice(tasks), json=ask.json)
    return Turn("not_known", question, json.dumps(UNKNOWN) if "json" in question.lower() else ONLY)


_SPOKEN = tuple(
    task
    for task in wordings.SPOKEN
    if task not in (*SAID, *_MOVING, "knowledge", "next", "what_else") and not task.startswith(("its_", "which_has"))
)


def _of_seeing(ask: Ask, task: str, *, json: bool = False) -> str:
    """A question about shapes, print or charts that no picture needs to have."""
    random = ask.random
    names, shades = random.sample(SHAPE_NAMES, 2), random.sample(COLOR_NAMES, 2)
    slots = {"shape": names[0], "color": shades[0], "others": plural(names[1]), "other": f"{shades[1]} {names[1]}"}
    slots["things"] = random.choice(("shapes", plural(names[0]), f"{shades[0]} {plural(names[0])}"))
    named = f"{shades[0]} {names[0]}"
    slots |= {"thing": random.choice((names[0], named)), "article": article(named)}
    slots |= {"most": random.choice(("largest", "smallest", "biggest")), "nth": random.choice(ORDINALS)}
    slots |= {"more": random.choice(("larger", "bigger", "smaller")), "label": random.choice(SEEN_WORDS)}
    slots |= {"side": random.choice(tuple(SIDES)), "kind": random.choice((shades[0], plural(names[0])))}
    slots["spot"] = wordings.word(random, "orders", "x") if task == "in_order" else random.choice(SPOTS)
    slots["place"] = random.choice(PLACES)
    keys = random.sample(wordings.KEYS, random.randint(1, 3)) if json and random.random() < 0.3 else ()
    return wordings.ask(random, task, held_out=ask.held_out, json=json, slots=slots, keys=() if ask.held_out else keys)


def follow_up(ask: Ask, before: Turn) -> Turn | None:
    """A question that leans on `before`, or None where there is none with one right answer."""
    about, random = before.about, ask.random
    if isinstance(about, str) and (before.task == "in_nth" or before.task.endswith(("_start", "_end"))):
        said = before.question.lower() if before.task == "in_nth" else before.task
        other = next(spot for word, spot in wordings.NATURAL["other spots"].items() if word in said)
        return _lean(ask, "next", about, next=random.choice(other.split("|")))
    if before.task == "change" and ask.picture.end:
        return _lean(ask, "to_color", f"The {ask.picture.end.shape} is {ask.picture.end.color} at the end.")
    if isinstance(about, tuple) and 1 < len(about) <= MOST_SHAPES and not ask.held_out and random.random() < 0.6:
        places, colors = dict.fromkeys(place(figure, ask.picture) for figure in about), colors_of(about)
        answers = {"their_colors": f"They are {colors}.", "their_places": f"They are {joined(list(places))}."}
        answers["they_same"] = f"No, they are {colors}." if " " in colors else f"Yes, all are {colors}."
        answers["which_ones"] = f"I see {the_names(about)}."
        name = about[0].shape if len({figure.shape for figure in about}) == 1 else "shape"
        answers["their_number"] = f"I see {len(about)} {plural(name)}."
        task = random.choice(tuple(answers))
        return _lean(ask, task, answers[task])
    if before.task == "count":
        return _next_count(ask, before)
    if isinstance(about, str) and before.task.startswith("chart") and (chart := ask.picture.chart):
        most = not before.task.startswith("chart_value")
        label = about if most else random.choice([name for name in chart.labels if name != about])
        return _lean(ask, "its_value" if most else "next", f"{quoted(label)} is {value_of(chart, label)}.", next=label)
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
        if about.hollow <= _BROAD and random.random() < 0.25:
            return _lean(ask, "its_filling", f"The {about.shape} is {filling(about)}.")
        if before.task not in ("size", "only_size"):
            return _lean(ask, "its_size", f"The {about.shape} is {about.size}.")
    if before.task in ("shape", "where", "color", "largest", "direction"):
        options = {"color": ("place",), "where": ("color",)}.get(before.task, ("color", "place"))
        if ask.random.choice(options) == "color":
            return _lean(ask, "its_color", f"The {about.shape} is {about.color}.")
        return _lean(ask, "its_place", f"The {about.name} is {place(about, ask.picture)}.")
    return None


def _lean(ask: Ask, task: str, answer: str, **slots: str) -> Turn:
    return Turn("second_turn", wordings.ask(ask.random, task, held_out=ask.held_out, slots=slots), answer)


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


def change(ask: Ask) -> Turn | None:
    motion = ask.picture.motion
    if motion is None or motion[0] != "changes":
        return None
    turn = ask.turn("change", _motion(ask.picture, first=False), shape=ask.picture.figures[0].shape)
    whether = re.search(r"\bdoes (it|the .+) change (its )?colou?r", turn.question.lower())
    return replace(turn, answer=f"Yes, t{turn.answer[1:]}") if whether else turn


_MAKERS = (
    *(largest, shape_in_keys, bar_in_keys, overview_in_keys, count, beside, exists, more_yn, describe, read, moves_yn),
    *(change, in_nth, no_picture, not_known, of_shape),
)
_ANY = (group, outlines, overlaps, of_two, together, in_order, of_text, of_parts, of_clip, both)
_TASKS: dict[Callable[[Ask], Iterable[Option]], str] = {
    _told: "ground plain_color list colors lines ink clip chart_kind chart_bars chart_labels",
    _one: "color is_color shape where only_color only_shape is_shape",
    _pairs: "relation relation_yn compare_yn larger_of",
    _parts: "at_place color_at",
    _chart: "chart_value chart_title",
    _talk: "thing knowledge unknown who skills hello thanks",
    of_text: "read_line",
    of_clip: "direction",
    both: "which_more which_has",
}
MAKERS: dict[str, Maker] = {
    **{maker.__name__: maker for maker in _MAKERS},
    **{find.__name__: _of(find) for find in _ANY},
    **{task: _of(find, task) for find, tasks in _TASKS.items() for task in tasks.split()},
    "chart_most": lambda ask: _of(_chart, "chart_most", *(("chart_top", "chart_bottom") if not ask.json else ()))(ask),
}
