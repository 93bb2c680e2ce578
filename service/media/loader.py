"""From the URLs of a request to decoded media: the one door that routes use."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from PIL import Image

from models.errors import InputError
from models.media import VideoFrames, VideoMetadata, source_digest
from service.media.audio_in import decode_audio
from service.media.data_url import declared_type, decode_base64, is_data_url, parse_data_url
from service.media.fetch import Fetcher
from service.media.images import decode_image, load_decoders
from service.media.limits import MediaLimits, RequestLimits
from service.media.video import Choose, decode_frame_list, decode_video
from service.media.workers import WorkerPool

T = TypeVar("T")

FRAME_LIST = "video/jpeg"
SMALL_PAYLOAD = 1 << 16
"""So many characters of base64 are decoded in less time than it takes to wake a thread, and the loop after it."""


def is_frame_list(url: str) -> bool:
    """Whether a video's URL is a list of frames: data:video/jpeg;base64,f1,f2,..."""
    return declared_type(url) == FRAME_LIST


class MediaBudget:
    """What one request may still load. Its items may be loaded at the same time, from several threads."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._items = 0
        self._bytes = 0
        self._decoded_bytes = 0

    @property
    def decoded_bytes_left(self) -> int:
        return self._limits.max_decoded_bytes - self._decoded_bytes

    def take_item(self, field: str) -> None:
        with self._lock:
            self._items += 1
        if self._items > self._limits.max_items:
            raise InputError(field, f"a request can have at most {self._limits.max_items} images and videos")

    def take_bytes(self, count: int, field: str) -> None:
        """Encoded bytes, before they are read or decoded."""
        with self._lock:
            self._bytes += count
        if self._bytes > self._limits.max_bytes:
            raise InputError(field, f"the request's media have more than {self._limits.max_bytes} bytes")

    def take_pixels(self, count: int, field: str) -> None:
        """Pixels of 3 bytes, before they are decoded."""
        with self._lock:
            self._decoded_bytes += 3 * count
        if self.decoded_bytes_left < 0:
            most = self._limits.max_decoded_bytes // 3
            raise InputError(field, f"the request's media have more than {most} pixels, all frames counted")


class MediaLoader:
    """Loads data: and, where the fetcher's policy allows, remote URLs. Belongs to one event loop.

    Every method raises InputError with the field it is given. Base64 and pictures are decoded in `image_threads`
    threads, video and audio in the pool's processes. As many pictures as threads and as many videos as processes are
    held at full size: `prepare` makes a picture or video what is kept of it, and until it has, no other is decoded. A
    picture's is called in the thread that decoded it, with the source_digest of its bytes.
    `on_read` hears how many seconds it took to have the bytes of a URL, with the URL's kind: "data" or "remote".
    """

    def __init__(
        self,
        fetcher: Fetcher,
        pool: WorkerPool,
        limits: MediaLimits,
        *,
        image_threads: int = 4,
        on_read: Callable[[str, float], None] = lambda kind, seconds: None,
    ) -> None:
        load_decoders()
        self._on_read = on_read
        self._fetcher = fetcher
        self._pool = pool
        self._limits = limits
        self._threads = ThreadPoolExecutor(max_workers=image_threads, thread_name_prefix="image")
        self._pictures = asyncio.Semaphore(image_threads)
        self._videos = asyncio.Semaphore(pool.size)

    def budget(self) -> MediaBudget:
        """A fresh budget, for one request."""
        return MediaBudget(self._limits.request)

    async def image(
        self, url: str, prepare: Callable[[Image.Image, bytes], T], *, field: str, budget: MediaBudget
    ) -> T:
        budget.take_item(field)
        limits = self._limits.image
        data = await self._read(url, field, limits.max_bytes, self._limits.fetch.image_seconds, budget)

        def admit(width: int, height: int) -> None:
            budget.take_pixels(width * height, field)

        def decode() -> T:
            return prepare(decode_image(data, field=field, limits=limits, admit=admit), source_digest(data))

        async with self._pictures:
            return await self._in_thread(decode)

    async def video(
        self,
        url: str,
        choose: Choose,
        prepare: Callable[[VideoFrames], Awaitable[T]],
        *,
        frame_list_fps: float,
        field: str,
        budget: MediaBudget,
    ) -> T:
        """A video file, or a list of frames (is_frame_list) at `frame_list_fps`."""
        budget.take_item(field)
        limits = self._limits.video

        def choose_within_budget(metadata: VideoMetadata) -> Sequence[int]:
            indices = choose(metadata)
            budget.take_pixels(len(set(indices)) * metadata.height * metadata.width, field)
            return indices

        if is_frame_list(url):
            listed = parse_data_url(url, field=field)
            budget.take_bytes(len(listed.payload) // 4 * 3, field)
            async with self._videos:
                frames = await self._in_thread(
                    lambda: decode_frame_list(
                        listed.payload,
                        choose_within_budget,
                        fps=frame_list_fps,
                        field=field,
                        images=self._limits.image,
                        limits=limits,
                    )
                )
                return await prepare(frames)
        data = await self._read(url, field, limits.max_bytes, self._limits.fetch.video_seconds, budget)
        async with self._videos:
            return await prepare(await decode_video(self._pool, data, choose_within_budget, field=field, limits=limits))

    async def audio(self, url: str, *, sample_rate: int, field: str) -> np.ndarray:
        """A reference clip behind a URL -> mono float32 [n] at `sample_rate`."""
        budget = self.budget()
        data = await self._read(url, field, self._limits.audio.max_bytes, self._limits.fetch.audio_seconds, budget)
        return await self.audio_file(data, sample_rate=sample_rate, field=field)

    async def audio_file(self, data: bytes, *, sample_rate: int, field: str) -> np.ndarray:
        """An uploaded clip -> mono float32 [n] at `sample_rate`."""
        return await decode_audio(self._pool, data, sample_rate=sample_rate, field=field, limits=self._limits.audio)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.close()

    async def _read(self, url: str, field: str, max_bytes: int, seconds: float, budget: MediaBudget) -> bytes:
        began = time.monotonic()
        if is_data_url(url):
            payload = parse_data_url(url, field=field).payload
            budget.take_bytes(len(payload) // 4 * 3, field)
            data = await self._decoded(payload, field, max_bytes)
        else:
            data = await self._fetcher.fetch(
                url,
                field=field,
                max_bytes=max_bytes,
                seconds=seconds,
                admit=lambda count: budget.take_bytes(count, field),
            )
        self._on_read("data" if is_data_url(url) else "remote", time.monotonic() - began)
        return data

    async def _decoded(self, payload: str, field: str, max_bytes: int) -> bytes:
        if len(payload) <= SMALL_PAYLOAD:
            return decode_base64(payload, field=field, max_bytes=max_bytes)
        return await self._in_thread(lambda: decode_base64(payload, field=field, max_bytes=max_bytes))

    async def _in_thread(self, step: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, step)
