"""Tables of single steps and of memory, without a server: encoders, decode, prefill, speech steps, the sampler,
adapters, 8-bit weights. A step is timed through the runner; the graph that it replays, alone, is called a bare graph.
"""

from __future__ import annotations

from typing import Any

from benchmarks.commands import BY_RESULT, COMMANDS
from benchmarks.report.figures import floor_ms, of_bfloat16, over_floor
from benchmarks.report.formatting import (
    NAMES,
    absent,
    markdown,
    model_name,
    number,
    percent,
    sides,
    sourced_table,
    spread,
)
from benchmarks.report.results import Missing, Result, Results


def _timed(row: dict[str, Any]) -> list[str]:
    """The cells under _TIMED."""
    times = [number(row["eager_ms"]), spread(row, "replay"), spread(row, "graph")]
    return [*times, number(floor_ms(row)), number(over_floor(row))]


_TIMED = ["eager, ms", "step, ms", "bare graph, ms", "roofline, ms", "x roofline"]


def encoders(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [
                model_name(result, row["model"]),
                sides(row["input"]),
                str(row["patches"]),
                f"{100 * row['padding']:.1f} %",
                *_timed(row),
            ]
            for row in result.rows
            if "graph_ms" in row
        ]

    head = ["model", "input", "patches", "padding", *_TIMED]
    return sourced_table(results, [c.result for c in COMMANDS if c.result.startswith("encoder_")], block, head)


def decode(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [
                model_name(result, row["model"]),
                str(row["rows"]),
                *_timed(row),
                number(1e3 * row["rows"] / row["replay_ms"]),
            ]
            for row in result.rows
            if row["kind"] == "decode"
        ]

    head = ["model", "rows", *_TIMED, "tokens/s"]
    return sourced_table(results, [c.result for c in COMMANDS if c.result.startswith("decode_")], block, head)


def prefill(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [model_name(result, row["model"]), str(row["rows"]), *_timed(row)]
            for row in result.rows
            if row["kind"] == "prefill"
        ]

    head = ["model", "tokens", *_TIMED]
    return sourced_table(results, [c.result for c in COMMANDS if c.result.startswith("decode_")], block, head)


_Columns = list[tuple[str, str, dict[str, Any]]]
"""Heading, benchmark and row of each column."""

_H200: _Columns = [
    ("decode step, 1 row, ms", "decode", {"kind": "decode", "rows": 1}),
    ("32 rows, ms", "decode", {"kind": "decode", "rows": 32}),
    ("128 rows, ms", "decode", {"kind": "decode", "rows": 128}),
    ("prefill, 1,024 tokens, ms", "decode", {"kind": "prefill", "rows": 1024}),
    ("encoder, 448 x 448, ms", "encoder", {"input": "448x448"}),
    ("1024 x 1024, ms", "encoder", {"input": "1024x1024"}),
]
_AFTER: _Columns = [
    *(
        (f"decode step, {rows} row{'s' * (rows > 1)}, ms", "decode", {"kind": "decode", "rows": rows})
        for rows in (1, 8, 32, 128)
    ),
    *((f"prefill, {tokens:,} tokens, ms", "decode", {"kind": "prefill", "rows": tokens}) for tokens in (384, 1024)),
]


def _compared(results: Results, variant: str, columns: _Columns, timed: str) -> str:
    """Steps of chat models in results that end with `variant`, with those of the tables in parentheses."""

    def cell(result: str, wanted: dict[str, Any]) -> str:
        try:
            times = [results[name].row(**wanted)[timed] for name in (f"{result}_{variant}", result)]
        except Missing:
            return ""
        return f"{number(times[0])} ({number(times[1])})"

    models = [c.result.removeprefix("decode_") for c in COMMANDS if c.result.startswith("decode_")]
    rows = [[NAMES[model], *(cell(f"{kind}_{model}", wanted) for _, kind, wanted in columns)] for model in models]
    return markdown(["model", *(heading for heading, _, _ in columns)], rows)


def h200(results: Results) -> str:
    """Steps on an H200, with those on an H100 in parentheses."""
    return _compared(results, "h200", _H200, "replay_ms")


def decode_after(results: Results) -> str:
    """Bare graphs of a later commit, which another host's processors do not change, with the earlier in parentheses."""
    return _compared(results, "after", _AFTER, "graph_ms")


def sampler(results: Results) -> str:
    """A row for each set of parameters, a column for each number of rows."""
    try:
        result = results["sampler"]
    except Missing:
        return absent("sampler")
    batches = sorted({row["rows"] for row in result.rows})
    cases = dict.fromkeys(row["case"] for row in result.rows)
    rows = [[case, *(number(result.row(case=case, rows=each)["graph_ms"]) for each in batches)] for case in cases]
    head = ["parameters", *(f"{each} row{'s' * (each > 1)}, ms" for each in batches)]
    return f"{markdown(head, rows)}\n\n- {result.source}"


def lora(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [
                str(row["streams"]),
                _VARIANTS.get(row["variant"], row["variant"]),
                f"{number(row['decode_ms'])} ({number(row['least_ms'])} to {number(row['most_ms'])})",
                percent(row["over_base"]),
            ]
            for row in result.rows
        ]

    head = ["streams", "rows have", "decode, ms", "more than the graph without adapters"]
    return sourced_table(results, ["lora"], block, head)


_VARIANTS = {"base graph": "none, the graph without adapters", "0 adapters": "none", "1 adapters": "1 adapter"}


def speech_steps(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [
                str(row["streams"]),
                number(row["decode_eager_ms"] + row["vae_eager_ms"]),
                number(row["decode_ms"]),
                number(row["vae_ms"]),
                number(row["step_ms"]),
                number(row["tail_ms"]),
                number(row["floor_ms"]),
                number(row["decode_ms"] / row["floor_ms"]),
                number(row["rtf"]),
                number(row["audio_s_per_s"]),
            ]
            for row in result.rows
        ]

    head = [
        "streams",
        "eager step, ms",
        "decode, ms",
        "codec, ms",
        "step, ms",
        "first patch after a prefill, ms",
        "roofline, ms",
    ]
    head += ["decode x roofline", "real-time factor", "audio-s per s"]
    return sourced_table(results, ["speech_steps"], block, head)


def memory(results: Results) -> str:
    """Of every server that a load ran against, as far as it could be asked at the end."""

    def block(result: Result) -> list[list[str]]:
        used = result.facts["gpu_used_bytes"]
        return [
            [
                BY_RESULT[result.name].what,
                NAMES[result.facts["model"]],
                number(result.facts["graph_bytes"] / 1e9),
                number(used / 1e9) if used is not None else "",
            ]
        ]

    head = ["load", "model", "captured graphs, GB", "whole GPU in use, GB"]
    return sourced_table(results, [c.result for c in COMMANDS if "_http_" in c.result], block, head)


def quantization_decode(results: Results) -> str:
    """Steps and prefills with weights in e4m3 beside the same in bfloat16, measured on the same GPU one after the
    other."""

    def block(result: Result) -> list[list[str]]:
        rows = []
        for row in result.rows:
            if row["quantization"] == "none":
                continue
            plain = result.row(quantization="none", kind=row["kind"], rows=row["rows"])
            of_decoding = "decode row" if row["rows"] == 1 else "decode rows"
            what = of_decoding if row["kind"] == "decode" else "tokens of a prefill"
            rows.append(
                [
                    model_name(result, row["model"]),
                    f"{row['rows']:,} {what}",
                    number(plain.get("replay_ms", plain["graph_ms"])),
                    number(row.get("replay_ms", row["graph_ms"])),
                    f"{of_bfloat16(result, row):.2f}",
                ]
            )
        return rows

    names = [f"quantization_decode_{model}" for model in ("qwen2_vl_2b", "qwen2_vl_7b")]
    return sourced_table(results, names, block, ["model", "step", "bfloat16, ms", "fp8, ms", "of bfloat16"])


def quantization_quality(results: Results) -> str:
    """What is left of the answers in float32."""

    def block(result: Result) -> list[list[str]]:
        return [
            [
                "the embedded one" if row["model"] == "embedded" else row["model"],
                row["variant"],
                f"{row['kl_mean']:.5f}",
                f"{row['kl_p99']:.4f}",
                f"{100 * row['same_tokens']:.2f} %",
                f"{100 * row['same_answers']:.1f} %",
                "" if row["right_answers"] is None else f"{100 * row['right_answers']:.1f} %",
            ]
            for row in result.rows
            if row["variant"] != "float32" or row["right_answers"] is not None
        ]

    head = [
        "model",
        "weights",
        "KL a token, nats",
        "99th percentile",
        "same tokens",
        "same answers",
        "right answers",
    ]
    return sourced_table(results, ["quantization_quality"], block, head)
