"""Loads media: from the URLs of a request to decoded pictures, videos and audio. Routes use only this module."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
from PIL import Image

from models.interfaces.errors import InputError
from models.interfaces.media import VideoFrames, VideoMetadata, source_digest
from models.interfaces.resizing import FrameResizer
from service.confined.channel import ProtocolError, WorkerChannel
from service.confined.workers import FairSemaphore, Program, WorkerLimits, WorkerLost, WorkerPool
from service.media import messages
from service.media.fetch import Fetcher, declared_type, decode_base64, is_data_url, payload_of, without_spaces
from service.media.file_formats import is_confined
from service.media.image_decode import DECODING_BYTES, decode_image, load_decoders, read_image

T = TypeVar("T")

DECODER = Program("service.media.decode_worker", messages.Reply)
LIMITS = WorkerLimits()
Choose = Callable[[VideoMetadata], tuple[Sequence[int], FrameResizer]]
"""Metadata -> ascending indices of the frames to decode, and what resizes them (ChatProcessor.sample_video,
frame_resizer)."""
FULL_FRAME_BYTES = 15
"""Of each pixel of a frame of a video file that is resized: its 3 bytes, Pillow's copy of it in 4, the bands that are
cut from that, and what is between the two passes."""
SAME_SIZE = "all frames of a list must have the same size"


def decode_workers(size: int, limits: WorkerLimits = LIMITS) -> WorkerPool:
    return WorkerPool(size, limits, DECODER)


async def decode_video(
    pool: WorkerPool,
    data: bytes,
    choose: Choose,
    *,
    field: str,
    limits: messages.VideoLimits,
    charge: Callable[[int], None],
) -> VideoFrames:
    """Opens a video file, lets `choose` select among the frames that it has, decodes those, in order, and resizes each
    as it comes. charge: called with the bytes that this takes, before any of the frames is decoded.

    Frames that cannot be decoded (the file is damaged there) are left out, and so are their indices. Raises
    InputError with `field` for invalid videos and those that take too much memory or time to decode.
    """
    messages.check_size(data, limits.max_bytes, "video", field)

    def job(channel: WorkerChannel) -> VideoFrames:
        channel.send(messages.OpenVideo(field, limits), data)
        opened = messages.expect(channel.receive(), messages.VideoOpened)
        try:
            indices, resizer = choose(opened.metadata)
            kept = _checked(indices, opened.metadata, field, limits)
            height, width = opened.metadata.height, opened.metadata.width
            charge(len(set(kept)) * resizer.num_bytes + FULL_FRAME_BYTES * height * width)
        except InputError:
            channel.send(messages.ReadFrames(()))  # makes the worker close the video
            messages.expect(channel.receive(), messages.Done)
            raise
        return _read(channel, kept, opened.metadata, resizer, field)

    return await _run(pool, job, "video", field)


def decode_frame_list(
    payload: str,
    choose: Choose,
    *,
    fps: float,
    field: str,
    images: messages.ImageLimits,
    limits: messages.VideoLimits,
    decode: Callable[..., Image.Image] = decode_image,
    charge: Callable[[int], None],
) -> VideoFrames:
    """Frames of a `data:video/jpeg;base64,f1,f2,...` URL, `payload` being the part after the first comma.

    fps: frame rate of the list, over 0. decode: decode_image, or the same in a worker process. charge: called with
    the bytes of all resized frames and of decoding one, before the first is decoded. All frames must have the same
    size. Blocks: call it in a thread.
    """
    payload = without_spaces(payload)
    count = payload.count(",") + 1
    if count > limits.max_frames:
        raise InputError(field, f"too many frames: {count} given, at most {limits.max_frames} allowed")
    if len(payload) > limits.max_bytes // 3 * 4 + 4 * count:
        raise InputError(field, f"the frames are too large: at most {limits.max_bytes} bytes allowed")
    if (seconds := count / fps) > limits.max_duration:
        raise InputError(
            field, f"the video is too long: {seconds:.6g} s given, at most {limits.max_duration:.0f} s allowed"
        )

    encoded, stored = payload.split(","), (0, 0)
    indices: tuple[int, ...] = ()

    def metadata(height: int, width: int) -> VideoMetadata:
        return VideoMetadata(count, fps, count / fps, height, width, listed=True)

    def admit(index: int, width: int, height: int) -> None:
        nonlocal stored, indices
        if not indices:  # the header of the first frame is read
            stored = width, height
            wanted, resizer = choose(metadata(height, width))
            indices = _checked(wanted, metadata(height, width), field, limits)
            charge(len(set(indices)) * resizer.num_bytes + DECODING_BYTES * width * height)
        elif (width, height) not in (stored, stored[::-1]):  # it may be stored turned
            raise InputError(f"{field}[{index}]", SAME_SIZE)

    def frame(index: int) -> np.ndarray:
        at = f"{field}[{index}]"
        data = decode_base64(encoded[index], field=at, max_bytes=images.max_bytes)
        if is_confined(data):
            raise InputError(at, "a frame of a list must be no TIFF or AVIF; send JPEG")
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
    times, frames = tuple(i / fps for i in indices), tuple(resized[i] for i in indices)
    return VideoFrames(frames, indices, times, seen, resizer=resizer)


def _checked(
    indices: Sequence[int], metadata: VideoMetadata, field: str, limits: messages.VideoLimits
) -> tuple[int, ...]:
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
    channel.send(messages.ReadFrames(tuple(dict.fromkeys(indices))))
    pixels = np.empty((metadata.height, metadata.width, 3), np.uint8)
    frames: dict[int, np.ndarray] = {}
    times: dict[int, float] = {}
    while not isinstance(message := channel.receive(), messages.Done):
        frame = messages.expect(message, messages.Frame)
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
    pool: WorkerPool, data: bytes, *, sample_rate: int, field: str, limits: messages.AudioLimits
) -> np.ndarray:
    """WAV, FLAC, Ogg, MP3, M4A, AAC or WebM bytes -> mono float32 [n] at `sample_rate`, within -1..1. InputError as of
    audio_decode.decode_samples, and for what costs too much to decode."""
    messages.check_size(data, limits.max_bytes, "audio", field)

    def job(channel: WorkerChannel) -> np.ndarray:
        channel.send(messages.DecodeAudio(field, sample_rate, limits), data)
        count = messages.expect(channel.receive(), messages.Samples).count
        if not 0 < count <= limits.max_seconds * sample_rate + 1:
            raise ProtocolError(f"{count} samples")
        samples = np.empty(count, np.float32)
        channel.receive_into(samples.data.cast("B"))
        return samples

    return await _run(pool, job, "audio", field)


async def _run(pool: WorkerPool, job: Callable[[WorkerChannel], T], kind: str, field: str) -> T:
    try:
        return await pool.run(job)
    except WorkerLost as error:
        raise InputError(field, f"the {kind} takes more memory or time to decode than allowed") from error


FRAME_LIST = "video/jpeg"
"""Type of a video's URL that is a list of frames: data:video/jpeg;base64,f1,f2,..."""
FETCH_SECONDS = 10.0
"""For one URL, including redirects."""
SMALL_PAYLOAD = 1 << 16
"""Up to this many characters of base64 are decoded in the event loop, which is faster than handing them to a thread."""


class NoRoom(InputError):
    """Raised by Room.take where the bytes have to wait. turn: waits until they are charged."""

    def __init__(self, turn: Callable[[], Awaitable[None]]) -> None:
        super().__init__("", "no room to decode it now")
        self.turn = turn


class Room:
    """What the bytes of one picture, video or audio are charged to; here nothing."""

    def take(self, size: int) -> None:
        """Called with the bytes that decoding takes (for a video those of its resized frames and a few full ones)
        before it begins, in the thread that will decode them. It may raise InputError; after NoRoom, which leaves the
        thread to others meanwhile, it is called again."""

    async def reserve(self, size: int) -> None:
        """Awaited with the most bytes that a remote URL may have, before it is fetched."""

    def fetched(self, size: int) -> None:
        """Called with those that it had, which are held until the loader's method returns."""


UNLIMITED = Room()


@dataclass(eq=False)
class MediaBudget:
    """Counts the media of one request against RequestLimits. Thread-safe, since items are loaded concurrently. client:
    who sent the request."""

    limits: messages.RequestLimits
    client: str
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _bytes: int = field(default=0, init=False)
    _decoded_bytes: int = field(default=0, init=False)

    @property
    def decoded_bytes_left(self) -> int:
        return self.limits.max_decoded_bytes - self._decoded_bytes

    def take_bytes(self, count: int, field: str) -> None:
        """Counts encoded bytes, before they are read or decoded."""
        with self._lock:
            self._bytes += count
        if self._bytes > self.limits.max_bytes:
            raise InputError(field, f"the request's media are too large: at most {self.limits.max_bytes} bytes allowed")

    def take_pixels(self, count: int, field: str) -> None:
        """Counts pixels of 3 bytes, before they are decoded."""
        with self._lock:
            self._decoded_bytes += 3 * count
        if self.decoded_bytes_left < 0:
            max_pixels = self.limits.max_decoded_bytes // 3
            raise InputError(
                field, f"the request's media are too large: at most {max_pixels} pixels allowed, frames included"
            )


@dataclass(eq=False)
class MediaLoader:
    """Loads data: and, where the fetcher's policy allows, remote URLs. Belongs to one event loop.

    Base64 and pictures are decoded in `image_threads` threads (pictures in the processes of `image_pool`, if given),
    videos, audio and pictures of some formats (is_confined) in the processes of `pool`. Clients take turns. on_read:
    called with the kind of URL ("data" or "remote") and the seconds that reading it took.

    Arguments of the methods:
    field: path of the URL in the request; every method raises InputError with it, and FetchesBusy for a remote URL
        whose turn does not come.
    prepare: turns a decoded picture, or a video of resized frames, into what is kept of it. For a picture it runs in
        the thread that decoded it, and also gets the source_digest of the encoded bytes. At most `image_threads`
        pictures wait for that at full size.
    room: what the bytes are charged to.
    """

    fetcher: Fetcher
    pool: WorkerPool
    limits: messages.MediaLimits
    _: KW_ONLY
    image_threads: int = 4
    image_pool: WorkerPool | None = None
    on_read: Callable[[str, float], None] = lambda kind, seconds: None

    def __post_init__(self) -> None:
        load_decoders()
        self._threads = ThreadPoolExecutor(self.image_threads, thread_name_prefix="image")
        self._pictures, self._videos = FairSemaphore(self.image_threads), FairSemaphore(self.pool.size)
        self._audio = FairSemaphore(self.pool.size)

    def budget(self, client: str = "") -> MediaBudget:
        return MediaBudget(self.limits.request, client)

    async def image(
        self,
        url: str,
        prepare: Callable[[Image.Image, bytes], T],
        *,
        field: str,
        budget: MediaBudget,
        room: Room = UNLIMITED,
    ) -> T:
        limits, counted = self.limits.image, False
        data = await self._read(url, field, limits.max_bytes, budget, room)

        def admit(width: int, height: int) -> None:
            nonlocal counted
            if not counted:
                budget.take_pixels(width * height, field)
            counted = True
            room.take(DECODING_BYTES * width * height)

        def prepared(decode: Callable[..., Image.Image]) -> T:
            return prepare(decode(data, field=field, limits=limits, admit=admit), source_digest(data))

        return await _in_turn(
            self._pictures, budget.client, lambda: self._with_decoder(prepared, field, is_confined(data))
        )

    async def video(
        self,
        url: str,
        choose: Choose,
        prepare: Callable[[VideoFrames], Awaitable[T]],
        *,
        frame_list_fps: float,
        field: str,
        budget: MediaBudget,
        room: Room = UNLIMITED,
    ) -> T:
        """A video file, or a list of frames (FRAME_LIST) at `frame_list_fps`."""
        limits, counted = self.limits.video, False

        def choose_within_budget(metadata: VideoMetadata) -> tuple[Sequence[int], FrameResizer]:
            nonlocal counted
            indices, resizer = choose(metadata)
            if not counted:
                budget.take_pixels(len(set(indices)) * metadata.height * metadata.width, field)
            counted = True
            return indices, resizer

        made: Callable[[], Awaitable[VideoFrames]]
        if declared_type(url) == FRAME_LIST:
            payload = payload_of(url, field=field)
            budget.take_bytes(len(payload) // 4 * 3, field)
            decode_list = partial(
                decode_frame_list,
                payload,
                choose_within_budget,
                fps=frame_list_fps,
                field=field,
                images=self.limits.image,
                limits=limits,
                charge=room.take,
            )
            made = partial(self._with_decoder, lambda decode: decode_list(decode=decode), field)
        else:
            data = await self._read(url, field, limits.max_bytes, budget, room)
            made = partial(
                decode_video, self.pool, data, choose_within_budget, field=field, limits=limits, charge=room.take
            )

        async def prepared() -> T:
            return await prepare(await made())

        return await _in_turn(self._videos, budget.client, prepared)

    async def audio(
        self,
        url: str,
        *,
        sample_rate: int,
        field: str,
        client: str = "",
        room: Room = UNLIMITED,
        recording: bool = False,
    ) -> np.ndarray:
        """Audio at a URL -> mono float32 [n] at `sample_rate`. recording: as of AudioLimits."""
        budget, limits = self.budget(client), self.limits.recording if recording else self.limits.audio
        data = await self._read(url, field, limits.max_bytes, budget, room)
        return await self.audio_file(data, sample_rate=sample_rate, field=field, client=client, recording=recording)

    async def audio_file(
        self, data: bytes, *, sample_rate: int, field: str, client: str = "", recording: bool = False
    ) -> np.ndarray:
        """An uploaded audio file -> mono float32 [n] at `sample_rate`."""
        limits = self.limits.recording if recording else self.limits.audio
        async with self._audio.acquire(client):
            return await decode_audio(self.pool, data, sample_rate=sample_rate, field=field, limits=limits)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.image_pool is not None:
            await asyncio.to_thread(self.image_pool.close)
        await self.fetcher.close()

    async def _read(self, url: str, field: str, max_bytes: int, budget: MediaBudget, room: Room) -> bytes:
        began = time.monotonic()
        if is_data_url(url):
            payload = payload_of(url, field=field)
            budget.take_bytes(len(payload) // 4 * 3, field)
            decode = partial(decode_base64, payload, field=field, max_bytes=max_bytes)
            data = decode() if len(payload) <= SMALL_PAYLOAD else await self._in_thread(decode)
        else:
            await room.reserve(max_bytes)
            admit = partial(budget.take_bytes, field=field)
            data = await self.fetcher.fetch(
                url, field=field, max_bytes=max_bytes, seconds=FETCH_SECONDS, client=budget.client, admit=admit
            )
            room.fetched(len(data))
        self.on_read("data" if is_data_url(url) else "remote", time.monotonic() - began)
        return data

    async def _with_decoder(
        self, step: Callable[[Callable[..., Image.Image]], T], field: str, confined: bool = False
    ) -> T:
        """Run `step` in a thread with a function that decodes pictures: decode_image, or (always if `confined`) the
        same in a worker."""
        pool = self.image_pool or (self.pool if confined else None)
        if pool is None:
            return await self._in_thread(lambda: step(decode_image))
        return await _run(pool, lambda channel: step(partial(read_image, channel)), "image", field)

    async def _in_thread(self, step: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, step)


async def _in_turn(decoders: FairSemaphore, client: str, decode: Callable[[], Awaitable[T]]) -> T:
    """Decode when a decoder is free and there is room. Requests that wait for room leave it to others."""
    while True:
        try:
            async with decoders.acquire(client):
                return await decode()
        except NoRoom as error:
            await error.turn()
