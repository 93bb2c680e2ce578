"""The drawn world says the truth about its pictures."""

from __future__ import annotations

import json
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
from training.vision.pictures import Figure, Picture
from training.vision.questions import MAKERS, ONLY, Ask, Turn
from training.vision.vocabulary import tokenizer

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
