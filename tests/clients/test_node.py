"""The openai package for Node as it ships from npm, pinned by the lock file, against the real server."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import soundfile

from benchmarks.footprint import footprint, wait_settled
from tests.support.processes import ROOT, served
from tests.support.victims import SMALL

SOURCE = Path(__file__).parent / "node"
PICTURE = ROOT / "docs/images/shapes.png"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_chat_speech_and_errors(tmp_path: Path) -> None:
    for file in SOURCE.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    install = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    subprocess.run(install, cwd=tmp_path, check=True, capture_output=True, timeout=600)
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
        wait_settled(server.process.pid, server.url, temporary, after)
    seen = json.loads(done.stdout)
    assert seen["models"] == ["qwen2_vl", "voxcpm2"]
    assert seen["text"] and seen["text"] == seen["streamed"] == seen["assembled"]
    assert seen["finish"] in ("stop", "length") and seen["logprobs"] > 0
    assert seen["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    assert seen["streamUsage"] == {
        **seen["usage"],
        "prompt_tokens_details": seen["streamUsage"]["prompt_tokens_details"],
    }
    samples, rate = soundfile.read(io.BytesIO(audio.read_bytes()))
    assert rate == 48_000 and len(samples) > 0
    assert seen["contentType"].startswith("audio/pcm") and seen["pieces"] > 1 and seen["bytes"] == 2 * len(samples)
    assert seen["leaving"]
    errors = seen["errors"]
    assert errors["model"] == {"name": "NotFoundError", "status": 404, "code": "model_not_found", "param": "model"}
    assert errors["value"]["name"] == "BadRequestError" and errors["value"]["param"] == "temperature"
    assert errors["voice"]["status"] == 404 and errors["voice"]["code"] == "voice_not_found"
    assert errors["key"]["name"] == "AuthenticationError" and errors["key"]["code"] == "invalid_api_key"
