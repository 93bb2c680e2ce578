"""Bar and pie charts with printed values."""

from __future__ import annotations

from random import Random

from models.embedded.world.fonts import SEEN_FONTS, font
from models.embedded.world.palette import contrast
from models.embedded.world.pictures import Canvas, Chart, Picture, canvas_size
from models.embedded.world.words import CHART_LABELS

_COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "gray")
_LEAST_SIZE = 15


def chart_picture(random: Random, *, held_out: bool) -> Picture:
    """Bars over their names with their values above them, or a pie with a legend of names and percentages."""
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
    labels = list(random.choice(CHART_LABELS))
    if random.random() < 0.5:
        random.shuffle(labels)
    draw = _pie if random.random() < 0.35 else _bars
    chart = draw(random, canvas, face, labels)
    picture = canvas.finish()
    picture.chart = chart
    return picture


def _values(random: Random, number: int) -> list[int]:
    """Values 1 to 99 whose largest and smallest stand out."""
    while True:
        values = [random.randint(3, 99) for _ in range(number)]
        ordered = sorted(values)
        if ordered[-1] - ordered[-2] >= 4 and ordered[1] - ordered[0] >= 4:
            return values


def _colors(random: Random, canvas: Canvas, number: int, *, alike: bool) -> list[tuple[str, tuple[int, int, int]]]:
    shades: list[tuple[str, tuple[int, int, int]]] = []
    names = random.sample(_COLORS, len(_COLORS))
    while names and len(shades) < number:
        name = names.pop()
        shade = canvas.shade(name)
        if shade is not None and contrast(shade, canvas.ground) > 85:
            shades.append((name, shade))
    return [shades[0]] * number if alike else shades


def _bars(random: Random, canvas: Canvas, face: str, labels: list[str]) -> Chart:
    width, height = canvas.width, canvas.height
    colors = _colors(random, canvas, 6, alike=random.random() < 0.3)
    size = random.randint(_LEAST_SIZE, 20)
    number = min(random.randint(2, 6), len(labels), len(colors))
    while number > 2 and max(font(face, size).getlength(label) for label in labels[:number]) > 0.9 * width / number:
        number -= 1
    labels = labels[:number]
    values = _values(random, number)
    bottom, top = height - size - 12, size + 10
    step = (width - 12) / number
    thickness = step * random.uniform(0.45, 0.8)
    ink = ("black", (20, 20, 20)) if canvas.ground[0] > 128 else ("white", (240, 240, 240))
    tallest = max(values) if random.random() < 0.5 else 100
    tops = []
    for index, (value, (_, shade)) in enumerate(zip(values, colors, strict=False)):
        middle = 6 + step * (index + 0.5)
        up = bottom - (bottom - top) * value / tallest
        canvas.box((middle - thickness / 2, up, middle + thickness / 2, bottom), shade)
        tops.append((middle, up))
    canvas.box((4, bottom, width - 4, bottom + 1), ink[1])
    drawn = font(face, size)
    for (middle, up), label, value in zip(tops, labels, values, strict=True):
        canvas.text(label, round(middle - drawn.getlength(label) / 2), bottom + 3, face, size, *ink, line=False)
        text = str(value)
        canvas.text(text, round(middle - drawn.getlength(text) / 2), round(up - size - 4), face, size, *ink, line=False)
    return Chart("bar", tuple(labels), tuple(values))


def _pie(random: Random, canvas: Canvas, face: str, labels: list[str]) -> Chart:
    """Slices of the whole percentages, the legend beside them or below."""
    width, height = canvas.width, canvas.height
    colors = _colors(random, canvas, 5, alike=False)
    number = min(random.randint(2, 5), len(labels), len(colors))
    labels = labels[:number]
    while True:
        cuts = sorted(random.sample(range(5, 96), number - 1))
        values = [b - a for a, b in zip([0, *cuts], [*cuts, 100], strict=True)]
        ordered = sorted(values)
        if min(values) >= 5 and ordered[-1] - ordered[-2] >= 4 and ordered[1] - ordered[0] >= 2:
            break
    size = random.randint(_LEAST_SIZE, 18)
    drawn = font(face, size)
    texts = [f"{label} {value}%" for label, value in zip(labels, values, strict=True)]
    legend = max(drawn.getlength(text) for text in texts) + size + 8
    row = size + 7
    if width - legend > 0.4 * height:
        diameter = min(width - legend - 14, height - 12)
        box = (6.0, (height - diameter) / 2, 6 + diameter, (height + diameter) / 2)
        x, y = box[2] + 8, (height - row * number) / 2
    else:
        diameter = min(width - 12, height - row * number - 14)
        box = ((width - diameter) / 2, 6.0, (width + diameter) / 2, 6 + diameter)
        x, y = 8.0, box[3] + 6
    angle = random.uniform(-90, 270)
    for value, (_, shade) in zip(values, colors, strict=False):
        canvas.slice(box, angle, angle + value * 3.6, shade)
        angle += value * 3.6
    for index in range(number):
        canvas.box((x, y + row * index + 2, x + size - 2, y + row * index + size), colors[index][1])
    ink = ("black", (20, 20, 20)) if canvas.ground[0] > 128 else ("white", (240, 240, 240))
    for index, text in enumerate(texts):
        canvas.text(text, round(x + size + 4), round(y + row * index - 1), face, size, *ink, line=False)
    return Chart("pie", tuple(labels), tuple(values))
