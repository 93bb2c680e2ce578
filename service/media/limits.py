"""Limits on what clients can make the server read and decode, applied before or during the work."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class ImageLimits:
    """max_bytes: encoded size. max_pixels: width x height, checked before pixels are decoded (Pillow's own
    MAX_IMAGE_PIXELS, 89 megapixels, stays in force above it)."""

    max_bytes: int = 20 * MIB
    max_pixels: int = 50_000_000


@dataclass(frozen=True)
class VideoLimits:
    """max_bytes: encoded size. max_pixels: width x height of a frame. max_duration: seconds of the source.
    max_source_frames: frames of the source, decoded or not. max_frames: frames passed to a model.
    max_decoded_bytes: uint8 RGB bytes of all those frames together."""

    max_bytes: int = 64 * MIB
    max_pixels: int = 4096 * 2304
    max_duration: float = 3600.0
    max_source_frames: int = 216_000
    max_frames: int = 768
    max_decoded_bytes: int = 1024 * MIB


@dataclass(frozen=True)
class AudioLimits:
    """max_bytes: encoded size. max_seconds: length, counted in decoded samples."""

    max_bytes: int = 25 * MIB
    max_seconds: float = 60.0


@dataclass(frozen=True)
class RequestLimits:
    """Limits on all media of one request together. max_items: images and videos. max_bytes: encoded.
    max_decoded_bytes: uint8 RGB pixels."""

    max_items: int = 16
    max_bytes: int = 128 * MIB
    max_decoded_bytes: int = 1024 * MIB


@dataclass(frozen=True)
class MediaLimits:
    image: ImageLimits = ImageLimits()
    video: VideoLimits = VideoLimits()
    audio: AudioLimits = AudioLimits()
    request: RequestLimits = RequestLimits()
