"""schemathesis over the OpenAPI document of the real server: every answer is a declared one, and no 5xx but a declared
503 with Retry-After."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.processes import ROOT, served
from tests.support.victims import SMALL
from tests.support.waiting import GENEROUS

CHECKS = (
    "status_code_conformance,content_type_conformance,response_schema_conformance,response_headers_conformance,"
    "unsupported_method"
)
LIMITS = (
    *("--max-output-tokens", "4", "--max-n", "2", "--max-speech-chars", "100"),
    *("--max-body", "4M", "--api-key", "the-key"),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_every_answer_is_declared(tmp_path: Path) -> None:
    assert importlib.util.find_spec("schemathesis"), "install the extra test-all"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with served(*SMALL, *LIMITS, "--voices-dir", str(tmp_path / "voices"), TMPDIR=str(temporary)) as server:
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "25", "--seed", "7"),
            *("--checks", f"{CHECKS},only_503_with_retry_after", "--header", "Authorization: Bearer the-key"),
            *("--suppress-health-check", "too_slow"),  # drawing an example may take any time
            *("--request-timeout", str(4 * GENEROUS), "--no-color", "--continue-on-failure"),
        ]  # fmt: skip
        folder = str(tmp_path)
        environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "SCHEMATHESIS_HOOKS": "tests.fuzz.hooks"}
        environment["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1500, env=environment)
        print(done.stdout)
        assert "Tested: 18" in done.stdout
        text = httpx.get(f"{server.url}/metrics").text
        for endpoint in ("chat", "responses", "completions", "speech"):
            answered = rf'endpoint="{endpoint}",model="\w+",outcome="ok",status="200"'
            assert re.search(answered, text), f"no request to {endpoint} was answered"
        assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-2000:]
