"""The golden directory of Qwen2-VL through the production loaders, each once."""

from __future__ import annotations

import re
from functools import cache

import torch
from safetensors.torch import load_file
from torch import Tensor

from models.interfaces.media import Prompt
from models.qwen2_vl.model import Qwen2VL, load_model
from models.qwen2_vl.processor import Qwen2VLProcessor, load_processor
from tests.support.chat_golden import golden_prompt, golden_video_limits
from tests.support.golden import GOLDEN, inputs, numbered, prompts, with_most

DIRECTORY = GOLDEN / "qwen2_vl"
INPUTS = inputs(DIRECTORY)
TOKENS: int = INPUTS["max_new_tokens"]
PROMPTS = prompts(DIRECTORY)
VIDEO_PROMPT = with_most(DIRECTORY, "video")
VIDEO_LIMITS = golden_video_limits(DIRECTORY)


@cache
def expected() -> dict[str, Tensor]:
    return load_file(DIRECTORY / "expected.safetensors")


IMAGES = numbered(list(expected()), "image.", ".grid_thw")
VIDEOS = [name.removesuffix(".grid_thw") for name in expected() if re.fullmatch(r"video\.\w+\.grid_thw", name)]


@cache
def processor() -> Qwen2VLProcessor:
    return load_processor(DIRECTORY, video_limits=VIDEO_LIMITS)


@cache
def model(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Qwen2VL:
    return load_model(DIRECTORY, device, dtype)


@cache
def prompt(name: str) -> Prompt:
    return golden_prompt(processor(), DIRECTORY, name, add_vision_id=INPUTS["prompts"][name]["add_vision_id"])


def golden_tokens(name: str) -> list[int]:
    return expected()[f"prompt.{name}.generated_ids"].tolist()
