"""The drawn world says the truth about its pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from training.vision.blocks import mark
from training.vision.conversations import DEFAULT_SYSTEM, Encoder
from training.vision.network import UNKNOWN, Auxiliary
from training.vision.palette import COLOR_NAMES, COLORS, named_ground
from training.vision.pictures import Figure, Picture
from training.vision.questions import MAKERS, ONLY, Ask, Turn, clearly_larger, description
from training.vision.scenes import crowded_picture, plain_picture
from training.vision.vocabulary import tokenizer
from training.vision.wordings import KEYS, varied

pytestmark = pytest.mark.slow
SIDE = 300


def figure(name: str, x: float, y: float, radius: float = 20) -> Figure:
    color, shape = name.split()
    return Figure(shape, color, "small", x, y, radius)


def picture(*figures: Figure) -> Picture:
    return Picture([np.zeros((SIDE, SIDE, 3), np.uint8)], SIDE, SIDE, list(figures))


CORNERS = picture(
    figure("red circle", 40, 40),
    figure("blue square", 260, 50),
    figure("green star", 50, 250),
    figure("black ring", 240, 260),
)


LARGE_AND_SMALL = picture(figure("red circle", 40, 40, 45), figure("blue star", 260, 150, 18))


def turns(maker: str, shown: Picture, *, held_out: bool = False, as_json: bool = False) -> Sequence[Turn]:
    made = [MAKERS[maker](Ask(Random(seed), [shown], held_out, as_json)) for seed in range(200)]
    return [turn for turn in made if turn is not None]


def test_what_is_in_a_part_of_a_picture() -> None:
    """In reading order, and of a half all that is in it."""
    answers = {turn.answer for turn in turns("at_place", CORNERS)}
    assert answers == {
        "I see a red circle and a green star at the left.",
        "I see a blue square and a black ring at the right.",
        "I see a red circle and a blue square at the top.",
        "I see a green star and a black ring at the bottom.",
        "I see a red circle at the top left.",
        "I see a blue square at the top right.",
        "I see a green star at the bottom left.",
        "I see a black ring at the bottom right.",
        "I see no shapes in the center.",
    }


def test_the_question_names_the_part_that_the_answer_is_about() -> None:
    names = {"top": {"top", "upper"}, "bottom": {"bottom", "lower"}, "left": {"left"}, "right": {"right"}}
    names["center"] = {"center", "middle"}
    for turn in turns("at_place", CORNERS):
        asked = set(re.findall("[a-z]+", turn.question.lower()))
        said = set(re.findall("[a-z]+", turn.answer))
        for place, words in names.items():
            assert bool(asked & words) == (place in said), turn


def test_a_shape_between_two_halves_is_in_neither() -> None:
    """Nobody should be asked what is on the left where one shape is in the middle."""
    shown = picture(figure("red circle", 148, 40), figure("blue square", 40, 160))
    answers = " ".join(turn.answer for turn in turns("at_place", shown))
    assert "at the left." not in answers and "at the right." not in answers


@pytest.mark.parametrize(
    ("slanted", "expected"),
    [
        (False, {"I see a red circle above the blue square.", "I see no shapes below the blue square."}),
        (True, {"I see a blue square below the red circle.", "I see a green star right of the red circle."}),
    ],
)
def test_what_is_beside_a_shape(slanted: bool, expected: set[str]) -> None:
    """Only where every other shape lies clearly on one side of it."""
    shown = picture(
        figure("red circle", 150, 40),
        figure("blue square", 150, 160),
        *([figure("green star", 270, 60)] if slanted else []),
    )
    answers = {turn.answer for turn in turns("beside", shown)}
    assert expected <= answers
    if slanted:
        assert not any("the blue square" in answer or "the star" in answer for answer in answers), answers


def test_colors_are_said_once_and_larger_shapes_by_a_clear_margin() -> None:
    shown = picture(figure("red circle", 60, 40, 40), figure("red star", 250, 45), figure("blue ring", 60, 250))
    assert {turn.answer for turn in turns("colors", shown)} == {"I see red and blue."}
    assert {turn.answer for turn in turns("shapes", shown)} == {"I see a red circle, a red star and a blue ring."}
    for turn in turns("larger_of", shown):
        assert ("circle" in turn.answer) == ("larger" in turn.answer), turn
    square, oval = figure("red square", 0, 0, 20), figure("red oval", 0, 0, 30)
    assert clearly_larger(figure("red circle", 0, 0, 30), square)
    assert not clearly_larger(oval, square)


def test_answers_in_json_keep_their_values_under_other_keys() -> None:
    facts = {"shapes": [{"shape": "ring", "color": "red"}, {"shape": "star", "color": "blue"}]}
    found = {json.dumps(varied(Random(seed), facts, "A sentence.")) for seed in range(2000)}
    assert json.dumps(facts) in found and len(found) > 20
    for text in found:
        told = json.loads(text)
        assert set(told) <= set(KEYS)
        for value in told.values():
            assert value in (2, "A sentence.") or [sorted(item.values()) for item in value] == [
                ["red", "ring"],
                ["blue", "star"],
            ]
    answers = {json.dumps(varied(Random(seed), {"answer": "no"}, "No.")) for seed in range(500)}
    assert '{"exists": false}' in answers and not any(": true" in text for text in answers)


def test_keys_that_only_a_schema_asks_for_are_not_learned(tmp_path: Path) -> None:
    """The values under them are, and so are keys that the question names."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer()), "utf-8")
    encoder = Encoder(tmp_path)

    def learned(turn: Turn) -> str:
        found = encoder.tokens([], [turn], DEFAULT_SYSTEM)
        return encoder.decode([int(label) for label in found.labels if label >= 0])

    seen = set()
    for turn in turns("largest", LARGE_AND_SMALL, as_json=True):
        told = json.loads(turn.answer)
        for key, value in told.items():
            assert (f'"{key}":' in learned(turn)) == (not turn.forced), turn
            assert value in learned(turn), turn
        if set(told) <= {"shape", "color"}:
            continue
        assert turn.forced == set(told)
        seen |= turn.forced
    assert {"colour", "form", "description"} <= seen


@pytest.mark.parametrize("held_out", [False, True])
def test_the_keys_of_an_answer_are_those_that_the_question_names(held_out: bool) -> None:
    found = turns("shape_in_keys", LARGE_AND_SMALL, held_out=held_out)
    assert len({frozenset(json.loads(turn.answer)) for turn in found}) > 10
    for turn in found:
        told = json.loads(turn.answer)
        after = re.split("(?:key|field)s? ", turn.question)[1]
        assert [word for word in re.findall(r"\w+", after) if word in told][: len(told)] == list(told), turn
        assert set(told.values()) <= {"circle", "red", "top left", "star", "blue", "right"}
        assert {"circle", "red", "top left"}.isdisjoint(told.values()) or {"star", "blue", "right"}.isdisjoint(
            told.values()
        )
        assert not turn.forced


def test_of_a_crowd_it_is_said_that_there_are_more_shapes_than_are_counted() -> None:
    shown = crowded_picture(Random(4))
    assert len(shown.figures) > 8
    for maker in ("describe", "count", "shapes"):
        assert {turn.answer for turn in turns(maker, shown)} == {"I see more than 6 shapes."}


def test_the_only_shape_need_not_be_named() -> None:
    alone = picture(figure("red circle", 150, 150, 120))
    assert {turn.answer for turn in turns("only_color", alone)} == {"The circle is red."}
    assert {turn.answer for turn in turns("only_shape", alone)} == {"It is a circle."}
    for turn in turns("is_shape", alone):
        assert turn.answer == ("Yes" if "circle" in turn.question else "No") + ", it is a circle.", turn
    for maker in ("only_color", "only_shape", "is_shape"):
        assert not turns(maker, CORNERS) and not turns(maker, picture())


def test_grounds_have_the_name_of_their_color() -> None:
    for seed in range(300):
        shade, name = named_ground(Random(seed))
        if name == "white":
            assert min(shade) >= 238
        elif name is not None:
            span = COLORS[name].value
            assert shade in COLORS[name].usual or span[0] - 0.01 <= max(shade) / 255 <= span[1] + 0.01, (name, shade)
    shown = replace(CORNERS, ground="yellow")
    assert {turn.answer for turn in turns("ground", shown)} == {"The background is yellow."}
    assert not turns("ground", CORNERS) and not turns("plain_color", shown)


def test_pictures_of_one_color() -> None:
    """Black and white ones are empty pictures, but have a color, too."""
    seen = set()
    for seed in range(60):
        shown = plain_picture(Random(seed))
        assert shown.ground is not None and not shown.figures
        seen.add(shown.ground)
        assert {turn.answer for turn in turns("plain_color", shown)} == {f"The picture is {shown.ground}."}
        assert description(shown) == f"I see a plain {shown.ground} picture."
    assert seen == set(COLOR_NAMES) - {"black", "white"}
    for name in ("black", "white", None):
        assert description(replace(picture(), ground=name)) == "I see an empty picture."


def test_pictures_of_nothing_known_teach_only_that() -> None:
    shown = replace(picture(), strange=True)
    for maker in ("describe", "not_known"):
        assert {turn.answer for turn in turns(maker, shown)} == {ONLY}
    cells = np.zeros((100, 9), np.uint8)
    mark(cells, shown, 10)
    assert (cells == UNKNOWN).all()
    assert not turns("not_known", CORNERS)
    heads = Auxiliary(8)
    vision = torch.randn(6, 8)
    known = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0, 0], [0] * 9] * 2)
    more = torch.cat((known, torch.full((2, 9), UNKNOWN)))
    for one, other in zip(heads(vision[:4], known, torch.ones(4)), heads(vision, more, torch.ones(6)), strict=True):
        torch.testing.assert_close(one, other)
