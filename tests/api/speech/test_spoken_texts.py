"""What an engine gets to speak of a text, and what comes back: numbers, captions, pauses, files, truncation."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import av
import av.filter
import httpx
import lameenc
import msgspec
import numpy as np
import pytest
import soundfile
from websockets.sync.client import connect

from models.interfaces.errors import InputError
from models.interfaces.media import MediaItem, PlaceholderRange, Prompt
from service.api.speech import live_text
from service.api.speech.hearing import word_errors
from service.api.speech.request import RETRIES
from service.api.spoken_text.normaliser import TextNormaliser
from service.hub import Checkpoint
from service.hub.catalog import OPENAI_PCM_RATE, Catalog, HostedModel
from service.link.messages import SpeechDelta
from service.media.audio_formats import FORMATS
from service.processes.server import create_server
from service.settings.reading import SettingsError
from service.settings.settings import load_settings
from tests.support.fake_engine import MUTE, PATCH, RATE, FakeEngine, Speech
from tests.support.fake_hearing import POSITIONS, TAG, FakeAligner, FakeHearing
from tests.support.fake_talker import talking_catalog
from tests.support.refusals import assert_refused
from tests.support.rows import rows
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, wait

NUMBERS = "It cost $3.50 on 2026-11-22, at 3:30 pm. Dr. Lee was 1st."
WORDS = (
    "It cost three dollars and fifty cents on November twenty-second twenty twenty-six, at three thirty PM. "
    "Doctor Lee was first."
)
TEXT = "[pause:250ms]In 1999. [pause:1.5s] It cost **$5**.\n\nSee nginx!  [pause:0.1s]"
SPOKEN = ["In nineteen ninety-nine.", "It cost five dollars.", "See engine x!"]
PAUSES = [0.25, 1.5, 0.0, 0.1]
SEGMENT = PATCH / RATE
STARTS = [0.25, 1.75 + SEGMENT, 1.75 + 2 * SEGMENT]
END = sum(PAUSES) + 3 * SEGMENT

Event = dict[str, Any]


def speak(server: RunningServer, text: str = TEXT, **fields: Any) -> httpx.Response:
    body = {"input": text, "response_format": "pcm", "split_granularity": "sentence", **fields}
    return httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=GENEROUS)


def events_of(answer: httpx.Response) -> list[Event]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def audio_of(events: list[Event]) -> bytes:
    return b"".join(base64.b64decode(event["audio"]) for event in events if "audio" in event)


def captioned(server: RunningServer, text: str = TEXT, **fields: Any) -> tuple[np.ndarray, list[Event], Event]:
    """int16 samples, the segments, which come behind their audio, and the last event."""
    asked = {"timestamp_granularities": ["segment"], **fields}
    events = events_of(speak(server, text, stream_format="sse", **asked))
    segments = [event for event in events if event["type"] == "speech.audio.segment"]
    for segment in segments if fields.get("speed", 1.0) == 1.0 else ():
        assert len(audio_of(events[: events.index(segment)])) >= 2 * round(segment["end"] * RATE)
    return np.frombuffer(audio_of(events), "<i2"), segments, events[-1]


def written(server: RunningServer, *chunks: str, **config: Any) -> list[Any]:
    """What a session of the WebSocket answers to one text; bytes as they are."""
    received: list[Any] = []
    with connect(server.url.replace("http", "ws") + "/v1/audio/speech/stream", max_size=None) as socket:
        socket.send(json.dumps({"type": "session.config", "response_format": "pcm", **config}))
        for chunk in chunks:
            socket.send(json.dumps({"type": "input.text", "text": chunk}))
        socket.send(json.dumps({"type": "input.done"}))
        while not received or isinstance(received[-1], bytes) or received[-1]["type"] != "session.done":
            message = socket.recv(GENEROUS)
            received.append(message if isinstance(message, bytes) else json.loads(message))
    return received


def of_type(received: list[Any], kind: str) -> list[Event]:
    return [message for message in received if isinstance(message, dict) and message["type"] == kind]


def sounds(received: list[Any]) -> list[np.ndarray]:
    """The samples of each audio.start."""
    found: list[bytearray] = []
    for message in received:
        if isinstance(message, bytes):
            found[-1] += message
        elif message["type"] == "audio.start":
            found.append(bytearray())
    return [np.frombuffer(bytes(data), "<i2") for data in found]


def answered(server: RunningServer, text: str, **audio: Any) -> Event:
    """The audio of a chat model's answer, which is its question."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "modalities": ["text", "audio"]}
    body["audio"] = {"voice": "alloy", "format": "wav", **audio}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=GENEROUS).raise_for_status()
    spoken: Event = answer.json()["choices"][0]["message"]["audio"]
    return spoken


def spoken(talker: FakeEngine) -> list[str]:
    """Segments of the last request."""
    return talker.texts[talker.requests[-1].request_id]


def test_numbers_are_spoken_as_words(talking: RunningServer, talker: FakeEngine) -> None:
    """Of a request, of a text that is being written, and of an answer, which is written as it was."""
    for normalize, words in ((None, WORDS), (False, NUMBERS)):
        for fields in ({"stream": False}, {"stream_format": "sse"}, {"split_granularity": "clause"}):
            assert speak(talking, NUMBERS, normalize=normalize, **fields).status_code == 200
            assert " ".join(spoken(talker)) == words
        written(talking, *NUMBERS, normalize=normalize)
        assert " ".join(spoken(talker)) == words
        assert answered(talking, NUMBERS, normalize=normalize, voice="default")["transcript"] == NUMBERS
        assert " ".join(spoken(talker)) == words


def test_what_the_model_cannot_speak_is_named(talking: RunningServer) -> None:
    assert unquote(speak(talking, "Hello 世界, 世.").headers["x-unspoken-text"]) == "世界"
    assert '"unspoken":"世界"' in speak(talking, "Hello 世界", stream_format="sse").text
    plain = speak(talking, "Hello", stream_format="sse")
    assert "x-unspoken-text" not in plain.headers and "unspoken" not in plain.text


def test_a_segment_that_the_model_cannot_speak_is_left_out_and_named(
    talking: RunningServer, talker: FakeEngine
) -> None:
    text = "(A whisper)世! Hello. [pause:1s]界! There."
    assert unquote(speak(talking, text).headers["x-unspoken-text"]) == "世界"
    assert spoken(talker) == ["(A whisper)Hello.", "(A whisper)There."]
    assert answered(talking, text)["unspoken"] == "世界" == answered(talking, "世界.")["unspoken"]
    assert [error["param"] for error in of_type(written(talking, text), "error")] == ["text"]
    for nothing in ({"text": "世界!"}, {"text": "(A whisper)世."}, {"text": "世", "instructions": "A man"}):
        assert speak(talking, **nothing).json()["error"]["param"] == "input"


def test_segments_are_told_to_the_sample(talking: RunningServer, talker: FakeEngine) -> None:
    audio, segments, done = captioned(talking)
    assert spoken(talker) == SPOKEN and [segment["text"] for segment in segments] == SPOKEN
    assert [segment["index"] for segment in segments] == [0, 1, 2]
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


def test_words_share_the_time_of_their_segment(talking: RunningServer) -> None:
    _, segments, _ = captioned(talking, timestamp_granularities=["word"])
    for segment, text in zip(segments, SPOKEN, strict=True):
        words = segment["words"]
        assert [word["word"] for word in words] == text.split()
        assert words[0]["start"] == pytest.approx(segment["start"], abs=0.001)
        assert words[-1]["end"] == pytest.approx(segment["end"], abs=0.001)
        times = [time for word in words for time in (word["start"], word["end"])]
        assert times == sorted(times) and all(word["estimated"] is True for word in words)


@pytest.mark.parametrize("fields", [{"speed": 2.0}, {"speed": 0.5, "sample_rate": 16_000}])
def test_times_are_those_of_the_audio_that_is_heard(
    talking: RunningServer, talker: FakeEngine, fields: dict[str, Any]
) -> None:
    """A pause is as long as it says at every speed; the segments are as long as they are spoken."""
    audio, segments, _ = captioned(talking, **fields)
    segment = SEGMENT / fields["speed"]
    starts = [0.25, 1.75 + segment, 1.75 + 2 * segment]
    assert [part["start"] for part in segments] == pytest.approx(starts, abs=1 / RATE)
    assert [part["end"] - part["start"] for part in segments] == pytest.approx([segment] * 3, abs=1 / RATE)
    # Changing the tempo keeps the length to within its windows.
    assert len(audio) / fields.get("sample_rate", RATE) == pytest.approx(sum(PAUSES) + 3 * segment, abs=0.1)
    assert talker.requests[-1].speed == fields["speed"], "the engine knows how fast is listened"


def test_a_long_pause_comes_in_pieces(talking: RunningServer) -> None:
    """However long it is, a client that does not read it holds little of the server's memory."""
    events = events_of(speak(talking, "Hm. " + "[pause:10s]" * 12 + " Well.", stream_format="sse"))
    sizes = [len(base64.b64decode(event["audio"])) for event in events if event["type"] == "speech.audio.delta"]
    assert sum(sizes) == 2 * (120 * RATE + 2 * PATCH)
    assert max(sizes) <= 2 * RATE


def test_ssml_is_spoken(talking: RunningServer, talker: FakeEngine) -> None:
    text = '<speak>The <sub alias="World Health Organization">WHO</sub>.<break time="400ms"/>B2 &lt; nginx</speak>'
    audio, segments, _ = captioned(talking, text)
    assert spoken(talker) == ["The World Health Organization.", "B2 less than engine x"]
    assert [segment["text"] for segment in segments] == spoken(talker)
    assert len(audio) == 2 * PATCH + round(0.4 * RATE)


def test_the_lexicon_of_a_request_is_before_that_of_the_server(talking: RunningServer, talker: FakeEngine) -> None:
    speak(talking, "nginx GIFs GIF gif.", lexicon={"nginx": "n g i n x", "gif": "graphics"})
    assert spoken(talker) == ["n g i n x GIFs graphics graphics."]
    speak(talking, "nginx GIF gif.", lexicon={})
    assert spoken(talker) == ["engine x jif gif."]
    written(talking, *"We use nginx, b c and 3 GIFs.", lexicon={"b c": "d"})
    assert " ".join(spoken(talker)) == "We use engine x, d and three GIFs."


def test_what_the_engine_gets_of_a_request(talking: RunningServer, talker: FakeEngine) -> None:
    """Solver steps of the server or of the request; it may retry unless a length was asked for."""
    for fields, steps, retries in (
        ({}, 12, RETRIES),
        ({"inference_timesteps": 5, "stream": False}, 5, RETRIES),
        ({"max_len": 3}, 12, 0),
        ({"max_len": 3, "stream": False}, 12, 0),
    ):
        speak(talking, "One. Two.", **fields).raise_for_status()
        assert (talker.requests[-1].solver_steps, talker.requests[-1].retries) == (steps, retries)


def test_what_does_not_fit_is_named(talking: RunningServer) -> None:
    assert_refused(f"{talking.url}/v1/audio/speech", "spoken_texts", input="One.", response_format="pcm")


def test_a_server_does_not_start_with_a_lexicon_that_does_not_fit(tmp_path: Path) -> None:
    settings = load_settings({"lexicon": tmp_path / "nowhere.yaml", "voices_dir": tmp_path})
    with pytest.raises(SettingsError, match=r"lexicon: .+ cannot be read"):
        create_server(settings, talking_catalog())


@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_has_the_bytes_of_the_whole_file(talking: RunningServer, name: str) -> None:
    """But for what only the end tells: the header of a wav or flac, and the random serial number of an Ogg stream."""
    streamed = speak(talking, response_format=name)
    whole = speak(talking, response_format=name, stream=False)
    assert "content-length" in whole.headers and "content-length" not in streamed.headers
    assert streamed.headers["content-type"] == whole.headers["content-type"]
    if name in ("wav", "flac"):
        assert (len(streamed.content), streamed.content[44:]) == (len(whole.content), whole.content[44:])
        assert streamed.content[:44] != whole.content[:44], "bytes that were sent cannot be changed"
        assert soundfile.info(io.BytesIO(whole.content)).frames == round(END * RATE)
    elif name == "opus":
        assert len(streamed.content) == len(whole.content)
    else:
        assert streamed.content == whole.content


def test_rates_of_the_formats(talking: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients made for OpenAI play pcm at 24 kHz; they do not read the headers."""
    monkeypatch.setattr(talking.context, "pcm_rate", OPENAI_PCM_RATE)
    for fields, rate, bits in rows(__file__, "rates.jsonl"):
        answer = speak(talking, **fields)
        headers = answer.headers
        assert (headers["x-sample-rate"], headers["x-bits-per-sample"]) == (str(rate), str(bits)), fields
        if fields["response_format"] in ("pcm", "ulaw", "alaw"):
            assert headers["content-type"].endswith(f";rate={rate};channels=1")
            assert abs(len(answer.content) * 8 // bits - END * rate) < 100


def test_the_event_loop_neither_sets_up_encoders_nor_reads_long_texts(
    talking: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FFmpeg's libraries take half a second to import, sixty thousand characters seconds to read."""
    threads: list[str] = []

    def note(holder: Any, name: str) -> None:
        make = getattr(holder, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name)
            return make(*arguments, **options)

        monkeypatch.setattr(holder, name, noted)

    for holder, name in ((av, "open"), (lameenc, "Encoder"), (av.filter, "Graph")):
        note(holder, name)
    for name in ("flac", "mp3", "opus", "aac", "wav"):
        speak(talking, "One. Two.", response_format=name, sample_rate=24_000).raise_for_status()
    assert len(threads) == 5 + 4  # a resampler each, and an encoder for all but wav
    assert all(name.startswith("encode") for name in threads)
    note(TextNormaliser, "feed")
    monkeypatch.setattr(live_text, "SMALL_TEXT", 0)
    threads.clear()
    written(talking, "It is 6 o'clock now. ")
    assert (threads[0] == "server", threads[-1]) == (False, "server"), "but for the end, which has no text"


def test_a_segment_that_ended_at_its_cap_is_counted_and_said(talking: RunningServer, talker: FakeEngine) -> None:
    for runaways, reason in ((0, "stop"), (1, "length")):
        before = talking.metric("speech_truncated_total")
        talker.runaways = runaways
        last = events_of(speak(talking, "One. Two.", stream_format="sse"))[-1]
        assert (last["type"], last["finish_reason"]) == ("speech.audio.done", reason)
        talker.runaways = runaways
        events = written(talking, "This is the first one. And this is the next.")
        said = [done["finish_reason"] for done in of_type(events, "audio.done")]
        assert said == [reason, "stop"] and events[-1]["finish_reason"] == reason
        assert talking.metric("speech_truncated_total") - before == 2 * runaways


def test_speech_that_fails_in_its_middle_is_not_taken_for_complete(talking: RunningServer) -> None:
    events = events_of(speak(talking, f"One. Two {MUTE}.", stream_format="sse"))
    assert len(audio_of(events)) == 2 * PATCH
    assert events[-1]["error"]["message"] == "the voice failed."
    with pytest.raises(httpx.RemoteProtocolError):
        speak(talking, f"One. Two {MUTE}.")


# Texts that are still being written, and answers


def test_a_pause_is_silence_in_front_of_the_next_segment(talking: RunningServer) -> None:
    received = written(talking, *TEXT, split_granularity="sentence")
    starts = of_type(received, "audio.start")
    assert [start["sentence_text"] for start in starts] == [*SPOKEN, ""], "the silence behind the last has no text"
    audio = sounds(received)
    for samples, pause in zip(audio[:3], PAUSES, strict=False):
        silent = round(pause * RATE)
        assert len(samples) == silent + PATCH
        assert not samples[:silent].any() and samples[silent:].all()
    assert len(audio[3]) == round(PAUSES[3] * RATE) and not audio[3].any()
    assert [done["total_bytes"] for done in of_type(received, "audio.done")] == [2 * len(samples) for samples in audio]
    assert received[-1] == {"type": "session.done", "total_sentences": 4, "finish_reason": "stop"}


def test_what_does_not_fit_is_named_and_the_rest_spoken(talking: RunningServer) -> None:
    received = written(talking, "One.[pause:20s] Two. ", "Three.", split_granularity="sentence")
    assert "at most 10 s" in of_type(received, "error")[0]["message"]
    assert [start["sentence_text"] for start in of_type(received, "audio.start")] == ["One.", "Two.", "Three."]
    received = written(talking, "<speak>One.<break/>", "Two.<voice/> Three.</speak>")
    assert "<voice> is not supported" in of_type(received, "error")[0]["message"]
    assert of_type(received, "audio.start")[0]["sentence_text"] == "One."
    assert received[-1]["type"] == "session.done"


def test_numbers_cannot_make_a_text_endlessly_long(
    talking: RunningServer, talker: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 400
    limited = talking.context.settings.model_copy(update={"max_speech_chars": most})
    monkeypatch.setattr(talking.context, "settings", limited)
    assert answered(talking, "777777777777777. " * 20)["finish_reason"] == "length"
    received = written(talking, *["777777777777777. "] * 20)
    (error, *_) = of_type(received, "error")
    assert error["param"] == "text" and f"more than {2 * most} characters" in error["message"]
    said = sum(len(start["sentence_text"]) for start in of_type(received, "audio.start"))
    assert 0 < said <= 2 * most and received[-1]["type"] == "session.done"
    wait(lambda: talker.idle, what="the engine has nothing to do")


def test_an_answer_has_its_pauses_and_its_lexicon(talking: RunningServer, talker: FakeEngine) -> None:
    text = "Hello nginx, dear. [pause:1.5s](so) Bye! [pause:500ms]"
    audio = answered(talking, text)
    assert "[pause:1.5s](so)" in audio["transcript"], "it is what the model wrote"
    said = spoken(talker)
    assert "pause" not in " ".join(said) and "engine x" in " ".join(said)
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(audio["data"])), dtype="int16")
    assert len(samples) == len(said) * PATCH + 2 * rate
    assert int((samples == 0).sum()) == 2 * rate
    assert "unspoken" not in audio
    assert answered(talking, "Hello 世界, 世 5.")["unspoken"] == "世界"
    data = base64.b64decode(answered(talking, "One.", format="flac", sample_rate=24_000)["data"])
    assert soundfile.info(io.BytesIO(data)).frames == PATCH // 2, "a whole file says how long it is"


# Models that hear the voice


@dataclass
class SlowTalker(FakeEngine):
    """Takes three seconds for a segment; each request is softer than the one before."""

    def _speak(self, speech: Speech) -> SpeechDelta | None:
        delta = super()._speak(speech)
        return delta and msgspec.structs.replace(delta, audio=np.tile(delta.audio / len(self.requests), 30))


class Scripted(FakeHearing):
    """Hears what `script` says, one entry for each segment."""

    def __init__(self) -> None:
        super().__init__()
        self.script: list[str] = []
        self.heard: list[np.ndarray] = []

    def prompt(self, item: MediaItem, **_: object) -> Prompt:
        self.heard.append(item.arrays["samples"])
        said = self.script.pop(0)
        named = b"" if said.startswith("!") else b"language English"
        ids = np.array([*named, TAG, *said.encode(), *[257] * POSITIONS][not named :], np.int32)
        run = PlaceholderRange(0, len(ids) - POSITIONS, POSITIONS)
        return Prompt(ids, np.arange(len(ids), dtype=np.int32)[None], len(ids), (item,), (run,))


class LatinAligner(FakeAligner):
    def words(self, text: str, language: str | None = None) -> list[str]:
        if "Γ" in text:
            raise InputError("language", "Greek cannot be aligned")
        return super().words(text, language)


@dataclass
class Heard:
    talker: SlowTalker
    ears: Scripted
    server: RunningServer

    def verified(self, *script: str, text: str, **fields: Any) -> httpx.Response:
        self.talker.requests.clear()
        self.ears.script[:], self.ears.heard[:] = script, []
        answer = speak(self.server, text, stream=False, verify=True, **fields)
        assert answer.status_code == 200 and not self.ears.script, answer.text
        return answer


@pytest.fixture(scope="module")
def heard() -> Iterator[Heard]:
    talker, ears, nowhere = SlowTalker(), Scripted(), Checkpoint("ears", Path("/nowhere"))
    hearing = [
        HostedModel(("ears",), "chat", nowhere, lambda: ears, 1, family_task="transcription"),
        HostedModel(("aligner",), "chat", nowhere, LatinAligner, 1, family_task="alignment"),
    ]
    catalog = Catalog([*talking_catalog().models, *hearing])
    with running_server(catalog, engine=talker.serve, fixed_voices="off") as server:
        yield Heard(talker, ears, server)


ALOUD = "One two three, four five six. One two three four five six!"
SIX = "One, two, three, four, five, six."


@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_words_have_the_times_of_an_aligner(heard: Heard, speed: float) -> None:
    """Where it cannot tell, they are estimated."""
    text = "[pause:1s](a calm voice)It's twenty-six – 你好! Γειά σου. Ends now."
    asked: dict[str, Any] = {"timestamp_granularities": ["word"], "speed": speed, "split_granularity": "sentence"}
    _, segments, _ = captioned(heard.server, text, **asked)
    assert [segment["index"] for segment in segments] == [0, 1, 2]
    first, greek, last = (segment["words"] for segment in segments)
    start = segments[0]["start"]
    times = [[round((one[at] - start) * speed, 2) for at in ("start", "end")] for one in first]
    assert [one["word"] for one in first] == ["It's", "twenty-six", "–", "你", "好!"]
    assert times == [[0.0, 0.25], [0.5, 0.75], [0.75, 0.75], [1.0, 1.25], [1.5, 1.75]]
    assert [one["estimated"] for one in (*first, *greek, *last)] == [False] * 5 + [True] * 2 + [False] * 2
    assert last[0]["start"] == segments[2]["start"] and last[1]["end"] <= segments[2]["end"]


def test_what_is_heard_of_speech_is_told(heard: Heard) -> None:
    """A given seed is spoken once; of the three seconds of a segment, "One, two." takes one."""
    for script, fields, told in (
        (
            ["1, 2, 3, 4, 5, 6", SIX],
            {"text": f"[pause:1s]{ALOUD}"},
            "passed; deletions=0; insertions=0; substitutions=0",
        ),
        ([""], {"text": SIX, "seed": 5}, "failed; deletions=6; insertions=0; substitutions=0"),
        (["One, two."], {"text": "One, two.", "seed": 5}, "failed; deletions=0; insertions=1; substitutions=0"),
        (["!fail"], {"text": SIX}, "unavailable; deletions=0; insertions=0; substitutions=0"),
    ):
        answer = heard.verified(*script, **fields)
        assert answer.headers["x-verification"] == f"{told}; attempts=1"
        (request,) = heard.talker.requests
        assert request.seed == fields.get("seed", request.seed)
        # Three seconds of each segment, and the pause, which nobody hears.
        assert np.frombuffer(answer.content, "<i2").size == (3 * len(script) + ("pause" in fields["text"])) * RATE
        assert [len(samples) for samples in heard.ears.heard] == [48_000] * len(script)


def test_the_attempt_with_the_fewest_errors_is_sent(heard: Heard) -> None:
    script = [SIX, "One two three four.", SIX, "One two three four five six six.", "Noise.", SIX, "", SIX]
    before = heard.server.metric("speech_verifications_total")
    answer = heard.verified(*script, text=ALOUD)
    assert answer.headers["x-verification"] == "failed; deletions=0; insertions=1; substitutions=0; attempts=4"
    assert np.frombuffer(answer.content, "<i2")[0] == round(0.25 / 2 * 32767), "of the second request"
    requests = heard.talker.requests
    assert len({one.seed for one in requests}) == len({one.request_id for one in requests}) == 4
    again = heard.verified("One three four five six.", SIX, SIX, SIX, text=ALOUD)
    assert (
        again.headers["x-verification"] == "passed; deletions=0; insertions=0; substitutions=0; attempts=2"
        and len(heard.talker.requests) == 2
    )
    assert heard.server.metric("speech_verifications_total") - before == 6
    assert heard.server.metric('speech_verifications_total{model="talker",outcome="passed"}') >= 1


def test_verification_is_refused_where_it_cannot_be(heard: Heard, talking: RunningServer) -> None:
    for server, fields, problem in (
        (heard.server, {}, "requires stream: false"),
        (talking, {"stream": False}, "no speech recogniser"),
    ):
        error = speak(server, SIX, verify=True, **fields).json()["error"]
        assert error["param"] == "verify" and problem in error["message"]
    assert "x-verification" not in speak(heard.server, SIX, stream=False).headers


def test_word_errors() -> None:
    for text, transcript, errors in rows(__file__, "word_errors.jsonl"):
        found = word_errors(text, transcript)
        assert [found[kind] for kind in ("deletions", "insertions", "substitutions")] == errors, text
        assert found["failed"] == (errors[:2] != [0, 0] or errors[2] == 3), text
