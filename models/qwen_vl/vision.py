"""The vision tower of Qwen2-VL with its merger, as a capturable encoder.

Rows are patches in the order of the published preprocessing (patch_rows), in which four consecutive rows make one
embedding. Each frame pair is an attention segment.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from models.interfaces.capturable import Bucket
from models.layers.dense_segments import bounds
from models.layers.mlp import Merger
from models.layers.rotary import rotary_cos_sin
from models.layers.tower import TowerBlock, run_tower
from models.qwen_vl.config import ImageSettings, VisionConfig
from models.qwen_vl.encoder import NORM_EPS, PatchEncoder


class Qwen2VLEncoder(PatchEncoder):
    """Implements models.protocol.VisionEncoder."""

    exact_sizes = ((1, 1024), (1, 1564), (1, 5476), (8, 1024))
    """Pictures of 448 x 448, 640 x 480 and 1024 x 1024, and 16 frames of 448 x 448."""

    def __init__(self, config: VisionConfig, images: ImageSettings) -> None:
        super().__init__(config, images)
        sizes = config.hidden_size, config.intermediate_size, config.num_heads
        self.blocks = nn.ModuleList(TowerBlock(*sizes, "quick_gelu", NORM_EPS) for _ in range(config.depth))
        norm = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.merger = Merger(norm, config.merged_size, config.out_features)

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        rotary = rotary_cos_sin(buffers["coordinates"].T, self.frequencies, self.axes)
        x = self.embed_patches(buffers["pixels"])
        cu_seqlens, max_seqlen = bounds(buffers["cu_seqlens"], bucket), bucket["max_seqlen"]
        return {"embeds": self.merger(run_tower(self.blocks, x, self.merger.norm, rotary, cu_seqlens, max_seqlen))}
