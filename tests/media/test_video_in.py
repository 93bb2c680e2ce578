"""Videos are decoded in a worker, within limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import pytest
import pytest_asyncio

from models.interfaces.errors import InputError
from models.interfaces.media import VideoFrames, VideoMetadata
from models.interfaces.resizing import FrameResizer
from service.confined.workers import WorkerLimits, WorkerPool
from service.media.loader import Choose, decode_video, decode_workers
from service.media.messages import VideoLimits
from tests.media import samples
from tests.media.samples import chosen, every

FIELD = "messages[0].content[0].video_url"
MIB = 1 << 20
LIMITS = VideoLimits()


# One pool for the module: a worker takes half a second to start.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool() -> AsyncIterator[WorkerPool]:
    pool = decode_workers(1, WorkerLimits(memory_bytes=2048 * MIB, cpu_seconds=60, wall_seconds=240))
    yield pool
    pool.close()


ALL = every(1)


async def decode(
    pool: WorkerPool,
    data: bytes,
    choose: Choose,
    limits: VideoLimits = LIMITS,
    charge: Callable[[int], None] = lambda size: None,
) -> VideoFrames:
    return await decode_video(pool, data, choose, field=FIELD, limits=limits, charge=charge)


async def refusal(pool: WorkerPool, data: bytes, limits: VideoLimits = LIMITS) -> str:
    with pytest.raises(InputError) as caught:
        await decode(pool, data, every(1), limits)
    assert caught.value.field == FIELD
    return str(caught.value)


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        *(("mp4", "libx264"), ("mov", "mpeg4"), ("webm", "libvpx"), ("webm", "libvpx-vp9"), ("matroska", "libx264")),
        *(("avi", "mjpeg"), ("avi", "mpeg4")),
    ],
)
async def test_containers(pool: WorkerPool, container: str, codec: str) -> None:
    asked: list[VideoMetadata] = []

    def choose(metadata: VideoMetadata) -> tuple[Sequence[int], FrameResizer]:
        asked.append(metadata)
        return chosen(0, 7, 7, 29)(metadata)

    video = await decode(pool, samples.video(container, codec), choose)
    assert asked == [video.metadata] == [VideoMetadata(30, 30.0, 1.0, 48, 64)]
    assert video.indices == (0, 7, 7, 29)
    assert video.times == pytest.approx((0, 7 / 30, 7 / 30, 29 / 30), abs=1e-3)
    for index, frame in zip(video.indices, video.frames, strict=True):
        assert frame.shape == (48, 64, 3) and frame.dtype == np.uint8
        assert frame[40:, 40:].mean() == pytest.approx(index * 8, abs=8)
        assert frame[4:20, 4:28].mean() > 245


@pytest.mark.parametrize(("rotation", "corner"), [(90, (1, 0)), (180, (1, 1)), (-90, (0, 1))])
async def test_rotation_is_applied(pool: WorkerPool, rotation: int, corner: tuple[int, int]) -> None:
    """The white quarter, upper left as stored, turns with the picture, counter-clockwise."""
    video = await decode(pool, samples.video(rotation=rotation), every(29))
    height, width = (48, 64) if rotation == 180 else (64, 48)
    assert (video.metadata.height, video.metadata.width) == (height, width)
    frame = video.frames[0].reshape(2, height // 2, 2, width // 2, 3).mean(axis=(1, 3, 4))
    assert np.unravel_index(frame.argmax(), frame.shape) == corner


async def test_the_rate_is_measured_when_the_header_lies(pool: WorkerPool) -> None:
    data = samples.video("matroska", "libx264", frames=20, rate=10)
    at = data.index(b"\x23\xe3\x83\x84") + 4  # DefaultDuration in nanoseconds, 4 bytes
    lying = data[:at] + (1_000_000).to_bytes(4, "big") + data[at + 4 :]
    metadata = (await decode(pool, lying, every(5))).metadata
    assert metadata.num_frames == 20
    assert 9 <= metadata.fps <= 11


async def test_limits(pool: WorkerPool) -> None:
    data, lost = samples.video(), pool.workers_lost
    assert "pixels" in await refusal(pool, data, VideoLimits(max_pixels=64 * 48 - 1))
    assert "too many frames: at most 29" in await refusal(pool, data, VideoLimits(max_source_frames=29))
    assert "at most 0 s" in await refusal(pool, data, VideoLimits(max_duration=0.4))
    assert "at most 29 allowed" in await refusal(pool, data, VideoLimits(max_frames=29))
    assert "the frames are too large" in await refusal(pool, data, VideoLimits(max_decoded_bytes=30 * 64 * 48 * 3 - 1))
    assert "at most 100" in await refusal(pool, data, VideoLimits(max_bytes=100))
    assert pool.workers_lost == lost


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"",
            b"not a video",
            bytes(5000),
            b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
            b"ffconcat version 1.0\nfile x",
        ),
        *(samples.encoded(samples.picture(), "PNG"), samples.sound(samples.tone(440, 8000), 8000, "WAV")),
        samples.sound_by_av(samples.tone(440, 48000), 48000, "mp4", "aac"),
    ],
)
async def test_what_is_no_video(pool: WorkerPool, data: bytes) -> None:
    assert "video" in await refusal(pool, data)


@pytest.mark.parametrize("place", ["container", "first frame", "a later frame"])
async def test_attacker_sized_frames(pool: WorkerPool, place: str) -> None:
    """65500 x 65500 in a file of a few kilobytes."""
    data, lost = samples.video("avi", "mjpeg"), pool.workers_lost
    frames = [at for at in range(len(data)) if data[at : at + 2] == b"\xff\xc0"]
    assert len(frames) == 30
    if place == "container":
        at = data.index(b"strf") + 12
        data = data[:at] + (65500).to_bytes(4, "little") * 2 + data[at + 8 :]
    at = frames[{"container": 0, "first frame": 0, "a later frame": 20}[place]] + 5
    assert data[at : at + 4] == b"\x00\x30\x00\x40"
    video = await decode(pool, data[:at] + (65500).to_bytes(2, "big") * 2 + data[at + 4 :], ALL)
    assert video.frames[0].shape == (48, 64, 3)
    assert sorted({*range(30)} - {*video.indices}) == [20 if place == "a later frame" else 0]
    assert pool.workers_lost == lost


async def test_choose_may_refuse(pool: WorkerPool) -> None:
    def choose(metadata: VideoMetadata) -> tuple[Sequence[int], FrameResizer]:
        raise InputError("fps", "too high")

    lost = pool.workers_lost
    with pytest.raises(InputError, match="too high"):
        await decode(pool, samples.video(), choose)
    assert len((await decode(pool, samples.video(), every(10))).frames) == 3
    assert pool.workers_lost == lost


async def test_cut_short(pool: WorkerPool) -> None:
    """One rule: what is there is answered, whatever the container; an MP4 whose index was at the end has nothing."""
    for container, codec, options in (
        ("matroska", "libx264", {}),
        ("webm", "libvpx-vp9", {}),
        ("avi", "mpeg4", {}),
        ("mp4", "libx264", {"movflags": "frag_keyframe+empty_moov"}),
    ):
        data = samples.video(container, codec, options=options, frames=60)
        video = await decode(pool, data[: len(data) * 9 // 10], ALL)
        assert 2 < len(video.frames) == video.metadata.num_frames < 60, (container, options)
        assert video.indices == tuple(range(len(video.frames)))
    data = samples.video("mp4", "libx264")
    await refusal(pool, data[: len(data) * 2 // 3])
    at = data.index(b"moov") - 4  # to the front, as for streaming
    moov, rest = bytearray(data[at:]), data[:at]
    head = rest.index(b"mdat") - 4
    place = moov.index(b"stco") + 12
    assert moov[place - 4 : place] == b"\0\0\0\1", "one chunk, whose place moves"
    moov[place : place + 4] = (int.from_bytes(moov[place : place + 4], "big") + len(moov)).to_bytes(4, "big")
    video = await decode(pool, rest[:head] + moov + rest[head : len(rest) * 9 // 10], ALL)
    assert 2 < len(video.frames) < 30
