"""Adapters in the format of VoxCPM's fine-tuning: lora_config.json and lora_weights.safetensors in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from models.checkpoints.lora_folders import CONFIG, WEIGHTS
from models.checkpoints.published import read_json
from models.checkpoints.weight_files import tensors
from models.interfaces.errors import CheckpointError
from models.layers.adapters import LoraLayout, LoraPlace

MIN_RANK = 16
"""Smaller ranks are padded to this, the smallest depth of a tensor core's product."""
MAX_RANK = 256


@dataclass(frozen=True)
class LoraFile:
    """An adapter on disk whose header was read and checked. scale: alpha / r. groups: those of the places that it
    changes."""

    name: str
    weights: Path
    rank: int
    scale: float
    groups: frozenset[str]


def survey(folder: Path, places: Mapping[str, LoraPlace]) -> LoraFile:
    """Reads an adapter's configuration and the header of its weights. CheckpointError names the file, the tensor and
    what was expected."""
    rank, alpha = _config(folder / CONFIG)
    weights = folder / WEIGHTS
    expected: dict[str, tuple[str, tuple[int, int]]] = {}
    for place in places.values():
        for name, width in zip(place.names, place.widths, strict=True):
            expected[f"{name}.lora_A"] = place.group, (rank, place.inputs)
            expected[f"{name}.lora_B"] = place.group, (width, rank)
    shapes = {tensor.name: tensor.shape for tensor in tensors(weights)}
    groups = set()
    for name, shape in shapes.items():
        if name not in expected:
            raise CheckpointError(f"{weights}: {name} is no adapter of a layer that can have one")
        group, wanted = expected[name]
        if shape != wanted:
            raise CheckpointError(f"{weights}: {name} has shape {list(shape)}, this model needs {list(wanted)}")
        other = f"{name[:-1]}{'B' if name.endswith('A') else 'A'}"
        if other not in shapes:
            raise CheckpointError(f"{weights}: {name} is there and {other} is missing")
        groups.add(group)
    if not shapes:
        raise CheckpointError(f"{weights}: holds no adapter")
    return LoraFile(folder.name, weights, rank, alpha / rank, frozenset(groups))


def layout_of(files: Sequence[LoraFile], places: Mapping[str, LoraPlace]) -> LoraLayout:
    """The layout of a slot that can hold any of these adapters: with the largest rank, and with the places that any of
    them changes."""
    rank = max(MIN_RANK, *(file.rank for file in files))
    return LoraLayout(places, {group for file in files for group in file.groups}, 1 << (rank - 1).bit_length())


def read(file: LoraFile, layout: LoraLayout, dtype: torch.dtype) -> torch.Tensor:
    """The adapter as a slot [layout.size]. CheckpointError for values that are not finite in this dtype."""
    values = {tensor.name: tensor.read() for tensor in tensors(file.weights)}
    for name, value in values.items():
        scale = file.scale if name.endswith("B") else 1.0
        if not (value.float() * scale).to(dtype).isfinite().all():
            raise CheckpointError(f"{file.weights}: {name} has values that are not finite in {dtype}")
    return layout.flatten(values, file.scale, dtype)


def _config(path: Path) -> tuple[int, float]:
    """(r, alpha)."""
    section = read_json(path.parent, path.name).get("lora_config")
    if not isinstance(section, dict):
        raise CheckpointError(f"{path}: lora_config must be an object")
    rank, alpha = section.get("r"), section.get("alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise CheckpointError(f"{path}: lora_config.r must be an integer from 1 to {MAX_RANK}, not {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= torch.finfo(torch.float).max:
        raise CheckpointError(f"{path}: lora_config.alpha must be a number that float32 can hold, not {alpha!r:.40}")
    return rank, float(alpha)
