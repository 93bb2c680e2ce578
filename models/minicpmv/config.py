"""The fields of a MiniCPM-V checkpoint's config.json and of its preprocessor that are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from models.checkpoints.published import (
    check_heads,
    preprocessor_fields,
    read_config,
    require_fields,
    require_text_fields,
)
from models.interfaces.errors import CheckpointError
from models.minicpmv.slicing import SliceRule

Version = Literal["2.5", "2.6", "4.0", "4.5"]
_VERSIONS: tuple[Version, ...] = ("2.5", "2.6", "4.0", "4.5")


@dataclass(frozen=True)
class VisionConfig:
    """The SigLIP tower."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    table_side: int
    """Learned positions per side."""
    norm_eps: float

    def __post_init__(self) -> None:
        check_heads(self.hidden_size, self.num_heads, ("hidden_size", "num_attention_heads"))


@dataclass(frozen=True)
class MiniCPMVConfig:
    """text: the flat config.json itself, whose other fields are the language model's."""

    version: Version
    vision: VisionConfig
    slicing: SliceRule
    num_queries: int
    use_image_id: bool
    pixel_mean: float
    pixel_std: float
    hidden_size: int
    """The hidden size of the language model and of the resampler."""
    text: Mapping[str, Any]

    @property
    def flat_positions(self) -> bool:
        """Whether the tower gets no sizes and treats every slice as a picture of one row, as in 2.5."""
        return self.version == "2.5"

    @property
    def fuses_frames(self) -> bool:
        """Whether neighbouring frames share one set of queries, with a temporal position added to their keys, as in
        4.5."""
        return self.version == "4.5"


def load_config(directory: Path) -> MiniCPMVConfig:
    """CheckpointError names the field that is missing or not supported."""
    config = read_config(directory)
    where, preprocessor = preprocessor_fields(directory, "image_processor", "preprocessor_config.json")
    version = _version(config)
    require_text_fields(directory, config)
    # The class default of the published code is true.
    require_fields("config.json: ", config, {"drop_vision_last_layer": False}, needed=True)
    try:
        vision = vision_config(config.get("vision_config") or {})
        slicing = _slicing(config, preprocessor)
        sizes = {"patch_size": vision.patch_size, "image_feature_size": int(config["query_num"])}
        require_fields(f"{where}: ", preprocessor, sizes, said="config.json says")
        return MiniCPMVConfig(
            version=version,
            vision=vision,
            slicing=SliceRule(
                scale_resolution=int(slicing.get("scale_resolution", 448)),
                unit=vision.patch_size,
                max_slices=int(slicing.get("max_slice_nums", 9)),
            ),
            num_queries=int(config["query_num"]),
            use_image_id=version != "2.5" and bool(slicing.get("use_image_id", True)),
            pixel_mean=one_value(where, preprocessor, "norm_mean"),
            pixel_std=one_value(where, preprocessor, "norm_std"),
            hidden_size=int(config["hidden_size"]),
            text=config,
        )
    except KeyError as error:
        raise CheckpointError(f"{directory}: config.json: field {error} is missing") from error


def _slicing(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """The published processors read the preprocessor's fields, which take precedence over config.json's."""
    fields = ("max_slice_nums", "scale_resolution", "slice_mode", "use_image_id")
    sources = (config, config.get("slice_config") or {}, preprocessor)
    slicing = {name: source[name] for source in sources for name in fields if source.get(name) is not None}
    if slicing.get("slice_mode") is False:
        # The published processors then read pictures of any number of patches, at their own size.
        raise CheckpointError("slice_mode false is not supported; max_slice_nums 1 keeps the overview alone")
    return slicing


def vision_config(fields: Mapping[str, Any]) -> VisionConfig:
    """Absent fields have the values of all published checkpoints."""
    require_fields("config.json: vision_config.", fields, {"hidden_act": "gelu_pytorch_tanh"})
    patch_size = int(fields.get("patch_size", 14))
    return VisionConfig(
        hidden_size=int(fields.get("hidden_size", 1152)),
        intermediate_size=int(fields.get("intermediate_size", 4304)),
        num_layers=int(fields.get("num_hidden_layers", 27)),
        num_heads=int(fields.get("num_attention_heads", 16)),
        patch_size=patch_size,
        table_side=int(fields.get("image_size", 980)) // patch_size,
        norm_eps=float(fields.get("layer_norm_eps", 1e-6)),
    )


def _version(config: Mapping[str, Any]) -> Version:
    # The first revisions of 2.5 name no version; the other model without one (2.0) has a different tower.
    value = config.get("version", 2.5)
    for version in _VERSIONS:
        if str(value) == version or value == float(version):
            return version
    raise CheckpointError(f"config.json: version {value!r} is not hosted; hosted are {', '.join(_VERSIONS)}")


def one_value(where: str, preprocessor: Mapping[str, Any], name: str) -> float:
    fields = preprocessor.get(name)
    values = {0.5} if fields is None else set(fields)
    if len(values) != 1:
        raise CheckpointError(f"{where}: {name} must be the same for all channels, not {values}")
    return float(values.pop())
