"""Questions that ask for JSON with keys of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random

from models.embedded.world import wordings
from models.embedded.world.keys import chosen
from models.embedded.world.pictures import Picture
from models.embedded.world.questions import Turn, clearly_larger, place


def shape_in_keys(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    """The largest or smallest shape: what it is, its colour, its place."""
    picture = pictures[0]
    ordered = sorted(picture.figures, key=lambda figure: figure.radius)
    if len(ordered) < 2:
        return None
    big = random.random() < 0.5
    one, other = (ordered[-1], ordered[-2]) if big else (ordered[0], ordered[1])
    if not (clearly_larger(one, other) or clearly_larger(other, one)):
        return None
    spot = place(one.x, one.y, picture.width, picture.height)
    facts = {
        "shape": one.shape,
        "color": one.color,
        "position": spot.removeprefix("at the ").removeprefix("in the "),
    }
    return _asked(random, "largest", facts, held_out, random.choice(("largest", "biggest")) if big else "smallest")


def bar_in_keys(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    """The largest or smallest part of a chart: its name and value."""
    chart = pictures[0].chart
    if chart is None:
        return None
    big = random.random() < 0.5
    value = max(chart.values) if big else min(chart.values)
    facts = {"label": chart.labels[chart.values.index(value)], "value": value}
    return _asked(random, "chart_most", facts, held_out, random.choice(("largest", "highest") if big else ("lowest",)))


def _asked(random: Random, task: str, facts: Mapping[str, object], held_out: bool, most: str) -> Turn:
    told = chosen(random, facts)
    question = wordings.ask(random, task, held_out=held_out, json=True, keys=tuple(told), most=most)
    return Turn(f"{task}_keys", question, json.dumps(told))
