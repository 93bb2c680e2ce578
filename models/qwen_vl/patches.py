"""Patches of the Qwen-VL towers: their rows, their places, and the sizes of captured buckets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket
from models.interfaces.media import MediaItem
from models.layers.resample import resized
from models.layers.rotary import inverse_frequencies
from models.layers.upload import upload_frames
from models.qwen_vl.config import ROTARY_THETA, ImageSettings, VisionConfig
from models.qwen_vl.items import grid_of

_PATCHES_PER_SEQUENCE = 64
_MAX_SEQUENCES = 64
_LARGEST_BUCKET_ITEMS = 4
_CACHED_GRIDS = 64


def required_patches(items: Sequence[MediaItem]) -> dict[str, int]:
    """The smallest bucket that holds `items`, with a sequence for each frame pair."""
    return {
        "patches": sum(item.num_patches for item in items),
        "sequences": sum(item.num_sequences for item in items),
        "max_seqlen": max((item.num_patches // item.num_sequences for item in items), default=0),
    }


def patch_buckets(config: VisionConfig, images: ImageSettings, sizes: Sequence[int]) -> list[dict[str, int]]:
    """Buckets with the numbers of patches in `sizes`, each rounded up to whole embedding rows. The largest one holds
    four of the largest pictures that the checkpoint allows, if `sizes` go that far."""
    sizes = [-(-patches // config.merged_patches) * config.merged_patches for patches in sizes]
    largest = _LARGEST_BUCKET_ITEMS * images.max_pixels // config.patch_size**2
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


def split_frame_pairs(
    item: MediaItem, config: VisionConfig, limit: Bucket, sizes: Mapping[str, int]
) -> list[MediaItem]:
    """Cuts an item into runs of whole frame pairs that fit `limit`, at least one pair each; there is no attention
    between pairs. sizes: how much one pair takes of each size of the bucket that adds up.
    """
    t, _, _ = grid_of(item)
    pairs = max(1, min(limit[name] // size for name, size in sizes.items()))
    if pairs >= t:
        return [item]
    return [_part(item, config, start, min(start + pairs, t)) for start in range(0, t, pairs)]


def _part(item: MediaItem, config: VisionConfig, start: int, stop: int) -> MediaItem:
    pair = config.temporal_patch_size
    _, h, w = grid_of(item)
    patches = (stop - start) * h * w
    return replace(
        item,
        frames=item.frames[start * pair : stop * pair],
        arrays={"grid_thw": np.array([stop - start, h, w], dtype=np.int32)},
        num_patches=patches,
        num_sequences=stop - start,
        num_embeds=patches // config.merged_patches,
        digest=hashlib.sha256(item.digest + f"pairs {start}:{stop}".encode()).digest(),
    )


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


def byte_values(images: ImageSettings) -> np.ndarray:
    """Normalised value of each byte, float32 [channels, 256]. Rounded as in the reference: scaled in float64 and cast,
    then normalised in float32."""
    scaled = (np.arange(256) * (1 / 255)).astype(np.float32)
    mean, std = np.array(images.mean, np.float32), np.array(images.std, np.float32)
    return (scaled[None, :] - mean[:, None]) / std[:, None]
