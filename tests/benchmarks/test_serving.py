"""The serving benchmark: its smallest shapes against a server, and what it makes of what its clients saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import serving
from benchmarks.serving import beside
from service.cli.bench.traffic import Record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def stream(start: float, gaps: list[float]) -> Record:
    return Record(start=start, status=200, first=1.0, gaps=gaps)


def test_a_long_prompt_beside_streams() -> None:
    """Two streams with an event every 0.1 s, and every 0.4 s while a prompt is computed, from 3 to 5."""
    gaps = [0.1] * 20 + [0.4] * 5 + [0.1] * 20
    streams = [stream(0.0, gaps), stream(0.02, gaps)]
    outside = Record(start=-1.0, status=200, first=1.5)
    row = beside(streams, [outside, Record(start=3.03, status=200, first=1.95, prompt_tokens=8000)])
    assert (row["long_prompts"], row["prompt_tokens"], row["first_p50_ms"]) == (1, 8000, pytest.approx(1950))
    assert row["gap_max_ms"] == pytest.approx(400) and row["alone_gap_p99_ms"] == pytest.approx(100, abs=1)
    assert row["rate_kept"] == pytest.approx(0.25, abs=0.05)


def test_a_long_prompt_that_no_stream_was_beside_is_not_counted() -> None:
    streams = [stream(0.0, [0.1] * 10), Record(start=0.0, status=503, error="refused")]
    row = beside(streams, [Record(start=1.9, status=200, first=3.0)])
    assert row["long_prompts"] == 0 and "first_p50_ms" not in row
    assert (row["requests"], row["succeeded"], row["refused"]) == (3, 2, 1)


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
