"""Rooflines of an H100: the larger of arithmetic over its measured bf16 rate and bytes over its measured bandwidth."""

from __future__ import annotations

from collections.abc import Sequence

FLOPS = 798e12
"""FLOP/s of a bf16 GEMM of 8192 x 8192 x 8192 on random data, measured."""
BYTES = 3.0e12
"""Bytes per second of a device-to-device copy, measured."""


def qwen2_vl_encoder(sequences: Sequence[int], out_features: int) -> float:
    """Seconds for attention sequences of the given numbers of patches; 32 layers of width 1280."""
    patches = sum(sequences)
    linear = 2 * patches * 1176 * 1280 + 32 * 2 * patches * (4 * 1280**2 + 2 * 1280 * 5120)
    linear += 2 * (patches // 4) * (5120**2 + 5120 * out_features)
    attention = 32 * 4 * 1280 * sum(length**2 for length in sequences)
    return max((linear + attention) / FLOPS, 1.33e9 / BYTES)


def qwen2_5_vl_encoder(frames: Sequence[int], windows: Sequence[int], out_features: int) -> float:
    """Seconds for frame pairs and windows of the given numbers of patches; 32 layers of width 1280 and inner width
    3420, four of which attend to whole frame pairs."""
    patches = sum(frames)
    linear = 2 * patches * 1176 * 1280 + 32 * 2 * patches * (4 * 1280**2 + 3 * 1280 * 3420)
    linear += 2 * (patches // 4) * (5120**2 + 5120 * out_features)
    squares = 4 * sum(length**2 for length in frames) + 28 * sum(length**2 for length in windows)
    weights = 1176 * 1280 + 32 * (4 * 1280**2 + 3 * 1280 * 3420) + 5120**2 + 5120 * out_features
    return max((linear + 4 * 1280 * squares) / FLOPS, 2 * weights / BYTES)


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


def qwen3_vl_encoder(
    sequences: Sequence[int], depth: int, width: int, inner: int, out_features: int, levels: int
) -> float:
    """Seconds; a tower of `depth` layers, its merger and one more for each DeepStack level."""
    patches, block = sum(sequences), 4 * width
    linear = 2 * patches * 1536 * width + depth * 2 * patches * (4 * width**2 + 2 * width * inner)
    linear += (1 + levels) * 2 * (patches // 4) * (block**2 + block * out_features)
    attention = depth * 4 * width * sum(length**2 for length in sequences)
    weights = depth * (4 * width**2 + 2 * width * inner) + (1 + levels) * (block**2 + block * out_features)
    return max((linear + attention) / FLOPS, 2 * weights / BYTES)
