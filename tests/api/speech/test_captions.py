"""Captions and pauses of a spoken text, to the sample; lexicons and solver steps that a server or a request names."""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from websockets.sync.client import connect

from service.link.engine_link import InlineLink
from service.processes.server import create_server
from service.settings.reading import SettingsError
from service.settings.settings import load_settings
from tests.support.fake_talker import PATCH, RATE, FakeTalker, talking_catalog
from tests.support.servers import RunningServer, running_server
from tests.support.sse import sse_events
from tests.support.waiting import GENEROUS

TEXT = "[pause:250ms]In 1999. [pause:1.5s] It cost **$5**.\n\nSee nginx!  [pause:0.1s]"
WRITTEN = ["In 1999.", "It cost $5.", "See nginx!"]
SPOKEN = ["In nineteen ninety-nine.", "It cost five dollars.", "See engine x!"]
PAUSES = [0.25, 1.5, 0.0, 0.1]
SEGMENT = PATCH / RATE
STARTS = [0.25, 1.75 + SEGMENT, 1.75 + 2 * SEGMENT]
END = sum(PAUSES) + 3 * SEGMENT


@pytest.fixture(scope="module")
def talker() -> FakeTalker:
    return FakeTalker()


@pytest.fixture(scope="module")
def server(talker: FakeTalker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    lexicon = tmp_path_factory.mktemp("lexicon") / "lexicon.yaml"
    lexicon.write_text("nginx: engine x\nGIF: jif\n", "utf-8")
    flags: dict[str, Any] = {"fixed_voices": False, "lexicon": lexicon, "solver_steps": (12, 5)}
    with running_server(talking_catalog(), lambda config: InlineLink(config, talker.serve), **flags) as server:
        yield server


def speak(server: RunningServer, text: str = TEXT, **fields: Any) -> httpx.Response:
    body = {"input": text, "response_format": "pcm", "split_granularity": "sentence", **fields}
    return httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=GENEROUS)


def captioned(server: RunningServer, **fields: Any) -> tuple[bytes, list[dict[str, Any]], dict[str, Any]]:
    """The file, the segments and the last event."""
    answer = speak(server, stream_format="sse", **{"timestamp_granularities": ["segment"], **fields})
    assert answer.status_code == 200, answer.text
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    data = b"".join(base64.b64decode(event["audio"]) for event in events if event["type"] == "speech.audio.delta")
    return data, [event for event in events if event["type"] == "speech.audio.segment"], events[-1]


def samples(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<i2")


def spoken(talker: FakeTalker) -> list[str]:
    return talker.texts[talker.requests[-1].request_id]


def test_segments_are_told_to_the_sample(server: RunningServer, talker: FakeTalker) -> None:
    data, segments, done = captioned(server)
    assert spoken(talker) == SPOKEN and [segment["text"] for segment in segments] == WRITTEN
    assert [segment["index"] for segment in segments] == [0, 1, 2]
    audio = samples(data)
    assert len(audio) == round(END * RATE)
    silent = np.ones(len(audio), bool)
    for index, segment in enumerate(segments):
        start, end = round(segment["start"] * RATE), round(segment["end"] * RATE)
        assert (start, end - start) == (round(STARTS[index] * RATE), PATCH)
        assert (audio[start:end] == round((0.25 + 0.05 * index) * 32767)).all()
        silent[start:end] = False
        assert "words" not in segment
    assert not audio[silent].any()
    assert done["type"] == "speech.audio.done"
    assert done["usage"]["output_tokens"] == 3, "silence is no token"


def test_events_of_captions_follow_the_audio_that_they_are_about(server: RunningServer) -> None:
    answer = speak(server, stream_format="sse", timestamp_granularities=["segment"])
    heard = 0
    for block in sse_events(answer.text):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "speech.audio.delta":
            heard += len(base64.b64decode(event["audio"])) // 2
        elif event["type"] == "speech.audio.segment":
            assert round(event["end"] * RATE) <= heard


def test_words_are_estimates_within_their_segment(server: RunningServer) -> None:
    _, segments, _ = captioned(server, timestamp_granularities=["word"])
    assert [[word["word"] for word in segment["words"]] for segment in segments] == [text.split() for text in WRITTEN]
    for segment in segments:
        words = segment["words"]
        assert words[0]["start"] == pytest.approx(segment["start"], abs=0.001)
        assert words[-1]["end"] == pytest.approx(segment["end"], abs=0.001)
        times = [time for word in words for time in (word["start"], word["end"])]
        assert times == sorted(times) and all(word["estimated"] is True for word in words)


@pytest.mark.parametrize("fields", [{"sample_rate": 24_000}, {"speed": 2.0}, {"speed": 0.5, "sample_rate": 16_000}])
def test_times_are_those_of_the_audio_that_is_heard(server: RunningServer, fields: dict[str, Any]) -> None:
    """A pause is as long as it says at every speed; the segments are as long as they are spoken."""
    data, segments, _ = captioned(server, **fields)
    segment = SEGMENT / fields.get("speed", 1.0)
    starts = [0.25, 1.75 + segment, 1.75 + 2 * segment]
    assert [part["start"] for part in segments] == pytest.approx(starts, abs=1 / RATE)
    assert [part["end"] - part["start"] for part in segments] == pytest.approx([segment] * 3, abs=1 / RATE)
    rate = fields.get("sample_rate", RATE)
    # Changing the tempo keeps the length to within its windows.
    margin = 2 / rate if "speed" not in fields else 0.1
    assert len(samples(data)) / rate == pytest.approx(sum(PAUSES) + 3 * segment, abs=margin)


def test_a_long_pause_comes_in_pieces(server: RunningServer) -> None:
    """However long it is, a client that does not read it holds little of the server's memory."""
    answer = speak(server, "Hm. " + "[pause:10s]" * 12 + " Well.", stream_format="sse")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    sizes = [len(base64.b64decode(event["audio"])) for event in events if event["type"] == "speech.audio.delta"]
    assert sum(sizes) == 2 * (120 * RATE + 2 * PATCH)
    assert max(sizes) <= 2 * RATE


@pytest.mark.parametrize("name", ["wav", "flac"])
def test_whole_files_have_their_pauses(server: RunningServer, name: str) -> None:
    data = speak(server, response_format=name, stream=False).content
    audio, rate = soundfile.read(io.BytesIO(data))
    assert rate == RATE and len(audio) == round(END * RATE)
    if name == "wav":
        assert struct.unpack_from("<I", data, 40)[0] == 2 * len(audio)


def test_ssml_is_spoken(server: RunningServer, talker: FakeTalker) -> None:
    text = (
        '<speak>The <sub alias="World Health Organization">WHO</sub>.<break time="400ms"/>'
        '<say-as interpret-as="characters">B2</say-as> &lt; nginx</speak>'
    )
    data, segments, _ = captioned(server, text=text)
    assert spoken(talker) == ["The World Health Organization.", "B two < engine x"]
    assert [segment["text"] for segment in segments] == ["The WHO.", "B2 < nginx"]
    assert len(samples(data)) == 2 * PATCH + round(0.4 * RATE)


def test_numbers_stay_where_they_are_not_to_be_words(server: RunningServer, talker: FakeTalker) -> None:
    _, segments, _ = captioned(server, normalize=False)
    assert spoken(talker) == ["In 1999.", "It cost $5.", "See engine x!"]
    assert [segment["text"] for segment in segments] == WRITTEN


def test_the_lexicon_of_a_request_is_before_that_of_the_server(server: RunningServer, talker: FakeTalker) -> None:
    speak(server, "nginx GIFs GIF gif.", lexicon={"nginx": "n g i n x", "gif": "graphics"})
    assert spoken(talker) == ["n g i n x GIFs graphics graphics."]
    speak(server, "nginx GIF gif.", lexicon={})
    assert spoken(talker) == ["engine x jif gif."]


def test_the_lexicon_of_a_server_is_for_texts_in_chunks_too(server: RunningServer, talker: FakeTalker) -> None:
    with connect(server.url.replace("http", "ws") + "/v1/audio/speech/stream") as socket:
        socket.send(json.dumps({"type": "session.config", "response_format": "pcm", "lexicon": {"b c": "d"}}))
        for chunk in ("We use ng", "inx, b", " c", " and 3 GI", "Fs."):
            socket.send(json.dumps({"type": "input.text", "text": chunk}))
        socket.send(json.dumps({"type": "input.done"}))
        while b"session.done" not in (message := socket.recv(GENEROUS, decode=False)):
            assert b'"type":"error"' not in message
    assert " ".join(spoken(talker)) == "We use engine x, d and three GIFs."


def test_the_server_names_solver_steps(server: RunningServer, talker: FakeTalker) -> None:
    assert speak(server, "One.").status_code == 200 and talker.requests[-1].solver_steps == 12
    assert speak(server, "One.", inference_timesteps=5).status_code == 200 and talker.requests[-1].solver_steps == 5
    refused = speak(server, "One.", inference_timesteps=10)
    assert refused.status_code == 400 and "5, 12" in refused.json()["error"]["message"]


BAD = [
    ({"timestamp_granularities": ["segment"]}, "timestamp_granularities", "sse"),
    ({"timestamp_granularities": ["phoneme"], "stream_format": "sse"}, "timestamp_granularities", "segment"),
    ({"timestamp_granularities": "word", "stream_format": "sse"}, "timestamp_granularities", ""),
    ({"input": "One. [pause:11s] Two."}, "input", "at most 10 s"),
    ({"input": "One." + "[pause:10s]" * 13}, "input", "120 s"),
    ({"input": "One. [pause:long] Two."}, "input", "[pause:1.5s]"),
    ({"input": "[pause:1s]"}, "input", "nothing to speak"),
    ({"input": "<speak><emphasis>x</emphasis></speak>"}, "input", "<emphasis> is not supported"),
    ({"input": "<speak>&xxe;</speak>"}, "input", "&xxe;"),
    ({"lexicon": {f"w{n}": "x" for n in range(101)}}, "lexicon", "100"),
    ({"lexicon": {"x" * 65: "y"}}, "lexicon", "64"),
    ({"lexicon": {"x": "y" * 201}}, "lexicon", "200"),
    ({"lexicon": {"x": ""}}, "lexicon", "1"),
    ({"lexicon": {" x": "y"}}, "lexicon", "letter or digit"),
    ({"lexicon": ["x"]}, "lexicon", ""),
    ({"input": "a " * 900, "lexicon": {"a": "b" * 200}}, "lexicon", "65536"),
    ({"input": "a [pause:1ms]" * 900, "lexicon": {"a": "b" * 200}}, "lexicon", "65536"),
]


@pytest.mark.parametrize("fields, param, says", BAD, ids=[f"{case[1]} {index}" for index, case in enumerate(BAD)])
def test_what_does_not_fit_is_named(server: RunningServer, fields: dict[str, Any], param: str, says: str) -> None:
    answer = speak(server, **{"text": "One.", **{"text" if key == "input" else key: fields[key] for key in fields}})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param) and says in error["message"], error


def test_a_server_does_not_start_with_a_lexicon_that_does_not_fit(tmp_path: Path) -> None:
    settings = load_settings({"lexicon": tmp_path / "nowhere.yaml", "voices_dir": tmp_path})
    with pytest.raises(SettingsError, match=r"lexicon: .+ cannot be read"):
        create_server(settings, talking_catalog())
