"""Bytes of telephone lines are heard at the levels that FFmpeg gives them."""

from __future__ import annotations

import av
import numpy as np
import pytest

from service.api.realtime.listening import g711_levels
from service.media.audio_formats import G711_RATE


@pytest.mark.parametrize(("codec", "law"), [("pcm_mulaw", "ulaw"), ("pcm_alaw", "alaw")])
def test_levels(codec: str, law: str) -> None:
    context = av.codec.CodecContext.create(codec, "r")
    context.sample_rate, context.layout = G711_RATE, "mono"
    frames = context.decode(av.Packet(bytes(range(256))))
    assert (g711_levels(law) == np.concatenate([frame.to_ndarray()[0] for frame in frames])).all()
