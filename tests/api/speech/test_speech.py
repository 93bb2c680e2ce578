"""POST /v1/audio/speech on the real engine and the embedded TTS model."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from openai import BadRequestError, OpenAI
from openai.types.audio.speech_create_params import Voice

from service.hub import EMBEDDED
from service.hub.catalog import load_catalog
from service.link.engine_link import InlineLink
from service.link.messages import SpeechRequest
from service.media.audio_formats import FORMATS
from service.settings.settings import Settings, load_settings
from tests.support.servers import RunningServer, running_server
from tests.support.sse import sse_events
from tests.support.waiting import GENEROUS, wait

PATCH = 7680
RATE = 48_000
LAWS = {"ulaw": "ULAW", "alaw": "ALAW"}
"""Raw G.711, by its name in libsndfile."""


@pytest.fixture(scope="module")
def voices_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("voices")


@pytest.fixture(scope="module")
def talker(voices_dir: Path) -> Iterator[RunningServer]:
    flags: dict[str, Any] = {
        "model": (str(EMBEDDED / "voxcpm2"),),
        "served_model_name": ("talker,tts-1",),
        "voices_dir": voices_dir,
        "max_running": 8,
        "decode_buckets": (1, 2, 8),
        "max_speech_chars": 2000,
        "speech_segment_length": 60,
        "speech_ahead": 1.0,
        "max_voices": 3,
        "fixed_voices": False,
    }
    catalog = load_catalog(load_settings(flags))
    with running_server(catalog, InlineLink, **flags) as running:
        yield running


@pytest.fixture(scope="module")
def http(talker: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=talker.url, timeout=2 * GENEROUS) as client:
        yield client


def speak(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": "talker", "input": "Hello there.", "voice": "default", "seed": 1, "max_len": 4, **fields}
    return http.post("/v1/audio/speech", json={k: v for k, v in body.items() if v is not None})


def pcm(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<i2").astype(np.float32) / 32767


def decoded(data: bytes, name: str, length: int | None = None) -> np.ndarray:
    """By libsndfile, which has no part in the encoding; AAC, which it cannot read, by its frames alone."""
    if name == "pcm":
        return pcm(data)
    if name in LAWS:
        raw = {"samplerate": 8000, "channels": 1, "format": "RAW", "subtype": LAWS[name]}
        return np.repeat(soundfile.read(io.BytesIO(data), dtype="float32", **raw)[0], 6)
    if name == "flac" and length is not None:
        # libsndfile cannot read a FLAC whose length is unknown, as that of every stream is: 36 bits of STREAMINFO.
        data = data[:18] + (int.from_bytes(data[18:26], "big") | length).to_bytes(8, "big") + data[26:]
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        assert file.samplerate == RATE and file.channels == 1
        blocks = []
        while len(block := file.read(4096, dtype="float32")):  # a streamed file does not say its length
            blocks.append(block)
    return np.concatenate(blocks)


def adts_frames(data: bytes) -> int:
    """Walks the frames of an ADTS stream by their headers."""
    frames = at = 0
    while at < len(data):
        assert data[at] == 0xFF and data[at + 1] & 0xF0 == 0xF0
        at += (data[at + 3] & 3) << 11 | data[at + 4] << 3 | data[at + 5] >> 5
        frames += 1
    assert at == len(data)
    return frames


@pytest.fixture(scope="module")
def reference(http: httpx.Client) -> np.ndarray:
    answer = speak(http, response_format="pcm")
    assert answer.status_code == 200, answer.text
    return pcm(answer.content)


def test_pcm_says_its_rate(http: httpx.Client, reference: np.ndarray) -> None:
    answer = speak(http, response_format="pcm")
    assert answer.headers["content-type"] == "audio/pcm;rate=48000;channels=1"
    assert answer.headers["x-sample-rate"] == "48000"
    assert len(reference) == 4 * PATCH
    assert np.abs(reference).max() > 0.01
    assert answer.content == speak(http, response_format="pcm").content


@pytest.mark.parametrize("name", FORMATS)
def test_streamed_bytes_decode_to_the_audio_of_the_whole_file(
    http: httpx.Client, reference: np.ndarray, name: str
) -> None:
    streamed = speak(http, response_format=name)
    whole = speak(http, response_format=name, stream=False)
    assert streamed.status_code == whole.status_code == 200
    assert "content-length" in whole.headers and "content-length" not in streamed.headers
    assert streamed.headers["content-type"] == whole.headers["content-type"]
    if name == "aac":
        assert streamed.content == whole.content
        assert abs(adts_frames(whole.content) * 1024 - len(reference)) < 4096
        return
    first, second = decoded(streamed.content, name, len(reference)), decoded(whole.content, name)
    np.testing.assert_array_equal(first, second)
    lossless = name in ("flac", "wav", "pcm")
    if lossless:
        np.testing.assert_allclose(first, reference, atol=1.01 / 32767)
    else:
        assert abs(len(first) - len(reference)) < 0.1 * RATE


def test_a_whole_wav_has_its_sizes(http: httpx.Client) -> None:
    data = speak(http, response_format="wav", stream=False).content
    assert struct.unpack_from("<I", data, 4)[0] == len(data) - 8
    assert struct.unpack_from("<I", data, 40)[0] == len(data) - 44 == 2 * 4 * PATCH


def test_audio_comes_while_it_is_made(http: httpx.Client) -> None:
    with http.stream(
        "POST", "/v1/audio/speech", json={"input": "Hello.", "response_format": "pcm", "max_len": 8, "min_len": 8}
    ) as answer:
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
    usage = payloads[-1]["usage"]
    assert payloads[-1]["type"] == "speech.audio.done"
    assert usage["output_tokens"] == 4 and usage["total_tokens"] == usage["input_tokens"] + 4
    steps = payloads[-1]["steps"]
    assert steps["total"] == 4 and steps["batch_size"] == 1 and steps["encoded_media"] == 0
    assert 0 <= steps["replayed"] <= 4


def test_the_openai_client_speaks(talker: RunningServer, reference: np.ndarray) -> None:
    with OpenAI(base_url=f"{talker.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"seed": 1, "max_len": 4}
        answer = client.audio.speech.create(
            model="tts-1", voice="alloy", input="Hello there.", response_format="wav", extra_body=extra
        )
        assert decoded(answer.read(), "wav").shape == reference.shape
        with client.audio.speech.with_streaming_response.create(
            model="talker",
            voice={"id": "default"},  # type: ignore[arg-type]
            input="Hello there.",
            response_format="pcm",
            extra_body=extra,
        ) as streaming:
            data = b"".join(streaming.iter_bytes())
        np.testing.assert_array_equal(pcm(data), reference)
        with pytest.raises(BadRequestError) as error:
            client.audio.speech.create(model="tts-1", voice="alloy", input=" ")
        assert error.value.param == "input"


@pytest.mark.parametrize(
    ("fields", "rate", "bits"),
    [
        ({"response_format": "pcm"}, 24_000, 16),
        ({"response_format": "pcm", "model": "tts-1"}, 24_000, 16),
        ({"response_format": "pcm", "sample_rate": 48_000}, 48_000, 16),
        ({"response_format": "ulaw"}, 8_000, 8),
        ({"response_format": "alaw", "stream": False}, 8_000, 8),
        *(({"response_format": name}, 48_000, 16) for name in ("wav", "flac", "mp3", "opus", "aac")),
    ],
)
def test_rates_unless_the_setting_says_otherwise(
    talker: RunningServer, http: httpx.Client, reference: np.ndarray, fields: dict[str, Any], rate: int, bits: int
) -> None:
    """Clients made for OpenAI play pcm at 24 kHz; they do not read the headers."""
    context = talker.context
    default = Settings().pcm_sample_rate
    settings, context.settings = context.settings, context.settings.model_copy(update={"pcm_sample_rate": default})
    try:
        answer = speak(http, **fields)
    finally:
        context.settings = settings
    headers = answer.headers
    assert (headers["x-sample-rate"], headers["x-bits-per-sample"]) == (str(rate), str(bits))
    if fields["response_format"] in ("pcm", "ulaw", "alaw"):
        assert f"rate={rate}" in headers["content-type"]
        assert abs(len(answer.content) * 8 // bits - len(reference) * rate / RATE) < 100


def test_speed_and_sample_rate(http: httpx.Client, reference: np.ndarray) -> None:
    fast = pcm(speak(http, response_format="pcm", speed=2.0).content)
    assert abs(len(fast) - len(reference) / 2) < 0.1 * RATE
    low = speak(http, response_format="pcm", sample_rate=16000)
    assert low.headers["x-sample-rate"] == "16000"
    assert abs(len(low.content) / 2 - len(reference) / 3) < 100


def test_the_engine_knows_how_fast_is_listened(
    talker: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = talker.context.engine, []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: (asked.append(request), submit(request))[1])
    assert speak(http, speed=2.0).status_code == 200
    assert [request.speed for request in asked] == [2.0]


def test_seed_guidance_steps_and_design_change_the_audio(http: httpx.Client, reference: np.ndarray) -> None:
    for change in (
        {"seed": 2},
        {"cfg_value": 1.0},
        {"inference_timesteps": 4},
        {"temperature": 0.5},
        {"instructions": "A whisper"},
        {"voice": "nova"},
    ):
        other = pcm(speak(http, response_format="pcm", **change).content)
        assert other.shape == reference.shape and np.abs(other - reference).max() > 1e-3, change


def test_a_long_text_is_spoken_in_segments(http: httpx.Client) -> None:
    sentence = "This is one of several sentences that are too long together."
    answer = speak(http, input=" ".join([sentence] * 3), response_format="pcm", max_len=3)
    assert len(answer.content) == 2 * 3 * 3 * PATCH


def test_pauses_and_captions_leave_what_is_spoken_as_it_is(http: httpx.Client) -> None:
    """Cut at its segments' times, the audio is that of the same text without pauses."""
    one, two = "Hello there, friend.", "And again hello."
    plain = speak(http, input=f"{one} {two}", response_format="pcm", split_granularity="sentence", max_len=2)
    fields = {"stream_format": "sse", "timestamp_granularities": ["segment", "word"], "max_len": 2}
    answer = speak(http, input=f"{one}[pause:123ms]{two}[pause:1ms]", response_format="pcm", **fields)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    audio = pcm(b"".join(base64.b64decode(event["audio"]) for event in events if "audio" in event))
    segments = [event for event in events if event["type"] == "speech.audio.segment"]
    places = [(round(segment["start"] * RATE), round(segment["end"] * RATE)) for segment in segments]
    pause = round(0.123 * RATE)
    assert places == [(0, 2 * PATCH), (2 * PATCH + pause, 4 * PATCH + pause)]
    np.testing.assert_array_equal(np.concatenate([audio[begin:end] for begin, end in places]), pcm(plain.content))
    assert not audio[2 * PATCH : 2 * PATCH + pause].any() and len(audio) == places[1][1] + RATE // 1000
    assert [segment["text"] for segment in segments] == [one, two]
    for segment in segments:
        assert segment["start"] - 0.001 <= segment["words"][0]["start"]
        assert segment["words"][-1]["end"] <= segment["end"] + 0.001


def test_markup_is_not_spoken(http: httpx.Client) -> None:
    plain = speak(http, input="Hello there.", response_format="pcm")
    marked = speak(http, input="**Hello** there. \U0001f600", response_format="pcm")
    assert marked.content == plain.content


def clip(seconds: float = 0.6, rate: int = 16_000) -> bytes:
    samples = 0.3 * np.sin(2 * np.pi * 220 * np.arange(int(seconds * rate)) / rate)
    file = io.BytesIO()
    soundfile.write(file, samples.astype(np.float32), rate, format="WAV")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return "data:audio/wav;base64," + base64.b64encode(data).decode()


def test_a_clip_in_the_request_gives_the_voice(http: httpx.Client, reference: np.ndarray) -> None:
    cloned = speak(http, ref_audio=data_url(clip()), response_format="pcm")
    continued = speak(http, ref_audio=data_url(clip()), ref_text="A tone.", response_format="pcm")
    assert cloned.status_code == continued.status_code == 200, cloned.text + continued.text
    assert len(cloned.content) == len(continued.content) == 2 * len(reference)
    assert cloned.content != continued.content


def test_a_clip_that_is_fetched_counts_until_it_is_decoded(
    talker: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, admission, counted = clip(), talker.context.admission, list[bool]()

    async def fetch(url: str, *, admit: Callable[[int], None], **limits: object) -> bytes:
        admit(len(data))
        counted.append(admission.pending_bytes >= len(data))
        return data

    monkeypatch.setattr(talker.context.media._fetcher, "fetch", fetch)
    url = "https://example.org/a.wav"
    answer = speak(http, ref_audio=url, prompt_audio=url, prompt_text="A tone.")
    assert answer.status_code == 200, answer.text
    assert counted == [True] * 2
    talker.wait_idle()


def test_the_four_modes_and_what_each_asks_of_the_engine(
    talker: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = talker.context.engine, []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: (asked.append(request), submit(request))[1])
    voice, other = data_url(clip(0.6)), data_url(clip(0.9))
    processor = talker.context.catalog.models[0].speech_processor
    length = {None: None, voice: 4, other: 6}
    for fields, reference, prompt in (
        ({}, None, None),
        ({"ref_audio": voice}, voice, None),
        ({"prompt_audio": other, "prompt_text": "A tone. "}, None, other),
        ({"ref_audio": voice, "ref_text": "A tone. "}, voice, voice),
        ({"ref_audio": voice, "prompt_audio": other, "prompt_text": "A tone. "}, voice, other),
    ):
        asked.clear()
        answer = speak(http, **fields)
        assert answer.status_code == 200, answer.text
        request = next(request for request in asked if isinstance(request, SpeechRequest))
        patches = [None if part is None else len(part) for part in (request.reference, request.prompt)]
        assert patches == [length[reference], length[prompt]]
        together = tuple(processor.tokenize("A tone. Hello there."))
        assert request.transcript_ids == (together if prompt else ())


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": ""}, "input", ""),
    ({"input": "  \n "}, "input", ""),
    ({"input": "..."}, "input", ""),
    ({"input": "\U0001f600"}, "input", ""),
    ({"input": "Hello <|audio_start|>"}, "input", "special token"),
    ({"input": "x" * 2001}, "input", "2000"),
    ({"input": None}, "input", "required"),
    ({"input": ["Hello"]}, "input", ""),
    ({"response_format": "ogg"}, "response_format", "aac, alaw, flac, mp3, opus, pcm, ulaw, wav"),
    ({"speed": 5}, "speed", ""),
    ({"speed": "fast"}, "speed", ""),
    ({"sample_rate": 12345}, "sample_rate", "48000"),
    ({"response_format": "opus", "sample_rate": 44100}, "sample_rate", "48000"),
    ({"stream_format": "raw"}, "stream_format", "audio or sse"),
    ({"split_granularity": "word"}, "split_granularity", "clause, none, sentence"),
    ({"stream_format": "sse", "stream": False}, "stream", ""),
    ({"inference_timesteps": 7}, "inference_timesteps", "4, 6, 10, 16"),
    ({"inference_timesteps": 0}, "inference_timesteps", "4, 6, 10, 16"),
    ({"inference_timesteps": 5000}, "inference_timesteps", "4, 6, 10, 16"),
    ({"cfg_value": -1}, "cfg_value", ""),
    ({"seed": 2**64}, "seed", ""),
    ({"max_len": 0}, "max_len", ""),
    ({"min_len": 9, "max_len": 8}, "min_len", "at most max_len, 8"),
    ({"min_len": 9, "max_len": None, "max_new_tokens": 8}, "min_len", "at most max_len, 8"),
    ({"instructions": "x" * 5000}, "instructions", ""),
    ({"instructions": "<|audio_start|>"}, "instructions", "special token"),
    ({"instructions": "x y " * 1000}, "instructions", "the model has 1024"),
    ({"instructions": "Z" * 980, "input": "Z" * 59}, "input", "input: text and audio take"),
    ({"ref_text": "What it says."}, "ref_text", "ref_audio"),
    ({"ref_audio": "nonsense"}, "ref_audio", ""),
    ({"ref_audio": "data:audio/wav;base64,AAAA"}, "ref_audio", ""),
    ({"ref_audio": "https://example.org/a.wav"}, "ref_audio", ""),
    ({"ref_audio": data_url(clip(61))}, "ref_audio", "60"),
    ({"ref_audio": data_url(clip()), "ref_text": "A tone.", "instructions": "Calm"}, "instructions", ""),
    ({"ref_audio": data_url(clip()), "ref_text": "<|audio_start|>"}, "ref_text", "special token"),
    ({"prompt_audio": data_url(clip())}, "prompt_text", "required"),
    ({"prompt_text": "A tone."}, "prompt_audio", "required"),
    ({"prompt_audio": data_url(clip()), "prompt_text": "<|audio_start|>"}, "prompt_text", "special token"),
    ({"prompt_audio": "data:audio/wav;base64,AAAA", "prompt_text": "A tone."}, "prompt_audio", ""),
    ({"prompt_audio": data_url(clip()), "prompt_text": "A tone.", "instructions": "Calm"}, "instructions", ""),
    (
        {"prompt_audio": data_url(clip()), "prompt_text": "A.", "ref_audio": data_url(clip()), "ref_text": "A."},
        "ref_text",
        "prompt_audio",
    ),
]


@pytest.mark.parametrize("fields, param, says", BAD, ids=[f"{case[1]} {index}" for index, case in enumerate(BAD)])
def test_what_does_not_fit_is_named(http: httpx.Client, fields: dict[str, Any], param: str, says: str) -> None:
    answer = speak(http, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and says in error["message"]
    assert len(answer.content) < 1000


def test_a_long_text_is_not_held_in_memory_whole(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.api.speech.route.MAX_WHOLE_CHARS", 5)
    refused = speak(http, stream=False)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    assert speak(http).status_code == 200


def test_the_voices_that_the_openai_client_knows(http: httpx.Client, reference: np.ndarray) -> None:
    names = next(typing.get_args(part) for part in typing.get_args(Voice) if typing.get_origin(part) is typing.Literal)
    assert "alloy" in names
    for name in names:
        assert speak(http, voice=name, max_len=1).status_code == 200, name
    for name in ("", "Default"):
        np.testing.assert_allclose(pcm(speak(http, voice=name, response_format="pcm").content), reference, atol=3e-4)


def test_a_description_is_one_line(http: httpx.Client) -> None:
    one, lines = (
        speak(http, instructions=text, response_format="pcm")
        for text in ("An old (man), calm", "An  old man,\n\tcalm\n")
    )
    assert one.status_code == 200 and one.content == lines.content


def test_unknown_models_and_voices(http: httpx.Client) -> None:
    assert speak(http, model="nobody").status_code == 404
    answer = speak(http, voice="nobody")
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "voice"
    assert speak(http, model=None, voice=None).status_code == 200


def test_a_crowd_gets_the_audio_that_each_gets_alone(http: httpx.Client) -> None:
    # With seeds whose values no rounding of the quantiser splits: with seed 5 one lies so near a tie that the order of
    # a sum decides.
    wanted = [
        {"input": f"Sentence number {i}.", "seed": 10 + i, "response_format": "pcm", "max_len": 2 + i % 3}
        for i in range(10)
    ]
    alone = [speak(http, **fields).content for fields in wanted]
    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(lambda fields: speak(http, **fields).content, wanted))
    for one, other in zip(alone, together, strict=True):
        assert len(one) == len(other)
        np.testing.assert_allclose(pcm(one), pcm(other), atol=3e-4)


def in_flight(http: httpx.Client) -> int:
    lines = http.get("/metrics").text.splitlines()
    running = next(line for line in lines if line.startswith("reprise_slots_used"))
    return int(float(running.split()[-1]))


def long_request() -> bytes:
    """About a minute in segments of 2.4 s."""
    text = "This sentence is spoken again and again and again. " * 30
    fields = {"input": text, "response_format": "pcm", "stream_format": "sse", "max_len": 15, "min_len": 15}
    body = json.dumps(fields).encode()
    return b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def test_a_client_that_leaves_ends_its_stream(talker: RunningServer, http: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", int(talker.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(long_request())
        assert connection.recv(200).startswith(b"HTTP/1.1 200")
    wait_until_free(talker, http)


def wait_until_free(talker: RunningServer, http: httpx.Client) -> None:
    wait(lambda: in_flight(http) == 0 and talker.context.engine.in_flight == 0, what="no stream is left")


def set_write_timeout(talker: RunningServer, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    settings = talker.context.settings.model_copy(update={"write_timeout": seconds})
    monkeypatch.setattr(talker.context, "settings", settings)


@contextmanager
def slow_client(talker: RunningServer) -> Iterator[socket.socket]:
    """Has read the beginning of a long stream; few bytes lie between it and the server."""
    # Accepted connections take their buffers' sizes from the listening socket.
    talker.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(talker.url.rsplit(":", 1)[1])))
        connection.sendall(long_request())
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        yield connection


def test_a_client_that_stops_reading_is_paused_until_it_reads(
    talker: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, pauses = talker.context.engine, []
    send = engine.send
    monkeypatch.setattr(engine, "send", lambda command: (pauses.append(command), send(command)))
    # A pause comes when a second of audio waits: a machine that speaks slower than a listener hears must have made it
    # before the client is dropped.
    set_write_timeout(talker, monkeypatch, 600.0)
    with slow_client(talker) as connection:
        wait(lambda: bool(pauses), what="the stream is paused")
        for _ in range(2):  # it goes on, and nothing comes of it but heartbeats
            wait(lambda seen=engine.state: engine.state is not seen, what="a heartbeat")
        assert [command.paused for command in pauses] == [True]
        connection.settimeout(GENEROUS)
        while len(pauses) < 2:
            assert connection.recv(1 << 16)
        assert not pauses[1].paused
    wait_until_free(talker, http)


def test_a_client_that_does_not_read_is_dropped(
    talker: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timeouts() -> float:
        lines = http.get("/metrics").text.splitlines()
        counts = [line for line in lines if line.startswith("reprise_requests_total{") and 'outcome="timeout"' in line]
        return sum(float(line.split()[-1]) for line in counts)

    before = timeouts()
    set_write_timeout(talker, monkeypatch, 0.5)
    with slow_client(talker):
        wait(lambda: timeouts() == before + 1, what="the client is dropped")
        wait_until_free(talker, http)
    assert talker.context.admission.in_flight == 0


def test_metrics_of_speech(http: httpx.Client) -> None:
    speak(http)
    speak(http, response_format="wav")
    text = http.get("/metrics").text
    for name in (
        "time_to_first_audio_seconds_count",
        "audio_realtime_factor_count",
        "audio_chunk_gap_seconds_count",
        "audio_underrun_seconds_count",
        "audio_streams_total",
        "audio_generated_seconds_total",
        "audio_slack_seconds_count",
        "step_prediction_ratio_count",
        "bucket_occupancy_ratio_count",
        "step_duration_seconds_count",
        "speech_characters_total",
        "audio_encode_duration_seconds_count",
    ):
        values = [line for line in text.splitlines() if line.startswith(f"reprise_{name}")]
        # Labels split a metric: on a slow machine every stream may have run dry, or none.
        assert sum(float(value.split()[-1]) for value in values) > 0, name
