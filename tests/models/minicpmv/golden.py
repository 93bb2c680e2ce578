"""The golden prompts of tests/golden/minicpmv_*, taken through the production processor."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from models.checkpoints.published import read_optional_json
from models.interfaces.media import ChatMessage, ContentPart, MediaItem, Prompt, VideoMetadata
from models.minicpmv.config import load_config
from models.minicpmv.processor import NO_TIME, MiniCPMVProcessor, load_processor
from models.text.chat_template import load_chat_template
from tests.support.golden import GOLDEN, prompts
from tests.support.prompts import prompt_of

VERSIONS = ("2.5", "2.6", "4.0", "4.5")
FOLDERS = {version: GOLDEN / f"minicpmv_{version.replace('.', '_')}" for version in VERSIONS}
PROMPTS = [(version, name) for version in VERSIONS for name in prompts(FOLDERS[version])]


def directory(version: str) -> Path:
    return FOLDERS[version]


@cache
def inputs(version: str) -> dict[str, Any]:
    return json.loads((directory(version) / "inputs.json").read_text())


@cache
def expected(version: str) -> dict[str, np.ndarray]:
    return load_file(directory(version) / "expected.safetensors")


def expectations(version: str, prompt: str) -> dict[str, np.ndarray]:
    """Reference tensors of one prompt by name."""
    prefix = f"prompt.{prompt}."
    return {name.removeprefix(prefix): value for name, value in expected(version).items() if name.startswith(prefix)}


@cache
def processor(version: str) -> MiniCPMVProcessor:
    return load_processor(directory(version))


@cache
def variant(version: str, *, use_image_id: bool) -> MiniCPMVProcessor:
    """The processor under the settings of a reference call."""
    path = directory(version)
    return MiniCPMVProcessor(
        replace(load_config(path), use_image_id=use_image_id),
        processor(version).tokenizer,
        load_chat_template(path),
        read_optional_json(path, "generation_config.json"),
    )


def picture(version: str, name: str) -> Image.Image:
    return Image.open(directory(version) / name)


@cache
def golden_prompt(version: str, name: str) -> Prompt:
    """The prompt with its items; consecutive frames of the reference's list are one video item."""
    spec = inputs(version)["prompts"][name]
    if "max_slice_nums" not in spec:
        owner = processor(version)
    else:
        owner = variant(version, use_image_id=spec["use_image_id"])
    items: list[MediaItem] = []
    messages = []
    for message in spec["messages"]:
        images = [part["image"] for part in message["content"] if part["type"] == "image"]
        groups = spec.get("temporal_ids", [[NO_TIME]] * len(images))
        parts: list[ContentPart] = []
        frames: list[np.ndarray] = []
        for part in message["content"]:
            if part["type"] == "text":
                parts.append(ContentPart(text=part["text"]))
            elif "max_slice_nums" not in spec:
                parts.append(ContentPart(item=len(items)))
                items.append(owner.image(picture(version, part["image"])))
            elif spec.get("temporal_ids", [None])[0] == [NO_TIME] and not items:
                parts.append(ContentPart(item=0))
                items.append(owner.image(picture(version, part["image"]), detail="low"))
                groups = groups[1:]
            else:
                frames.append(np.asarray(picture(version, part["image"]).convert("RGB")))
                if len(frames) == sum(map(len, groups)):
                    parts.append(ContentPart(item=len(items)))
                    size = VideoMetadata(len(frames), 1.0, 1.0, *frames[0].shape[:2])
                    resize = owner.frame_resizer(size, len(frames))
                    items.append(owner.video_item([*map(resize, frames)], groups))
        messages.append(ChatMessage(message["role"], tuple(parts)))
    return prompt_of(owner, messages, items, options={"enable_thinking": inputs(version)["enable_thinking"]})
