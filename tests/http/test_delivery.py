"""Audio between the engine's stream and a response."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from service.api.delivery import AudioFeed
from service.engine.messages import SpeechDelta, SpeechRequest

REQUEST = SpeechRequest("it", "talker", (), 0, 2.0, 10, live=True, arrival=0.0)


class BrokenStream:
    """One piece of audio, then a fault that is not the engine's."""

    ended = False

    async def __aiter__(self) -> AsyncIterator[SpeechDelta]:
        yield SpeechDelta("it", np.zeros(4, np.float32), 0)
        raise ValueError("a bug")

    async def aclose(self) -> None:
        self.ended = True


async def test_a_fault_in_mid_stream_is_not_taken_for_the_end_of_the_speech() -> None:
    stream = BrokenStream()
    context = cast(Any, SimpleNamespace(engine=SimpleNamespace(submit=lambda request: stream)))
    heard = 0
    with pytest.raises(ValueError, match="a bug"):
        async with AudioFeed(context, REQUEST, 4, most_ahead=20.0) as feed:
            async for chunk in feed.chunks():
                heard += len(chunk.audio)
    assert heard == 4 and stream.ended
