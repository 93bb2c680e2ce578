"""Videos that are sent as a list of frames."""

from __future__ import annotations

import base64
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from models.interfaces.errors import InputError
from models.interfaces.media import VideoFrames, VideoMetadata
from models.interfaces.resizing import FrameResizer
from service.media import image_decode
from service.media.image_decode import DECODING_BYTES, upright_picture
from service.media.loader import Choose, decode_frame_list
from service.media.messages import ImageLimits, VideoLimits
from tests.media import samples
from tests.media.samples import chosen, every

FIELD = "messages[0].content[0].video_url"
LIMITS = VideoLimits()


ALL = every(1)


def frame_list(*frames: bytes) -> str:
    return ",".join(base64.b64encode(frame).decode() for frame in frames)


def list_frames(
    payload: str,
    choose: Choose = ALL,
    limits: VideoLimits = LIMITS,
    fps: float = 2.0,
    charge: Callable[[int], None] = lambda size: None,
) -> VideoFrames:
    return decode_frame_list(payload, choose, fps=fps, field=FIELD, images=ImageLimits(), limits=limits, charge=charge)


def test_frame_list() -> None:
    pictures = [samples.picture(seed=seed) for seed in range(5)]
    video = list_frames(frame_list(*(samples.encoded(p, "JPEG") for p in pictures)), every(2))
    assert video.metadata == VideoMetadata(5, 2.0, 2.5, 30, 40, listed=True)
    assert video.indices == (0, 2, 4) and video.times == (0.0, 1.0, 2.0)
    assert abs(video.frames[1].astype(int) - np.asarray(pictures[2]).astype(int)).mean() < 12


def test_frame_list_limits() -> None:
    frame = samples.encoded(samples.picture(), "JPEG")
    with pytest.raises(InputError, match="at most 2 allowed"):
        list_frames(frame_list(*[frame] * 3), limits=VideoLimits(max_frames=2))
    with pytest.raises(InputError, match="at most 768"):
        list_frames("," * 10_000_000)
    with pytest.raises(InputError, match="same size"):
        list_frames(frame_list(frame, samples.encoded(samples.picture(20, 20), "JPEG")))
    with pytest.raises(InputError, match="too long: 4000 s given, at most 3600 s allowed"):
        list_frames(frame_list(frame, frame), fps=0.0005)
    with pytest.raises(InputError) as caught:
        list_frames(frame_list(frame, frame, frame[:100]))
    assert caught.value.field == f"{FIELD}[2]"


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """("decoded", bytes of its pixels) for each picture."""
    noted: list[tuple[str, int]] = []

    def noting(image: Image.Image, data: bytes, *, field: str) -> Image.Image:
        noted.append(("decoded", 3 * image.width * image.height))
        return upright_picture(image, data, field=field)

    monkeypatch.setattr(image_decode, "upright_picture", noting)
    return noted


def test_frames_are_chosen_and_charged_before_the_first_is_decoded(events: list[tuple[str, int]]) -> None:
    def charge(size: int) -> None:
        events.append(("charged", size))

    def full(size: int) -> None:
        raise InputError("", "no room")

    frame = samples.encoded(samples.picture(), "JPEG")
    one, payload = 40 * 30 * 3, frame_list(*[frame] * 5)
    with pytest.raises(InputError, match="no room"):
        list_frames(payload, charge=full)
    with pytest.raises(InputError, match="too large"):
        list_frames(payload, limits=VideoLimits(max_decoded_bytes=2 * one))
    assert not events
    list_frames(payload, every(2), charge=charge)
    assert events == [("charged", 3 * one + 40 * 30 * DECODING_BYTES), *[("decoded", one)] * 3]
    events.clear()
    # The first frame gives the size, and so is decoded though nobody wants it.
    list_frames(payload, chosen(3, 4), charge=charge)
    assert events == [("charged", 2 * one + 40 * 30 * DECODING_BYTES), *[("decoded", one)] * 3]
    events.clear()
    list_frames(payload, lambda metadata: (range(5), FrameResizer(2, 4)), charge=charge)
    assert events[0] == ("charged", 40 * 30 * DECODING_BYTES + 5 * 2 * 4 * 3), "one at full size, all resized"


def test_a_frame_of_another_size_is_not_decoded(events: list[tuple[str, int]]) -> None:
    frame, other = (samples.encoded(samples.picture(*extent), "JPEG") for extent in ((40, 30), (400, 300)))
    with pytest.raises(InputError, match="same size") as caught:
        list_frames(frame_list(frame, other))
    assert caught.value.field == f"{FIELD}[1]" and events == [("decoded", 40 * 30 * 3)]


def test_frames_that_are_stored_turned_have_the_size_that_they_are_seen_in() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    upright, turned = samples.picture(30, 40), samples.picture(40, 30)
    frames = samples.encoded(upright, "JPEG"), samples.encoded(turned, "JPEG", exif=exif)
    for payload in (frame_list(*frames), frame_list(*frames[::-1])):
        video = list_frames(payload)
        assert (video.metadata.width, video.metadata.height) == (30, 40)
        assert {frame.shape for frame in video.frames} == {(40, 30, 3)}
    with pytest.raises(InputError, match="same size"):
        list_frames(frame_list(frames[0], samples.encoded(turned, "JPEG")))
