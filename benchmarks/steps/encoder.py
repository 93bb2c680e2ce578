"""Pictures, videos and audio, and the plans and buckets of the encoder passes over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from models.interfaces.capturable import Bucket, Plan
from models.interfaces.media import MediaItem, VideoFrames, VideoMetadata
from models.protocol import VisionEncoder
from models.text.processor import ChatProcessor
from service.graphs.buckets import cheapest, fills
from service.graphs.runner import GraphRunner

Work = tuple[str, Callable[[ChatProcessor], list[MediaItem]]]


def pictures(width: int, height: int, count: int = 1) -> Work:
    def build(processor: ChatProcessor) -> list[MediaItem]:
        rng = np.random.default_rng(width * 7 + height + count)
        arrays = [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(count)]
        return [processor.image(Image.fromarray(array)) for array in arrays]

    return f"{count} x " * (count > 1) + f"{width}x{height}", build


def video(frames: int, width: int, height: int, fps: float = 2.0) -> Work:
    def build(processor: ChatProcessor) -> list[MediaItem]:
        rng = np.random.default_rng(frames)
        pictures = tuple(rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(frames))
        times = tuple(index / fps for index in range(frames))
        metadata = VideoMetadata(num_frames=frames, fps=fps, duration=frames / fps, height=height, width=width)
        return [processor.video(VideoFrames(pictures, tuple(range(frames)), times, metadata, requested_fps=fps))]

    return f"{frames} frames {width}x{height}", build


def audio(seconds: float, count: int = 1) -> Work:
    def build(processor: ChatProcessor) -> list[MediaItem]:
        assert processor.audio is not None
        rng, samples = np.random.default_rng(count), int(seconds * processor.audio.sample_rate)
        return [processor.audio.item(rng.normal(0, 0.1, samples).astype(np.float32)) for _ in range(count)]

    return f"{count} x " * (count > 1) + f"{seconds:g} s of audio", build


def plans_of(encoder: VisionEncoder, items: Sequence[MediaItem], largest: Bucket) -> list[Plan]:
    """All items in one plan, or each part in its own plan if an item is too large for the `largest` bucket."""
    parts = [part for item in items for part in encoder.split(item, largest)]
    groups = [parts] if len(parts) == len(items) else [[part] for part in parts]
    return [encoder.plan(group) for group in groups]


def replays_of(runner: GraphRunner, plans: Sequence[Plan]) -> list[Callable[[], None]]:
    return [found.capture.replay for plan in plans if (found := runner.graph_for(plan.required)) is not None]


def served_buckets(encoder: VisionEncoder, plan: Plan) -> list[Bucket]:
    """Those that a server would choose from for the plan, dense ones included."""
    general = encoder.default_buckets()
    dense = [bucket for bucket in encoder.dense_buckets(general) if fills(bucket, plan.required)]
    return [*general, *dense]


def fitting_bucket(buckets: Sequence[Bucket], plan: Plan) -> Bucket:
    """The bucket that the server would replay."""
    found = cheapest(buckets, plan.required)
    assert found is not None, f"no bucket holds {plan.required}"
    return found
