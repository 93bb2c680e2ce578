"""Questions that no picture answers: who the model is, and what it does not know."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from models.embedded.world import wordings
from models.embedded.world.palette import COLOR_NAMES, SHAPE_NAMES, plural
from models.embedded.world.pictures import Picture
from models.embedded.world.questions import Maker, Turn, article, turn_of
from models.embedded.world.words import PLACES, SEEN_THINGS, UNSEEN_THINGS

NAME = "Reprise"
KNOWN = "simple shapes, colors, counts, charts, short printed text and simple motion"
ONLY = f"I only know {KNOWN}."
NO_PICTURE = "I see no picture. Please send one."
WHO = f"I am the small demonstration model of {NAME}. I only know {KNOWN}."
SKILLS = f"I can answer questions about {KNOWN}."
HELLO = "Hello! Please send a picture and ask me about it."
WELCOME = "You are welcome."


def thing(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    """Asked for what this world does not hold."""
    noun = random.choice(UNSEEN_THINGS if held_out else SEEN_THINGS)
    slots = {"noun": noun, "nouns": noun + "s", "article": article(noun)}
    return turn_of(random, "thing", ONLY, {}, held_out, False, **slots)


def knowledge(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    noun = random.choice(UNSEEN_THINGS if held_out else SEEN_THINGS)
    slots = {
        "noun": noun,
        "article": article(noun),
        "place": random.choice(PLACES),
        "digit": str(random.randint(0, 99)),
    }
    return turn_of(random, "knowledge", ONLY, {}, held_out, False, **slots)


def _small_talk(task: str, answer: str) -> Maker:
    def maker(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
        return turn_of(random, task, answer, {}, held_out, False)

    return maker


who, skills = _small_talk("who", WHO), _small_talk("skills", SKILLS)
hello, thanks = _small_talk("hello", HELLO), _small_talk("thanks", WELCOME)


_SEEING = (
    *("color", "shape", "count", "where", "relation", "exists", "largest", "describe", "read"),
    *("only_color", "only_shape", "is_shape", "ground"),
)


def no_picture(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    """A question of seeing where nothing is to be seen."""
    return Turn("no_picture", _of_seeing(random, random.choice(_SEEING), held_out), NO_PICTURE)


def not_known(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    """A question of seeing about a picture of what this world does not hold."""
    if not pictures[0].strange:
        return None
    task = random.choice((*_SEEING, "list", "colors", "chart_title", "chart_kind", "describe_chart"))
    return Turn("not_known", _of_seeing(random, task, held_out), ONLY)


def _of_seeing(random: Random, task: str, held_out: bool) -> str:
    """A question about shapes that no picture needs to have."""
    shapes, colors = random.sample(SHAPE_NAMES, 2), random.sample(COLOR_NAMES, 2)
    slots: dict[str, str] = {
        "shape": shapes[0],
        "color": colors[0],
        "things": random.choice(("shapes", plural(shapes[0]), f"{colors[0]} {plural(shapes[0])}")),
        "thing": random.choice((shapes[0], f"{colors[0]} {shapes[0]}")),
        "other": f"{colors[1]} {shapes[1]}",
        "article": article(f"{colors[0]} {shapes[0]}"),
        "most": random.choice(("largest", "smallest", "biggest")),
    }
    return wordings.ask(random, task, held_out=held_out, json=False, keys=(), **slots)
