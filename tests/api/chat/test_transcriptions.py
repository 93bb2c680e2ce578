"""POST /v1/audio/transcriptions over a fake engine, asked by OpenAI's client; audio in chats."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError, OpenAI, omit
from openai.types.audio import TranscriptionVerbose

from models.interfaces.processor import AlignedWord
from models.qwen3_asr.aligner import split_words
from service.api.chat.transcriptions import sentences
from service.media.messages import MIB
from tests.media.samples import sound, tone
from tests.models.families.family import RECOGNISER
from tests.support import miniature
from tests.support.fake_hearing import hearing_catalog
from tests.support.golden import GOLDEN
from tests.support.openai_chat import openai_client
from tests.support.refusals import cases as refused_cases
from tests.support.servers import RunningServer, running_server

SHORT = sound(tone(440, 16_000), 16_000, "WAV")
LONG = sound(np.tile(tone(440, 8_000), 65), 8_000, "WAV")
SILENCE = sound(np.zeros(16_000, np.float32), 16_000, "WAV")
LONG_TEXT = "25.00 s. 25.00 s. 15.00 s."
"""Of pieces of 30 seconds, each cut at the first of the quietest places."""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(hearing_catalog(), max_body="8M") as running:
        yield running


def hear(client: OpenAI, audio: bytes = SHORT, **fields: Any) -> Any:
    return client.audio.transcriptions.create(**{"model": "ears", "file": ("speech.wav", audio), **fields})


def test_transcripts_are_those_of_the_published_code() -> None:
    """Hints, a given language, silence: token by token, in streams and in one piece. Words of random texts have times,
    too, and so have those of a voice, whose noise fails its verification."""
    models = tuple(map(str, (RECOGNISER.directory, GOLDEN / "qwen3_asr_aligner", miniature.talker())))
    flags = {"model": models, "device": "cpu", "kv_cache_tokens": 4096, "fixed_voices": "off"}
    with openai_client(flags) as asking:
        asked = [(name, prompt) for name, prompt in RECOGNISER.inputs["prompts"].items() if not prompt["continue_text"]]
        for stream, (name, prompt) in [*product([False], asked), *product([True], asked[:2])]:
            spec, language = RECOGNISER.inputs["audio"][prompt["audio"]], prompt["language"] or omit
            audio = (RECOGNISER.directory / spec["file"]).read_bytes()
            fields = {"prompt": prompt["context"], "language": language, "include": ["logprobs"], "stream": stream}
            heard = hear(asking, audio, model="whisper-1", **fields)
            heard = [*heard][-1] if stream else heard
            ids = RECOGNISER.of(name, "generated_ids").tolist()
            said = b"".join(bytes(map(int, token.bytes)) for token in heard.logprobs[: len(ids)])
            assert said == RECOGNISER.processor.detokenize(ids), name
            assert heard.usage.input_tokens == len(RECOGNISER.of(name, "input_ids"))
            assert heard.usage.input_token_details.audio_tokens == spec["tokens"]
        times = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
        told = hear(asking, audio, model="whisper-1", language="en", **times)
        assert [one.word for one in told.words] == [*split_words(told.text)]
        ends = [time for one in told.words for time in (one.start, one.end)]
        assert ends == sorted(ends) and len(set(ends)) > 1
        ask = asking.audio.speech.with_raw_response.create
        speech: Any = {"model": "tts-1", "voice": "alloy", "input": "One two three.", "response_format": "wav"}
        whole = {"stream": False, "verify": True, "seed": 1, "max_len": 8}
        assert ask(**speech, extra_body=whole).headers["x-verification"].startswith("failed; deletions=")
        events = ask(**speech, stream_format="sse", extra_body={"timestamp_granularities": ["word"], "max_len": 8}).text
        (caption,) = (
            json.loads(one[6:]) for one in events.splitlines() if one.startswith('data: {"type":"speech.audio.seg')
        )
        words = [(one["word"], one["estimated"]) for one in caption["words"]]
        assert words == [("One", False), ("two", False), ("three.", False)]


def test_every_format(client: OpenAI) -> None:
    heard = hear(client)
    assert (heard.text, [one.code for one in heard.languages], heard.logprobs) == ("1.00 s.", ["en"], None)
    logprobs = hear(client, include=["logprobs"]).logprobs
    assert [(one.token, one.logprob) for one in logprobs if one.token] == [(each, -0.5) for each in "1.00 s."]
    usage = heard.usage
    assert (usage.type, usage.input_token_details.audio_tokens) == ("tokens", 4)
    assert usage.input_tokens == usage.input_token_details.text_tokens + 4 == usage.total_tokens - usage.output_tokens
    assert hear(client, response_format="text") == "1.00 s.\n"
    assert hear(client, response_format="srt") == "1\n00:00:00,000 --> 00:00:01,000\n1.00 s.\n\n"
    assert hear(client, response_format="vtt") == "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\n1.00 s.\n\n"
    told = hear(client, response_format="verbose_json", timestamp_granularities=["segment"])
    assert isinstance(told, TranscriptionVerbose) and told.usage is not None and told.segments is not None
    assert (told.language, told.duration, told.text, told.usage.seconds) == ("english", 1.0, "1.00 s.", 1.0)
    (segment,) = told.segments
    assert (segment.id, segment.seek, segment.start, segment.end, segment.text) == (0, 0, 0.0, 1.0, "1.00 s.")
    assert (bytes(segment.tokens), segment.avg_logprob, segment.no_speech_prob) == (b"1.00 s.", -0.5, 0.0)


def test_a_long_recording_is_cut_into_pieces(client: OpenAI) -> None:
    assert hear(client, LONG).text == "65.00 s."
    assert hear(client, LONG, chunking_strategy="auto").text == LONG_TEXT
    told = hear(client, LONG, response_format="verbose_json")
    assert [(one.start, one.end, one.seek) for one in told.segments] == [(0, 25, 0), (25, 50, 2500), (50, 65, 5000)]
    assert hear(client, LONG, response_format="srt").count(" --> ") == 3
    with pytest.raises(BadRequestError, match="at most 3600 seconds") as refused:
        hear(client, sound(np.zeros(4_000 * 3_601, np.int16), 4_000, "FLAC"))
    assert refused.value.param == "file"


def test_hints_reach_the_model(client: OpenAI) -> None:
    assert hear(client, prompt="Anna", extra_body={"keywords": ["Ohm", "Volt"]}).text == "Anna\nOhm, Volt: 1.00 s."
    for fields in ({"language": "de"}, {"language": "German"}, {"extra_body": {"languages": ["de-AT"]}}):
        assert [one.code for one in hear(client, **fields).languages] == ["de"]
    assert hear(client, language="de", response_format="verbose_json").language == "german"
    assert [one.code for one in hear(client, extra_body={"languages": ["de", "en"]}).languages] == ["en"]


def test_silence_is_an_empty_transcript(client: OpenAI) -> None:
    heard = hear(client, SILENCE)
    assert (heard.text, heard.languages) == ("", [])
    assert hear(client, SILENCE, response_format="vtt") == "WEBVTT\n\n"
    told = hear(client, SILENCE, response_format="verbose_json")
    assert (told.language, told.text, told.segments, told.duration) == ("", "", [], 1.0)
    assert [one.type for one in hear(client, SILENCE, stream=True)] == ["transcript.text.done"]


@pytest.mark.parametrize("named", [{}, {"language": "en"}], ids=str)
def test_a_stream_has_the_pieces_in_their_order(client: OpenAI, named: dict[str, str]) -> None:
    *deltas, done = hear(client, LONG, stream=True, chunking_strategy="auto", include=["logprobs"], **named)
    assert {one.type for one in deltas} == {"transcript.text.delta"} and done.type == "transcript.text.done"
    assert "".join(one.delta for one in deltas) == done.text == LONG_TEXT
    assert len(deltas) > 3 and not any("language" in one.delta or "<" in one.delta for one in deltas)
    # White space between pieces is of the server; each token is sent once.
    for tokens in (done.logprobs, [token for one in deltas for token in one.logprobs]):
        assert "".join(one.token for one in tokens) == LONG_TEXT.replace(" 25", "25").replace(" 15", "15")
    assert done.usage.input_token_details.audio_tokens == 12


def test_forms_may_be_written_by_hand(server: RunningServer) -> None:
    """As with curl: OpenAI's names of models and names without brackets, fields that nothing reads, a file without a
    name."""
    data = {"include": "logprobs", "languages": ["de"], "stream": "false", "temperature": "0.5", "x": "y"}
    for model in ("ears", "whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe-2025-12-15"):
        form = {**data, "model": model}
        answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data=form, files={"file": SHORT})
        assert answer.status_code == 200 and answer.json()["text"] == "1.00 s." and answer.json()["logprobs"]


def test_what_does_not_fit_is_named(client: OpenAI) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"file": ("speech.wav", b"RIFF of nothing")}, "file", "not"),
        ({"file": ("speech.wav", SHORT[:24])}, "file", "truncated"),
        ({"file": ("speech.wav", sound(tone(440, 16_000, 0.005), 16_000, "WAV"))}, "file", "too short"),
        *((case["body"], case["param"], case["says"]) for case in refused_cases("transcriptions")),
    ]
    for fields, param, message in cases:
        with pytest.raises(BadRequestError) as refused:
            hear(client, **fields)
        assert refused.value.param == param and message in str(refused.value), fields


def test_limits_and_errors_of_forms(server: RunningServer, client: OpenAI) -> None:
    url = f"{server.url}/v1/audio/transcriptions"
    assert httpx.post(url, data={"model": "ears"}, files={"file": bytes(9 * MIB)}).status_code == 413
    for data, files, param in (
        ({}, {"file": SHORT}, "model"),
        ({"model": "ears"}, {"sound": SHORT}, "sound"),
        ({"model": "ears", "file": "speech.wav"}, {"file": b""}, "file"),
    ):
        refused = httpx.post(url, data=data, files=files)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    with pytest.raises(BadRequestError, match="have a chat model translate"):
        client.audio.translations.create(model="ears", file=("a.wav", SHORT))
    with pytest.raises(BadRequestError, match="/v1/audio/transcriptions"):
        client.embeddings.create(model="ears", input="x")
    server.wait_idle()


def test_cards_and_metrics(server: RunningServer, client: OpenAI) -> None:
    hear(client)
    cards = {card["id"]: card for card in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert cards["ears"]["kind"] == "transcription"
    assert cards["ears"]["architecture"] == {"input_modalities": ["audio", "text"], "output_modalities": ["text"]}
    page = httpx.get(f"{server.url}/metrics").text
    assert 'endpoint="transcriptions",model="ears",outcome="ok"' in page
    assert 'reprise_audio_heard_seconds_total{model="ears"}' in page
    assert 'reprise_prompt_tokens_total{kind="audio",model="ears"}' in page
    assert 'reprise_media_rejections_total{kind="audio",reason="refused"}' in page


def test_words_have_times_where_an_aligner_is_hosted() -> None:
    hints = {"prompt": "Good day. Ann"}  # which the fake model says before the seconds
    with (
        running_server(hearing_catalog(aligns=True)) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        told = hear(client, LONG, response_format="verbose_json", timestamp_granularities=["word"], **hints)
        words = [(one.word, one.start, one.end) for one in told.words]
        assert words[:6] == [
            *(("Good", 0.0, 0.25), ("day", 0.5, 0.75), ("Ann", 1.0, 1.25), ("2500", 1.5, 1.75), ("s", 2.0, 2.25)),
            ("Good", 25.0, 25.25),
        ]
        assert len(words) == 15 and len(told.segments) == 3
        assert hear(client, response_format="verbose_json").words is None
        first, second, *_ = hear(client, response_format="srt", **hints).split("\n\n")
        assert first == "1\n00:00:00,000 --> 00:00:00,750\nGood day."
        assert second == "2\n00:00:01,000 --> 00:00:02,250\nAnn: 1.00 s."
        with pytest.raises(BadRequestError, match="German cannot be aligned"):
            hear(client, language="de", response_format="verbose_json", timestamp_granularities=["word"])
        german = hear(client, language="de", response_format="srt")
        assert german == "1\n00:00:00,000 --> 00:00:01,000\n1.00 s.\n\n"
        with pytest.raises(BadRequestError, match="this is an alignment model"):
            hear(client, model="aligner")
        server.wait_idle()


def test_sentences_are_cut_where_they_last_too_long() -> None:
    text = 'He said: "3.5-metre, no?" Then  nothing 好。吗'
    spoken = ("He", "said", "35metre", "no", "Then", "nothing", "好", "吗")
    words = [AlignedWord(word, 4.0 * index, 4.0 * index + 1) for index, word in enumerate(spoken)]
    assert sentences(text, words) == [
        *((0.0, 9.0, 'He said: "3.5-metre,'), (12.0, 13.0, 'no?"'), (16.0, 25.0, "Then  nothing 好。")),
        (28.0, 29.0, "吗"),
    ]
    assert sentences("?!", []) == []


def audio_part(data: bytes = SHORT, **fields: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}, **fields}


def test_audio_in_chats(client: OpenAI) -> None:
    def ask(*parts: Any, model: str = "ears") -> Any:
        return client.chat.completions.create(model=model, messages=[{"role": "user", "content": [*parts]}])

    heard = ask(audio_part())
    (choice,) = heard.choices
    assert (choice.message.content, choice.message.reasoning_content) == ("1.00 s.", "English")
    assert heard.usage.prompt_tokens_details.audio_tokens == 4
    with pytest.raises(BadRequestError, match="this model takes no audio") as refused:
        ask(audio_part(), model="tiny")
    field = "messages[0].content[0].input_audio"
    assert (refused.value.param, refused.value.code) == (f"{field}.data", "unsupported_parameter")
    for part, param in (
        (audio_part(b"RIFF"), f"{field}.data"),
        ({"type": "input_audio"}, field),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "W V"}}, f"{field}.format"),
    ):
        with pytest.raises(BadRequestError) as refused:
            ask(part)
        assert refused.value.param == param
    with pytest.raises(BadRequestError, match="at most 4"):
        ask(*[audio_part()] * 5)
