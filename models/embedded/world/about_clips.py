"""Questions about short videos, and about two pictures at once."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from models.embedded.world.about_prints import read
from models.embedded.world.about_shapes import color, count, describe, shape
from models.embedded.world.pictures import Figure, Picture
from models.embedded.world.questions import ORDINALS, Turn, article, turn_of


def clip(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    motion = pictures[0].motion
    if motion is None:
        return None
    figure = pictures[0].figures[0]
    return turn_of(random, "clip", _motion_sentence(figure, motion, "A"), {}, held_out, False)


def _motion_sentence(figure: Figure, motion: tuple[str, ...], first: str) -> str:
    name = figure.name if first == "A" else figure.shape
    subject = article(name).capitalize() if first == "A" else f"The {name}"
    if motion[0] == "moves":
        return f"{subject} moves {_toward(motion[1])}."
    if motion[0] == "stands":
        return f"{subject} does not move."
    subject = article(figure.shape).capitalize() if first == "A" else f"The {figure.shape}"
    return f"{subject} changes from {motion[1]} to {motion[2]}."


def _toward(direction: str) -> str:
    return direction if direction in ("up", "down") else f"to the {direction}"


def direction(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    motion = pictures[0].motion
    if motion is None or motion[0] == "changes":
        return None
    figure = pictures[0].figures[0]
    facts = {"direction": motion[1] if motion[0] == "moves" else "none"}
    sentence = _motion_sentence(figure, motion, "The")
    return turn_of(random, "direction", sentence, facts, held_out, as_json, shape=figure.shape)


def moves_yn(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    motion = pictures[0].motion
    if motion is None or motion[0] == "changes" or (motion[0] == "moves" and random.random() < 0.6):
        return None
    figure = pictures[0].figures[0]
    turn = turn_of(random, "moves_yn", "", {}, held_out, False, shape=figure.shape)
    moves = motion[0] == "moves"
    right = moves != ("stand still" in turn.question)
    sentence = f"moves {_toward(motion[1])}" if moves else "does not move"
    return Turn("moves_yn", turn.question, f"{'Yes' if right else 'No'}, the {figure.shape} {sentence}.")


def change(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    motion = pictures[0].motion
    if motion is None or motion[0] != "changes":
        return None
    figure = pictures[0].figures[0]
    sentence = _motion_sentence(figure, motion, "The")
    return turn_of(random, "change", sentence, {}, held_out, False, shape=figure.shape)


def which_more(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    numbers = [len(picture.figures) for picture in pictures]
    if len(pictures) != 2 or numbers[0] == numbers[1]:
        return None
    nth = "first" if numbers[0] > numbers[1] else "second"
    answer = f"The {nth} picture has more shapes."
    return turn_of(random, "which_more", answer, {"picture": nth}, held_out, as_json)


def which_has(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    names = [{figure.name for figure in picture.figures} for picture in pictures]
    choices = [(name, nth) for nth in (0, 1) for name in sorted(names[nth] - names[1 - nth])]
    if len(pictures) != 2 or not choices:
        return None
    name, nth = random.choice(choices)
    answer = f"The {name} is in the {ORDINALS[nth]} picture."
    return turn_of(random, "which_has", answer, {"picture": ORDINALS[nth]}, held_out, as_json, article=article(name))


def in_nth(random: Random, pictures: Sequence[Picture], held_out: bool, as_json: bool) -> Turn | None:
    """A question about one of two pictures, which it names."""
    nth = random.randrange(2)
    makers = (color, shape, count, read, describe) if pictures[nth].figures else (read, count)
    turn = random.choice(makers)(random, [pictures[nth]], held_out, False)
    if turn is None or (turn.task.startswith("read") and not pictures[nth].lines):
        return None
    question = turn.question
    for word in ("this picture", "the picture", "this image", "the image"):
        if word in question:
            named = f"the {ORDINALS[nth]} {word.split()[1]}"
            return Turn("in_nth", question.replace(word, named, 1), turn.answer)
    named = f"n the {ORDINALS[nth]} {random.choice(('picture', 'image'))}"
    if random.random() < 0.3 and question[0].isalpha():
        return Turn("in_nth", f"I{named}, {question[0].lower()}{question[1:]}", turn.answer)
    ending = question[-1] if question[-1] in "?.!" else ""
    return Turn("in_nth", f"{question.removesuffix(ending)} i{named}{ending}", turn.answer)
