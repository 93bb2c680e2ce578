"""The golden directory through the production loaders, each once."""

from __future__ import annotations

from functools import cache

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from models.interfaces.media import MediaItem, Prompt
from models.qwen2_5_vl.model import Qwen25VL, load_model
from models.qwen2_5_vl.processor import load_processor
from models.qwen2_vl.pictures import VideoLimits
from models.qwen2_vl.processor import Qwen2VLProcessor
from tests.support.chat_golden import golden_prompt, golden_video
from tests.support.golden import GOLDEN, golden_parts, inputs, numbered, prompts, with_most

DIRECTORY = GOLDEN / "qwen2_5_vl"
INPUTS = inputs(DIRECTORY)
TOKENS: int = INPUTS["max_new_tokens"]
PROMPTS = prompts(DIRECTORY)
VIDEO_PROMPT = with_most(DIRECTORY, "video")
VIDEO_LIMITS = VideoLimits(3136, 16_000, 10**9)
"""Within these the frames of the fixture keep their size."""


@cache
def expected() -> dict[str, Tensor]:
    return load_file(DIRECTORY / "expected.safetensors")


IMAGES = numbered(list(expected()), "image.", ".grid_thw")


def item_names(name: str) -> list[str]:
    """Of a prompt's pictures and videos, in order."""
    files = [part.get("video", [part.get("image")])[0] for part in golden_parts(DIRECTORY, name)]
    stems = [file.removeprefix("images/").removesuffix(".png") for file in files]
    return [f"video.{s.split('_video_')[0]}" if "_video_" in s else s.replace("image", "image.") for s in stems]


VIDEOS = list(dict.fromkeys(item for name in PROMPTS for item in item_names(name) if item.startswith("video.")))


def pack_order() -> list[str]:
    """Items in the order in which the fixture packs them, found by their embeddings."""
    together, left, order = expected()["pack.embeds"], [*IMAGES, *VIDEOS], []
    while together.shape[0]:
        rows = {name: expected()[f"{name}.embeds"] for name in left}
        found = [name for name, own in rows.items() if torch.allclose(together[: len(own)], own, atol=2e-5, rtol=0)]
        order.append(found[0])
        left.remove(found[0])
        together = together[len(rows[found[0]]) :]
    return order


@cache
def processor() -> Qwen2VLProcessor:
    return load_processor(DIRECTORY, video_limits=VIDEO_LIMITS)


@cache
def model(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Qwen25VL:
    return load_model(DIRECTORY, device, dtype)


@cache
def item(name: str) -> MediaItem:
    """Of its name in expected.safetensors."""
    if name in IMAGES:
        return processor().image(Image.open(DIRECTORY / f"images/{name.replace('.', '')}.png").convert("RGB"))
    start = f"images/{name.removeprefix('video.')}_video_"
    files = [f"{file}.png" for file in numbered(image_files(), start, ".png")]
    return processor().video(golden_video(DIRECTORY, files, fps=2 / expected()[f"{name}.second_per_grid"].item()))


def image_files() -> list[str]:
    return [f"images/{path.name}" for path in (DIRECTORY / "images").iterdir()]


@cache
def prompt(name: str) -> Prompt:
    return golden_prompt(processor(), DIRECTORY, name, add_vision_id=INPUTS["prompts"][name]["add_vision_id"])


def golden_tokens(name: str) -> list[int]:
    return expected()[f"prompt.{name}.generated_ids"].tolist()
