"""Pictures of what the world does not hold: noise and scribbles, and drawings of screens, pages, tables, plots and
landscapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from training.vision.fonts import SEEN_FONTS, font
from training.vision.palette import RGB, ground_color
from training.vision.pictures import Canvas, Picture, canvas_size, finished, jpeg
from training.vision.words import SEEN_WORDS, number_text


def strange_picture(random: Random) -> Picture:
    """Nothing that has a name here; `strange` is set."""
    width, height = canvas_size(random)
    image = random.choices(tuple(_KINDS), tuple(_KINDS.values()))[0](random, width, height)
    if random.random() < 0.25:
        image = jpeg(image, random.randint(40, 95))
    canvas = Canvas(random, 28, 28)
    canvas.figures, canvas.lines, canvas.letters = [], [], []
    picture = finished(canvas, [image])
    picture.strange = True
    return picture


def _numpy(random: Random) -> np.random.Generator:
    return np.random.default_rng(random.getrandbits(32))


def _any_color(random: Random) -> RGB:
    return random.randrange(256), random.randrange(256), random.randrange(256)


def _noise(random: Random, width: int, height: int) -> Image.Image:
    return Image.fromarray(_numpy(random).integers(0, 256, (height, width, 3), dtype=np.uint8))


def _clouds(random: Random, width: int, height: int) -> Image.Image:
    cells = random.randint(3, 14)
    return _grown(_numpy(random).integers(0, 256, (cells, cells, 3)), width, height)


def _grown(values: np.ndarray, width: int, height: int) -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)


def _blocks(random: Random, width: int, height: int) -> Image.Image:
    cells = random.randint(4, 16), random.randint(4, 16), 3
    image = Image.fromarray(_numpy(random).integers(0, 256, cells, dtype=np.uint8))
    image = image.resize((width, height), Image.Resampling.NEAREST).rotate(random.uniform(-30, 30))
    return image.filter(ImageFilter.GaussianBlur(random.uniform(0, 3)))


def _scribbles(random: Random, width: int, height: int) -> Image.Image:
    image = Image.new("RGB", (width, height), _any_color(random))
    pen = ImageDraw.Draw(image)
    for _ in range(random.randint(8, 30)):
        points = [(random.uniform(0, width), random.uniform(0, height)) for _ in range(random.randint(3, 7))]
        if random.random() < 0.5:
            pen.polygon(points, fill=_any_color(random))
        else:
            pen.line(points, fill=_any_color(random), width=random.randint(1, 6))
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
        body = np.array(_any_color(random)) * 0.8 + light[..., None] * 160 / max(width, height)
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


def _sentence(random: Random, most: int) -> str:
    words = " ".join(random.choice(SEEN_WORDS) for _ in range(random.randint(1, most)))
    return random.choice((words, words.capitalize(), words.capitalize() + ".", number_text(random)))


def _print(random: Random, image: Image.Image, box: tuple[float, float, float, float], size: int, ink: RGB) -> None:
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


def _paper_and_ink(random: Random) -> tuple[RGB, RGB]:
    paper = ground_color(random)
    light = sum(paper) > 380
    level = random.randint(0, 90) if light else random.randint(170, 255)
    return paper, (level, level, min(255, level + random.randint(0, 30)))


def _page(random: Random, width: int, height: int) -> Image.Image:
    """A page of print in one or two columns."""
    paper, ink = _paper_and_ink(random)
    image = Image.new("RGB", (width, height), paper)
    size = random.randint(7, max(8, min(13, height // 14)))
    margin, top = random.uniform(4, 24), random.uniform(4, 24)
    if random.random() < 0.5:
        heading = font(random.choice(SEEN_FONTS), 2 * size)
        ImageDraw.Draw(image).text((margin, top), _sentence(random, 3), fill=ink, font=heading)
        top += 3 * size
    columns = 2 if width > 260 and random.random() < 0.35 else 1
    each = (width - margin * (columns + 1)) / columns
    for index in range(columns):
        left = margin + index * (each + margin)
        _print(random, image, (left, top, left + each, height - 4), size, ink)
    return image


def _screen(random: Random, width: int, height: int) -> Image.Image:
    """A window with a bar, panels, buttons, fields and labels."""
    paper, ink = _paper_and_ink(random)
    image = Image.new("RGB", (width, height), paper)
    pen = ImageDraw.Draw(image)
    shades = [ground_color(random) for _ in range(3)] + [_any_color(random)]
    bar = random.randint(12, max(13, height // 7))
    if random.random() < 0.8:
        pen.rectangle((0, 0, width, bar), fill=random.choice(shades))
    side = random.randint(0, width // 3) if random.random() < 0.6 else 0
    if side:
        pen.rectangle((0, bar, side, height), fill=random.choice(shades))
    for _ in range(random.randint(5, 22)):
        x, y = random.uniform(0, width - 30), random.uniform(0, height - 14)
        wide, high = random.uniform(20, width / 2), random.uniform(9, height / 4)
        if random.random() < 0.55:
            round_by = random.choice((0, 3, 8))
            edge = ink if random.random() < 0.4 else None
            pen.rounded_rectangle((x, y, x + wide, y + high), round_by, fill=random.choice(shades), outline=edge)
        if random.random() < 0.8:
            size = random.randint(7, 13)
            if high > 2.5 * size and random.random() < 0.5:
                _print(random, image, (x + 3, y + 2, x + wide, y + high), size, ink)
            else:
                pen.text((x + 4, y + 1), _sentence(random, 3), fill=ink, font=font(random.choice(SEEN_FONTS), size))
    return image


def _table(random: Random, width: int, height: int) -> Image.Image:
    """Rows and columns of words and numbers."""
    paper, ink = _paper_and_ink(random)
    image = Image.new("RGB", (width, height), paper)
    pen = ImageDraw.Draw(image)
    columns, rows = random.randint(3, 6), random.randint(5, max(6, height // 22))
    size = max(7, min(13, round(0.6 * height / rows)))
    face = font(random.choice(SEEN_FONTS), size)
    ruled = random.random() < 0.6
    for row in range(rows):
        y = row * height / rows
        if ruled or row == 1:
            pen.line((0, y, width, y), fill=ink)
        for column in range(columns):
            x = column * width / columns
            text = random.choice(SEEN_WORDS) if row == 0 or column == 0 else number_text(random)
            pen.text((x + 3, y + 2), text[: max(2, int(1.6 * width / columns / size))], fill=ink, font=face)
            if ruled and column and row == 0:
                pen.line((x, 0, x, height), fill=ink)
    return image


def _plot(random: Random, width: int, height: int) -> Image.Image:
    """Lines or points over axes."""
    paper, ink = _paper_and_ink(random)
    image = Image.new("RGB", (width, height), paper)
    pen, size = ImageDraw.Draw(image), random.randint(8, 13)
    face = font(random.choice(SEEN_FONTS), size)
    left, bottom, right, top = 4 * size, height - 3 * size, width - size, 2 * size
    if random.random() < 0.5:
        pen.rectangle((left, top, right, bottom), outline=ink)
    else:
        pen.line((left, top, left, bottom, right, bottom), fill=ink)
    for index in range(5):
        part = index / 4
        pen.text((size / 2, bottom - part * (bottom - top) - size / 2), str(index * 20), fill=ink, font=face)
        pen.text((left + part * (right - left) - size / 2, bottom + 3), str(index), fill=ink, font=face)
    draws, points = _numpy(random), random.randint(6, 60)
    scattered = random.random() < 0.4
    for _ in range(random.randint(1, 4)):
        heights = draws.uniform(0, 1, points) if scattered else np.cumsum(draws.normal(0, 1, points))
        heights = (heights - heights.min()) / max(1e-6, float(np.ptp(heights)))
        places = np.sort(draws.uniform(0, 1, points)) if scattered else np.linspace(0, 1, points)
        spots = [(left + x * (right - left), bottom - y * (bottom - top)) for x, y in zip(places, heights, strict=True)]
        color = _any_color(random)
        if scattered:
            for x, y in spots:
                pen.ellipse((x - 2, y - 2, x + 2, y + 2), fill=color)
        else:
            pen.line(spots, fill=color, width=random.randint(1, 3))
    return image


_KINDS: dict[Callable[[Random, int, int], Image.Image], float] = {
    _noise: 0.3,
    _clouds: 0.7,
    _blocks: 0.7,
    _scribbles: 1.0,
    _textures: 0.7,
    _photo: 3.0,
    _page: 1.2,
    _screen: 1.8,
    _table: 0.8,
    _plot: 1.0,
}
