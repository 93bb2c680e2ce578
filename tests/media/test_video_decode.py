"""The decoder of videos by itself: damaged files, and its threads."""

from __future__ import annotations

import gc
import io
import os

import numpy as np
import pytest
from PIL import Image

from models.interfaces.errors import InputError
from models.interfaces.media import VideoMetadata
from service.media import video_decode
from service.media.messages import VideoLimits
from service.media.video_decode import VideoSource
from tests.media import samples

FIELD = "video"


@pytest.mark.parametrize(("container", "codec"), [("mp4", "libx264"), ("webm", "libvpx"), ("avi", "mjpeg")])
def test_mutants_are_videos_or_refused(container: str, codec: str) -> None:
    limits = VideoLimits(max_pixels=640 * 480, max_source_frames=1000)

    def decode(data: bytes) -> VideoMetadata:
        source = VideoSource(data, field=FIELD, limits=limits)
        for _, time, pixels in source.frames(range(source.metadata.num_frames)):
            assert pixels.shape == (source.metadata.height, source.metadata.width, 3) and np.isfinite(time)
        return source.metadata

    mutants = samples.mutations(samples.video(container, codec, frames=8), 80, seed=3)
    videos, refused = samples.tried(mutants, decode, FIELD)
    assert len(videos) > 5 and refused > 5
    assert all(video.fps > 0 and 0 < video.duration <= limits.max_duration for video in videos)


def test_damage_to_av1_costs_no_frame_that_can_be_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders with threads lose frames around a damaged one; what is left has its own index."""
    data = bytearray(samples.video("mp4", "libsvtav1", frames=40, size=(96, 64)))
    begin, end = data.index(b"mdat"), data.index(b"moov")
    places = range(begin + (end - begin) // 4, end - 30, (end - begin) // 8)

    def left(threads: int) -> list[dict[int, int]]:
        monkeypatch.setattr(video_decode, "DECODE_THREADS", threads)
        return [greys(bytes(data[:place]) + bytes(20) + bytes(data[place + 20 :])) for place in places]

    alone = left(1)
    for frames in (left(2), left(8)):
        for one, other in zip(alone, frames, strict=True):
            assert one.keys() <= other.keys()
            assert {
                index: grey for index, grey in one.items() if abs(grey - index * 8 % 256) < 8
            }.items() <= other.items()
    counts = list(map(len, alone))
    assert min(counts) < 40 and sum(counts) > 10 * len(counts)


def greys(data: bytes) -> dict[int, int]:
    """Index -> grey, of the frames that can be decoded."""
    source = VideoSource(data, field=FIELD, limits=VideoLimits())
    seen = {index: int(pixels[40:, 60:].mean()) for index, _, pixels in source.frames(range(40))}
    source.close()
    return seen


def test_divx_3_is_read() -> None:
    source = VideoSource(samples.video("avi", "msmpeg4", frames=3), field=FIELD, limits=VideoLimits())
    assert [index for index, _, _ in source.frames(range(3))] == [0, 1, 2]


def test_a_codec_that_is_not_supported_is_named_beside_those_that_are() -> None:
    with pytest.raises(InputError) as refused:
        VideoSource(samples.video("matroska", "mpeg1video", frames=2), field=FIELD, limits=VideoLimits())
    assert str(refused.value) == (
        "the video has the codec mpeg1video; AV1, H.264, H.265, VP8, VP9, MPEG-2, MPEG-4 and Motion JPEG are supported"
    )


@pytest.mark.parametrize(
    ("container", "codec"), [("mp4", "libx264"), ("mov", "libx264"), ("matroska", "libx264"), ("avi", "mjpeg")]
)
def test_one_that_was_cut_short_is_not_taken_for_something_else(container: str, codec: str) -> None:
    data = samples.video(container, codec, frames=2)
    with pytest.raises(InputError, match=r"^the video is damaged or truncated$"):
        VideoSource(data[:24], field=FIELD, limits=VideoLimits())


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF", "WebP"])
def test_a_picture_is_called_one(name: str) -> None:
    """An animated GIF above all."""
    data = io.BytesIO()
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    frames[0].save(data, name, **({"save_all": True, "append_images": frames[1:]} if name == "GIF" else {}))
    with pytest.raises(InputError) as refused:
        VideoSource(data.getvalue(), field=FIELD, limits=VideoLimits())
    assert str(refused.value) == (
        f"the video is a picture ({name}); send it as image_url, or several JPEGs as data:video/jpeg;base64,FRAME,FRAME"
    )


@pytest.mark.parametrize(("container", "codec"), [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mjpeg")])
def test_large_frames_are_refused_with_the_limit(container: str, codec: str) -> None:
    """FFmpeg does not tell the size of some."""
    data = samples.video(container, codec, frames=1, size=(640, 480))
    with pytest.raises(
        InputError, match=r"640 x 480 pixels given, at most 9999 |or of more than 9999 pixels"
    ) as refused:
        VideoSource(data, field=FIELD, limits=VideoLimits(max_pixels=9999))
    assert " 0 x 0 " not in str(refused.value)


def test_a_closed_source_keeps_no_thread() -> None:
    data = samples.video(frames=6)
    gc.collect()
    before = len(os.listdir("/proc/self/task"))
    for _ in range(10):
        source = VideoSource(data, field="f", limits=VideoLimits())
        assert len(list(source.frames([0, 5]))) == 2
        source.close()
    assert len(os.listdir("/proc/self/task")) < before + 5
