"""Pictures with the conversations about them, as token ids: what training and the gates are fed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from models.qwen_vl.positions import mrope_positions
from models.text.tools import hermes_turns
from training.vision import scenes
from training.vision.charts import chart_picture
from training.vision.drawings import strange_clip, strange_picture
from training.vision.network import PUBLISHED
from training.vision.pictures import CELL, Picture
from training.vision.questions import MAKERS, Ask, Turn, follow_up

DEFAULT_SYSTEM = "You are a helpful assistant."
PICTURES, QUESTION = "\0", "\1"
"""What stands for the pictures, at the begin of a message, and for the first question."""
_PATCH = 14
_SHORT = 768
"""Embeddings of pictures at most where more than the questions about them is said, so that all fits a sequence."""
_KEY = re.compile(r'"(\w+)":')
_THEY = re.compile(r"\b(they|them|their|these|those)\b", re.IGNORECASE)
_OF_ALL = ("describe", "list", "colors", "number_of_colors", "same_color", "same_shape", "all_yn")
"""Tasks after which "they" are all shapes."""
_OUTSIDE = json.loads((Path(__file__).parent / "outside.json").read_text(encoding="utf-8"))["known"].items()
_KEPT = {asks[0].lower().rstrip("?.! ") for name, scene in _OUTSIDE if "asked" in name for asks in scene["asks"]}
"""Questions of a stranger, which measure and do not teach."""
_JSON_SHARE = 0.14
DATA = json.loads((Path(__file__).parent / "questions.json").read_text(encoding="utf-8"))
"""By kind of picture its share, the makers of its questions with their weights, and most turns, few where an answer
gives the next one away: what is copied teaches no seeing; gates by name: kind, maker, least share of right answers."""


def _two(random: Random, held_out: bool) -> list[Picture]:
    def one() -> Picture:
        if random.random() < 0.12:
            return scenes.text_picture(random, held_out=held_out, style=random.choice(("word", "string")))
        return scenes.shapes_picture(random, held_out=held_out, most=4, cells=(64, 90))

    first = one()
    return [first, first if random.random() < 0.08 else one()]


DRAW: dict[str, Callable[[Random, bool], list[Picture]]] = {
    "shapes": lambda random, held_out: [scenes.shapes_picture(random, held_out=held_out)],
    "text": lambda random, held_out: [scenes.text_picture(random, held_out=held_out)],
    "chart": lambda random, held_out: [chart_picture(random, held_out=held_out)],
    "video": lambda random, held_out: [scenes.video_clip(random)],
    "single": lambda random, held_out: [scenes.single_picture(random)],
    "two": _two,
    "strange": lambda random, held_out: [strange_picture(random)],
    "strange clip": lambda random, held_out: [strange_clip(random)],
    "overlap": lambda random, held_out: [scenes.overlapping_picture(random)],
    "arranged": lambda random, held_out: [scenes.arranged_picture(random)],
    "crowd": lambda random, held_out: [scenes.crowded_picture(random)],
    "plain": lambda random, held_out: [scenes.plain_picture(random)],
    "none": lambda random, held_out: [],
}
"""By kind of picture."""


Opening = tuple[tuple[str, str], ...]
"""Role and text of every message up to the first answer."""


def opening(system: str, *before: tuple[str, str]) -> Opening:
    """The pictures come with the first question."""
    return (("system", system), *before, ("user", PICTURES + QUESTION))


ASKED = opening(DEFAULT_SYSTEM)


@dataclass(frozen=True)
class Example:
    """pictures, and conversations about them, each a list of turns after an opening."""

    pictures: list[Picture]
    conversations: list[list[Turn]]
    openings: list[Opening]


def make_example(random: Random) -> Example:
    """A picture of a kind drawn by its share, with two conversations of 1 to 5 turns, sometimes another one after
    them."""
    while True:
        kind = _weighted(random, DATA["shares"])
        pictures = DRAW[kind](random, False)
        made = [turns(random, kind, pictures) for _ in range(2)]
        short = bool(pictures) and sum(map(embeddings, pictures)) <= _SHORT
        if kind in _IN_TURN and short and random.random() < 0.06:
            kind = random.choice(_IN_TURN)
            second = DRAW[kind](random, False)
            after = [turns(random, kind, second)[:2] for _ in made]
            if not all(after):
                continue
            made = [[*a[:2], replace(b[0], shows=1), *b[1:]] for a, b in zip(made, after, strict=True) if a]
            pictures += second
        if len(made) == 2 and all(made):
            return Example(pictures, made, [_opening(random, short) for _ in made])


_IN_TURN = ("shapes", "text", "chart", "single", "overlap", "arranged", "plain", "strange")
"""Kinds of one picture, of which one may come after the other."""


def _opening(random: Random, short: bool) -> Opening:
    """Sometimes there is a talk before, or a tool's result has the pictures."""
    system = DEFAULT_SYSTEM if random.random() < 0.75 else random.choice(DATA["systems"])
    kind = random.random() if short else 1.0
    if kind < 0.09:
        return opening(system, *_talk(random))
    return _of_tool(random, system) if kind < 0.2 else opening(system)


def _talk(random: Random) -> list[tuple[str, str]]:
    """One or two questions without a picture, with their answers."""
    said = [(turn.question, turn.answer) for turn in turns(random, "none", [])]
    said = said if random.random() < 0.7 else random.sample(DATA["talk"], random.choice((1, 2)))
    return [message for asked, answer in said for message in (("user", asked), ("assistant", answer))]


def _of_tool(random: Random, system: str) -> Opening:
    """A tool was called, and its result has the pictures. The question comes before the call or after the result. Or
    there are tools, and none was called."""
    name, wish, result = (random.choice(DATA["tools"][key]) for key in ("names", "wishes", "results"))
    arguments = random.choice(DATA["tools"]["arguments"])
    kinds = {key: {"type": "integer" if isinstance(value, int) else "string"} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": kinds}
    function: dict[str, object] = {"name": name, "description": wish, "parameters": parameters}
    if random.random() < 0.5:
        del function["description"]
    tool = {"type": "function", "function": function}
    before = random.random() < 0.45
    asked = random.choice((QUESTION, f"{wish} {QUESTION}")) if before else wish
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]},
        {"role": "tool", "content": result},
    ]
    if not before and random.random() < 0.3:
        messages.append({"role": "assistant", "content": random.choice(DATA["tools"]["done"])})
    if random.random() < 0.15:
        return tuple(
            (turn["role"], turn["content"])
            for turn in hermes_turns([{"role": role, "content": text} for role, text in opening(system)], [tool])
        )
    found = hermes_turns(messages, [tool] if random.random() < 0.6 else [])
    texts = [(turn["role"], PICTURES * ("results" in turn) + turn["content"]) for turn in found]
    return (*texts, *(() if before else (("user", QUESTION),)))


def _weighted(random: Random, weights: Mapping[str, float]) -> str:
    return random.choices(tuple(weights), tuple(weights.values()))[0]


def turns(random: Random, kind: str, pictures: Sequence[Picture]) -> list[Turn]:
    wanted = random.randint(1, DATA["most turns"][kind])
    found: list[Turn] = []
    for _ in range(3 * wanted):
        if len(found) == wanted:
            break
        turn, leans = None, False
        if found and random.random() < 0.35:
            turn = follow_up(Ask(random, pictures, held_out=False, json=False), found[-1])
            leans = turn is not None
        if turn is None:
            maker = MAKERS[_weighted(random, DATA["asked about"][kind])]
            turn = maker(Ask(random, pictures, held_out=False, json=random.random() < _JSON_SHARE))
        unclear = found and not leans and found[-1].task not in _OF_ALL
        if turn and (turn.question.lower().rstrip("?.! ") in _KEPT or (unclear and _THEY.search(turn.question))):
            continue
        if turn is not None and all(turn.question != other.question for other in found):
            found.append(turn)
    return found


@dataclass(frozen=True)
class Tokens:
    """A conversation in ids. ids int32 [n]; vision int32 [n]: which row of the pictures' embeddings, or -1; labels
    int32 [n]: the id to be said after each position, or -1, also where a key is forced; turns int32 [n]: index of the
    turn that a label is of, or -1; positions int32 [3, n]."""

    ids: np.ndarray
    vision: np.ndarray
    labels: np.ndarray
    turns: np.ndarray
    positions: np.ndarray


_TOKENIZER = Tokenizer.from_file(str(PUBLISHED / "tokenizer.json"))


@lru_cache(maxsize=65536)
def encode(text: str) -> tuple[int, ...]:
    return tuple(_TOKENIZER.encode(text, add_special_tokens=False).ids)


_START, END = encode("<|im_start|><|im_end|>")
_VISION_START, _VISION_END = encode("<|vision_start|><|vision_end|>")
_IMAGE, _VIDEO = encode("<|image_pad|><|video_pad|>")


def _forced(turn: Turn) -> list[int]:
    """Which tokens of the answer say a key that is forced."""
    if not turn.forced:
        return []
    spans = [match.span(1) for match in _KEY.finditer(turn.answer) if match[1] in turn.forced]
    offsets = _TOKENIZER.encode(turn.answer, add_special_tokens=False).offsets
    return [
        index
        for index, (start, end) in enumerate(offsets)
        if any(start < last and first < end for first, last in spans)
    ]


def decode(ids: Sequence[int]) -> str:
    return _TOKENIZER.decode(list(ids))


def tokens_of(pictures: Sequence[Picture], turns: Sequence[Turn], opening: Opening = ASKED) -> Tokens:
    """As the checkpoint's chat template writes it. The pictures that no later turn shows are those of the opening."""
    ids: list[int] = []
    turn_of: list[int] = []
    runs: list[tuple[int, tuple[int, int, int]]] = []
    left = list(pictures)

    def put(*tokens: int, turn: int = -1) -> None:
        ids.extend(tokens)
        turn_of.extend([turn] * len(tokens))

    for index, turn in enumerate(turns):
        for role, text in opening if index == 0 else (("user", PICTURES * (turn.shows > 0) + QUESTION),):
            put(_START, *encode(role + "\n"))
            count = turn.shows if index else len(pictures) - sum(later.shows for later in turns[1:])
            for _ in range(count if text.startswith(PICTURES) else 0):
                picture = left.pop(0)
                runs.append((len(ids) + 1, grid_of(picture)))
                pads = [_VIDEO if picture.motion else _IMAGE] * embeddings(picture)
                put(_VISION_START, *pads, _VISION_END)
            text = text.removeprefix(PICTURES).replace(QUESTION, turn.question)
            put(*encode(text), END, *encode("\n"))
        put(_START, *encode("assistant\n"))
        forced = _forced(turn)
        for nth, token in enumerate((*encode(turn.answer), END)):
            put(token, turn=-1 if nth in forced else index)
        put(*encode("\n"))
    whole, said = np.array(ids, np.int32), np.array(turn_of, np.int32)
    shown = np.isin(whole, (_IMAGE, _VIDEO))
    rows = np.where(shown, shown.cumsum() - 1, -1).astype(np.int32)
    labels = np.append(np.where(said < 0, -1, whole)[1:], np.int32(-1))
    positions, _ = mrope_positions(len(ids), runs, merge_size=2)
    return Tokens(whole, rows, labels, np.append(said[1:], np.int32(-1)), positions)


def grid_of(picture: Picture) -> tuple[int, int, int]:
    """Frame pairs, rows and columns of patches."""
    height, width, _ = picture.frames[0].shape
    return -(-len(picture.frames) // 2), height // _PATCH, width // _PATCH


def embeddings(picture: Picture) -> int:
    return int(np.prod(grid_of(picture))) // 4


def patches_of(picture: Picture) -> np.ndarray:
    """uint8 [frames, rows * columns, 588]: patches of each frame in block order, columns (channel, y, x)."""
    frames = np.stack(picture.frames)
    number, height, width, _ = frames.shape
    cut = frames.reshape(number, height // CELL, 2, _PATCH, width // CELL, 2, _PATCH, 3)
    return cut.transpose(0, 1, 4, 2, 5, 7, 3, 6).reshape(number, height * width // _PATCH**2, 3 * _PATCH**2)
