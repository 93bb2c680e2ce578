"""Ray Serve behind HAProxy, and what both add to a request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="Ray brings HAProxy along for Linux alone")
def test_requests_pass_haproxy_and_the_front(tmp_path: Path) -> None:
    # A process of its own: Ray reads the environment at its import.
    environment = {**os.environ, "OUT": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.ray_hop", "--haproxy", "--requests", "5"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=800)
    rows = json.loads((tmp_path / "ray_hop_haproxy.json").read_text())["rows"]
    assert [row["request"] for row in rows] == ["GET /v1/models", "one token of chat", "one token about a new picture"]
    assert all(row["direct_p50_ms"] > 0 < row["through_ray_p50_ms"] for row in rows)
