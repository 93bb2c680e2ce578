"""`reprise bench` against the real server, and what its clients send."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.servers.footprint import children
from service.api.chat.schema import ChatRequestBody, Message
from service.api.speech.schema import SpeechRequestBody
from service.cli.bench import command
from service.cli.bench import run as bench_run
from service.cli.bench.run import BenchError, Clients, cached_prompts, run_load, run_together, summary
from service.cli.bench.spec import Assignment, ChatLoad, Record, SpeechLoad
from service.cli.bench.traffic import PATCH_SECONDS, payload, questions
from service.cli.bench.words import WORDS
from service.cli.main import app
from service.cli.numbers import counted
from tests.support.processes import ROOT, ServerProcess
from tests.support.waiting import GENEROUS

SMALL = ["--requests", "4", "--warmup", "1"]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "400"})


def test_a_terminals_ctrl_c_is_the_commands_alone() -> None:
    """A client that it reached, too, would tell of it with a traceback."""
    with bench_run._Client() as client:
        assert os.getpgid(client._process.pid) != os.getpgid(0)


@pytest.mark.parametrize(
    "load",
    [
        ChatLoad("http://x", "m", 4, 0, images=2, width=56, height=28),
        ChatLoad("http://x", "m", 4, 0, images=0, text_words=4, system_tokens=20, turns=3),
        ChatLoad("http://x", "m", 4, 0, images=0, system_message=False),
        ChatLoad("http://x", "m", 4, 0, images=0, temperature=1.0, json_schema='{"type": "integer"}'),
        SpeechLoad("http://x", "m", 4, 0, seconds=0.64, solver_steps=4),
    ],
)
def test_every_field_of_a_body_is_one_of_the_api(load: Any) -> None:
    """An unknown field is ignored by the server: a misspelt one would measure something else."""
    kind = ChatRequestBody if isinstance(load, ChatLoad) else SpeechRequestBody
    body = payload(load, np.random.default_rng(0))
    parsed = msgspec.convert(body, kind)
    assert set(body) <= set(kind.__struct_fields__)
    for name, value in body.items():
        assert msgspec.to_builtins(getattr(parsed, name)) == value or isinstance(value, dict | list)
    if isinstance(parsed, ChatRequestBody):
        assert all(set(message) <= set(Message.__struct_fields__) for message in body["messages"])
        assert parsed.stream_options is not None and parsed.stream_options.include_usage


def test_of_several_voices_one_is_drawn_for_each_request() -> None:
    rng, load = np.random.default_rng(0), SpeechLoad("http://x", "m", 1, 0, voices=("alloy", "nova", "tom"))
    assert {payload(load, rng)["voice"] for _ in range(50)} == {"alloy", "nova", "tom"}
    assert payload(SpeechLoad("http://x", "m", 1, 0), rng)["voice"] == "default"


def test_a_fixed_length_of_speech_is_asked_for_in_patches() -> None:
    body = payload(SpeechLoad("http://x", "m", 1, 0, seconds=10.08), np.random.default_rng(0))
    assert body["min_len"] == body["max_len"] == round(10.08 / PATCH_SECONDS) == 63


def test_chat_in_a_closed_loop(embedded_server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    small = ["--width", "56", "--height", "56", "--text", "8", "--tokens", "5", "--concurrency", "2"]
    done = invoke("chat", "--url", embedded_server.url, *SMALL, *small, "--processes", "2", "--json", str(file))
    assert done.exit_code == 0, done.output
    assert "time to first token (ms)" in done.output and "reprise/qwen2_vl" in done.output
    result = json.loads(file.read_text())
    assert (result["requests"], result["succeeded"], len(result["records"])) == (4, 4, 4)
    assert result["load"]["api_key"] is None
    for record in result["records"]:
        assert record["tokens"] == 5 and 0 < record["first"] < record["duration"] and record["status"] == 200
        assert record["cached_tokens"] == 0
    assert result["first"]["p10"] <= result["first"]["p50"] <= result["first"]["p99"] <= result["first"]["max"]


def test_a_second_run_sends_new_contents_unless_it_has_the_seed_of_the_first(
    embedded_server: ServerProcess, tmp_path: Path
) -> None:
    """The server's prefix cache holds the prompts of the first run."""
    file = tmp_path / "chat.json"
    small = ["--images", "0", "--text", "600", "--tokens", "1", "--concurrency", "1", "--json", str(file)]

    def again(*flags: str) -> tuple[int, int, str]:
        done = invoke("chat", "--url", embedded_server.url, *SMALL, *small, *flags)
        assert done.exit_code == 0, done.output
        result = json.loads(file.read_text())
        assert f"seed {result['load']['seed']}" in done.output
        return result["load"]["seed"], result["cached_tokens"], done.output

    first, second = again(), again()
    assert first[0] != second[0] and first[1] == second[1] == 0 and "in its cache" not in first[2] + second[2]
    seed, cached, said = again("--seed", str(second[0]))
    assert seed == second[0] and cached > 0 and "The server had 4 prompts of this run in its cache" in said


def test_what_all_prompts_share_is_no_sign_of_an_earlier_run() -> None:
    load = ChatLoad("http://x", "m", 1, 0)
    shared = msgspec.structs.replace(load, system_tokens=100)

    def record(cached: int, turn: int = 1) -> Record:
        return Record(start=0.0, status=200, cached_tokens=cached, turn=turn)

    assert cached_prompts(load, [record(0), record(48), record(500, turn=2)]) == 0
    assert cached_prompts(load, [record(0), record(112), record(500)]) == 2
    assert cached_prompts(shared, [record(112)]) == 0 and cached_prompts(shared, [record(2000)]) == 1


def test_the_bar_has_room_for_its_count_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    terminal = Console(file=written, width=60, force_terminal=True, color_system=None)
    monkeypatch.setattr(command, "Console", lambda **options: terminal)
    with command._progress(ChatLoad("http://x", "a-model/with-a-long-name-of-its-own", 1000, 0, concurrency=4)):
        pass
    assert "0/1000 0:00:00" in written.getvalue()


def test_no_number_is_cut_on_a_narrow_terminal() -> None:
    times = dict.fromkeys(("mean", "p50", "p95", "p99", "max"), 1.2345)
    result = {"requests": 2, "succeeded": 2, "requests_per_second": 2.1}
    written = io.StringIO()
    results = command.results_table(
        ChatLoad("http://x", "model", 2, 0), result | dict.fromkeys(("first", "gap", "duration"), times), []
    )
    Console(file=written, width=40).print(results)
    assert "…" not in written.getvalue() and max(map(len, written.getvalue().splitlines())) <= 40


def test_sigterm_ends_a_load_and_its_clients_quietly(tmp_path: Path) -> None:
    """As `timeout 3 reprise bench chat` does."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        arguments = ["bench", "chat", "--model", "m", "--images", "0", "--warmup", "0", "--url", url]
        run = subprocess.Popen(
            [sys.executable, "-m", "service.cli", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4):
            silent.accept()  # the load has begun
        run.terminate()
        _, said = run.communicate(timeout=GENEROUS)
    assert run.returncode == 128 + signal.SIGTERM
    assert "32 requests, 4 at a time" in said and len(said.splitlines()) == 1


def test_a_client_whose_parent_was_killed_says_nothing() -> None:
    assignment = Assignment(SpeechLoad("http://127.0.0.1:9", "m", 1, 0, concurrency=1), 0, 1, 1)
    client = subprocess.Popen(bench_run.CLIENT, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=-1)
    assert client.stdin is not None and client.stdout is not None and client.stderr is not None
    client.stdout.close()
    client.stdin.write(msgspec.json.encode(assignment) + b"\n")
    client.stdin.flush()
    assert client.wait(GENEROUS) == 1 and client.stderr.read() == b""
    client.stdin.close()
    client.stderr.close()


def test_one_of_a_thing_is_no_plural() -> None:
    assert [counted(number, "request") for number in (0, 1, 2)] == ["0 requests", "1 request", "2 requests"]


def test_answers_that_follow_a_schema(embedded_server: ServerProcess, tmp_path: Path) -> None:
    schema, file = tmp_path / "schema.json", tmp_path / "chat.json"
    schema.write_text('{"type": "array", "items": {"type": "boolean"}, "minItems": 9}')
    small = ["--images", "0", "--words", "4", "--tokens", "6", "--concurrency", "2", "--json", str(file)]
    done = invoke("chat", "--url", embedded_server.url, *SMALL, *small, "--json-schema", str(schema))
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert result["succeeded"] == 4 and json.loads(result["load"]["json_schema"])["minItems"] == 9
    assert all(record["tokens"] == 6 for record in result["records"])


def test_a_shared_system_prompt_is_the_same_for_all_and_everything_else_is_new() -> None:
    load = ChatLoad("http://x", "m", 4, 0, images=0, text_words=6, system_tokens=40, turns=3)
    rng = np.random.default_rng(0)
    bodies = [payload(load, rng)["messages"] for _ in range(3)]
    systems = {messages[0]["content"] for messages in bodies}
    assert len(systems) == 1 and len(systems.pop().split()) == 40
    asked = [messages[1]["content"][-1]["text"] for messages in bodies] + questions(load, rng)
    assert len(asked) == 5 == len(set(asked)) and all(set(text.split()) <= set(WORDS) for text in asked)


def test_no_system_message_leaves_the_templates_own() -> None:
    load = ChatLoad("http://x", "m", 4, 0, images=0, system_message=False)
    assert [message["role"] for message in payload(load, np.random.default_rng(0))["messages"]] == ["user"]


def test_conversations_arrive_and_each_turn_has_all_that_was_said_before(
    embedded_server: ServerProcess, tmp_path: Path
) -> None:
    file = tmp_path / "chat.json"
    small = ["--width", "56", "--height", "56", "--words", "4", "--tokens", "4", "--rate", "20", "--requests", "3"]
    turns = ["--turns", "3", "--system-tokens", "30", "--warmup", "0", "--json", str(file)]
    done = invoke("chat", "--url", embedded_server.url, *small, *turns)
    assert done.exit_code == 0, done.output
    assert "3 conversations of 3 turns, 20 a second" in done.output and "later turns (ms)" in done.output
    result = json.loads(file.read_text())
    assert (result["requests"], result["succeeded"]) == (9, 9)
    assert set(result["first_by_turn"]) == {"1", "2", "3"} and result["first_later"]["p50"] > 0
    prompts = {turn: [r["prompt_tokens"] for r in result["records"] if r["turn"] == turn] for turn in (1, 2, 3)}
    assert [len(found) for found in prompts.values()] == [3, 3, 3]
    assert max(prompts[1]) < min(prompts[2]) and max(prompts[2]) < min(prompts[3])
    later = [record for record in result["records"] if record["turn"] > 1]
    assert all(record["cached_tokens"] > 0 and record["delay"] == 0 for record in later)


def test_a_conversation_ends_with_the_first_answer_that_fails(embedded_server: ServerProcess) -> None:
    load = ChatLoad(embedded_server.url, "nobody", 2, 0, concurrency=1, warmup=0, images=0, turns=3)
    assert [(record.turn, record.error) for record in run_load(load)] == [(1, "refused"), (1, "refused")]


def test_speech_in_an_open_loop(embedded_server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "speech.json"
    small = ["--rate", "4", "--seconds", "0.64", "--steps", "4", "--words", "3"]
    done = invoke("speech", "--url", embedded_server.url, *SMALL, *small, "--json", str(file))
    assert done.exit_code == 0, done.output
    assert "time to first audio (ms)" in done.output and "underruns" in done.output
    result = json.loads(file.read_text())
    assert result["succeeded"] == 4 and result["delay"]["max"] >= 0
    assert [record["audio"] for record in result["records"]] == pytest.approx([0.64] * 4)


def test_every_record_is_reported_as_it_comes(embedded_server: ServerProcess) -> None:
    seen: list[Record] = []
    load = SpeechLoad(
        embedded_server.url, "reprise/voxcpm2", 2, 0, concurrency=1, warmup=0, seconds=0.32, response_format="wav"
    )
    records = run_load(load, report=seen.append)
    assert seen == records and summary(load, records)["audio_seconds"] == pytest.approx(0.64)


@pytest.mark.parametrize(
    "load",
    [ChatLoad("http://x", "m", 1, 0), ChatLoad("http://x", "m", 1, 0, turns=4), SpeechLoad("http://x", "m", 1, 0)],
)
def test_a_closed_loop_has_as_many_rounds_in_every_lane(load: Any) -> None:
    """Within one: so that its concurrency is kept until the last round."""
    for requests in (1, 5, 8, 40, 161, 512):
        for concurrency in (1, 2, 7, 8, 32, 128):
            for processes in (1, 2, 6, 16, 200):
                closed = msgspec.structs.replace(load, requests=requests, concurrency=concurrency)
                shares = bench_run._assignments(Clients(closed, processes))
                assert sum(share.count for share in shares) == requests
                assert sum(share.lanes for share in shares) == concurrency
                least, extra = divmod(requests, concurrency)
                for share in shares:
                    assert least * share.lanes <= share.count <= (least + bool(extra)) * share.lanes
                    assert share.count > 0, "a process with nothing to do"


def test_two_loads_at_the_same_time_and_the_end_of_a_closed_loop(
    embedded_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client's clock jumps to the end when it was looked at so often: at the beginning, and before each request
    of a closed loop."""
    looks, until = 30, 3600.0
    program = f"""
import time
from itertools import count
from types import SimpleNamespace
from service.cli.bench import client

looks = count(1)
client.time = SimpleNamespace(time=lambda: time.time() + ({until} if next(looks) > {looks} else 0.0))
client.main()
"""
    monkeypatch.setattr(bench_run, "CLIENT", (sys.executable, "-c", program))
    arriving = SpeechLoad(embedded_server.url, "nobody", 40, 0, rate=40.0, warmup=0)
    held = SpeechLoad(embedded_server.url, "nobody", 200, 1, concurrency=2, warmup=0)
    first, second = run_together(Clients(arriving, processes=2), Clients(held, processes=2, until=until))
    assert len(first) == 40 and len(second) == 2 * (looks - 1)
    begin = first[0].start - first[0].delay - float(bench_run._poisson_arrivals(arriving)[0])
    assert begin <= second[0].start


def prepare_otherwise(monkeypatch: pytest.MonkeyPatch, mark: Path, first: str, then: str) -> None:
    """Client processes where the very first request is prepared after the statement `first`, each other after `then`.
    The first one makes the file `mark`."""
    program = f"""
import sys, time
from service.cli.bench import client

made = client.payload

def payload(load, rng):
    try:
        open({str(mark)!r}, "x").close()
    except FileExistsError:
        {then}
    else:
        {first}
    return made(load, rng)

client.payload = payload
client.main()
"""
    monkeypatch.setattr(bench_run, "CLIENT", (sys.executable, "-c", program))


def test_clients_begin_together_however_long_one_prepares(
    embedded_server: ServerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepared = tmp_path / "prepared"
    slowly = f"time.sleep(1); open({str(prepared)!r}, 'w').write(str(time.time()))"
    prepare_otherwise(monkeypatch, tmp_path / "slow", slowly, "pass")
    load = SpeechLoad(embedded_server.url, "nobody", 40, 0, rate=100.0, warmup=0)
    records = run_load(load, processes=2)
    assert len(records) == 40 and all(record.delay >= 0 for record in records)
    due = np.sort([record.start - record.delay for record in records])
    begins = due - bench_run._poisson_arrivals(load)
    assert np.ptp(begins) < 1e-3, "each client counts from a beginning of its own"
    assert begins.min() > float(prepared.read_text())


def test_a_client_that_fails_while_it_prepares_ends_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = set(children(os.getpid()))
    prepare_otherwise(monkeypatch, tmp_path / "failed", "sys.exit(3)", "time.sleep(3600)")
    with pytest.raises(BenchError, match="ended with status 3"):
        run_load(SpeechLoad("http://127.0.0.1:9", "nobody", 4, 0, concurrency=2, warmup=0), processes=2)
    assert set(children(os.getpid())) == before


def test_refusals_are_counted_and_no_answer_at_all_is_an_error(embedded_server: ServerProcess) -> None:
    done = invoke("speech", "--url", embedded_server.url, "--model", "nobody", "--requests", "2", "--warmup", "0")
    assert "404 refused: 2" in done.output and done.exit_code == 1
    assert "no request succeeded" in str(done.exception) and "no model of this name" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chat", "--rate", "1", "--concurrency", "1"], "exclude each other"),
        (["chat", "--requests", "0"], "--requests"),
        (["chat", "--model", "m", "--no-system", "--system-tokens", "4"], "exclude each other"),
    ],
)
def test_what_makes_no_sense_is_said(arguments: list[str], said: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2 and said in done.output


@pytest.mark.parametrize("content", [b"not JSON", b'{"title": "caf\xe9"}', b""])
def test_a_file_that_holds_no_schema_is_named(content: bytes, tmp_path: Path) -> None:
    (file := tmp_path / "s.json").write_bytes(content)
    done = invoke("chat", "--model", "m", "--json-schema", str(file))
    assert done.exit_code == 2 and "s.json is not JSON" in done.output


def test_a_server_that_is_not_there() -> None:
    done = invoke("chat", "--url", "http://127.0.0.1:9")
    assert done.exit_code == 1 and "no server at" in str(done.exception)


@pytest.mark.parametrize(("flags", "key"), [([], "ours"), (["--key", "named"], "named")])
def test_a_load_has_the_key_of_the_environment_unless_one_is_named(
    flags: list[str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPRISE_API_KEY", "ours")
    loads: list[Any] = []

    def run_load(load: Any, **options: Any) -> list[Record]:
        loads.append(load)
        return [Record(start=0.0, status=200, first=0.1, duration=0.2, tokens=1)]

    monkeypatch.setattr(command, "run_load", run_load)
    done = invoke("chat", "--model", "m", *flags)
    assert done.exit_code == 0, done.output
    assert [load.api_key for load in loads] == [key]
