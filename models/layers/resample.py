"""Bicubic resizing of pictures on the encoder's device, with the bytes that Pillow makes on a processor."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from models.interfaces.resizing import KEPT_WEIGHTS, WEIGHT_BITS, bicubic_weights
from models.layers.op import op


def resized(frames: Tensor, height: int, width: int) -> Tensor:
    """uint8 [n, any height, any width, channels] -> [n, height, width, channels]: models.interfaces.resizing.resize.
    First along the rows, then along the columns."""
    n, high, wide, channels = frames.shape
    if wide != width:
        lines = frames.reshape(n * high, wide, channels)
        frames = resample(lines, *_weights(wide, width, frames.device)).view(n, high, width, channels)
    if high != height:
        lines = frames.reshape(n, high, width * channels)
        frames = resample(lines, *_weights(high, height, frames.device)).view(n, height, width, channels)
    return frames


@op(cuda="models.layers.kernels.resample:resample")
def resample(lines: Tensor, first: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums along the middle axis: uint8 [lines, length, values] -> [lines, new length, values].

    first int32 [new length], weights int32 [new length, taps]: models.interfaces.resizing.bicubic_weights.
    """
    last = lines.shape[1] - 1
    total = torch.full((), 1 << (WEIGHT_BITS - 1), dtype=torch.int32, device=lines.device)
    for tap in range(weights.shape[1]):
        source = lines.index_select(1, (first + tap).clamp(max=last))
        total = total + source.int() * weights[:, tap, None]
    return (total >> WEIGHT_BITS).clamp(0, 255).to(torch.uint8)


@lru_cache(maxsize=KEPT_WEIGHTS)
def _weights(length: int, new_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    host = [torch.from_numpy(array) for array in bicubic_weights(length, new_length)]
    if device.type == "cuda":
        host = [tensor.pin_memory() for tensor in host]  # or the copy would wait for everything launched before
    first, weights = (tensor.to(device, non_blocking=True) for tensor in host)
    return first, weights
