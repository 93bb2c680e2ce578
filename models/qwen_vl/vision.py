"""The vision tower of Qwen2-VL with its merger, as a capturable encoder.

Rows are patches in the order of the published preprocessing (patch_rows), in which four consecutive rows make one
embedding. Each frame pair is an attention segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from models.interfaces.capturable import Bucket, BufferSpec, Plan
from models.interfaces.media import MediaItem
from models.layers.equal_segments import bounds
from models.layers.mlp import MLP
from models.layers.rotary import rotary_cos_sin
from models.layers.tower import TowerBlock, run_tower
from models.qwen_vl.config import ImageSettings, VisionConfig
from models.qwen_vl.encoder import NORM_EPS, PatchEncoder


class Merger(nn.Module):
    """Patches [P, hidden_size] after `norm` -> embeddings [P / 4, out_features]."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.merged_size = config.hidden_size * config.merged_patches
        self.norm = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.mlp = MLP(self.merged_size, self.merged_size, "gelu", out_features=config.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.view(-1, self.merged_size))


class Qwen2VLEncoder(PatchEncoder):
    """Implements models.protocol.VisionEncoder.

    Buffers: pixels uint8 [patches, 1176], columns (channel, time, y, x); coordinates int32 [patches, 2], row and column
    of the patch in its frame; cu_seqlens int32 [sequences + 1], its tail repeats the last value.
    """

    exact_sizes = ((1, 1024), (1, 1564), (1, 5476), (8, 1024))
    """Pictures of 448 x 448, 640 x 480 and 1024 x 1024, and 16 frames of 448 x 448."""

    def __init__(self, config: VisionConfig, images: ImageSettings) -> None:
        super().__init__(config, images)
        sizes = config.hidden_size, config.intermediate_size, config.num_heads
        self.blocks = nn.ModuleList(TowerBlock(*sizes, "quick_gelu", NORM_EPS) for _ in range(config.depth))
        self.merger = Merger(config)

    def plan(self, items: Sequence[MediaItem]) -> Plan:
        coordinates, cu_seqlens = self.coordinates(items)
        return Plan(
            arrays={"coordinates": coordinates, "cu_seqlens": cu_seqlens},
            tensors=self.pixels(items),
            fills={"cu_seqlens": float(cu_seqlens[-1])},
            required=self.required(items),
        )

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        patches = bucket["patches"]
        return {
            "pixels": BufferSpec((patches, self.config.patch_values), torch.uint8),
            "coordinates": BufferSpec((patches, 2), torch.int32),
            "cu_seqlens": BufferSpec((bucket["sequences"] + 1,), torch.int32),
        }

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        rotary = rotary_cos_sin(buffers["coordinates"].T, self.frequencies, self.axes)
        x = self.embed_patches(buffers["pixels"])
        blocks = cast("Sequence[TowerBlock]", self.blocks)
        cu_seqlens, max_seqlen = bounds(buffers["cu_seqlens"], bucket), bucket["max_seqlen"]
        return {"embeds": self.merger(run_tower(blocks, x, self.merger.norm, rotary, cu_seqlens, max_seqlen))}
