"""The documentation tells the truth: its examples run, what it names exists, its generated pages are up to date.

Every fenced sh or python block of README.md, CONTRIBUTING.md and docs/ is run against a server with the models of the
package, whose address stands in for the one that is printed. Commands that cannot run here are recognised by ELSEWHERE,
and checked as far as that goes: flags of `reprise serve` are parsed, targets of make and modules of `python -m` exist.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from fastapi.routing import APIRoute
from typer.main import get_command
from typer.testing import CliRunner

from deploy.documents import DOCS, PAGES
from service.api import health_routes as operations
from service.api.chat import route as chat
from service.api.chat.schema import REFUSED, ChatRequestBody, MediaUrl, StreamOptions
from service.api.realtime.schema import (
    SERVER_EVENTS,
    UNSUPPORTED_EVENTS,
    AnyClientEvent,
    RealtimeConfig,
    RealtimeInput,
    RealtimeOutput,
)
from service.api.speech import route as speech
from service.api.speech import voices
from service.api.speech.schema import SpeechRequestBody, VoiceUpload
from service.api.speech.websocket import AudioDone, AudioStart, ClientMessage, SessionDone, SocketError
from service.cli.bench.command import bench
from service.cli.main import app
from service.graphs.observations import EagerReason
from service.media.audio_formats import CHAT_FORMATS, FORMATS
from service.metrics.metrics import PREFIX, SPECS
from service.settings.settings import ENV_PREFIX, Settings
from tests.support.processes import ROOT, ServerProcess
from tests.support.slow import slow

ADDRESS = "127.0.0.1:8000"
EXAMPLE_SECONDS = 600
LOADS = get_command(bench)
BENCH_FLAGS = {flag.lstrip("-") for load in LOADS.commands.values() for option in load.params for flag in option.opts}
CODE = [
    path.relative_to(ROOT)
    for folder in ("models", "service", "benchmarks", "deploy", "tests")
    for path in (ROOT / folder).rglob("*.py")
]
LIMITS = {
    '"model": "reprise/voxcpm2"': '"max_len": 8, "model": "reprise/voxcpm2"',
    '"type": "session.config"': '"max_len": 8, "type": "session.config"',
    "extra_body={": 'extra_body={"max_len": 8, ',
    "audio={": 'audio={"max_len": 8, ',
}
"""What is put into examples, by what stands in them: limits that a reader would not set, for speech of a second."""
ELSEWHERE = re.compile(
    r"""(?x) (?:sudo\s+)? (?:
        make | docker | podman | buildah | kubectl | helm | ray | serve | systemctl | git | apt-get | pipx? | nvidia-smi
        | \S*reprise\s+serve\b(?!\s+--help)   # runs until it is stopped, most examples with weights from a hub
        | \S*python\S*\s+-m\s+(?:benchmarks|pytest|training)\S*
        | (?:promtool|prometheus|grafana-server)
    )(?:\s|$)"""
)
"""How a command begins that needs a cluster, a registry, a GPU, a long time or the network."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])


@dataclass(frozen=True)
class Block:
    """An example: its language and its text."""

    language: str
    text: str

    @property
    def runs_here(self) -> bool:
        return self.language == "python" or not any(map(ELSEWHERE.match, self.commands))

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, each with its continuation lines and here-document."""
        commands: list[str] = []
        lines = iter(self.text.splitlines())
        for line in lines:
            if not line.strip() or line.startswith("#"):
                continue
            command = line
            while command.endswith("\\") or command.count("'") % 2:
                command += "\n" + next(lines)
            if here := re.search(r"<<-?'?(\w+)'?", command):
                while not command.endswith("\n" + here[1]):
                    command += "\n" + next(lines)
            commands.append(command)
        return commands


@cache
def blocks(document: Path) -> tuple[Block, ...]:
    """The runnable kinds; text, YAML and configuration of other programs are none."""
    found = [Block(*match.groups()) for match in BLOCK.finditer(document.read_text())]
    return tuple(block for block in found if block.language in ("sh", "python"))


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.fixture
def desk(tmp_path: Path, embedded_server: ServerProcess) -> tuple[Path, dict[str, str]]:
    """A directory and an environment in which examples find what they name: docs, reprise, python, the server."""
    tools = tmp_path / ".venv/bin"
    tools.mkdir(parents=True)
    for name, module in (("reprise", "-m service.cli"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (tools / name).chmod(0o755)
    (tmp_path / "docs").symlink_to(DOCS)
    (tmp_path / ".curlrc").write_text("fail-with-body\nnoproxy = *\n")
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        f"{ENV_PREFIX}URL": embedded_server.url,
    }
    return tmp_path, environment


@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", [slow(path, id=name_of(path)) for path in DOCUMENTS if blocks(path)])
def test_examples_run(document: Path, desk: tuple[Path, dict[str, str]], embedded_server: ServerProcess) -> None:
    """In the order of the page, in one directory: later ones may use files of earlier ones."""
    directory, environment = desk
    for block in filter(lambda block: block.runs_here, blocks(document)):
        text = block.text.replace(ADDRESS, embedded_server.url.partition("//")[2])
        for shown, limited in LIMITS.items():
            text = text.replace(shown, limited)
        command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
        status, output = run([*command, text], directory, environment)
        assert status == 0, f"{block.text}\n{output}"
        assert output.strip() or list(directory.glob("*.*")), f"nothing came of it:\n{block.text}"


def run(command: list[str], directory: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and output; what takes too long is killed with all that it has started."""
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=EXAMPLE_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def elsewhere() -> list[str]:
    examples = [block for document in DOCUMENTS for block in blocks(document) if not block.runs_here]
    return sorted({command.split("  #")[0].strip() for block in examples for command in block.commands})


@pytest.mark.parametrize("command", elsewhere())
def test_commands_that_run_elsewhere_make_sense(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert {word for word in words[1:] if "=" not in word and not word.startswith("-")} <= set(targets)
    elif "serve" in words and words[0].endswith("reprise"):
        flags = words[words.index("serve") :]
        done = CliRunner().invoke(app, [*flags, "--print-config"])
        assert done.exit_code == 0, done.output
    elif "-m" in words:
        assert importlib.util.find_spec(words[words.index("-m") + 1]) is not None
    else:
        assert ELSEWHERE.match(command), "say in ELSEWHERE why this cannot be run, or put it into a block of its own"


def test_examples_show_no_limits_that_only_tests_need() -> None:
    shown = [block.text for document in DOCUMENTS for block in blocks(document)]
    assert not [text for text in shown if "max_len" in text or "max_new_tokens" in text]
    assert all(any(part in text for text in shown) for part in LIMITS), "nothing is limited any more"


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run `make docs`"


def test_generated_pages_are_complete() -> None:
    settings, metrics = (PAGES[name]() for name in ("settings.md", "metrics.md"))
    assert all(settings.count(f"| `{name}` |") == 1 for name in Settings.model_fields)
    assert all(metrics.count(f"| `{PREFIX}_{spec.name}` |") == 1 for spec in SPECS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    """Files and headings; no other host is asked."""
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", document.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([^)#]+)\)", index))
    assert "docs/README.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_what_is_named_exists(document: Path) -> None:
    text = document.read_text()
    known = {f"{PREFIX}_{spec.name}" for spec in SPECS}
    assert set(re.findall(rf"`({PREFIX}_[a-z_]+)", text)) <= known
    flags = set(re.findall(r"`(?:reprise serve )?--([a-z][a-z-]+)", BLOCK.sub("", text)))
    others = {"config", "print-config", "dry-run", "gpu-memory", "help", "version"}
    others |= {"url", "key", "local", "out", "json", "report", "minutes"}
    others |= BENCH_FLAGS
    settings = {name.replace("_", "-") for name in Settings.model_fields}
    assert {flag.removeprefix("no-") for flag in flags} <= settings | others
    variables = set(re.findall(rf"\b{ENV_PREFIX}([A-Z_]+)\b", text))
    assert {variable.lower() for variable in variables} <= set(Settings.model_fields) | {"config", "url", "golden"}


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "tests/README.md"], ids=name_of)
def test_files_that_are_named_exist(document: Path) -> None:
    """Paths from the root of the checkout, in backquotes."""
    named = re.findall(r"`((?:models|service|tests|benchmarks|deploy|docs)/[\w./-]+)`", document.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_field_and_code_of_the_api_is_explained() -> None:
    text = (DOCS / "api.md").read_text()
    bodies = [ChatRequestBody, StreamOptions, MediaUrl, SpeechRequestBody, VoiceUpload]
    answers = [AudioStart, AudioDone, SessionDone, SocketError]
    bodies += [AudioStart, AudioDone, SocketError]
    fields = {name for body in bodies for name in body.__struct_fields__} - set(REFUSED)  # which GET /docs lists
    assert {name for name in fields if f"`{name}`" not in text} == set()
    messages = [*get_args(ClientMessage), *answers]
    assert [tag for message in messages if f"`{(tag := message.__struct_config__.tag)}`" not in text] == []
    paths = ["/v1/audio/speech/stream", *paths_of_routes()]
    assert [path for path in paths if path.partition("{")[0].rstrip("/") not in text] == []


def test_every_error_code_is_explained() -> None:
    text = "".join((DOCS / page).read_text() for page in ("api.md", "realtime.md"))
    sources = [(ROOT / path).read_text() for path in CODE if path.parts[0] == "service"]
    calls = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    codes = {code for call in calls for code in error_codes(call)}
    assert len(codes) > 30
    assert {code for code in codes if f"`{code}`" not in text} == set()


def error_codes(call: ast.Call) -> set[str]:
    """Codes of error objects that a call names: `code="..."`, the third argument of bad_request or invalid, or what
    follows the status in a failure of the engine."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    values = [getattr(argument, "value", None) for argument in call.args]
    found = [getattr(keyword.value, "value", None) for keyword in call.keywords if keyword.arg == "code"]
    if name in ("bad_request", "invalid"):
        found += values[2:3]
    elif name in ("Failed", "fail", "_abandon"):
        found += [code for status, code in pairwise(values) if isinstance(status, int)]
    return {code for code in found if isinstance(code, str)}


@pytest.mark.parametrize("page", ["architecture.md", "routes.md", "models/adding.md"])
def test_names_of_code_exist(page: str) -> None:
    """Every longer word in backquotes on a page about the code is one of the code, a file, a result or a metric."""
    code = " ".join([*map(str, CODE), *((ROOT / path).read_text() for path in CODE)])
    known = set(re.findall(r"\w+", code)) | {f"{PREFIX}_{spec.name}" for spec in SPECS} | {"docs"}
    known |= {path.stem for path in (ROOT / "benchmarks/results").glob("*.json")}
    quoted = re.findall(r"`([^`\n]+)`", BLOCK.sub("", (DOCS / page).read_text()))
    named = {word for text in quoted for word in re.findall(r"[A-Za-z_]\w{3,}", text)}
    assert len(named) > 30
    assert named - known == set()


def test_every_event_of_the_realtime_protocol_is_explained() -> None:
    text = (DOCS / "realtime.md").read_text()
    tags = [event.__struct_config__.tag for event in get_args(AnyClientEvent)] + [*SERVER_EVENTS, *UNSUPPORTED_EVENTS]
    assert len(tags) > 30
    assert [tag for tag in tags if f"`{tag}`" not in text] == []
    structs = (RealtimeConfig, RealtimeInput, RealtimeOutput)
    fields = {field for struct in structs for field in struct.__struct_fields__} - {"audio"}
    assert [field for field in fields if f"`{field}`" not in text] == []
    assert "/v1/realtime" in text


def test_every_audio_format_is_listed() -> None:
    api, speech_page = (DOCS / "api.md").read_text(), (DOCS / "speech.md").read_text()
    row = next(line for line in api.splitlines() if line.startswith("| `response_format` | `mp3`"))
    assert [name for name in FORMATS if f"`{name}`" not in row or f"`{name}`" not in speech_page] == []
    assert [name for name in CHAT_FORMATS if f"`{name}`" not in api] == []


def paths_of_routes() -> list[str]:
    routers = (chat.router, speech.router, voices.router, operations.router)
    return [route.path for router in routers for route in router.routes if isinstance(route, APIRoute)]


OPERATION = (DOCS / "operation.md").read_text()


def test_settings_that_operators_are_told_of_exist() -> None:
    tables = [line.split("|")[2] for line in OPERATION.splitlines() if line.startswith("|") and "`reprise_" not in line]
    named = {name for cell in tables for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", cell)}
    assert len(named) > 15
    assert named <= set(Settings.model_fields)


def test_every_reason_of_an_eager_step_is_explained() -> None:
    table = (DOCS / "routes.md").read_text().partition("| reason |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(get_args(EagerReason))
