"""Tables of what clients of a server see, and of the server's processes: HTTP, serving, start, caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.commands import BY_RESULT, COMMANDS
from benchmarks.comparisons import COMPARISONS
from benchmarks.figures import listeners_of
from benchmarks.formatting import (
    NAMES,
    PEER_NAMES,
    absent,
    device_mark,
    markdown,
    number,
    percent,
    sides,
    sourced_table,
    spread,
)
from benchmarks.reading import Missing, Result, Results


def _nano(results: Results, metric: str, streams: int) -> str:
    try:
        return number(results.peer_value("nano-vllm-voxcpm", metric, batch=streams))
    except LookupError:
        return ""


def speech_http(results: Results) -> str:
    """pcm, mp3 beside it, and the best peer, which was measured in process without HTTP."""

    def mp3(streams: int) -> str:
        try:
            return number(results["speech_http_mp3"].row(streams=streams)["audio_s_per_s"])
        except Missing:
            return "not measured"

    def block(result: Result) -> list[list[str]]:
        return [
            [
                str(row["streams"]),
                number(row["audio_s_per_s"]),
                mp3(row["streams"]),
                _nano(results, "xrt", row["streams"]),
                f"{number(row['rtf_p50'])} ({number(row['rtf_p10'])} to {number(row['rtf_p90'])})",
                _nano(results, "rtf", row["streams"]),
                spread(row | {"first_ms": row["first_p50_ms"]}, "first"),
                number(row["first_p95_ms"]),
                _nano(results, "ttfc_ms", row["streams"]),
                str(row["streams_with_underrun"]),
            ]
            for row in result.rows
            if row["succeeded"]
        ]

    head = ["streams", "audio-s per s", "as mp3", "nano-vllm", "real-time factor", "nano-vllm"]
    head += ["time to first audio, ms", "p95, ms", "nano-vllm, ms", "underruns"]
    return sourced_table(results, ["speech_http_closed"], block, head)


def speech_open(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [
                number(row["rate"]),
                str(row["requests"]),
                number(row["first_p50_ms"]),
                number(row["first_p95_ms"]),
                number(row["first_p99_ms"]),
                str(row["streams_with_underrun"]),
                str(row["refused"] + row["failed"]),
                number(row["audio_s_per_s"]),
                "yes" if row["sustained"] else "no",
            ]
            for row in result.rows
            if row["succeeded"]
        ]

    head = [
        "requests/s",
        "requests",
        "time to first audio p50, ms",
        "p95, ms",
        "p99, ms",
        "underruns",
        "refused or failed",
    ]
    return sourced_table(results, ["speech_http_open"], block, [*head, "audio-s per s", "sustained"])


def speech_listeners(results: Results, *, elsewhere: bool = False) -> str:
    """Open loop for minutes, by the listeners at any time. elsewhere: instead, those of other hosts and commits."""

    def block(result: Result) -> list[list[str]]:
        return [
            [
                f"{row['listeners']:.0f}",
                number(row["rate"]),
                str(row["requests"]),
                f"{number(row['first_p50_ms'])} ({number(row['first_p25_ms'])} to {number(row['first_p75_ms'])})",
                *(number(row[f"first_{name}_ms"]) for name in ("p95", "p99")),
                *(number(row[f"rtf_{name}"]) for name in ("p50", "p95")),
                number(row["audio_s_per_s"]),
                str(row["streams_with_underrun"]),
                str(row["refused"] + row["failed"]),
                "yes" if row["sustained"] else "no",
            ]
            for row in result.rows
            if row["succeeded"]
        ]

    head = ["listeners", "requests/s", "requests", "time to first audio p50 (p25 to p75), ms", "p95, ms", "p99, ms"]
    head += ["real-time factor p50", "p95", "audio-s per s", "underruns", "refused or failed", "sustained"]
    main = "speech_http_listeners"
    others = [result.name for result in listeners_of(results) if result.name != main]
    return sourced_table(results, others if elsewhere else [main], block, head)


def chat_latency(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [
                NAMES[result.facts["model"]],
                sides(row["input"]),
                number(row["prompt_tokens"]),
                spread(row | {"first_ms": row["first_p50_ms"]}, "first"),
                number(row["first_p99_ms"]),
                str(row["cached_tokens"]),
            ]
            for row in result.rows
            if row["succeeded"]
        ]

    sources = [f"chat_http_latency_{name}" for name in ("qwen2_vl_2b", "qwen3_vl_4b")]
    return sourced_table(
        results, sources, block, ["model", "input", "prompt tokens", "TTFT, ms", "p99, ms", "cached tokens"]
    )


def chat_decode(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [
                str(row["streams"]),
                number(row["tokens_per_s"]),
                f"{number(row['gap_p50_ms'])} ({number(row['gap_p10_ms'])} to {number(row['gap_p90_ms'])})",
                number(row["first_p50_ms"]),
                number(row["first_p95_ms"]),
                number(row["step_host_us"]),
            ]
            for row in result.rows
            if row["succeeded"]
        ]

    head = ["streams", "tokens/s", "ITL, ms", "TTFT p50, ms", "p95, ms"]
    head += ["engine's Python for a step, us"]
    return sourced_table(results, ["chat_http_decode_qwen2_vl_2b"], block, head)


def chat_arrivals(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [
                number(row["rate"]),
                str(row["requests"]),
                number(row["first_mean_ms"]),
                number(row["first_p50_ms"]),
                number(row["first_p99_ms"]),
                number(row["requests_per_s"]),
                str(row["refused"] + row["failed"]),
                number(row["send_delay_p99_ms"]),
                "yes" if row["sustained"] else "no",
            ]
            for row in result.rows
            if row["succeeded"]
        ]

    head = ["prompts/s", "prompts", "TTFT, mean, ms", "p50, ms", "p99, ms", "answered per s"]
    head += ["refused or failed", "clients late by, p99, ms", "sustained"]
    return sourced_table(results, ["chat_http_arrivals_qwen2_vl_7b"], block, head)


def chat_pairs(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [
                "replayed" if row["graphs"] else "eager",
                number(row["first_mean_ms"]),
                number(row["first_p50_ms"]),
                number(row["first_p90_ms"]),
                number(row["first_p99_ms"]),
                str(row["cached_tokens"]),
            ]
            for row in result.rows
            if row["succeeded"]
        ]

    head = ["encoder and steps", "TTFT, mean, ms", "p50, ms", "p90, ms", "p99, ms", "cached tokens"]
    return sourced_table(results, ["chat_http_pairs_kimi_vl_a3b"], block, head)


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


def startup(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [
                NAMES[result.facts["model"]],
                number(result.facts["weight_bytes"] / 1e9),
                "full" if row["kernel_cache"] == "warm" else "empty",
                number(row["ready_s"]),
                number(row["load_s"]),
                number(row["capture_s"]),
                f"{row['captures_at_ready']} of {row['captures']}",
                number(row["captured_s"]),
            ]
            for row in result.rows
        ]

    head = ["model", "weights, GB", "kernel cache", "ready, s", "loading, s", "capturing, s", "captured when ready"]
    return sourced_table(
        results, [c.result for c in COMMANDS if c.result.startswith("startup_")], block, [*head, "all captured, s"]
    )


def caches(results: Results) -> str:
    """The proof that no timed request was answered from a cache."""

    def block(result: Result) -> list[list[str]]:
        facts = result.facts
        return [
            [
                BY_RESULT[result.name].what,
                number(facts["encoder_cache_hits"]),
                number(facts["encoder_cache_misses"]),
                number(facts["prefix_cache_hit_tokens"]),
            ]
        ]

    head = ["load", "encoder cache hits", "pictures encoded", "prefix cache tokens hit"]
    return sourced_table(results, [c.result for c in COMMANDS if "_http_" in c.result], block, head)


_FIRST = [("TTFT p50, ms", "first_p50_ms"), ("p95, ms", "first_p95_ms"), ("p99, ms", "first_p99_ms")]
_GAP = [("ITL p50, ms", "gap_p50_ms"), ("p99, ms", "gap_p99_ms"), ("longest, ms", "gap_max_ms")]
_RATE = [("tokens/s", "tokens_per_s")]
_LATER = [("first turn, TTFT p50, ms", "turn_1_p50_ms"), ("p99, ms", "turn_1_p99_ms")]
_LATER += [("later turns, p50, ms", "later_p50_ms"), ("p99, ms", "later_p99_ms")]
_LONG = [("prompts", "long_prompts"), ("its TTFT p50, ms", "first_p50_ms"), ("longest, ms", "first_max_ms")]
_LONG += [("streams' ITL p99, ms", "gap_p99_ms"), ("longest, ms", "gap_max_ms")]
_LONG += [("p99 without it, ms", "alone_gap_p99_ms"), ("share of rate kept", "rate_kept")]


def server_of(result: Result) -> str:
    """What was under a load of benchmarks.serving: the engine, its version, its API processes where there are more."""
    engine = " ".join(filter(None, (result.facts["engine"], result.facts["engine_version"])))
    flags = result.facts.get("flags", [])
    asked = flags[flags.index("--api-processes") + 1] if "--api-processes" in flags else "1"
    count = int(result.facts.get("api_processes") or asked)
    return f"{engine}, {count} API processes" if count > 1 else engine


def _variant(result: Result, name: str) -> str:
    """What the name of a result says beyond that of its load, except for engines and numbers of API processes."""
    said = result.name.removeprefix(name).strip("_").replace("_", " ")
    return f", {said}" if said and not said.endswith("api processes") and said != result.facts["engine"] else ""


def gpu_busy(row: dict[str, Any]) -> float | None:
    """The share of a load's time in which steps ran (older results: steps_share); None where it is not told."""
    share: float | None = row.get("gpu_busy_share", row.get("steps_share"))
    return share


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


def capacity(results: Results) -> str:
    """The highest rate that each open loop sustained."""
    loads = {
        "speech_http_open": ("utterances of 5.12 s", "first_p95_ms", "time to first audio, p95"),
        "chat_http_arrivals_qwen2_vl_7b": (
            "8 pictures of 224 x 224, one token out",
            "first_p99_ms",
            "TTFT, p99",
        ),
    }

    def block(result: Result) -> list[list[str]]:
        load, key, latency = loads[result.name]
        held = [row for row in result.rows if row["sustained"]]
        if not held:
            return []
        best = max(held, key=lambda row: row["rate"])
        gpu, model = result.facts["device"]["name"], NAMES[result.facts["model"]]
        return [[gpu, model, load, number(best["rate"]), f"{latency} {number(best[key])} ms"]]

    return sourced_table(results, list(loads), block, ["GPU", "model", "load", "requests / s", "latency"])


def comparison(results: Results) -> str:
    """The few figures that a reader begins with."""
    rows = []
    for entry in COMPARISONS:
        unit = f" {entry.unit}" if entry.unit else ""
        try:
            ours, gpu = entry.ours(results), results[entry.result].facts["device"]["name"]
        except Missing:
            continue
        theirs = entry.theirs
        if callable(theirs):
            version = f" {results.peer_fact('vllm', 'vllm')}" if entry.peer == "vllm" else ""
            theirs = f"{PEER_NAMES[entry.peer]}{version}: {number(theirs(results))}{unit}"
            if (other := results.peer_fact(entry.peer, "gpu")) != gpu:
                gpu = f"{gpu}; {entry.peer}: {other}"
        rows.append([entry.what, f"{number(ours)}{unit}", theirs, gpu])
    return markdown(["", "Reprise", "best peer", "GPU"], rows) if rows else "Not measured yet."
