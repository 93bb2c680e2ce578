"""The host's part of a guided step, by stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import guided_path


def test_a_gpu_is_idle_until_its_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(guided_path.time, "perf_counter", lambda: now[0])
    gpu = guided_path.Gpu()
    gpu.launch("layers", 5)
    now[0] = 3
    gpu.launch("sampling", 1)  # queued
    now[0] = 8
    gpu.launch("layers", 5)
    assert gpu.idle == {"layers": 2, "sampling": 0} and gpu.free_at == 13


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="descriptors and processors are named as on Linux")
def test_stages_of_a_guided_step(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.guided_path", "--rounds", "1"]
    environment = {**os.environ, "OUT": str(tmp_path)}
    subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], check=True)
    rows = json.loads((tmp_path / "guided_path.json").read_text())["rows"]
    assert [row["rows"] for row in rows] == list(guided_path.LOADS) * len(guided_path.SCALES)
    for row in rows:
        assert row["step_us"] > 1e3 * row["layers_ms"] and row["read_tokens_us"] > 0
        assert ("loss" in row) == ("guided" in row["rows"]) == (row.get("ask_for_masks_us", 0) > 0)
