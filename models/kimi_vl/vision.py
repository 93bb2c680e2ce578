"""MoonViT with its projector as one capturable encoder over packed patches.

Learned positions (interpolated to the picture's grid), coordinates, segment bounds and the order of the 2x2 merge are
data, so pictures of any sizes share a call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.interfaces.capturable import Bucket, BufferSpec, Plan
from models.interfaces.media import MediaItem, media_digest
from models.interfaces.rule import Rule, renamed
from models.kimi_vl.config import KimiVLConfig, VisionConfig
from models.kimi_vl.pictures import ImageSettings
from models.layers.dense_segments import bounds, dense_buckets
from models.layers.mla import half_split_rows
from models.layers.mlp import Merger
from models.layers.packed import byte_lookup, byte_values, layer_norm, raster_coordinates, runs_within, widen_inputs
from models.layers.resample import resized
from models.layers.rotary import inverse_frequencies, rotary_cos_sin
from models.layers.tower import TowerBlock, run_tower
from models.layers.upload import upload_frames

_NORM_EPS = 1e-5
_ROPE_THETA = 10000.0
_CACHED_GRIDS = 64
_BUCKET_PATCHES = (256, 384, 512, 768, 1024, 1280, 1664, 2112, 2752, 3456, 4480, 5504, 6912, 8960)
"""Patches of the captured buckets, in steps of about 1.25 where one to four pictures fall. 4480 and 8960 hold one and
two pictures over in_token_limit, which have 4096 to 4480 patches after padding. The list continues to the largest
picture."""


class KimiVisionEncoder(nn.Module):
    """VisionEncoder of Kimi-VL. Buffers of a bucket of P patches and S sequences:

    pixels uint8 [P, 588] in order (channel, y, x); positions [P, hidden_size], the learned table resized to the
    picture's grid; coordinates int32 [P, 2] (column, row); cu_seqlens int32 [S + 1], the tail repeating the total;
    merge_index int64 [P], the patches in the order in which 2x2 blocks take them.
    """

    rare_buckets: Sequence[Bucket] = ()
    exact_sizes: tuple[tuple[int, int], ...] = ((1, 1024),)
    """Sequences and patches of each, of calls with graphs of their own: pictures of 448 x 448."""
    byte_values: Tensor
    frequencies: Tensor
    axes: Tensor

    def __init__(self, config: KimiVLConfig, images: ImageSettings) -> None:
        super().__init__()
        vision = self.config = config.vision
        self.patch_embed = nn.Linear(vision.patch_values, vision.hidden_size)
        self.position_table = nn.Parameter(
            torch.empty(vision.init_pos_emb_height, vision.init_pos_emb_width, vision.hidden_size)
        )
        sizes = vision.hidden_size, vision.intermediate_size, vision.num_attention_heads
        self.blocks = nn.ModuleList(TowerBlock(*sizes, "gelu_tanh", _NORM_EPS) for _ in range(vision.num_hidden_layers))
        self.final_norm = nn.LayerNorm(vision.hidden_size, eps=_NORM_EPS)
        norm, merged_size = nn.LayerNorm(vision.hidden_size, eps=_NORM_EPS), vision.hidden_size * vision.merged_patches
        self.projector = Merger(norm, merged_size, config.text.hidden_size)
        self.register_buffer("byte_values", byte_values(images.mean, images.std), persistent=False)
        # Pair 2i turns by column * f_i, pair 2i + 1 by row * f_i.
        frequencies = inverse_frequencies(vision.head_dim // 2, _ROPE_THETA)
        axes = torch.arange(2, device="cpu").repeat(len(frequencies))
        self.register_buffer("frequencies", frequencies.repeat_interleave(2), persistent=False)
        self.register_buffer("axes", axes, persistent=False)
        self._most_patches = images.most_patches
        self._interpolated: OrderedDict[tuple[int, int], Tensor] = OrderedDict()

    def default_buckets(self) -> list[Bucket]:
        budgets = [*_BUCKET_PATCHES]
        while budgets[-1] < self._most_patches:
            budgets.append(min(5 * budgets[-1] // 4, self._most_patches))
        return [{"patches": p, "sequences": min(64, p // 16), "max_seqlen": p} for p in budgets]

    def dense_buckets(self, bucket_list: Sequence[Bucket]) -> list[Bucket]:
        head_dim, merged_patches = self.config.head_dim, self.config.merged_patches
        return dense_buckets(bucket_list, self.exact_sizes, head_dim, merged_patches, self.patch_embed.weight)

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        patches, config = bucket["patches"], self.config
        return {
            "pixels": BufferSpec((patches, config.patch_values), torch.uint8),
            "positions": BufferSpec((patches, config.hidden_size), self.patch_embed.weight.dtype),
            "coordinates": BufferSpec((patches, 2), torch.int32),
            "cu_seqlens": BufferSpec((bucket["sequences"] + 1,), torch.int32),
            "merge_index": BufferSpec((patches,), torch.int64),
        }

    def plan(self, items: Sequence[MediaItem]) -> Plan:
        grids = _grids(items)
        lengths = [rows * columns for rows, columns in grids]
        cu_seqlens = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        total = int(cu_seqlens[-1])
        return Plan(
            arrays={
                "coordinates": np.concatenate([raster_coordinates(*grid) for grid in grids]),
                "cu_seqlens": cu_seqlens,
                "merge_index": np.concatenate(
                    [start + _merge_order(*grid) for start, grid in zip(cu_seqlens, grids, strict=False)]
                ),
            },
            tensors={
                "pixels": [pixels for item in items for pixels in self._pixels(item)],
                "positions": [self._positions(grid) for grid in grids],
            },
            fills={"cu_seqlens": total},
            required=self.required(items),
        )

    def required(self, items: Sequence[MediaItem]) -> Bucket:
        lengths = [rows * columns for rows, columns in _grids(items)]
        return {"patches": sum(lengths), "sequences": len(lengths), "max_seqlen": max(lengths)}

    def split(self, item: MediaItem, limit: Bucket) -> list[MediaItem]:
        """Splits between frames, each of which is a picture of its own."""
        patches = item.arrays["grids"].prod(axis=1)
        parts = runs_within(np.stack((patches, np.ones_like(patches)), axis=1), (limit["patches"], limit["sequences"]))
        return [item] if len(parts) == 1 else [self._part(item, first, end) for first, end in parts]

    def _part(self, item: MediaItem, first: int, end: int) -> MediaItem:
        arrays = {name: array[first:end] for name, array in item.arrays.items()}
        patches = int(arrays["grids"].prod(axis=1).sum())
        source = item.digest + repr((first, end)).encode()
        return MediaItem(
            kind=item.kind,
            frames=item.frames[first:end],
            arrays=arrays,
            num_patches=patches,
            num_sequences=end - first,
            num_embeds=patches // self.config.merged_patches,
            digest=media_digest(item.kind, (), {"grids": arrays["grids"]}, source),
        )

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        table = self.byte_values.to(self.patch_embed.weight.dtype)
        values = byte_lookup(buffers["pixels"], table, self.patch_embed.in_features)
        x = self.patch_embed(values) + buffers["positions"]
        rotary = rotary_cos_sin(buffers["coordinates"].T, self.frequencies, self.axes)
        cu_seqlens, max_seqlen = bounds(buffers["cu_seqlens"], bucket), bucket["max_seqlen"]
        normed = run_tower(self.blocks, x, self.final_norm, rotary, cu_seqlens, max_seqlen)
        in_blocks = normed.index_select(0, buffers["merge_index"])
        return {"embeds": self.projector(layer_norm(in_blocks, self.projector.norm))}

    def prepare(self) -> None:
        """Pads the loaded patch embedding, and permutes rows of q and k: the published order pairs neighbours, ours
        pairs halves. Scores stay the same."""
        widen_inputs(self.patch_embed)
        hidden_size, head_dim = self.config.hidden_size, self.config.head_dim
        for block in self.blocks:
            assert isinstance(block, TowerBlock)
            for values in (block.qkv.weight, block.qkv.bias):
                half_split_rows(values[: 2 * hidden_size], head_dim, head_dim)

    def _pixels(self, item: MediaItem) -> Iterator[Tensor]:
        """Of each picture the patches uint8 [rows * columns, values] in raster order, a patch as (channel, y, x)."""
        size = self.config.patch_size
        sizes = item.arrays.get("sizes", item.arrays["grids"] * size).tolist()
        for frame, (rows, columns), (high, wide) in zip(item.frames, _grids([item]), sizes, strict=True):
            picture = resized(upload_frames((frame,), self.byte_values.device), high, wide)
            whole = F.pad(picture, (0, 0, 0, columns * size - wide, 0, rows * size - high))
            yield whole.view(rows, size, columns, size, 3).permute(0, 2, 4, 1, 3).reshape(rows * columns, -1)

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        """The learned table, bicubically resized to the grid (no antialias): [rows * columns, hidden_size], cached."""
        found = self._interpolated.get(grid)
        if found is None:
            table: Tensor = self.position_table
            if tuple(table.shape[:2]) != grid:
                channels_first = table.permute(2, 0, 1)[None].float()
                scaled = F.interpolate(channels_first, size=grid, mode="bicubic", align_corners=False)
                table = scaled[0].permute(1, 2, 0).to(table.dtype)
            found = self._interpolated[grid] = table.reshape(-1, table.shape[-1])
            if len(self._interpolated) > _CACHED_GRIDS:
                self._interpolated.popitem(last=False)
        self._interpolated.move_to_end(grid)
        return found


def _grids(items: Sequence[MediaItem]) -> list[tuple[int, int]]:
    """(rows, columns) of every picture of the items."""
    return [(int(rows), int(columns)) for item in items for rows, columns in item.arrays["grids"]]


@lru_cache(maxsize=_CACHED_GRIDS)
def _merge_order(rows: int, columns: int) -> np.ndarray:
    """Patches of a raster in the order in which 2x2 blocks take them."""
    raster = np.arange(rows * columns, dtype=np.int64).reshape(rows // 2, 2, columns // 2, 2)
    return raster.transpose(0, 2, 1, 3).ravel()


def encoder_rules(config: VisionConfig, ours: str) -> list[Rule]:
    """Published names to a KimiVisionEncoder under the prefix `ours`, which ends in "."."""
    tower, block, our_block = "vision_tower.", "vision_tower.encoder.blocks.{i}.", f"{ours}blocks.{{i}}."
    size, projector = config.patch_size, {"pre_norm": "norm", "linear_1": "mlp.fc1", "linear_2": "mlp.fc2"}
    return [
        Rule(f"{tower}patch_embed.proj.weight", f"{ours}patch_embed.weight", shape=(config.hidden_size, 3, size, size)),
        Rule(f"{tower}patch_embed.proj.bias", f"{ours}patch_embed.bias"),
        Rule(f"{tower}patch_embed.pos_emb.weight", f"{ours}position_table"),
        *renamed(block, our_block, {"norm0": "attention_norm", "norm1": "mlp_norm", "wqkv": "qkv", "wo": "out"}),
        *renamed(block, our_block, {"mlp.fc0": "mlp.fc1", "mlp.fc1": "mlp.fc2"}),
        *renamed(tower, ours, {"encoder.final_layernorm": "final_norm"}),
        *renamed("multi_modal_projector.", f"{ours}projector.", projector),
    ]
