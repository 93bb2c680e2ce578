"""Two servers for the whole folder: one whose voices are fakes, one that runs a miniature model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from service.hub.catalog import load_catalog
from service.link.engine_link import ENTRY
from service.settings.settings import load_settings
from tests.media.samples import sound, tone
from tests.support import miniature
from tests.support.fake_engine import FakeEngine
from tests.support.fake_talker import talking_catalog
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS

SEGMENT_LENGTH = 60
MAX_CHARS = 2000


def clip(seconds: float = 0.6, format: str = "WAV") -> bytes:
    return sound(tone(220, 16_000, seconds, 0.3), 16_000, format)


@pytest.fixture(scope="package")
def talker() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="package")
def talking(talker: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Served by `talker`, with a lexicon and solver steps of its own."""
    lexicon = tmp_path_factory.mktemp("lexicon") / "lexicon.yaml"
    lexicon.write_text("nginx: engine x\nGIF: jif\n", "utf-8")
    flags: dict[str, Any] = {"fixed_voices": "off", "lexicon": lexicon, "solver_steps": (12, 5)}
    with running_server(talking_catalog(), engine=talker.serve, **flags) as server:
        yield server


@pytest.fixture(scope="package")
def speaking() -> Iterator[RunningServer]:
    flags: dict[str, Any] = {
        "model": (str(miniature.talker()),),
        "served_model_name": ("talker,tts-1",),
        "max_running": 8,
        "max_speech_chars": MAX_CHARS,
        "max_body": "3M",
        "fixed_voices": "off",
    }
    with running_server(load_catalog(load_settings(flags)), engine=ENTRY, **flags) as server:
        assert server.context.voices is not None
        server.context.voices.max_voices = 3
        server.context.segment_length, server.context.speech_ahead = SEGMENT_LENGTH, 1.0
        yield server


@pytest.fixture(scope="package")
def http(speaking: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=speaking.url, timeout=2 * GENEROUS) as client:
        yield client
