"""`reprise say --srt --vtt` against a server, and what captions look like."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from service.cli.main import app
from service.cli.playback import LONGEST, cues
from tests.support.fake_talker import MUTE, PATCH, FakeTalker, talking_catalog
from tests.support.inline_link import InlineLink
from tests.support.servers import RunningServer, running_server

SRT = """1
00:00:00,000 --> 00:00:00,100
Hello < there.

2
00:00:01,600 --> 00:00:01,700
It cost $5.
"""
VTT = """WEBVTT

00:00:00.000 --> 00:00:00.100
Hello &lt; there.

00:00:01.600 --> 00:00:01.700
It cost $5.
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    talker = FakeTalker()
    flags: dict[str, Any] = {"fixed_voices": "off"}
    with running_server(talking_catalog(), lambda config: InlineLink(config, talker.serve), **flags) as server:
        yield server


def say(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["say", *map(str, arguments)], env={"COLUMNS": "200"})


def test_captions_beside_the_audio(server: RunningServer, tmp_path: Path) -> None:
    wav, srt, vtt = tmp_path / "x.wav", tmp_path / "x.srt", tmp_path / "x.vtt"
    text = "Hello < there. [pause:1.5s] It cost $5."
    done = say(text, "-o", wav, "--srt", srt, "--vtt", vtt, "--url", server.url)
    assert done.exit_code == 0, done.output
    assert srt.read_text("utf-8") == SRT and vtt.read_text("utf-8") == VTT
    audio = np.frombuffer(wav.read_bytes()[44:], "<i2")
    assert len(audio) == 2 * PATCH + round(1.5 * 48_000)
    assert (audio[-PATCH:] != 0).all() and not audio[PATCH:-PATCH].any()


def test_no_captions_of_speech_that_fails(server: RunningServer, tmp_path: Path) -> None:
    srt, wav = tmp_path / "x.srt", tmp_path / "x.wav"
    done = say(f"One. [pause:1s] {MUTE}", "-o", wav, "--srt", srt, "--url", server.url)
    assert done.exit_code != 0 and "the voice failed" in str(done.exception)
    assert not srt.exists() and not wav.exists()


def segment(text: str, words: list[str], start: float = 1.0) -> dict[str, Any]:
    """One word a second."""
    timed = [{"word": word, "start": start + i, "end": start + i + 1} for i, word in enumerate(words)]
    return {"start": start, "end": start + len(words), "text": text, "words": timed}


def test_long_segments_are_cut_between_words() -> None:
    words = ["twenty-letters-long,"] * 9
    shown = cues([segment(" ".join(words), words), segment("Short.", ["Short."], 10.0)])
    assert [cue.text for cue in shown] == [" ".join(words[:4]), " ".join(words[4:8]), words[8], "Short."]
    assert [(cue.start, cue.end) for cue in shown] == [(1, 5), (5, 9), (9, 10), (10, 11)]
    assert all(len(cue.text) <= LONGEST for cue in shown)


def test_chinese_has_no_spaces() -> None:
    shown = cues([segment("好" * 60, ["好"] * 60)])
    assert "".join(cue.text for cue in shown) == "好" * 60 and len(shown) == 3
    mixed = cues([segment("x" * 82 + " 我用，Linux 好。", ["x" * 82, "我", "用，", "Linux", "好。"])])
    assert [cue.text for cue in mixed] == ["x" * 82, "我用，Linux 好。"]
