"""The server as the README starts it, with the models of the package, driven by the openai client over loopback."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import pytest
from openai import APIError, AsyncOpenAI, OpenAI

from benchmarks.servers.footprint import engine_pid
from models.checkpoints.registry import family_of, resolve
from service.hub import EMBEDDED
from tests.media.samples import video
from tests.support.endless import ENDLESS_TOKENS, FLAGS, endless_checkpoint
from tests.support.processes import ROOT, ServerProcess, served, stand_still
from tests.support.waiting import GENEROUS, POLL, wait

MODEL = "reprise/qwen2_vl"
PICTURE = ROOT / "docs/images/shapes.png"
PATIENCE = 2 * GENEROUS
GREEDY = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(embedded_server: ServerProcess) -> ServerProcess:
    return embedded_server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def picture_part(path: Path = PICTURE) -> dict[str, Any]:
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def video_part(frames: int = 8, rate: int = 4) -> dict[str, Any]:
    data = base64.b64encode(video(frames=frames, rate=rate)).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def ask(client: OpenAI, *parts: dict[str, Any], **fields: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": list(parts)}], **{**GREEDY, **fields}
    )


def test_the_models_say_what_they_are(client: OpenAI) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert set(cards) == {MODEL, "reprise/voxcpm2"}
    assert "knows drawn shapes" in cards[MODEL].notice  # type: ignore[attr-defined]
    assert "demonstration voice" in cards["reprise/voxcpm2"].notice  # type: ignore[attr-defined]
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


def test_the_usage_of_several_choices_counts_what_the_first_had_to_compute(client: OpenAI) -> None:
    """The others find its blocks, but the prompt, which is counted once, was not in the cache."""
    words = " ".join(f"new{n}" for n in range(60))
    answer = ask(client, text_part(words), n=3)
    assert answer.usage.prompt_tokens_details.cached_tokens < 48 < answer.usage.prompt_tokens // 2
    again = ask(client, text_part(words), n=3)
    assert again.usage.prompt_tokens_details.cached_tokens > answer.usage.prompt_tokens // 2


def test_seeds_decide(client: OpenAI) -> None:
    def sample(seed: int, **fields: Any) -> list[str]:
        free = {"temperature": 2.0, "top_p": 1.0, "extra_body": {"ignore_eos": True, "top_k": -1}}
        # Long enough to go beyond the answer, of which the model is sure.
        answer = ask(client, text_part("Anything."), seed=seed, max_tokens=48, **free, **fields)
        return [choice.message.content for choice in answer.choices]

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)
    three = sample(7, n=3)
    assert len(set(three)) == 3 and three[0] == sample(7)[0] and three == sample(7, n=3)


def test_a_stop_string_ends_the_answer(client: OpenAI) -> None:
    whole = ask(client, text_part("Go on."), max_tokens=24).choices[0].message.content
    stop = whole[len(whole) // 2 :][:3]
    answer = ask(client, text_part("Go on."), max_tokens=24, stop=[stop]).choices[0]
    assert answer.message.content == whole[: whole.find(stop)] and answer.finish_reason == "stop"


def test_logit_bias_forces_a_token(client: OpenAI) -> None:
    answer = ask(client, text_part("Now."), logit_bias={"42": 100}, logprobs=True, max_tokens=4)
    assert len({entry.token for entry in answer.choices[0].logprobs.content}) == 1


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
        fields = {"logit_bias": bias, "max_tokens": 200, "extra_body": {"guided_json": schema}}
        answer = ask(client, text_part("Go on."), **fields).choices[0]
        assert answer.finish_reason == "stop", (part, answer)


async def test_answers_in_a_batch_are_the_answers_alone(server: ServerProcess) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:

        async def one(index: int) -> str:
            parts = [picture_part(), text_part(f"Question {index}?")] if index % 2 else [text_part(f"Tell {index}.")]
            answer = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": parts}], **GREEDY
            )
            return str(answer.choices[0].message.content)

        together = await asyncio.gather(*map(one, range(6)))
        assert [await one(index) for index in range(6)] == together


async def test_a_client_that_leaves_frees_its_place(server: ServerProcess) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line:
                    break
        async with asyncio.timeout(GENEROUS):
            while f'reprise_requests_running{{model="{MODEL}"}} 0.0' not in (await http.get("/metrics")).text:
                await asyncio.sleep(POLL)


def test_one_bad_request_disturbs_no_other(server: ServerProcess, client: OpenAI) -> None:
    results: list[str] = []
    other = threading.Thread(
        target=lambda: results.append(ask(client, text_part("Calm."), max_tokens=40).choices[0].message.content)
    )
    expected = ask(client, text_part("Calm."), max_tokens=40).choices[0].message.content
    other.start()
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400}}
    thin = picture_part()
    for bad in (broken, {**thin, "image_url": {"url": thin["image_url"]["url"][:-600]}}):
        with pytest.raises(APIError) as failure:
            ask(client, bad)
        assert failure.value.status_code == 400  # type: ignore[attr-defined]
    with pytest.raises(APIError, match="context"):
        ask(client, text_part("long " * 20_000))
    other.join(PATIENCE)
    assert results == [expected]


def test_the_metrics_are_clean_and_tell_the_story(server: ServerProcess, client: OpenAI) -> None:
    ask(client, picture_part(), text_part("Count me."))
    text = httpx.get(f"{server.url}/metrics").text
    for start in (
        f'reprise_requests_total{{endpoint="chat",model="{MODEL}",outcome="ok",status="200"}}',
        f'reprise_time_to_first_token_seconds_count{{model="{MODEL}"}}',
        f'reprise_inter_token_duration_seconds_count{{model="{MODEL}"}}',
        f'reprise_queue_duration_seconds_count{{model="{MODEL}"}}',
        f'reprise_prefill_duration_seconds_count{{model="{MODEL}"}}',
        f'reprise_vision_encode_duration_seconds_count{{model="{MODEL}",route="replay"}}',
        f'reprise_steps_total{{kind="decode",model="{MODEL}",reason="captured",route="replay"}}',
        f'reprise_bucket_occupancy_ratio_count{{kind="decode",model="{MODEL}"}}',
        f'reprise_kv_cache_usage_ratio{{model="{MODEL}"}}',
        'reprise_media_decode_duration_seconds_count{kind="image"}',
    ):
        assert start in text, start
    assert "is not in SPECS" not in "".join(server.log)
    if shutil.which("promtool"):
        names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE reprise_")}
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        complaints = [line for line in checked.stderr.splitlines() if line.split(" ")[0] in names]
        assert complaints == []


def test_prompts_are_not_logged(server: ServerProcess, client: OpenAI) -> None:
    answer = ask(client, text_part("a very private question"))

    def lines() -> list[str]:
        return [line for line in [*server.log] if "reprise.access" in line and answer._request_id in line]

    wait(lambda: bool(lines()), what="the request's line in the log")
    assert "private" not in "".join(server.log)
    line = json.loads(lines()[0])
    assert line["model"] == MODEL and line["outcome"] == "ok" and line["tokens"] == 12


def test_the_api_process_needs_no_torch() -> None:
    script = "import sys, service.processes.server, service.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def test_the_command_line_asks(server: ServerProcess, tmp_path: Path) -> None:
    def video_tokens() -> float:
        text = httpx.get(f"{server.url}/metrics").text
        found = re.search(rf'reprise_prompt_tokens_total{{kind="video",model="{MODEL}"}} (.*)', text)
        return float(found[1]) if found else 0.0

    clip = tmp_path / "clip.mp4"
    clip.write_bytes(video())
    before = video_tokens()
    command = [sys.executable, "-m", "service.cli", "ask", str(PICTURE), str(clip), "What?", "--url", server.url]
    done = subprocess.run([*command, "--max-tokens", "4"], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert video_tokens() > before
    listed = subprocess.run(
        [sys.executable, "-m", "service.cli", "models", "--url", server.url],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE,
    )
    assert MODEL in listed.stdout


@pytest.mark.slow
def test_the_command_line_speaks(server: ServerProcess, tmp_path: Path) -> None:
    def say(file: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "service.cli", "say", "Hello.", "-o", str(file), "--url", server.url]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)

    for name, kind in (("a.wav", "WAV"), ("b.MP3", "MP3"), ("d.opus", "OGG")):
        command = [
            sys.executable,
            "-m",
            "service.cli",
            "say",
            "Hello.",
            "-o",
            str(tmp_path / name),
            "--url",
            server.url,
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        stored = av.open(str(tmp_path / name))
        assert stored.format.name == kind.lower() and sum(frame.samples for frame in stored.decode(audio=0)) > 7000
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert file.getnframes() * 2 == (tmp_path / "a.wav").stat().st_size - 44
    refused = say(tmp_path / "a.txt")
    assert refused.returncode == 2 and ".txt names no audio format" in refused.stderr
    assert not (tmp_path / "a.txt").exists()


def test_sigterm_drains(tmp_path: Path) -> None:
    """Readiness turns red first, what outlasts the drain hears of it, nothing is left over. The engine stands still
    while connections are accepted: an endless answer takes all of a processor."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    quick = ("--decode-buckets", "1", "--encoder-buckets", "256", "--max-running", "2", *FLAGS)
    drain = ("--drain-delay", "6", "--drain-timeout", "1", "--hang-timeout", "600")
    model = str(endless_checkpoint(tmp_path))
    with served("--model", model, *quick, *drain, TMPDIR=str(temporary), HOME=str(tmp_path)) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        children = _children(server.process.pid)
        failures: list[Exception] = []

        def endless() -> None:
            try:
                for _ in client.chat.completions.create(
                    model="qwen2_vl",
                    messages=[{"role": "user", "content": "x"}],
                    max_tokens=ENDLESS_TOKENS,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ):
                    started.set()
            except APIError as error:
                failures.append(error)

        started = threading.Event()
        stream = threading.Thread(target=endless)
        stream.start()
        assert started.wait(GENEROUS)
        engine = engine_pid(server.process.pid)
        stand_still(engine)
        server.process.send_signal(signal.SIGTERM)
        wait(lambda: httpx.get(f"{server.url}/ready").status_code == 503, what="readiness turns red")
        assert httpx.get(f"{server.url}/health").status_code == 200
        refused = httpx.post(f"{server.url}/v1/chat/completions", json={"model": "qwen2_vl", "messages": []})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        wait(lambda: not _accepts(server.url), what="connections are no longer accepted")
        os.kill(engine, signal.SIGCONT)
        assert server.process.wait(GENEROUS) == 0
        stream.join(GENEROUS)
        assert len(failures) == 1 and "shutting down" in str(failures[0])
        assert children and not any(Path(f"/proc/{child}").exists() for child in children)
        assert not list(temporary.glob("reprise-*"))


def _accepts(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        return connection.connect_ex((host, int(port))) == 0


def _children(pid: int) -> list[int]:
    return [int(child) for task in os.listdir(f"/proc/{pid}/task") for child in _task_children(pid, task)]


def _task_children(pid: int, task: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    except OSError:
        return []  # the thread has ended


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests/golden/qwen2_vl", tmp_path / "broken")
    (tmp_path / "broken/model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    command = [sys.executable, "-m", "service.cli", "serve", "--port", "0", "--model", str(tmp_path / "broken")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "broken" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "insecure-no-auth"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (["--max-n", "1000"], "max_n"),
                (["--model", "/nowhere/at/all"], "neither a directory nor a hub id"),
                (["--config", "/nowhere.yaml"], "nowhere.yaml"),
                (["--host", "192.0.2.1", "--insecure-no-auth"], "cannot be bound"),
            )
        ),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "service.cli", "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr


def test_print_config_masks_secrets() -> None:
    command = [sys.executable, "-m", "service.cli", "serve", "--print-config", "--api-key", "very-secret"]
    environ = {**os.environ, "REPRISE_MAX_N": "3", "REPRISE_TYPO": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE, env=environ)
    assert done.returncode == 0 and "max_n: 3" in done.stdout and "very-secret" not in done.stdout
    assert "REPRISE_TYPO" in done.stderr


@pytest.mark.slow
def test_the_doctor_and_the_version() -> None:
    for command, expected in (("doctor", "embedded models: "), ("version", "")):
        done = subprocess.run(
            [sys.executable, "-m", "service.cli", command],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=PATIENCE,
        )
        assert done.returncode == 0 and expected in done.stdout, done.stdout
