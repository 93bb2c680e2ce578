"""The openai package for Node as it ships from npm, pinned by the lock file, against the real server."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import soundfile

from benchmarks.servers.footprint import footprint, wait_settled
from tests.support.processes import ROOT, served
from tests.support.victims import SMALL
from tests.support.waiting import GENEROUS

SOURCE = Path(__file__).parent / "node"
PICTURE = ROOT / "docs/images/shapes.png"
CERTIFICATE = ROOT / "tests/media/tls/a.example.pem"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def install(folder: Path) -> None:
    for file in SOURCE.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=600)


def test_chat_speech_and_errors(tmp_path: Path) -> None:
    install(tmp_path)
    temporary, audio = tmp_path / "tmp", tmp_path / "hello.wav"
    temporary.mkdir()
    with served(*SMALL, "--api-key", "the-key", TMPDIR=str(temporary)) as server:
        before = footprint(server.process.pid, server.url, temporary)
        arguments = [server.url, "qwen2_vl", "voxcpm2", str(PICTURE), str(audio)]
        command = ["node", "drive.mjs", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        after = footprint(server.process.pid, server.url, temporary)
        assert after.processes == before.processes
        wait_settled(server.process.pid, server.url, temporary, after, GENEROUS)
    seen = json.loads(done.stdout)
    assert seen["models"] == ["qwen2_vl", "voxcpm2"]
    assert seen["text"] and seen["text"] == seen["streamed"] == seen["assembled"]
    assert seen["responses"] == [seen["text"]] * 3 and seen["status"] in ("completed", "incomplete")
    assert seen["finish"] in ("stop", "length") and seen["logprobs"] > 0
    assert seen["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    assert seen["streamUsage"] == {
        **seen["usage"],
        "prompt_tokens_details": seen["streamUsage"]["prompt_tokens_details"],
    }
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


def test_realtime(tmp_path: Path) -> None:
    install(tmp_path)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with served(*SMALL, "--api-key", "the-key", TMPDIR=str(temporary)) as server:
        before = footprint(server.process.pid, server.url, temporary)
        command = ["node", "realtime.mjs", server.url, "qwen2_vl", "voxcpm2", str(PICTURE), str(CERTIFICATE)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        after = footprint(server.process.pid, server.url, temporary)
        assert after.processes == {**before.processes, "grammars": 1}  # which checks the tool's
        wait_settled(server.process.pid, server.url, temporary, after, GENEROUS)
    seen = json.loads(done.stdout)
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
