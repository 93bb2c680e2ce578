"""What the embedded model answers is right: held-out pictures and questions of every promised gate, from files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from models.interfaces.media import ChatMessage, MediaItem, VideoFrames, VideoMetadata
from models.protocol import ChatModel
from models.qwen_vl.model import load_model
from models.qwen_vl.processor import Qwen2VLProcessor, load_processor
from service.hub import EMBEDDED
from tests.support.chat_golden import generate
from tests.support.prompts import prompt_of, say

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DIRECTORY = EMBEDDED / "qwen2_vl"
WORLD = Path(__file__).parents[2] / "golden/world"
ENTRIES: list[dict[str, Any]] = json.loads((WORLD / "questions.json").read_text(encoding="utf-8"))
MOST_WRONG = 0.05
CHARTS = Path(__file__).parent / "charts"
DRAWN: dict[str, dict[str, Any]] = json.loads((CHARTS / "charts.json").read_text(encoding="utf-8"))


@cache
def loaded() -> tuple[Qwen2VLProcessor, ChatModel]:
    return load_processor(DIRECTORY), load_model(DIRECTORY, "cpu", torch.float32)


def item_of(processor: Qwen2VLProcessor, medium: dict[str, Any]) -> MediaItem:
    """A picture, or a video whose frames lie side by side in the file."""
    image = Image.open(WORLD / medium["file"]).convert("RGB")
    count = medium["frames"]
    if count == 1:
        return processor.image(image)
    frames = np.split(np.asarray(image), count, axis=1)
    height, width, _ = frames[0].shape
    metadata = VideoMetadata(count, 2.0, count / 2, height, width)
    return processor.video(
        VideoFrames(tuple(frames), tuple(range(count)), tuple(i / 2 for i in range(count)), metadata)
    )


def said(messages: list[ChatMessage], items: list[MediaItem], wanted: str) -> str:
    """The answer, at most a token longer than `wanted`."""
    processor, model = loaded()
    _, _, ids = generate(model, prompt_of(processor, messages, items), len(processor.tokenize(wanted)) + 1)
    ended = next((index for index, token in enumerate(ids) if token in processor.stop_token_ids), None)
    return processor.detokenize(ids[:ended]).decode() + ("" if ended is not None else " ...")


def answer(entry: dict[str, Any]) -> str:
    """To the last question, after the right answers to those before it."""
    items = [item_of(loaded()[0], medium) for medium in entry["media"]]
    messages = []
    for index, (question, before) in enumerate(entry["turns"]):
        shown = range(len(items)) if index == 0 else ()
        messages += [say("user", *shown, question), say("assistant", before)]
    return said(messages[:-1], items, entry["turns"][-1][1])


def test_answers_are_right() -> None:
    wrong = [entry["gate"] for entry in ENTRIES if answer(entry) != entry["turns"][-1][1]]
    assert len(wrong) <= MOST_WRONG * len(ENTRIES), wrong


def check(image: Image.Image, answers: dict[str, str]) -> None:
    """Each question of `answers` by itself, before the picture or behind it."""
    for index, (question, wanted) in enumerate(answers.items()):
        message = say("user", *(0, question)[:: 1 if index % 2 else -1])
        assert said([message], [loaded()[0].image(image)], wanted) == wanted, question


@pytest.mark.parametrize("shade", ["red", "lime", "black"])
@pytest.mark.parametrize(("shape", "draw"), [("circle", "ellipse"), ("square", "rectangle")])
def test_the_first_picture_that_one_draws_is_described(shade: str, shape: str, draw: str) -> None:
    """One large shape in a pure color on white, with the edges that Pillow draws."""
    image = Image.new("RGB", (448, 448), "white")
    getattr(ImageDraw.Draw(image), draw)((48, 48, 399, 399), fill=shade)
    color = {"lime": "green"}.get(shade, shade)
    answers = {
        "What do you see?": f"I see a large {color} {shape} in the center.",
        "What color is it?": f"The {shape} is {color}.",
        "What shape is this?": f"It is a {shape}.",
    }
    check(image, answers)


@pytest.mark.parametrize("shade", ["red", "navy"])
def test_a_picture_of_one_color_is_described(shade: str) -> None:
    color = {"lime": "green", "navy": "blue"}.get(shade, shade)
    answers = {
        "What is this?": f"I see a plain {color} picture.",
        "What color is the picture?": f"The picture is {color}.",
    }
    check(Image.new("RGB", (320, 240), shade), answers)


@pytest.mark.parametrize("name", DRAWN)
def test_bar_charts_of_another_library_are_read(name: str) -> None:
    """With axes, frames, grid lines, titles and numbers along the axis, by Matplotlib, which training never saw."""
    labels, values, title = (DRAWN[name][part] for part in ("labels", "values", "title"))
    parts = [f'"{label}" {value}' for label, value in zip(labels, values, strict=True)]
    largest = labels[values.index(max(values))]
    expected = {
        "Describe this chart.": f"I see a bar chart: {', '.join(parts[:-1])} and {parts[-1]}.",
        "How many bars are there?": f"I see {len(labels)} bars.",
        f"What is the value of {labels[1]}?": f'"{labels[1]}" is {values[1]}.',
        "Which bar is the largest?": f'The largest is "{largest}".',
        "What is the title?": f'The title is "{title}".' if title else "The chart has no title.",
    }
    check(Image.open(CHARTS / f"{name}.png").convert("RGB"), expected)
