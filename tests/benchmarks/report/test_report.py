"""The documentation's figures come from benchmarks/results and from nowhere else."""

from __future__ import annotations

import json
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from benchmarks.commands import COMMANDS
from benchmarks.measure.record import RESULTS
from benchmarks.report.documents import ROOT, documents, filled, stale
from benchmarks.report.plots import PLOTS, digest
from benchmarks.report.results import PEERS, Results
from benchmarks.report.tables import TABLES

FACTS = {
    "time": "2026-01-02T03:04:05Z",
    "commit": "0123456789",
    "device": {"name": "an H100"},
    "versions": {"torch": "2.11.0"},
}


def speech(streams: int, **changes: Any) -> dict[str, Any]:
    row = {"streams": streams, "succeeded": 8, "audio_s_per_s": 123.4, "streams_with_underrun": 0}
    row |= {f"first_{name}_ms": 10.0 + place for place, name in enumerate(("p10", "p50", "p90", "p95"))}
    return row | {"rtf_p10": 0.02, "rtf_p50": 0.03, "rtf_p90": 0.04} | changes


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Of one file, speech in closed loop, and the peers."""
    shutil.copy(RESULTS / PEERS, tmp_path)
    rows = [speech(1), speech(8, audio_s_per_s=249.9), speech(64, succeeded=0)]
    (tmp_path / "speech_http_closed.json").write_text(json.dumps({**FACTS, "graph_bytes": 2.5e9, "rows": rows}))
    return Results(tmp_path)


def test_the_committed_figures_are_those_of_the_results() -> None:
    assert stale(ROOT, Results()) == [], "run `python -m benchmarks.report`"


def test_every_table_and_plot_is_shown_somewhere() -> None:
    text = "".join(path.read_text() for path in documents(ROOT))
    for name in (*TABLES, *PLOTS):
        assert f"<!-- figures: {name} -->" in text, name


def test_every_result_is_read() -> None:
    """It has a command, fills a table, or is named in a document or where the code uses its figures."""
    text = "".join(path.read_text() for path in (*documents(ROOT), *ROOT.glob("docs/models/*.md")))
    named = {name for name in re.findall(r"[\w*]+(?=\.json|`)", text) if "_" in name}
    named |= {command.result for command in COMMANDS} | {"cpu_baseline", "soak_*", "decode_*_h200", "encoder_*_h200"}
    for path in RESULTS.glob("*.json"):
        assert any(fnmatch(path.stem, name) for name in named), path.name


def encoder_row(**changes: Any) -> dict[str, Any]:
    times = {"eager_ms": 9.0, "replay_ms": 3.0, "graph_ms": 2.0, "graph_p10_ms": 1.9, "graph_p90_ms": 2.1}
    return {"model": "qwen2_vl_2b", "patches": 256, "padding": 0.0, "floor_ms": 1.2, **times, **changes}


def test_a_step_is_judged_by_the_runner_and_another_device_is_named(results: Results) -> None:
    rows = [encoder_row(input="224x224"), encoder_row(input="448x448", floor_ms=2.0)]
    content = json.dumps({**FACTS, "device": {"name": "NVIDIA H200"}, "rows": rows})
    (results.folder / "encoder_qwen2_vl_2b.json").write_text(content)
    table = TABLES["encoders"](results)
    expected = "| Qwen2-VL-2B, H200 | 224 x 224 | 256 | 0.0 % | 9.00 | 3.00 | 2.00 (1.90 to 2.10) | 1.20 | 2.50 |"
    assert expected in table.splitlines()


def test_a_comparison_names_the_peer_and_both_gpus(results: Results) -> None:
    table = TABLES["comparison"](results)
    gpus = "an H100; nano-vllm-voxcpm: NVIDIA H100 80GB HBM3"
    assert f"| VoxCPM2, 1 stream: time to first audio | 11.0 ms | nano-vllm-voxcpm: 39.7 ms | {gpus} |" in table
    assert "64 streams" not in table, "requests that all failed are compared with nothing"
    assert "Qwen2-VL" not in table, "and what was not measured neither"


def test_a_table_without_its_result_names_the_command(results: Results) -> None:
    assert TABLES["lora"](results) == "Not measured yet: `python -m benchmarks.lora` writes `lora.json`."
    table = TABLES["speech-http"](results)
    assert "| 8 | 250 | not measured | 70.9 |" in table
    assert "`speech_http_closed.json`: an H100, torch 2.11.0, commit 0123456, 2026-01-02" in table
    assert "| 64 |" not in table, "requests that all failed give no figure"


def test_only_regions_are_replaced(results: Results) -> None:
    text = "before\n<!-- figures: lora -->\nold\n<!-- /figures -->\nafter 3.14\n"
    new = filled(text, results)
    assert new.startswith("before\n<!-- figures: lora -->\nNot measured yet")
    assert new.endswith("<!-- /figures -->\nafter 3.14\n")
    assert filled(new, results) == new
    with pytest.raises(KeyError, match="unheard"):
        filled("<!-- figures: unheard-of -->\n<!-- /figures -->", results)


@pytest.mark.slow
def test_plots_are_deterministic_and_carry_their_digest(results: Results, tmp_path: Path) -> None:
    plot = PLOTS["speech_streams"]
    plot.draw(results, tmp_path / "a.svg")
    plot.draw(results, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert digest(plot.series(results)) in text
    assert len(text) < 60_000


def test_all_tables_of_performance_are_of_one_commit() -> None:
    text = (ROOT / "docs/performance.md").read_text()
    commits = re.findall(r"^- `\w+\.json`: .*, commit (\w+), \d{4}-\d\d-\d\d$", text, re.M)
    assert len(commits) > 5 and len(set(commits)) == 1, set(commits)


def test_a_load_has_one_table_with_all_engines(results: Results) -> None:
    row = {"streams": 8, "requests": 40, "succeeded": 39, "tokens_per_s": 2998.0, "eager_prefill_share": 0.125}
    row |= {f"first_{name}_ms": 49.0 for name in ("p50", "p95", "p99")} | {"gap_p50_ms": 2.0, "gap_p99_ms": 4.4}
    for suffix, changes, more in (
        ("", {"gpu_busy_share": 0.987, "steps_allow_share": 0.901}, {"api_processes": 4}),
        ("_before", {"steps_share": 0.985}, {}),
        ("_1_api_processes", {}, {"api_processes": 1}),  # of before the share was measured
        ("_vllm", {"tokens_per_s": 1552.0, "eager_prefill_share": None, "gpu_busy_share": None}, {}),
    ):
        engine: dict[str, str | None] = {"engine": "vllm" if "vllm" in suffix else "reprise"}
        engine["engine_version"] = "0.22.1" if "vllm" in suffix else None
        path = results.folder / f"serving_closed_qwen2_vl_2b{suffix}.json"
        path.write_text(json.dumps({**FACTS, **engine, **more, "rows": [row | changes]}))
    lines = TABLES["serving-closed"](results).splitlines()
    assert lines[0].endswith("| eager prefills | GPU busy | of what the steps allow |")
    figures = "49.0 | 49.0 | 49.0 | 2.00 | 4.40 |  | 1 |"
    assert lines[2] == f"| reprise, 4 API processes | 8.00 | 2,998 | {figures} 12.5 % | 98.7 % | 90.1 % |"
    assert lines[3] == f"| vllm 0.22.1 | 8.00 | 1,552 | {figures}  |  |  |"
    assert len(lines) == 7  # a blank line and two sources
    assert "Not measured yet: `python -m benchmarks.serving long qwen2_vl_2b`" in TABLES["serving-long"](results)
