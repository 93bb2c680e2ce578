"""The serving benchmark: its smallest shapes against a server, and what it makes of what its clients saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_every_shape_on_a_miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("REPRISE_API_PROCESSES", "1")  # whatever the machine has
    serving.main(["all", "--tiny"])
    for kind in serving.RUNS:
        result = json.loads((tmp_path / f"serving_{kind}_tiny.json").read_text())
        assert all(row["succeeded"] == row["requests"] > 0 for row in result["rows"]), kind
        assert all(row["eager_prefill_share"] is not None for row in result["rows"]), kind
        assert result["api_processes"] == 1
        if kind != "long":
            parts = [sum(row[f"{part}_share"] for part in ("encoder", "prefill", "decode")) for row in result["rows"]]
            assert all(min(row["prefill_share"], row["decode_share"]) > 0 for row in result["rows"]), kind
            assert parts == pytest.approx([row["gpu_busy_share"] for row in result["rows"]]) and max(parts) < 1.05
        assert all(row["longest_step_at_most_ms"]["decode replay"] > 0 for row in result["rows"]), kind
        if kind in ("closed", "conversations"):
            assert all(row["steps_allow_share"] > 0 for row in result["rows"]), kind
    talks = json.loads((tmp_path / "serving_conversations_tiny.json").read_text())
    assert talks["encoder_cache_hits"] == 0 and all(row["cached_tokens"] > 0 for row in talks["rows"])
