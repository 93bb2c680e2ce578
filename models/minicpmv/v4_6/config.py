"""Published JSON files of MiniCPM-V 4.6 and 4.7. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.checkpoints.published import preprocessor_fields, read_config, require_fields, section_of, token_id
from models.interfaces.errors import CheckpointError
from models.minicpmv.config import VisionConfig, one_value, vision_config
from models.minicpmv.slicing import SliceRule
from models.qwen_vl.v3_5.config import text_fields

_VISION_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size", "image_size"),
    *("layer_norm_eps", "hidden_act"),
)
_TOWER_FIXED: Mapping[str, Any] = {"window_kernel_size": [2, 2]}
_TEXT_MODELS = ("qwen3_5_text", "qwen3_5_moe_text")
_TOP_FIXED: Mapping[str, Any] = {"merge_kernel_size": [2, 2], "merger_times": 1}
_PROCESSOR_FIXED: Mapping[str, Any] = {"slice_mode": True, "stack_frames": 1}
MODES = {"16x": 4, "4x": 2}
"""By downsample_mode: patches per side that become one token."""
_INSERT_LAYER = 6
_SECTION = (11, 11, 10)
"""mrope_section of files without one, as of the published classes."""


@dataclass(frozen=True)
class MediaRule:
    """How pictures, or frames of videos, are cut."""

    slicing: SliceRule
    use_image_id: bool
    max_frames: int


@dataclass(frozen=True)
class MiniCPMV46Config:
    """merge: patches per side that become one token, 4 (16x mode) or 2 (4x mode, without the merger in the tower), of
    requests that name no mode.
    insert_layer: number of the block behind which the tower merges. canvas: positions have three axes, as in 4.7.
    text: as of models.qwen_vl.v3_5.config.text_fields."""

    vision: VisionConfig
    merge: int
    insert_layer: int
    canvas: bool
    images: MediaRule
    videos: MediaRule
    pixel_mean: float
    pixel_std: float
    image_token_id: int
    video_token_id: int
    text: Mapping[str, Any]

    @property
    def hidden_size(self) -> int:
        return int(self.text["hidden_size"])

    def in_mode(self, mode: str) -> MiniCPMV46Config:
        """The same in another of MODES: the sides of slices are whole numbers of its squares."""
        unit = self.vision.patch_size * MODES[mode]
        images, videos = (
            replace(rule, slicing=replace(rule.slicing, unit=unit)) for rule in (self.images, self.videos)
        )
        return replace(self, merge=MODES[mode], images=images, videos=videos)


def load_config(directory: Path) -> MiniCPMV46Config:
    """CheckpointError names the file and the field that is missing or not supported."""
    config = read_config(directory)
    vision = section_of(config, "vision_config")
    if missing := [name for name in _VISION_FIELDS if vision.get(name) is None]:
        raise CheckpointError(f"{directory}: config.json: fields of vision_config are missing: {missing}")
    require_fields("config.json: vision_config.", vision, _TOWER_FIXED)
    require_fields("config.json: ", config, _TOP_FIXED)
    where, images = preprocessor_fields(directory, "image_processor", "preprocessor_config.json")
    video_place, videos = preprocessor_fields(directory, "video_processor", "video_preprocessor_config.json")
    mode = images.get("downsample_mode") or config.get("downsample_mode") or "16x"
    if mode not in MODES:
        raise CheckpointError(f"{where}: downsample_mode {mode!r} is not one of {', '.join(MODES)}")
    merge, patch = MODES[mode], int(vision["patch_size"])
    named = [section.get("insert_layer_id") for section in (config, vision)]
    insert = next((number for number in named if number is not None), _INSERT_LAYER)
    if insert >= int(vision["num_hidden_layers"]) - 1:
        raise CheckpointError(
            f"config.json: insert_layer_id is {insert}, expected a number of one of {vision['num_hidden_layers']} "
            "layers but the last"
        )
    if (kind := section_of(config, "text_config").get("model_type", _TEXT_MODELS[0])) not in _TEXT_MODELS:
        raise CheckpointError(f"config.json: text_config.model_type {kind!r} is not one of {', '.join(_TEXT_MODELS)}")
    text = text_fields(directory, {**section_of(config, "text_config"), **_shared(config)})
    try:
        return MiniCPMV46Config(
            vision=vision_config(vision),
            merge=merge,
            insert_layer=insert,
            canvas=config.get("model_type") == "minicpmv4_7",
            images=_media_rule(where, images, patch, merge),
            videos=_media_rule(video_place, videos, patch, merge),
            pixel_mean=one_value(where, images, "image_mean"),
            pixel_std=one_value(where, images, "image_std"),
            image_token_id=token_id(config, "image_token_id"),
            video_token_id=token_id(config, "video_token_id"),
            text=text,
        )
    except KeyError as error:
        raise CheckpointError(f"{directory}: config.json: field {error} is missing") from error


def _media_rule(where: str, fields: Mapping[str, Any], patch: int, merge: int) -> MediaRule:
    """Sides of slices are whole numbers of squares of 4 x 4 patches (4x mode: 2 x 2)."""
    require_fields(f"{where}: ", fields, {**_PROCESSOR_FIXED, "patch_size": patch})
    slicing = SliceRule(
        int(fields.get("scale_resolution") or 448), patch * merge, int(fields.get("max_slice_nums") or 9)
    )
    return MediaRule(slicing, bool(fields.get("use_image_id", True)), int(fields.get("max_num_frames") or 128))


def _shared(config: Mapping[str, Any]) -> dict[str, Any]:
    """The tie of the top level decides, and M-RoPE always interleaves; files of 4.6 have no section."""
    text = section_of(config, "text_config")
    rope = {"mrope_section": list(_SECTION), **(text.get("rope_parameters") or {}), "mrope_interleaved": True}
    return {"rope_parameters": rope, "tie_word_embeddings": bool(config.get("tie_word_embeddings", False))}
