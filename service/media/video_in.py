"""Videos: files are decoded in a worker process, lists of JPEG frames with Pillow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from PIL import Image

from models.errors import InputError
from models.media import VideoFrames, VideoMetadata
from service.confined.channel import ProtocolError, WorkerChannel
from service.confined.workers import WorkerLost, WorkerPool
from service.media.data_url import decode_base64, without_spaces
from service.media.image_decode import decode_image
from service.media.limits import ImageLimits, VideoLimits
from service.media.messages import Done, Frame, OpenVideo, ReadFrames, VideoOpened, expect

Choose = Callable[[VideoMetadata], Sequence[int]]
"""Metadata -> ascending indices of the frames to decode (ChatProcessor.sample_video)."""
MAX_FPS = 1000.0
"""Highest rate that a list of frames gets from its times, which may be as close as floats can be: models compute with
the rate."""


async def decode_video(
    pool: WorkerPool, data: bytes, choose: Choose, *, field: str, limits: VideoLimits
) -> VideoFrames:
    """Opens an MP4, MOV, WebM, MKV or AVI file, lets `choose` select frames, and decodes those, in order.

    Frames that cannot be decoded (the file has fewer than it says) are left out, and so are their indices. Raises
    InputError with `field` for invalid videos and those that take too much memory or time to decode.
    """
    if len(data) > limits.max_bytes:
        raise InputError(field, f"the video is too large: {len(data)} bytes given, at most {limits.max_bytes} allowed")

    def job(channel: WorkerChannel) -> VideoFrames:
        channel.send(OpenVideo(field, limits), data)
        opened = expect(channel.receive(), VideoOpened)
        try:
            indices = _checked(choose(opened.metadata), opened.metadata, field, limits)
        except InputError:
            channel.send(ReadFrames(()))  # makes the worker close the video
            expect(channel.receive(), Done)
            raise
        return _read(channel, indices, opened.metadata, field)

    try:
        return await pool.run(job)
    except WorkerLost as error:
        raise InputError(field, "the video takes more memory or time to decode than allowed") from error


def decode_frame_list(
    payload: str,
    choose: Choose,
    *,
    fps: float,
    times: Sequence[float] | None = None,
    field: str,
    images: ImageLimits,
    limits: VideoLimits,
    decode: Callable[..., Image.Image] = decode_image,
) -> VideoFrames:
    """Frames of a `data:video/jpeg;base64,f1,f2,...` URL, `payload` being the part after the first comma.

    fps: frame rate of the list, over 0. times: seconds of every frame, ascending, which then give the rate. decode:
    decode_image, or the same in a worker process. All frames must have the same size. Blocks: call it in a thread.
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
    encoded = payload.split(",")

    def frame_at(index: int) -> np.ndarray:
        at = f"{field}[{index}]"
        data = decode_base64(encoded[index], field=at, max_bytes=images.max_bytes)
        return np.asarray(decode(data, field=at, limits=images))

    first = frame_at(0)
    height, width = first.shape[:2]
    metadata = VideoMetadata(count, fps, count / fps, height, width, listed=True)
    indices = _checked(choose(metadata), metadata, field, limits)
    decoded = {0: first}
    for index in indices:
        if index not in decoded:
            decoded[index] = frame = frame_at(index)
            if frame.shape != first.shape:
                raise InputError(f"{field}[{index}]", "all frames of a list must have the same size")
    seen = tuple(i / fps if times is None else times[i] for i in indices)
    frames = tuple(decoded[i] for i in indices)
    return VideoFrames(frames, indices, seen, metadata, times_given=times is not None)


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


def _read(channel: WorkerChannel, indices: tuple[int, ...], metadata: VideoMetadata, field: str) -> VideoFrames:
    channel.send(ReadFrames(tuple(dict.fromkeys(indices))))
    frames: dict[int, np.ndarray] = {}
    times: dict[int, float] = {}
    while not isinstance(message := channel.receive(), Done):
        frame = expect(message, Frame)
        if frame.index not in indices or frame.index in frames:
            raise ProtocolError(f"frame {frame.index} was not requested")
        pixels = np.empty((metadata.height, metadata.width, 3), np.uint8)
        channel.receive_into(pixels.data.cast("B"))
        frames[frame.index] = pixels
        times[frame.index] = frame.time
    if not frames:
        raise InputError(field, "none of the sampled frames of the video can be decoded")
    kept = tuple(index for index in indices if index in frames)
    return VideoFrames(tuple(frames[i] for i in kept), kept, tuple(times[i] for i in kept), metadata)
