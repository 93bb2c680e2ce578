"""Measures models/embedded/qwen2_vl on held-out pictures, words, fonts, things and wordings, and says which gates hold.

    REPRISE_WORLD_FONTS=build/fonts python -m training.vision.gates --number 500 --json gates.json

An answer counts as right where greedy decoding says it word for word. With --sample a few examples of every promised
gate are written as files instead, for tests that have no fonts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image

from training.loop import device, hashes, publish
from training.vision.blocks import Answer, answers, on_device
from training.vision.charts import chart_picture
from training.vision.conversations import ASKED, DATA, DRAW, Example, decode, encode
from training.vision.fonts import SEEN_FONTS, UNSEEN_FONTS
from training.vision.network import PUBLISHED, load
from training.vision.questions import MAKERS, ONLY, Ask, follow_up, read
from training.vision.scenes import text_picture

SEED = 20261122
_DRAW = {
    **DRAW,
    # Charts with names of a kind and with any words are measured apart: the latter have to be read letter by letter.
    "chart": lambda random, held_out: [chart_picture(random, held_out=held_out, any_words=0)],
    "chart_of_words": lambda random, held_out: [chart_picture(random, held_out=held_out, any_words=1)],
}
PRINTED = {
    "word": ("word", SEEN_FONTS, 0.95),
    "word_unseen_font": ("word", UNSEEN_FONTS, 0.8),
    "string": ("string", SEEN_FONTS, 0.9),
    "string_unseen_font": ("string", UNSEEN_FONTS, 0.0),
}
"""Gates of one printed line of 16 px or more: its style, fonts, least share of right answers."""
GATES: dict[str, float] = {
    **{name: task[2] for name, task in DATA["gates"].items()},
    **{name: gate for name, (_, _, gate) in PRINTED.items()},
    "second_turn": 0.95,
}
NAMES = tuple(GATES)
_WEAK_IN_JSON = ("json_at_place", "json_keys", "json_list")
NOT_PROMISED = frozenset(("at_place", "beside", "chart_title", "chart_words", "describe", "read_line", *_WEAK_IN_JSON))
"""What the checkpoint in the package does not do well enough: measured, and said on its card."""
REFUSING = ("thing", "thing_in_text", "strange", "not_known", "knowledge")
BALANCED = ("exists", "is_color", "is_shape", "relation_yn", "compare_yn")
MOST_WRONG_REFUSALS = 0.01
BALANCE = (0.45, 0.55)


def examples(name: str, number: int) -> list[Example]:
    """Held-out examples of one gate, of one turn each; of "second_turn" two."""
    random = Random(f"{SEED} {name}")
    draw = _printed if name in PRINTED else _second_turn if name == "second_turn" else _one_turn
    endless = (draw(random, name) for _ in count())
    return list(islice((example for example in endless if example is not None), number))


def _one_turn(random: Random, name: str) -> Example | None:
    kind, maker, _, *as_json = DATA["gates"][name]
    pictures = _DRAW[kind](random, True)
    turn = MAKERS[maker](Ask(random, pictures, held_out=True, json=bool(as_json)))
    return Example(pictures, [[replace(turn, task=name)]], [ASKED]) if turn else None


def _printed(random: Random, name: str) -> Example | None:
    """What is one token of the vocabulary, as a word of the questions is, was never spelled, and is not asked for."""
    style, fonts, _ = PRINTED[name]
    picture = text_picture(random, held_out=True, style=style, face=random.choice(fonts))
    turn = read(Ask(random, [picture], held_out=True, json=False)) if picture.lines else None
    if turn is None or any(len(encode(line.text)) == 1 for line in picture.lines):
        return None
    return Example([picture], [[replace(turn, task=name)]], [ASKED])


def _second_turn(random: Random, name: str) -> Example | None:
    pictures = _DRAW["chart" if random.random() < 0.25 else "shapes"](random, True)
    ask = Ask(random, pictures, held_out=True, json=False)
    makers = ("chart_value", "chart_most") if ask.picture.chart else ("color", "shape", "count", "where", "largest")
    first = MAKERS[random.choice(makers)](ask)
    second = follow_up(ask, first) if first else None
    if first is None or second is None:
        return None
    return Example(pictures, [[replace(first, task="first_turn"), second]], [ASKED])


@dataclass
class Scores:
    """right: share of right answers by gate; refused: of known things; yes: share of answers to
    BALANCED that begin with yes."""

    right: dict[str, float]
    refused: float
    yes: float | None
    wrong: dict[str, list[str]]

    def failures(self) -> list[str]:
        promised = {name: gate for name, gate in GATES.items() if name not in NOT_PROMISED}
        failed = [f"{n}: {v:.3f} < {promised[n]}" for n, v in self.right.items() if v < promised.get(n, 0.0)]
        if self.refused > MOST_WRONG_REFUSALS:
            failed.append(f"known things refused: {self.refused:.4f} > {MOST_WRONG_REFUSALS}")
        if self.yes is not None and not BALANCE[0] <= self.yes <= BALANCE[1]:
            failed.append(f"yes: {self.yes:.3f}")
        return failed


def score(found: Sequence[Answer]) -> Scores:
    right: dict[str, list[bool]] = defaultdict(list)
    yes: list[bool] = []
    wrong: dict[str, list[str]] = defaultdict(list)
    refused: list[bool] = []
    first, second = encode(ONLY)[:2]
    agreed = encode("Yes,")[0]
    for answer in found:
        right[answer.task].append(answer.right)
        if not answer.right:
            wrong[answer.task].append(f"{decode(answer.said)} | {decode(answer.wanted)}")
        if answer.task in BALANCED:
            yes.append(answer.said[0] == agreed)
        if answer.task not in REFUSING:
            # After a right first word, the second tells; a wrong first word that begins the refusal counts as one.
            refused.append(answer.said[0] == first and (answer.wanted[0] != first or answer.said[1] == second))
    return Scores(
        right={name: sum(values) / len(values) for name, values in right.items()},
        refused=sum(refused) / max(1, len(refused)),
        yes=sum(yes) / len(yes) if yes else None,
        wrong={name: values[:5] for name, values in wrong.items()},
    )


def write_sample(directory: Path, number: int) -> None:
    """questions.json and a file of every picture; the frames of a video lie side by side in one."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    entries = []
    for name in (name for name in NAMES if name not in NOT_PROMISED):
        for index, example in enumerate(examples(name, number)):
            media = []
            for nth, picture in enumerate(example.pictures):
                file = f"{name}_{index}_{nth}.webp"
                Image.fromarray(np.concatenate(picture.frames, axis=1)).save(directory / file, quality=92, method=6)
                media.append({"file": file, "frames": len(picture.frames)})
            turns = [[turn.question, turn.answer] for turn in example.conversations[0]]
            entries.append({"gate": name, "media": media, "turns": turns})
    text = ",\n ".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    (directory / "questions.json").write_text(f"[{text}]\n", encoding="utf-8")


def measure(options: argparse.Namespace) -> bool:
    """Whether all promised gates hold."""
    on, weights = device(), options.weights
    network, began, found = load(weights, on), time.monotonic(), list[Answer]()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for made in pool.imap(partial(examples, number=options.number), options.only or NAMES):
            for held in on_device(made, on):
                found += answers(network, held)
    scores = score(found)
    failed = scores.failures()
    report = {
        "sha256": hashes(weights)[weights.name],
        "measured": f"bfloat16, {torch.cuda.get_device_name()}" if on.type == "cuda" else "float32 on a CPU",
        "questions": options.number,
        "seed": SEED,
        "right": {name: round(value, 4) for name, value in scores.right.items()},
        "known_things_refused": round(scores.refused, 4),
        "yes": scores.yes,
        "not_promised": sorted(NOT_PROMISED),
        "failed": failed,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    for name, wrong in scores.wrong.items():
        print(name, *wrong, sep="\n  ")
    print(f"{time.monotonic() - began:.0f} s")
    if options.export and not failed and not options.only:
        publish(PUBLISHED, options.export, network.state_dict())
    return not failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=PUBLISHED / "model.safetensors")
    parser.add_argument("--number", type=int, default=500, help="questions of each gate")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--export", type=Path, help="directory of the checkpoint, if all gates hold")
    parser.add_argument("--sample", type=Path, help="directory that examples are written to")
    options = parser.parse_args()
    if options.sample:
        write_sample(options.sample, options.number)
    elif not measure(options):
        sys.exit(1)
