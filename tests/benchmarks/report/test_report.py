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
from benchmarks.report.plots import PLOTS, digest, draw
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
    named |= {command.result for command in COMMANDS} | {
        "cpu_baseline", "lora", "soak_*", "*_h200",
    }  # fmt: skip
    for path in RESULTS.glob("*.json"):
        assert any(fnmatch(path.stem, name) for name in named), path.name


def test_a_table_without_its_result_names_the_command(results: Results) -> None:
    command = "python -m benchmarks.speech_steps"
    assert TABLES["speech-steps"](results) == f"Not measured yet: `{command}` writes `speech_steps.json`."
    assert TABLES["lora"](results) == "Not measured yet, `lora.json`.", "its command is gone"
    table = TABLES["speech-http"](results)
    assert "| 8 | 250 | not measured | 70.9 |" in table
    assert "`speech_http_closed.json`: an H100, torch 2.11.0, commit 0123456, 2026-01-02" in table
    assert "| 64 |" not in table, "requests that all failed give no figure"


def test_only_regions_are_replaced(results: Results) -> None:
    text = "before\n<!-- figures: speech-steps -->\nold\n<!-- /figures -->\nafter 3.14\n"
    new = filled(text, results)
    assert new.startswith("before\n<!-- figures: speech-steps -->\nNot measured yet")
    assert new.endswith("<!-- /figures -->\nafter 3.14\n")
    assert filled(new, results) == new
    with pytest.raises(KeyError, match="unheard"):
        filled("<!-- figures: unheard-of -->\n<!-- /figures -->", results)


@pytest.mark.slow
def test_plots_are_deterministic_and_carry_their_digest(results: Results, tmp_path: Path) -> None:
    plot = PLOTS["speech_streams"]
    draw(plot, results, tmp_path / "a.svg")
    draw(plot, results, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert digest(plot.series(results)) in text
    assert len(text) < 60_000


def test_all_tables_of_performance_are_of_one_commit() -> None:
    text = (ROOT / "docs/performance.md").read_text()
    commits = re.findall(r"^- `\w+\.json`: .*, commit (\w+), \d{4}-\d\d-\d\d$", text, re.M)
    assert len(commits) > 5 and len(set(commits)) == 1, set(commits)


def test_reports_that_were_sent_are_a_table(results: Results) -> None:
    assert TABLES["reports"](results) == "None was sent yet."
    step = {"step": "decode", "rows": 7.5, "ms": 3.0, "roofline": 1.5}
    row = {"model": "m", "name": "8 at a time", "succeeded": 8, "first": {"p50": 0.0125, "p95": 0.5}}
    row |= {"tokens_per_second": 12.5, "steps": [{"step": "encoder", "ms": 9.0}, step]}
    (results.folder / "reports").mkdir()
    (results.folder / "reports" / "mine.json").write_text(json.dumps({**FACTS, "rows": [row]}))
    table = TABLES["reports"](results)
    assert "| an H100 | m | 8 at a time | 12.5 |  | 12.5 | 500 | 7.50 | 3.00 | 1.50 |" in table
    assert "`reports/mine.json`: an H100" in table
