"""The vision tower of Qwen2-VL with its merger, as a capturable encoder.

Rows are patches in the order of the published preprocessing: frame pair by frame pair, 2x2 blocks row by row, the four
patches of a block row by row; so four consecutive rows make one embedding. Each frame pair is an attention segment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from models.layers.mlp import MLP
from models.layers.packed import byte_lookup
from models.layers.rotary import inverse_frequencies, rotary_cos_sin
from models.layers.tower import TowerBlock, run_tower
from models.layers.upload import upload
from models.media import MediaItem
from models.protocol import BufferSpec, Capacity, Plan
from models.qwen2_vl.config import ImageSettings, VisionConfig

_NORM_EPS = 1e-6
_ROTARY_THETA = 10_000.0
_LADDER = (
    *(256, 384, 512, 640, 768, 1024, 1280, 1600, 2048, 2560, 3200, 4096),
    *(4800, 5504, 7168, 8192, 8960, 11264, 13824, 16384),
)
"""Patches of the captured capacities: dense where single pictures and packs of a few fall (4800: 1280 x 720, 5504: 1024
x 1024, 8192: 16 frames of 448 x 448, 11264: 1920 x 1080)."""
_PATCHES_PER_SEQUENCE = 64
_MOST_SEQUENCES = 64
_LADDER_ITEMS = 4
_CACHED_GRIDS = 64


class Merger(nn.Module):
    """Patches [P, width] after `norm` -> embeddings [P / 4, out_width]."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.block_width = config.width * config.merged_patches
        self.norm = nn.LayerNorm(config.width, eps=_NORM_EPS)
        self.mlp = MLP(self.block_width, self.block_width, "gelu", out_width=config.out_width)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.view(-1, self.block_width))


class Qwen2VLEncoder(nn.Module):
    """models.protocol.VisionEncoder.

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
        self.patch_embed = nn.Linear(config.patch_values, config.width, bias=False)
        width, inner, heads = config.width, config.inner_width, config.num_heads
        self.blocks = nn.ModuleList(
            TowerBlock(width, inner, heads, "quick_gelu", _NORM_EPS) for _ in range(config.depth)
        )
        self.merger = Merger(config)
        # Half of a head's angles turn with the row, the other half, of equal frequencies, with the column.
        frequencies = inverse_frequencies(config.head_dim // 2, _ROTARY_THETA)
        axes = torch.arange(2, device="cpu").repeat_interleave(len(frequencies))
        self.register_buffer("frequencies", frequencies.repeat(2), persistent=False)
        self.register_buffer("axes", axes, persistent=False)
        self.register_buffer("byte_values", torch.from_numpy(byte_values(images)), persistent=False)

    def plan(self, items: Sequence[MediaItem]) -> Plan:
        device = self.patch_embed.weight.device
        coordinates, lengths = [np.empty((0, 2), np.int32)], []
        for item in items:
            t, h, w = (int(size) for size in item.arrays["grid_thw"])
            coordinates += [_coordinates(h, w, self.config.merge_size)] * t
            lengths += [h * w] * t
        cu_seqlens = np.cumsum([0, *lengths], dtype=np.int32)
        return Plan(
            arrays={"coordinates": np.concatenate(coordinates), "cu_seqlens": cu_seqlens},
            tensors={"pixels": [self.patchify(item, device) for item in items]},
            fills={"cu_seqlens": float(cu_seqlens[-1])},
            needs=self.needs(items),
        )

    def needs(self, items: Sequence[MediaItem]) -> Capacity:
        return {
            "patches": sum(item.num_patches for item in items),
            "sequences": sum(item.num_sequences for item in items),
            "max_seqlen": max((item.num_patches // item.num_sequences for item in items), default=0),
        }

    def patchify(self, item: MediaItem, device: torch.device) -> Tensor:
        """Frames uint8 -> patch rows uint8 [patches, 1176] on `device`; an odd last frame is taken twice."""
        size, merge, pair = self.config.patch_size, self.config.merge_size, self.config.temporal_patch_size
        t, h, w = (int(extent) for extent in item.arrays["grid_thw"])
        frames = upload(item.frames, device)
        missing = t * pair - len(frames)
        if missing:
            frames = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1)))
        cut = frames.view(t, pair, h // merge, merge, size, w // merge, merge, size, self.config.channels)
        return cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(t * h * w, self.config.patch_values)

    def split(self, item: MediaItem, limit: Capacity) -> list[MediaItem]:
        """Runs of whole frame pairs: attention does not look past a pair."""
        t, h, w = (int(extent) for extent in item.arrays["grid_thw"])
        pairs = max(1, min(limit["patches"] // (h * w), limit["sequences"]))
        if pairs >= t:
            return [item]
        return [self._part(item, start, min(start + pairs, t)) for start in range(0, t, pairs)]

    def _part(self, item: MediaItem, start: int, stop: int) -> MediaItem:
        pair = self.config.temporal_patch_size
        _, h, w = (int(extent) for extent in item.arrays["grid_thw"])
        patches = (stop - start) * h * w
        return replace(
            item,
            frames=item.frames[start * pair : stop * pair],
            arrays={"grid_thw": np.array([stop - start, h, w], dtype=np.int32)},
            num_patches=patches,
            num_sequences=stop - start,
            num_embeds=patches // self.config.merged_patches,
            digest=hashlib.sha256(item.digest + f"pairs {start}:{stop}".encode()).digest(),
        )

    def default_ladder(self) -> list[Capacity]:
        """Up to four of the largest pictures that the checkpoint allows, 16384 patches at most."""
        largest = _LADDER_ITEMS * self.images.max_pixels // self.config.patch_size**2
        steps = [patches for patches in _LADDER if patches < largest] or [_LADDER[0]]
        steps += [patches for patches in _LADDER if patches >= largest and patches not in steps][:1]
        return [
            {
                "patches": patches,
                "sequences": min(max(patches // _PATCHES_PER_SEQUENCE, 8), _MOST_SEQUENCES),
                "max_seqlen": patches,
            }
            for patches in steps
        ]

    def buffer_specs(self, capacity: Capacity) -> dict[str, BufferSpec]:
        patches = capacity["patches"]
        return {
            "pixels": BufferSpec((patches, self.config.patch_values), torch.uint8),
            "coordinates": BufferSpec((patches, 2), torch.int32),
            "cu_seqlens": BufferSpec((capacity["sequences"] + 1,), torch.int32),
        }

    def forward(self, buffers: Mapping[str, Tensor], capacity: Capacity) -> dict[str, Tensor]:
        cos, sin = rotary_cos_sin(buffers["coordinates"].T, self.frequencies, self.axes)
        x = self.patch_embed(self.normalise(buffers["pixels"]))
        blocks = cast("Sequence[TowerBlock]", self.blocks)
        cu_seqlens, max_seqlen = buffers["cu_seqlens"], capacity["max_seqlen"]
        return {"embeds": self.merger(run_tower(blocks, x, self.merger.norm, (cos, sin), cu_seqlens, max_seqlen))}

    def normalise(self, pixels: Tensor) -> Tensor:
        """Bytes [P, 1176] -> normalised values in the model's dtype, looked up so that they are the reference's."""
        return byte_lookup(pixels, self.byte_values.to(self.patch_embed.weight.dtype))


def byte_values(images: ImageSettings) -> np.ndarray:
    """Normalised value of each byte, float32 [channels, 256], rounded as the reference rounds: scaled in float64 and
    cast, then normalised in float32."""
    scaled = (np.arange(256) * (1 / 255)).astype(np.float32)
    mean, std = np.array(images.mean, np.float32), np.array(images.std, np.float32)
    return (scaled[None, :] - mean[:, None]) / std[:, None]


@lru_cache(maxsize=_CACHED_GRIDS)
def _coordinates(h: int, w: int, merge: int) -> np.ndarray:
    """Row and column of a frame's patches in block order: int32 [h * w, 2]."""
    grid = np.indices((h, w), dtype=np.int32).reshape(2, h // merge, merge, w // merge, merge)
    return grid.transpose(1, 3, 2, 4, 0).reshape(h * w, 2)
