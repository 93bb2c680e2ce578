"""`reprise bench` against the real server, and what its clients send."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from service.api.chat.schema import ChatRequestBody, Message
from service.api.speech.schema import SpeechRequestBody
from service.cli.bench import report as bench_report
from service.cli.bench import run as bench_run
from service.cli.bench.report import page_of
from service.cli.bench.run import Clients
from service.cli.bench.traffic import WORDS, ChatLoad, Connection, Record, SpeechLoad, converse, payload, questions
from service.cli.main import app
from tests.support.processes import ROOT, ServerProcess
from tests.support.servers import running_server
from tests.support.waiting import GENEROUS

SMALL = ["--requests", "4", "--warmup", "1"]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "400"})


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_sends_new_contents_unless_seeded_alike(embedded_server: ServerProcess, tmp_path: Path) -> None:
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
    assert first[0] != second[0] and first[1] == second[1] == 0
    seed, cached, said = again("--seed", str(second[0]))
    assert seed == second[0] and cached > 0 and re.search(rf"prompt tokens from the cache +{cached}\b", said)


@pytest.mark.slow
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


def test_a_shared_system_prompt_is_the_same_for_all_and_everything_else_is_new() -> None:
    load = ChatLoad("http://x", "m", 4, 0, images=0, text_words=6, system_tokens=40, turns=3)
    rng = np.random.default_rng(0)
    bodies = [payload(load, rng)["messages"] for _ in range(3)]
    systems = {messages[0]["content"] for messages in bodies}
    assert len(systems) == 1 and len(systems.pop().split()) == 40
    asked = [messages[1]["content"][-1]["text"] for messages in bodies] + questions(load, rng)
    assert len(asked) == 5 == len(set(asked)) and all(set(text.split()) <= set(WORDS) for text in asked)


@pytest.mark.slow
def test_each_turn_has_all_that_was_said_before(embedded_server: ServerProcess, tmp_path: Path) -> None:
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


def test_refusals_are_counted_and_no_answer_at_all_is_an_error() -> None:
    with running_server() as server:
        done = invoke("speech", "--url", server.url, "--model", "nobody", "--requests", "2", "--warmup", "0")
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


def small_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of a few requests."""
    monkeypatch.setattr(bench_report, "CHATS", {1: 8, 2: 16})
    monkeypatch.setattr(bench_report, "STREAMS", {1: 8})
    monkeypatch.setattr(bench_report, "COPY_BYTES", 1 << 22)
    monkeypatch.setattr(bench_report, "CPU_CHAT", {"width": 56, "height": 56, "text_words": 4, "output_tokens": 4})
    monkeypatch.setattr(bench_report, "CPU_SPEECH", {"text_words": 4, "seconds": 0.32})


@pytest.mark.slow
def test_a_report_of_a_server(embedded_server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_report(monkeypatch)
    done = invoke("--report", str(tmp_path / "mine"), "--url", embedded_server.url, "--minutes", "60")
    assert done.exit_code == 0, done.output
    report, page = json.loads((tmp_path / "mine.json").read_text()), (tmp_path / "mine.md").read_text()
    assert "benchmarks/results/reports" in done.output and embedded_server.url not in page + json.dumps(report)
    assert report["device"]["name"] == "cpu" and report["versions"]["torch"] and not report["left_out"]
    assert report["bytes_per_second"] > 0 and report["start"]["captures"] > 0 and len(report["commit"]) == 40
    loads = {(row["model"], row["name"]): row for row in report["rows"]}
    chat = "reprise/qwen2_vl"
    named = {(chat, name) for name in ("1 at a time", "2 at a time", "arrivals at half that rate")}
    assert set(loads) == named | {("reprise/voxcpm2", "1 at a time")}
    for row in loads.values():
        assert row["requests"] == row["succeeded"] > 0
        (decode,) = (step for step in row["steps"] if step["step"] == "decode")
        assert decode["number"] > 0 and 1 <= decode["rows"] <= 2 and decode["ms"] > 0 and decode["roofline"] > 0
    assert all(f"| {model} | {name} | " in page for model, name in loads) and page == page_of(report)


def test_a_page_says_what_is_missing() -> None:
    load = {"model": "m", "name": "8 at a time", "requests": 9, "succeeded": 8, "requests_per_second": 2.0, "gap": {}}
    step = {"step": "decode", "number": 4, "replayed": 0.5, "rows": 7.5, "ms": 3.0}
    load |= {"tokens_per_second": 1234.5, "first": {"p50": 0.0125, "p95": 0.5}}
    report = {"time": "2026-01-02T03:04:05Z", "commit": "0.1.0", "device": {"name": "NVIDIA X", "memory_bytes": 24e9}}
    report |= {"versions": {"torch": "2"}, "models": {"m": "a/m"}, "start": {"load": 1.5}}
    report |= {"left_out": ["m, 32 at a time"]}
    page = page_of(report | {"rows": [load | {"steps": [step | {"roofline": 1.5}]}], "bytes_per_second": 3e12})
    assert "# Reprise on NVIDIA X" in page and "3,000 GB/s" in page and "time: m, 32 at a time." in page
    assert "| m | 8 at a time | 9 | 1 | 2.00 | 1,234 |  | 12.5 | 500 |  |" in page
    assert "| m | 8 at a time | decode | 4 | 50% | 7.50 | 3.00 | 1.50 | 2.00 |" in page
    page = page_of(report | {"rows": [load | {"steps": [step]}], "no_roofline": "the server is on another machine"})
    assert "Without a roofline: the server is on another machine." in page and "x roofline" not in page


def test_a_report_that_cannot_be_made_is_refused_in_words(tmp_path: Path) -> None:
    def refusal(*arguments: str) -> str:
        done = invoke(*arguments)
        assert done.exit_code and not list(tmp_path.iterdir())
        return f"{done.output} {done.exception}"

    path = str(tmp_path / "r")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert "no server at" in refusal("--report", path, "--url", url)
    assert "No such file" in refusal("--report", str(tmp_path / "no" / "r"), "--url", url)
    assert "neither a directory nor a hub id" in refusal("--report", path, "--model", "a/b/c")
    assert "either --report or a load" in refusal("--report", path, "chat")
    assert "either --report or a load" in refusal("--minutes", "1")
    with running_server() as server:
        assert "has no model 'nobody'; it has" in refusal("--report", path, "--url", server.url, "--model", "nobody")


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no"], ids=["nothing", "a part"])
def test_an_answer_that_breaks_off_is_a_failure(said: bytes) -> None:
    """A connection that was closed after an answer is opened again."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(replies.pop(0))
        writer.close()

    async def records() -> list[Record]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            load = SpeechLoad(f"http://127.0.0.1:{port}", "m", 1, 0)
            connection = Connection(load)
            found = [record for _ in range(3) async for record in converse(connection, load, b"{}", [])]
            await connection.close()
            return found

    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    replies = [whole, said, whole]
    assert [record.error for record in asyncio.run(records())] == ["", "failed", ""]
