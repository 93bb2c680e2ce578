"""`reprise serve` when a model cannot be had from the hub: one line, a status, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub.conftest import published_files
from tests.support.loopback_hub import Repository, loopback_hub

pytestmark = pytest.mark.slow

PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


@pytest.mark.parametrize(
    ("repository", "home", "message"),
    [
        (Repository({}, access="gated"), "home", "set HF_TOKEN to a token of that account"),
        (Repository(published_files()), "file", "set HF_HOME to a directory that can be written"),
    ],
)
def test_a_refusal_is_one_line_and_a_status(tmp_path: Path, repository: Repository, home: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    with loopback_hub() as hub:
        hub.repositories["owner/name"] = repository
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / home), "HF_TOKEN": ""}
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "service.cli", "serve", "--model", "owner/name", "--port", "0", "--log-format"),
                "json",
            ],
            env={**os.environ, **dict.fromkeys(PROXIES, ""), **variables},
            text=True,
            capture_output=True,
            timeout=600,
            check=False,
        )
    *before, last = (json.loads(line)["message"] for line in ended.stderr.splitlines())
    assert ended.returncode == 2 and last.startswith("owner/name: ") and message in last
    assert "Traceback" not in ended.stderr and not ended.stdout
    assert before == ["owner/name: locating"]
