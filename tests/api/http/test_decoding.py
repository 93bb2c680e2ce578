"""Media count by the size in their headers while they are decoded, and wait or are refused where there is no room."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from models.interfaces.errors import InputError
from models.interfaces.media import VideoFrames, VideoMetadata
from models.interfaces.resizing import FrameResizer
from service.api.http.admission import Admission, Decoding, Ticket
from service.api.http.errors import ApiError
from service.media.fetch import Fetcher, UrlPolicy
from service.media.loader import MediaLoader, Room, decode_workers
from service.media.messages import MIB, MediaLimits
from service.metrics.metrics import Metrics
from tests.media.samples import chosen, data_url, encoded, picture, sound, tone, video
from tests.support.slow import slow
from tests.support.waiting import until


def admission_of(most: int) -> Admission:
    return Admission(10, most, Metrics())


def ticket_of(admission: Admission, size: int) -> Ticket:
    ticket = admission.ticket("chat")
    ticket.grow(1, size)
    return ticket


@pytest.fixture(params=["shared", slow("isolated")])
async def loader(request: pytest.FixtureRequest) -> AsyncIterator[MediaLoader]:
    pool = decode_workers(1)
    images = decode_workers(1) if request.param == "isolated" else None
    loader = MediaLoader(Fetcher(UrlPolicy()), pool, MediaLimits(), image_threads=1, image_pool=images)
    yield loader
    await loader.close()
    pool.close()


async def test_pixels_are_charged_before_they_are_decoded(loader: MediaLoader) -> None:
    charged: list[int] = []

    class Full(Room):
        def take(self, size: int) -> None:
            charged.append(size)
            raise InputError("", "no room")

    def never(*_: object) -> None:
        raise AssertionError("it was decoded")

    async def never_prepared(video: VideoFrames) -> None:
        never(video)

    with pytest.raises(InputError, match="no room"):
        await loader.image(data_url(encoded(picture(), "PNG")), never, field="f", budget=loader.budget(), room=Full())
    frame = base64.b64encode(encoded(picture(), "JPEG")).decode()
    for url in (data_url(video(), "video/mp4"), f"data:video/jpeg;base64,{frame},{frame}"):
        with pytest.raises(InputError, match="no room"):
            await loader.video(
                url, chosen(0, 1), never_prepared, frame_list_fps=1.0, field="f", budget=loader.budget(), room=Full()
            )
    assert charged == [40 * 30 * 16, (2 + 5) * 64 * 48 * 3, 40 * 30 * (2 * 3 + 16)], "and a few full frames"
    # The decoders can go on.
    loaded = await loader.image(
        data_url(encoded(picture(), "PNG")), lambda image, _: np.asarray(image), field="f", budget=loader.budget()
    )
    assert np.array_equal(loaded, picture())


async def test_a_video_is_charged_by_its_resized_frames() -> None:
    """A legal video does not wait because another chat goes on, nor keeps others waiting while it is decoded."""
    frame, resized, count = 3 * 640 * 360, 3 * 28 * 56, 16
    pool, admission = decode_workers(1), Admission(10, 10 * frame, Metrics())
    loader = MediaLoader(Fetcher(UrlPolicy()), pool, MediaLimits(), image_threads=1)
    other, ticket, seen = ticket_of(admission, 100), ticket_of(admission, 100), list[int]()

    def choose(metadata: VideoMetadata) -> tuple[list[int], FrameResizer]:
        return list(range(count)), FrameResizer(28, 56)

    async def prepared(video: VideoFrames) -> tuple[np.ndarray, ...]:
        seen.append(ticket.decoding)
        ticket_of(admission, frame).release()  # a body that comes meanwhile
        return video.frames

    url = data_url(video("mp4", "mpeg4", frames=count, size=(640, 360)))
    with Decoding(ticket) as decoding:
        kept = await loader.video(
            url, choose, prepared, frame_list_fps=1.0, field="f", budget=loader.budget(), room=decoding
        )
        decoding.keep(sum(frame.nbytes for frame in kept))
    assert seen == [5 * frame + count * resized] and {frame.nbytes for frame in kept} == {resized}
    assert admission.pending_bytes == 200 + count * resized and other.size == 100
    await loader.close()
    pool.close()


async def test_what_is_kept_takes_the_place_of_what_was_fetched_and_decoded() -> None:
    admission = admission_of(1000)
    ticket = ticket_of(admission, 200)
    with Decoding(ticket) as decoding:
        await decoding.reserve(400)
        assert admission.pending_bytes == 600
        decoding.fetched(150)
        decoding.take(300)
        decoding.take(50)  # a later frame
        assert admission.pending_bytes == 700 and ticket.decoding == 350
        decoding.keep(200)
        assert admission.pending_bytes == 400 and ticket.decoding == 0
    with Decoding(ticket) as decoding:
        decoding.take(100)
        decoding.keep(300)  # a small picture is enlarged
    with pytest.raises(ZeroDivisionError), Decoding(ticket) as decoding:
        await decoding.reserve(100)
        decoding.take(100)
        raise ZeroDivisionError
    assert admission.pending_bytes == 700 and ticket.decoding == 0
    ticket.release()
    assert admission.pending_bytes == 0


def test_media_leave_a_quarter_of_the_requests_to_others() -> None:
    admission = Admission(4, 1000, Metrics())
    tickets = [ticket_of(admission, 0) for _ in range(4)]
    with Decoding(tickets[0]), Decoding(tickets[0]), Decoding(tickets[1]), Decoding(tickets[2]):
        with pytest.raises(ApiError, match="with media") as refused, Decoding(tickets[3]):
            raise AssertionError("it was admitted")
        assert refused.value.status == 503 and refused.value.retry_after
    with Decoding(tickets[3]):
        assert admission.pending_bytes == 0


class Web(Fetcher):
    """Answers every URL with a file, in two pieces."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(UrlPolicy())
        self._files = files

    async def fetch(self, url: str, *, admit: Callable[[int], None] | None = None, **limits: object) -> bytes:
        data = self._files[url]
        assert admit is not None
        for piece in (data[:100], data[100:]):
            admit(len(piece))
        return data


async def test_fetched_media_count_while_they_wait_for_a_decoder() -> None:
    pool, admission = decode_workers(1), admission_of(400 * MIB)
    files = {"picture": encoded(picture(), "PNG"), "video": video(), "audio": sound(tone(440, 8000), 8000, "WAV")}
    size = sum(map(len, files.values()))
    loader = MediaLoader(Web(files), pool, MediaLimits(), image_threads=1)
    ticket = ticket_of(admission, 100)

    async def prepared(frames: VideoFrames) -> int:
        return len(frames.frames)

    async def load(kind: str) -> object:
        with Decoding(ticket) as decoding:
            common: dict[str, Any] = {"field": "f", "budget": loader.budget(), "room": decoding}
            if kind == "picture":
                return await loader.image(kind, lambda image, _: image.size, **common)
            if kind == "video":
                return await loader.video(kind, chosen(0), prepared, frame_list_fps=1.0, **common)
            return await loader.audio(kind, sample_rate=8000, field="f", room=decoding)

    async with loader._pictures.acquire("x"), loader._videos.acquire("x"), loader._audio.acquire("x"):
        loads = [asyncio.ensure_future(load(kind)) for kind in files]
        await until(lambda: admission.pending_bytes == 100 + size)
    shape, frames, samples = await asyncio.gather(*loads)
    assert shape == (40, 30) and frames == 1 and len(samples) == 8000
    assert admission.pending_bytes == 100
    await loader.close()
    pool.close()
