"""Pictures with the conversations about them, as token ids: what training and the gates are fed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from models.embedded.world import about_clips, about_keys, about_prints, about_scenes, about_shapes, small_talk
from models.embedded.world.charts import chart_picture
from models.embedded.world.clips import video_clip
from models.embedded.world.followups import follow_up
from models.embedded.world.pictures import CELL, Picture
from models.embedded.world.questions import Maker, Turn
from models.embedded.world.scenes import crowded_picture, plain_picture, shapes_picture, text_picture
from models.embedded.world.strange import strange_picture
from models.qwen2_vl.positions import mrope_positions

DEFAULT_SYSTEM = "You are a helpful assistant."
SYSTEMS = (
    *("You see pictures.", "Answer briefly.", "You are a model that sees.", "Answer in one sentence.", "Be helpful."),
    *("Describe what you see.", "You answer questions about pictures.", "Be brief and exact."),
)
_PATCH = 14
_KEY = re.compile(r'"(\w+)":')
_JSON_SHARE = 0.14
_MOST_TURNS = {
    "shapes": 4,
    "text": 2,
    "chart": 3,
    "video": 3,
    "two": 2,
    "strange": 2,
    "crowd": 2,
    "plain": 3,
    "none": 2,
}
"""Few where an answer gives the next one away: what is copied teaches no seeing."""


@dataclass(frozen=True)
class Kind:
    """One kind of picture: how it is drawn and, with their weights, what is asked about it."""

    draw: Callable[[Random, bool], list[Picture]]
    makers: Mapping[Maker, float]


def _two(random: Random, held_out: bool) -> list[Picture]:
    def one() -> Picture:
        if random.random() < 0.12:
            return text_picture(random, held_out=held_out, style=random.choice(("word", "string")))
        return shapes_picture(random, held_out=held_out, most=4, cells=(64, 90))

    return [one(), one()]


_ABOUT_SHAPES: dict[Maker, float] = {
    about_shapes.color: 1.2,
    about_shapes.shape: 1.2,
    about_shapes.only_color: 1.6,
    about_shapes.only_shape: 1.6,
    about_shapes.is_shape: 1.2,
    about_shapes.ground: 0.8,
    about_shapes.is_color: 0.6,
    about_shapes.count: 2.0,
    about_shapes.where: 1.2,
    about_shapes.relation: 1.6,
    about_shapes.relation_yn: 1.0,
    about_shapes.exists: 1.2,
    about_shapes.largest: 1.6,
    about_shapes.compare_yn: 1.0,
    about_shapes.more_yn: 0.8,
    about_scenes.shapes: 1.2,
    about_scenes.colors: 1.6,
    about_scenes.at_place: 2.4,
    about_scenes.color_at: 2.0,
    about_scenes.larger_of: 1.2,
    about_scenes.beside: 2.2,
    about_keys.shape_in_keys: 1.0,
    about_shapes.describe: 2.2,
    about_prints.read: 0.5,
    small_talk.thing: 1.2,
    small_talk.knowledge: 0.2,
    small_talk.who: 0.1,
    small_talk.skills: 0.1,
    small_talk.hello: 0.1,
    small_talk.thanks: 0.1,
}
_ABOUT_CHARTS: dict[Maker, float] = {
    about_prints.chart_most: 2.5,
    about_prints.chart_value: 3.5,
    about_prints.chart_kind: 0.5,
    about_prints.chart_bars: 1.0,
    about_prints.chart_title: 1.0,
    about_keys.bar_in_keys: 0.5,
    about_prints.chart_labels: 0.7,
    about_shapes.describe: 1.5,
    small_talk.thing: 0.3,
}
KINDS: dict[str, Kind] = {
    "shapes": Kind(lambda random, held_out: [shapes_picture(random, held_out=held_out)], _ABOUT_SHAPES),
    "text": Kind(
        lambda random, held_out: [text_picture(random, held_out=held_out)],
        {
            about_prints.read: 6.0,
            about_prints.read_line: 3.5,
            about_prints.lines_of_text: 0.6,
            about_prints.ink: 0.7,
            about_shapes.describe: 1.0,
            small_talk.thing: 0.4,
            about_shapes.count: 0.2,
        },
    ),
    "chart": Kind(lambda random, held_out: [chart_picture(random, held_out=held_out)], _ABOUT_CHARTS),
    "video": Kind(
        lambda random, held_out: [video_clip(random)],
        {
            about_clips.clip: 2.0,
            about_clips.direction: 2.5,
            about_clips.moves_yn: 1.2,
            about_clips.change: 2.5,
            about_shapes.color: 0.5,
            about_shapes.shape: 0.5,
            small_talk.thing: 0.3,
        },
    ),
    "two": Kind(
        _two, {about_clips.which_more: 2.0, about_clips.which_has: 2.0, about_clips.in_nth: 4.0, small_talk.thing: 0.3}
    ),
    "strange": Kind(
        lambda random, held_out: [strange_picture(random)],
        {about_shapes.describe: 3.0, small_talk.not_known: 2.0, small_talk.thing: 1.0},
    ),
    "crowd": Kind(
        lambda random, held_out: [crowded_picture(random)],
        {about_shapes.describe: 1.0, about_scenes.shapes: 1.0, about_shapes.count: 1.0, small_talk.thing: 0.3},
    ),
    "plain": Kind(
        lambda random, held_out: [plain_picture(random)],
        {
            about_shapes.describe: 2.0,
            about_shapes.plain_color: 3.0,
            about_shapes.ground: 0.5,
            about_shapes.count: 0.7,
            about_shapes.exists: 0.5,
            about_scenes.shapes: 0.5,
            small_talk.thing: 0.3,
        },
    ),
    "none": Kind(
        lambda random, held_out: [],
        {
            small_talk.who: 1.0,
            small_talk.skills: 1.0,
            small_talk.hello: 1.0,
            small_talk.thanks: 0.6,
            small_talk.knowledge: 1.5,
            small_talk.no_picture: 2.0,
            small_talk.thing: 0.3,
        },
    ),
}
MEASURED_KINDS: dict[str, Kind] = {
    **KINDS,
    "chart": Kind(lambda random, held_out: [chart_picture(random, held_out=held_out, any_words=0)], _ABOUT_CHARTS),
    "chart_of_words": Kind(
        lambda random, held_out: [chart_picture(random, held_out=held_out, any_words=1)], _ABOUT_CHARTS
    ),
}
"""For the gates: charts with names of a kind and with any words are measured apart, since the latter have to be read
letter by letter."""
SHARES = {
    "shapes": 0.3,
    "text": 0.275,
    "chart": 0.265,
    "video": 0.03,
    "two": 0.05,
    "strange": 0.03,
    "crowd": 0.01,
    "plain": 0.01,
    "none": 0.03,
}


@dataclass(frozen=True)
class Example:
    """pictures, and conversations about them, each a list of turns."""

    pictures: list[Picture]
    conversations: list[list[Turn]]
    systems: list[str]


def make_example(
    random: Random, *, shares: Mapping[str, float] = SHARES, conversations: int = 2, held_out: bool = False
) -> Example:
    """A picture of a kind drawn by its share, with conversations of 1 to 5 turns."""
    while True:
        kind = random.choices(tuple(shares), tuple(shares.values()))[0]
        pictures = KINDS[kind].draw(random, held_out)
        made = [turns(random, kind, pictures, held_out) for _ in range(conversations)]
        if all(made):
            systems = [DEFAULT_SYSTEM if random.random() < 0.75 else random.choice(SYSTEMS) for _ in made]
            return Example(pictures, made, systems)


def turns(random: Random, kind: str, pictures: Sequence[Picture], held_out: bool) -> list[Turn]:
    makers = KINDS[kind].makers
    wanted = random.randint(1, _MOST_TURNS[kind])
    found: list[Turn] = []
    for _ in range(3 * wanted):
        if len(found) == wanted:
            break
        turn = None
        if found and random.random() < 0.35:
            turn = follow_up(random, pictures[0], found[-1], held_out) if len(pictures) == 1 else None
        if turn is None:
            maker = random.choices(tuple(makers), tuple(makers.values()))[0]
            turn = maker(random, pictures, held_out, random.random() < _JSON_SHARE)
        if turn is not None and all(turn.question != other.question for other in found):
            found.append(turn)
    return found


@dataclass(frozen=True)
class Tokens:
    """A conversation in ids. ids int32 [n]; vision int32 [n]: which row of the pictures' embeddings, or -1; labels
    int32 [n]: the id to be said after each position, or -1, also where a key is forced; turns int32 [n]: index of the
    turn that a label is of; positions int32 [3, n]."""

    ids: np.ndarray
    vision: np.ndarray
    labels: np.ndarray
    turns: np.ndarray
    positions: np.ndarray


class Encoder:
    """Conversations to ids, as the chat template of the checkpoint writes them."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        special = self._special
        self.start, self.end = special("<|im_start|>"), special("<|im_end|>")
        self.vision_start, self.vision_end = special("<|vision_start|>"), special("<|vision_end|>")
        self.image, self.video = special("<|image_pad|>"), special("<|video_pad|>")
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.encode = lru_cache(maxsize=65536)(self._encode)

    def _special(self, name: str) -> int:
        token = self._tokenizer.token_to_id(name)
        if token is None:
            raise ValueError(f"tokenizer.json has no token {name}")
        return int(token)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _forced(self, turn: Turn) -> list[int]:
        """Which tokens of the answer say a key that is forced."""
        if not turn.forced:
            return []
        spans = [match.span(1) for match in _KEY.finditer(turn.answer) if match[1] in turn.forced]
        offsets = self._tokenizer.encode(turn.answer, add_special_tokens=False).offsets
        return [
            index
            for index, (start, end) in enumerate(offsets)
            if any(start < last and first < end for first, last in spans)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))

    def tokens(self, pictures: Sequence[Picture], turns: Sequence[Turn], system: str) -> Tokens:
        """The pictures come before the first question."""
        ids: list[int] = [self.start, *self.encode("system\n" + system), self.end, *self.encode("\n")]
        runs: list[tuple[int, tuple[int, int, int]]] = []
        vision: list[tuple[int, int]] = []
        labels: list[tuple[int, int, int]] = []
        forced: list[int] = []
        rows = 0
        for index, turn in enumerate(turns):
            ids += [self.start, *self.encode("user\n")]
            for picture in pictures if index == 0 else ():
                grid = grid_of(picture)
                number = grid[0] * grid[1] * grid[2] // 4
                ids.append(self.vision_start)
                runs.append((len(ids), grid))
                vision.append((len(ids), rows))
                ids += [self.video if picture.motion else self.image] * number
                ids.append(self.vision_end)
                rows += number
            ids += [*self.encode(turn.question), self.end, *self.encode("\n"), self.start, *self.encode("assistant\n")]
            first = len(ids)
            ids += [*self.encode(turn.answer), self.end]
            labels.append((first, len(ids), index))
            forced += [first + nth for nth in self._forced(turn)]
            ids += self.encode("\n")
        number = len(ids)
        rows_of, said, turn_of = (np.full(number, -1, np.int32) for _ in range(3))
        for (start, row), (_, grid) in zip(vision, runs, strict=True):
            length = grid[0] * grid[1] * grid[2] // 4
            rows_of[start : start + length] = np.arange(row, row + length)
        whole = np.array(ids, np.int32)
        for first, last, index in labels:
            said[first - 1 : last - 1] = whole[first:last]
            turn_of[first - 1 : last - 1] = index
        said[[position - 1 for position in forced]] = -1
        positions, _ = mrope_positions(number, runs, merge_size=2)
        return Tokens(whole, rows_of, said, turn_of, positions)


def grid_of(picture: Picture) -> tuple[int, int, int]:
    """Frame pairs, rows and columns of patches."""
    height, width, _ = picture.frames[0].shape
    return -(-len(picture.frames) // 2), height // _PATCH, width // _PATCH


def patches_of(picture: Picture) -> np.ndarray:
    """uint8 [frames, rows * columns, 588]: patches of each frame in block order, columns (channel, y, x)."""
    frames = np.stack(picture.frames)
    number, height, width, _ = frames.shape
    cut = frames.reshape(number, height // CELL, 2, _PATCH, width // CELL, 2, _PATCH, 3)
    return cut.transpose(0, 1, 4, 2, 5, 7, 3, 6).reshape(number, height * width // _PATCH**2, 3 * _PATCH**2)
