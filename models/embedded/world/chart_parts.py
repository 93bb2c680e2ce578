"""What all charts are made of: names, titles, colours and print."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from models.embedded.world.fonts import font
from models.embedded.world.palette import RGB, contrast
from models.embedded.world.pictures import Canvas
from models.embedded.world.words import CHART_LABELS, CHART_TITLES, SEEN_WORDS, UNSEEN_WORDS

Ink = tuple[str, RGB]
TITLE_SHARE = 0.35
_COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "gray")
_LEAST_TITLE = 15


@dataclass(frozen=True)
class Frame:
    """A part of the canvas, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        return self.right - self.left

    @property
    def height(self) -> float:
        return self.bottom - self.top


def width_of(face: str, size: int, text: str) -> float:
    return font(face, size).getlength(text)


def ink_of(canvas: Canvas) -> Ink:
    return ("black", (20, 20, 20)) if canvas.ground[0] > 128 else ("white", (240, 240, 240))


def labels_for(random: Random, held_out: bool, any_words: float) -> list[str]:
    """Up to twelve names of one kind (weekdays, cities), or with the probability `any_words` eight words of none."""
    if random.random() < any_words:
        words = [word for word in (UNSEEN_WORDS if held_out else SEEN_WORDS) if len(word) < 8]
        style = random.choice((str.capitalize, str.capitalize, str.lower, str.upper))
        return [style(word) for word in random.sample(words, 8)]
    labels = list(random.choice(CHART_LABELS))
    if random.random() < 0.5:
        random.shuffle(labels)
    return labels


def title_for(random: Random, held_out: bool) -> str:
    if random.random() < 0.4:
        return random.choice(CHART_TITLES)
    words = random.sample(UNSEEN_WORDS if held_out else SEEN_WORDS, random.randint(1, 2))
    return random.choice((" ".join(words).capitalize(), " ".join(word.capitalize() for word in words)))


def print_title(random: Random, canvas: Canvas, title: str, face: str, ink: Ink) -> tuple[float, str]:
    """Where the rest may begin, and the title as far as there was room for it."""
    size = random.randint(_LEAST_TITLE, 22)
    while size > _LEAST_TITLE and width_of(face, size, title) > canvas.width - 12:
        size -= 1
    if width_of(face, size, title) > canvas.width - 12:
        title = title.split()[0]
    if width_of(face, size, title) > canvas.width - 12:
        return 0.0, ""
    room = canvas.width - width_of(face, size, title)
    x = room / 2 if random.random() < 0.8 else min(room, 8.0)
    canvas.late_text(title, round(x), 4, face, size, *ink)
    return size + 10.0, title


def colors(random: Random, canvas: Canvas, number: int, *, alike: bool) -> list[RGB]:
    shades: list[RGB] = []
    names = random.sample(_COLORS, len(_COLORS))
    while names and len(shades) < number:
        shade = canvas.shade(names.pop())
        if shade is not None and contrast(shade, canvas.ground) > 85:
            shades.append(shade)
    return [shades[0]] * number if alike else shades
