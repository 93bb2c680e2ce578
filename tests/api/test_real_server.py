"""The server as the README starts it, with the models of the package, driven by the openai client over loopback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from benchmarks.servers.footprint import children
from models.checkpoints.registry import family_of, resolve
from service.hub import EMBEDDED
from tests.media.samples import data_url, video
from tests.support.processes import ROOT, ServerProcess, served
from tests.support.victims import speech
from tests.support.waiting import GENEROUS, wait

MODEL = "reprise/qwen2_vl"
PICTURE = ROOT / "docs/images/shapes.png"
TIMEOUT = 2 * GENEROUS
GREEDY = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[ServerProcess]:
    with served("--max-frames", "16", TMPDIR=str(home), HOME=str(home)) as running:
        yield running


def picture_part() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(PICTURE.read_bytes())}}


def video_part() -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(video(frames=8, rate=4), "video/mp4")}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def ask(client: OpenAI, *parts: dict[str, Any], **fields: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": list(parts)}], **{**GREEDY, **fields}
    )


def test_the_models_say_what_they_are(client: OpenAI) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert set(cards) == {MODEL, "reprise/qwen3_asr", "reprise/voxcpm2"}
    assert "knows drawn shapes" in cards[MODEL].notice  # type: ignore[attr-defined]
    assert "demonstration voice" in cards["reprise/voxcpm2"].notice  # type: ignore[attr-defined]
    assert "demonstration recogniser" in cards["reprise/qwen3_asr"].notice  # type: ignore[attr-defined]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_picture_a_video_and_both(client: OpenAI) -> None:
    seen = ask(client, picture_part(), text_part("What is this?"))
    assert seen.choices[0].finish_reason == "length" and seen.usage.completion_tokens == 12
    picture_tokens = seen.usage.prompt_tokens_details.image_tokens
    assert picture_tokens > 0
    watched = ask(client, video_part(), text_part("What happens?"))
    video_tokens = watched.usage.prompt_tokens_details.video_tokens
    assert video_tokens > 0
    both = ask(client, picture_part(), video_part(), picture_part(), text_part("And now?"))
    details = both.usage.prompt_tokens_details
    assert (details.image_tokens, details.video_tokens) == (2 * picture_tokens, video_tokens)


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    whole = ask(client, picture_part(), text_part("Say it."), logprobs=True, top_logprobs=3)
    chunks = list(ask(client, picture_part(), text_part("Say it."), stream=True, logprobs=True, top_logprobs=3))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    entries = whole.choices[0].logprobs.content
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries] and len(entries) == 12
    for entry in entries:  # greedy: the most likely token is the one that was taken
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
        assert entry.logprob == pytest.approx(max(top.logprob for top in entry.top_logprobs), abs=1e-4)


def test_the_same_prompt_again_hits_the_prefix(client: OpenAI) -> None:
    words = " ".join(f"word{n}" for n in range(60))
    first = ask(client, picture_part(), text_part(words))
    again = ask(client, picture_part(), text_part(words))
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    salted = [ask(client, picture_part(), text_part(words), extra_body={"cache_salt": salt}) for salt in "aba"]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in salted]
    assert cached == [0, 0, again.usage.prompt_tokens_details.cached_tokens]


@pytest.mark.slow
def test_values_end_in_json_though_digits_are_biased(client: OpenAI) -> None:
    tokenize = resolve(family_of(EMBEDDED / "qwen2_vl").processor)(EMBEDDED / "qwen2_vl").tokenize
    for part, digit in (
        ({"type": "number"}, "0"),
        ({"type": "number", "minimum": 0}, "7"),
        ({"type": "integer"}, "7"),
        ({"format": "date-time"}, "0"),
        ({"format": "duration"}, "1"),
        ({"format": "time"}, ""),
    ):
        schema = {"type": "object", "properties": {"x": {"type": "string"} | part}, "required": ["x"]}
        bias = {str(token): 100 for token in tokenize(digit)}
        fields = {"logit_bias": bias, "max_tokens": 200, "extra_body": {"structured_outputs": {"json": schema}}}
        answer = ask(client, text_part("Go on."), **fields).choices[0]
        assert answer.finish_reason == "stop", (part, answer)


@pytest.mark.slow
def test_the_metrics_are_clean_and_tell_the_story(server: ServerProcess, client: OpenAI) -> None:
    ask(client, picture_part(), text_part("Count me."))
    text = httpx.get(f"{server.url}/metrics").text
    of_model = f'model="{MODEL}"'
    for start in (
        f'requests_total{{endpoint="chat",{of_model},outcome="ok",status="200"}}',
        *(f"{name}_seconds_count{{{of_model}}}" for name in ("time_to_first_token", "inter_token_duration")),
        *(f"{name}_duration_seconds_count{{{of_model}}}" for name in ("queue", "prefill")),
        f'vision_encode_duration_seconds_count{{{of_model},route="replay"}}',
        f'steps_total{{kind="decode",{of_model},reason="captured",route="replay"}}',
        f'bucket_occupancy_ratio_count{{kind="decode",{of_model}}}',
        f"kv_cache_usage_ratio{{{of_model}}}",
        'media_decode_duration_seconds_count{kind="image"}',
    ):
        assert f"reprise_{start}" in text, start
    assert "KeyError" not in "".join(server.log)
    if shutil.which("promtool"):
        names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE reprise_")}
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        complaints = [line for line in checked.stderr.splitlines() if line.split(" ")[0] in names]
        assert complaints == []


def test_every_line_of_the_log_is_json(server: ServerProcess) -> None:
    """From the first one, which comes before anything is loaded."""
    messages = [json.loads(line)["message"] for line in list(server.log)]
    assert messages[0].endswith(": locating")


def test_prompts_are_not_logged(server: ServerProcess, client: OpenAI) -> None:
    answer = ask(client, text_part("a very private question"))

    def lines() -> list[str]:
        return [line for line in [*server.log] if "reprise.access" in line and answer._request_id in line]

    wait(lambda: bool(lines()), what="the request's line in the log")
    assert "private" not in "".join(server.log)
    line = json.loads(lines()[0])
    assert line["model"] == MODEL and line["outcome"] == "ok" and line["tokens"] == 12


@pytest.mark.slow
def test_the_api_process_needs_no_torch() -> None:
    script = "import sys, service.processes.server, service.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def test_it_speaks_and_ends_without_a_trace(server: ServerProcess, home: Path) -> None:
    family, links = children(server.process.pid), list(home.glob("reprise-*"))
    assert links and all(link.stat().st_mode & 0o777 == 0o700 for link in links)
    spoken = httpx.post(f"{server.url}/v1/audio/speech", json=speech(model="reprise/voxcpm2"), timeout=TIMEOUT)
    assert spoken.status_code == 200
    assert server.stop() == 0
    assert family and not any(Path(f"/proc/{child}").exists() for child in family)
    assert not list(home.glob("reprise-*"))
