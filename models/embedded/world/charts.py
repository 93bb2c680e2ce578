"""Bar and pie charts with printed values."""

from __future__ import annotations

import math
from random import Random

from models.embedded.world import bars
from models.embedded.world.chart_parts import (
    TITLE_SHARE,
    Frame,
    Ink,
    colors,
    ink_of,
    labels_for,
    print_title,
    title_for,
    width_of,
)
from models.embedded.world.fonts import SEEN_FONTS
from models.embedded.world.palette import RGB, contrast
from models.embedded.world.pictures import Canvas, Chart, Picture, canvas_size

_PIES = 0.3
_LEAST_LEGEND = 15


def chart_picture(random: Random, *, held_out: bool, any_words: float = 0.5) -> Picture:
    """Bars with their names and values, with and without axes, or a pie with names and percentages. any_words: the
    share of charts whose names are of no common kind."""
    for _ in range(20):
        width, height = canvas_size(random, least_cells=80)
        if 0.6 < width / height < 1.8 and min(width, height) > 200:
            break
    else:
        width = height = 280
    level = random.randint(235, 255)
    ground = (level, level, level) if random.random() < 0.9 else (28, 28, 32)
    canvas = Canvas(random, width, height, ground)
    face = random.choice(SEEN_FONTS)
    labels = labels_for(random, held_out, any_words)
    ink = ink_of(canvas)
    title = title_for(random, held_out) if random.random() < TITLE_SHARE else ""
    top, title = print_title(random, canvas, title, face, ink) if title else (0.0, "")
    frame = Frame(0.0, top, float(width), float(height))
    if random.random() < _PIES:
        draw = _pie_with_legend if random.random() < 0.55 else _pie
        chart = draw(random, canvas, frame, face, labels, ink)
    else:
        chart = bars.draw(random, canvas, frame, face, labels, ink)
    picture = canvas.finish()
    picture.chart = Chart(chart.kind, chart.labels, chart.values, title)
    return picture


def _percentages(random: Random, number: int, least: int) -> list[int]:
    """Whole numbers that sum to 100, whose largest and smallest stand out."""
    while True:
        cuts = sorted(random.sample(range(least, 101 - least), number - 1))
        values = [b - a for a, b in zip([0, *cuts], [*cuts, 100], strict=True)]
        ordered = sorted(values)
        if ordered[0] >= least and ordered[-1] - ordered[-2] >= 4 and ordered[1] - ordered[0] >= 2:
            return values


def _pie_with_legend(random: Random, canvas: Canvas, frame: Frame, face: str, labels: list[str], ink: Ink) -> Chart:
    """Slices of the whole percentages, the legend beside them or below."""
    shades = colors(random, canvas, 5, alike=False)
    number = min(random.randint(2, 5), len(labels), len(shades))
    labels = labels[:number]
    values = _percentages(random, number, 5)
    size = random.randint(_LEAST_LEGEND, 18)
    texts = [f"{label} {value}%" for label, value in zip(labels, values, strict=True)]
    legend = max(width_of(face, size, text) for text in texts) + size + 8
    row = size + 7
    width, height = frame.width, frame.height
    if width - legend > 0.4 * height:
        diameter = min(width - legend - 14, height - 12)
        box = (6.0, frame.top + (height - diameter) / 2, 6 + diameter, frame.top + (height + diameter) / 2)
        x, y = box[2] + 8, frame.top + (height - row * number) / 2
    else:
        diameter = min(width - 12, height - row * number - 14)
        box = ((width - diameter) / 2, frame.top + 6, (width + diameter) / 2, frame.top + 6 + diameter)
        x, y = 8.0, box[3] + 6
    _slices(random, canvas, box, random.uniform(-90, 270), values, shades)
    for index in range(number):
        canvas.box((x, y + row * index + 2, x + size - 2, y + row * index + size), shades[index])
    for index, text in enumerate(texts):
        canvas.text(text, round(x + size + 4), round(y + row * index - 1), face, size, *ink, line=False)
    return Chart("pie", tuple(labels), tuple(values))


def _pie(random: Random, canvas: Canvas, frame: Frame, face: str, labels: list[str], ink: Ink) -> Chart:
    """Percentages in the slices, names around them; both clockwise, from the top."""
    shades = colors(random, canvas, 5, alike=False)
    number = min(random.randint(2, 5), len(labels), len(shades))
    size = random.randint(13, 18)
    side = max(width_of(face, size, label) for label in labels[:number]) + 8
    while number > 2 and frame.width - 2 * side < 110:
        number -= 1
        side = max(width_of(face, size, label) for label in labels[:number]) + 8
    labels = labels[:number]
    radius = min(frame.width / 2 - side, frame.height / 2 - size - 8) * random.uniform(0.85, 1.0)
    if radius < 50:
        return _pie_with_legend(random, canvas, frame, face, labels, ink)
    values = _percentages(random, number, 9 if radius > 80 else 14)
    while True:
        start = random.uniform(-90, 270) if random.random() < 0.5 else random.choice((-90.0, 0.0))
        middles = [start + 3.6 * (sum(values[:index]) + values[index] / 2) for index in range(number)]
        # Nobody can say which comes first where one is at the very top.
        if all(min((middle + 90) % 360, -(middle + 90) % 360) > 12 for middle in middles):
            break
    x, y = (frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2
    _slices(random, canvas, (x - radius, y - radius, x + radius, y + radius), start, values, shades)
    order = sorted(range(number), key=lambda index: (middles[index] + 90) % 360)
    for index in order:
        turn = math.radians(middles[index])
        across, down = math.cos(turn), math.sin(turn)
        _centered(
            canvas,
            f"{values[index]}%",
            x + 0.62 * radius * across,
            y + 0.62 * radius * down,
            face,
            size,
            ink,
            shades[index],
        )
        length = width_of(face, size, labels[index])
        reach = radius + 4
        left = x + reach * across + (-length if across < -0.2 else 0 if across > 0.2 else -length / 2)
        up = y + reach * down + (-size - 3 if down < -0.5 else 0 if down > 0.5 else -size / 2 - 2)
        canvas.text(labels[index], round(left), round(up), face, size, *ink, line=False)
    return Chart("pie", tuple(labels[index] for index in order), tuple(values[index] for index in order))


def _slices(
    random: Random,
    canvas: Canvas,
    box: tuple[float, float, float, float],
    start: float,
    values: list[int],
    shades: list[RGB],
) -> None:
    edge = canvas.ground if random.random() < 0.3 else None
    for value, shade in zip(values, shades, strict=False):
        canvas.slice(box, start, start + value * 3.6, shade, edge)
        start += value * 3.6


def _centered(canvas: Canvas, text: str, x: float, y: float, face: str, size: int, ink: Ink, ground: RGB) -> None:
    """Print on a slice, in whichever of black and white can be read there."""
    name, shade = ink if contrast(ink[1], ground) > 150 else ("white", (255, 255, 255))
    if contrast(shade, ground) < 120:
        name, shade = "black", (0, 0, 0)
    left = x - width_of(face, size, text) / 2
    canvas.text(text, round(left), round(y - 0.6 * size), face, size, name, shade, line=False)
