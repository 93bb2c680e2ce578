"""32 chats about a picture a second beside 32 streams of speech, in virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from service.engine import arbiter
from tests.engine.shared_gpu import SharedGpu
from tests.engine.speech.simulator import PATCH_SECONDS
from tests.support.inference import no_gradients as no_gradients

SECONDS = 5.0


def milliseconds(values: list[float], percentile: float) -> float:
    return 1e3 * float(np.percentile(values, percentile))


def test_speech_that_is_ahead_leaves_chat_its_pace_and_everybody_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SharedGpu(monkeypatch, rate=32, streams=32)
    gpu.go_on(SECONDS)
    assert milliseconds(gpu.gaps(), 50) < 2.5 and milliseconds(gpu.gaps(), 99) < 15
    assert milliseconds(gpu.first_tokens(), 95) < 60
    assert gpu.talker.underruns == 0
    assert milliseconds(gpu.talker.first, 95) < 60
    assert gpu.talker.patches * PATCH_SECONDS / SECONDS > 2 * 32  # Twice as fast as they listen.


def test_without_giving_way_every_token_waits_for_a_step_of_speech(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would not notice if launches took no time."""
    monkeypatch.setattr(arbiter, "AHEAD", 1e9)
    gpu = SharedGpu(monkeypatch, rate=32, streams=32)
    gpu.go_on(SECONDS)
    assert milliseconds(gpu.gaps(), 50) > 10


def test_speech_alone_does_not_give_way_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SharedGpu(monkeypatch, rate=1e-3, streams=32)
    gpu.go_on(2.0)
    assert gpu.talker.patches * PATCH_SECONDS / 2.0 > 400
