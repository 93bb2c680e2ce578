"""Rooflines of the encoders of the published sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.roofline.gpu import FLOPS, bytes_per_second
from models.interfaces.capturable import Plan
from models.layers.packed import WINDOW
from models.minicpmv.v4_6.encoder import MiniCPMV46Encoder
from models.protocol import VisionEncoder
from models.qwen3_asr.config import CHUNK_FRAMES, CHUNK_ROWS, MEL_BANDS
from models.qwen3_asr.encoder import BANDS, AudioEncoder
from models.qwen_vl.v3.vision import Qwen3VLEncoder


def encoder_floor(name: str, encoder: VisionEncoder, plan: Plan, embeds: int) -> float:
    """Roofline of a pass in seconds, from the plan's own segments. embeds: rows that the pass puts out.

    Raises ValueError for a family whose arithmetic is not here.
    """
    if isinstance(encoder, Qwen3VLEncoder):
        vision, levels = encoder.config, len(encoder.deepstack)
        sizes = vision.depth, vision.hidden_size, vision.intermediate_size, vision.out_features
        return qwen3_vl_encoder(_lengths(plan, "cu_seqlens"), *sizes, levels)
    if isinstance(encoder, AudioEncoder):
        return audio_encoder(encoder, plan.required["patches"] // CHUNK_ROWS, _lengths(plan, "cu_seqlens"))
    if isinstance(encoder, MiniCPMV46Encoder):
        return minicpmv_4_6_encoder(encoder, _lengths(plan, "cu_slices"))
    if name.startswith("qwen2_vl"):
        return qwen2_vl_encoder(_lengths(plan, "cu_seqlens"), 1536 if name.endswith("2b") else 3584)
    if name.startswith("qwen2_5_vl"):
        frames, windows = _lengths(plan, "cu_seqlens"), _lengths(plan, "cu_window_seqlens")
        return qwen2_5_vl_encoder(frames, windows, 2048 if name.endswith("3b") else 3584)
    if name.startswith("kimi_vl"):
        return moonvit_encoder(_lengths(plan, "cu_seqlens"))
    if name.startswith("minicpmv"):
        return minicpmv_encoder(_lengths(plan, "cu_slices"), embeds // 64, 64, 4096)
    raise ValueError(f"{name} has no roofline: add its family to benchmarks/roofline/encoders.py")


def _lengths(plan: Plan, name: str) -> Sequence[int]:
    return [int(length) for length in np.diff(plan.arrays[name]) if length]


def audio_encoder(encoder: AudioEncoder, chunks: int, windows: Sequence[int]) -> float:
    """Seconds for so many chunks of a second, and windows of the given numbers of rows."""
    config, rows = encoder.config, sum(windows)
    width, channels, inner = config.hidden_size, config.conv_channels, config.intermediate_size
    half, quarter = (MEL_BANDS // 2) * (CHUNK_FRAMES // 2), (MEL_BANDS // 4) * (CHUNK_FRAMES // 4)
    conv = half * 9 * channels + (quarter + BANDS * CHUNK_ROWS) * 9 * channels**2
    flops = 2 * chunks * (conv + CHUNK_ROWS * channels * BANDS * width)
    flops += 2 * rows * (config.depth * (4 * width**2 + 2 * width * inner) + width**2 + width * config.out_features)
    flops += 4 * config.depth * width * sum(length**2 for length in windows)
    weights = 2 * sum(parameter.numel() for parameter in encoder.parameters())
    return max(flops / FLOPS, weights / bytes_per_second())


def qwen2_vl_encoder(sequences: Sequence[int], out_features: int) -> float:
    """Seconds for attention sequences of the given numbers of patches; 32 layers of width 1280."""
    patches = sum(sequences)
    linear = 2 * patches * 1176 * 1280 + 32 * 2 * patches * (4 * 1280**2 + 2 * 1280 * 5120)
    linear += 2 * (patches // 4) * (5120**2 + 5120 * out_features)
    attention = 32 * 4 * 1280 * sum(length**2 for length in sequences)
    return max((linear + attention) / FLOPS, 1.33e9 / bytes_per_second())


def qwen2_5_vl_encoder(frames: Sequence[int], windows: Sequence[int], out_features: int) -> float:
    """Seconds for frame pairs and windows of the given numbers of patches; 32 layers of width 1280 and inner width
    3420, four of which attend to whole frame pairs."""
    patches = sum(frames)
    linear = 2 * patches * 1176 * 1280 + 32 * 2 * patches * (4 * 1280**2 + 3 * 1280 * 3420)
    linear += 2 * (patches // 4) * (5120**2 + 5120 * out_features)
    squares = 4 * sum(length**2 for length in frames) + 28 * sum(length**2 for length in windows)
    weights = 1176 * 1280 + 32 * (4 * 1280**2 + 3 * 1280 * 3420) + 5120**2 + 5120 * out_features
    return max((linear + 4 * 1280 * squares) / FLOPS, 2 * weights / bytes_per_second())


def moonvit_encoder(sequences: Sequence[int]) -> float:
    """Seconds; 27 layers of width 1152, projector to 2048."""
    patches = sum(sequences)
    linear = 2 * patches * 588 * 1152 + 27 * 2 * patches * (4 * 1152**2 + 2 * 1152 * 4304)
    linear += 2 * (patches // 4) * (4608**2 + 4608 * 2048)
    attention = 27 * 4 * 1152 * sum(length**2 for length in sequences)
    return max((linear + attention) / FLOPS, 0.895e9 / bytes_per_second())


def minicpmv_encoder(slices: Sequence[int], groups: int, queries: int, width: int) -> float:
    """Seconds for slices of the given numbers of patches; 27 layers of width 1152 and the resampler."""
    patches = sum(slices)
    tower = 2 * patches * 588 * 1152 + 27 * 2 * patches * (4 * 1152**2 + 2 * 1152 * 4304)
    tower += 27 * 4 * 1152 * sum(length**2 for length in slices)
    resampler = 2 * patches * 1152 * width + 4 * patches * width**2 + 4 * queries * width * patches
    resampler += 4 * groups * queries * width**2
    return max((tower + resampler) / FLOPS, 1.01e9 / bytes_per_second())


def minicpmv_4_6_encoder(encoder: MiniCPMV46Encoder, slices: Sequence[int]) -> float:
    """Seconds for slices of the given numbers of patches, a quarter of which pass the blocks behind the merger."""
    vision, patches, squares = encoder.config.vision, sum(slices), sum(length**2 for length in slices)
    width, inner = vision.hidden_size, vision.intermediate_size
    before = vision.num_layers if encoder.config.merge == 2 else encoder.config.insert_layer + 1
    behind = vision.num_layers - before
    block = 2 * (4 * width**2 + 2 * width * inner)
    flops = 2 * patches * 3 * vision.patch_size**2 * width
    flops += block * (before * patches + behind * patches // WINDOW)
    flops += 4 * width * (before * squares + behind * squares // WINDOW**2)
    if behind:
        flops += 2 * patches * 4 * width**2 + 4 * width * WINDOW * patches
        flops += 2 * (patches // WINDOW) * (WINDOW * width * WINDOW * inner + WINDOW * inner * width)
    tokens = patches // encoder.config.merge**2
    flops += 2 * tokens * ((WINDOW * width) ** 2 + WINDOW * width * encoder.config.hidden_size)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in encoder.parameters())
    return max(flops / FLOPS, weights / bytes_per_second())


def qwen3_vl_encoder(
    sequences: Sequence[int], depth: int, width: int, inner: int, out_features: int, levels: int
) -> float:
    """Seconds; a tower of `depth` layers, its merger and one more for each DeepStack level."""
    patches, block = sum(sequences), 4 * width
    linear = 2 * patches * 1536 * width + depth * 2 * patches * (4 * width**2 + 2 * width * inner)
    linear += (1 + levels) * 2 * (patches // 4) * (block**2 + block * out_features)
    attention = depth * 4 * width * sum(length**2 for length in sequences)
    weights = depth * (4 * width**2 + 2 * width * inner) + (1 + levels) * (block**2 + block * out_features)
    return max((linear + attention) / FLOPS, 2 * weights / bytes_per_second())
