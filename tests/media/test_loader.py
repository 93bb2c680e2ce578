"""URLs of a request become media within the limits of the request."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

from models.interfaces.errors import InputError
from models.interfaces.media import DIGEST_BYTES, VideoFrames
from service.media.fetch import Fetcher, UrlPolicy
from service.media.loader import MediaLoader, decode_workers
from service.media.messages import MediaLimits, RequestLimits
from tests.media.samples import chosen, data_url, encoded, picture, sound, tone, video
from tests.support.slow import slow

T = TypeVar("T")
IMAGE = encoded(picture(), "PNG")


async def kept(media: T) -> T:
    return media


def itself(media: T, source: bytes) -> T:
    assert len(source) == DIGEST_BYTES
    return media


@pytest.fixture(params=["shared", slow("isolated")])
async def loader(request: pytest.FixtureRequest) -> AsyncIterator[MediaLoader]:
    """With pictures decoded in this process, and in confined ones."""
    pool = decode_workers(1)
    images = decode_workers(1) if request.param == "isolated" else None
    limits = MediaLimits(request=RequestLimits(max_bytes=200_000, max_decoded_bytes=100_000))
    loader = MediaLoader(Fetcher(UrlPolicy()), pool, limits, image_threads=1, image_pool=images)
    yield loader
    await loader.close()
    pool.close()


async def test_image_whatever_type_is_declared(loader: MediaLoader) -> None:
    for media_type in ("image/png", "image/jpeg", "text/plain", ""):
        loaded = await loader.image(data_url(IMAGE, media_type), itself, field="f", budget=loader.budget())
        assert np.array_equal(loaded, picture())


async def test_video_and_frame_list(loader: MediaLoader) -> None:
    budget = loader.budget()
    whole = await loader.video(
        data_url(video(), "video/mp4"), chosen(0, 5), kept, frame_list_fps=1.0, field="f", budget=budget
    )
    assert whole.indices == (0, 5)
    frame = base64.b64encode(encoded(picture(), "JPEG")).decode()
    listed = await loader.video(
        f"data:video/jpeg;base64,{frame},{frame}", chosen(0, 1), kept, frame_list_fps=4.0, field="f", budget=budget
    )
    assert listed.times == (0.0, 0.25)
    assert budget.decoded_bytes_left == 100_000 - 2 * 64 * 48 * 3 - 2 * 40 * 30 * 3


async def test_audio(loader: MediaLoader) -> None:
    clip = sound(tone(440, 8000), 8000, "WAV")
    samples = await loader.audio(data_url(clip), sample_rate=16_000, field="ref_audio")
    assert samples.size == 16_000
    assert np.array_equal(samples, await loader.audio_file(clip, sample_rate=16_000, field="ref_audio"))


async def test_bytes_of_a_request_are_counted(loader: MediaLoader) -> None:
    budget = loader.budget()
    big = data_url(IMAGE + bytes(99_000))
    await loader.image(big, itself, field="f", budget=budget)
    with pytest.raises(InputError, match="too large: at most"):
        await loader.image(big, itself, field="f", budget=budget)
    with pytest.raises(InputError, match="too large: at most"):
        url = "data:video/jpeg;base64," + "A" * 400_000
        await loader.video(url, chosen(0), kept, frame_list_fps=1.0, field="f", budget=loader.budget())


async def test_no_picture_is_decoded_while_one_is_held_at_full_size(loader: MediaLoader) -> None:
    held = 0

    def prepare(media: object, source: bytes) -> int:
        nonlocal held
        held += 1
        time.sleep(0.01)
        most.append(held)
        held -= 1
        return 1

    most: list[int] = []
    loads = (loader.image(data_url(IMAGE), prepare, field="f", budget=loader.budget()) for _ in range(4))
    assert await asyncio.gather(*loads) == [1] * 4
    assert most == [1] * 4


async def test_items_loaded_at_once_share_the_budget(loader: MediaLoader) -> None:
    budget = loader.budget()
    url = data_url(encoded(picture(170, 170), "PNG"))
    loads = (loader.image(url, itself, field="f", budget=budget) for _ in range(3))
    outcomes = await asyncio.gather(*loads, return_exceptions=True)
    assert sum(isinstance(outcome, InputError) for outcome in outcomes) == 2


async def test_pixels_of_a_request_are_counted(loader: MediaLoader) -> None:
    budget = loader.budget()
    await loader.image(data_url(encoded(picture(170, 170), "PNG")), itself, field="f", budget=budget)
    with pytest.raises(InputError, match="at most 33333 pixels"):
        await loader.video(data_url(video()), chosen(0, 1), kept, frame_list_fps=1.0, field="f", budget=budget)
    with pytest.raises(InputError, match="at most 33333 pixels"):
        await loader.image(data_url(encoded(picture(170, 170), "PNG")), itself, field="f", budget=budget)


async def test_isolated_pictures_are_decoded_elsewhere(loader: MediaLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def opened(*args: object, **options: object) -> None:
        decoded.append(1)
        raise ValueError("no picture of a client is opened here")

    monkeypatch.setattr("PIL.Image.open", opened)
    url = data_url(IMAGE, "image/png")
    frames = data_url(IMAGE, "video/jpeg")
    calls = (
        loader.image(url, itself, field="f", budget=loader.budget()),
        loader.video(frames, chosen(0), kept, frame_list_fps=1.0, field="f", budget=loader.budget()),
    )
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    if loader.image_pool is None:
        assert len(decoded) == 2 and all(isinstance(outcome, InputError) for outcome in outcomes)
    else:
        assert decoded == [] and np.array_equal(outcomes[0], outcomes[1].frames[0])


async def test_a_picture_that_ends_its_process_is_refused_and_the_next_one_is_taken() -> None:
    images = decode_workers(1)
    loader = MediaLoader(Fetcher(UrlPolicy()), images, MediaLimits(), image_pool=images)

    def prepare(image: object, source: bytes) -> object:
        return image

    def killed(metadata: object, digest: bytes) -> object:
        raise EOFError("as when the process dies")

    url = data_url(IMAGE)
    with pytest.raises(InputError, match="more memory or time to decode than allowed") as refused:
        await loader.image(url, killed, field="f", budget=loader.budget())
    assert refused.value.field == "f" and images.workers_lost == 1
    assert await loader.image(url, prepare, field="f", budget=loader.budget())
    await loader.close()


async def test_clients_take_turns(loader: MediaLoader) -> None:
    """One that sends many files delays another one's by a single file more."""
    begun, go = list[str](), asyncio.Semaphore(0)

    def still(client: str) -> Coroutine[Any, Any, bytes]:
        def prepare(media: object, source: bytes) -> bytes:
            begun.append(client)
            return source

        return loader.image(data_url(IMAGE), prepare, field="f", budget=loader.budget(client))

    async def clip(client: str) -> None:
        async def prepare(frames: VideoFrames) -> None:
            begun.append(client)
            await go.acquire()

        url, budget = data_url(video()), loader.budget(client)
        await loader.video(url, chosen(0), prepare, frame_list_fps=1.0, field="f", budget=budget)

    async with asyncio.TaskGroup() as tasks:
        for client in ("greedy", "greedy", "greedy", "other"):
            tasks.create_task(clip(client))
            await asyncio.sleep(0)
        for _ in range(4):
            go.release()
    assert begun == ["greedy", "greedy", "other", "greedy"]
    begun.clear()
    await asyncio.gather(*map(still, ("greedy", "greedy", "greedy", "other")))
    assert begun == ["greedy", "greedy", "other", "greedy"]
