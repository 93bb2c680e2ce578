"""The golden prompts of tests/golden/minicpmv_*, whose references were given slices and groups by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from models.checkpoints.published import read_optional_json
from models.interfaces.media import ChatMessage, ContentPart, MediaItem, Prompt, VideoMetadata
from models.minicpmv.processor import NO_TIME, MiniCPMVProcessor
from tests.support.golden import inputs
from tests.support.prompts import prompt_of

VERSIONS = ("2.5", "2.6", "4.0", "4.5")


def golden_prompt(owner: MiniCPMVProcessor, directory: Path, name: str) -> Prompt:
    """The prompt with its items; consecutive frames of the reference's list are one video item."""
    spec = inputs(directory)["prompts"][name]
    if "use_image_id" in spec:
        generation = read_optional_json(directory, "generation_config.json")
        config = replace(owner.config, use_image_id=spec["use_image_id"])
        owner = MiniCPMVProcessor(config, owner.tokenizer, owner.template, generation)
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
                continue
            picture = Image.open(directory / part["image"])
            if "max_slice_nums" not in spec:
                parts.append(ContentPart(item=len(items)))
                items.append(owner.image(picture))
            elif spec.get("temporal_ids", [None])[0] == [NO_TIME] and not items:
                parts.append(ContentPart(item=0))
                items.append(owner.image(picture, detail="low"))
                groups = groups[1:]
            else:
                frames.append(np.asarray(picture.convert("RGB")))
                if len(frames) == sum(map(len, groups)):
                    parts.append(ContentPart(item=len(items)))
                    size = VideoMetadata(len(frames), 1.0, 1.0, *frames[0].shape[:2])
                    resize = owner.frame_resizer(size, len(frames))
                    items.append(owner.video_item([*map(resize, frames)], groups))
        messages.append(ChatMessage(message["role"], tuple(parts)))
    return prompt_of(owner, messages, items, options={"enable_thinking": inputs(directory)["enable_thinking"]})
