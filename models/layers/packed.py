"""Element-wise chains over packed rows of the encoders. Each is one operation, so that it is one kernel on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.op import op
from models.layers.rotary import rotate_half_split

WINDOW = 4
"""Rows of a window of 2 x 2 patches."""
PATCH_MULTIPLE = 64
"""Rows of patches of 588 values are not 16-byte aligned, which keeps GEMMs from wide loads."""


def byte_values(mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalised value of every byte, channel by channel: float32 [channels, 256]."""
    values = np.arange(256, dtype=np.float32) / np.float32(255)
    means, deviations = (np.array(of_channels, dtype=np.float32)[:, None] for of_channels in (mean, std))
    return torch.from_numpy((values - means) / deviations)


@lru_cache(maxsize=1024)
def raster_coordinates(rows: int, columns: int) -> np.ndarray:
    """Column and row of each patch, row by row: int32 [rows * columns, 2]. Cached: do not write to the array."""
    row, column = np.indices((rows, columns), dtype=np.int32)
    return np.stack((column.ravel(), row.ravel()), axis=1)


def runs_within(sizes: np.ndarray, limits: Sequence[int]) -> list[tuple[int, int]]:
    """(first, end) of runs of entries, as long as the sums of their sizes [entries, kinds] stay within `limits`, but of
    one entry at least."""
    ends, borders = np.insert(np.cumsum(sizes, axis=0), 0, 0, axis=0), [0]
    for entry in range(1, len(sizes)):
        if (ends[entry + 1] - ends[borders[-1]] > limits).any():
            borders.append(entry)
    return list(pairwise([*borders, len(sizes)]))


def widen_inputs(linear: nn.Linear, multiple: int = PATCH_MULTIPLE) -> None:
    """Pads the inputs of a loaded layer with zero weights up to a multiple. Its input must end in as many zeros."""
    more = -linear.in_features % multiple
    linear.weight = nn.Parameter(F.pad(linear.weight, (0, more)), requires_grad=False)
    linear.in_features += more


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """[n, width] -> like x; float32 statistics, one rounding."""
    return residual_layer_norm(x, None, norm.weight, norm.bias, norm.eps)


def add_layer_norm(x: Tensor, residual: Tensor, norm: nn.LayerNorm) -> Tensor:
    """residual += x, then its norm: both [n, width]; the sum is rounded to the dtype before its norm."""
    return residual_layer_norm(x, residual, norm.weight, norm.bias, norm.eps)


@op(cuda="models.layers.kernels.packed:residual_layer_norm")
def residual_layer_norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [n, width]; residual [n, width], updated in place, None for the norm of x alone; weight and bias [width]."""
    if residual is not None:
        residual += x
        x = residual
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@op(cuda="models.layers.kernels.packed:rotate_packed")
def rotate_packed(qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor) -> None:
    """rotate_half_split of the first `num_heads` heads (queries and keys) of qkv [n, heads, D], in place.

    cos and sin float32 [n, D/2].
    """
    rotated = qkv[:, :num_heads]
    rotated.copy_(rotate_half_split(rotated, cos, sin))


@op(cuda="models.layers.kernels.packed:window_attention")
def window_attention(qkv: Tensor, num_heads: int) -> Tensor:
    """Attention inside windows of WINDOW consecutive rows: qkv [n, 3 * heads * D] -> [n, heads * D]."""
    q, k, v = qkv.unflatten(0, (-1, WINDOW)).unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(qkv.shape[0], -1)


@op(cuda="models.layers.kernels.packed:byte_lookup")
def byte_lookup(pixels: Tensor, table: Tensor, width: int | None = None) -> Tensor:
    """table[channel, byte] of uint8 pixels [n, channels * values], one channel after the other -> table's dtype.

    table [channels, 256]. A single channel's table serves pixels in any order of channels. width: columns of the
    result, of which those behind the pixels are zero; by default as many as there are pixels.
    """
    channels = table.shape[0]
    offsets = torch.arange(0, 256 * channels, 256, dtype=torch.int32, device=pixels.device)
    index = pixels.unflatten(1, (channels, -1)).int() + offsets[:, None]
    values = table.flatten().index_select(0, index.flatten()).view(pixels.shape)
    return values if width is None else F.pad(values, (0, width - pixels.shape[1]))


@op(cuda="models.layers.kernels.packed:add_table_rows")
def add_table_rows(x: Tensor, table: Tensor, rows: Tensor, weights: Tensor) -> None:
    """x += the weighted sum of k rows of a learned table, which is rounded to x's dtype first.

    x [n, width], updated in place; table [entries, width]; rows int32 and weights float32 [n, k].
    """
    total = torch.zeros_like(x, dtype=weights.dtype)
    for entry in range(rows.shape[1]):
        total.addcmul_(table.index_select(0, rows[:, entry]), weights[:, entry, None])
    x += total.to(x.dtype)
