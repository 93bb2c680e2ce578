"""Questions about printed text and charts."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from models.embedded.world.pictures import Picture
from models.embedded.world.questions import ORDINALS, Turn, counted, joined, quoted, turn_of


def read(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    lines = [line.text for line in pictures[0].lines]
    if pictures[0].chart or pictures[0].strange:
        return None
    if not lines and random.random() < 0.7:
        return None
    answer = f"It says {joined([quoted(line) for line in lines])}." if lines else "I see no text."
    task = "read" if len(lines) < 2 else "read_lines"
    turn = turn_of(random, "read", answer, {"text": " ".join(lines)}, held_out, as_json)
    return Turn(task if not as_json else "read_json", turn.question, turn.answer)


def read_line(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    lines = pictures[0].lines
    if len(lines) < 2:
        return None
    index = random.randrange(len(lines))
    nth = random.choice((ORDINALS[index], "last" if index == len(lines) - 1 else ORDINALS[index]))
    answer = f"The {nth} line says {quoted(lines[index].text)}."
    return turn_of(random, "read_line", answer, {"text": lines[index].text}, held_out, as_json, nth=nth)


def lines_of_text(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    number = len(pictures[0].lines)
    if number == 0:
        return None
    return turn_of(
        random, "lines", f"I see {counted(number, 'line', 'lines')} of text.", {"count": number}, held_out, as_json
    )


def ink(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    if not pictures[0].lines:
        return None
    name = pictures[0].lines[0].ink
    return turn_of(random, "ink", f"The text is {name}.", {"color": name}, held_out, as_json)


def chart_most(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    chart = pictures[0].chart
    if chart is None:
        return None
    big = random.random() < 0.5
    words = ("largest", "highest", "biggest") + (("tallest",) if chart.kind == "bar" else ())
    words = words if big else ("smallest", "lowest") + (("shortest",) if chart.kind == "bar" else ())
    value = max(chart.values) if big else min(chart.values)
    label = chart.labels[chart.values.index(value)]
    answer = f"The {'largest' if big else 'smallest'} is {quoted(label)}."
    return turn_of(random, "chart_most", answer, {"label": label}, held_out, as_json, label, most=random.choice(words))


def chart_value(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    chart = pictures[0].chart
    if chart is None:
        return None
    index = random.randrange(len(chart.labels))
    label, value = chart.labels[index], chart.values[index]
    answer = f"{quoted(label)} is {value}{'%' if chart.kind == 'pie' else ''}."
    asked = quoted(label) if random.random() < 0.4 else label
    return turn_of(random, "chart_value", answer, {"value": value}, held_out, as_json, label, label=asked)


def chart_kind(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    chart = pictures[0].chart
    if chart is None:
        return None
    return turn_of(random, "chart_kind", f"This is a {chart.kind} chart.", {"chart": chart.kind}, held_out, as_json)


def chart_bars(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    chart = pictures[0].chart
    if chart is None:
        return None
    number, part = len(chart.labels), "bars" if chart.kind == "bar" else "parts"
    return turn_of(random, "chart_bars", f"I see {number} {part}.", {"count": number}, held_out, as_json)


def chart_title(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    chart = pictures[0].chart
    if chart is None or (not chart.title and random.random() < 0.6):
        return None
    answer = f"The title is {quoted(chart.title)}." if chart.title else "The chart has no title."
    facts = {"title": chart.title}
    return turn_of(random, "chart_title", answer, facts, held_out, as_json and bool(chart.title))


def chart_labels(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    chart = pictures[0].chart
    if chart is None:
        return None
    answer = f"The labels are {joined([quoted(label) for label in chart.labels])}."
    return turn_of(random, "chart_labels", answer, {"labels": list(chart.labels)}, held_out, as_json)
