"""The golden prompts of tests/golden/kimi_vl, taken through the production processor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.interfaces.media import MediaItem, Prompt, media_digest
from models.kimi_vl.model import KimiVLModel, load_model
from models.kimi_vl.processor import KimiVLProcessor, load_processor
from tests.support.chat_golden import golden_prompt
from tests.support.golden import GOLDEN, inputs, media_files, numbered, prompts, with_fewest, with_most

DIRECTORY = GOLDEN / "kimi_vl"
PROMPTS = prompts(DIRECTORY)
TOKENS = inputs(DIRECTORY)["max_new_tokens"]
"""Greedy tokens of every golden prompt; end ids and other special ids are among them."""

SINGLE, MULTI = with_fewest(DIRECTORY), with_most(DIRECTORY)
"""Prompts with one picture or few, and with several."""

PUBLISHED_TEXT = {
    "vocab_size": 163840,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 131072,
}
PUBLISHED_VISION = {
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
}


@cache
def expected() -> dict[str, Tensor]:
    return load_file(DIRECTORY / "expected.safetensors")


@cache
def processor() -> KimiVLProcessor:
    return load_processor(DIRECTORY)


@cache
def model(device: str = "cpu", dtype: torch.dtype = torch.float32) -> KimiVLModel:
    return load_model(DIRECTORY, torch.device(device), dtype)


@cache
def prompt(name: str) -> Prompt:
    return golden_prompt(processor(), DIRECTORY, name)


def pictures() -> list[str]:
    """image.0, image.1, ..."""
    return numbered(expected(), "image.", ".grid_hw")


def pictures_of(name: str) -> list[str]:
    return [Path(file).stem.replace("image", "image.") for file in media_files(DIRECTORY, name)]


def golden_tokens(name: str) -> list[int]:
    return expected()[f"prompt.{name}.generated_ids"].tolist()


def item(grids: Sequence[tuple[int, int]], seed: int = 0) -> MediaItem:
    """Frames of random pixels of (rows, columns) patches; both even."""
    values = np.random.default_rng(seed)
    frames = tuple(values.integers(0, 256, (14 * rows, 14 * columns, 3), dtype=np.uint8) for rows, columns in grids)
    patches = sum(rows * columns for rows, columns in grids)
    arrays = {"grids": np.array(grids, dtype=np.int32)}
    kind = "image" if len(grids) == 1 else "video"
    return MediaItem(kind, frames, arrays, patches, len(grids), patches // 4, media_digest(kind, frames, arrays, b""))


def write_config(
    target: Path, *, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, limit: int | None = None
) -> Path:
    """config.json and preprocessor_config.json of the golden directory with other values."""
    config = json.loads((DIRECTORY / "config.json").read_text())
    config["text_config"] |= text or {}
    config["vision_config"] |= vision or {}
    (target / "config.json").write_text(json.dumps(config))
    images = json.loads((DIRECTORY / "preprocessor_config.json").read_text())
    (target / "preprocessor_config.json").write_text(
        json.dumps(images if limit is None else images | {"in_token_limit": limit})
    )
    return target
