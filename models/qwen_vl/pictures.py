"""Sizes of pictures, and sampling of frames, as in the reference preprocessing and qwen-vl-utils 0.0.14. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from models.interfaces.errors import InputError
from models.interfaces.media import VideoMetadata

_MAX_ASPECT = 200
DEFAULT_FPS = 2.0
_MIN_FRAMES, _MAX_FRAMES = 4, 768


@dataclass(frozen=True)
class VideoLimits:
    """Bounds on the pixels of a video's resized frames: of each frame, and roughly of one frame of every pair together
    (total_pixels)."""

    min_frame_pixels: int
    max_frame_pixels: int
    total_pixels: int

    def frame_pixels(self, num_frames: int) -> int:
        """Upper bound on the pixels of each of `num_frames` frames: a share of the total, but at least 1.05 times the
        minimum."""
        shared = int(self.total_pixels / num_frames * 2)
        return min(self.max_frame_pixels, max(shared, int(self.min_frame_pixels * 1.05)))

    @property
    def most_frames(self) -> int:
        """Number of frames of the smallest size that the total can hold."""
        return int(self.total_pixels / (self.min_frame_pixels * 1.05) * 2)


def official_video_limits(max_pixels: int, context_length: int, factor: int) -> VideoLimits:
    """The limits of qwen-vl-utils: 128 to 768 embeddings per frame, and 0.9 of the context for the whole video. No
    frame has more pixels than the checkpoint allows a picture."""
    block = factor**2
    return VideoLimits(
        min_frame_pixels=min(128 * block, max_pixels),
        max_frame_pixels=min(768 * block, max_pixels),
        total_pixels=int(0.9 * context_length * block),
    )


def check_aspect(height: int, width: int, field: str) -> None:
    """InputError for a picture more oblong than 200:1."""
    if max(height, width) > _MAX_ASPECT * min(height, width):
        raise InputError(field, f"{width}x{height} pixels are over the aspect ratio of {_MAX_ASPECT}:1")


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int, field: str = "image_url"
) -> tuple[int, int]:
    """Height and width in multiples of `factor`, with a product within the bounds. InputError as of `check_aspect`."""
    check_aspect(height, width, field)
    # Python rounds half to even, and so does the reference.
    rounded_height, rounded_width = round(height / factor) * factor, round(width / factor) * factor
    if rounded_height * rounded_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if rounded_height * rounded_width < min_pixels:
        stretch = math.sqrt(min_pixels / (height * width))
        return math.ceil(height * stretch / factor) * factor, math.ceil(width * stretch / factor) * factor
    return rounded_height, rounded_width


def sample_frames(metadata: VideoMetadata, *, fps: float | None, max_frames: int) -> list[int]:
    """Indices of evenly spaced frames: 2 per second, or `fps`, but at least 4 and at most 768, and an even number.

    A shorter video or a smaller `max_frames` limits them; of a video with a single frame, that frame is used. A list of
    frames that is short enough is used whole, even if their number is odd.
    """
    total = metadata.num_frames
    if total < 1:
        raise InputError("video_url", "the video has no frames")
    if metadata.listed and total <= min(_MAX_FRAMES, max_frames):
        return list(range(total))
    rate = metadata.fps if metadata.fps > 0 else DEFAULT_FPS
    wanted = total / rate * (fps or DEFAULT_FPS)
    most = min(_MAX_FRAMES, max_frames, total)
    count = int(min(max(wanted, _MIN_FRAMES), most)) // 2 * 2
    return [0] if count == 0 else np.linspace(0, total - 1, count).round().astype(int).tolist()
