"""Pictures and clips of what the world does not hold: noise, scribbles, photographs, pages and drawings."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from training.vision.drawings import any_color, drawing, moving, paper_and_ink
from training.vision.fonts import SEEN_FONTS, font
from training.vision.palette import RGB
from training.vision.pictures import CELL, MAX_PIXELS, MIN_PIXELS, Canvas, Picture, canvas_size, finished, jpeg
from training.vision.words import SEEN_WORDS

LONGEST_CLIP = 40
"""Frames of a clip, of the smallest size."""
_CLIP_CELLS = 1950


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
    return random.choices(tuple(_KINDS), tuple(_KINDS.values()))[0](random, width, height)


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
        _print(random, image, (left, top, left + each, height - 4), size, ink)
    return image


_Draw = Callable[[Random, int, int], Image.Image]
_KINDS: dict[_Draw, float] = {_noise: 0.3, _scribbles: 1.0, _textures: 0.7, _photo: 3.0, _page: 1.2, drawing: 18.0}
