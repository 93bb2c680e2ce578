"""Audio between the engine's stream and a response."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from service.api.engines.request_stream import EngineError, RequestStream
from service.api.speech.delivery import AudioFeed
from service.link.messages import Pause, SpeechDelta, SpeechRequest

REQUEST = SpeechRequest("it", "talker", (), 0, 2.0, 10, live=True, arrival=0.0)


async def test_a_fault_in_mid_stream_is_not_taken_for_the_end_of_the_speech() -> None:
    aborted: list[str] = []
    stream: RequestStream[SpeechDelta] = RequestStream(REQUEST, aborted.append)
    context = cast(Any, SimpleNamespace(engine=SimpleNamespace(submit=lambda request: stream)))
    heard = 0
    with pytest.raises(EngineError, match="gone"):
        async with AudioFeed(context, REQUEST, 4, max_ahead=20.0) as feed:
            stream.deliver(SpeechDelta("it", np.zeros(4, np.float32), 0), last=False)
            stream.fail(EngineError(503, "engine_unavailable", "gone"))
            async for chunk in feed.chunks():
                heard += len(chunk.audio)
    assert heard == 4 and stream.ended and not aborted


async def test_a_client_that_takes_nothing_pauses_its_stream_and_leaving_it_aborts() -> None:
    commands: list[object] = []
    stream: RequestStream[SpeechDelta] = RequestStream(REQUEST, commands.append)
    engine = SimpleNamespace(submit=lambda request: stream, send=commands.append)
    async with AudioFeed(cast(Any, SimpleNamespace(engine=engine)), REQUEST, 4, max_ahead=2.0) as feed:
        for _ in range(3):
            stream.deliver(SpeechDelta("it", np.zeros(4, np.float32), 0), last=False)
        assert commands == [Pause("it", True)]
        chunk = await anext(feed.chunks())
        assert len(chunk.audio) == 12 and commands[1:] == [Pause("it", False)]
    assert commands[2:] == ["it"]
