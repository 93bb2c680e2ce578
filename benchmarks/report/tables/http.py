"""Tables of benchmarks.speech_http and benchmarks.chat_http: what clients of a server see."""

from __future__ import annotations

from benchmarks.commands import BY_RESULT, COMMANDS
from benchmarks.report.figures import listeners_of
from benchmarks.report.formatting import NAMES, number, sides, sourced_table, spread
from benchmarks.report.results import Missing, Result, Results


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
