"""Tables of single steps and of memory, without a server: encoders, decode, prefill, speech steps, 8-bit weights."""

from __future__ import annotations

from benchmarks.commands import BY_RESULT, COMMANDS
from benchmarks.formatting import NAMES, number, sides, sourced_table, spread
from benchmarks.reading import Result, Results


def encoders(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [
                NAMES[row["model"]],
                sides(row["input"]),
                str(row["patches"]),
                f"{100 * row['padding']:.1f} %",
                number(row["eager_ms"]),
                spread(row, "graph"),
                number(row["floor_ms"]),
                number(row["over_floor"]),
            ]
            for row in result.rows
            if "graph_ms" in row
        ]

    head = ["model", "input", "patches", "padding", "eager, ms", "replayed, ms", "roofline, ms", "x roofline"]
    return sourced_table(results, [c.result for c in COMMANDS if c.result.startswith("encoder_")], block, head)


def decode(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [
                NAMES[row["model"]],
                str(row["rows"]),
                number(row["eager_ms"]),
                spread(row, "graph"),
                number(row["floor_ms"]),
                number(row["over_floor"]),
                number(1e3 * row["rows"] / row["replay_ms"]),
            ]
            for row in result.rows
            if row["kind"] == "decode"
        ]

    head = ["model", "rows", "eager, ms", "replayed, ms", "roofline, ms", "x roofline", "tokens/s"]
    return sourced_table(results, [c.result for c in COMMANDS if c.result.startswith("decode_")], block, head)


def prefill(results: Results) -> str:
    def block(result: Result) -> list[list[str]]:
        return [
            [NAMES[row["model"]], str(row["rows"]), number(row["eager_ms"]), spread(row, "graph")]
            for row in result.rows
            if row["kind"] == "prefill"
        ]

    head = ["model", "tokens", "eager, ms", "replayed, ms"]
    return sourced_table(results, [c.result for c in COMMANDS if c.result.startswith("decode_")], block, head)


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
                    NAMES[row["model"]],
                    f"{row['rows']:,} {what}",
                    number(plain["graph_ms"]),
                    number(row["graph_ms"]),
                    f"{row['of_bfloat16']:.2f}",
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
