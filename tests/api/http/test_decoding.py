"""Media count by the size in their headers while they are decoded, and wait or are refused where there is no room."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from models.errors import InputError
from models.media import VideoFrames
from service.api.http import decoding as module
from service.api.http.admission import Admission, Ticket
from service.api.http.decoding import Decoding
from service.api.http.errors import ApiError
from service.media.decoders import decode_workers
from service.media.fetch import Fetcher, FetchesBusy, UrlPolicy
from service.media.limits import MediaLimits
from service.media.loader import MediaLoader
from service.metrics import Metrics
from tests.media.samples import encoded, picture, sound, tone, video
from tests.support.victims import data_url
from tests.support.waiting import until


def admission_of(most: int) -> Admission:
    return Admission(10, most, Metrics())


def ticket_of(admission: Admission, size: int) -> Ticket:
    ticket = admission.ticket("chat")
    ticket.grow(1, size)
    return ticket


@pytest.fixture
def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4)


@pytest.fixture(params=["shared", "isolated"])
async def loader(request: pytest.FixtureRequest) -> AsyncIterator[MediaLoader]:
    pool = decode_workers(1)
    images = decode_workers(1) if request.param == "isolated" else None
    loader = MediaLoader(Fetcher(UrlPolicy()), pool, MediaLimits(), image_threads=1, image_pool=images)
    yield loader
    await loader.close()
    pool.close()


async def test_pixels_are_charged_before_they_are_decoded(loader: MediaLoader) -> None:
    charged: list[int] = []

    def charge(size: int) -> None:
        charged.append(size)
        raise InputError("", "no room")

    def never(*_: object) -> None:
        raise AssertionError("it was decoded")

    async def never_prepared(video: VideoFrames) -> None:
        never(video)

    with pytest.raises(InputError, match="no room"):
        await loader.image(data_url(encoded(picture(), "PNG")), never, field="f", budget=loader.budget(), charge=charge)
    frame = base64.b64encode(encoded(picture(), "JPEG")).decode()
    for url in (data_url(video(), "video/mp4"), f"data:video/jpeg;base64,{frame},{frame}"):
        with pytest.raises(InputError, match="no room"):
            await loader.video(
                url,
                lambda metadata: [0, 1],
                never_prepared,
                frame_list_fps=1.0,
                field="f",
                budget=loader.budget(),
                charge=charge,
            )
    assert charged == [40 * 30 * 3, 2 * 64 * 48 * 3, 2 * 40 * 30 * 3]
    # The decoders can go on.
    loaded = await loader.image(
        data_url(encoded(picture(), "PNG")), lambda image, _: np.asarray(image), field="f", budget=loader.budget()
    )
    assert np.array_equal(loaded, picture())


def test_what_is_kept_takes_the_place_of_what_was_decoded() -> None:
    admission = admission_of(1000)
    ticket, other = ticket_of(admission, 100), ticket_of(admission, 100)
    with Decoding(ticket) as decoding:
        decoding.take(500)
        assert admission.pending_bytes == 700 and admission.decoding == 1
        decoding.keep(200)
        assert admission.pending_bytes == 400 and admission.decoding == 0
    with Decoding(ticket) as decoding:
        decoding.take(100)
        decoding.keep(300)  # a small picture is enlarged
    assert admission.pending_bytes == 700
    with pytest.raises(ApiError, match="Too many bytes"), Decoding(ticket) as decoding:
        decoding.take(100)
        decoding.keep(500)
    with pytest.raises(ZeroDivisionError), Decoding(ticket) as decoding:
        decoding.take(100)
        raise ZeroDivisionError
    assert admission.pending_bytes == 700 and admission.decoding == 0
    ticket.release()
    other.release()
    assert admission.pending_bytes == 0


def test_fetched_bytes_count_until_what_is_kept_takes_their_place() -> None:
    admission = admission_of(1000)
    ticket, other = ticket_of(admission, 100), ticket_of(admission, 100)
    with Decoding(ticket) as decoding:
        decoding.fetched(150)
        decoding.fetched(150)
        assert admission.pending_bytes == 500 and admission.decoding == 0
        decoding.take(300)
        assert admission.pending_bytes == 800
        decoding.keep(550)
        assert admission.pending_bytes == 750 and admission.decoding == 0
    assert admission.pending_bytes == 750
    with pytest.raises(ApiError) as refused, Decoding(ticket) as decoding:
        decoding.fetched(200)
        decoding.fetched(200)
    assert refused.value.status == 503 and refused.value.retry_after and decoding.refused
    assert admission.pending_bytes == 750
    with Decoding(ticket) as decoding:
        decoding.fetched(200)  # nothing is kept of audio
    assert admission.pending_bytes == 750
    ticket.release()
    other.release()
    assert admission.pending_bytes == 0


def test_a_url_whose_turn_does_not_come_gets_503() -> None:
    admission = admission_of(1000)
    ticket = ticket_of(admission, 100)
    with pytest.raises(ApiError, match="f: not fetched") as refused, Decoding(ticket):
        raise FetchesBusy("f: not fetched")
    assert refused.value.status == 503 and refused.value.retry_after and refused.value.code == "overloaded"
    assert admission.pending_bytes == 100


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
    pool, admission = decode_workers(1), admission_of(100_000)
    files = {"picture": encoded(picture(), "PNG"), "video": video(), "audio": sound(tone(440, 8000), 8000, "WAV")}
    size = sum(map(len, files.values()))
    loader = MediaLoader(Web(files), pool, MediaLimits(), image_threads=1)
    ticket = ticket_of(admission, 100)
    other = ticket_of(admission, 100)

    async def prepared(frames: VideoFrames) -> int:
        return len(frames.frames)

    async def load(kind: str, ticket: Ticket) -> object:
        with Decoding(ticket) as decoding:
            counted: dict[str, Any] = {"charge": decoding.take, "fetched": decoding.fetched}
            common: dict[str, Any] = {"field": "f", "budget": loader.budget(), **counted}
            if kind == "picture":
                return await loader.image(kind, lambda image, _: image.size, **common)
            if kind == "video":
                return await loader.video(kind, lambda _: [0], prepared, frame_list_fps=1.0, **common)
            return await loader.audio(kind, sample_rate=8000, field="f", fetched=decoding.fetched)

    async with loader._pictures.acquire("x"), loader._videos.acquire("x"), loader._audio.acquire("x"):
        loads = [asyncio.ensure_future(load(kind, ticket)) for kind in files]
        await until(lambda: admission.pending_bytes == 200 + size)
        full = ticket_of(admission, 100_000 - admission.pending_bytes - 50)
        with pytest.raises(ApiError, match="fetched"):
            await load("picture", full)
        full.release()
    shape, frames, samples = await asyncio.gather(*loads)
    assert shape == (40, 30) and frames == 1 and len(samples) == 8000
    assert admission.pending_bytes == 200
    other.release()
    await loader.close()
    pool.close()


def test_without_room_and_without_others_that_are_decoded_it_is_refused() -> None:
    admission = admission_of(1000)
    held, ticket = ticket_of(admission, 600), ticket_of(admission, 100)
    with pytest.raises(ApiError) as refused, Decoding(ticket) as decoding:
        decoding.take(500)
    assert refused.value.status == 503 and refused.value.retry_after and decoding.refused
    assert admission.pending_bytes == 700
    held.release()
    with Decoding(ticket) as decoding:  # the only request
        decoding.take(5000)
        assert not decoding.refused


async def in_thread(threads: ThreadPoolExecutor, step: Callable[[], None]) -> None:
    await asyncio.get_running_loop().run_in_executor(threads, step)


def waited_for(admission: Admission) -> asyncio.Event:
    """Set once a thread waits for bytes that are given back."""
    loop, seen, wait = asyncio.get_running_loop(), asyncio.Event(), admission.changed.wait

    def told(timeout: float | None = None) -> bool:
        loop.call_soon_threadsafe(seen.set)
        return wait(timeout)

    admission.changed.wait = told  # type: ignore[method-assign]
    return seen


async def test_a_picture_waits_while_others_are_decoded(threads: ThreadPoolExecutor) -> None:
    admission = admission_of(1000)
    first, second = Decoding(ticket_of(admission, 100)), Decoding(ticket_of(admission, 100))
    with first, second:
        first.take(600)
        waits = waited_for(admission)
        waiting = asyncio.ensure_future(in_thread(threads, lambda: second.take(500)))
        await waits.wait()
        assert not waiting.done() and admission.pending_bytes == 800
        first.keep(50)
        await waiting
        assert admission.pending_bytes == 100 + 100 + 50 + 500
        second.keep(50)
    assert admission.decoding == 0


async def test_it_waits_for_a_while_only(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    admission = admission_of(1000)
    first = Decoding(ticket_of(admission, 100))
    with first:
        first.take(600)
        with pytest.raises(ApiError), Decoding(ticket_of(admission, 100)) as second:
            await in_thread(threads, lambda: second.take(500))


async def test_a_client_that_has_gone_leaves_nothing_behind(threads: ThreadPoolExecutor) -> None:
    """Its thread may have just read the header, or may wait for room."""
    admission = admission_of(1000)
    first, ticket = Decoding(ticket_of(admission, 100)), ticket_of(admission, 100)
    with first:
        first.take(600)
        with Decoding(ticket) as second:
            waits = waited_for(admission)
            waiting = asyncio.ensure_future(in_thread(threads, lambda: second.take(500)))
            await waits.wait()
        ticket.release()
        with pytest.raises(InputError, match="has ended"):
            await waiting
        with pytest.raises(InputError, match="has ended"):
            second.take(5)
        assert admission.pending_bytes == 700
    assert admission.pending_bytes == 100 and admission.decoding == 0


async def test_many_threads_lose_no_byte(threads: ThreadPoolExecutor) -> None:
    admission = admission_of(3000)
    tickets = [ticket_of(admission, 10) for _ in range(8)]

    def decode(ticket: Ticket) -> None:
        for _ in range(200):
            with Decoding(ticket) as decoding:
                decoding.take(700)
                assert admission.pending_bytes <= 3000
                decoding.keep(1)

    await asyncio.gather(*(in_thread(threads, lambda ticket=ticket: decode(ticket)) for ticket in tickets))
    await until(lambda: admission.decoding == 0)
    assert admission.pending_bytes == 8 * 10 + 8 * 200
    for ticket in tickets:
        ticket.release()
    assert admission.pending_bytes == 0
