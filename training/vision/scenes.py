"""Pictures of shapes and of printed text, and short videos of one shape."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

from training.vision import pictures
from training.vision.fonts import SEEN_FONTS, font
from training.vision.pictures import (
    CELL,
    COLOR_NAMES,
    MAX_PIXELS,
    RGB,
    SHAPE_NAMES,
    SIZE_NAMES,
    SIZES,
    Canvas,
    Figure,
    Picture,
    canvas_size,
    finished,
    jpeg,
    look_of,
    named_ground,
)
from training.vision.words import SEEN_WORDS, UNSEEN_WORDS, made_up_word, number_text, random_string, short_text, styled

_TRIES = 40
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
VIDEO_MIN_PIXELS = 128 * CELL**2
"""Of a frame: what the processor asks of a checkpoint whose pictures have at most 256 blocks."""


def shapes_picture(random: Random, *, held_out: bool, most: int = 6, cells: tuple[int, int] = (64, 256)) -> Picture:
    """0 to `most` shapes of any kind; sometimes most of one kind, for counting; sometimes with a printed word."""
    size, (shade, name) = canvas_size(random, least_cells=cells[0], most_cells=cells[1]), named_ground(random)
    # Many programs draw edges that are not smooth.
    canvas = Canvas(random, *size, shade, ground_name=name, fine=random.random() < 0.75)
    number = random.choices(range(most + 1), (2, 16, *([10] * (most - 1))))[0]
    if random.random() < 0.3:
        _alike(random, canvas, number)
    else:
        huge = random.random() < (0.5 if number == 1 else 0.2)
        for index in range(number):
            shape, color = random.choice(SHAPE_NAMES), random.choice(COLOR_NAMES)
            _place(random, canvas, shape, color, None, huge=huge and index == 0)
    if canvas.figures and random.random() < 0.15:
        _caption(random, canvas, held_out)
    return canvas.finish()


def single_picture(random: Random) -> Picture:
    """One large shape as in the first picture that somebody draws: often a pure colour on white, near the middle."""
    size, (shade, name) = canvas_size(random, least_cells=random.choice((64, 120, 190))), named_ground(random)
    if random.random() < 0.4:
        wide, high = random.choices((200, 240, 256, 300, 320, 400, 448, 480, 512), k=2)
        size = wide, wide if random.random() < 0.6 else high
    if random.random() < 0.35:
        shade, name = (255, 255, 255), "white"
    canvas = Canvas(random, *size, shade, ground_name=name, fine=random.random() < 0.5)
    while not canvas.figures:
        shape, color = random.choice((*SHAPE_NAMES, "square", "square")), random.choice((*COLOR_NAMES, "black"))
        found = random.choice(pictures.COLORS[color].usual) if random.random() < 0.6 else canvas.shade(color)
        look = look_of(random, shape, shade)
        if found is None or pictures.contrast(found, shade) < 75:
            continue
        round_one = shape in ("circle", "ring")
        points = [(1.0, 1.0)] if round_one else pictures.outline(shape, 0.0, 0.0, 1.0, look)
        reach = [max(abs(point[axis]) for point in points) for axis in (0, 1)]
        radius = random.uniform(0.2, 0.47) * min(side / far for side, far in zip(size, reach, strict=True))
        free = [max(0.0, 0.99 * side - 2 * far * radius) for side, far in zip(size, reach, strict=True)]
        spread = random.choice((0.0, 0.12, 0.12, 1.0))
        x, y = (side / 2 + spread * random.uniform(-room / 2, room / 2) for side, room in zip(size, free, strict=True))
        if radius < SIZES["large"][0] * min(size) or near_a_third(x / size[0]) or near_a_third(y / size[1]):
            continue
        canvas.figure(Figure(shape, color, "large", x, y, radius), (found[0], found[1], found[2]), look)
    return canvas.finish()


def overlapping_picture(random: Random) -> Picture:
    """Two to four shapes of different colours, some of which cover a part of others; the smaller lie above."""
    size, (shade, name) = canvas_size(random), named_ground(random)
    canvas = Canvas(random, *size, shade, ground_name=name)
    colors = [(name, found) for name in random.sample(COLOR_NAMES, 8) if (found := canvas.shade(name))][:4]
    placed: list[Figure] = []
    for color, _ in colors[: random.choice((2, 2, 3, 4))]:
        chosen = random.choice(("medium", "large", "large"))
        radius = random.uniform(*SIZES[chosen]) * min(size)
        radius *= 1.2 if chosen == "large" and random.random() < 0.3 else 1.0
        for _ in range(_TRIES):
            x, y = (random.uniform(1.2 * radius, side - 1.2 * radius) for side in size)
            reach = [math.hypot(x - f.x, y - f.y) / (radius + f.radius) for f in placed]
            if near_a_third(x / size[0]) or near_a_third(y / size[1]) or any(0.75 < r < 1.2 or r < 0.5 for r in reach):
                continue
            if not placed or min(reach) < 1 or random.random() < 0.1:
                placed.append(Figure(random.choice(SHAPE_NAMES), color, chosen, x, y, radius))
                break
    for figure in sorted(placed, key=lambda figure: -figure.radius):
        canvas.figure(figure, dict(colors)[figure.color], look_of(random, figure.shape, canvas.ground))
    return canvas.finish()


def arranged_picture(random: Random) -> Picture:
    """Two to six shapes of one size, evenly spaced in a row, a column or two rows, often alike, some only outlines."""
    size, (shade, name) = canvas_size(random), named_ground(random)
    canvas, number = Canvas(random, *size, shade, ground_name=name), random.randint(2, 6)
    rows = random.choice((1, 1, number, 2 if number % 2 == 0 else 1))
    alike, thin = random.choice(("shape", "color", "both", "none")), random.choice((0.0, 0.0, 0.0, 0.06, 0.12))
    shapes, colors = random.choices(SHAPE_NAMES, k=number), random.choices(COLOR_NAMES, k=number)
    wide, high = size[0] / (number // rows), size[1] / rows
    radius = max(10.0, min(wide, high) * random.uniform(0.2, 0.4))
    for nth in range(number):
        shape, color = shapes[nth * (alike not in ("shape", "both"))], colors[nth * (alike not in ("color", "both"))]
        x, y = (nth % (number // rows) + 0.5) * wide, (nth // (number // rows) + 0.5) * high
        if (found := canvas.shade(color)) is not None:
            look = look_of(random, shape, canvas.ground)
            look = replace(look, hollow=thin) if thin and shape != "circle" else look
            canvas.figure(Figure(shape, color, "medium", x, y, radius), found, look)
    return canvas.finish()


def plain_picture(random: Random) -> Picture:
    """Nothing but one colour. Black and white ones are empty pictures, which `shapes_picture` has among others."""
    name = random.choice([name for name in COLOR_NAMES if name not in ("black", "white")])
    return Canvas(random, *canvas_size(random), pictures.COLORS[name].draw(random), ground_name=name).finish()


def crowded_picture(random: Random) -> Picture:
    """9 to 24 small shapes: more than are counted."""
    while True:
        canvas = Canvas(random, *canvas_size(random))
        color, shape = random.choice(COLOR_NAMES), random.choice(SHAPE_NAMES)
        alike = random.choices(("nothing", "color", "shape"), (0.6, 0.2, 0.2))[0]
        for _ in range(random.randint(9, 24)):
            own = shape if alike == "shape" else random.choice(SHAPE_NAMES)
            _place(random, canvas, own, color if alike == "color" else random.choice(COLOR_NAMES), "small")
        if len(canvas.figures) >= 9:
            return canvas.finish()


def text_picture(random: Random, *, held_out: bool, style: str | None = None, face: str | None = None) -> Picture:
    """1 to 3 lines of words, strings or numbers. style "word" or "string": one line of that, 16 px or more."""
    width, height = canvas_size(random)
    ground, name = (None, None) if style or random.random() < 0.4 else named_ground(random)
    canvas, huge = Canvas(random, width, height, ground, ground_name=name, fine=False), random.random() < 0.1
    ink, shade = canvas.ink()
    number = 1 if style or huge else random.choices((1, 2, 3), (5, 3, 2))[0]
    face = face or random.choice(SEEN_FONTS)
    top = 0.0
    for index in range(number):
        room = (height - top) / (number - index)
        text = short_text(random)[:1] if huge and not style else line_text(random, held_out, style)
        least = 16 if style else 13
        size = _fitting(random, face, text, width - 8, 0.87 * room if huge else room - 4, least, len(text) == 1)
        left, up, right, bottom = font(face, size).getbbox(text)
        x = random.uniform(4, max(4.0, width - 4 - (right - left))) - left
        y = top + random.uniform(2, max(2.0, room - 2 - (bottom - up))) - up
        line = canvas.text(text, round(x), round(y), face, size, ink, shade, line=True)
        top = max(line.box[3] + 2, top + room * 0.4)
    return canvas.finish()


def line_text(random: Random, held_out: bool, style: str | None) -> str:
    words = UNSEEN_WORDS if held_out else SEEN_WORDS
    if style == "word":
        return styled(random, random.choice(words))
    if style == "string":
        return random_string(random)
    kind = random.random()
    if kind < 0.05:
        return short_text(random)
    if kind < 0.25:
        return styled(random, random.choice(words))
    if kind < 0.68:
        return random_string(random)
    if kind < 0.78:
        return number_text(random)
    if kind < 0.87:
        return styled(random, made_up_word(random))
    style_of = random.choice((str.upper, str.lower, str.capitalize))
    return " ".join(style_of(random.choice(words)) for _ in range(2))


def _fitting(random: Random, face: str, text: str, width: float, height: float, least: int, big: bool) -> int:
    """A size in pixels at which the text has room. big: it may fill the room."""
    probe = font(face, 32)
    left, top, right, bottom = probe.getbbox(text)
    most = min(32 * width / max(1, right - left), 32 * height / max(1, bottom - top), 900 if big else 110)
    least = max(least, int(0.3 * most)) if big else least
    return math.floor(math.exp(random.uniform(math.log(least), math.log(most))))


def _alike(random: Random, canvas: Canvas, number: int) -> None:
    """`number` shapes of one kind or one colour and a few others."""
    shape, color = random.choice(SHAPE_NAMES), random.choice(COLOR_NAMES)
    size = random.choice(("small", "small", "medium"))
    same = random.choice(("shape", "color", "both"))
    for _ in range(number):
        other = random.random() < 0.25
        own = random.choice(SHAPE_NAMES) if same == "color" or other else shape
        _place(random, canvas, own, random.choice(COLOR_NAMES) if same == "shape" or other else color, size)


def _place(random: Random, canvas: Canvas, shape: str, color: str, size: str | None, *, huge: bool = False) -> None:
    """Draws a shape where there is room, or nothing. huge: it fills much of the picture."""
    shade = canvas.shade(color)
    if shade is None:
        return
    side = min(canvas.width, canvas.height)
    sizes = SIZE_NAMES if len(canvas.figures) < 3 else ("small", "medium")
    for _ in range(_TRIES):
        chosen = "large" if huge else size or random.choice(sizes)
        radius = max(random.uniform(*(pictures.HUGE if huge else SIZES[chosen])) * side, 11.0)
        reach = min(radius * 1.2, side / 2)
        x = random.uniform(reach, canvas.width - reach)
        y = random.uniform(reach, canvas.height - reach)
        if near_a_third(x / canvas.width) or near_a_third(y / canvas.height):
            continue
        apart = 0.92 if random.random() < 0.1 else 1.2
        if all(math.hypot(x - f.x, y - f.y) > max(apart * (radius + f.radius), 30) for f in canvas.figures):
            canvas.figure(Figure(shape, color, chosen, x, y, radius), shade, look_of(random, shape, canvas.ground))
            return


def near_a_third(part: float) -> bool:
    """Whether one might argue in which third of the picture something is."""
    return min(abs(part - 1 / 3), abs(part - 2 / 3)) < 0.025


def _caption(random: Random, canvas: Canvas, held_out: bool) -> None:
    """A word or string where no shape is, or nothing."""
    ink, shade = canvas.ink()
    face = random.choice(SEEN_FONTS)
    text = line_text(random, held_out, random.choice(("word", "string")))
    for _ in range(12):
        size = random.randint(16, 28)
        left, top, right, bottom = font(face, size).getbbox(text)
        if right - left > canvas.width - 8:
            continue
        x = random.uniform(4, canvas.width - 4 - (right - left)) - left
        y = random.uniform(4, canvas.height - 4 - (bottom - top)) - top
        near = [(min(max(f.x, x + left), x + right), min(max(f.y, y + top), y + bottom)) for f in canvas.figures]
        pairs = zip(canvas.figures, near, strict=True)
        if all(math.hypot(f.x - a, f.y - b) >= f.radius * 1.2 + 3 for f, (a, b) in pairs):
            canvas.text(text, round(x), round(y), face, size, ink, shade, line=True)
            return


def video_clip(random: Random) -> Picture:
    """One shape that moves, stands still or changes its colour, 3 to 20 frames.

    motion: ("moves", direction), ("stands",) or ("changes", first color, second color).
    """
    if random.random() < 0.85:
        width = random.randint(9, 15) * CELL
        height = max(8, -(-128 * CELL // width)) * CELL
    else:
        width, height = random.randint(180, 320), random.randint(180, 320)
    canvas = Canvas(random, width, height)
    number = random.choice((3, 4, 4, 4, 4, 6, 6, 8, 8, 10, 12, 16, 20))
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
    color, second = _two_colors(random, canvas)
    figure = Figure(random.choice(SHAPE_NAMES), color[0], "medium", x, y, radius)
    look = look_of(random, figure.shape, canvas.ground)
    images, ground = [], canvas.image
    for index in range(number):
        part = index / (number - 1)
        canvas.begin(ground.copy())
        moved = replace(figure, x=x + across * length * part * room_x, y=y + down * length * part * room_y)
        shade = second[1] if kind == "changes" and part >= 0.5 else color[1]
        canvas.figure(moved, shade, look)
        canvas.settle()
        images.append(canvas.image)
    end = replace(canvas.figures[0], color=second[0] if kind == "changes" else color[0])
    if random.random() < 0.4:
        # What codecs do to frames.
        quality = random.randint(40, 95)
        images = [jpeg(image, quality) for image in images]
    clip = finished(canvas, images, (VIDEO_MIN_PIXELS, MAX_PIXELS))
    clip.figures, clip.places, clip.end = [replace(figure, hollow=look.hollow)], [], end
    clip.motion = (kind, *{"moves": (direction,), "stands": (), "changes": (color[0], second[0])}[kind])
    return clip


def _two_colors(random: Random, canvas: Canvas) -> list[tuple[str, RGB]]:
    found: list[tuple[str, RGB]] = []
    while len(found) < 2:
        name = random.choice(COLOR_NAMES)
        shade = canvas.shade(name)
        if shade is not None and all(name != other for other, _ in found):
            found.append((name, shade))
    return found
