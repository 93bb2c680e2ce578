"""Second questions, which mean nothing without the first: "and the square?", "where is it?"."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from models.embedded.world import wordings
from models.embedded.world.palette import plural
from models.embedded.world.pictures import Figure, Picture
from models.embedded.world.questions import Turn, counted, place, quoted


def follow_up(random: Random, picture: Picture, before: Turn, held_out: bool) -> Turn | None:
    """A question that leans on `before`, or None where there is none with one right answer."""
    turn = _follow_up(random, picture, before, held_out)
    return None if turn is None else replace(turn, task="second_turn")


def _follow_up(random: Random, picture: Picture, before: Turn, held_out: bool) -> Turn | None:
    about = before.about
    if before.task == "count":
        return _next_count(random, picture, before, held_out)
    if before.task in ("color", "shape", "where") and isinstance(about, Figure) and random.random() < 0.6:
        return _next_figure(random, picture, before, held_out)
    if before.task in ("shape", "where", "color", "largest", "direction") and isinstance(about, Figure):
        options = {"color": ("place",), "where": ("color",)}.get(before.task, ("color", "place"))
        if random.choice(options) == "color":
            answer = f"The {about.shape} is {about.color}."
            return Turn("", wordings.ask(random, "its_color", held_out=held_out), answer, about)
        answer = f"The {about.name} is {place(about.x, about.y, picture.width, picture.height)}."
        return Turn("", wordings.ask(random, "its_place", held_out=held_out), answer, about)
    if before.task in ("chart_value", "chart_most") and isinstance(about, str) and picture.chart:
        return _chart(random, picture, before, about, held_out)
    return None


def _next_count(random: Random, picture: Picture, before: Turn, held_out: bool) -> Turn | None:
    shapes = sorted({figure.shape for figure in picture.figures})
    others = [name for name in shapes if plural(name) not in before.question and name not in before.answer]
    if not others:
        return None
    name = random.choice(others)
    number = sum(figure.shape == name for figure in picture.figures)
    question = wordings.ask(random, "next", held_out=held_out, next=f"the {plural(name)}")
    return Turn("", question, f"I see {counted(number, name, plural(name))}.")


def _next_figure(random: Random, picture: Picture, before: Turn, held_out: bool) -> Turn | None:
    key = (lambda f: f.color) if before.task == "shape" else (lambda f: f.shape) if before.task == "color" else _name
    names = [key(figure) for figure in picture.figures]
    others = [figure for figure in picture.figures if names.count(key(figure)) == 1 and figure is not before.about]
    if not others:
        return None
    figure = random.choice(others)
    if before.task == "shape":
        thing, answer = f"the {figure.color} one", f"The {figure.color} shape is a {figure.shape}."
    elif before.task == "color":
        thing, answer = f"the {figure.shape}", f"The {figure.shape} is {figure.color}."
    else:
        thing = f"the {figure.name}"
        answer = f"The {figure.name} is {place(figure.x, figure.y, picture.width, picture.height)}."
    return Turn(before.task, wordings.ask(random, "next", held_out=held_out, next=thing), answer, figure)


def _name(figure: Figure) -> str:
    return figure.name


def _chart(random: Random, picture: Picture, before: Turn, about: str, held_out: bool) -> Turn | None:
    chart = picture.chart
    if chart is None:
        return None
    ending = "%" if chart.kind == "pie" else ""
    if before.task == "chart_most":
        question = wordings.ask(random, "its_value", held_out=held_out)
        return Turn("", question, f"{quoted(about)} is {chart.values[chart.labels.index(about)]}{ending}.")
    label = random.choice([name for name in chart.labels if name != about])
    question = wordings.ask(random, "next", held_out=held_out, next=label)
    return Turn("", question, f"{quoted(label)} is {chart.values[chart.labels.index(label)]}{ending}.")
