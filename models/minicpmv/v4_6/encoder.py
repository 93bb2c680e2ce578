"""The tower and mergers of MiniCPM-V 4.6 and 4.7 as one capturable encoder over packed patches.

The patches that a merger joins lie side by side, four to a window and four windows to a token, so that both mergers are
views: attention inside a slice does not depend on the order of its patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from models.interfaces.capturable import Bucket, BufferSpec, Plan
from models.interfaces.media import MediaItem
from models.interfaces.rule import Rule, qkv_rules, renamed
from models.layers.mlp import Merger
from models.layers.packed import WINDOW, layer_norm, runs_within, window_attention
from models.layers.tower import run_tower
from models.minicpmv.encoder import SLICES, SliceEncoder, cumulative, in_squares, part_of, patch_rows
from models.minicpmv.tower import tower_rules
from models.minicpmv.v4_6.config import MiniCPMV46Config


class WindowMerger(nn.Module):
    """Attention inside windows, and each window to one row: its mean plus an MLP of its rows side by side."""

    def __init__(self, config: MiniCPMV46Config) -> None:
        super().__init__()
        vision = config.vision
        self.num_heads = vision.num_heads
        self.attention_norm = nn.LayerNorm(vision.hidden_size, eps=vision.norm_eps)
        self.qkv = nn.Linear(vision.hidden_size, 3 * vision.hidden_size)
        self.out = nn.Linear(vision.hidden_size, vision.hidden_size)
        width, inner = WINDOW * vision.hidden_size, WINDOW * vision.intermediate_size
        norm = nn.LayerNorm(width, eps=vision.norm_eps)
        self.merge = Merger(norm, width, vision.hidden_size, inner, "gelu_tanh")

    def forward(self, x: Tensor, normed: Tensor) -> Tensor:
        """x and attention_norm(x) [P, hidden_size] -> [P / WINDOW, hidden_size]."""
        x = x + self.out(window_attention(self.qkv(normed), self.num_heads))
        windows = x.view(-1, WINDOW, x.shape[1])
        return windows.mean(dim=1) + self.merge(layer_norm(windows.flatten(1), self.merge.norm))


class MiniCPMV46Encoder(SliceEncoder):
    """VisionEncoder of MiniCPM-V 4.6 and 4.7. Buffers of a bucket of P patches, a multiple of 16, and S slices: pixels
    uint8 [P, 3 * patch_size^2], a patch as (y, x, channel); position_ids int32 [P]; cu_slices int32 [S + 1], its tail
    repeating the total. Embeddings: a row for each square of 4^2 patches, in 4x mode of 2^2, row by row.

    A bucket counts slices of 16x mode as sequences and those of 4x mode as fine_sequences, and one of both is 0: no
    bucket holds items of both modes.
    """

    def __init__(self, config: MiniCPMV46Config) -> None:
        super().__init__(config.vision, config.pixel_mean, config.pixel_std)
        self.config, vision = config, config.vision
        self.window_merger = WindowMerger(config)
        width = WINDOW * vision.hidden_size
        self.merger = Merger(nn.LayerNorm(width, eps=vision.norm_eps), width, config.hidden_size)

    def default_buckets(self) -> list[Bucket]:
        return self._buckets(self.config.merge)

    @property
    def rare_buckets(self) -> list[Bucket]:
        """Of the other mode."""
        return self._buckets(6 - self.config.merge)

    def _buckets(self, merge: int) -> list[Bucket]:
        side = self.config.images.slicing.scale_resolution // self.config.vision.patch_size
        # Slices have about side^2 patches, those of aspects within 4:1 one square more in each row at most.
        square, longest = side * side, side * (side + merge)
        sizes = {slices * longest: slices for slices in SLICES} | {square: 1}
        # Most pictures and videos are squares, of which one, a picture's overview, may be longer.
        sizes |= {(slices - 1) * square + longest: slices for slices in SLICES}
        strip = 4 * side * side  # Of aspects beyond that.
        return [
            {"patches": patches, **_slices(slices, merge), "max_seqlen": min(patches, strip)}
            for patches, slices in sorted(sizes.items())
        ]

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        patches = bucket["patches"]
        return {
            "pixels": BufferSpec((patches, 3 * self.config.vision.patch_size**2), torch.uint8),
            "position_ids": BufferSpec((patches,), torch.int32),
            "cu_slices": BufferSpec((bucket["sequences"] + bucket["fine_sequences"] + 1,), torch.int32),
        }

    def required(self, items: Sequence[MediaItem]) -> Bucket:
        lengths = [rows * columns for rows, columns in self.grids(items)]
        slices = _slices(len(lengths), merge_of(items[0]))
        return {"patches": sum(lengths), **slices, "max_seqlen": max(lengths)}

    def plan(self, items: Sequence[MediaItem]) -> Plan:
        grids, side, merge = self.grids(items), self.config.vision.table_side, merge_of(items[0])
        cu_slices = cumulative([rows * columns for rows, columns in grids])
        arrays = {
            "position_ids": np.concatenate([_position_ids(*grid, side, merge) for grid in grids]),
            "cu_slices": cu_slices,
        }
        pixels = patch_rows(items, self.config.vision.patch_size, merge, self.byte_values.device)
        fills = {"cu_slices": float(cu_slices[-1])}
        return Plan(arrays=arrays, required=self.required(items), tensors={"pixels": pixels}, fills=fills)

    def split(self, item: MediaItem, limit: Bucket) -> list[MediaItem]:
        """Parts made of whole slices, each as large as `limit` allows, whatever its mode is."""
        slices, merge = limit["sequences"] + limit["fine_sequences"], merge_of(item)
        side = self.config.images.slicing.scale_resolution // self.config.vision.patch_size
        patches = min(limit["patches"], SLICES[-1] * side * (side + merge))  # of the mode's largest bucket
        if item.num_sequences == 1 or (item.num_patches <= patches and item.num_sequences <= slices):
            return [item]
        lengths = np.array([rows * columns for rows, columns in self.grids([item])])
        places = runs_within(np.stack((lengths, np.ones_like(lengths)), axis=1), (patches, slices))
        parts = [part_of(item, first, end, self.config.vision.patch_size) for first, end in places]
        return [replace(part, num_embeds=part.num_patches // merge**2) for part in parts]

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        cu_slices, longest, tower = buffers["cu_slices"], bucket["max_seqlen"], self.tower
        x = tower.embed(self.patches(buffers["pixels"]), buffers["position_ids"])
        blocks = tower.layers
        if not bucket["fine_sequences"]:
            last = self.config.insert_layer + 1
            # run_tower leaves the sum in x that it returns the norm of.
            normed = run_tower(blocks[:last], x, self.window_merger.attention_norm, None, cu_slices, longest)
            x = self.window_merger(x, normed)
            blocks, cu_slices, longest = blocks[last:], cu_slices // WINDOW, -(-longest // WINDOW)
        hidden = run_tower(blocks, x, tower.final_norm, None, cu_slices, longest)
        return {"embeds": self.merger(layer_norm(hidden.view(-1, self.merger.width), self.merger.norm))}


def merge_of(item: MediaItem) -> int:
    """Patches per side of a token: 4 in 16x mode, 2 in 4x mode."""
    return 4 if item.num_patches == 16 * item.num_embeds else 2


def _slices(count: int, merge: int) -> Bucket:
    return {"sequences": count * (merge == 4), "fine_sequences": count * (merge == 2)}


@lru_cache(maxsize=1024)
def _position_ids(rows: int, columns: int, side: int, merge: int) -> np.ndarray:
    """int32 [rows * columns] into the learned table of side * side entries, in the order of `in_squares`."""
    row, column = np.arange(rows) * side // rows, np.arange(columns) * side // columns
    ids = torch.from_numpy((row[:, None] * side + column).astype(np.int32))
    return in_squares(ids[None, ..., None], 1, merge).numpy().ravel()


_MERGER_NAMES = {"pre_norm": "norm", "linear_1": "mlp.fc1", "linear_2": "mlp.fc2"}


def encoder_rules(config: MiniCPMV46Config) -> list[Rule]:
    """Rules for a MiniCPMV46Encoder named "encoder"."""
    width, published, ours = config.vision.hidden_size, "model.vision_tower.vit_merger.", "encoder.window_merger."
    return [
        *tower_rules(config.vision, "encoder.tower.", "model.vision_tower."),
        *renamed("model.merger.mlp.0.", "encoder.merger.", _MERGER_NAMES),
        *qkv_rules(f"{published}self_attn.", f"{ours}qkv", (width, width, width)),
        *renamed(published, ours, {"self_attn.out_proj": "out", "layer_norm1": "attention_norm"}),
        *renamed(published, f"{ours}merge.", _MERGER_NAMES),
    ]
