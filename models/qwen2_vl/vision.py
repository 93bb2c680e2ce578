"""The vision tower of Qwen2-VL with its merger, as a capturable encoder.

Rows are patches in the order of the published preprocessing (patch_rows), in which four consecutive rows make one
embedding. Each frame pair is an attention segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from models.interfaces.capturable import Bucket, BufferSpec, Plan
from models.interfaces.media import MediaItem
from models.layers.equal_segments import bounds
from models.layers.mlp import MLP
from models.layers.one_segment import dense_buckets
from models.layers.packed import byte_lookup
from models.layers.rotary import rotary_cos_sin
from models.layers.tower import TowerBlock, run_tower
from models.qwen2_vl.config import ImageSettings, VisionConfig
from models.qwen2_vl.items import grid_of
from models.qwen2_vl.patches import (
    block_coordinates,
    byte_values,
    grid_frequencies,
    patch_buckets,
    patch_rows,
    required_patches,
    split_frame_pairs,
)

_NORM_EPS = 1e-6
_EXACT_SIZES = ((1, 1024), (1, 1564), (1, 5476), (8, 1024))
"""Calls that have captured graphs of their own, as (sequences, patches of each): pictures of 448 x 448, 640 x 480 and
1024 x 1024, and 16 frames of 448 x 448."""


class Merger(nn.Module):
    """Patches [P, hidden_size] after `norm` -> embeddings [P / 4, out_features]."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.merged_size = config.hidden_size * config.merged_patches
        self.norm = nn.LayerNorm(config.hidden_size, eps=_NORM_EPS)
        self.mlp = MLP(self.merged_size, self.merged_size, "gelu", out_features=config.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.view(-1, self.merged_size))


class Qwen2VLEncoder(nn.Module):
    """Implements models.protocol.VisionEncoder.

    Buffers: pixels uint8 [patches, 1176], columns (channel, time, y, x); coordinates int32 [patches, 2], row and column
    of the patch in its frame; cu_seqlens int32 [sequences + 1], its tail repeats the last value.
    """

    name = "vision"
    frequencies: Tensor
    axes: Tensor
    byte_values: Tensor

    def __init__(self, config: VisionConfig, images: ImageSettings) -> None:
        super().__init__()
        self.config = config
        self.images = images
        self.patch_embed = nn.Linear(config.patch_values, config.hidden_size, bias=False)
        sizes = config.hidden_size, config.intermediate_size, config.num_heads
        self.blocks = nn.ModuleList(TowerBlock(*sizes, "quick_gelu", _NORM_EPS) for _ in range(config.depth))
        self.merger = Merger(config)
        frequencies, axes = grid_frequencies(config.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("axes", axes, persistent=False)
        self.register_buffer("byte_values", torch.from_numpy(byte_values(images)), persistent=False)

    def plan(self, items: Sequence[MediaItem]) -> Plan:
        device = self.patch_embed.weight.device
        coordinates, lengths = [np.empty((0, 2), np.int32)], []
        for item in items:
            t, h, w = grid_of(item)
            coordinates += [block_coordinates(h, w, self.config.merge_size)] * t
            lengths += [h * w] * t
        cu_seqlens = np.cumsum([0, *lengths], dtype=np.int32)
        return Plan(
            arrays={"coordinates": np.concatenate(coordinates), "cu_seqlens": cu_seqlens},
            tensors={"pixels": [self.patchify(item, device) for item in items]},
            fills={"cu_seqlens": float(cu_seqlens[-1])},
            required=self.required(items),
        )

    def required(self, items: Sequence[MediaItem]) -> Bucket:
        return required_patches(items)

    def patchify(self, item: MediaItem, device: torch.device) -> Tensor:
        """Patch rows uint8 [patches, 1176] on `device`."""
        return patch_rows(item, self.config, device)

    def split(self, item: MediaItem, limit: Bucket) -> list[MediaItem]:
        _, h, w = grid_of(item)
        return split_frame_pairs(item, self.config, limit, {"patches": h * w, "sequences": 1})

    def default_buckets(self) -> list[Bucket]:
        return list(patch_buckets(self.config, self.images))

    def dense_buckets(self, bucket_list: Sequence[Bucket]) -> list[Bucket]:
        head_dim, merged_patches = self.config.head_dim, self.config.merged_patches
        return dense_buckets(bucket_list, _EXACT_SIZES, head_dim, merged_patches, self.patch_embed.weight)

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        patches = bucket["patches"]
        return {
            "pixels": BufferSpec((patches, self.config.patch_values), torch.uint8),
            "coordinates": BufferSpec((patches, 2), torch.int32),
            "cu_seqlens": BufferSpec((bucket["sequences"] + 1,), torch.int32),
        }

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        cos, sin = rotary_cos_sin(buffers["coordinates"].T, self.frequencies, self.axes)
        x = self.patch_embed(self.normalise(buffers["pixels"]))
        blocks = cast("Sequence[TowerBlock]", self.blocks)
        cu_seqlens, max_seqlen = bounds(buffers["cu_seqlens"], bucket), bucket["max_seqlen"]
        return {"embeds": self.merger(run_tower(blocks, x, self.merger.norm, (cos, sin), cu_seqlens, max_seqlen))}

    def normalise(self, pixels: Tensor) -> Tensor:
        """Bytes [P, 1176] -> normalised values in the model's dtype. They are looked up, so that they equal those of
        the reference."""
        return byte_lookup(pixels, self.byte_values.to(self.patch_embed.weight.dtype))
