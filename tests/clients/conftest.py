"""A server that hears and speaks, and something to say to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from service.hub.catalog import OPENAI_PCM_RATE, Catalog
from tests.support.fake_engine import FakeEngine
from tests.support.fake_hearing import hearing_catalog
from tests.support.fake_talker import talking_catalog
from tests.support.processes import ROOT
from tests.support.servers import RunningServer, running_server


@pytest.fixture(scope="module")
def hearing_server() -> Iterator[RunningServer]:
    """Fakes that hear, chat and speak. A transcript says how long the audio is, an answer what the transcript says."""
    talker = FakeEngine()
    catalog = Catalog([*hearing_catalog().models, *talking_catalog().of_kind("speech")])
    with running_server(catalog, engine=talker.serve, fixed_voices="off") as server:
        server.context.pcm_rate = OPENAI_PCM_RATE
        yield server


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A turn of six seconds at 16 kHz, and the silence behind it."""
    samples, rate = soundfile.read(ROOT / "tests/golden/qwen3_asr/audio/speech.wav", dtype="int16")
    file = tmp_path / "turn.wav"
    soundfile.write(file, np.concatenate([samples, np.zeros(rate, np.int16)]), rate)
    return file


def seconds_of(transcript: str) -> float:
    return float(transcript.removesuffix(" s."))
