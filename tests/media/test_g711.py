"""G.711 against the codecs of FFmpeg."""

from __future__ import annotations

from collections.abc import Callable

import av
import numpy as np
import pytest

from service.media.audio_formats import G711_RATE as RATE
from service.media.audio_out import a_law, g711_levels, mu_law

EVERY = np.arange(-32_768, 32_768).astype(np.int16)
LAWS = [("pcm_mulaw", mu_law), ("pcm_alaw", a_law)]
Law = Callable[[np.ndarray], bytes]


def decoded(codec: str, data: bytes) -> np.ndarray:
    context = av.codec.CodecContext.create(codec, "r")
    context.sample_rate, context.layout = RATE, "mono"
    frames = context.decode(av.Packet(data))
    return np.concatenate([frame.to_ndarray()[0] for frame in frames]).astype(np.int32)


@pytest.mark.parametrize(("codec", "law"), LAWS)
def test_every_sample_becomes_a_level_at_most_half_a_step_away(codec: str, law: Law) -> None:
    levels = np.unique(decoded(codec, bytes(range(256))))
    becomes = decoded(codec, law(EVERY))
    place = np.searchsorted(levels, becomes)
    gaps = np.diff(levels)
    step = np.maximum(gaps[np.maximum(place - 1, 0)], gaps[np.minimum(place, len(gaps) - 1)])
    inside = np.abs(EVERY.astype(np.int32)) <= 32_635  # beyond that mu-law clips
    assert (np.abs(becomes - EVERY) <= step // 2 + 4)[inside].all()


@pytest.mark.parametrize(("codec", "law"), LAWS)
def test_levels_are_kept(codec: str, law: Law) -> None:
    levels = decoded(codec, bytes(range(256)))
    assert (decoded(codec, law(levels.astype(np.int16))) == levels).all()
    assert law(np.zeros(0, np.int16)) == b""


@pytest.mark.parametrize(("codec", "name"), [("pcm_mulaw", "ulaw"), ("pcm_alaw", "alaw")])
def test_bytes_are_heard_at_their_levels(codec: str, name: str) -> None:
    assert (g711_levels(name) == decoded(codec, bytes(range(256)))).all()
