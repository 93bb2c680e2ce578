"""What training draws at each level, and the held-out sets that its progress is measured on."""

from __future__ import annotations

from random import Random

from models.embedded.world import about_prints
from models.embedded.world.conversations import DEFAULT_SYSTEM, SHARES, Example, make_example, turns
from models.embedded.world.fonts import SEEN_FONTS, UNSEEN_FONTS
from models.embedded.world.questions import Turn
from models.embedded.world.scenes import shapes_picture, text_picture


def draw(random: Random, level: int) -> Example:
    """Level 0: one to three shapes or one printed line, one or two short questions. Level 1: everything."""
    if level > 0:
        return make_example(random, shares=SHARES)
    while True:
        if random.random() < 0.55:
            pictures, kind = [shapes_picture(random, held_out=False, most=3, cells=(64, 90))], "shapes"
        else:
            style = random.choice(("word", "string"))
            pictures, kind = [text_picture(random, held_out=False, style=style)], "text"
        made = [turns(random, kind, pictures, False) for _ in range(3)]
        if all(made):
            return Example(pictures, made, [DEFAULT_SYSTEM] * len(made))


def measured(random: Random, number: int) -> list[Example]:
    """`number` held-out examples of every kind of conversation, and of words and strings in seen and unseen fonts."""
    examples = [make_example(random, held_out=True, conversations=1) for _ in range(3 * number)]
    examples += [printed(random, style, fonts, name) for style, fonts, name in PRINTED for _ in range(number)]
    return examples


PRINTED = (
    ("word", SEEN_FONTS, "word"),
    ("word", UNSEEN_FONTS, "word_unseen_font"),
    ("string", SEEN_FONTS, "string"),
    ("string", UNSEEN_FONTS, "string_unseen_font"),
)


def printed(random: Random, style: str, fonts: tuple[str, ...], name: str) -> Example:
    """One line of 16 px or more, and the question what it says."""
    while True:
        picture = text_picture(random, held_out=True, style=style, face=random.choice(fonts))
        turn = about_prints.read(random, [picture], True, False) if picture.lines else None
        if turn is not None:
            return Example([picture], [[Turn(name, turn.question, turn.answer)]], [DEFAULT_SYSTEM])
