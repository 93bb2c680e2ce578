"""What the API process asks of a decode worker (service.media.decode_worker), and what that replies."""

from __future__ import annotations

from typing import TypeVar

from models.interfaces.errors import InputError
from models.interfaces.media import VideoMetadata
from service.confined.channel import ProtocolError, Struct
from service.media.limits import AudioLimits, ImageLimits, VideoLimits

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
    """Size as stored, before the EXIF orientation is applied. decoding_bytes: the most that decoding it takes."""

    width: int
    height: int
    decoding_bytes: int


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
