"""The configuration of Qwen2-VL and Qwen2.5-VL, from the published JSON files. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.checkpoints.published import (
    check_heads,
    of_channels,
    preprocessor_fields,
    read_config,
    require_fields,
    require_text_fields,
    section_of,
    token_id,
)
from models.interfaces.errors import CheckpointError
from models.layers.rope_field import rope_field

NEWER = "Qwen2_5_VLForConditionalGeneration"
"""The architecture of Qwen2.5-VL."""
ROTARY_THETA = 10_000.0
"""Base of the vision towers' rotary frequencies."""
_STEPS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3, "rescale_factor": 1 / 255}
"""The steps of the published preprocessing: bicubic resizing, bytes scaled by 1 / 255, normalisation."""


@dataclass(frozen=True)
class VisionConfig:
    """The fields of vision_config, under names that the Qwen-VL families share."""

    depth: int
    hidden_size: int
    """Width of the tower (Qwen2-VL: embed_dim)."""
    num_heads: int
    intermediate_size: int
    out_features: int
    """Width of the language model (Qwen2-VL: hidden_size)."""
    channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int

    def __post_init__(self) -> None:
        check_heads(self.hidden_size, self.num_heads, ("embed_dim or hidden_size", "num_heads"))

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Width of the patches of an embedding side by side."""
        return self.hidden_size * self.merged_patches

    @property
    def patch_shape(self) -> tuple[int, int, int, int]:
        """Axes of the columns of a patch row: channel, time, y, x."""
        return self.channels, self.temporal_patch_size, self.patch_size, self.patch_size

    @property
    def patch_values(self) -> int:
        return self.channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_patches(self) -> int:
        """Number of patches in one embedding row."""
        return self.merge_size**2

    @property
    def factor(self) -> int:
        """Pixels; the sides of a resized picture are multiples of it."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True)
class ImageSettings:
    """preprocessor_config.json: bounds on the pixels of a resized picture, and the normalisation of its channels."""

    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class WindowConfig:
    """side: of an attention window in embedding rows (2x2 patches each). full_attention: numbers of the tower's blocks
    that attend to whole frames; all others attend inside windows."""

    side: int
    full_attention: frozenset[int]


@dataclass(frozen=True)
class Qwen2VLConfig:
    """What the checkpoint's files say about the model."""

    text: Mapping[str, Any]
    """The language model's fields, with the flat names of the published config.json."""
    vision: VisionConfig
    images: ImageSettings
    image_token_id: int
    video_token_id: int
    tokens_per_second: float | None = None
    """Positions on the time axis in a second of video; None, in Qwen2-VL: one for each frame pair."""
    windows: WindowConfig | None = None
    """None in Qwen2-VL."""


def load_config(directory: Path) -> Qwen2VLConfig:
    """Reads config.json, flat as published or nested as transformers 5 writes it, and preprocessor_config.json. Raises
    CheckpointError that names the file and the field."""
    config = read_config(directory)
    newer = NEWER in (config.get("architectures") or ())
    nested = config.get("text_config")
    text: dict[str, Any] = dict(nested) if isinstance(nested, dict) and "hidden_size" in nested else dict(config)
    # transformers before 5 wrote the field into text_config, where 5 still looks for it.
    text["tie_word_embeddings"] = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    require_text_fields(directory, text)
    mrope_section(text)
    try:
        fields = section_of(config, "vision_config")
        vision = _newer_tower(fields) if newer else _tower(fields)
        if vision.out_features != text["hidden_size"]:
            raise CheckpointError(
                f"config.json: vision_config says that embeddings have {vision.out_features} values, expected the "
                f"language model's hidden_size {text['hidden_size']}"
            )
        return Qwen2VLConfig(
            text=text,
            vision=vision,
            images=image_settings(directory, "preprocessor_config.json", "image_processor", vision),
            image_token_id=token_id(config, "image_token_id"),
            video_token_id=token_id(config, "video_token_id"),
            # Never guessed: the defaults of other readers differ.
            tokens_per_second=float(fields["tokens_per_second"]) if newer else None,
            windows=_windows(fields, vision) if newer else None,
        )
    except KeyError as error:
        raise CheckpointError(f"{directory}: config.json: field {error} is missing") from error


def mrope_section(text: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and content of the field that divides the rotary frequencies among the position axes. Raises CheckpointError
    if there are not three axes, since the decoder would run and give wrong answers.
    """
    name, rope = rope_field(text)
    sections = rope.get("mrope_section")
    if not isinstance(sections, list) or len(sections) != 3:
        raise CheckpointError(
            f"config.json: {name}.mrope_section is {sections!r}, expected three numbers (frequencies of time, height "
            "and width)"
        )
    return name, rope


def _tower(config: Mapping[str, Any]) -> VisionConfig:
    require_fields("config.json: vision_config.", config, {"hidden_act": "quick_gelu"})
    hidden_size = int(config.get("embed_dim", 1280))
    return _tower_of(config, hidden_size, int(hidden_size * config.get("mlp_ratio", 4)), config.get("hidden_size"))


def _newer_tower(config: Mapping[str, Any]) -> VisionConfig:
    """The published class's hidden_size is that of no checkpoint, so it must be there. A width that is not the files'
    is refused with the tensors."""
    require_fields("config.json: vision_config.", config, {"hidden_act": "silu"})
    sizes = int(config["hidden_size"]), int(config.get("intermediate_size", 3420))
    return _tower_of(config, *sizes, config.get("out_hidden_size"))


def _tower_of(
    config: Mapping[str, Any], hidden_size: int, intermediate_size: int, out_features: int | None
) -> VisionConfig:
    """With the fields that mean the same in Qwen2-VL and Qwen2.5-VL. Absent ones have the defaults of the published
    classes: transformers before 5 left those out when it saved a checkpoint, as many fine-tuned ones were."""
    return VisionConfig(
        depth=int(config.get("depth", 32)),
        hidden_size=hidden_size,
        num_heads=int(config.get("num_heads", 16)),
        intermediate_size=intermediate_size,
        out_features=3584 if out_features is None else out_features,
        channels=int(config.get("in_channels", config.get("in_chans", 3))),
        patch_size=int(config.get("patch_size", 14)),
        temporal_patch_size=int(config.get("temporal_patch_size", 2)),
        merge_size=int(config.get("spatial_merge_size", 2)),
    )


def _windows(config: Mapping[str, Any], vision: VisionConfig) -> WindowConfig:
    size, blocks = config.get("window_size", 112), config.get("fullatt_block_indexes", (7, 15, 23, 31))
    if size % vision.factor:
        raise CheckpointError(
            f"config.json: vision_config.window_size is {size}, expected a multiple of {vision.factor}"
        )
    if not set(blocks) <= set(range(vision.depth)):
        raise CheckpointError(
            f"config.json: vision_config.fullatt_block_indexes is {blocks}, expected numbers of blocks below the depth "
            f"{vision.depth}"
        )
    return WindowConfig(size // vision.factor, frozenset(blocks))


def image_settings(directory: Path, file: str, section: str, vision: VisionConfig) -> ImageSettings:
    """Settings of pictures or videos. Raises CheckpointError for other patch sizes than those of config.json, for other
    steps than the published ones, and for limits that are missing: the defaults of other libraries are not those of the
    published models.

    The numbers in `size` are pixels, although they are called edges. For pictures min_pixels and max_pixels take
    precedence over `size`, as in transformers, whose video processor ignores them.
    """
    where, settings = preprocessor_fields(directory, section, file)
    if not settings:
        raise CheckpointError(f"{directory}: {file} is missing or empty")
    sizes = {"patch_size": vision.patch_size, "temporal_patch_size": vision.temporal_patch_size}
    require_fields(f"{where}: ", settings, {**sizes, "merge_size": vision.merge_size}, said="config.json says")
    require_fields(f"{where}: ", settings, _STEPS)
    named = settings if section == "image_processor" else {}
    size = {name: value for name, value in (settings.get("size") or {}).items() if value is not None}
    try:
        return ImageSettings(
            min_pixels=named.get("min_pixels") or size["shortest_edge"],
            max_pixels=named.get("max_pixels") or size["longest_edge"],
            mean=of_channels(settings, "image_mean", where, vision.channels),
            std=of_channels(settings, "image_std", where, vision.channels),
        )
    except KeyError as error:
        raise CheckpointError(f"{directory}: {where}: field {error} is missing") from error
