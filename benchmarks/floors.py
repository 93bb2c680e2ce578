"""Least times on an H100: arithmetic over its measured bf16 rate or bytes over its measured bandwidth, the larger."""

from __future__ import annotations

from collections.abc import Sequence

FLOPS = 798e12
"""bf16 matrix product of 8192 x 8192 x 8192 on random data, measured."""
BYTES = 3.0e12
"""Device-to-device copy, measured."""


def qwen2_vl_encoder(sequences: Sequence[int], out_width: int) -> float:
    """Seconds for attention sequences of the given numbers of patches; 32 layers of width 1280."""
    patches = sum(sequences)
    linear = 2 * patches * 1176 * 1280 + 32 * 2 * patches * (4 * 1280**2 + 2 * 1280 * 5120)
    linear += 2 * (patches // 4) * (5120**2 + 5120 * out_width)
    attention = 32 * 4 * 1280 * sum(length**2 for length in sequences)
    return max((linear + attention) / FLOPS, 1.33e9 / BYTES)


def moonvit_encoder(sequences: Sequence[int]) -> float:
    """Seconds; 27 layers of width 1152, projector to 2048."""
    patches = sum(sequences)
    linear = 2 * patches * 588 * 1152 + 27 * 2 * patches * (4 * 1152**2 + 2 * 1152 * 4304)
    linear += 2 * (patches // 4) * (4608**2 + 4608 * 2048)
    attention = 27 * 4 * 1152 * sum(length**2 for length in sequences)
    return max((linear + attention) / FLOPS, 0.895e9 / BYTES)


def minicpmv_encoder(slices: Sequence[int], groups: int, queries: int, width: int) -> float:
    """Seconds for slices of the given numbers of patches; 27 layers of width 1152 and the resampler."""
    patches = sum(slices)
    tower = 2 * patches * 588 * 1152 + 27 * 2 * patches * (4 * 1152**2 + 2 * 1152 * 4304)
    tower += 27 * 4 * 1152 * sum(length**2 for length in slices)
    resampler = 2 * patches * 1152 * width + 4 * patches * width**2 + 4 * queries * width * patches
    resampler += 4 * groups * queries * width**2
    return max((tower + resampler) / FLOPS, 1.01e9 / BYTES)
