"""The commands that talk to a server, against one: conversations, pipes, keys."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from service.cli.commands import key_for, split_line
from service.cli.main import app
from service.media.audio_out import wav_header
from tests.cli.conftest import AnswerWith, chat_stream
from tests.media.samples import sound, tone
from tests.support.fake_hearing import hearing_catalog
from tests.support.processes import ROOT
from tests.support.servers import RunningServer, running_server

PICTURE = ROOT / "docs/images/shapes.png"
SAMPLES = struct.pack("<6h", 1, 2, 3, 4, 5, 6)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def asked(answer_with: AnswerWith) -> list[dict[str, Any]]:
    """Bodies of requests that are answered with a WAV of SAMPLES in odd pieces."""
    wav = wav_header(24_000) + SAMPLES
    return answer_with(lambda: httpx.Response(200, content=iter([wav[:10], wav[10:47], wav[47:]])))


def talk(server: RunningServer, lines: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["chat", "--url", server.url, *arguments], input=lines)


def test_a_conversation_from_a_pipe(server: RunningServer) -> None:
    done = talk(server, "hello\n\nagain\n/quit\nnever\n")
    assert done.exit_code == 0, done.output
    assert done.stdout == "hello\nagain\n"


def test_what_the_server_refuses_is_said_and_the_conversation_goes_on(server: RunningServer) -> None:
    done = talk(server, "!fail\nhello\n")
    assert (done.exit_code, done.stdout) == (1, "hello\n")
    assert "failed by request" in done.stderr and "Traceback" not in done.output


def test_a_refused_file_is_named_and_a_missing_one_is_noticed(server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "a b.png"
    file.write_text("no picture")
    escaped = str(file).replace(" ", r"\ ")
    done = talk(server, f"{escaped}\n{escaped} hello\n/nowhere.png hello\nnowhere.png hello\n")
    assert done.exit_code == 1, done.output
    assert "a b.png: now ask about it\n" in done.stderr  # among lines of the server's log, which other tests turn on
    assert f"reprise: {file}: not readable as an image" in done.stderr and "reprise: messages[" not in done.stderr
    assert "/nowhere.png is neither a command nor a file" in done.stderr
    assert "there is no file nowhere.png" in done.stderr
    assert done.stdout == "nowhere.png hello\n"


def test_turns_are_kept_until_a_new_conversation(answer_with: AnswerWith) -> None:
    answers = iter(range(1, 4))
    bodies = answer_with(lambda: chat_stream(f"answer {next(answers)}"))
    lines = f"one\n{quote(str(PICTURE))} two\n/new\n/strange\nthree\n"
    done = CliRunner().invoke(app, ["chat", "--model", "m", "--system", "Be brief."], input=lines)
    assert done.stdout == "answer 1\nanswer 2\nanswer 3\n"
    assert "/strange is neither a command nor a file" in done.stderr
    roles = [[message["role"] for message in body["messages"]] for body in bodies]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    parts = bodies[1]["messages"][3]["content"]
    assert [part["type"] for part in parts] == ["image_url", "text"] and parts[1]["text"] == "two"


@pytest.mark.parametrize(
    "dropped", ["{path}", "'{path}'", "file://{url}", "{escaped}"], ids=["bare", "quoted", "address", "backslashes"]
)
def test_files_that_are_dropped_into_a_line(tmp_path: Path, dropped: str) -> None:
    name = "a b.png" if dropped != "{path}" else "ab.png"
    path = tmp_path / name
    path.write_bytes(b"")
    word = dropped.format(path=path, url=str(path).replace(" ", "%20"), escaped=str(path).replace(" ", r"\ "))
    assert split_line(f"{word} What is it?") == ([path], "What is it?")
    assert split_line(f"What is it? {word}") == ([path], "What is it?")
    assert split_line(word) == ([path], "")


@pytest.mark.parametrize("line", ["What's in it?", "a  b", 'say "hello"', "x" * 5000, "nul \0 byte", "~5 shapes?"])
def test_a_line_without_files_stays_as_it_is(line: str) -> None:
    assert split_line(line) == ([], line)


def test_hear_prints_what_is_said(tmp_path: Path) -> None:
    file = tmp_path / "a b.wav"
    file.write_bytes(sound(tone(440, 16_000), 16_000, "WAV"))
    with running_server(hearing_catalog()) as hearing:

        def hear(*arguments: str, **given: Any) -> Result:
            return CliRunner().invoke(app, ["hear", "--url", hearing.url, *arguments], **given)

        assert hear(str(file)).stdout == "1.00 s.\n"
        assert hear("-", "--prompt", "Ann", "--language", "de", input=file.read_bytes()).stdout == "Ann: 1.00 s.\n"
        assert hear(str(file), "--format", "vtt").stdout.splitlines()[2:4] == [
            "00:00:00.000 --> 00:00:01.000",
            "1.00 s.",
        ]
        refused = hear(str(PICTURE))
        assert refused.exit_code == 1 and str(refused.exception).startswith(f"{PICTURE}: ")


def test_say_reads_standard_input_and_writes_standard_output(asked: list[dict[str, Any]]) -> None:
    done = CliRunner().invoke(app, ["say", "--model", "m", "-o", "-", "--format", "pcm"], input="From a pipe.\n")
    assert done.exit_code == 0, done.output
    assert (asked[0]["input"], asked[0]["response_format"]) == ("From a pipe.", "pcm")
    assert done.stdout_bytes == wav_header(24_000) + SAMPLES


def test_say_without_a_file_asks_for_one(asked: list[dict[str, Any]]) -> None:
    done = CliRunner().invoke(app, ["say", "Hello.", "--model", "m"], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "-o" in done.stderr and "aplay" in done.stderr and asked == []


def test_say_asks_nothing_for_a_file_that_cannot_be_written(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["say", "Hello.", "--model", "m", "-o", str(tmp_path / "none" / "a.wav")])
    assert done.exit_code != 0 and asked == []


def test_ps_says_what_a_server_does(server: RunningServer) -> None:
    done = CliRunner().invoke(app, ["ps", "--url", server.url])
    assert done.exit_code == 0, done.output
    assert f"{server.url}: ready" in done.output and "tiny" in done.output and "0%" in done.output


@pytest.mark.parametrize(
    ("url", "named", "environ", "key"),
    [
        ("http://127.0.0.1:8000", "", {"OPENAI_API_KEY": "theirs"}, "theirs"),
        ("http://localhost:8000", "", {"OPENAI_API_KEY": "theirs"}, "theirs"),
        ("http://[::1]:8000", "", {"OPENAI_API_KEY": "theirs", "REPRISE_API_KEY": "ours second"}, "ours"),
        ("http://127.0.0.1:8000", "", {"REPRISE_API_KEY": "with,comma"}, "with,comma"),
        ("https://models.example", "", {"OPENAI_API_KEY": "theirs"}, ""),
        ("https://localhost.example", "", {"OPENAI_API_KEY": "theirs"}, ""),
        ("https://models.example", "", {"REPRISE_API_KEY": "ours"}, "ours"),
        ("https://models.example", "named", {"REPRISE_API_KEY": "ours"}, "named"),
    ],
)
def test_openais_key_stays_on_this_machine(url: str, named: str, environ: dict[str, str], key: str) -> None:
    assert key_for(url, named, environ) == key
