"""Limits of media, and what the API process and a decode worker (service.media.decode_worker) say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from models.interfaces.errors import InputError
from models.interfaces.media import VideoMetadata
from service.confined.channel import ProtocolError, Struct

# Limits on what clients can make the server read and decode, applied before or during the work.

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
    """max_bytes: encoded size. max_seconds: length, counted in decoded samples. recording: what is said there is to be
    recognised, so it may be silent; without, the audio is the reference of a voice."""

    max_bytes: int = 25 * MIB
    max_seconds: float = 60.0
    recording: bool = False


@dataclass(frozen=True)
class RequestLimits:
    """Limits on all media of one request together. max_bytes: encoded. max_decoded_bytes: uint8 RGB pixels."""

    max_bytes: int = 128 * MIB
    max_decoded_bytes: int = 1024 * MIB


@dataclass(frozen=True)
class MediaLimits:
    image: ImageLimits = ImageLimits()
    video: VideoLimits = VideoLimits()
    audio: AudioLimits = AudioLimits()
    recording: AudioLimits = AudioLimits(64 * MIB, 3600.0, recording=True)
    request: RequestLimits = RequestLimits()


def check_size(data: bytes, most: int, kind: str, field: str) -> None:
    if len(data) > most:
        raise InputError(field, f"the {kind} is too large: {len(data)} bytes given, at most {most} allowed")


# Messages

T = TypeVar("T")


# API process -> worker


class OpenVideo(Struct, frozen=True):
    """Followed by the container's bytes. Answered by VideoOpened."""

    field: str
    limits: VideoLimits


class ReadFrames(Struct, frozen=True):
    """Frames of the opened video, indices ascending. Answered by one Frame each and Done."""

    indices: tuple[int, ...]


class DecodeAudio(Struct, frozen=True):
    """Followed by the encoded audio. Answered by Samples."""

    field: str
    sample_rate: int
    limits: AudioLimits


class OpenImage(Struct, frozen=True):
    """Followed by the picture's bytes. Answered by ImageOpened."""

    field: str
    limits: ImageLimits


class ReadPixels(Struct, frozen=True):
    """Pixels of the opened picture. Answered by Pixels."""


# Worker -> API process


class ImageOpened(Struct, frozen=True):
    """Size as stored, before the EXIF orientation is applied."""

    width: int
    height: int


class Pixels(Struct, frozen=True):
    """Followed by uint8 [height, width, 3], with the EXIF orientation applied."""

    width: int
    height: int


class VideoOpened(Struct, frozen=True):
    metadata: VideoMetadata


class Frame(Struct, frozen=True):
    """Followed by uint8 [height, width, 3]. `time` in seconds from the first frame."""

    index: int
    time: float


class Samples(Struct, frozen=True):
    """Followed by float32 [count]."""

    count: int


class Done(Struct, frozen=True):
    pass


class Refused(Struct, frozen=True):
    """The input is invalid: raised as InputError."""

    field: str
    message: str


Job = OpenVideo | ReadFrames | DecodeAudio | OpenImage | ReadPixels
Reply = VideoOpened | Frame | Samples | ImageOpened | Pixels | Done | Refused


def expect(message: Reply, kind: type[T]) -> T:
    """The message, checked to be of the expected kind. Refused is raised as InputError."""
    if isinstance(message, Refused):
        raise InputError(message.field, message.message)
    if not isinstance(message, kind):
        raise ProtocolError(f"{type(message).__name__} where {kind.__name__} is expected")
    return message
