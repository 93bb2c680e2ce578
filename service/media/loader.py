"""Loads media: from the URLs of a request to decoded pictures, videos and audio. Routes use only this module."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
from PIL import Image

from models.interfaces.errors import InputError
from models.interfaces.media import VideoFrames, VideoMetadata, source_digest
from models.interfaces.resizing import FrameResizer
from service.confined.workers import FairSemaphore, WorkerLost, WorkerPool
from service.media.decode import Choose, decode_audio, decode_frame_list, decode_video
from service.media.fetch import Fetcher, declared_type, decode_base64, is_data_url, payload_of
from service.media.file_formats import is_confined
from service.media.image_decode import decode_image, load_decoders, read_image
from service.media.messages import MediaLimits, RequestLimits

T = TypeVar("T")

Charge = Callable[[int], None]
Reserve = Callable[[int], Awaitable[None]]

FRAME_LIST = "video/jpeg"
FETCH_SECONDS = 10.0
"""For one URL, including redirects."""
SMALL_PAYLOAD = 1 << 16
"""Up to this many characters of base64 are decoded in the event loop, which is faster than handing them to a thread."""


class NoRoom(InputError):
    """Raised by `charge` where the bytes have to wait. turn: waits until they are charged."""

    def __init__(self, turn: Callable[[], Awaitable[None]]) -> None:
        super().__init__("", "no room to decode it now")
        self.turn = turn


async def no_wait(size: int) -> None:
    """Reserve nothing."""


def is_frame_list(url: str) -> bool:
    """Whether a video's URL is a list of frames: data:video/jpeg;base64,f1,f2,..."""
    return declared_type(url) == FRAME_LIST


class MediaBudget:
    """Counts the media of one request against RequestLimits. Thread-safe, since items are loaded concurrently. client:
    who sent the request."""

    def __init__(self, limits: RequestLimits, client: str) -> None:
        self.client = client
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
            raise InputError(field, f"too many images and videos: at most {self._limits.max_items} allowed")

    def take_bytes(self, count: int, field: str) -> None:
        """Counts encoded bytes, before they are read or decoded."""
        with self._lock:
            self._bytes += count
        if self._bytes > self._limits.max_bytes:
            raise InputError(
                field, f"the request's media are too large: at most {self._limits.max_bytes} bytes allowed"
            )

    def take_pixels(self, count: int, field: str) -> None:
        """Counts pixels of 3 bytes, before they are decoded."""
        with self._lock:
            self._decoded_bytes += 3 * count
        if self.decoded_bytes_left < 0:
            max_pixels = self._limits.max_decoded_bytes // 3
            raise InputError(
                field, f"the request's media are too large: at most {max_pixels} pixels allowed, frames included"
            )


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
    charge: called with the bytes that decoding takes (for a video those of its resized frames and a few full ones)
        before it begins, in the thread that will decode them. It may raise InputError; after NoRoom, which leaves the
        thread to others meanwhile, it is called again.
    reserve: awaited with the most bytes that a remote URL may have, before it is fetched.
    fetched: called with those that it had, which are held until the method returns.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        pool: WorkerPool,
        limits: MediaLimits,
        *,
        image_threads: int = 4,
        image_pool: WorkerPool | None = None,
        on_read: Callable[[str, float], None] = lambda kind, seconds: None,
    ) -> None:
        load_decoders()
        self._on_read = on_read
        self._fetcher = fetcher
        self._pool = pool
        self._image_pool = image_pool
        self._limits = limits
        self._threads = ThreadPoolExecutor(max_workers=image_threads, thread_name_prefix="image")
        self._pictures, self._videos = FairSemaphore(image_threads), FairSemaphore(pool.size)
        self._audio = FairSemaphore(pool.size)

    def budget(self, client: str = "") -> MediaBudget:
        """A new budget, for one request of a client."""
        return MediaBudget(self._limits.request, client)

    async def image(
        self,
        url: str,
        prepare: Callable[[Image.Image, bytes], T],
        *,
        field: str,
        budget: MediaBudget,
        charge: Charge = lambda size: None,
        reserve: Reserve = no_wait,
        fetched: Charge = lambda size: None,
    ) -> T:
        budget.take_item(field)
        limits, counted = self._limits.image, False
        data = await self._read(url, field, limits.max_bytes, budget, reserve, fetched)

        def admit(width: int, height: int, size: int) -> None:
            nonlocal counted
            if not counted:
                budget.take_pixels(width * height, field)
            counted = True
            charge(size)

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
        frame_list_times: Sequence[float] | None = None,
        field: str,
        budget: MediaBudget,
        charge: Charge = lambda size: None,
        reserve: Reserve = no_wait,
        fetched: Charge = lambda size: None,
    ) -> T:
        """A video file, or a list of frames (is_frame_list) at `frame_list_fps` or seen at `frame_list_times`."""
        budget.take_item(field)
        limits, counted = self._limits.video, False

        def choose_within_budget(metadata: VideoMetadata) -> tuple[Sequence[int], FrameResizer]:
            nonlocal counted
            indices, resizer = choose(metadata)
            if not counted:
                budget.take_pixels(len(set(indices)) * metadata.height * metadata.width, field)
            counted = True
            return indices, resizer

        if is_frame_list(url):
            payload = payload_of(url, field=field)
            budget.take_bytes(len(payload) // 4 * 3, field)

            def decode_list(decode: Callable[..., Image.Image]) -> VideoFrames:
                return decode_frame_list(
                    payload,
                    choose_within_budget,
                    fps=frame_list_fps,
                    times=frame_list_times,
                    field=field,
                    images=self._limits.image,
                    limits=limits,
                    decode=decode,
                    charge=charge,
                )

            async def prepared_list() -> T:
                return await prepare(await self._with_decoder(decode_list, field))

            return await _in_turn(self._videos, budget.client, prepared_list)
        data = await self._read(url, field, limits.max_bytes, budget, reserve, fetched)

        async def prepared() -> T:
            video = await decode_video(
                self._pool, data, choose_within_budget, field=field, limits=limits, charge=charge
            )
            return await prepare(video)

        return await _in_turn(self._videos, budget.client, prepared)

    async def audio(
        self,
        url: str,
        *,
        sample_rate: int,
        field: str,
        client: str = "",
        reserve: Reserve = no_wait,
        fetched: Charge = lambda size: None,
        recording: bool = False,
    ) -> np.ndarray:
        """Audio at a URL -> mono float32 [n] at `sample_rate`. recording: as of AudioLimits."""
        budget, limits = self.budget(client), self._limits.recording if recording else self._limits.audio
        data = await self._read(url, field, limits.max_bytes, budget, reserve, fetched)
        return await self.audio_file(data, sample_rate=sample_rate, field=field, client=client, recording=recording)

    async def audio_file(
        self, data: bytes, *, sample_rate: int, field: str, client: str = "", recording: bool = False
    ) -> np.ndarray:
        """An uploaded audio file -> mono float32 [n] at `sample_rate`."""
        limits = self._limits.recording if recording else self._limits.audio
        async with self._audio.acquire(client):
            return await decode_audio(self._pool, data, sample_rate=sample_rate, field=field, limits=limits)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._image_pool is not None:
            await asyncio.to_thread(self._image_pool.close)
        await self._fetcher.close()

    async def _read(
        self,
        url: str,
        field: str,
        max_bytes: int,
        budget: MediaBudget,
        reserve: Reserve,
        fetched: Charge,
    ) -> bytes:
        began = time.monotonic()
        if is_data_url(url):
            payload = payload_of(url, field=field)
            budget.take_bytes(len(payload) // 4 * 3, field)
            data = await self._decoded(payload, field, max_bytes)
        else:
            await reserve(max_bytes)
            admit = partial(budget.take_bytes, field=field)
            data = await self._fetcher.fetch(
                url, field=field, max_bytes=max_bytes, seconds=FETCH_SECONDS, client=budget.client, admit=admit
            )
            fetched(len(data))
        self._on_read("data" if is_data_url(url) else "remote", time.monotonic() - began)
        return data

    async def _decoded(self, payload: str, field: str, max_bytes: int) -> bytes:
        if len(payload) <= SMALL_PAYLOAD:
            return decode_base64(payload, field=field, max_bytes=max_bytes)
        return await self._in_thread(lambda: decode_base64(payload, field=field, max_bytes=max_bytes))

    async def _with_decoder(
        self, step: Callable[[Callable[..., Image.Image]], T], field: str, confined: bool = False
    ) -> T:
        """Run `step` in a thread with a function that decodes pictures: decode_image, or (always if `confined`) the
        same in a worker."""
        pool = self._image_pool or (self._pool if confined else None)
        if pool is None:
            return await self._in_thread(lambda: step(decode_image))
        try:
            return await pool.run(lambda channel: step(partial(read_image, channel)))
        except WorkerLost as error:
            raise InputError(field, "the image takes more memory or time to decode than allowed") from error

    async def _in_thread(self, step: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, step)


async def _in_turn(decoders: FairSemaphore, client: str, decode: Callable[[], Awaitable[T]]) -> T:
    """Decode when a decoder is free and `charge` has room. Requests that wait for room leave it to others."""
    while True:
        try:
            async with decoders.acquire(client):
                return await decode()
        except NoRoom as error:
            await error.turn()
