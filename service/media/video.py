"""Videos: containers through a decode worker, lists of JPEG frames through Pillow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from models.errors import InputError
from models.media import VideoFrames, VideoMetadata
from service.media.channel import Channel, Done, Frame, OpenVideo, ProtocolError, ReadFrames, VideoOpened, expect
from service.media.data_url import decode_base64, without_spaces
from service.media.images import decode_image
from service.media.limits import ImageLimits, VideoLimits
from service.media.workers import WorkerLost, WorkerPool

Choose = Callable[[VideoMetadata], Sequence[int]]
"""Metadata -> ascending indices of the frames to decode (ChatProcessor.sample_video)."""


async def decode_video(
    pool: WorkerPool, data: bytes, choose: Choose, *, field: str, limits: VideoLimits
) -> VideoFrames:
    """Probes an MP4, MOV, WebM, MKV or AVI file, lets `choose` pick frames, and decodes those, in order.

    A frame that the decoder does not deliver (the file promises more than it holds) is left out; its index is then
    missing from the result. Raises InputError with `field` for bad videos and those that cost too much to decode.
    """
    if len(data) > limits.max_bytes:
        raise InputError(field, f"the video has {len(data)} bytes; at most {limits.max_bytes} are accepted")

    def job(channel: Channel) -> VideoFrames:
        channel.send(OpenVideo(field, limits), data)
        opened = expect(channel.receive(), VideoOpened)
        try:
            indices = _checked(choose(opened.metadata), opened.metadata, field, limits)
        except InputError:
            channel.send(ReadFrames(()))  # lets go of the video
            expect(channel.receive(), Done)
            raise
        return _read(channel, indices, opened.metadata, field)

    try:
        return await pool.run(job)
    except WorkerLost as error:
        raise InputError(field, "the video takes more memory or time to decode than is allowed") from error


def decode_frame_list(
    payload: str, choose: Choose, *, fps: float, field: str, images: ImageLimits, limits: VideoLimits
) -> VideoFrames:
    """Frames of a `data:video/jpeg;base64,f1,f2,...` URL, `payload` being the part after the first comma.

    fps: frames per second that the list stands for. All frames must have one size. Blocks: call it in a thread.
    """
    payload = without_spaces(payload)
    count = payload.count(",") + 1
    if count > limits.max_frames:
        raise InputError(field, f"the list has {count} frames; at most {limits.max_frames} are accepted")
    if len(payload) > limits.max_bytes // 3 * 4 + 4 * count:
        raise InputError(field, f"the frames have more than {limits.max_bytes} bytes")
    encoded = payload.split(",")
    first = _jpeg(encoded[0], field=f"{field}[0]", limits=images)
    metadata = VideoMetadata(count, fps, count / fps, *first.shape[:2])
    indices = _checked(choose(metadata), metadata, field, limits)
    decoded = {0: first}
    for index in indices:
        if index not in decoded:
            decoded[index] = frame = _jpeg(encoded[index], field=f"{field}[{index}]", limits=images)
            if frame.shape != first.shape:
                raise InputError(f"{field}[{index}]", "all frames of a list must have the same size")
    return VideoFrames(tuple(decoded[i] for i in indices), indices, tuple(i / fps for i in indices), metadata)


def _jpeg(encoded: str, *, field: str, limits: ImageLimits) -> np.ndarray:
    data = decode_base64(encoded, field=field, max_bytes=limits.max_bytes)
    return np.asarray(decode_image(data, field=field, limits=limits))


def _checked(indices: Sequence[int], metadata: VideoMetadata, field: str, limits: VideoLimits) -> tuple[int, ...]:
    chosen = tuple(indices)
    ascending = all(a <= b for a, b in pairwise(chosen))
    if not chosen or not ascending or chosen[0] < 0 or chosen[-1] >= metadata.num_frames:
        raise ValueError(f"frame indices must ascend within 0..{metadata.num_frames - 1}, got {chosen[:8]}...")
    if len(chosen) > limits.max_frames:
        raise InputError(field, f"{len(chosen)} frames would be taken; at most {limits.max_frames} are accepted")
    size = len(set(chosen)) * metadata.height * metadata.width * 3
    if size > limits.max_decoded_bytes:
        raise InputError(
            field,
            f"{len(chosen)} frames of {metadata.width} x {metadata.height} are more than can be held"
            f" ({limits.max_decoded_bytes} bytes); ask for fewer frames or send a smaller video",
        )
    return chosen


def _read(channel: Channel, indices: tuple[int, ...], metadata: VideoMetadata, field: str) -> VideoFrames:
    channel.send(ReadFrames(tuple(dict.fromkeys(indices))))
    frames: dict[int, np.ndarray] = {}
    times: dict[int, float] = {}
    while not isinstance(message := channel.receive(), Done):
        frame = expect(message, Frame)
        if frame.index not in indices or frame.index in frames:
            raise ProtocolError(f"frame {frame.index} was not asked for")
        pixels = np.empty((metadata.height, metadata.width, 3), np.uint8)
        channel.receive_into(pixels.data.cast("B"))
        frames[frame.index] = pixels
        times[frame.index] = frame.time
    if not frames:
        raise InputError(field, "none of the video's frames that are needed can be decoded")
    kept = tuple(index for index in indices if index in frames)
    return VideoFrames(tuple(frames[i] for i in kept), kept, tuple(times[i] for i in kept), metadata)
