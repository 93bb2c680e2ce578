"""Published JSON files of Qwen2.5-VL as values. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.checkpoints.published import read_config, require_fields
from models.interfaces.errors import CheckpointError
from models.qwen_vl.config import Qwen2VLConfig, VisionConfig, config_of, tower_config

_INTERMEDIATE_SIZE, _WINDOW_SIZE = 3420, 112
_FULL_ATTENTION_BLOCKS = (7, 15, 23, 31)


@dataclass(frozen=True)
class Qwen25VLConfig:
    """shared: the fields that Qwen2-VL has, too.

    window: side of an attention window in embedding rows (2x2 patches each). full_attention: numbers of the tower's
    blocks that attend to whole frames; all others attend inside windows.
    """

    shared: Qwen2VLConfig
    window: int
    full_attention: frozenset[int]


def load_config(directory: Path) -> Qwen25VLConfig:
    """config.json, flat as published or nested as transformers 5 writes it, and preprocessor_config.json."""
    config = read_config(directory)
    shared = config_of(directory, config, _tower)
    vision = config["vision_config"]
    return Qwen25VLConfig(
        shared=replace(shared, tokens_per_second=_tokens_per_second(vision)),
        window=_window(vision, shared.vision.factor),
        full_attention=_full_attention(vision, shared.vision.depth),
    )


def _tower(config: Mapping[str, Any]) -> VisionConfig:
    """The published class's hidden_size is that of no checkpoint, so it must be there. A width that is not the files'
    is refused with the tensors."""
    require_fields("config.json: vision_config.", config, {"hidden_act": "silu"})
    intermediate_size = int(config.get("intermediate_size", _INTERMEDIATE_SIZE))
    return tower_config(config, int(config["hidden_size"]), intermediate_size, config.get("out_hidden_size"))


def _window(config: Mapping[str, Any], factor: int) -> int:
    size = int(config.get("window_size", _WINDOW_SIZE))
    if size < factor or size % factor:
        raise CheckpointError(f"config.json: vision_config.window_size is {size}, expected a multiple of {factor}")
    return size // factor


def _full_attention(config: Mapping[str, Any], depth: int) -> frozenset[int]:
    blocks = config.get("fullatt_block_indexes", _FULL_ATTENTION_BLOCKS)
    if not isinstance(blocks, list | tuple) or not all(type(block) is int and 0 <= block < depth for block in blocks):
        raise CheckpointError(
            f"config.json: vision_config.fullatt_block_indexes is {blocks!r}, expected numbers of blocks below the "
            f"depth {depth}"
        )
    return frozenset(blocks)


def _tokens_per_second(config: Mapping[str, Any]) -> float:
    """Never guessed: the defaults of other readers differ."""
    rate = config.get("tokens_per_second")
    if not isinstance(rate, int | float) or isinstance(rate, bool) or rate <= 0:
        raise CheckpointError(
            f"config.json: vision_config.tokens_per_second is {rate!r}, expected a number of positions above 0"
        )
    return float(rate)
