"""Files that are not streamed say how long they are, whatever their sample rate and speed."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import av
import httpx
import pytest
import soundfile

from service.link.engine_link import InlineLink
from tests.support.fake_talker import PATCH, RATE, FakeTalker, talking_catalog
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS

FILES = [
    (name, rate, speed)
    for name in ("flac", "wav")
    for rate, speed in ((48_000, 1.0), (24_000, 1.0), (44_100, 1.5), (8000, 0.5), (48_000, 2.0))
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    talker = FakeTalker()
    with running_server(
        talking_catalog(), lambda config: InlineLink(config, talker.serve), fixed_voices=False
    ) as server:
        yield server


def post(server: RunningServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=GENEROUS).raise_for_status()


def assert_length(data: bytes, rate: int, seconds: float) -> None:
    """By libsndfile and by FFmpeg: what the header says is what is in the file."""
    info = soundfile.info(io.BytesIO(data))
    samples, _ = soundfile.read(io.BytesIO(data))
    assert (info.samplerate, info.frames) == (rate, len(samples))
    assert info.duration == pytest.approx(seconds, abs=0.08)
    with av.open(io.BytesIO(data)) as container:
        assert container.duration is not None
        assert container.duration / av.time_base == pytest.approx(info.duration, abs=1e-4)


@pytest.mark.parametrize(("name", "rate", "speed"), FILES)
def test_a_speech_request(server: RunningServer, name: str, rate: int, speed: float) -> None:
    text = "One. [pause:500ms] Two."
    body = {"input": text, "response_format": name, "sample_rate": rate, "speed": speed, "stream": False}
    data = post(server, "/v1/audio/speech", body | {"split_granularity": "sentence"}).content
    # A pause does not depend on the speed.
    assert_length(data, rate, 0.5 + 2 * PATCH / RATE / speed)


@pytest.mark.parametrize(("name", "rate", "speed"), FILES)
def test_a_spoken_answer(server: RunningServer, name: str, rate: int, speed: float) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say it."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": name, "sample_rate": rate, "speed": speed},
    }
    answer = post(server, "/v1/chat/completions", body).json()["choices"][0]["message"]["audio"]
    assert_length(base64.b64decode(answer["data"]), rate, PATCH / RATE / speed)


def test_a_stream_leaves_the_length_open(server: RunningServer) -> None:
    """Bytes that were sent cannot be changed."""
    data = post(server, "/v1/audio/speech", {"input": "One.", "response_format": "flac"}).content
    assert int.from_bytes(data[18:26], "big") & ((1 << 36) - 1) == 0
