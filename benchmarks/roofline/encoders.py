"""Rooflines of the encoders of the published sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.roofline.gpu import FLOPS, bytes_per_second
from models.interfaces.capturable import Plan
from models.kimi_vl.vision import KimiVisionEncoder
from models.layers.packed import WINDOW
from models.minicpmv.encoder import MiniCPMVEncoder
from models.minicpmv.v4_6.encoder import MiniCPMV46Encoder
from models.protocol import VisionEncoder
from models.qwen3_asr.config import CHUNK_FRAMES, CHUNK_ROWS, MEL_BANDS
from models.qwen3_asr.encoder import BANDS, AudioEncoder
from models.qwen_vl.encoder import PatchEncoder
from models.qwen_vl.v3.vision import Qwen3VLEncoder
from models.qwen_vl.windowed_vision import Qwen25VLEncoder


def encoder_floor(encoder: VisionEncoder, plan: Plan, embeds: int) -> float:
    """Roofline of a pass in seconds, from the plan's own segments. embeds: rows that the pass puts out.

    Raises TypeError for a family whose arithmetic is not here.
    """
    if isinstance(encoder, AudioEncoder):
        return audio_encoder(encoder, plan.required["patches"] // CHUNK_ROWS, _lengths(plan, "cu_seqlens"))
    if isinstance(encoder, MiniCPMV46Encoder):
        return minicpmv_4_6_encoder(encoder, _lengths(plan, "cu_slices"))
    if isinstance(encoder, MiniCPMVEncoder):
        return minicpmv_encoder(_lengths(plan, "cu_slices"), embeds // 64, 64, 4096)
    if isinstance(encoder, KimiVisionEncoder):
        sequences = _lengths(plan, "cu_seqlens")
        return merged_tower((588, 1152, 4304, 2048), 27, sum(sequences), 27 * _squares(sequences))
    if isinstance(encoder, PatchEncoder):
        return qwen_vl_encoder(encoder, plan)
    raise TypeError(f"{type(encoder).__name__} has no roofline: add its family to benchmarks/roofline/encoders.py")


def _lengths(plan: Plan, name: str) -> Sequence[int]:
    return [int(length) for length in np.diff(plan.arrays[name]) if length]


def _squares(lengths: Sequence[int]) -> int:
    return sum(length**2 for length in lengths)


def audio_encoder(encoder: AudioEncoder, chunks: int, windows: Sequence[int]) -> float:
    """Seconds for so many chunks of a second, and windows of the given numbers of rows."""
    config, rows = encoder.config, sum(windows)
    width, channels, inner = config.hidden_size, config.conv_channels, config.intermediate_size
    half, quarter = (MEL_BANDS // 2) * (CHUNK_FRAMES // 2), (MEL_BANDS // 4) * (CHUNK_FRAMES // 4)
    conv = half * 9 * channels + (quarter + BANDS * CHUNK_ROWS) * 9 * channels**2
    flops = 2 * chunks * (conv + CHUNK_ROWS * channels * BANDS * width)
    flops += 2 * rows * (config.depth * (4 * width**2 + 2 * width * inner) + width**2 + width * config.out_features)
    flops += 4 * config.depth * width * _squares(windows)
    weights = 2 * sum(parameter.numel() for parameter in encoder.parameters())
    return max(flops / FLOPS, weights / bytes_per_second())


def merged_tower(
    sizes: tuple[int, int, int, int], depth: int, patches: int, squares: int, matrices: int = 2, mergers: int = 1
) -> float:
    """Seconds of a tower and of mergers that put 2 x 2 patches side by side. sizes: values of a patch, width, inner
    width of an MLP with so many matrices, width of the output. squares: of the numbers of patches that attend to each
    other, over all blocks."""
    values, width, inner, out_features = sizes
    tower = values * width + depth * (4 * width**2 + matrices * width * inner)
    merging = mergers * ((4 * width) ** 2 + 4 * width * out_features)
    flops = 2 * patches * tower + 2 * (patches // 4) * merging + 4 * width * squares
    return max(flops / FLOPS, 2 * (tower + merging) / bytes_per_second())


def qwen_vl_encoder(encoder: PatchEncoder, plan: Plan) -> float:
    """Seconds; Qwen2.5-VL attends to whole frame pairs in some of its blocks, and in the others inside windows."""
    vision, frames = encoder.config, _lengths(plan, "cu_seqlens")
    squares, matrices, mergers = vision.depth * _squares(frames), 2, 1
    if isinstance(encoder, Qwen25VLEncoder):
        whole, matrices = len(encoder.full_attention), 3
        windows = _squares(_lengths(plan, "cu_window_seqlens"))
        squares = whole * _squares(frames) + (vision.depth - whole) * windows
    elif isinstance(encoder, Qwen3VLEncoder):
        mergers += len(encoder.deepstack)
    sizes = math.prod(vision.patch_shape), vision.hidden_size, vision.intermediate_size, vision.out_features
    return merged_tower(sizes, vision.depth, sum(frames), squares, matrices, mergers)


def minicpmv_encoder(slices: Sequence[int], groups: int, queries: int, width: int) -> float:
    """Seconds for slices of the given numbers of patches; 27 layers of width 1152 and the resampler."""
    patches = sum(slices)
    tower = 2 * patches * (588 * 1152 + 27 * (4 * 1152**2 + 2 * 1152 * 4304)) + 27 * 4 * 1152 * _squares(slices)
    resampler = 2 * patches * 1152 * width + 4 * patches * width**2 + 4 * queries * width * patches
    resampler += 4 * groups * queries * width**2
    return max((tower + resampler) / FLOPS, 1.01e9 / bytes_per_second())


def minicpmv_4_6_encoder(encoder: MiniCPMV46Encoder, slices: Sequence[int]) -> float:
    """Seconds for slices of the given numbers of patches, a quarter of which pass the blocks behind the merger."""
    vision, patches, squares = encoder.config.vision, sum(slices), _squares(slices)
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
