"""What the vision encoders of the Qwen-VL families share: rows of patches, their normalisation, how items are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from models.interfaces.capturable import Bucket, BufferSpec, Plan
from models.interfaces.media import MediaItem
from models.layers.mlp import MLP
from models.layers.one_segment import dense_buckets
from models.layers.packed import byte_lookup, layer_norm
from models.qwen_vl.config import ImageSettings, VisionConfig
from models.qwen_vl.items import grid_of
from models.qwen_vl.patches import (
    block_coordinates,
    byte_values,
    grid_frequencies,
    patch_buckets,
    patch_rows,
    required_patches,
    split_frame_pairs,
)

NORM_EPS = 1e-6
N = TypeVar("N", bound=nn.Module)


class Merger(nn.Module, Generic[N]):
    """Patches [P, hidden_size] -> rows [P / 4, out_features], normed before four patches become a row (the tower's last
    norm, which the caller applies) or, with `norm_after`, behind that."""

    def __init__(self, config: VisionConfig, norm: N, *, norm_after: bool = False) -> None:
        super().__init__()
        self.merged_size = config.hidden_size * config.merged_patches
        self.norm, self.norm_after = norm, norm_after
        self.mlp = MLP(self.merged_size, self.merged_size, "gelu", out_features=config.out_features)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, self.merged_size)
        return self.mlp(layer_norm(rows, cast("nn.LayerNorm", self.norm)) if self.norm_after else rows)


class PatchEncoder(nn.Module):
    """Base of the encoders. A frame pair is an attention segment; four consecutive patches make one embedding.

    Buffers: pixels uint8 [patches, values], columns (channel, time, y, x); coordinates int32 [patches, 2], row and
    column of the patch in its frame; cu_seqlens int32 [sequences + 1], its tail repeats the last value.
    bucket_sizes: patches of the captured buckets. exact_sizes: (sequences, patches of each) with graphs of their own.
    """

    name = "vision"
    rare_buckets: Sequence[Bucket] = ()
    bucket_sizes: tuple[int, ...] = (
        *(256, 384, 512, 640, 768, 1024, 1280, 1568, 1600, 2048, 2560, 3200, 4096),
        *(4800, 5504, 7168, 8192, 8960, 11264, 13824, 16384),
    )
    """Dense where single pictures and packs of a few of them fall (1568: 640 x 480, 1600: 560 x 560, 4800: 1280 x 720,
    5504: 1024 x 1024, 8192: 16 frames of 448 x 448, 11264: 1920 x 1080)."""
    exact_sizes: tuple[tuple[int, int], ...] = ()
    frequencies: Tensor
    axes: Tensor
    byte_values: Tensor

    def __init__(self, config: VisionConfig, images: ImageSettings, *, bias: bool = False) -> None:
        super().__init__()
        self.config = config
        self.images = images
        self.patch_embed = nn.Linear(config.patch_values, config.hidden_size, bias=bias)
        frequencies, axes = grid_frequencies(config.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("axes", axes, persistent=False)
        self.register_buffer("byte_values", torch.from_numpy(byte_values(images)), persistent=False)

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

    def required(self, items: Sequence[MediaItem]) -> Bucket:
        return required_patches(items)

    def pixels(self, items: Sequence[MediaItem]) -> dict[str, list[Tensor]]:
        """The tensors of a plan."""
        return {"pixels": [self.patchify(item, self.patch_embed.weight.device) for item in items]}

    def patchify(self, item: MediaItem, device: torch.device) -> Tensor:
        """Patch rows uint8 [patches, channels * 2 * size * size] in block order on `device`."""
        return patch_rows(item, self.config, device)

    def embed_patches(self, pixels: Tensor) -> Tensor:
        """Patch rows uint8 [P, columns] -> [P, hidden_size]."""
        embedded: Tensor = self.patch_embed(self.normalise(pixels))
        return embedded

    def normalise(self, pixels: Tensor) -> Tensor:
        """Bytes [P, columns] -> normalised values in the model's dtype, looked up so that they are the reference's."""
        return byte_lookup(pixels, self.byte_values.to(self.patch_embed.weight.dtype))

    def coordinates(self, items: Sequence[MediaItem]) -> tuple[np.ndarray, np.ndarray]:
        """Row and column of each patch in its frame, int32 [P, 2], and the bounds of frame pairs, int32 [sequences +
        1]."""
        places, lengths = [np.empty((0, 2), np.int32)], []
        for item in items:
            t, h, w = grid_of(item)
            places += [block_coordinates(h, w, self.config.merge_size)] * t
            lengths += [h * w] * t
        return np.concatenate(places), np.cumsum([0, *lengths], dtype=np.int32)

    def split(self, item: MediaItem, limit: Bucket) -> list[MediaItem]:
        return split_frame_pairs(item, self.config, limit, self.pair_size(item))

    def pair_size(self, item: MediaItem) -> dict[str, int]:
        """What one frame pair takes of each size of a bucket that adds up."""
        _, h, w = grid_of(item)
        return {"patches": h * w, "sequences": 1}

    def default_buckets(self) -> list[Bucket]:
        return list(patch_buckets(self.config, self.images, self.bucket_sizes))

    def dense_buckets(self, bucket_list: Sequence[Bucket]) -> list[Bucket]:
        head_dim, merged_patches = self.config.head_dim, self.config.merged_patches
        return dense_buckets(bucket_list, self.exact_sizes, head_dim, merged_patches, self.patch_embed.weight)
