"""The vision tower of Qwen3-VL with its mergers, as a capturable encoder.

Rows are patches in the order of models/qwen_vl/encoder.py. A learned position table is interpolated to each grid, and
the outputs of some blocks become features of the language model's first layers (DeepStack, arXiv:2406.04334).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from models.interfaces.capturable import Bucket, BufferSpec, Plan
from models.interfaces.media import MediaItem
from models.layers.dense_segments import bounds
from models.layers.mlp import Merger
from models.layers.packed import add_table_rows, layer_norm
from models.layers.rotary import rotary_cos_sin
from models.layers.tower import TowerBlock, run_tower
from models.qwen_vl.config import ImageSettings
from models.qwen_vl.encoder import NORM_EPS, PatchEncoder, block_coordinates
from models.qwen_vl.items import grid_of
from models.qwen_vl.v3.config import TowerConfig

_CACHED_GRIDS = 64
_NEIGHBOURS = 4


class Qwen3VLEncoder(PatchEncoder):
    """Implements models.protocol.VisionEncoder.

    Further buffers: table_rows int32 and table_weights float32 [patches, 4], the position table's entries around the
    patch, with weights of 0 in padding.
    """

    bucket_sizes = (
        *(256, 320, 400, 512, 640, 784, 1024, 1200, 1568, 1920, 2400, 3072, 3520, 4096),
        *(4800, 5504, 6272, 7168, 8192, 9600, 11264, 13824, 16384),
    )
    """Dense where single pictures and packs of a few fall (256: the smallest, 784: 448 x 448, 1200: 640 x 480, 3520:
    1280 x 720, 4096: 1024 x 1024, 6272: 16 frames of 448 x 448, 8192: 1920 x 1080)."""
    exact_sizes = ((1, 784), (1, 1024), (1, 3520), (1, 4096), (1, 8160), (8, 784))
    """Pictures of 448 x 448, 512 x 512, 640 x 480, 1280 x 720, 1024 x 1024 and 1920 x 1080, and 16 frames of 448 x
    448."""

    def __init__(self, config: TowerConfig, images: ImageSettings) -> None:
        vision = config.vision
        super().__init__(vision, images, bias=True)
        self.tower = config
        self.position_table = nn.Parameter(torch.empty(config.table_side**2, vision.hidden_size))
        self.blocks = nn.ModuleList(
            TowerBlock(vision.hidden_size, vision.intermediate_size, vision.num_heads, "gelu_tanh", NORM_EPS)
            for _ in range(vision.depth)
        )
        merged = vision.merged_size, vision.out_features
        self.merger = Merger(nn.LayerNorm(vision.hidden_size, eps=NORM_EPS), *merged)
        self.deepstack = nn.ModuleList(
            Merger(nn.LayerNorm(vision.merged_size, eps=NORM_EPS), *merged) for _ in config.deepstack
        )

    def plan(self, items: Sequence[MediaItem]) -> Plan:
        rows, weights = [np.empty((0, _NEIGHBOURS), np.int32)], [np.empty((0, _NEIGHBOURS), np.float32)]
        for item in items:
            t, h, w = grid_of(item)
            table_rows, table_weights = table_neighbours(h, w, self.config.merge_size, self.tower.table_side)
            rows += [table_rows] * t
            weights += [table_weights] * t
        tables = {"table_rows": np.concatenate(rows), "table_weights": np.concatenate(weights)}
        plan = super().plan(items)
        return replace(plan, arrays={**plan.arrays, **tables})

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        patches = bucket["patches"]
        return {
            **super().buffer_specs(bucket),
            "table_rows": BufferSpec((patches, _NEIGHBOURS), torch.int32),
            "table_weights": BufferSpec((patches, _NEIGHBOURS), torch.float32),
        }

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        """embeds [patches / 4, (1 + levels) * out_features]: each row's embedding is followed by its features, level by
        level."""
        rotary = rotary_cos_sin(buffers["coordinates"].T, self.frequencies, self.axes)
        x = self.embed_patches(buffers["pixels"])
        add_table_rows(x, self.position_table, buffers["table_rows"], buffers["table_weights"])
        levels = dict(zip(self.tower.deepstack, self.deepstack, strict=True))
        features: list[Tensor] = []

        def take(block: int, hidden: Tensor) -> None:
            if block in levels:
                merger = cast("Merger[nn.LayerNorm]", levels[block])
                features.append(merger(layer_norm(hidden.view(-1, merger.width), merger.norm)))

        cu_seqlens, max_seqlen = bounds(buffers["cu_seqlens"], bucket), bucket["max_seqlen"]
        normed = run_tower(self.blocks, x, self.merger.norm, rotary, cu_seqlens, max_seqlen, after=take)
        return {"embeds": torch.cat((self.merger(normed), *features), dim=1)}


@lru_cache(maxsize=_CACHED_GRIDS)
def table_neighbours(h: int, w: int, merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The four entries of a side x side table around each patch of a grid, whose corners are the table's, and their
    bilinear weights: int32 and float32 [h * w, 4] in block order (top left, top right, bottom left, bottom right)."""
    row, column = block_coordinates(h, w, merge).T
    top, bottom, down = (values[row] for values in _neighbours_along(h, side))
    left, right, across = (values[column] for values in _neighbours_along(w, side))
    rows = [vertical * side + horizontal for vertical in (top, bottom) for horizontal in (left, right)]
    one = np.float32(1)
    weights = [vertical * horizontal for vertical in (one - down, down) for horizontal in (one - across, across)]
    return np.stack(rows, axis=1), np.stack(weights, axis=1)


def _neighbours_along(size: int, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For `size` evenly spaced coordinates in 0..side - 1: the table entries before and after each, and its relative
    distance from the first to the second."""
    coordinate = np.arange(size, dtype=np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    before = coordinate.astype(np.int32)
    return before, np.minimum(before + 1, side - 1), coordinate - before.astype(np.float32)
