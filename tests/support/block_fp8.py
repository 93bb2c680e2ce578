"""Block-scaled FP8, as the makers of Qwen3-VL publish it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def in_fp8(values: Tensor, block: Sequence[int]) -> tuple[Tensor, Tensor]:
    """e4m3 [rows, columns] with a factor for each block."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))  # [R, r, C, c]
    factors = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
    stored = (blocks / factors[:, None, :, None]).to(torch.float8_e4m3fn)
    return stored.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), factors
