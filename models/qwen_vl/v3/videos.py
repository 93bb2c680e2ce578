"""Frames of a video: which ones are read, their size, and the time in front of each pair. Torch-free.

Sources: the published preprocessor files with the video processor of transformers 5, and the times of the authors' own
processor (transformers 4.57).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.interfaces.errors import InputError
from models.interfaces.media import VideoFrames, VideoMetadata
from models.qwen_vl.pictures import DEFAULT_FPS, check_aspect

_MIN_FRAMES, _MAX_FRAMES = 4, 768


@dataclass(frozen=True)
class FrameRule:
    """Which frames of a video a checkpoint reads: `fps` per second, but at least `min_frames` and at most `max_frames`.
    The defaults are those of the published class; no published file overrides them."""

    fps: float = DEFAULT_FPS
    min_frames: int = _MIN_FRAMES
    max_frames: int = _MAX_FRAMES


def sample_frames(
    metadata: VideoMetadata, *, fps: float | None, max_frames: int, rule: FrameRule = FrameRule()
) -> list[int]:
    """Evenly spaced frames by the checkpoint's rule, or fewer if the video is shorter or `max_frames` is smaller. `fps`
    overrides the rule's rate. If it is the rate of the source, every frame was asked for, so rule.max_frames counts
    only where it is above the published one. A list of frames that is short enough is used whole."""
    total = metadata.num_frames
    if total < 1:
        raise InputError("video_url", "the video has no frames")
    all_asked = fps is not None and fps == metadata.fps
    limit = max(rule.max_frames, _MAX_FRAMES) if all_asked or metadata.listed else rule.max_frames
    limit = min(limit, max_frames)
    if metadata.listed and total <= limit:
        return list(range(total))
    rate = metadata.fps if metadata.fps > 0 else DEFAULT_FPS
    wanted = total if all_asked else int(min(total, total / rate * (fps or rule.fps)))
    count = max(1, min(max(wanted, rule.min_frames), limit, total))
    return np.linspace(0, total - 1, count).round().astype(int).tolist()


def video_size(
    num_frames: int, height: int, width: int, *, pair: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width in multiples of `factor` such that the pixels of all frames lie within the bounds. InputError as
    of `check_aspect`."""
    num_frames = max(num_frames, pair)  # a single frame is used twice
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    check_aspect(height, width, "video_url")
    # Python rounds half to even, and so does the reference, frames included; it scales by all of them.
    rows, columns = round(height / factor), round(width / factor)
    pixels = round(num_frames / pair) * pair * rows * columns * factor**2
    if pixels > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
    elif pixels < min_pixels:
        stretch = math.sqrt(min_pixels / (num_frames * height * width))
        rows, columns = (math.ceil(side * stretch / factor) for side in (height, width))
    return rows * factor, columns * factor


def pair_tenths(video: VideoFrames, pair: int) -> list[int]:
    """Time of each frame pair in tenths of a second, rounded like the printed time: the mean of its frames' times in
    the source. An odd last frame counts twice."""
    fps = video.metadata.fps
    times = list(video.times) if fps <= 0 else [index / fps for index in video.indices]
    times += times[-1:] * (-len(times) % pair)
    return [_tenths(times[start : start + pair]) for start in range(0, len(times), pair)]


def _tenths(times: Sequence[float]) -> int:
    return int(f"{(times[0] + times[-1]) / 2:.1f}".replace(".", ""))


def time_text(tenths: int) -> str:
    return f"<{tenths // 10}.{tenths % 10} seconds>"
