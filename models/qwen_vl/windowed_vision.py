"""The vision tower of Qwen2.5-VL with its merger, as a capturable encoder.

Patches arrive in the block order of Qwen2-VL, in which four consecutive rows make one embedding. The tower computes in
window order: embedding rows are gathered by `window_index`, four patches at a time, and the merger's rows go back by
`reverse_index`. A frame's embedding rows are cut into squares of `window` rows and columns from the top left; the last
ones of a row or column are smaller. A window is a run of rows, with its own in raster order, and so is a frame pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from models.interfaces.capturable import Bucket, BufferSpec, Plan
from models.interfaces.media import MediaItem
from models.layers.mlp import Merger
from models.layers.norms import RMSNorm
from models.layers.rms_tower import RMSTowerBlock, run_rms_tower
from models.layers.rotary import rotary_cos_sin
from models.qwen_vl.config import ImageSettings, VisionConfig, WindowConfig
from models.qwen_vl.encoder import NORM_EPS, PatchEncoder, block_coordinates
from models.qwen_vl.items import grid_of

_INNER_MULTIPLE = 128
"""Rows of the published intermediate_size, 3420, are not 16-byte aligned, which keeps GEMMs from wide loads."""
_PATCHES_PER_WINDOW = 36
"""Of pictures of at least 224 pixels a side: 9 rows and columns of embeddings make 9 windows of 36 patches on average,
and no larger number of them makes smaller ones. More room would cost each replay further empty segments."""
_MIN_WINDOWS = 16
_CACHED_GRIDS = 64


@dataclass(frozen=True, eq=False)
class WindowedFrame:
    """order: int64 [units], the number in raster order of the embedding row at each place. lengths: int32 [windows],
    patches of each. coordinates: int32 [patches, 2], row and column of the patch at each place."""

    order: np.ndarray
    lengths: np.ndarray
    coordinates: np.ndarray


def num_windows(rows: int, columns: int, window: int) -> int:
    """Number of windows in a frame of `rows` x `columns` embedding rows."""
    return -(-rows // window) * -(-columns // window)


@lru_cache(maxsize=_CACHED_GRIDS)
def windowed_frame(h: int, w: int, merge: int, window: int) -> WindowedFrame:
    """Windows of a frame of h x w patches."""
    rows, columns = h // merge, w // merge
    raster = np.arange(rows * columns, dtype=np.int64).reshape(rows, columns)
    windows = [
        raster[top : top + window, left : left + window].ravel()
        for top in range(0, rows, window)
        for left in range(0, columns, window)
    ]
    order = np.concatenate(windows)
    lengths = np.array([len(part) for part in windows], dtype=np.int32) * merge**2
    coordinates = block_coordinates(h, w, merge).reshape(-1, merge**2, 2)[order].reshape(-1, 2)
    return WindowedFrame(order, lengths, coordinates)


class Qwen25VLEncoder(PatchEncoder):
    """Implements models.protocol.VisionEncoder. Buffers of a bucket of P patches, S sequences and W windows:

    pixels uint8 [P, 1176], in block order, columns (channel, time, y, x); window_index int64 [P / 4], the embedding row
    at each place of the window order; reverse_index int64 [P / 4], its inverse; coordinates int32 [P, 2], row and
    column of the patch in its frame, in window order; cu_seqlens int32 [S + 1] and cu_window_seqlens int32 [W + 1],
    bounds of frame pairs and of windows in patches, their tails repeating the last value.
    """

    def __init__(self, vision: VisionConfig, images: ImageSettings, windows: WindowConfig) -> None:
        super().__init__(vision, images)
        self.window = windows.side
        self.full_attention = windows.full_attention
        self.blocks = nn.ModuleList(
            RMSTowerBlock(vision.hidden_size, vision.intermediate_size, vision.num_heads, NORM_EPS)
            for _ in range(vision.depth)
        )
        self.merger = Merger(RMSNorm(vision.hidden_size, NORM_EPS), vision.merged_size, vision.out_features)

    def align(self) -> None:
        """Pads the tower's intermediate_size to a size that GEMMs read fast. Call once after loading."""
        for block in self.blocks:
            cast("RMSTowerBlock", block).mlp.widen(_INNER_MULTIPLE)

    def plan(self, items: Sequence[MediaItem]) -> Plan:
        frames: list[WindowedFrame] = []
        for item in items:
            t, h, w = grid_of(item)
            frames += [windowed_frame(h, w, self.config.merge_size, self.window)] * t
        arrays = _joined(frames)
        cu_seqlens, cu_window_seqlens = arrays["cu_seqlens"], arrays["cu_window_seqlens"]
        assert cu_seqlens[-1] == cu_window_seqlens[-1]
        return Plan(
            arrays=arrays,
            tensors=self.pixels(items),
            fills={"cu_seqlens": float(cu_seqlens[-1]), "cu_window_seqlens": float(cu_window_seqlens[-1])},
            required=self.required(items),
        )

    def required(self, items: Sequence[MediaItem]) -> Bucket:
        windows = sum(item.num_sequences * self._windows(item) for item in items)
        return {**super().required(items), "windows": windows}

    def pair_size(self, item: MediaItem) -> dict[str, int]:
        return {**super().pair_size(item), "windows": self._windows(item)}

    def default_buckets(self) -> list[Bucket]:
        """Those of Qwen2-VL. Pictures under 224 pixels a side have smaller windows and may need the next larger bucket.
        Room for the largest possible number of windows would add empty segments to every replay."""
        return [
            {**bucket, "windows": max(_MIN_WINDOWS, bucket["patches"] // _PATCHES_PER_WINDOW)}
            for bucket in super().default_buckets()
        ]

    def dense_buckets(self, bucket_list: Sequence[Bucket]) -> list[Bucket]:
        """None: most layers attend in windows, and the few others gain nothing (encoder_qwen2_5_vl_3b.json)."""
        return []

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        patches = bucket["patches"]
        units = -(-patches // self.config.merged_patches)
        return {
            "pixels": BufferSpec((units * self.config.merged_patches, self.config.patch_values), torch.uint8),
            "window_index": BufferSpec((units,), torch.int64),
            "reverse_index": BufferSpec((units,), torch.int64),
            "coordinates": BufferSpec((units * self.config.merged_patches, 2), torch.int32),
            "cu_seqlens": BufferSpec((bucket["sequences"] + 1,), torch.int32),
            "cu_window_seqlens": BufferSpec((bucket["windows"] + 1,), torch.int32),
        }

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        rotary = rotary_cos_sin(buffers["coordinates"].T, self.frequencies, self.axes)
        x = self.embed_patches(self._in_window_order(buffers["pixels"], buffers["window_index"]))
        frames = buffers["cu_seqlens"], bucket["max_seqlen"]
        windows = buffers["cu_window_seqlens"], self.window**2 * self.config.merged_patches
        segments = [frames if index in self.full_attention else windows for index in range(self.config.depth)]
        merged = self.merger(run_rms_tower(self.blocks, x, self.merger.norm, rotary, segments))
        return {"embeds": merged.index_select(0, buffers["reverse_index"])}

    def _in_window_order(self, pixels: Tensor, window_index: Tensor) -> Tensor:
        """Rows [P, 1176] of embedding rows gathered by window_index; bytes are moved eight at a time if they can."""
        units = pixels.view(len(window_index), -1)
        word = torch.uint8 if units.shape[1] % torch.int64.itemsize else torch.int64
        return units.view(word).index_select(0, window_index).view(torch.uint8).view(pixels.shape)

    def _windows(self, item: MediaItem) -> int:
        """Number of windows of one frame pair."""
        _, h, w = grid_of(item)
        return num_windows(h // self.config.merge_size, w // self.config.merge_size, self.window)


def _joined(frames: Sequence[WindowedFrame]) -> dict[str, np.ndarray]:
    """Arrays of a plan for frame pairs that lie one after the other, with row numbers shifted accordingly."""
    starts = np.cumsum([0, *(len(frame.order) for frame in frames)])
    order = [frame.order + start for frame, start in zip(frames, starts, strict=False)]
    window_index = np.concatenate([np.empty(0, np.int64), *order])
    reverse_index = np.empty_like(window_index)
    reverse_index[window_index] = np.arange(len(window_index))
    windows = np.concatenate([np.zeros(1, np.int32), *(frame.lengths for frame in frames)])
    return {
        "window_index": window_index,
        "reverse_index": reverse_index,
        "coordinates": np.concatenate([np.empty((0, 2), np.int32), *(frame.coordinates for frame in frames)]),
        "cu_seqlens": np.cumsum([0, *(len(frame.coordinates) for frame in frames)], dtype=np.int32),
        "cu_window_seqlens": np.cumsum(windows, dtype=np.int32),
    }
