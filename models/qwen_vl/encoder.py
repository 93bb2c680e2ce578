"""What the vision encoders of the Qwen-VL families share: patches, their values and places, how items are cut, and the
sizes of captured buckets."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from models.interfaces.capturable import Bucket, BufferSpec, Plan
from models.interfaces.media import MediaItem
from models.layers.dense_segments import dense_buckets
from models.layers.packed import byte_lookup, byte_values
from models.layers.resample import resized
from models.layers.rotary import inverse_frequencies
from models.layers.upload import upload_frames
from models.qwen_vl.config import ROTARY_THETA, ImageSettings, VisionConfig
from models.qwen_vl.items import grid_of

NORM_EPS = 1e-6
_PATCHES_PER_SEQUENCE = 64
_MAX_SEQUENCES = 64
_LARGEST_BUCKET_ITEMS = 4
_CACHED_GRIDS = 64


class PatchEncoder(nn.Module):
    """Base of the encoders. A frame pair is an attention segment; four consecutive patches make one embedding.

    Buffers: pixels uint8 [patches, values], columns (channel, time, y, x); coordinates int32 [patches, 2], row and
    column of the patch in its frame; cu_seqlens int32 [sequences + 1], its tail repeats the last value.
    bucket_sizes: patches of the captured buckets. exact_sizes: (sequences, patches of each) with graphs of their own.
    """

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
        self.register_buffer("byte_values", byte_values(images.mean, images.std), persistent=False)

    def plan(self, items: Sequence[MediaItem]) -> Plan:
        places, lengths = [np.empty((0, 2), np.int32)], []
        for item in items:
            t, h, w = grid_of(item)
            places += [block_coordinates(h, w, self.config.merge_size)] * t
            lengths += [h * w] * t
        cu_seqlens = np.cumsum([0, *lengths], dtype=np.int32)
        return Plan(
            arrays={"coordinates": np.concatenate(places), "cu_seqlens": cu_seqlens},
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
        """With a sequence for each frame pair."""
        return {
            "patches": sum(item.num_patches for item in items),
            "sequences": sum(item.num_sequences for item in items),
            "max_seqlen": max((item.num_patches // item.num_sequences for item in items), default=0),
        }

    def pixels(self, items: Sequence[MediaItem]) -> dict[str, list[Tensor]]:
        """The tensors of a plan."""
        return {"pixels": [patch_rows(item, self.config, self.patch_embed.weight.device) for item in items]}

    def embed_patches(self, pixels: Tensor) -> Tensor:
        """Patch rows uint8 [P, columns] -> [P, hidden_size]."""
        embedded: Tensor = self.patch_embed(self.normalise(pixels))
        return embedded

    def normalise(self, pixels: Tensor) -> Tensor:
        """Bytes [P, columns] -> normalised values in the model's dtype, looked up so that they are the reference's."""
        return byte_lookup(pixels, self.byte_values.to(self.patch_embed.weight.dtype))

    def split(self, item: MediaItem, limit: Bucket) -> list[MediaItem]:
        """Runs of whole frame pairs that fit, at least one pair each; there is no attention between pairs."""
        t, _, _ = grid_of(item)
        pairs = max(1, min(limit[name] // size for name, size in self.pair_size(item).items()))
        if pairs >= t:
            return [item]
        return [self._part(item, start, min(start + pairs, t)) for start in range(0, t, pairs)]

    def _part(self, item: MediaItem, start: int, stop: int) -> MediaItem:
        pair = self.config.temporal_patch_size
        _, h, w = grid_of(item)
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

    def pair_size(self, item: MediaItem) -> dict[str, int]:
        """What one frame pair takes of each size of a bucket that adds up."""
        _, h, w = grid_of(item)
        return {"patches": h * w, "sequences": 1}

    def default_buckets(self) -> list[Bucket]:
        """With bucket_sizes, rounded up to whole embedding rows. The largest one holds four of the largest pictures
        that the checkpoint allows, if the sizes go that far."""
        merged = self.config.merged_patches
        sizes = [-(-patches // merged) * merged for patches in self.bucket_sizes]
        largest = _LARGEST_BUCKET_ITEMS * self.images.max_pixels // self.config.patch_size**2
        steps = [patches for patches in sizes if patches < largest] or [sizes[0]]
        steps += [patches for patches in sizes if patches >= largest and patches not in steps][:1]
        return [
            {
                "patches": patches,
                "sequences": min(max(patches // _PATCHES_PER_SEQUENCE, 8), _MAX_SEQUENCES),
                "max_seqlen": patches,
            }
            for patches in steps
        ]

    def dense_buckets(self, bucket_list: Sequence[Bucket]) -> list[Bucket]:
        head_dim, merged_patches = self.config.head_dim, self.config.merged_patches
        return dense_buckets(bucket_list, self.exact_sizes, head_dim, merged_patches, self.patch_embed.weight)


def patch_rows(item: MediaItem, config: VisionConfig, device: torch.device) -> Tensor:
    """Frames uint8 of any size -> patch rows uint8 [patches, channels * 2 * size * size] on `device`.

    Rows run frame pair by frame pair, in each by 2 x 2 blocks row by row, and in each block by its four patches row by
    row. Columns run channel, time, y, x. An odd last frame is used twice.
    """
    size, merge, pair = config.patch_size, config.merge_size, config.temporal_patch_size
    t, h, w = grid_of(item)
    frames = resized(upload_frames(item.frames, device), h * size, w * size)
    missing = t * pair - len(frames)
    if missing:
        frames = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1)))
    cut = frames.view(t, pair, h // merge, merge, size, w // merge, merge, size, config.channels)
    return cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(t * h * w, config.patch_values)


@lru_cache(maxsize=_CACHED_GRIDS)
def block_coordinates(h: int, w: int, merge: int) -> np.ndarray:
    """Row and column of each patch of a frame, in block order, int32 [h * w, 2]. Cached: do not write to the array."""
    grid = np.indices((h, w), dtype=np.int32).reshape(2, h // merge, merge, w // merge, merge)
    return grid.transpose(1, 3, 2, 4, 0).reshape(h * w, 2)


def grid_frequencies(head_dim: int) -> tuple[Tensor, Tensor]:
    """Frequencies float32 and axes int64, both [head_dim / 2], for models.layers.rotary.rotary_cos_sin.

    Half of a head's angles rotate by the patch's row (axis 0), the other half, with the same frequencies, by its column
    (axis 1).
    """
    frequencies = inverse_frequencies(head_dim // 2, ROTARY_THETA)
    return frequencies.repeat(2), torch.arange(2, device="cpu").repeat_interleave(len(frequencies))
