"""Colours and shapes of the drawn world: their names, how they vary, and how they are drawn."""

from __future__ import annotations

import colorsys
import json
import math
from dataclasses import dataclass
from pathlib import Path
from random import Random

RGB = tuple[int, int, int]


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
        red, green, blue = colorsys.hsv_to_rgb(hue % 360 / 360, saturation, value)
        return round(red * 255), round(green * 255), round(blue * 255)


_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
COLORS = {name: ColorRange(*map(tuple, spans)) for name, spans in _DATA.items()}
COLOR_NAMES = tuple(COLORS)
SPELLED = ("cyan", "magenta")
"""Colours without a token of their own."""
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
    kind = random.random()
    hue = random.random()
    if kind < 0.3:
        level = random.randint(238, 255)
        return level, level, level
    if kind < 0.65:
        red, green, blue = colorsys.hsv_to_rgb(hue, random.uniform(0.0, 0.15), random.uniform(0.82, 1.0))
    elif kind < 0.85:
        red, green, blue = colorsys.hsv_to_rgb(hue, random.uniform(0.0, 0.4), random.uniform(0.05, 0.25))
    else:
        red, green, blue = colorsys.hsv_to_rgb(hue, random.uniform(0.1, 0.3), random.uniform(0.7, 0.95))
    return round(red * 255), round(green * 255), round(blue * 255)


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
    """Corners of a shape of half extent `radius` about (x, y); of an oval many points."""
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
    elif shape == "oval":
        turns = [2 * math.pi * i / 72 for i in range(72)]
        points = [(math.cos(turn), look.aspect * math.sin(turn)) for turn in turns]
    else:
        raise ValueError(f"{shape} has no corners")
    cos, sin = math.cos(look.angle) * radius * scale, math.sin(look.angle) * radius * scale
    return [(x + px * cos - py * sin, y + px * sin + py * cos) for px, py in points]
