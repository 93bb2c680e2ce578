"""The two golden directories of Qwen3-VL: dense and a mixture, one with the Instruct template, one with the Thinking
template."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from models.interfaces.media import MediaItem, Prompt
from models.qwen3_vl.model import Qwen3VL, load_model
from models.qwen3_vl.processor import Qwen3VLProcessor, load_processor
from tests.support.chat_golden import golden_prompt, golden_video
from tests.support.golden import GOLDEN, golden_parts, inputs, numbered, prompts

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Golden:
    directory: Path

    @cached_property
    def expected(self) -> dict[str, Tensor]:
        return load_file(self.directory / "expected.safetensors")

    @cached_property
    def inputs(self) -> dict[str, Any]:
        return inputs(self.directory)

    @property
    def prompts(self) -> tuple[str, ...]:
        return prompts(self.directory)

    @property
    def images(self) -> list[str]:
        return numbered(list(self.expected), "image.", ".grid_thw")

    @property
    def videos(self) -> list[str]:
        return [name.removesuffix(".grid_thw") for name in self.expected if re.fullmatch(r"video\.\w+\.grid_thw", name)]

    @property
    def names(self) -> list[str]:
        return [*self.images, *self.videos]

    @cached_property
    def processor(self) -> Qwen3VLProcessor:
        return load_processor(self.directory)

    @cached_property
    def model(self) -> Qwen3VL:
        with torch.inference_mode():
            return load_model(self.directory, CPU, torch.float32)

    def item(self, name: str) -> MediaItem:
        if name.startswith("image."):
            path = self.directory / f"images/{name.replace('.', '')}.png"
            return self.processor.image(Image.open(path).convert("RGB"))
        part = self.video_part(name)
        known = {key: part[key] for key in ("fps", "frames_indices")}
        return self.processor.video(golden_video(self.directory, part["video"], **known))

    def video_part(self, name: str) -> dict[str, Any]:
        """Of a prompt that shows the video, as inputs.json has it."""
        start = f"images/{name.removeprefix('video.')}_video_"
        parts = (part for prompt in prompts(self.directory) for part in golden_parts(self.directory, prompt))
        return next(part for part in parts if part["type"] == "video" and part["video"][0].startswith(start))

    def prompt(self, name: str) -> Prompt:
        add_vision_id = self.inputs["prompts"][name]["add_vision_id"]
        return golden_prompt(self.processor, self.directory, name, add_vision_id=add_vision_id)

    def embeds(self, name: str) -> Tensor:
        """Embeddings with their features behind them, as the encoder lays them out."""
        features = self.expected[f"{name}.deepstack"]
        return torch.cat((self.expected[f"{name}.embeds"], *features), dim=1)


DENSE = Golden(GOLDEN / "qwen3_vl")
MIXTURE = Golden(GOLDEN / "qwen3_vl_moe")
BOTH = {"dense": DENSE, "mixture": MIXTURE}
INSTRUCT, THINKING = sorted(BOTH, key=lambda kind: BOTH[kind].processor.reasoning_markers is not None)
"""Their keys in BOTH."""
