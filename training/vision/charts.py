"""Bar and pie charts with printed values.

Bars are upright with names below and values above, or lying, with axes and lines of many kinds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

from training.vision.fonts import SEEN_FONTS, font
from training.vision.pictures import RGB, Canvas, Chart, Picture, canvas_size, contrast
from training.vision.words import CHART_LABELS, CHART_TITLES, SEEN_WORDS, UNSEEN_WORDS

Box = tuple[float, float, float, float]
_TITLE_SHARE, _PIES, _LYING = 0.35, 0.3, 0.15
_COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "gray")
_LEAST_TITLE, _LEAST_LEGEND, _LEAST_SIZE = 15, 15, 13
_AXIS_NAMES = ("Units", "Count", "Total", "Sales", "Value", "Percent", "Number", "Votes", "Price", "Hours", "Points")
_STEPS = (1, 2, 5, 10, 20, 25, 50)


class _Paper:
    """What one chart is drawn on and with: a canvas and its free part below the title, labels, a font, an ink."""

    def __init__(self, random: Random, width: int, height: int, held_out: bool, any_words: float) -> None:
        self.random = random
        level = random.randint(235, 255)
        ground = (level, level, level) if random.random() < 0.9 else (28, 28, 32)
        self.canvas = Canvas(random, width, height, ground)
        self.face = random.choice(SEEN_FONTS)
        self.labels = _labels(random, held_out, any_words)
        self.ink = ("black", (20, 20, 20)) if ground[0] > 128 else ("white", (240, 240, 240))
        self.left, self.right, self.bottom = 0.0, float(width), float(height)
        self.top, self.title = 0.0, ""
        if random.random() < _TITLE_SHARE:
            self._choose_title(_title(random, held_out))
        self.height = self.bottom - self.top

    def _choose_title(self, title: str) -> None:
        """Where there is room for it; it is printed last, on figures that have become pixels."""
        size = self.random.randint(_LEAST_TITLE, 22)
        room = self.right - self.length(title, size)
        if room >= 12:
            self.title_at = room / 2 if self.random.random() < 0.8 else min(room, 8.0)
            self.top, self.title, self.title_size = size + 10.0, title, size

    def length(self, text: str, size: int) -> float:
        return font(self.face, size).getlength(text)

    def print(self, text: str, x: float, y: float, size: int, ink: tuple[str, RGB] | None = None) -> None:
        self.canvas.text(text, round(x), round(y), self.face, size, *(ink or self.ink), line=False)

    def colors(self, number: int, *, alike: bool) -> list[RGB]:
        """Their names are kept in `names`."""
        shades: dict[str, RGB] = {}
        for name in self.random.sample(_COLORS, len(_COLORS)):
            shade = self.canvas.shade(name)
            if shade is not None and contrast(shade, self.canvas.ground) > 85 and len(shades) < number:
                shades[name] = shade
        self.names, found = list(shades), list(shades.values())
        if alike:
            self.names, found = self.names[:1] * number, found[:1] * number
        return found

    def between(self, part: float) -> RGB:
        """A shade between ground and ink."""
        red, green, blue = (round(b + (a - b) * part) for a, b in zip(self.ink[1], self.canvas.ground, strict=True))
        return red, green, blue


def chart_picture(random: Random, *, held_out: bool, any_words: float = 0.5) -> Picture:
    """Bars with their names and values, with and without axes, or a pie with names and percentages. any_words: the
    share of charts whose names are of no common kind."""
    width = height = 0
    while min(width, height) <= 200 or not 0.6 < width / height < 1.8:
        width, height = canvas_size(random, least_cells=80)
    paper = _Paper(random, width, height, held_out, any_words)
    if random.random() < _PIES:
        chart = (_pie_with_legend if random.random() < 0.55 else _pie)(paper)
    else:
        chart = _bars(paper)
    if paper.title:
        paper.print(paper.title, paper.title_at, 4, paper.title_size)
    picture = paper.canvas.finish()
    order = [paper.labels.index(label) for label in chart.labels]
    picture.chart = replace(chart, title=paper.title, colors=tuple(paper.names[nth] for nth in order))
    return picture


def _labels(random: Random, held_out: bool, any_words: float) -> list[str]:
    """Up to twelve names of one kind (weekdays, cities), or with the probability `any_words` eight words of none."""
    if random.random() < any_words:
        words = [word for word in (UNSEEN_WORDS if held_out else SEEN_WORDS) if len(word) < 8]
        style = random.choice((str.capitalize, str.capitalize, str.lower, str.upper))
        return [style(word) for word in random.sample(words, 8)]
    labels = list(random.choice(CHART_LABELS))
    if random.random() < 0.5:
        random.shuffle(labels)
    return labels


def _title(random: Random, held_out: bool) -> str:
    if random.random() < 0.4:
        return random.choice(CHART_TITLES)
    words = random.sample(UNSEEN_WORDS if held_out else SEEN_WORDS, random.randint(1, 2))
    return random.choice((" ".join(words).capitalize(), " ".join(word.capitalize() for word in words)))


def _percentages(random: Random, number: int, least: int) -> list[int]:
    """Whole numbers that sum to 100, whose largest and smallest stand out."""
    while True:
        cuts = sorted(random.sample(range(least, 101 - least), number - 1))
        values = [b - a for a, b in zip([0, *cuts], [*cuts, 100], strict=True)]
        ordered = sorted(values)
        if ordered[0] >= least and ordered[-1] - ordered[-2] >= 4 and ordered[1] - ordered[0] >= 2:
            return values


def _pie_with_legend(paper: _Paper, most: int = 12) -> Chart:
    """Slices of the whole percentages, the legend beside them or below."""
    random, shades = paper.random, paper.colors(5, alike=False)
    number = min(random.randint(2, 5), len(paper.labels[:most]), len(shades))
    labels = paper.labels[:number]
    values = _percentages(random, number, 5)
    size = random.randint(_LEAST_LEGEND, 18)
    texts = [f"{label} {value}%" for label, value in zip(labels, values, strict=True)]
    legend = max(paper.length(text, size) for text in texts) + size + 8
    row, width, height = size + 7, paper.right, paper.height
    if width - legend > 0.4 * height:
        diameter = min(width - legend - 14, height - 12)
        box = (6.0, paper.top + (height - diameter) / 2, 6 + diameter, paper.top + (height + diameter) / 2)
        x, y = box[2] + 8, paper.top + (height - row * number) / 2
    else:
        diameter = min(width - 12, height - row * number - 14)
        box = ((width - diameter) / 2, paper.top + 6, (width + diameter) / 2, paper.top + 6 + diameter)
        x, y = 8.0, box[3] + 6
    _slices(paper, box, random.uniform(-90, 270), values, shades)
    for index in range(number):
        paper.canvas.box((x, y + row * index + 2, x + size - 2, y + row * index + size), shades[index])
    for index, text in enumerate(texts):
        paper.print(text, x + size + 4, y + row * index - 1, size)
    return Chart("pie", tuple(labels), tuple(values))


def _pie(paper: _Paper) -> Chart:
    """Percentages in the slices, names around them; both clockwise, from the top."""
    random, shades = paper.random, paper.colors(5, alike=False)
    number = min(random.randint(2, 5), len(paper.labels), len(shades))
    size = random.randint(13, 18)
    side = max(paper.length(label, size) for label in paper.labels[:number]) + 8
    while number > 2 and paper.right - 2 * side < 110:
        number -= 1
        side = max(paper.length(label, size) for label in paper.labels[:number]) + 8
    labels = paper.labels[:number]
    radius = min(paper.right / 2 - side, paper.height / 2 - size - 8) * random.uniform(0.85, 1.0)
    if radius < 50:
        return _pie_with_legend(paper, number)
    values = _percentages(random, number, 9 if radius > 80 else 14)
    while True:
        start = random.uniform(-90, 270) if random.random() < 0.5 else random.choice((-90.0, 0.0))
        middles = [start + 3.6 * (sum(values[:index]) + values[index] / 2) for index in range(number)]
        # Nobody can say which comes first where one is at the very top.
        if all(min((middle + 90) % 360, -(middle + 90) % 360) > 12 for middle in middles):
            break
    x, y = paper.right / 2, (paper.top + paper.bottom) / 2
    _slices(paper, (x - radius, y - radius, x + radius, y + radius), start, values, shades)
    order = sorted(range(number), key=lambda index: (middles[index] + 90) % 360)
    for index in order:
        turn = math.radians(middles[index])
        across, down = math.cos(turn), math.sin(turn)
        ink = paper.ink if contrast(paper.ink[1], shades[index]) > 150 else ("white", (255, 255, 255))
        if contrast(ink[1], shades[index]) < 120:
            ink = ("black", (0, 0, 0))
        text, up = f"{values[index]}%", y + 0.62 * radius * down - 0.6 * size
        paper.print(text, x + 0.62 * radius * across - paper.length(text, size) / 2, up, size, ink)
        length, reach = paper.length(labels[index], size), radius + 4
        left = x + reach * across + (-length if across < -0.2 else 0 if across > 0.2 else -length / 2)
        up = y + reach * down + (-size - 3 if down < -0.5 else 0 if down > 0.5 else -size / 2 - 2)
        paper.print(labels[index], left, up, size)
    return Chart("pie", tuple(labels[index] for index in order), tuple(values[index] for index in order))


def _slices(paper: _Paper, box: Box, start: float, values: list[int], shades: list[RGB]) -> None:
    edge = paper.canvas.ground if paper.random.random() < 0.3 else None
    for value, shade in zip(values, shades, strict=False):
        paper.canvas.slice(box, start, start + value * 3.6, shade, edge)
        start += value * 3.6


@dataclass(frozen=True)
class Style:
    """Which lines there are beside the bars. ticks: numbers along the axis of values; marks: short lines at them."""

    base: bool
    axis: bool
    box: bool
    ticks: bool
    marks: bool
    grid: bool
    named_axis: bool
    thickness: int

    @staticmethod
    def of(random: Random) -> Style:
        kind = random.choices(("base", "axes", "box", "none"), (0.35, 0.25, 0.33, 0.07))[0]
        plain = kind in ("base", "none")
        ticks = random.random() < (0.15 if plain else 0.7)
        marks = ticks and not plain and random.random() < 0.7
        grid, named = random.random() < (0.15 if plain else 0.35), random.random() < (0.04 if plain else 0.2)
        width = random.choice((1, 1, 1, 2, 3))
        return Style(kind != "none", not plain, kind == "box", ticks, marks, grid, named, width)


def _bars(paper: _Paper) -> Chart:
    random = paper.random
    lying = random.random() < _LYING
    size = random.randint(_LEAST_SIZE, 20)
    shades = paper.colors(6, alike=random.random() < 0.45)
    most = min(random.randint(2, 6), len(paper.labels), len(shades))
    return (_lying if lying else _upright)(paper, size, shades, most, Style.of(random))


def _values(random: Random, number: int) -> list[int]:
    """Values 3 to 99 whose largest and smallest stand out."""
    while True:
        values = [random.randint(3, 99) for _ in range(number)]
        ordered = sorted(values)
        if ordered[-1] - ordered[-2] >= 4 and ordered[1] - ordered[0] >= 4:
            return values


def _highest(random: Random, values: list[int]) -> float:
    """The value at the far end of the axis."""
    return random.choice((float(max(values)), max(values) * random.uniform(1.02, 1.3), max(100.0, max(values) * 1.02)))


def _ticks(random: Random, highest: float) -> list[int]:
    steps = [step for step in _STEPS if 2 <= highest / step <= 8]
    step = random.choice(steps or [50])
    return list(range(0, int(highest) + 1, step))


def _upright(paper: _Paper, size: int, shades: list[RGB], number: int, style: Style) -> Chart:
    """Bars from left to right, with names below and values above."""
    random, canvas, shade = paper.random, paper.canvas, paper.ink[1]
    small = random.randint(10, size)
    left = 4.0 if not style.axis else random.randint(6, 14)
    if style.named_axis:
        left += size + 4
    name_at = left - size - 2
    if style.ticks:
        left += paper.length("100", small) + 8
    right = paper.right - (4 if not style.box else random.randint(4, 12))
    lengths = [paper.length(name, size) for name in paper.labels[:number]]
    while number > 2 and max(lengths[:number]) > 0.9 * (right - left) / number:
        number -= 1
    labels, values = paper.labels[:number], _values(random, number)
    under = random.choice((0, 2, 4)) if style.marks else 0
    bottom, top = paper.bottom - size - 12 - under, paper.top + size + 10
    highest = _highest(random, values)

    def up(value: float) -> float:
        return bottom - (bottom - top) * value / highest

    ticks = _ticks(random, highest)
    if style.grid:
        _grid(paper, [(left, up(tick), right, up(tick)) for tick in ticks])
    step = (right - left) / number
    thickness = step * random.uniform(0.45, 0.88)
    edge = paper.between(0.8) if random.random() < 0.15 else None
    middles = [left + step * (index + 0.5) for index in range(number)]
    for middle, value, own in zip(middles, values, shades, strict=False):
        _bar(canvas, (middle - thickness / 2, up(value), middle + thickness / 2, bottom), own, edge)
    high, width = paper.top + 5 if style.box else top - random.randint(0, 4), style.thickness
    if style.base:
        canvas.box((left, bottom, right, bottom + width), shade)
    if style.axis:
        canvas.box((left - width, high, left, bottom + width), shade)
    if style.box:
        canvas.box((right, high, right + width, bottom + width), shade)
        canvas.box((left - width, high, right + width, high + width), shade)
    if style.marks:
        for tick in ticks:
            canvas.box((left - width - 4, up(tick), left - width, up(tick) + 1), shade)
        for middle in middles if under else ():
            canvas.box((middle, bottom + width, middle + 1, bottom + width + under), shade)
    for text in map(str, ticks if style.ticks else ()):
        paper.print(text, left - width - 6 - paper.length(text, small), up(int(text)) - 0.6 * small, small)
    if style.named_axis:
        canvas.upward(random.choice(_AXIS_NAMES), name_at, (top + bottom) / 2, paper.face, size, shade)
    gap = random.randint(3, 6)
    for middle, label, value in zip(middles, labels, values, strict=True):
        paper.print(label, middle - paper.length(label, size) / 2, bottom + 3 + under, size)
        paper.print(str(value), middle - paper.length(str(value), size) / 2, up(value) - size - gap, size)
    return Chart("bar", tuple(labels), tuple(values))


def _lying(paper: _Paper, size: int, shades: list[RGB], number: int, style: Style) -> Chart:
    """Bars from left to right, the first one at the top."""
    random, canvas, shade = paper.random, paper.canvas, paper.ink[1]
    small = random.randint(10, size)
    bottom, top = paper.bottom - 6 - (small + 8 if style.ticks else 0), paper.top + 6
    while number > 2 and (bottom - top) / number < 1.3 * size:
        number -= 1
    labels, values = paper.labels[:number], _values(random, number)
    left = max(paper.length(label, size) for label in labels) + 12
    right = paper.right - paper.length("100", size) - 12
    highest = _highest(random, values)

    def along(value: float) -> float:
        return left + (right - left) * value / highest

    ticks = _ticks(random, highest)
    if style.grid:
        _grid(paper, [(along(tick), top, along(tick), bottom) for tick in ticks])
    step = (bottom - top) / number
    thickness = step * random.uniform(0.5, 0.88)
    edge = paper.between(0.8) if random.random() < 0.15 else None
    middles = [top + step * (index + 0.5) for index in range(number)]
    for middle, value, own in zip(middles, values, shades, strict=False):
        _bar(canvas, (left, middle - thickness / 2, along(value), middle + thickness / 2), own, edge)
    width, end = style.thickness, paper.right - 5
    if style.base:
        canvas.box((left - width, top, left, bottom), shade)
    if style.axis:
        canvas.box((left - width, bottom, end, bottom + width), shade)
    if style.box:
        canvas.box((left - width, top, end, top + width), shade)
        canvas.box((end, top, end + width, bottom + width), shade)
    for tick in ticks if style.ticks else ():
        if style.marks:
            canvas.box((along(tick), bottom + width, along(tick) + 1, bottom + width + 3), shade)
        paper.print(str(tick), along(tick) - paper.length(str(tick), small) / 2, bottom + width + 3, small)
    for middle, label, value in zip(middles, labels, values, strict=True):
        paper.print(label, left - 6 - paper.length(label, size), middle - 0.6 * size, size)
        paper.print(str(value), along(value) + 4, middle - 0.6 * size, size)
    return Chart("bar", tuple(labels), tuple(values))


def _bar(canvas: Canvas, box: Box, shade: RGB, edge: RGB | None) -> None:
    if edge is not None:
        canvas.box(box, edge)
        box = (box[0] + 1, box[1] + 1, box[2] - 1, box[3] - 1)
    if box[2] > box[0] and box[3] > box[1]:
        canvas.box(box, shade)


def _grid(paper: _Paper, lines: list[Box]) -> None:
    """Thin lines, pale or grey, whole or broken."""
    shade, canvas = paper.between(paper.random.uniform(0.12, 0.5)), paper.canvas
    dash = paper.random.choice((0, 0, 4, 6))
    for x, y, right, bottom in lines:
        if not dash:
            canvas.box((x, y, right + (right == x), bottom + (bottom == y)), shade)
            continue
        for begin in range(0, int(max(right - x, bottom - y)), 2 * dash):
            if right > x:
                canvas.box((x + begin, y, min(right, x + begin + dash), y + 1), shade)
            else:
                canvas.box((x, y + begin, x + 1, min(bottom, y + begin + dash)), shade)
