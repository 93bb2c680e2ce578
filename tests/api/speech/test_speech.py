"""POST /v1/audio/speech on the real engine."""

from __future__ import annotations

import base64
import json
import socket
import typing
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from openai.types.audio.speech_create_params import Voice

from service.api.speech.speaker import OPENAI_VOICES
from service.link.messages import SpeechRequest
from tests.api.speech.conftest import clip
from tests.media.samples import data_url
from tests.support.refusals import assert_refused
from tests.support.servers import RunningServer
from tests.support.sse import sse_events
from tests.support.waiting import GENEROUS, wait

PATCH = 7680
RATE = 48_000


def speak(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": "talker", "input": "Hello there.", "voice": "default", "seed": 1, "max_len": 4}
    body |= {"response_format": "pcm", **fields}
    return http.post("/v1/audio/speech", json={k: v for k, v in body.items() if v is not None})


def pcm(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<i2").astype(np.float32) / 32767


@pytest.fixture(scope="module")
def reference(http: httpx.Client) -> np.ndarray:
    answer = speak(http)
    assert answer.status_code == 200, answer.text
    audio = pcm(answer.content)
    assert len(audio) == 4 * PATCH and np.abs(audio).max() > 0.01
    assert answer.content == speak(http).content
    return audio


def test_audio_comes_while_it_is_made(http: httpx.Client) -> None:
    body = {"input": "Hello.", "response_format": "pcm", "max_len": 8, "min_len": 8}
    with http.stream("POST", "/v1/audio/speech", json=body) as answer:
        sizes = [len(piece) for piece in answer.iter_raw()]
    assert sizes[0] == 2 * PATCH
    assert sum(sizes) == 8 * 2 * PATCH and len(sizes) > 3


def test_events_carry_the_same_bytes_and_usage(http: httpx.Client) -> None:
    answer = speak(http, response_format="flac", stream_format="sse")
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in sse_events(answer.text)]
    payloads = [json.loads(lines[1].removeprefix("data: ")) for lines in blocks]
    assert [lines[0].removeprefix("event: ") for lines in blocks] == [payload["type"] for payload in payloads]
    data = b"".join(base64.b64decode(p["audio"]) for p in payloads if p["type"] == "speech.audio.delta")
    assert data == speak(http, response_format="flac").content
    usage, steps = payloads[-1]["usage"], payloads[-1]["steps"]
    assert payloads[-1]["type"] == "speech.audio.done"
    assert usage["output_tokens"] == 4 and usage["total_tokens"] == usage["input_tokens"] + 4
    assert steps["total"] == 4 and steps["batch_size"] == 1 and steps["encoded_media"] == 0
    assert 0 <= steps["replayed"] <= 4


def test_the_openai_client_speaks(speaking: RunningServer, reference: np.ndarray) -> None:
    with OpenAI(base_url=f"{speaking.url}/v1", api_key="none", max_retries=0) as client:
        with client.audio.speech.with_streaming_response.create(
            model="tts-1",
            voice={"id": "default"},  # type: ignore[arg-type]
            input="Hello there.",
            response_format="pcm",
            extra_body={"seed": 1, "max_len": 4},
        ) as streaming:
            np.testing.assert_array_equal(pcm(b"".join(streaming.iter_bytes())), reference)
        with pytest.raises(BadRequestError) as error:
            client.audio.speech.create(model="tts-1", voice="alloy", input=" ")
        assert error.value.param == "input"


def test_what_is_asked_for_changes_the_audio(http: httpx.Client, reference: np.ndarray) -> None:
    for change in (
        {"seed": 2},
        {"cfg_value": 1.0},
        {"inference_timesteps": 4},
        {"temperature": 0.5},
        {"instructions": "A whisper"},
        {"voice": "nova"},
    ):
        other = pcm(speak(http, **change).content)
        assert other.shape == reference.shape and np.abs(other - reference).max() > 1e-3, change
    fast = pcm(speak(http, speed=2.0).content)
    assert abs(len(fast) - len(reference) / 2) < 0.1 * RATE
    one, lines = (speak(http, instructions=text) for text in ("An old (man), calm", "An  old man,\n\tcalm\n"))
    assert one.status_code == 200 and one.content == lines.content, "a description is one line"


def test_a_clip_that_is_fetched_counts_until_it_is_decoded(
    speaking: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, admission, counted = clip(), speaking.context.admission, list[bool]()

    async def fetch(url: str, *, admit: Callable[[int], None], **limits: object) -> bytes:
        admit(len(data))
        counted.append(admission.pending_bytes >= len(data))
        return data

    monkeypatch.setattr(speaking.context.media.fetcher, "fetch", fetch)
    url = "https://example.org/a.wav"
    answer = speak(http, ref_audio=url, prompt_audio=url, prompt_text="A tone.")
    assert answer.status_code == 200, answer.text
    assert counted == [True] * 2
    speaking.wait_idle()


def test_the_four_modes_and_what_each_asks_of_the_engine(
    speaking: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = speaking.context.engine, []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: (asked.append(request), submit(request))[1])
    voice, other = data_url(clip(0.6), "audio/wav"), data_url(clip(0.9), "audio/wav")
    tokenize = speaking.context.catalog.models[0].speech_processor.tokenize
    sounds = set()
    for fields, patches in (
        ({}, [None, None]),
        (dict.fromkeys(("ref_audio", "ref_text", "prompt_audio", "prompt_text", "instructions"), ""), [None, None]),
        ({"ref_audio": voice, "ref_text": ""}, [4, None]),
        ({"prompt_audio": other, "prompt_text": "A tone. "}, [None, 6]),
        ({"ref_audio": voice, "ref_text": "A tone. "}, [4, 4]),
        ({"ref_audio": voice, "prompt_audio": other, "prompt_text": "A tone. "}, [4, 6]),
    ):
        asked.clear()
        answer = speak(http, **fields)
        assert answer.status_code == 200, answer.text
        assert len(answer.content) == 2 * 4 * PATCH
        sounds.add(answer.content)
        request = next(request for request in asked if isinstance(request, SpeechRequest))
        assert [None if part is None else len(part) for part in (request.reference, request.prompt)] == patches
        assert request.transcript_ids == (tuple(tokenize("A tone. Hello there.")) if patches[1] else ())
    assert len(sounds) == 5


def test_what_does_not_fit_is_named(speaking: RunningServer) -> None:
    usual = {"model": "talker", "input": "Hello there.", "seed": 1, "max_len": 4, "response_format": "pcm"}
    assert_refused(f"{speaking.url}/v1/audio/speech", "speech", **usual)


def test_voices_that_the_openai_client_knows_and_names_that_nobody_has(
    http: httpx.Client, reference: np.ndarray
) -> None:
    names = next(typing.get_args(part) for part in typing.get_args(Voice) if typing.get_origin(part) is typing.Literal)
    assert "alloy" in names and set(names) <= set(OPENAI_VOICES)
    for name in ("", "Default"):
        np.testing.assert_allclose(pcm(speak(http, voice=name).content), reference, atol=3e-4)
    assert speak(http, model="nobody").status_code == 404
    answer = speak(http, voice="nobody")
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "voice"
    assert speak(http, model=None, voice=None).status_code == 200


def test_a_client_that_stops_reading_is_paused_until_it_reads(
    speaking: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, pauses = speaking.context.engine, []
    send = engine.send
    monkeypatch.setattr(engine, "send", lambda command: (pauses.append(command), send(command)))
    # A pause comes when a second of audio waits: a machine that speaks slower than a listener hears must have made it
    # before the client is dropped.
    patient = speaking.context.settings.model_copy(update={"write_timeout": 600.0})
    monkeypatch.setattr(speaking.context, "settings", patient)
    # Accepted connections take their buffers' sizes from the listening socket.
    speaking.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
    text = "This sentence is spoken again and again and again. " * 30  # about a minute in segments of 2.4 s
    fields = {"input": text, "response_format": "pcm", "stream_format": "sse", "max_len": 15, "min_len": 15}
    body = json.dumps(fields).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(speaking.url.rsplit(":", 1)[1])))
        head = b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        wait(lambda: bool(pauses), what="the stream is paused")
        for _ in range(2):  # it goes on, and nothing comes of it but heartbeats
            wait(lambda seen=engine.state: engine.state is not seen, what="a heartbeat")
        assert [command.paused for command in pauses] == [True]
        connection.settimeout(GENEROUS)
        while len(pauses) < 2:
            assert connection.recv(1 << 16)
        assert not pauses[1].paused
    speaking.wait_idle()
    wait(lambda: speaking.metric("slots_used") == 0, what="no stream is left")


def test_metrics_of_speech(speaking: RunningServer, http: httpx.Client) -> None:
    speak(http)
    speak(http, response_format="wav")
    for name in (
        *("time_to_first_audio_seconds_count", "audio_realtime_factor_count", "audio_chunk_gap_seconds_count"),
        *("audio_underrun_seconds_count", "audio_streams_total", "audio_generated_seconds_total"),
        *("audio_slack_seconds_count", "step_prediction_ratio_count", "bucket_occupancy_ratio_count"),
        *("step_duration_seconds_count", "speech_characters_total", "audio_encode_duration_seconds_count"),
    ):
        # Labels split a metric: on a slow machine every stream may have run dry, or none.
        assert speaking.metric(name) > 0, name
