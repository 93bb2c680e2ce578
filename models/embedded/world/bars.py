"""Bar charts: upright bars with names below and values above, or lying ones, with axes and lines of many kinds."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from models.embedded.world.chart_parts import Frame, Ink, colors, width_of
from models.embedded.world.palette import RGB
from models.embedded.world.pictures import Canvas, Chart

_LYING = 0.15
_LEAST_SIZE = 13
_AXIS_NAMES = ("Units", "Count", "Total", "Sales", "Value", "Percent", "Number", "Votes", "Price", "Hours", "Points")
_STEPS = (1, 2, 5, 10, 20, 25, 50)


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
        return Style(
            base=kind != "none",
            axis=not plain,
            box=kind == "box",
            ticks=ticks,
            marks=ticks and not plain and random.random() < 0.7,
            grid=random.random() < (0.15 if plain else 0.35),
            named_axis=random.random() < (0.04 if plain else 0.2),
            thickness=random.choice((1, 1, 1, 2, 3)),
        )


@dataclass(frozen=True)
class Parts:
    """What one chart is drawn from: `most` bars at the most, with the first labels and shades."""

    frame: Frame
    face: str
    size: int
    ink: Ink
    labels: list[str]
    shades: list[RGB]
    most: int
    style: Style


def draw(random: Random, canvas: Canvas, frame: Frame, face: str, labels: list[str], ink: Ink) -> Chart:
    lying = random.random() < _LYING
    size = random.randint(_LEAST_SIZE, 20)
    shades = colors(random, canvas, 6, alike=random.random() < 0.45)
    most = min(random.randint(2, 6), len(labels), len(shades))
    parts = Parts(frame, face, size, ink, labels, shades, most, Style.of(random))
    return _lying(random, canvas, parts) if lying else _upright(random, canvas, parts)


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


def _between(ink: RGB, ground: RGB, part: float) -> RGB:
    red, green, blue = (round(b + (a - b) * part) for a, b in zip(ink, ground, strict=True))
    return red, green, blue


def _upright(random: Random, canvas: Canvas, parts: Parts) -> Chart:
    """Bars from left to right, with names below and values above."""
    frame, face, size, ink, style = parts.frame, parts.face, parts.size, parts.ink, parts.style
    number, shades = parts.most, parts.shades
    small = random.randint(10, size)
    left = frame.left + (4 if not style.axis else random.randint(6, 14))
    if style.named_axis:
        left += size + 4
    name_at = left - size - 2
    if style.ticks:
        left += width_of(face, small, "100") + 8
    right = frame.right - (4 if not style.box else random.randint(4, 12))
    while (
        number > 2
        and max(width_of(face, size, label) for label in parts.labels[:number]) > 0.9 * (right - left) / number
    ):
        number -= 1
    labels = parts.labels[:number]
    values = _values(random, number)
    under = random.choice((0, 2, 4)) if style.marks else 0
    bottom = frame.bottom - size - 12 - under
    top = frame.top + size + 10
    highest = _highest(random, values)

    def up(value: float) -> float:
        return bottom - (bottom - top) * value / highest

    ticks = _ticks(random, highest)
    if style.grid:
        _grid(random, canvas, ink, [(left, up(tick), right, up(tick)) for tick in ticks])
    step = (right - left) / number
    thickness = step * random.uniform(0.45, 0.88)
    edge = _between(ink[1], canvas.ground, 0.8) if random.random() < 0.15 else None
    middles = [left + step * (index + 0.5) for index in range(number)]
    for middle, value, shade in zip(middles, values, shades, strict=False):
        _bar(canvas, (middle - thickness / 2, up(value), middle + thickness / 2, bottom), shade, edge)
    high = frame.top + 5 if style.box else top - random.randint(0, 4)
    _upright_lines(canvas, style, ink[1], Frame(left, high, right, bottom))
    if style.marks:
        for tick in ticks:
            canvas.box((left - style.thickness - 4, up(tick), left - style.thickness, up(tick) + 1), ink[1])
        for middle in middles if under else ():
            end = bottom + style.thickness
            canvas.box((middle, end, middle + 1, end + under), ink[1])
    for tick in ticks if style.ticks else ():
        x = left - style.thickness - 6 - width_of(face, small, str(tick))
        canvas.text(str(tick), round(x), round(up(tick) - 0.6 * small), face, small, *ink, line=False)
    if style.named_axis:
        canvas.upward(random.choice(_AXIS_NAMES), name_at, (top + bottom) / 2, face, size, ink[1])
    gap = random.randint(3, 6)
    for middle, label, value in zip(middles, labels, values, strict=True):
        x = middle - width_of(face, size, label) / 2
        canvas.text(label, round(x), round(bottom + 3 + under), face, size, *ink, line=False)
        text = str(value)
        x = middle - width_of(face, size, text) / 2
        canvas.text(text, round(x), round(up(value) - size - gap), face, size, *ink, line=False)
    return Chart("bar", tuple(labels), tuple(values))


def _upright_lines(canvas: Canvas, style: Style, shade: RGB, around: Frame) -> None:
    """The lines around upright bars."""
    width = style.thickness
    if style.base:
        canvas.box((around.left, around.bottom, around.right, around.bottom + width), shade)
    if style.axis:
        canvas.box((around.left - width, around.top, around.left, around.bottom + width), shade)
    if style.box:
        canvas.box((around.right, around.top, around.right + width, around.bottom + width), shade)
        canvas.box((around.left - width, around.top, around.right + width, around.top + width), shade)


def _lying(random: Random, canvas: Canvas, parts: Parts) -> Chart:
    """Bars from left to right, the first one at the top."""
    frame, face, size, ink, style = parts.frame, parts.face, parts.size, parts.ink, parts.style
    number, shades = parts.most, parts.shades
    small = random.randint(10, size)
    bottom = frame.bottom - 6 - (small + 8 if style.ticks else 0)
    top = frame.top + 6
    while number > 2 and (bottom - top) / number < 1.3 * size:
        number -= 1
    labels = parts.labels[:number]
    values = _values(random, number)
    left = frame.left + max(width_of(face, size, label) for label in labels) + 12
    right = frame.right - width_of(face, size, "100") - 12
    highest = _highest(random, values)

    def along(value: float) -> float:
        return left + (right - left) * value / highest

    ticks = _ticks(random, highest)
    if style.grid:
        _grid(random, canvas, ink, [(along(tick), top, along(tick), bottom) for tick in ticks])
    step = (bottom - top) / number
    thickness = step * random.uniform(0.5, 0.88)
    edge = _between(ink[1], canvas.ground, 0.8) if random.random() < 0.15 else None
    middles = [top + step * (index + 0.5) for index in range(number)]
    for middle, value, shade in zip(middles, values, shades, strict=False):
        _bar(canvas, (left, middle - thickness / 2, along(value), middle + thickness / 2), shade, edge)
    width, end = style.thickness, frame.right - 5
    if style.base:
        canvas.box((left - width, top, left, bottom), ink[1])
    if style.axis:
        canvas.box((left - width, bottom, end, bottom + width), ink[1])
    if style.box:
        canvas.box((left - width, top, end, top + width), ink[1])
        canvas.box((end, top, end + width, bottom + width), ink[1])
    for tick in ticks if style.ticks else ():
        if style.marks:
            canvas.box((along(tick), bottom + width, along(tick) + 1, bottom + width + 3), ink[1])
        x = along(tick) - width_of(face, small, str(tick)) / 2
        canvas.text(str(tick), round(x), round(bottom + width + 3), face, small, *ink, line=False)
    for middle, label, value in zip(middles, labels, values, strict=True):
        up = round(middle - 0.6 * size)
        canvas.text(label, round(left - 6 - width_of(face, size, label)), up, face, size, *ink, line=False)
        canvas.text(str(value), round(along(value) + 4), up, face, size, *ink, line=False)
    return Chart("bar", tuple(labels), tuple(values))


def _bar(canvas: Canvas, box: tuple[float, float, float, float], shade: RGB, edge: RGB | None) -> None:
    if edge is not None:
        canvas.box(box, edge)
        box = (box[0] + 1, box[1] + 1, box[2] - 1, box[3] - 1)
    if box[2] > box[0] and box[3] > box[1]:
        canvas.box(box, shade)


def _grid(random: Random, canvas: Canvas, ink: Ink, lines: list[tuple[float, float, float, float]]) -> None:
    """Thin lines, pale or grey, whole or broken."""
    shade = _between(ink[1], canvas.ground, random.uniform(0.12, 0.5))
    dash = random.choice((0, 0, 4, 6))
    for x, y, right, bottom in lines:
        if not dash:
            canvas.box((x, y, right + (right == x), bottom + (bottom == y)), shade)
            continue
        length = int(max(right - x, bottom - y))
        for begin in range(0, length, 2 * dash):
            if right > x:
                canvas.box((x + begin, y, min(right, x + begin + dash), y + 1), shade)
            else:
                canvas.box((x, y + begin, x + 1, min(bottom, y + begin + dash)), shade)
