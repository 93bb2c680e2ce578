"""Tower and resampler as one capturable encoder over packed patches.

A slice is a segment of the tower's attention, a group of slices one of the resampler's: pictures, sliced pictures,
videos and fused videos differ only in the contents of two cu_seqlens vectors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn

from models.interfaces.capturable import Bucket, BufferSpec, Plan
from models.interfaces.media import MediaItem
from models.layers.packed import byte_lookup, byte_values, raster_coordinates, runs_within
from models.layers.resample import resized
from models.layers.upload import upload_frames
from models.minicpmv.config import MiniCPMVConfig, VisionConfig
from models.minicpmv.resampler import Resampler
from models.minicpmv.slicing import slice_sizes
from models.minicpmv.tower import Tower
from models.minicpmv.video import MAX_PACK

SLICES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 24, 32)
"""A picture has 1 to 10 slices; the larger steps hold several pictures, or a part of a video."""


class SliceEncoder(nn.Module):
    """A tower over packed slices, and what the encoders of all versions make of the slices."""

    byte_values: Tensor

    def __init__(self, vision: VisionConfig, mean: float, std: float) -> None:
        super().__init__()
        self.tower = Tower(vision)
        self.register_buffer("byte_values", byte_values((mean,), (std,)), persistent=False)

    def prepare(self) -> None:
        """Constants of the loaded weights."""
        self.tower.prepare()
        self.byte_values = self.byte_values.to(self.tower.patch_embedding.weight.dtype)

    def dense_buckets(self, bucket_list: Sequence[Bucket]) -> list[Bucket]:
        """None: a slice is too small."""
        return []

    def patches(self, pixels: Tensor) -> Tensor:
        """Bytes of patches -> what the tower takes."""
        return byte_lookup(pixels, self.byte_values, self.tower.patch_embedding.in_features)

    def grids(self, items: Iterable[MediaItem]) -> list[tuple[int, int]]:
        """(rows, columns) in patches of every slice."""
        return slice_grids(items, self.tower.config.patch_size)


class MiniCPMVEncoder(SliceEncoder):
    """VisionEncoder of MiniCPM-V. Buffers of a bucket of P patches, S sequences (slices) and G groups:

    pixels uint8 [P, 3 * patch_size^2], a patch as (y, x, channel); position_ids int32 [P]; coordinates int32 [P, 2]
    (column, row); cu_slices int32 [S + 1] and cu_groups int32 [G + 1], their tails repeating the total; with fused
    frames temporal_ids int32 [S] (negative: none) and slice_ids int32 [P].
    """

    rare_buckets: Sequence[Bucket] = ()

    def __init__(self, config: MiniCPMVConfig) -> None:
        super().__init__(config.vision, config.pixel_mean, config.pixel_std)
        self.config = config
        self.resampler = Resampler(
            config.vision.hidden_size, config.hidden_size, config.num_queries, temporal=config.fuses_frames
        )

    def prepare(self) -> None:
        super().prepare()
        self.resampler.prepare()

    def default_buckets(self) -> list[Bucket]:
        side = self.config.slicing.scale_resolution // self.config.vision.patch_size
        # Slices of aspects within 4:1 have at most this many patches: sides are rounded to whole patches.
        per_slice = side * (side + 1)
        pack = MAX_PACK if self.config.fuses_frames else 1
        return [
            {
                "patches": slices * per_slice,
                "sequences": slices,
                "groups": slices,
                "max_seqlen": per_slice,
                "max_group_keys": min(slices, pack) * per_slice,
            }
            for slices in SLICES
        ]

    def buffer_specs(self, bucket: Bucket) -> dict[str, BufferSpec]:
        patches, slices = bucket["patches"], bucket["sequences"]
        specs = {
            "pixels": BufferSpec((patches, 3 * self.config.vision.patch_size**2), torch.uint8),
            "position_ids": BufferSpec((patches,), torch.int32),
            "coordinates": BufferSpec((patches, 2), torch.int32),
            "cu_slices": BufferSpec((slices + 1,), torch.int32),
            "cu_groups": BufferSpec((bucket["groups"] + 1,), torch.int32),
        }
        if self.config.fuses_frames:
            specs["temporal_ids"] = BufferSpec((slices,), torch.int32)
            specs["slice_ids"] = BufferSpec((patches,), torch.int32)
        return specs

    def required(self, items: Sequence[MediaItem]) -> Bucket:
        lengths = [rows * columns for rows, columns in self.grids(items)]
        sizes = [int(size) for item in items for size in item.arrays["group_sizes"]]
        ends = np.cumsum(sizes)
        group_keys = [sum(lengths[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
        return {
            "patches": sum(lengths),
            "sequences": len(lengths),
            "groups": len(sizes),
            "max_seqlen": max(lengths, default=0),
            "max_group_keys": max(group_keys, default=0),
        }

    def plan(self, items: Sequence[MediaItem]) -> Plan:
        grids = self.grids(items)
        lengths = [rows * columns for rows, columns in grids]
        cu_slices = cumulative(lengths)
        total = float(cu_slices[-1])
        group_ends = cumulative(np.concatenate([item.arrays["group_sizes"] for item in items]))
        arrays = {
            "position_ids": np.concatenate([self._position_ids(*grid) for grid in grids]),
            "coordinates": np.concatenate([raster_coordinates(*grid) for grid in grids]),
            "cu_slices": cu_slices,
            "cu_groups": cu_slices[group_ends],
        }
        if self.config.fuses_frames:
            arrays["temporal_ids"] = np.concatenate([item.arrays["temporal_ids"] for item in items])
            arrays["slice_ids"] = np.repeat(np.arange(len(grids), dtype=np.int32), lengths)
        fills = {"cu_slices": total, "cu_groups": total}
        pixels = patch_rows(items, self.config.vision.patch_size, 1, self.byte_values.device)
        return Plan(arrays=arrays, required=self.required(items), tensors={"pixels": pixels}, fills=fills)

    def split(self, item: MediaItem, limit: Bucket) -> list[MediaItem]:
        """Parts made of whole groups, each as large as `limit` allows."""
        sizes = item.arrays["group_sizes"]
        patches = cumulative([rows * columns for rows, columns in self.grids([item])])[cumulative(sizes)]
        groups = np.stack((np.diff(patches), sizes, np.ones_like(sizes)), axis=1)
        parts = runs_within(groups, (limit["patches"], limit["sequences"], limit["groups"]))
        return [item] if len(parts) == 1 else [self._part(item, first, last) for first, last in parts]

    def forward(self, buffers: Mapping[str, Tensor], bucket: Bucket) -> dict[str, Tensor]:
        patches = self.patches(buffers["pixels"])
        hidden = self.tower(patches, buffers["position_ids"], buffers["cu_slices"], bucket["max_seqlen"])
        embeds = self.resampler(
            hidden,
            buffers["coordinates"],
            buffers["cu_groups"],
            temporal_ids=buffers.get("temporal_ids"),
            slice_ids=buffers.get("slice_ids"),
        )
        return {"embeds": embeds}

    def _position_ids(self, rows: int, columns: int) -> np.ndarray:
        side = self.config.vision.table_side
        if self.config.flat_positions:
            return buckets(rows * columns, side)
        return position_ids(rows, columns, side)

    def _part(self, item: MediaItem, first: int, last: int) -> MediaItem:
        """Groups first .. last of an item."""
        sizes = item.arrays["group_sizes"]
        begin, end = int(sizes[:first].sum()), int(sizes[:last].sum())
        part = part_of(item, begin, end, self.config.vision.patch_size)
        groups = {"group_sizes": sizes[first:last], "temporal_ids": item.arrays["temporal_ids"][begin:end]}
        return replace(part, arrays={**part.arrays, **groups}, num_embeds=(last - first) * self.config.num_queries)


def position_ids(rows: int, columns: int, side: int) -> np.ndarray:
    """int32 [rows * columns] of a rows x columns picture, row by row, into a table of side * side entries."""
    return (buckets(rows, side)[:, None] * side + buckets(columns, side)[None, :]).reshape(-1)


@lru_cache(maxsize=4096)
def buckets(length: int, side: int) -> np.ndarray:
    """int32 [length]: which of `side` equal parts each of `length` coordinates falls into, by the published expression.
    That is not floor(side * i / length), since float32 puts some coordinates below an edge that they equal. Cached: do
    not write to the array."""
    with torch.device("cpu"):
        edges = torch.arange(1 / side, 1.0, 1 / side)
        coordinates = torch.arange(0, 1 - 1e-6, float(1 / np.float32(length)))
        return torch.bucketize(coordinates, edges, out_int32=True, right=True).numpy()


def cumulative(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def slice_grids(items: Iterable[MediaItem], patch_size: int) -> list[tuple[int, int]]:
    """(rows, columns) in patches of every slice."""
    sizes = [size for item in items for size in slice_sizes(item.frames, item.arrays)]
    return [(height // patch_size, width // patch_size) for height, width in sizes]


def part_of(item: MediaItem, first: int, end: int, patch_size: int) -> MediaItem:
    """The item with its slices first .. end alone; num_embeds is still the whole item's."""
    frames, arrays = item.frames, item.arrays
    if "cuts" in arrays:
        arrays = {**arrays, "cuts": arrays["cuts"][first:end]}
    else:
        frames = frames[first:end]
    digest = hashlib.sha256(item.digest + repr((first, end)).encode()).digest()
    part = replace(item, frames=frames, arrays=arrays, num_sequences=end - first, digest=digest)
    return replace(part, num_patches=sum(rows * columns for rows, columns in slice_grids([part], patch_size)))


def in_squares(slices: Tensor, size: int, merge: int) -> Tensor:
    """[n, height, width, channels] -> [patches, values], a row of a patch one run. Patches come row by row; if merge is
    2 or 4, by squares of so many a side, row by row, and in these by squares of half their side."""
    (count, height, width, channels), halvings = slices.shape, merge.bit_length() - 1
    rows, columns = (side // (size * merge) for side in (height, width))
    cut = slices.view(count, rows, *[2] * halvings, size, columns, *[2] * halvings, size * channels)
    halves = [axis for place in range(2, 2 + halvings) for axis in (place, place + 2 + halvings)]
    return cut.permute(0, 1, 3 + halvings, *halves, 2 + halvings, -1).reshape(-1, size * size * channels)


def patch_rows(items: Iterable[MediaItem], size: int, merge: int, device: torch.device) -> list[Tensor]:
    """Patches uint8 [patches, values] of runs of slices, on `device` and as of `in_squares`."""
    return [in_squares(run, size, merge) for item in items for run in _slices_of(item, device)]


def _slices_of(item: MediaItem, device: torch.device) -> Iterator[Tensor]:
    """uint8 [n, height, width, 3]: slices of one size that follow each other."""
    if "cuts" not in item.arrays:
        for _, frames in groupby(item.frames, lambda frame: frame.shape):
            yield upload_frames(tuple(frames), device)
        return
    whole = upload_frames(item.frames, device)
    for (*size, _, _), cuts in groupby(item.arrays["cuts"].tolist(), lambda cut: (*cut[:2], *cut[4:])):
        (picture,) = resized(whole, *size)
        yield torch.stack([picture[top : top + high, left : left + wide] for _, _, top, left, high, wide in cuts])
