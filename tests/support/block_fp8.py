"""Checkpoints in block-scaled FP8, as the makers of Qwen3-VL publish them, made from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

BLOCK = (16, 24)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
"""quantization_config of config.json."""


def quantised(
    tensors: Mapping[str, Tensor], chosen: Callable[[str], bool]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors with the chosen ones in FP8 beside their factors; and what the values stand for."""
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, value in tensors.items():
        stored[name] = meant[name] = value
        if chosen(name):
            stored[name], stored[f"{name}_scale_inv"], meant[name] = in_fp8(value)
    assert len(stored) > len(meant)
    return stored, meant


def in_fp8(values: Tensor, block: Sequence[int] = BLOCK) -> tuple[Tensor, Tensor, Tensor]:
    """e4m3 with a factor for each block, and what that stands for."""
    *leading, rows, columns = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))  # [..., R, r, C, c]
    factors = blocks.abs().amax((-3, -1)).clamp(min=1e-6) / 448
    stored = (blocks / factors[..., :, None, :, None]).to(torch.float8_e4m3fn)
    meant = stored.float() * factors[..., :, None, :, None]
    whole = (slice(None),) * len(leading) + (slice(rows), slice(columns))

    def flat(tensor: Tensor) -> Tensor:
        return tensor.flatten(-2).flatten(-3, -2)[whole].contiguous()

    return flat(stored), factors, flat(meant)
