"""Short videos of one shape."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from PIL import ImageDraw

from models.embedded.world.palette import COLOR_NAMES, SHAPE_NAMES, SIZES, look_of
from models.embedded.world.pictures import CELL, MAX_PIXELS, Canvas, Figure, Picture, finished, jpeg

DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
VIDEO_MIN_PIXELS = 128 * CELL**2
"""Of a frame: what the processor asks of a checkpoint whose pictures have at most 256 blocks."""


def video_clip(random: Random) -> Picture:
    """One shape that moves, stands still or changes its colour, 4 to 8 frames; often a second one that stands still.

    motion: ("moves", direction), ("stands",) or ("changes", first color, second color).
    """
    if random.random() < 0.85:
        width = random.randint(9, 15) * CELL
        height = max(8, -(-128 * CELL // width)) * CELL
    else:
        width, height = random.randint(180, 320), random.randint(180, 320)
    first = Canvas(random, width, height)
    number = random.choice((4, 4, 4, 6, 8))
    side = min(width, height)
    kind = random.choices(("moves", "stands", "changes"), (0.65, 0.15, 0.2))[0]
    radius = random.uniform(SIZES["small"][0], SIZES["medium"][1]) * side
    direction = random.choice(tuple(DIRECTIONS))
    across, down = DIRECTIONS[direction] if kind == "moves" else (0, 0)
    length = random.uniform(0.25, 0.6)
    x, y = random.uniform(radius * 1.2, width - radius * 1.2), random.uniform(radius * 1.2, height - radius * 1.2)
    room_x, room_y = width - 2.4 * radius, height - 2.4 * radius
    if across:
        x = radius * 1.2 + room_x * (random.uniform(0, 1 - length) if across > 0 else random.uniform(length, 1))
    if down:
        y = radius * 1.2 + room_y * (random.uniform(0, 1 - length) if down > 0 else random.uniform(length, 1))
    color, second = _two_colors(random, first)
    figure = Figure(random.choice(SHAPE_NAMES), color[0], "medium", x, y, radius)
    look = look_of(random, figure.shape, first.ground)
    images = []
    ground = first.image
    for index in range(number):
        part = index / (number - 1)
        canvas = first
        canvas.image, canvas.figures, canvas.lines = ground.copy(), [], []
        canvas._draw, canvas._fine = ImageDraw.Draw(canvas.image), True
        moved = replace(figure, x=x + across * length * part * room_x, y=y + down * length * part * room_y)
        shade = second[1] if kind == "changes" and part >= 0.5 else color[1]
        canvas.figure(moved, shade, look)
        canvas.settle()
        images.append(canvas.image)
    if random.random() < 0.4:
        # What codecs do to frames.
        quality = random.randint(40, 95)
        images = [jpeg(image, quality) for image in images]
    clip = finished(first, images, (VIDEO_MIN_PIXELS, MAX_PIXELS))
    clip.figures, clip.places = [figure], []
    clip.motion = {
        "moves": ("moves", direction),
        "stands": ("stands",),
        "changes": ("changes", color[0], second[0]),
    }[kind]
    return clip


def _two_colors(random: Random, canvas: Canvas) -> list[tuple[str, tuple[int, int, int]]]:
    found: list[tuple[str, tuple[int, int, int]]] = []
    while len(found) < 2:
        name = random.choice(COLOR_NAMES)
        shade = canvas.shade(name)
        if shade is not None and all(name != other for other, _ in found):
            found.append((name, shade))
    return found
