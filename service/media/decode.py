"""What the API process has decoded in confined workers: videos and audio. Lists of frames are decoded with Pillow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from PIL import Image

from models.interfaces.errors import InputError
from models.interfaces.media import VideoFrames, VideoMetadata
from models.interfaces.resizing import FrameResizer
from service.confined.channel import ProtocolError, WorkerChannel
from service.confined.workers import Program, WorkerLimits, WorkerLost, WorkerPool
from service.media.fetch import decode_base64, without_spaces
from service.media.file_formats import is_confined
from service.media.image_decode import decode_image
from service.media.image_header import RGB_BYTES
from service.media.messages import (
    AudioLimits,
    DecodeAudio,
    Done,
    Frame,
    ImageLimits,
    OpenVideo,
    ReadFrames,
    Reply,
    Samples,
    VideoLimits,
    VideoOpened,
    expect,
)

DECODER = Program("service.media.decode_worker", Reply)
LIMITS = WorkerLimits()
Choose = Callable[[VideoMetadata], tuple[Sequence[int], FrameResizer]]
"""Metadata -> ascending indices of the frames to decode, and what resizes them (ChatProcessor.sample_video,
frame_resizer)."""
FULL_FRAMES = 5
"""Frames of a video file that are charged at full size: the one that is resized, in 3 bytes a pixel, Pillow's copy of
it in 4, the bands that are cut from that, and what is between the two passes."""
MAX_FPS = 1000.0
"""Highest rate that a list of frames gets from its times, which may be as close as floats can be: models compute with
the rate."""
SAME_SIZE = "all frames of a list must have the same size"


def decode_workers(size: int, limits: WorkerLimits = LIMITS) -> WorkerPool:
    return WorkerPool(size, limits, DECODER)


async def decode_video(
    pool: WorkerPool,
    data: bytes,
    choose: Choose,
    *,
    field: str,
    limits: VideoLimits,
    charge: Callable[[int], None],
) -> VideoFrames:
    """Opens a video file, lets `choose` select among the frames that it has, decodes those, in order, and resizes each
    as it comes. charge: called with the bytes that this takes, before any of the frames is decoded.

    Frames that cannot be decoded (the file is damaged there) are left out, and so are their indices. Raises
    InputError with `field` for invalid videos and those that take too much memory or time to decode.
    """
    if len(data) > limits.max_bytes:
        raise InputError(field, f"the video is too large: {len(data)} bytes given, at most {limits.max_bytes} allowed")

    def job(channel: WorkerChannel) -> VideoFrames:
        channel.send(OpenVideo(field, limits), data)
        opened = expect(channel.receive(), VideoOpened)
        try:
            indices, resizer = choose(opened.metadata)
            kept = _checked(indices, opened.metadata, field, limits)
            height, width = opened.metadata.height, opened.metadata.width
            charge(len(set(kept)) * resizer.num_bytes + FULL_FRAMES * RGB_BYTES * height * width)
        except InputError:
            channel.send(ReadFrames(()))  # makes the worker close the video
            expect(channel.receive(), Done)
            raise
        return _read(channel, kept, opened.metadata, resizer, field)

    try:
        return await pool.run(job)
    except WorkerLost as error:
        raise InputError(field, "the video takes more memory or time to decode than allowed") from error


def decode_frame_list(
    payload: str,
    choose: Choose,
    *,
    fps: float,
    times: Sequence[float] | None,
    field: str,
    images: ImageLimits,
    limits: VideoLimits,
    decode: Callable[..., Image.Image] = decode_image,
    charge: Callable[[int], None],
) -> VideoFrames:
    """Frames of a `data:video/jpeg;base64,f1,f2,...` URL, `payload` being the part after the first comma.

    fps: frame rate of the list, over 0. times: seconds of every frame, ascending, which then give the rate. decode:
    decode_image, or the same in a worker process. charge: called with bytes before they are taken: those of all resized
    frames and of decoding the first one before that is decoded, and what a later one takes beyond these. All frames
    must have the same size. Blocks: call it in a thread.
    """
    payload = without_spaces(payload)
    count = payload.count(",") + 1
    if count > limits.max_frames:
        raise InputError(field, f"too many frames: {count} given, at most {limits.max_frames} allowed")
    if len(payload) > limits.max_bytes // 3 * 4 + 4 * count:
        raise InputError(field, f"the frames are too large: at most {limits.max_bytes} bytes allowed")
    if times is not None and len(times) != count:
        raise InputError(field, f"{len(times)} times given for {count} frames")
    seconds = times[-1] - times[0] if times is not None else count / fps
    if seconds > limits.max_duration:
        raise InputError(
            field, f"the video is too long: {seconds:.6g} s given, at most {limits.max_duration:.0f} s allowed"
        )
    if times is not None and seconds > 0:
        fps = min((count - 1) / seconds, MAX_FPS)

    encoded, stored, charged = payload.split(","), (0, 0), 0
    indices: tuple[int, ...] = ()

    def metadata(height: int, width: int) -> VideoMetadata:
        return VideoMetadata(count, fps, count / fps, height, width, listed=True)

    def admit(index: int, width: int, height: int, size: int) -> None:
        """size: bytes that decoding the frame takes, of which `charged` are charged already."""
        nonlocal stored, charged, indices
        more, charged = max(0, size - charged), max(size, charged)
        if not indices:  # the header of the first frame is read
            stored = width, height
            wanted, resizer = choose(metadata(height, width))
            indices = _checked(wanted, metadata(height, width), field, limits)
            more += len(set(indices)) * resizer.num_bytes
        elif (width, height) not in (stored, stored[::-1]):  # it may be stored turned
            raise InputError(f"{field}[{index}]", SAME_SIZE)
        if more:
            charge(more)

    def frame(index: int) -> np.ndarray:
        at = f"{field}[{index}]"
        data = decode_base64(encoded[index], field=at, max_bytes=images.max_bytes)
        if is_confined(data):
            raise InputError(at, "a frame of a list must be no TIFF, AVIF or run-length BMP; send JPEG")
        return np.asarray(decode(data, field=at, limits=images, admit=partial(admit, index)))

    first = frame(0)
    seen = metadata(*first.shape[:2])
    resizer = choose(seen)[1]  # the first frame may have been turned
    resized = {0: resizer(first)} if 0 in indices else {}
    for index in indices:
        if index not in resized:
            picture = frame(index)
            if picture.shape != first.shape:
                raise InputError(f"{field}[{index}]", SAME_SIZE)
            resized[index] = resizer(picture)
    shown = tuple(i / fps if times is None else times[i] for i in indices)
    frames = tuple(resized[i] for i in indices)
    return VideoFrames(frames, indices, shown, seen, times_given=times is not None, resizer=resizer)


def _checked(indices: Sequence[int], metadata: VideoMetadata, field: str, limits: VideoLimits) -> tuple[int, ...]:
    chosen = tuple(indices)
    ascending = all(a <= b for a, b in pairwise(chosen))
    if not chosen or not ascending or chosen[0] < 0 or chosen[-1] >= metadata.num_frames:
        raise ValueError(f"frame indices must ascend within 0..{metadata.num_frames - 1}, got {chosen[:8]}...")
    if len(chosen) > limits.max_frames:
        raise InputError(field, f"too many frames: {len(chosen)} would be sampled, at most {limits.max_frames} allowed")
    size = len(set(chosen)) * metadata.height * metadata.width * 3
    if size > limits.max_decoded_bytes:
        raise InputError(
            field,
            f"the frames are too large: {len(chosen)} of {metadata.width} x {metadata.height} have {size} bytes, at "
            f"most {limits.max_decoded_bytes} allowed; ask for fewer frames or send a smaller video",
        )
    return chosen


def _read(
    channel: WorkerChannel, indices: tuple[int, ...], metadata: VideoMetadata, resizer: FrameResizer, field: str
) -> VideoFrames:
    channel.send(ReadFrames(tuple(dict.fromkeys(indices))))
    pixels = np.empty((metadata.height, metadata.width, 3), np.uint8)
    frames: dict[int, np.ndarray] = {}
    times: dict[int, float] = {}
    while not isinstance(message := channel.receive(), Done):
        frame = expect(message, Frame)
        if frame.index not in indices or frame.index in frames:
            raise ProtocolError(f"frame {frame.index} was not requested")
        channel.receive_into(pixels.data.cast("B"))
        frames[frame.index] = resizer(pixels)
        times[frame.index] = frame.time
    if not frames:
        raise InputError(field, "none of the sampled frames of the video can be decoded")
    kept = tuple(index for index in indices if index in frames)
    shown = tuple(times[i] for i in kept)
    return VideoFrames(tuple(frames[i] for i in kept), kept, shown, metadata, resizer=resizer)


async def decode_audio(
    pool: WorkerPool, data: bytes, *, sample_rate: int, field: str, limits: AudioLimits
) -> np.ndarray:
    """WAV, FLAC, Ogg, MP3, M4A, AAC or WebM bytes -> mono float32 [n] at `sample_rate`, within -1..1. InputError as of
    audio_decode.decode_samples, and for what costs too much to decode."""
    if len(data) > limits.max_bytes:
        raise InputError(field, f"the audio is too large: {len(data)} bytes given, at most {limits.max_bytes} allowed")

    def job(channel: WorkerChannel) -> np.ndarray:
        channel.send(DecodeAudio(field, sample_rate, limits), data)
        count = expect(channel.receive(), Samples).count
        if not 0 < count <= limits.max_seconds * sample_rate + 1:
            raise ProtocolError(f"{count} samples")
        samples = np.empty(count, np.float32)
        channel.receive_into(samples.data.cast("B"))
        return samples

    try:
        return await pool.run(job)
    except WorkerLost as error:
        raise InputError(field, "the audio takes more memory or time to decode than allowed") from error
