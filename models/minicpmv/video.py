"""Chooses the frames of a video that are read, and how 4.5 fuses them into groups.

Sources: the published README examples (encode_video) of 2.6, 4.0 and 4.5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from models.interfaces.media import VideoMetadata

UNFUSED_FRAMES_PER_SECOND = 1.0
UNFUSED_MAX_FRAMES = 64
FUSED_FRAMES_PER_SECOND = 3.0
MAX_GROUPS = 180
MAX_PACK = 6
TIME_SCALE = 0.1
"""Seconds per temporal id."""


def sample_unfused(metadata: VideoMetadata, fps: float | None, max_frames: int) -> list[int]:
    """2.5, 2.6, 4.0: one frame per second (or `fps`), thinned evenly to at most 64 (or `max_frames`) frames."""
    step = max(1, round(metadata.fps / (fps or UNFUSED_FRAMES_PER_SECOND)))
    indices = list(range(0, metadata.num_frames, step))
    limit = min(UNFUSED_MAX_FRAMES, max_frames)
    return indices if len(indices) <= limit else [indices[i] for i in uniform(len(indices), limit)]


def sample_fused(metadata: VideoMetadata, fps: float | None, max_frames: int) -> tuple[list[int], int]:
    """4.5: 180 frames alone, more in groups of up to 6 as duration * fps grows. Returns also how many neighbours share
    one set of queries.

    `max_frames` below the rule's count lowers the rate, and the groups follow from the frames that are left. Of a list
    of frames all are read, up to the 1080 that the groups can hold.
    """
    allowed = min(max_frames, metadata.num_frames)
    if metadata.listed:
        count = max(1, min(allowed, MAX_GROUPS * MAX_PACK))
        return uniform(metadata.num_frames, count), math.ceil(count / MAX_GROUPS)
    fps = fps or FUSED_FRAMES_PER_SECOND
    duration = _duration(metadata)
    if fps * int(duration) <= MAX_GROUPS:
        pack = 1
        # The published code rounds the source's rate, and divides by zero below half a frame a second.
        source_fps = round(metadata.fps) or metadata.fps
        count = round(min(fps, source_fps) * min(MAX_GROUPS, duration))
    else:
        pack = math.ceil(duration * fps / MAX_GROUPS)
        count = round(duration * fps)
        if pack > MAX_PACK:
            pack, count = MAX_PACK, MAX_GROUPS * MAX_PACK
    if count > allowed:
        count, pack = allowed, math.ceil(allowed / MAX_GROUPS)
    return uniform(metadata.num_frames, max(count, 1)), pack


def fused_pack(metadata: VideoMetadata, fps: float | None, num_frames: int) -> int:
    """Frames per group of a video of which `num_frames` were read."""
    indices, pack = sample_fused(metadata, fps, num_frames)
    return pack if len(indices) == num_frames else math.ceil(num_frames / MAX_GROUPS)


def uniform(length: int, count: int) -> list[int]:
    """`count` indices in the middles of equal parts of range(length)."""
    gap = length / count
    return [int(i * gap + gap / 2) for i in range(count)]


def temporal_ids(times: Sequence[float], metadata: VideoMetadata) -> np.ndarray:
    """int32 [frames]: tenths of a second, truncated as in the published code.

    The grid value k * 0.1 divided by 0.1 falls just below k for k = 43, 81, 86, ..., whose id is k - 1.
    """
    grid = np.arange(0, max(_duration(metadata), TIME_SCALE), TIME_SCALE)
    nearest = [int(np.argmin(np.abs(grid - time))) for time in times]
    return (grid[nearest] / TIME_SCALE).astype(np.int32)


def _duration(metadata: VideoMetadata) -> float:
    """Seconds as computed by the published code; a container may have no frame rate."""
    return metadata.num_frames / metadata.fps if metadata.fps > 0 else metadata.duration
