"""Pictures and clips of other things, which are to be told from what this world holds: noise, photographs, pages, and
drawings: icons, scenes, screens, tables, maps, flags, plots, formulas, print, patterns. A time from 0 to 1 moves some.

drawings.json has many of them in a box of 100 x 100: e ellipse, r rectangle, p polygon, l line, a arc, c slice, t a
word or number of a size, g a grid of words; each with its colour (0 the ink, 9 the paper) and its coordinates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from training.vision.fonts import SEEN_FONTS, font
from training.vision.pictures import (
    CELL,
    COLOR_NAMES,
    COLORS,
    MAX_PIXELS,
    MIN_PIXELS,
    RGB,
    Canvas,
    Picture,
    canvas_size,
    contrast,
    finished,
    ground_color,
    jpeg,
)
from training.vision.words import SEEN_WORDS, number_text

_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_ICONS, _LAYOUTS, _FLAGS = tuple(_DATA["icons"].values()), tuple(_DATA["layouts"].values()), _DATA["flags"]
LONGEST_CLIP = 40
"""Frames of a clip, of the smallest size."""
_CLIP_CELLS = 1950
_LIFE = 40
"""New fields of cells in a clip at most."""


def any_color(random: Random, ground: RGB | None = None) -> RGB:
    """One that stands out from `ground`."""
    while True:
        color = COLORS[random.choice(COLOR_NAMES)].draw(random)
        if random.random() < 0.4:
            color = random.randrange(256), random.randrange(256), random.randrange(256)
        if ground is None or contrast(color, ground) > 80:
            return color


def paper_and_ink(random: Random) -> tuple[RGB, RGB]:
    paper = (255, 255, 255) if random.random() < 0.4 else ground_color(random)
    level = random.choice((0, random.randint(0, 90))) if sum(paper) > 380 else random.randint(170, 255)
    return paper, (level, level, min(255, level + random.choice((0, random.randint(0, 30)))))


class Sheet:
    """What is drawn on, twice as large as it will be; numbers are pixels of the sheet."""

    def __init__(self, random: Random, width: int, height: int, time: float = 0.0) -> None:
        self.random, self.width, self.height, self.time = random, 2 * width, 2 * height, time
        self.paper, self.ink = paper_and_ink(random)
        self.colors = [any_color(random, self.paper) for _ in range(4)]
        self.image = Image.new("RGB", (self.width, self.height), self.paper)
        self.pen, self.side = ImageDraw.Draw(self.image), min(self.width, self.height)
        self.thick = max(2, round(self.side * random.choice((0.006, 0.01, 0.015, 0.025, 0.025, 0.05))))
        self.face = random.choice(SEEN_FONTS)

    def text(self, x: float, y: float, text: str, size: float, ink: RGB | None = None) -> None:
        self.pen.text((x, y), text, fill=ink or self.ink, font=font(self.face, max(14, round(size))))

    def box(self, least: float) -> tuple[float, float, float, float]:
        """A part of the sheet: left, top, right, bottom."""
        wide, high = (self.random.uniform(least, 0.94) * side for side in (self.width, self.height))
        left, top = self.random.uniform(0, self.width - wide), self.random.uniform(0, self.height - high)
        return left, top, left + wide, top + high

    def words(self, most: int) -> str:
        random = self.random
        words = " ".join(random.choice(SEEN_WORDS) for _ in range(random.randint(1, most)))
        return random.choice((words, words.capitalize(), words.upper(), number_text(random)))

    def any(self) -> RGB:
        return self.random.choice((*self.colors, self.ink))

    def draw(self, program: str, box: tuple[float, float, float, float], shake: float) -> None:
        """A line of drawings.json; its coordinates shake, it may be mirrored, in lines or in few colours."""
        random, pen = self.random, self.pen
        flip, filled, edged = (random.random() < share for share in (0.25, 0.78, 0.35))
        colors = [self.ink, *self.colors, *self.colors, self.paper]
        if shake and random.random() < 0.4:
            colors = [self.ink] * 9 + [self.paper]
        edge = self.ink if edged or not filled else None
        for part in program.split(";"):
            kind, words = part[0], part[2:].split()
            if kind in "tg" or random.random() < 0.05:
                shake = min(shake, 1.0)
            values = [float(word) + random.uniform(-shake, shake) for word in words if word != "o"]
            color, hollow, turned = colors[int(part[1])], "o" in words or not filled, flip and kind not in "tg"
            across = [box[0] + (100 - v if turned else v) / 100 * (box[2] - box[0]) for v in values[::2]]
            down = [box[1] + v / 100 * (box[3] - box[1]) for v in values[1::2]]
            points = list(zip(across, down, strict=False))
            spread = [*map(min, zip(*points[:2], strict=True)), *(max(v) + 1 for v in zip(*points[:2], strict=True))]
            if kind == "t":
                self.text(*points[0], self.words(3), values[2] / 100 * (box[3] - box[1]), color)
            elif kind == "g":
                self.grid((spread[0], spread[1], spread[2], spread[3]))
            elif kind == "l":
                pen.line(points, fill=color, width=self.thick, joint="curve")
            elif kind == "p":
                pen.polygon(points, None if hollow else color, edge or color, self.thick)
            elif kind in "ac":
                begin, end = map(float, words[4:6])
                begin, end = (180 - end, 180 - begin) if flip else (begin, end)
                if kind == "a":
                    pen.arc(spread, begin, end, fill=color, width=self.thick)
                else:
                    pen.pieslice(spread, begin, end, None if hollow else color, edge or color, self.thick)
            else:
                shape = pen.ellipse if kind == "e" else pen.rectangle
                shape(spread, None if hollow else color, edge or color, self.thick)

    def grid(self, box: tuple[float, float, float, float]) -> None:
        """Rows and columns of words and numbers, ruled or not: tables, calendars, keyboards, crosswords."""
        random, left, top = self.random, box[0], box[1]
        columns, rows = random.randint(2, 7), random.randint(3, 9)
        wide, high = (box[2] - left) / columns, (box[3] - top) / rows
        size, ruled, kind = min(0.55 * high, 0.34 * wide, 44), random.random() < 0.7, random.choice("wwndk")
        gap, shaded = random.choice((0, 0, 0.06, 0.12)) * min(wide, high), random.random() < 0.5
        for nth in range(rows * columns):
            x, y = left + nth % columns * wide + gap, top + nth // columns * high + gap
            if ruled or gap:
                fill = self.colors[0] if (nth < columns and shaded) or (kind == "k" and random.random() < 0.3) else None
                self.pen.rectangle((x, y, x + wide - 2 * gap, y + high - 2 * gap), fill, self.ink, 2)
            options = self.words(1), number_text(random), str(nth + 1), random.choice("ABEFGHKLMRST")
            text = options["wndk".index(kind)][: max(2, int(1.5 * wide / size))]
            self.text(x + 0.1 * wide, y + 0.2 * high, text, size)


def _icons(sheet: Sheet) -> None:
    """One large or a few small ones, sometimes on ground with a horizon."""
    random = sheet.random
    if random.random() < 0.25:
        sheet.pen.rectangle((0, sheet.height * random.uniform(0.55, 0.9), sheet.width, sheet.height), any_color(random))
    number = random.choice((1, 1, 1, 2, 3, 5))
    for _ in range(number):
        high = sheet.side * random.uniform(*((0.3, 0.95) if number == 1 else (0.2, 0.5)))
        wide, away = min(high * random.uniform(0.75, 1.25), 0.98 * sheet.width), sheet.time * sheet.side
        x, y = random.uniform(0, sheet.width - wide), random.uniform(0, max(0, sheet.height - high))
        x, y = x + random.uniform(-1, 1) * away, y + random.uniform(-1, 1) * away
        sheet.draw(random.choice(_ICONS), (x, y, x + wide, y + high), random.choice((0, 0, 1.5, 4)))
        sheet.colors = random.sample(sheet.colors, 4)


def _layout(sheet: Sheet) -> None:
    left, top, right, bottom = (0, 0, sheet.width, sheet.height) if sheet.random.random() < 0.6 else sheet.box(0.6)
    moved, layout = sheet.time * sheet.side * 0.3, sheet.random.choice(_LAYOUTS)
    sheet.draw(layout, (left + moved, top, right + moved, bottom), sheet.random.choice((0, 2, 5)))


def _flag(sheet: Sheet) -> None:
    box = (0, 0, sheet.width, sheet.height) if sheet.random.random() < 0.6 else sheet.box(0.5)
    sheet.thick, sheet.colors = round(sheet.side * 0.09), [any_color(sheet.random) for _ in range(4)]
    sheet.draw(sheet.random.choice(_FLAGS), box, 0)


def _outlines(sheet: Sheet) -> None:
    """Closed shapes without a name, creatures of such parts, and strokes: curled, jagged or crossed."""
    random, pen = sheet.random, sheet.pen
    turns = np.linspace(0, 2 * math.pi, 100)
    for _ in range(random.choice((1, 1, 2, 4))):
        x, y = (random.uniform(0.3, 0.7) * side for side in sheet.image.size)
        x += sheet.time * sheet.side * random.uniform(-0.5, 0.5)
        size, waves, begin = sheet.side * random.uniform(0.15, 0.5), random.randint(2, 8), random.uniform(0, 7)
        draws, kind = np.random.default_rng(random.getrandbits(32)), random.choice("wjscz")
        deep = random.uniform(0.15, 0.5)
        reach, turn = 1 - deep + deep * np.sin(waves * turns + begin), turns
        if kind == "j":
            turn = np.sort(draws.uniform(0, 2 * math.pi, waves + 3))
            reach = draws.uniform(0.3, 1, waves + 3)
        elif kind == "s":
            reach, turn = turns / 7, turns * random.uniform(2, 5) + begin
        points = list(zip(x + size * reach * np.cos(turn), y + size * reach * np.sin(turn), strict=True))
        if kind == "c":
            knots = np.sin(np.outer((waves % 4 + 1, random.randint(1, 4)), turns) + begin)
            points = list(zip(x + size * knots[0], y + size * knots[1], strict=True))
        elif kind == "z":
            points = [(x - size + 2 * size * i / 12, y + size * draws.uniform(-0.6, 0.6)) for i in range(13)]
        if kind in "wj" and random.random() < 0.7:
            pen.polygon(points, fill=sheet.any(), outline=sheet.ink)
        else:
            pen.line(points[: random.choice((12, 100))] if kind in "sc" else points, sheet.any(), sheet.thick, "curve")
        if random.random() < 0.3:
            for side in (-1, 1):
                a, b = x + side * size * 0.3, y - size * 0.2
                pen.ellipse((a - size / 9, b - size / 9, a + size / 9, b + size / 9), sheet.paper, sheet.ink, 3)
                pen.line((x + side * size * 0.5, y + size * 0.5, x + side * size, y + size), sheet.ink, sheet.thick)


def _rise(random: Random, number: int, time: float) -> np.ndarray:
    """float [number], 0 to 1: a function's values, a wave or a walk."""
    x, draws = np.linspace(0, 1, number), np.random.default_rng(random.getrandbits(32))
    begin, often, bent = random.uniform(0, 7) + 6 * time, random.uniform(0.5, 4), random.choice((-1, 1))
    values = (
        np.sin(2 * math.pi * often * x + begin),
        x ** random.uniform(0.3, 4) * bent + time * np.sin(4 * x),
        np.exp(-(((x - 0.5) * random.uniform(3, 9)) ** 2)) * bent,
        np.tanh(6 * (x - random.uniform(0.3, 0.7))) * bent,
        np.cumsum(draws.normal(0, 1, number)),
        np.floor(x * random.randint(3, 8)) * bent + draws.uniform(0, 1, number) * random.choice((0, 1)),
        np.sin(2 * math.pi * often * x + begin) * np.exp(-2 * x),
    )[random.randrange(7)]
    found: np.ndarray = (values - values.min()) / max(1e-6, float(np.ptp(values)))
    return found


def _plot(sheet: Sheet) -> None:
    """Curves, points, areas, boxes or bars without numbers, over axes of any kind or none."""
    random, pen, ink = sheet.random, sheet.pen, sheet.ink
    left, top, right, bottom = sheet.box(0.6)
    wide, high, size = right - left, bottom - top, random.uniform(16, 34)
    kind, faint = random.choice("lllppabbbsx"), random.random() < 0.3
    for part in np.linspace(0, 1, random.randint(4, 9)):
        if faint:
            pen.line((left, bottom - part * high, right, bottom - part * high), fill=sheet.colors[3], width=2)
            pen.line((left + part * wide, top, left + part * wide, bottom), fill=sheet.colors[3], width=2)
    if kind == "p" or random.random() < 0.6:
        zero = (bottom + top) / 2 if random.random() < 0.2 else bottom
        lines = [(left, top, left, bottom), (left, zero, right, zero)]
        lines += [(left, top, right, top), (right, top, right, bottom)]
        for line in lines[: random.choice((2, 2, 4))]:
            pen.line(line, fill=ink, width=random.choice((2, 3, 4)))
        for index in range(random.randint(-4, 7)):
            tick = str(index * random.choice((1, 1, 5, 10, 25)))
            sheet.text(left - size * 1.4, bottom - index / 7 * high - size / 2, tick, size)
            sheet.text(left + index / 7 * wide, bottom + 3, random.choice((tick, tick, sheet.words(1))), size)
    if random.random() < 0.3:
        sheet.text(left + wide * 0.2, max(0, top - 1.3 * size), sheet.words(3), 1.2 * size)
    for _ in range(random.choice((1, 1, 2, 3))):
        number = random.choice((5, 8, 12, 60, 100)) if kind in "lpa" else random.randint(4, 20)
        low, tall, color = random.uniform(0, 0.4), random.uniform(0.3, 0.6), sheet.any()
        ys = bottom - (low + tall * _rise(random, number, sheet.time)) * high
        xs, half, dot = left + np.linspace(0, 1, number) * wide, wide / number * 0.4, random.uniform(4, 12)
        if kind == "p":
            draws = np.random.default_rng(random.getrandbits(32))
            xs = left + draws.uniform(0, 1, number) * wide
            ys = ys + draws.normal(0, random.uniform(0, 0.2), number) * high
        spots = list(zip(xs, ys, strict=True))
        if kind == "l":
            pen.line(spots, fill=color, width=sheet.thick, joint="curve")
        elif kind == "a":
            pen.polygon([(left, bottom), *spots, (right, bottom)], fill=color)
        for x, y in spots if kind in "bsxp" or random.random() < 0.3 else ():
            if kind in "lap":
                pen.ellipse((x - dot, y - dot, x + dot, y + dot), fill=color)
                continue
            if kind == "x":
                pen.line((x, y - 3 * half, x, y + 3 * half), fill=ink, width=3)
            up, under = (y, max(y, bottom)) if kind == "b" else (y - half, y + 2 * half)
            pen.rectangle((x - half, up, x + half, under), color, ink)


def _map(sheet: Sheet) -> None:
    """Regions that meet along borders, with roads and names."""
    random = sheet.random
    draws, number = np.random.default_rng(random.getrandbits(32)), random.randint(4, 14)
    down, across = np.mgrid[0 : sheet.height // 8, 0 : sheet.width // 8]
    bend = [3 * np.sin(axis / random.uniform(3, 9))[..., None] for axis in (across, down)]
    seeds = draws.uniform(0, 1, (number, 2)) * down.shape
    far = np.hypot(down[..., None] + bend[0] - seeds[:, 0], across[..., None] + bend[1] - seeds[:, 1])
    shades = np.array([any_color(random) for _ in range(random.choice((2, 4, number)))], np.uint8)
    regions = Image.fromarray(shades[far.argmin(-1) % len(shades)])
    sheet.image.paste(regions.resize(sheet.image.size, Image.Resampling.NEAREST))
    for _ in range(random.randint(0, 4)):
        number = random.randint(2, 5)
        points = [(random.uniform(0, sheet.width), random.uniform(0, sheet.height)) for _ in range(number)]
        sheet.pen.line(points, sheet.any(), random.randint(3, 16), "curve")
        sheet.text(*points[0], sheet.words(1), random.uniform(16, 36))


def _print(sheet: Sheet) -> None:
    """Formulas, code, and sentences: lines of three words and more, or more lines than are read."""
    random, formulas = sheet.random, sheet.random.random() < 0.35
    number = random.choice((1, 1, 2, 4) if formulas else (1, 2, 3, 3, 4, 5, 6, 8))
    size = min(sheet.height / number / 1.5, sheet.side * random.uniform(0.06, 0.2 if formulas else 0.14))
    sheet.face = random.choice(("DejaVuSans", "DejaVuSerif", "FreeSerif", "DejaVuSansMono")) if formulas else sheet.face
    left, y = sheet.width * random.uniform(0.02, 0.3), random.uniform(0, max(1, sheet.height - 1.4 * size * number))
    ink, spread = random.choice((sheet.ink, sheet.ink, sheet.colors[0])), random.uniform(1.15, 1.5)
    if formulas and random.random() < 0.2:
        sheet.pen.rectangle((left - size, y - size, left + 5 * size, y + 2 * size), fill=any_color(random, sheet.ink))
    for _ in range(number):
        words = [random.choice(SEEN_WORDS) for _ in range(random.randint(3 if number < 4 else 1, 7))]
        words[random.randrange(len(words))] = random.choice((words[0], words[0], number_text(random)))
        text = " ".join(words) + random.choice(("", "", ".", "!", "?"))
        if random.random() < 0.2:
            text = text.translate(str.maketrans("aouesc", random.choice(("äöüéßç", "áóúèšć", "àôûêsč"))))
        text = random.choice((text, text.capitalize(), text.title()))
        if formulas:
            made_up = "".join(random.choice("abcxyznkt0123456789+-=²³()/√") for _ in range(random.randint(5, 14)))
            text = random.choice((*_DATA["formulas"], *[made_up] * 15))
        room = 0.98 * (sheet.width - left) / font(sheet.face, max(14, round(size))).getlength(text)
        sheet.text(left, y, text, size * min(1, room) if number < 3 else size, ink)
        y += spread * size


def _pattern(sheet: Sheet) -> None:
    """Grids, stripes, waves, bricks, rings, checks, codes, cells and maps of heat."""
    random, pen, time, (width, height) = sheet.random, sheet.pen, sheet.time, sheet.image.size
    step, kind = sheet.side / random.uniform(4, 26), random.choice("gghswbrccqqqq")
    color, wide = sheet.any(), random.choice((2, 2, 3, 6))
    if kind in "qc":
        draws = np.random.default_rng(random.getrandbits(32) + round(_LIFE * time))
        levels, size = random.choice((2, 2, 4, 30)), (int(height / step) + 1, int(width / step) + 1)
        field = draws.integers(0, levels, size) if kind == "q" else np.indices(size).sum(0) % 2
        table = np.array([sheet.paper, color, *(any_color(random) for _ in range(28))], np.float64)
        table = np.linspace(table[0], table[1], 30) if levels == 30 and random.random() < 0.7 else table
        left, top, right, bottom = map(round, sheet.box(0.4)) if random.random() < 0.4 else (0, 0, width, height)
        cells = Image.fromarray(table[field].astype(np.uint8))
        sheet.image.paste(cells.resize((right - left, bottom - top), Image.Resampling.NEAREST), (left, top))
        return
    for index in range(-1, int(max(width, height) / step) + 2):
        at = (index + time) * step
        if kind in "gs":
            pen.line((at, 0, at, height), fill=color, width=wide if kind == "g" else round(step / 2))
        if kind in "ghb":
            pen.line((0, at, width, at), fill=color, width=wide)
        if kind == "w":
            pen.line([(x, at + step / 3 * math.sin(x / step * 2)) for x in range(0, width, 8)], fill=color, width=wide)
        if kind == "r" and at > 0:
            box = (width / 2 - at / 2, height / 2 - at / 2, width / 2 + at / 2, height / 2 + at / 2)
            pen.ellipse(box, outline=color, width=wide)
        for x in range(int(width / step / 2) + 1) if kind == "b" else ():
            pen.line(((2 * x + index % 2) * step, at, (2 * x + index % 2) * step, at + step), fill=color, width=wide)


def _gradient(sheet: Sheet) -> None:
    """From one colour to another, straight, round, or soft as a blurred photograph."""
    random, (down, across) = sheet.random, np.mgrid[0:64, 0:64] / 63.0
    turn, kind = random.choice((0.0, math.pi / 2, random.uniform(0, 7))), random.random()
    part = across * math.cos(turn) + down * math.sin(turn) + sheet.time
    if kind < 0.3:
        part = np.hypot(across - random.uniform(0.2, 0.8), down - random.uniform(0.2, 0.8)) + sheet.time
    elif kind < 0.5:
        part = np.random.default_rng(random.getrandbits(32) + round(_LIFE * sheet.time)).uniform(0, 1, (64, 64))
    part = ((part - part.min()) / np.ptp(part))[..., None]
    ends = [random.choice((any_color(random), (0, 0, 0), (255, 255, 255))) for _ in range(2)]
    begin, end = np.array(ends, np.float64)
    end = 255 - begin if np.abs(begin - end).max() < 100 else end
    mixed = begin * (1 - part) + end * part
    sheet.image.paste(Image.fromarray(mixed.astype(np.uint8)).resize(sheet.image.size, Image.Resampling.BICUBIC))


def _bodies(sheet: Sheet) -> None:
    """Several, each on its own way: in a clip more than the one that is known to move."""
    random = sheet.random
    for index in range(random.randint(3, 9)):
        size = sheet.side * random.uniform(0.03, 0.12)
        spots = [random.uniform(0, 2) + random.uniform(-1.5, 1.5) * sheet.time for _ in range(2)]
        x, y = (abs((spot + 1) % 2 - 1) * side for spot, side in zip(spots, sheet.image.size, strict=True))
        shape = sheet.pen.ellipse if index % 3 else sheet.pen.rectangle
        shape((x - size, y - size, x + size, y + size), fill=any_color(random, sheet.paper))


_KINDS: dict[Callable[[Sheet], None], tuple[float, float]] = {
    _icons: (5.5, 2.0),
    _layout: (4.5, 0.8),
    _flag: (1.0, 0.0),
    _outlines: (1.6, 1.0),
    _plot: (3.0, 1.5),
    _map: (0.8, 0.0),
    _print: (2.4, 0.0),
    _pattern: (1.5, 1.5),
    _gradient: (0.8, 0.4),
    _bodies: (0.0, 2.0),
}
"""How often each is drawn, as a picture and as a clip."""


def drawing(random: Random, width: int, height: int) -> Image.Image:
    return drawn(_kind(random, 0), random, width, height)


def _kind(random: Random, nth: int) -> Callable[[Sheet], None]:
    return random.choices(tuple(_KINDS), [shares[nth] for shares in _KINDS.values()])[0]


def drawn(kind: Callable[[Sheet], None], random: Random, width: int, height: int, time: float = 0.0) -> Image.Image:
    sheet = Sheet(random, width, height, time)
    kind(sheet)
    return sheet.image.reduce(2)


def moving(random: Random, width: int, height: int, number: int) -> list[Image.Image]:
    """Frames of a drawing whose parts move: it is drawn again for each with what is random the same."""
    kind, seed, speed = _kind(random, 1), random.getrandbits(32), random.random()
    return [drawn(kind, Random(seed), width, height, speed * nth / number) for nth in range(number)]


def strange_picture(random: Random) -> Picture:
    """Nothing that has a name here; `strange` is set."""
    image = _any(random, *canvas_size(random))
    return _strange(random, [jpeg(image, random.randint(40, 95)) if random.random() < 0.25 else image])


def strange_clip(random: Random) -> Picture:
    """The same as a clip of 2 frames and more: parts that move, a camera that moves, cuts, or nothing that moves."""
    number = random.choice((2, 3, 4, 4, 4, 6, 6, 8, 8, 10, 12, 16, 20, 24, 30, LONGEST_CLIP))
    # What the processor asks of a frame; smaller ones make longer clips fit a block.
    cells = 128 if number <= 30 else _CLIP_CELLS * 2 // number
    aspect = 2 ** random.uniform(-0.8, 0.8)
    width, height = round(CELL * (1.1 * cells * aspect) ** 0.5), round(CELL * (1.1 * cells / aspect) ** 0.5)
    kind = random.random()
    if kind < 0.45:
        images = moving(random, width, height, number)
    elif kind < 0.85:
        images = _filmed(random, _any(random, 2 * width, 2 * height), width, height, number)
    else:
        cuts = [_any(random, width, height) for _ in range(random.randint(1, 4))]
        images = [cuts[len(cuts) * nth // number] for nth in range(number)]
    if random.random() < 0.5:
        quality = random.randint(40, 95)
        images = [jpeg(image, quality) for image in images]
    clip = _strange(random, images, (cells * CELL**2, min(MAX_PIXELS, round(1.05 * cells) * CELL**2)))
    clip.motion = ("strange",)
    return clip


def _filmed(random: Random, image: Image.Image, width: int, height: int, number: int) -> list[Image.Image]:
    """Frames of width x height of an image twice as large: a window that slides and grows."""
    begin, end = ([random.uniform(0, 1), random.uniform(0, 1), random.uniform(0.6, 1)] for _ in range(2))
    turn = random.choice((0, 0, random.uniform(-40, 40)))
    images = []
    for nth in range(number):
        across, down, part = (a + (b - a) * nth / number for a, b in zip(begin, end, strict=True))
        left, top = across * (1 - part) * image.width, down * (1 - part) * image.height
        box = (left, top, left + part * image.width, top + part * image.height)
        turned = image.rotate(turn * nth / number) if turn else image
        images.append(turned.resize((width, height), Image.Resampling.BILINEAR, box))
    return images


def _any(random: Random, width: int, height: int) -> Image.Image:
    return random.choices(tuple(_PICTURES), tuple(_PICTURES.values()))[0](random, width, height)


def _strange(random: Random, images: list[Image.Image], bounds: tuple[int, int] = (MIN_PIXELS, MAX_PIXELS)) -> Picture:
    picture = finished(Canvas(random, 28, 28), images, bounds)
    picture.strange, picture.ground = True, None
    return picture


def _numpy(random: Random) -> np.random.Generator:
    return np.random.default_rng(random.getrandbits(32))


def _noise(random: Random, width: int, height: int) -> Image.Image:
    return Image.fromarray(_numpy(random).integers(0, 256, (height, width, 3), dtype=np.uint8))


def _grown(values: np.ndarray, width: int, height: int) -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)


def _scribbles(random: Random, width: int, height: int) -> Image.Image:
    image = Image.new("RGB", (width, height), any_color(random))
    pen = ImageDraw.Draw(image)
    for _ in range(random.randint(8, 30)):
        points = [(random.uniform(0, width), random.uniform(0, height)) for _ in range(random.randint(3, 7))]
        if random.random() < 0.5:
            pen.polygon(points, fill=any_color(random))
        else:
            pen.line(points, fill=any_color(random), width=random.randint(1, 6))
    return image


def _textures(random: Random, width: int, height: int) -> Image.Image:
    coarse = np.asarray(_grown(_numpy(random).integers(0, 256, (6, 6, 3)), width, height))
    fine = _numpy(random).normal(0, random.uniform(5, 40), (height, width, 1))
    return Image.fromarray(np.clip(coarse + fine, 0, 255).astype(np.uint8))


def _detail(random: Random, width: int, height: int, least: int = 2) -> np.ndarray:
    """float [height, width, 3]: sums of clouds of all sizes, the finer the weaker, as photographs have them."""
    draws, total, cells, weight = _numpy(random), np.zeros((height, width, 3)), least, 1.0
    falls = random.uniform(0.45, 0.75)
    hue = draws.uniform(0.4, 1.0, 3)
    while cells < max(width, height) / 2:
        grey = draws.integers(0, 256, (cells, cells, 1)) * 0.75
        layer = np.asarray(_grown(grey + draws.integers(0, 64, (cells, cells, 3)), width, height), np.float64)
        total += weight * (layer - 128) * hue
        cells, weight = cells * 2, weight * falls
    return total


def _photo(random: Random, width: int, height: int) -> Image.Image:
    """Something like a photograph: a lit ground, and soft bodies with shades and texture in front of it."""
    level = np.linspace(random.uniform(60, 230), random.uniform(30, 200), height)[:, None, None]
    pixels = level + np.array([random.uniform(-40, 40) for _ in range(3)]) + 0.5 * _detail(random, width, height)
    horizon = random.randint(height // 4, height - 1)
    if random.random() < 0.6:
        ground = np.array([random.uniform(20, 200) for _ in range(3)])
        pixels[horizon:] = ground + 0.7 * _detail(random, width, height, 5)[horizon:]
    down, across = np.mgrid[0:height, 0:width]
    for _ in range(random.randint(1, 7)):
        mask = _body(random, width, height)
        light = random.uniform(-0.8, 0.8) * (across - width / 2) + random.uniform(-0.8, 0.8) * (down - height / 2)
        body = np.array(any_color(random)) * 0.8 + light[..., None] * 160 / max(width, height)
        body = body + random.uniform(0.2, 0.7) * _detail(random, width, height, random.choice((2, 4, 9)))
        pixels = pixels * (1 - mask) + body * mask
    pixels = pixels + _numpy(random).normal(0, random.uniform(0, 6), pixels.shape)
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    return image.filter(ImageFilter.GaussianBlur(random.uniform(0, 1.2)))


def _body(random: Random, width: int, height: int) -> np.ndarray:
    """float [height, width, 1], 0 to 1: the mask of a rounded, irregular body with soft edges."""
    mask = Image.new("L", (width, height))
    x, y, size = random.uniform(0, width), random.uniform(0, height), random.uniform(0.1, 0.5) * min(width, height)
    waves = [(random.randint(2, 7), random.uniform(0, 0.25), random.uniform(0, 2 * math.pi)) for _ in range(3)]
    stretch = random.uniform(0.4, 2.5)
    points = []
    for step in range(60):
        turn = 2 * math.pi * step / 60
        reach = size * (1 + sum(weight * math.sin(number * turn + begin) for number, weight, begin in waves))
        points.append((x + reach * math.cos(turn), y + stretch * reach * math.sin(turn)))
    ImageDraw.Draw(mask).polygon(points, fill=255)
    mask = mask.filter(ImageFilter.GaussianBlur(random.uniform(0.5, 4)))
    return np.asarray(mask, np.float64)[..., None] / 255


def _fill(random: Random, image: Image.Image, box: tuple[float, float, float, float], size: int, ink: RGB) -> None:
    """Fills a box with lines of small print."""
    pen, face = ImageDraw.Draw(image), font(random.choice(SEEN_FONTS), size)
    left, top, right, bottom = box
    gap = size * random.uniform(1.15, 1.7)
    while top + size < bottom:
        x = left
        end = right if random.random() < 0.75 else left + (right - left) * random.uniform(0.2, 0.9)
        while x < end:
            word = random.choice(SEEN_WORDS)
            length = face.getlength(word + " ")
            if x + length > end:
                break
            pen.text((x, top), word, fill=ink, font=face)
            x += length
        top += gap * (2 if random.random() < 0.08 else 1)


def _page(random: Random, width: int, height: int) -> Image.Image:
    """A page of print in one or two columns."""
    paper, ink = paper_and_ink(random)
    image = Image.new("RGB", (width, height), paper)
    size = random.randint(7, max(8, min(13, height // 14)))
    margin, top = random.uniform(4, 24), random.uniform(4, 24)
    if random.random() < 0.5:
        heading = font(random.choice(SEEN_FONTS), 2 * size)
        ImageDraw.Draw(image).text((margin, top), " ".join(random.sample(SEEN_WORDS, 2)), fill=ink, font=heading)
        top += 3 * size
    columns = 2 if width > 260 and random.random() < 0.35 else 1
    each = (width - margin * (columns + 1)) / columns
    for index in range(columns):
        left = margin + index * (each + margin)
        _fill(random, image, (left, top, left + each, height - 4), size, ink)
    return image


_Draw = Callable[[Random, int, int], Image.Image]
_PICTURES: dict[_Draw, float] = {_noise: 0.3, _scribbles: 1.0, _textures: 0.7, _photo: 3.0, _page: 1.2, drawing: 18.0}
