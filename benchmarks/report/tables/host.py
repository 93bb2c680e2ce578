"""Tables of what the processors do for a request: the API process alone, and a first token's way beside the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.report.formatting import absent, markdown, number
from benchmarks.report.results import Missing, Results

API_PROCESS: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("8 JPEGs decoded: the same code, to compare the runs by", {"run": "parts", "part": "JPEG"}, "cpu_ms", "ms"),
    ("a token, one an event", {"run": "decode", "kind": "unhurried"}, "cpu_us_per_token", "us"),
    ("the same with stop strings", {"run": "decode", "kind": "unhurried, stop strings"}, "cpu_us_per_token", "us"),
    ("a patch of speech as pcm", {"run": "speech", "format": "pcm", "step_ms": 85.0}, "cpu_us_per_chunk", "us"),
    ("a patch of speech as mp3", {"run": "speech", "format": "mp3"}, "cpu_us_per_chunk", "us"),
    ("a chat request of 32 tokens", {"run": "requests", "request": "32 text tokens"}, "cpu_ms_per_request", "ms"),
    (
        "a chat request with 8 JPEGs of 224 x 224",
        {"run": "requests", "request": "8 JPEGs of 224 x 224, 32 text tokens"},
        "cpu_ms_per_request",
        "ms",
    ),
    ("a speech request", {"run": "requests", "request": "speech, 12 words"}, "cpu_ms_per_request", "ms"),
)
"""What is told, the row that tells it, its key and unit."""


def api_process(results: Results) -> str:
    """What the API process alone costs, before and after it was made cheaper, and now."""
    try:
        runs = [results[name] for name in ("api_process_before", "api_process_after", "api_process")]
    except Missing:
        return absent("api_process")
    rows = [
        [what, *(f"{number(run.row(**wanted)[key])} {unit}" for run in runs)] for what, wanted, key, unit in API_PROCESS
    ]
    sources = "\n".join(f"- {run.source}" for run in runs)
    return f"{markdown(['', 'before', 'after', 'now'], rows)}\n\n{sources}"


HOST_PATH = (
    ("client to API process", "received_ms"),
    ("request parsed", "parsed_ms"),
    ("prompt and media prepared", "prepared_ms"),
    ("given to the link", "submitted_ms"),
    ("taken by the engine", "taken_ms"),
    ("scheduled and launched", "launched_ms"),
    ("read from the GPU", "answered_ms"),
    ("back in the API process", "heard_ms"),
    ("event made", "written_ms"),
    ("event at the client", "read_ms"),
    ("**all together**", "host_ms"),
)
"""Stages of a first token's way beside the GPU, and their keys."""


def host_path(results: Results) -> str:
    """A first token's way beside the GPU, and processor time of requests, of two checkouts where they were compared."""
    return _host_path(results, "host_path", HOST_PATH)


def shared_pixels(results: Results) -> str:
    """The same of the stages that bring a request to the engine, before and with pixels in shared memory (0dcc8e7)."""
    stages = [stage for stage in HOST_PATH if stage[1] in ("submitted_ms", "taken_ms", "launched_ms", "host_ms")]
    return _host_path(results, "host_path_pixels", stages)


def _host_path(results: Results, name: str, stages: Sequence[tuple[str, str]]) -> str:
    try:
        result = results[name]
    except Missing:
        return absent(name)
    alone = [row for row in result.rows if row["run"] == "alone"]
    together = [row for row in result.rows if row["run"] == "together"]
    rows = [[what, *(f"{number(row[key])} ms" for row in alone)] for what, key in stages]
    for role, name in (("api", "API process"), ("engine", "engine")):
        for lanes in sorted({row["lanes"] for row in together}):
            cells = [number(row[f"{role}_cpu_ms"]) for row in together if row["lanes"] == lanes]
            rows.append([f"{name}, processor time with {lanes} at a time", *(f"{cell} ms" for cell in cells)])
    before = f"; before: commit {result.facts['before'][:7]}" if "before" in result.facts else ""
    table = markdown(["", *(f"{row['input']}, {row['code']}" for row in alone)], rows)
    return f"{table}\n\n- {result.source}{before}"
