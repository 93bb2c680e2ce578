"""Tables of benchmarks.serving: every load with every engine that was measured under it."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.report.figures import gpu_busy
from benchmarks.report.formatting import device_mark, number, percent, server_of, sourced_table
from benchmarks.report.results import Result, Results

_FIRST = [("TTFT p50, ms", "first_p50_ms"), ("p95, ms", "first_p95_ms"), ("p99, ms", "first_p99_ms")]
_GAP = [("ITL p50, ms", "gap_p50_ms"), ("p99, ms", "gap_p99_ms"), ("longest, ms", "gap_max_ms")]
_RATE = [("tokens/s", "tokens_per_s")]
_LATER = [("first turn, TTFT p50, ms", "turn_1_p50_ms"), ("p99, ms", "turn_1_p99_ms")]
_LATER += [("later turns, p50, ms", "later_p50_ms"), ("p99, ms", "later_p99_ms")]
_LONG = [("prompts", "long_prompts"), ("its TTFT p50, ms", "first_p50_ms"), ("longest, ms", "first_max_ms")]
_LONG += [("streams' ITL p99, ms", "gap_p99_ms"), ("longest, ms", "gap_max_ms")]
_LONG += [("p99 without it, ms", "alone_gap_p99_ms"), ("share of rate kept", "rate_kept")]


def _variant(result: Result, name: str) -> str:
    """What the name of a result says beyond that of its load, except for engines and numbers of API processes."""
    said = result.name.removeprefix(name).strip("_").replace("_", " ")
    return f", {said}" if said and not said.endswith("api processes") and said != result.facts["engine"] else ""


def serving(
    kind: str, what: tuple[str, str], columns: list[tuple[str, str]], *, elsewhere: bool = False
) -> Callable[[Results], str]:
    """A table of benchmarks.serving, with every engine that was measured. what: heading and key of a row's load.
    elsewhere: instead, what Reprise did on other hosts, with other settings or at earlier commits."""
    name = f"serving_{kind}_qwen2_vl_2b"
    busy, reached = kind != "long", kind not in ("arrivals", "long")

    def block(result: Result) -> list[list[str]]:
        return [
            [
                server_of(result) + _variant(result, name) + device_mark(result),
                number(row[what[1]]),
                *(number(row[key]) if key in row else "" for _, key in columns),
                str(row["requests"] - row["succeeded"]),
                percent(row.get("eager_prefill_share")),
                *([percent(gpu_busy(row))] if busy else []),
                *([percent(row.get("steps_allow_share"))] if reached else []),
            ]
            for row in result.rows
        ]

    def table(results: Results) -> str:
        others = [result for result in results.variants(name) if result.name != name]
        names = [result.name for result in others if (result.facts["engine"] == "reprise") == elsewhere]
        head = ["engine", what[0], *(heading for heading, _ in columns), "errors", "eager prefills"]
        head += ["GPU busy"] if busy else []
        head += ["of what the steps allow"] if reached else []
        return sourced_table(results, names if elsewhere else [name, *names], block, head)

    return table


_SERVING: dict[str, tuple[tuple[str, str], list[tuple[str, str]]]] = {
    "closed": (("at any time", "streams"), _RATE + _FIRST + _GAP),
    "template": (("at any time", "streams"), _RATE + _FIRST + _GAP),
    "conversations": (("at any time", "conversations"), _RATE + _LATER + _GAP),
    "arrivals": (("a second", "rate"), _RATE + _FIRST + _GAP),
    "long": (("prompt tokens", "long_tokens"), _LONG),
}
SERVING = {f"serving-{kind}": serving(kind, *columns) for kind, columns in _SERVING.items()}
SERVING |= {f"serving-{kind}-elsewhere": serving(kind, *columns, elsewhere=True) for kind, columns in _SERVING.items()}
"""Tables of the serving benchmark, by the names under which pages ask for them."""
