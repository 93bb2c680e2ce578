"""Colours and shapes of the drawn world, what is in a drawn picture, and the canvas that draws it."""

from __future__ import annotations

import colorsys
import io
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from models.interfaces.resizing import resize
from models.qwen_vl.pictures import smart_resize
from training.vision.fonts import font

RGB = tuple[int, int, int]


def hsv(hue: float, saturation: float, value: float) -> RGB:
    red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


@dataclass(frozen=True)
class ColorRange:
    """Hue in degrees (may pass 360), saturation and value from 0 to 1: first and last. usual: shades that programs
    call by the colour's name or by a similar one; people draw with those."""

    hue: tuple[float, float]
    saturation: tuple[float, float]
    value: tuple[float, float]
    usual: tuple[RGB, ...]

    def draw(self, random: Random) -> RGB:
        if random.random() < 0.3:
            usual = random.choice(self.usual)
            return usual[0], usual[1], usual[2]
        hue, saturation, value = (random.uniform(*span) for span in (self.hue, self.saturation, self.value))
        return hsv(hue % 360 / 360, saturation, value)


_DATA = json.loads(Path(__file__).with_name("palette.json").read_text(encoding="utf-8"))
COLORS = {name: ColorRange(*map(tuple, spans)) for name, spans in _DATA.items()}
COLOR_NAMES = tuple(COLORS)
SHAPE_NAMES = ("circle", "square", "triangle", "star", "ring", "cross", "rectangle", "oval")
SIZE_NAMES = ("small", "medium", "large")
SIZES = {"small": (0.065, 0.09), "medium": (0.12, 0.145), "large": (0.19, 0.24)}
"""Half the extent of a shape, of the picture's shorter side."""
HUGE = (0.24, 0.46)
"""The same of shapes that fill their picture; they are called large, too."""
_LEAST_CONTRAST = 75.0
INKS = ("black", "red", "blue", "green", "purple", "brown", "white", "orange", "yellow")


def plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("cross") else "s")


def contrast(first: RGB, second: RGB) -> float:
    return math.dist(first, second)


def color_on(random: Random, name: str, ground: RGB) -> RGB | None:
    """A shade of the colour that stands out from `ground`, or None where none of a few does."""
    for _ in range(4):
        shade = COLORS[name].draw(random)
        if contrast(shade, ground) >= _LEAST_CONTRAST:
            return shade
    return None


def named_ground(random: Random) -> tuple[RGB, str | None]:
    """As ground_color, or a colour with a name, and that name."""
    kind = random.random()
    if kind < 0.14:
        return (255, 255, 255), "white"
    if kind < 0.3:
        name = random.choice(COLOR_NAMES)
        return COLORS[name].draw(random), name
    shade = ground_color(random)
    return shade, "white" if min(shade) >= 238 and max(shade) - min(shade) <= 3 else None


def ground_color(random: Random) -> RGB:
    """Mostly light, sometimes dark or pastel."""
    kind, hue = random.random(), random.random()
    if kind < 0.3:
        level = random.randint(238, 255)
        return level, level, level
    if kind < 0.65:
        return hsv(hue, random.uniform(0.0, 0.15), random.uniform(0.82, 1.0))
    if kind < 0.85:
        return hsv(hue, random.uniform(0.0, 0.4), random.uniform(0.05, 0.25))
    return hsv(hue, random.uniform(0.1, 0.3), random.uniform(0.7, 0.95))


@dataclass(frozen=True)
class Look:
    """How a shape is drawn beyond its name. angle in radians; apex: where a triangle's tip is over its base, from -1 to
    1; aspect: the short side of a rectangle or oval by the long one; hollow: the thickness of a ring, or of an outline
    in place of a filled shape, as a share of the radius; edge: the colour of a thin line around it."""

    angle: float = 0.0
    apex: float = 0.0
    aspect: float = 0.5
    hollow: float = 0.0
    edge: RGB | None = None


def look_of(random: Random, shape: str, ground: RGB) -> Look:
    """Mostly filled and upright."""
    angle, apex, hollow, edge = random.choice((0.0, random.uniform(-0.3, 0.3))), 0.0, 0.0, None
    if shape == "triangle" and random.random() < 0.4:
        angle += random.choice((0.5, 1.0, 1.5)) * math.pi
    if shape == "triangle" and random.random() < 0.25:
        apex = random.choice((-1.0, 1.0, random.uniform(-1, 1)))
    if shape in ("rectangle", "oval") and random.random() < 0.5:
        angle += math.pi / 2
    if shape == "ring":
        hollow = random.uniform(*random.choice(((0.2, 0.4), (0.05, 0.2))))
    elif random.random() < (0.2 if shape in ("square", "triangle", "rectangle") else 0.08) and shape != "circle":
        hollow = random.uniform(*random.choice(((0.18, 0.28), (0.03, 0.18))))
    elif random.random() < 0.1:
        edge = (20, 20, 20) if ground[0] > 128 else (240, 240, 240)
    return Look(angle, apex, random.uniform(0.3, 0.68), hollow, edge)


def outline(shape: str, x: float, y: float, radius: float, look: Look) -> list[tuple[float, float]]:
    """Corners of a shape of half extent `radius` about (x, y), not of round ones; of an oval many points."""
    scale = 1.0
    if shape in ("square", "rectangle"):
        scale, high = (0.92, 1.0) if shape == "square" else (1.0, look.aspect)
        points = [(-1.0, -high), (1.0, -high), (1.0, high), (-1.0, high)]
    elif shape == "triangle":
        points = [(look.apex, -1.1), (1.0, 0.9), (-1.0, 0.9)]
    elif shape == "star":
        points = [
            (math.sin(math.pi * i / 5) * (1.15, 0.47)[i % 2], -math.cos(math.pi * i / 5) * (1.15, 0.47)[i % 2])
            for i in range(10)
        ]
    elif shape == "cross":
        w = 0.34
        points = [(-w, -1.0), (w, -1.0), (w, -w), (1.0, -w), (1.0, w), (w, w)]
        points += [(w, 1.0), (-w, 1.0), (-w, w), (-1.0, w), (-1.0, -w), (-w, -w)]
    else:
        turns = [2 * math.pi * i / 72 for i in range(72)]
        points = [(math.cos(turn), look.aspect * math.sin(turn)) for turn in turns]
    cos, sin = math.cos(look.angle) * radius * scale, math.sin(look.angle) * radius * scale
    return [(x + px * cos - py * sin, y + px * sin + py * cos) for px, py in points]


CELL = 28
MIN_PIXELS, MAX_PIXELS = 64 * CELL**2, 256 * CELL**2
_OVERSAMPLED_PIXELS = 250_000


@dataclass(frozen=True)
class Figure:
    """A shape; x and y its centre and radius half its extent, in pixels of the canvas. hollow: the thickness of an
    outline as a share of the radius, 0 where it is filled."""

    shape: str
    color: str
    size: str
    x: float
    y: float
    radius: float
    hollow: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"


@dataclass(frozen=True)
class Line:
    """A printed line; (left, top, right, bottom) of its ink, and the centre of each of its characters."""

    text: str
    ink: str
    box: tuple[float, float, float, float]
    centers: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True)
class Chart:
    """Labels and values of bars from left to right or from top to bottom, of slices as the legend lists them, or
    clockwise from the top where there is no legend. title: empty where there is none. colors: their names."""

    kind: str
    labels: tuple[str, ...]
    values: tuple[int, ...]
    title: str = ""
    colors: tuple[str, ...] = ()


@dataclass
class Picture:
    """frames: uint8 [height, width, 3], of the size that the model sees; one, or those of a video. places and letters:
    what is where, for targets that training drops later, in pixels of that size."""

    frames: list[np.ndarray]
    width: int
    height: int
    figures: list[Figure] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    chart: Chart | None = None
    motion: tuple[str, ...] | None = None
    end: Figure | None = None
    """The shape of a clip as it is in the last frame."""
    covers: dict[tuple[Figure, Figure], float] = field(default_factory=dict)
    """Of a shape that lies over another, and the other, which share of that is covered."""
    strange: bool = False
    ground: str | None = None
    """Its colour, where it has one with a name all over."""
    places: list[tuple[Figure, float, float]] = field(default_factory=list)
    letters: list[tuple[str, float, float]] = field(default_factory=list)


def canvas_size(random: Random, *, least_cells: int = 64, most_cells: int = 256) -> tuple[int, int]:
    """Width and height: mostly near the least area, of any aspect ratio up to 4:1, sometimes to be resized."""
    kind = random.random()
    cells = random.uniform(least_cells, min(most_cells, 1.5 * least_cells))
    if kind > 0.7:
        cells = random.uniform(least_cells, most_cells) ** 0.5 * random.uniform(least_cells, most_cells) ** 0.5
    spread = 1.35 if random.random() < 0.12 else 0.7
    aspect = 2 ** random.uniform(-spread, spread) if random.random() < 0.75 else 1.0
    width, height = math.sqrt(cells * aspect), math.sqrt(cells / aspect)
    if random.random() < 0.85:
        return max(3, round(width)) * CELL, max(3, round(height)) * CELL
    scale = 1.0
    if random.random() < 0.3:
        scale = random.uniform(0.55, 1.6)
    return max(80, round(width * CELL * scale)), max(80, round(height * CELL * scale))


class Canvas:
    """Draws figures and text on one ground and keeps what it drew."""

    def __init__(
        self,
        random: Random,
        width: int,
        height: int,
        ground: RGB | None = None,
        *,
        ground_name: str | None = None,
        fine: bool = True,
    ) -> None:
        """ground_name: where its colour has one. fine: shapes get smooth edges; text has them anyway."""
        self.random, self.width, self.height = random, width, height
        self.ground = ground_color(random) if ground is None else ground
        self.ground_name = ground_name
        self.scale = 2 if fine and width * height <= _OVERSAMPLED_PIXELS else 1
        self.image = Image.new("RGB", (width * self.scale, height * self.scale), self.ground)
        if random.random() < 0.12 and ground_name in (None, "white"):
            self._shade()
        self.begin(self.image)

    def begin(self, image: Image.Image) -> None:
        """Draws on `image`, which has nothing on it."""
        self.image, self._draw, self._fine = image, ImageDraw.Draw(image), True
        self.figures: list[Figure] = []
        self.lines: list[Line] = []
        self.letters: list[tuple[str, float, float]] = []
        self.covers: dict[tuple[Figure, Figure], float] = {}
        self._looks: list[tuple[Figure, Look]] = []

    def figure(self, figure: Figure, shade: RGB, look: Look) -> None:
        figure = replace(figure, hollow=look.hollow)
        self._paint(self._draw, figure, shade, look)
        for other, how in self._looks:
            if math.hypot(figure.x - other.x, figure.y - other.y) < 1.2 * (figure.radius + other.radius):
                below = self._mask(other, how)
                if share := float((self._mask(figure, look) & below).sum() / below.sum()):
                    self.covers[figure, other] = share
        self._looks.append((figure, look))
        self.figures.append(figure)

    def _mask(self, figure: Figure, look: Look) -> np.ndarray:
        mask = Image.new("1", self.image.size)
        self._paint(ImageDraw.Draw(mask), figure, 1, replace(look, edge=None))
        return np.asarray(mask)

    def _paint(self, pen: ImageDraw.ImageDraw, figure: Figure, shade: RGB | int, look: Look) -> None:
        x, y, radius = (value * self.scale for value in (figure.x, figure.y, figure.radius))
        filled = (shade, look.edge, self.scale)
        how = (None, shade, max(2, round(radius * look.hollow))) if look.hollow else filled
        if figure.shape in ("circle", "ring"):
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), *how)
        else:
            pen.polygon(outline(figure.shape, x, y, radius, look), *how)

    def box(self, box: tuple[float, float, float, float], shade: RGB) -> None:
        self._draw.rectangle([value * self.scale for value in box], fill=shade)

    def slice(
        self, box: tuple[float, float, float, float], start: float, end: float, shade: RGB, edge: RGB | None = None
    ) -> None:
        width = 0 if edge is None else self.scale
        self._draw.pieslice([value * self.scale for value in box], start, end, fill=shade, outline=edge, width=width)

    def shade(self, color: str) -> RGB | None:
        return color_on(self.random, color, self.ground)

    def ink(self) -> tuple[str, RGB]:
        """A colour of print that can be read on the ground."""
        for name in (self.random.choice(INKS) if self.random.random() < 0.5 else "black", "black", "white"):
            shade = self.shade(name)
            if shade is not None and abs(_lightness(shade) - _lightness(self.ground)) > 90:
                return name, shade
        name = "white" if _lightness(self.ground) < 128 else "black"
        return name, COLORS[name].draw(self.random)

    def settle(self) -> None:
        """Figures become pixels; text is drawn on those."""
        if self._fine:
            if self.scale > 1:
                self.image = self.image.reduce(self.scale)
            self._draw = ImageDraw.Draw(self.image)
            self._fine = False

    def text(self, text: str, x: float, y: float, face: str, size: int, ink: str, shade: RGB, *, line: bool) -> Line:
        """Prints from (x, y), the left end of the base line's ascender box. line: it is a line of the picture's text,
        not a label."""
        self.settle()
        drawn = font(face, size)
        self._draw.text((x, y), text, fill=shade, font=drawn)
        left, top, right, bottom = drawn.getbbox(text)
        middle = y + (top + bottom) / 2
        centers = []
        end = 0.0
        for index, character in enumerate(text):
            begin, end = end, drawn.getlength(text[: index + 1])
            if character != " ":
                centers.append((character, x + (begin + end) / 2, middle))
        printed = Line(text, ink, (x + left, y + top, x + right, y + bottom), tuple(centers))
        if line:
            self.lines.append(printed)
        self.letters += printed.centers
        return printed

    def upward(self, text: str, x: float, middle: float, face: str, size: int, shade: RGB) -> None:
        """Prints text that reads from bottom to top, centred on `middle`; nobody is asked about it."""
        self.settle()
        drawn = font(face, size)
        left, top, right, bottom = drawn.getbbox(text)
        mask = Image.new("L", (round(right - left) + 2, round(bottom - top) + 2))
        ImageDraw.Draw(mask).text((1 - left, 1 - top), text, fill=255, font=drawn)
        mask = mask.transpose(Image.Transpose.ROTATE_90)
        self.image.paste(Image.new("RGB", mask.size, shade), (round(x), round(middle - mask.height / 2)), mask)

    def finish(self) -> Picture:
        self.settle()
        return finished(self, [_effects(self.random, self.image)])

    def _shade(self) -> None:
        self.ground_name = None
        gradient = Image.linear_gradient("L").resize(self.image.size)
        if self.random.random() < 0.5:
            gradient = gradient.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        red, green, blue = (max(0, min(255, value + self.random.randint(-28, 28))) for value in self.ground)
        self.image.paste(Image.new("RGB", self.image.size, (red, green, blue)), (0, 0), gradient)


def finished(canvas: Canvas, images: list[Image.Image], bounds: tuple[int, int] = (MIN_PIXELS, MAX_PIXELS)) -> Picture:
    """The picture as the model sees it: resized as the processor does it."""
    width, height = images[0].size
    final_height, final_width = smart_resize(height, width, factor=CELL, min_pixels=bounds[0], max_pixels=bounds[1])
    across, down = final_width / width, final_height / height
    return Picture(
        frames=[resize(image, final_width, final_height) for image in images],
        width=width,
        height=height,
        figures=canvas.figures,
        covers=canvas.covers,
        lines=canvas.lines,
        places=[(figure, figure.x * across, figure.y * down) for figure in canvas.figures],
        letters=[(character, x * across, y * down) for character, x, y in canvas.letters],
        ground=canvas.ground_name,
    )


def _lightness(shade: RGB) -> float:
    return 0.3 * shade[0] + 0.59 * shade[1] + 0.11 * shade[2]


def _effects(random: Random, image: Image.Image) -> Image.Image:
    """Noise, blur, JPEG, each seldom."""
    if random.random() < 0.04:
        image = image.filter(ImageFilter.GaussianBlur(random.uniform(0.3, 0.7)))
    if random.random() < 0.12:
        pixels = np.asarray(image, dtype=np.int16)
        spread = random.randint(3, 14)
        noise = np.random.default_rng(random.getrandbits(32)).integers(-spread, spread + 1, pixels.shape, np.int16)
        image = Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))
    if random.random() < 0.15:
        image = jpeg(image, random.randint(50, 95))
    return image


def jpeg(image: Image.Image, quality: int) -> Image.Image:
    """The picture after a file of that quality."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")
