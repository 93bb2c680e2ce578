"""The openai package for Node as it ships from npm, pinned by the lock file, against the real server."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import soundfile

from benchmarks.servers.footprint import footprint, wait_settled
from service.media.audio_formats import G711_RATE
from service.media.reference_audio import resample
from tests.clients.conftest import seconds_of
from tests.support.processes import ROOT, ServerProcess, served
from tests.support.servers import RunningServer
from tests.support.victims import SMALL
from tests.support.waiting import GENEROUS

SOURCE = Path(__file__).parent / "node"
PICTURE = ROOT / "docs/images/shapes.png"
CERTIFICATE = ROOT / "tests/media/tls/a.example.pem"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Node:
    """A folder with the package, and a server."""

    folder: Path
    server: ServerProcess
    temporary: Path

    def seen(self, script: str, *arguments: str | Path, **started: int) -> Any:
        """What a script saw. started: processes that the server starts for it, by role; nothing else is left."""
        held = (self.server.process.pid, self.server.url, self.temporary)
        before = footprint(*held)
        command = ["node", script, self.server.url, "qwen2_vl", "voxcpm2", PICTURE, *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        after = footprint(*held)
        assert after.processes == {**before.processes, **started}
        wait_settled(*held, after, GENEROUS)
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder, temporary = tmp_path_factory.mktemp("node"), tmp_path_factory.mktemp("tmp")
    for file in SOURCE.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=600)
    with served(*SMALL, "--api-key", "the-key", TMPDIR=str(temporary)) as server:
        yield Node(folder, server, temporary)


def test_chat_speech_and_errors(node: Node, tmp_path: Path) -> None:
    audio = tmp_path / "hello.wav"
    seen = node.seen("drive.mjs", audio)
    assert seen["models"] == ["qwen2_vl", "voxcpm2"]
    assert seen["text"] and seen["text"] == seen["streamed"] == seen["assembled"]
    assert seen["responses"] == [seen["text"]] * 3 and seen["status"] in ("completed", "incomplete")
    assert seen["finish"] in ("stop", "length") and seen["logprobs"] > 0
    assert seen["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    details = seen["streamUsage"]["prompt_tokens_details"]
    assert seen["streamUsage"] == {**seen["usage"], "prompt_tokens_details": details}
    samples, rate = soundfile.read(io.BytesIO(audio.read_bytes()))
    assert rate == 48_000 and len(samples) > 0
    assert seen["contentType"].startswith("audio/pcm") and seen["pieces"] > 1
    assert seen["bytes"] == pytest.approx(len(samples), abs=200), "16 bits at 24 kHz"
    assert seen["leaving"]
    errors = seen["errors"]
    assert errors["model"] == {"name": "NotFoundError", "status": 404, "code": "model_not_found", "param": "model"}
    assert errors["value"]["name"] == "BadRequestError" and errors["value"]["param"] == "temperature"
    assert errors["voice"]["status"] == 404 and errors["voice"]["code"] == "voice_not_found"
    assert errors["key"]["name"] == "AuthenticationError" and errors["key"]["code"] == "invalid_api_key"


def test_realtime(node: Node, hearing_server: RunningServer, recording: Path, tmp_path: Path) -> None:
    call = tmp_path / "call.raw"
    samples, rate = soundfile.read(recording, dtype="float32")
    soundfile.write(call, resample(samples, rate, G711_RATE), G711_RATE, "ULAW", format="RAW")
    # A process for grammars checks the tool's.
    seen = node.seen("realtime.mjs", CERTIFICATE, hearing_server.url, call, grammars=1)
    assert seen["session"]["model"] == "qwen2_vl" and seen["session"]["type"] == "realtime"
    assert seen["updated"]["instructions"] == "Be brief." and seen["updated"]["audio"]["output"]["voice"] == "alloy"
    assert seen["asked"] == {"role": "user", "sent": True}
    written, spoken, called = seen["written"], seen["spoken"], seen["called"]
    (message,) = written["done"]["output"]
    assert written["text"] == written["deltas"] == message["content"][0]["text"] != ""
    assert written["done"]["usage"]["input_token_details"]["image_tokens"] > 0
    (message,) = spoken["done"]["output"]
    assert spoken["transcript"] == spoken["deltas"] == message["content"][0]["transcript"] != ""
    assert spoken["bytes"] > 0 and spoken["bytes"] % 2 == 0 and seen["truncated"] == 1
    (call,) = called["done"]["output"]
    assert called["done"]["status"] == "completed" and call["type"] == "function_call" and call["name"] == "look_up"
    assert called["arguments"] == called["deltas"] == call["arguments"] and json.loads(call["arguments"]) == {}
    assert seen["refused"]["code"] == "item_not_found" and seen["refused"]["event"] == "mine"
    assert seen["closed"] == 1000 and seen["types"].count("response.done") == 3
    assert seen["browser"] == "qwen2_vl" and seen["protocol"] == "realtime"
    assert "401" in seen["stranger"]
    assert seen["detection"] == "server_vad" and seen["heard"] == seen["replied"]
    assert 1000 * seconds_of(seen["heard"]) == pytest.approx(seen["stopped"] - seen["started"], abs=10)
