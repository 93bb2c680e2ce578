"""Wrong use of the command line: the status, and a line that names what is wrong. No traceback, ever."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import httpx
import pytest
import torch
from typer.testing import CliRunner, Result

from benchmarks.servers.footprint import children
from service.cli.commands import key_for, split_line, user_message
from service.cli.main import app, main
from service.cli.serve_help import choices
from service.media.audio_out import wav_header
from service.settings.settings import Settings
from tests.media.samples import sound, tone
from tests.support.fake_hearing import hearing_catalog
from tests.support.ports import silent_port
from tests.support.processes import ROOT
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, wait

PICTURE = str(ROOT / "docs/images/shapes.png")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def _names_of_no_network(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """getaddrinfo that knows numbers alone, so that no test asks a name server."""

    def numbers_only(host: Any, *rest: Any, **options: Any) -> Any:
        if host == "no-such-host.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return resolve(host, *rest, **options)

    return numbers_only


def test_starts_that_cannot_succeed(tmp_path: Path, taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket, "getaddrinfo", _names_of_no_network(socket.getaddrinfo))
    (tmp_path / "keys").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "comments").write_text("  # none yet\n\n")
    (tmp_path / "broken.yaml").write_text("max_n: [\n")
    cases: list[tuple[tuple[str, ...], str]] = [
        (("--model", "/nowhere/model"), "/nowhere/model: neither a directory nor a hub id"),
        (("--model", str(tmp_path)), "no readable config.json"),
        (("--model", "owner/name"), "owner/name: missing or incomplete in the cache"),
        (("--port", str(taken_port)), f"127.0.0.1:{taken_port} cannot be bound (Address already in use"),
        (
            ("--host", "no-such-host.invalid", "--insecure-no-auth"),
            "no-such-host.invalid:0 cannot be bound (no such name; --host names an address of this machine)",
        ),
        (
            ("--host", "192.0.2.1", "--insecure-no-auth"),
            "192.0.2.1:0 cannot be bound (Cannot assign requested address; --host names an address of this machine)",
        ),
        (
            ("--model", "reprise/qwen2vl"),
            "; the embedded models are reprise/qwen2_vl and reprise/qwen3_asr and reprise/voxcpm2",
        ),
        (("--host", "0.0.0.0"), "host: 0.0.0.0 is wider than loopback"),
        (("--api-key-file", "/nowhere/keys"), "api_key_file: /nowhere/keys cannot be read (No such file"),
        (("--api-key-file", str(tmp_path / "keys")), "keys is not UTF-8 text"),
        (("--api-key-file", str(tmp_path / "comments")), "comments holds no key"),
        (("--voices-dir", str(tmp_path / "keys")), f"voices_dir: {tmp_path / 'keys'} cannot be used (Not a directory)"),
        (("--voices-dir", str(tmp_path / "keys" / "x")), "x cannot be used (Not a directory)"),
        (("--config", "/nowhere/settings.yaml"), "/nowhere/settings.yaml: cannot be read (No such file"),
        (("--config", str(tmp_path / "broken.yaml")), "broken.yaml: not a YAML file (while parsing"),
        (("--served-model-name", "m=a"), "served_model_name: needs --model"),
        (("--served-model-name", "m=a", "--model", "x", "--model", "y"), "'m' is not one of the models x, y"),
        (("--gpu-memory", "24G"), "gpu_memory: goes with --dry-run"),
        (("--model", str(tmp_path / "keys")), "keys: a file, not a directory"),
        (("./modles/x",), "./modles/x: neither a directory nor a hub id"),
        (("--graphs", "off"), "'off': a model is OWNER/NAME or ./PATH, and a switch takes no value"),
        (("--model", ""), "'': neither a directory nor a hub id"),
        (("--max-body", "5X", "--port", "many"), "max_body: must be a number of bytes, such as"),
    ]
    for flags, says in cases:
        done = CliRunner().invoke(app, ["serve", *flags], env={"REPRISE_PORT": "0"})
        assert done.exit_code == 2 and isinstance(done.exception, SystemExit), (flags, done.exception)
        assert says in done.stderr, (flags, done.stderr)
        assert done.stderr.count("ddress already in use") <= 1


CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def has_namespaces() -> bool:
    return shutil.which("unshare") is not None and subprocess.run([*CONTAINER, "true"]).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not has_namespaces(), reason="needs namespaces of processes, which some containers forbid")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_process_1_of_a_container_ends_while_it_starts(tmp_path: Path, number: int) -> None:
    os.mkfifo(tmp_path / "config.json")
    command = [*CONTAINER, sys.executable, "-m", "service.cli", "serve", "--port", "0", "--model", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            with (tmp_path / "config.json").open("w"):  # opens once the start reads it
                (server,) = children(process.pid)
                os.kill(server, number)
                assert process.wait(GENEROUS) == 128 + number
        finally:
            process.kill()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("flags", [(), ("--dry-run", "--gpu-memory", "24G")], ids=["start", "dry run"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"architectures": ["Qwen2VL"], "hidden_size": "96"}', 'hidden_size is "96", expected'),
        ('{"vision_config": {"depth": null}}', "vision_config.depth is null, expected a positive integer"),
        ('{"vision_config": 3}', "vision_config is 3, expected an object"),
        ('{"architectures": {"Qwen2VL": 1}}', 'architectures is {"Qwen2VL": 1}, expected a list of strings'),
        ("[1]", "must hold an object, not list"),
        ("{", "cannot be read: Expecting property name"),
        ("[" * 1_000_000, "cannot be read: it is nested too deeply"),
    ],
)
def test_a_checkpoint_with_a_wrong_config(tmp_path: Path, flags: tuple[str, ...], content: str, says: str) -> None:
    (tmp_path / "config.json").write_text(content)
    done = CliRunner().invoke(app, ["serve", "--model", str(tmp_path), *flags], env={"REPRISE_PORT": "0"})
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.exception
    (line,) = [line for line in done.stderr.splitlines() if "config.json" in line]
    assert f"{tmp_path}: config.json" in line and says in line


@pytest.mark.slow
def test_a_device_that_is_not_there() -> None:
    command = [sys.executable, "-m", "service.cli", "serve", "--device", "cuda", "--port", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "device: torch finds no CUDA device" in done.stderr and "Traceback" not in done.stderr


AnswerWith = Callable[[Callable[[], httpx.Response]], list[dict[str, Any]]]
Failing = Callable[..., str]


@pytest.fixture
def answer_with(monkeypatch: pytest.MonkeyPatch) -> AnswerWith:
    """Answer all requests of commands; the list that is returned gets their bodies."""
    make = httpx.Client

    def stand_in(answer: Callable[[], httpx.Response]) -> list[dict[str, Any]]:
        bodies: list[dict[str, Any]] = []

        def handle(request: httpx.Request) -> httpx.Response:
            bodies.append(json.loads(request.content or b"{}"))
            return answer()

        client = partial(make, base_url="http://server", transport=httpx.MockTransport(handle))
        monkeypatch.setattr("service.cli.commands.httpx.Client", lambda **options: client())
        return bodies

    return stand_in


def chat_stream(text: str) -> httpx.Response:
    """A streamed answer of one chunk."""
    chunk = {"choices": [{"delta": {"content": text}}]}
    return httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Failing:
    """What `reprise ARGUMENTS` says when it ends with 1."""

    def said(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["reprise", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
        return capsys.readouterr().err

    return said


def test_commands_that_find_no_server(tmp_path: Path, failing: Failing) -> None:
    with silent_port() as port:
        url = f"http://127.0.0.1:{port}"
        for command in (
            ("models",),
            ("ask", PICTURE, "What?"),
            ("say", "Hello.", "-o", str(tmp_path / "a.wav")),
            ("bench", "chat"),
        ):
            said = failing(*command, "--url", url)
            assert said.startswith(f"reprise: no server at {url}") and "reprise serve" in said
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written(failing: Failing, answer_with: AnswerWith) -> None:
    said = failing("bench", "chat", "--json", "/nowhere/a.json", "--url", "http://127.0.0.1:1")
    assert said == "reprise: /nowhere/a.json: No such file or directory\n", "before anything is measured"
    asked = answer_with(lambda: httpx.Response(200, content=b"RIFF"))
    said = failing("say", "Hello.", "--model", "m", "-o", "/nowhere/a.wav")
    assert said == "reprise: /nowhere/a.wav: No such file or directory\n" and asked == []


NO_ADDRESSES = ("nonsense", "ftp://host", "http://", "http://[::1", "127.0.0.1:8000")
NO_HOSTS = ("http://host:abc", "http://host:65536", "http://host:-1", "http://ä..b", "http://xn--zzz-")


@pytest.mark.parametrize("url", [*NO_ADDRESSES, *NO_HOSTS])
def test_what_is_no_address_is_named(url: str) -> None:
    done = CliRunner().invoke(app, ["models", "--url", url], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "is not a URL such as http://127.0.0.1:8000" in done.stderr


@pytest.mark.parametrize("key", ["sk-\u2026", "sk-a\n", "\u201csk-a\u201d"])
@pytest.mark.parametrize("command", [["models"], ["ask", "What?"], ["bench", "chat"]])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(command: list[str], key: str) -> None:
    done = CliRunner().invoke(app, [*command, "--key", key], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "the API key has characters other than printable ASCII" in done.output
    assert "sk-" not in done.output


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_is_one_line(failing: Failing, answer_with: AnswerWith) -> None:
    answer_with(lambda: httpx.Response(200, content=b"RIFF"))
    said = failing("say", "Hello.", "--model", "m", "-o", "/dev/full", "--format", "wav")
    assert said == "reprise: /dev/full: No space left on device\n"
    assert Path("/dev/full").is_char_device()
    for arguments in (["version"], ["--help"], ["say", "Hello.", "-o", "-", "--url", "http://127.0.0.1:1"]):
        command = [sys.executable, "-m", "service.cli", *arguments]
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr == "reprise: No space left on device\n" or "no server at" in done.stderr


@pytest.mark.slow
def test_sigterm_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    """As Ctrl-C leaves none."""
    out = tmp_path / "a.wav"
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        arguments = ["say", "Hello.", "--model", "m", "-o", str(out), "--url", url]
        command = subprocess.Popen([sys.executable, "-m", "service.cli", *arguments], cwd=ROOT, stderr=subprocess.PIPE)
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nRIFF")
            wait(lambda: out.exists() and out.stat().st_size > 0, GENEROUS, "the audio has begun")
            command.terminate()
            _, said = command.communicate(timeout=GENEROUS)
    assert command.returncode == 128 + signal.SIGTERM and not said and not out.exists()


def test_say_asks_for_what_its_flags_say(tmp_path: Path, answer_with: AnswerWith) -> None:
    asked = answer_with(lambda: httpx.Response(200, content=b"fLaC"))
    out = str(tmp_path / "a.flac")
    flags = ["--voice", "nova", "--instructions", "A calm old man", "--speed", "1.5", "--seed", "7"]
    done = CliRunner().invoke(app, ["say", "Hello.", "--model", "m", "-o", out, *flags])
    assert (done.exit_code, done.output) == (0, f"{out}: 4 bytes\n")
    wanted = {"model": "m", "input": "Hello.", "voice": "nova", "response_format": "flac"}
    assert asked == [wanted | {"instructions": "A calm old man", "speed": 1.5, "seed": 7}]


@pytest.mark.parametrize("files", [[], [PICTURE]])
def test_ask_takes_pictures_or_none(files: list[str], answer_with: AnswerWith) -> None:
    asked = answer_with(lambda: chat_stream("Me."))
    for words, piped in ((["Who?", *files], ""), ([*files, "Who?"], ""), ([*files, "-"], "Who?\n"), (files, "Who?\n")):
        done = CliRunner().invoke(app, ["ask", *words, "--model", "m"], input=piped)
        assert (done.exit_code, done.output) == (0, "Me.\n")
        *pictures, question = asked[-1]["messages"][0]["content"]
        assert [part["type"] for part in pictures] == ["image_url"] * len(files)
        assert question == {"type": "text", "text": "Who?"}
    CliRunner().invoke(app, ["ask", "Who?", *files, "--model", "m", "--system", "Be brief.", "--temperature", "0"])
    assert asked[-1]["messages"][0] == {"role": "system", "content": "Be brief."} and asked[-1]["temperature"] == 0


def test_pictures_and_videos_are_told_apart_by_their_contents(tmp_path: Path) -> None:
    transport = tmp_path / "x.ts"  # of TypeScript, by its suffix
    transport.write_bytes(b"\x47".ljust(188, b"\0") * 2)
    (clip := tmp_path / "clip.png").write_bytes(b"\0\0\0\x18ftypisom")
    (picture := tmp_path / "picture.mp4").write_bytes(Path(PICTURE).read_bytes())
    parts = user_message("What is it?", [transport, clip, picture])["content"][:-1]
    assert [part["type"] for part in parts] == ["video_url", "video_url", "image_url"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["Who?", "How many are there?"], "'Who?' does not exist"),
        (["How many are there?", "/no/a.png"], "'/no/a.png' does not exist"),
        (["/no/picture.png", "Who?"], "'/no/picture.png' does not exist"),
        (["/", "Who?"], "'/' is a directory"),
        (["picture.png"], "'picture.png' does not exist"),
    ],
)
def test_ask_names_what_is_no_file(words: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["ask", *words], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and says in done.output


@pytest.fixture(scope="module")
def serve_help() -> str:
    return CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "80"}).output


def test_help_names_choices_units_and_defaults(serve_help: str) -> None:
    options = {part.split()[0]: part for part in re.split(r"\n  (?=--)", serve_help)[1:]}
    for name, field in Settings.model_fields.items():
        option = options[f"--{name.replace('_', '-')}"]
        assert not (values := choices(field.annotation)) or "|".join(values) in option, name
    assert "BYTES" in options["--max-body"] and "[64M]" in options["--max-body"]
    assert "INTEGER" in options["--port"] and "[8000]" in options["--port"]
    assert "NUMBER" in options["--memory-share"] and "PATH" in options["--api-key-file"]
    assert "[on]" in options["--metrics-open"] and "--no-print-config" not in serve_help
    assert "serve [OPTIONS] [MODEL]..." in serve_help


@pytest.mark.slow
@pytest.mark.parametrize("module", ["service.cli.main", "service.processes.supervisor"])
def test_ctrl_c_during_the_imports_is_not_lost(module: str) -> None:
    """Whatever becomes of a KeyboardInterrupt there: callbacks of importlib swallow it."""
    code = f"""
import os, signal, sys
from reprise_server import main

class Swallows:
    def find_spec(self, name, *more):
        if name == {module!r}:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                os._exit(7)

sys.meta_path.insert(0, Swallows())
main()
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "deploy/install")}
    command = [sys.executable, "-c", code, "serve", "--port", "0"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 130 and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "command", "status"),
    [("<&-", "say -o speech.wav", 2), (">&-", "version", 0), ("2>&-", "serve --print-config", 0)],
)
def test_a_standard_stream_that_is_closed(closed: str, command: str, status: int, tmp_path: Path) -> None:
    """As service managers and scripts start commands that are to be quiet."""
    line = f'exec "$0" -m service.cli {command} {closed}'
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["sh", "-c", line, sys.executable], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == status and "Traceback" not in done.stderr


def test_a_command_loads_no_server() -> None:
    """What only the server imports takes a second of each start of the command line."""
    code = "import sys, service.cli.main; print(*{'fastapi', 'starlette', 'uvicorn', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


SHAPES = ROOT / "docs/images/shapes.png"
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
    lines = f"one\n{quote(str(SHAPES))} two\n/new\n/strange\nthree\n"
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
        refused = hear(str(SHAPES))
        assert refused.exit_code == 1 and str(refused.exception).startswith(f"{SHAPES}: ")


def test_say_reads_standard_input_and_writes_standard_output(asked: list[dict[str, Any]]) -> None:
    done = CliRunner().invoke(app, ["say", "--model", "m", "-o", "-", "--format", "pcm"], input="From a pipe.\n")
    assert done.exit_code == 0, done.output
    assert (asked[0]["input"], asked[0]["response_format"]) == ("From a pipe.", "pcm")
    assert done.stdout_bytes == wav_header(24_000) + SAMPLES


def test_say_without_a_file_asks_for_one(asked: list[dict[str, Any]]) -> None:
    done = CliRunner().invoke(app, ["say", "Hello.", "--model", "m"], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "-o" in done.stderr and "aplay" in done.stderr and asked == []


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
