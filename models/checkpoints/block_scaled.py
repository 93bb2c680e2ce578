"""Block-scaled FP8 checkpoints: weights in e4m3, and one factor for each block of rows and columns beside them.

Weights are multiplied by their factors when they are loaded, so that every family and kernel has weights of its usual
dtype.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from models.checkpoints.published import fp8_block, read_optional_json
from models.interfaces.errors import CheckpointError

DTYPE = "F8_E4M3"
"""The dtype's name in the files."""
SUFFIX = "_scale_inv"
"""Suffix of the name of a weight's factors. A value is the stored one times its factor."""


def block_of(directory: Path) -> tuple[int, int] | None:
    """Rows and columns of a block, from the checkpoint's config.json; None if it is not in FP8."""
    config = read_optional_json(directory, "config.json")
    sections = (config, *(value for value in config.values() if isinstance(value, dict)))
    return next((block for block in map(fp8_block, sections) if block is not None), None)


def check_scale(name: str, shape: tuple[int, ...], scale: Tensor, block: tuple[int, int]) -> None:
    """Raises CheckpointError unless `scale` has a factor for each block of the last two axes of `shape`, where the last
    blocks of an axis may be smaller."""
    if len(shape) < 2:
        raise CheckpointError(f"tensor {name} has shape {shape}; in FP8 only matrices are supported")
    *leading, rows, columns = shape
    expected = (*leading, -(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != expected:
        raise CheckpointError(f"tensor {name}{SUFFIX} has shape {tuple(scale.shape)}, expected {expected}")


def dequantised(values: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """e4m3 [..., rows, columns] times the factors of its blocks -> float32."""
    rows, columns = values.shape[-2:]
    factors = scale.float().repeat_interleave(block[0], dim=-2)[..., :rows, :]
    return values.to(torch.float32) * factors.repeat_interleave(block[1], dim=-1)[..., :columns]
