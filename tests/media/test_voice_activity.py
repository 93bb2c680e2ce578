"""Voice activity: Silero's probabilities, and the turns that are made of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import soundfile

from service.media import voice_activity
from service.media.reference_audio import resample
from service.media.voice_activity import CONTEXT, RATE, WINDOW, SileroVad, TurnDetector, VoiceActivity, VoiceStream
from tests.support.processes import ROOT

AUDIO = ROOT / "tests/golden/qwen3_asr/audio"
EXPECTED = json.loads((ROOT / "tests/golden/silero_vad/expected.json").read_text())


def recording(name: str, rate: int = RATE) -> np.ndarray:
    samples, _ = soundfile.read(AUDIO / f"{name}.wav", dtype="float32")
    return resample(samples, RATE, rate)


def windows(samples: np.ndarray) -> np.ndarray:
    cut = np.concatenate([np.zeros(CONTEXT, np.float32), samples])
    whole = range(0, len(samples) - WINDOW + 1, WINDOW)
    return np.stack([cut[start : start + CONTEXT + WINDOW] for start in whole])


def test_probabilities_are_those_of_the_published_network() -> None:
    """Of all recordings in one batch, which end one after the other."""
    given = [windows(recording(name)) for name in EXPECTED]
    found = SileroVad().probabilities([VoiceStream(RATE) for _ in given], given)
    for probabilities, expected in zip(found, EXPECTED.values(), strict=True):
        np.testing.assert_allclose(probabilities, expected, atol=1e-4)


@pytest.mark.parametrize("rate", [24_000, 8_000])
def test_streams_are_heard_alike_at_any_rate_and_in_any_pieces(rate: int) -> None:
    """The resampled audio is late by half of its filter, so that windows at the edges of words may differ."""
    samples, network = recording("speech", rate), SileroVad()
    whole, pieces = VoiceStream(rate), VoiceStream(rate)
    (found,) = network.probabilities([whole], [whole.windows(samples)])
    sizes = np.random.default_rng(0).integers(1, 1500, 1000).cumsum()
    ends = [*sizes[sizes < len(samples)], len(samples)]
    cut = [samples[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    heard = [network.probabilities([pieces], [pieces.windows(piece)])[0] for piece in cut]
    np.testing.assert_allclose(np.concatenate(heard), found, atol=1e-5)
    expected = np.array(EXPECTED["speech"][: len(found)])
    assert ((found >= 0.5) != (expected >= 0.5)).sum() <= 5


@pytest.mark.parametrize(("frequency", "decibels"), [(300, 0), (6_000, 0), (10_000, -50)])
def test_the_resampling_filter(frequency: int, decibels: float) -> None:
    """Of 24 kHz: what 16 kHz cannot hold is gone."""
    tone = np.sin(2 * np.pi * frequency * np.arange(24_000) / 24_000).astype(np.float32)
    heard = VoiceStream(24_000).windows(tone)[4:, CONTEXT:]
    level = 20 * np.log10(np.sqrt(2 * np.mean(heard**2)) + 1e-9)
    assert level < decibels + 0.1 and (decibels < 0 or level > -0.1)


def turns(probabilities: list[float], silence: float = 96, prefix: float = 64, threshold: float = 0.5) -> list[Any]:
    detector = TurnDetector(threshold, prefix, silence)
    return [(one.starts, one.ms) for p in probabilities if (one := detector.update(p)) is not None]


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ([0.9] * 4 + [0.0] * 3, [(True, 0), (False, 224)]),
        ([0.0] * 4 + [0.9] * 2 + [0.0] * 4, [(True, 64), (False, 288)]),
        ([0.0] * 4 + [0.9, 0.0, 0.9], [(True, 64)]),
        ([0.9, 0.0, 0.0, 0.9], []),
        ([0.9] * 2 + [0.4, 0.0, 0.0] * 3, [(True, 0)]),
        ([0.9] * 2 + [0.3] * 3 + [0.9] * 2, [(True, 0), (False, 160), (True, 160)]),
        ([0.6] * 9, [(True, 0)]),
    ],
)
def test_turns(probabilities: list[float], expected: list[tuple[bool, float]]) -> None:
    """Two of three windows begin one; silence ends it, not what is nearly speech; the padding is not of the turn
    before."""
    assert turns(probabilities) == expected


def test_the_threshold_and_the_longest_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert turns([0.6] * 9, threshold=0.7) == []
    monkeypatch.setattr(voice_activity, "LONGEST_TURN_MS", 320)
    assert turns([0.9] * 12)[:3] == [(True, 0), (False, 320), (True, 320)]


async def test_streams_that_wait_are_heard_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step takes what has come meanwhile; who leaves disturbs nobody, and each hears what it hears alone."""
    gate, batches = asyncio.Event(), []
    compute = SileroVad.probabilities

    def counted(self: SileroVad, streams: Any, given: Any) -> Any:
        batches.append(len(streams))
        return compute(self, streams, given)

    async def in_thread(step: Callable[[], Any]) -> Any:
        await gate.wait()
        return await asyncio.to_thread(step)

    monkeypatch.setattr(SileroVad, "probabilities", counted)
    activity, names = VoiceActivity(), ["speech", "hum", "words", "click"]
    tasks = [
        asyncio.create_task(activity.probabilities(VoiceStream(RATE), recording(name), in_thread)) for name in names
    ]
    await asyncio.sleep(0)
    tasks[0].cancel()
    gate.set()
    found = await asyncio.gather(*tasks[1:])
    assert batches == [1, 3]
    for name, probabilities in zip(names[1:], found, strict=True):
        alone = await VoiceActivity().probabilities(VoiceStream(RATE), recording(name), in_thread)
        np.testing.assert_allclose(probabilities, alone, atol=1e-5)
