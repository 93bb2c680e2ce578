"""Published JSON files of Qwen3-VL and of Qwen3.5 to 3.8, dense and mixture of experts, as values. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.checkpoints.published import (
    preprocessor_fields,
    read_config,
    require_fields,
    require_text_fields,
    section_of,
    token_id,
)
from models.interfaces.errors import CheckpointError
from models.qwen_vl.config import ImageSettings, VisionConfig, image_settings, mrope_section
from models.qwen_vl.v3.videos import FrameRule
from models.qwen_vl.v3_5.config import QWEN3_5, text_fields

_PICTURE_FILE, _VIDEO_FILE = "preprocessor_config.json", "video_preprocessor_config.json"
_VIDEO_SECTION = "video_processor"


@dataclass(frozen=True)
class TowerConfig:
    """vision: the sizes that Qwen2-VL's tower has, too. table_side: number of rows and of columns of the position
    table. deepstack: indices of the blocks whose outputs become features of the language model's first layers, in this
    order.
    """

    vision: VisionConfig
    table_side: int
    deepstack: tuple[int, ...]


@dataclass(frozen=True)
class Qwen3VLConfig:
    """text: the published text_config, with num_experts in mixtures alone; that of Qwen3.5 as text_fields returns it.
    videos: bounds on the pixels of all frames of a video together. frames: which of them are read."""

    text: Mapping[str, Any]
    tower: TowerConfig
    images: ImageSettings
    videos: ImageSettings
    frames: FrameRule
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int


def load_config(directory: Path) -> Qwen3VLConfig:
    """config.json as published (rope_scaling, rope_theta) or as transformers 5 writes it (rope_parameters), and the two
    preprocessor files. Fields that determine the network must be present, since class defaults belong to other
    models."""
    config = read_config(directory)
    text, vision = section_of(config, "text_config"), section_of(config, "vision_config")
    if not QWEN3_5.isdisjoint(config.get("architectures") or ()):
        text = text_fields(directory, text)
        if vision.setdefault("deepstack_visual_indexes", []):
            raise CheckpointError("config.json: vision_config.deepstack_visual_indexes must be empty or absent")
    # The field inside text_config is a class default, unrelated to the published models.
    text["tie_word_embeddings"] = bool(config.get("tie_word_embeddings", False))
    require_text_fields(directory, text)
    name, rope = mrope_section(text)
    # With contiguous sections the decoder would give wrong answers.
    require_fields(f"config.json: {name}.", rope, {"mrope_interleaved": True}, needed=True)
    try:
        _check_experts(text)
        width = {"out_hidden_size": text["hidden_size"]}
        require_fields("config.json: vision_config.", vision, width, said="expected the language model's hidden_size")
        tower = _tower(vision)
        images = image_settings(directory, _PICTURE_FILE, "image_processor", tower.vision)
        return Qwen3VLConfig(
            text=text,
            tower=tower,
            images=images,
            videos=_video_settings(directory, tower.vision, images),
            frames=_frame_rule(directory),
            image_token_id=token_id(config, "image_token_id"),
            video_token_id=token_id(config, "video_token_id"),
            vision_start_token_id=token_id(config, "vision_start_token_id"),
            vision_end_token_id=token_id(config, "vision_end_token_id"),
        )
    except KeyError as error:
        raise CheckpointError(f"{directory}: config.json: field {error} is missing") from error


def _check_experts(text: dict[str, Any]) -> None:
    """Dense models have neither num_experts nor num_local_experts, its name in transformers 5."""
    named = {name: value for name, value in text.items() if value is not None}
    if (count := named.get("num_experts", named.get("num_local_experts"))) is None:
        return
    text["num_experts"] = count
    require_fields("config.json: text_config.", text, {"norm_topk_prob": True})
    require_fields("config.json: text_config.", named, {"mlp_only_layers": [], "decoder_sparse_step": 1})
    for name in ("num_experts_per_tok", "moe_intermediate_size"):
        if name not in named:
            raise KeyError(name)


def _tower(config: Mapping[str, Any]) -> TowerConfig:
    require_fields("config.json: vision_config.", config, {"hidden_act": "gelu_pytorch_tanh"}, needed=True)
    vision = VisionConfig(
        depth=int(config["depth"]),
        hidden_size=int(config["hidden_size"]),
        num_heads=int(config["num_heads"]),
        intermediate_size=int(config["intermediate_size"]),
        out_features=int(config["out_hidden_size"]),
        channels=int(config["in_channels"]),
        patch_size=int(config["patch_size"]),
        temporal_patch_size=int(config["temporal_patch_size"]),
        merge_size=int(config["spatial_merge_size"]),
    )
    positions = int(config["num_position_embeddings"])
    side = math.isqrt(positions)
    if side * side != positions:
        raise CheckpointError(f"config.json: vision_config.num_position_embeddings {positions} is not a square")
    levels = tuple(int(index) for index in config["deepstack_visual_indexes"])
    if list(levels) != sorted(set(levels)) or not all(0 <= level < vision.depth for level in levels):
        raise CheckpointError(
            f"config.json: vision_config.deepstack_visual_indexes {list(levels)} must ascend within 0.."
            f"{vision.depth - 1}"
        )
    return TowerConfig(vision, side, levels)


def _video_settings(directory: Path, vision: VisionConfig, images: ImageSettings) -> ImageSettings:
    """The tower normalises frames like pictures."""
    file = _video_file(directory)
    videos = image_settings(directory, file, _VIDEO_SECTION, vision)
    if (videos.mean, videos.std) != (images.mean, images.std):
        raise CheckpointError(
            f"{file}: image_mean {videos.mean} and image_std {videos.std} are not those of "
            f"pictures, {images.mean} and {images.std}"
        )
    return videos


def _video_file(directory: Path) -> str:
    """Without a file of their own videos are read by that of pictures, as in transformers."""
    return _VIDEO_FILE if (directory / _VIDEO_FILE).exists() else _PICTURE_FILE


def _frame_rule(directory: Path) -> FrameRule:
    """Absent fields, as in all published files, have the defaults of the published class; the publisher's training
    code writes its own."""
    where, fields = preprocessor_fields(directory, _VIDEO_SECTION, _video_file(directory))
    named = {name: value for name, value in fields.items() if value is not None}
    require_fields(f"{where}: ", named, {"num_frames": None, "cap_pixels_per_frame": False})
    return FrameRule(**{name: named[name] for name in ("fps", "min_frames", "max_frames") if name in named})
