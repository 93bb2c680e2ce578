"""Every table of the documentation, by the name under which a page asks for it.

A table is a list of results, what its rows are, and columns: a heading, and a key of the row or a function that makes
the cell. A step is timed through the runner; the graph that it replays, alone, is called a bare graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.commands import COMMANDS
from benchmarks.report.comparisons import COMPARISONS
from benchmarks.report.formatting import (
    NAMES,
    PEER_NAMES,
    device_mark,
    model_name,
    percent,
    server_of,
    sides,
    sourced_table,
    spread,
)
from benchmarks.report.results import Missing, Result, Results
from service.cli.bench.report import markdown, number

Row = dict[str, Any]
Cell = str | Callable[[Result, Row], str]
"""A key of the row, whose number is shown ("" without one), or a function."""


def _succeeded(result: Result) -> list[Row]:
    return [row for row in result.rows if row["succeeded"]]


def _all(result: Result) -> list[Row]:
    return result.rows


@dataclass(frozen=True)
class Table:
    results: Sequence[str] | Callable[[Results], Sequence[str]]
    columns: Sequence[tuple[str, Cell]]
    rows: Callable[[Result], Iterable[Row]] = _succeeded

    def __call__(self, results: Results) -> str:
        def cell(result: Result, row: Row, made: Cell) -> str:
            if isinstance(made, str):
                return "" if row.get(made) is None else number(row[made])
            return made(result, row)

        def block(result: Result) -> list[list[str]]:
            return [[cell(result, row, made) for _, made in self.columns] for row in self.rows(result)]

        names = self.results(results) if callable(self.results) else self.results
        return sourced_table(results, names, block, [heading for heading, _ in self.columns])


def _commands(prefix: str) -> list[str]:
    return [command.result for command in COMMANDS if command.result.startswith(prefix)]


def _kind(wanted: str) -> Callable[[Result], list[Row]]:
    return lambda result: [row for row in result.rows if row["kind"] == wanted]


def _text(key: str) -> Cell:
    return lambda result, row: str(row[key])


def _span(name: str, median: str = "") -> Cell:
    """Median with the 10th to the 90th percentile."""
    return lambda result, row: spread(row | ({f"{name}_ms": row[median]} if median else {}), name)


def _between(middle: str, low: str, high: str) -> Cell:
    return lambda result, row: f"{number(row[middle])} ({number(row[low])} to {number(row[high])})"


def _model(result: Result, row: Row) -> str:
    return model_name(result, row["model"])


def _lost(result: Result, row: Row) -> str:
    return str(row["refused"] + row["failed"])


def _sustained(result: Result, row: Row) -> str:
    return "yes" if row["sustained"] else "no"


_INPUT: Cell = lambda result, row: sides(row["input"])  # noqa: E731 - a column
_TIMED: list[tuple[str, Cell]] = [
    ("eager, ms", "eager_ms"),
    ("step, ms", _span("replay")),
    ("bare graph, ms", _span("graph")),
    ("roofline, ms", "floor_ms"),
    ("x roofline", "over_floor"),
]


# Single steps.


def h200(results: Results) -> str:
    """Steps on an H200, with those on an H100 in parentheses."""
    columns: list[tuple[str, str, Row]] = [
        ("decode step, 1 row, ms", "decode", {"kind": "decode", "rows": 1}),
        ("32 rows, ms", "decode", {"kind": "decode", "rows": 32}),
        ("128 rows, ms", "decode", {"kind": "decode", "rows": 128}),
        ("prefill, 1,024 tokens, ms", "decode", {"kind": "prefill", "rows": 1024}),
        ("encoder, 448 x 448, ms", "encoder", {"input": "448x448"}),
        ("1024 x 1024, ms", "encoder", {"input": "1024x1024"}),
    ]

    def cell(result: str, wanted: Row) -> str:
        try:
            h200, h100 = (results[name].row(**wanted)["replay_ms"] for name in (f"{result}_h200", result))
        except Missing:
            return ""
        return f"{number(h200)} ({number(h100)})"

    models = [name.removeprefix("decode_") for name in _commands("decode_")]
    rows = [[NAMES[model], *(cell(f"{kind}_{model}", wanted) for _, kind, wanted in columns)] for model in models]
    measured_on_both = [row for row in rows if any(row[1:])]
    return markdown(["model", *(heading for heading, _, _ in columns)], measured_on_both)


_ADAPTERS = {"base graph": "none, the graph without adapters", "0 adapters": "none", "1 adapters": "1 adapter"}


def _plain(result: Result, row: Row) -> Row:
    """The same step in bfloat16."""
    return result.row(quantization="none", kind=row["kind"], rows=row["rows"])


def _ms(row: Row) -> float:
    """Of the step, or of its bare graph where that alone was timed."""
    return float(row["replay_ms"] if "replay_ms" in row else row["graph_ms"])


_PUBLISHED = {"none": "bfloat16", "awq": "AWQ", "fp8": "FP8 in blocks"}


def _step(result: Result, row: Row) -> str:
    of_decoding = "decode row" if row["rows"] == 1 else "decode rows"
    return f"{row['rows']:,} {of_decoding if row['kind'] == 'decode' else 'tokens of a prefill'}"


# Loads at the clients.


def _peer(metric: str) -> Callable[[Results, int], str]:
    def value(results: Results, streams: int) -> str:
        try:
            return number(results.peer_value("nano-vllm-voxcpm", metric, batch=streams))
        except LookupError:
            return ""

    return value


def speech_http(results: Results) -> str:
    """pcm, mp3 beside it, and the best peer, which was measured in process without HTTP."""

    def mp3(result: Result, row: Row) -> str:
        try:
            return number(results["speech_http_mp3"].row(streams=row["streams"])["audio_s_per_s"])
        except Missing:
            return "not measured"

    def nano(metric: str) -> Cell:
        value = _peer(metric)
        return lambda result, row: value(results, row["streams"])

    columns: list[tuple[str, Cell]] = [
        ("streams", _text("streams")),
        ("audio-s per s", "audio_s_per_s"),
        ("as mp3", mp3),
        ("nano-vllm", nano("xrt")),
        ("real-time factor", _between("rtf_p50", "rtf_p10", "rtf_p90")),
        ("nano-vllm", nano("rtf")),
        ("time to first audio, ms", _span("first", "first_p50_ms")),
        ("p95, ms", "first_p95_ms"),
        ("nano-vllm, ms", nano("ttfc_ms")),
        ("underruns", _text("streams_with_underrun")),
    ]
    return Table(["speech_http_closed"], columns)(results)


def _capacity(results: Results) -> str:
    """The highest rate that each open loop sustained."""
    loads = {
        "speech_http_open": ("utterances of 5.12 s", "first_p95_ms", "time to first audio, p95"),
        "chat_http_arrivals_qwen2_vl_7b": ("8 pictures of 224 x 224, one token out", "first_p99_ms", "TTFT, p99"),
    }

    def best(result: Result) -> list[Row]:
        return sorted((row for row in result.rows if row["sustained"]), key=lambda row: row["rate"])[-1:]

    def latency(result: Result, row: Row) -> str:
        _, key, what = loads[result.name]
        return f"{what} {number(row[key])} ms"

    columns: list[tuple[str, Cell]] = [
        ("GPU", lambda result, row: str(result.facts["device"]["name"])),
        ("model", lambda result, row: NAMES[result.facts["model"]]),
        ("load", lambda result, row: loads[result.name][0]),
        ("requests / s", "rate"),
        ("latency", latency),
    ]
    return Table(list(loads), columns, best)(results)


_FIRST = [("TTFT p50, ms", "first_p50_ms"), ("p95, ms", "first_p95_ms"), ("p99, ms", "first_p99_ms")]
_GAP = [("ITL p50, ms", "gap_p50_ms"), ("p99, ms", "gap_p99_ms"), ("longest, ms", "gap_max_ms")]
_RATE = [("tokens/s", "tokens_per_s")]
_LATER = [("first turn, TTFT p50, ms", "turn_1_p50_ms"), ("p99, ms", "turn_1_p99_ms")]
_LATER += [("later turns, p50, ms", "later_p50_ms"), ("p99, ms", "later_p99_ms")]
_LONG = [("prompts", "long_prompts"), ("its TTFT p50, ms", "first_p50_ms"), ("longest, ms", "first_max_ms")]
_LONG += [("streams' ITL p99, ms", "gap_p99_ms"), ("longest, ms", "gap_max_ms")]
_LONG += [("p99 without it, ms", "alone_gap_p99_ms"), ("share of rate kept", "rate_kept")]


def _serving(kind: str, load: tuple[str, str], columns: list[tuple[str, str]]) -> Table:
    """Of benchmarks.serving, with every engine that was measured under this load."""
    name = f"serving_{kind}_qwen2_vl_2b"

    def names(results: Results) -> list[str]:
        others = [result.name for result in results.variants(name) if result.facts["engine"] != "reprise"]
        return [name, *others]

    cells: list[tuple[str, Cell]] = [
        ("engine", lambda result, row: server_of(result) + device_mark(result)),
        load,
        *columns,
        ("errors", lambda result, row: str(row["requests"] - row["succeeded"])),
        ("eager prefills", lambda result, row: percent(row.get("eager_prefill_share"))),
    ]
    if kind != "long":
        cells.append(("GPU busy", lambda result, row: percent(row.get("gpu_busy_share"))))
    if kind not in ("arrivals", "long"):
        cells.append(("of what the steps allow", lambda result, row: percent(row.get("steps_allow_share"))))
    return Table(names, cells, _all)


def _beside_rows(result: Result) -> list[Row]:
    return sorted(_succeeded(result), key=lambda row: (row["load"], row["beside"]))


def _load(result: Result, row: Row) -> str:
    if row["load"] == "chat":
        return f"{number(result.facts['rate'])} chats/s"
    return f"{result.facts['streams']} streams of speech"


def _rate_key(row: Row) -> str:
    return "audio_s_per_s" if row["load"] == "speech" else "tokens_per_s"


def _rate(result: Result, row: Row) -> str:
    return f"{number(row[_rate_key(row)])} {'audio-s' if row['load'] == 'speech' else 'tokens'}/s"


# How a server is operated.


def _of_one(key: str) -> Cell:
    """As a multiple of the same load on one GPU."""

    def cell(result: Result, row: Row) -> str:
        one = result.row(load=row["load"], round=row["round"], gpus=1)
        name = key or _rate_key(row)
        return f"{row[name] / one[name]:.2f}"

    return cell


def commands(results: Results) -> str:
    """Every result, its command, and the commit that it was measured at."""

    def state(name: str) -> list[str]:
        try:
            facts = results[name].facts
        except Missing:
            return ["not yet", ""]
        return [facts["time"][:10], facts["commit"][:7]]

    rows = [
        [
            f"{c.what}, on a CPU" if c.on_cpu else c.what,
            f"`{c.command}`",
            f"`{c.with_peers}`" if c.peers else "",
            f"`{c.result}.json`",
            *state(c.result),
        ]
        for c in COMMANDS
    ]
    return markdown(["what", "command", "with the peers that are installed", "result", "measured", "commit"], rows)


def comparison(results: Results) -> str:
    """The few figures that a reader begins with, and the GPUs that they are of."""
    rows, gpus = [], set()
    for entry in COMPARISONS:
        unit = f" {entry.unit}" if entry.unit else ""
        try:
            ours, gpu = entry.ours(results), results[entry.result].facts["device"]["name"]
        except Missing:
            continue
        version = f" {results.peer_fact('vllm', 'vllm')}" if entry.peer == "vllm" else ""
        theirs = f"{PEER_NAMES[entry.peer]}{version}: {number(entry.theirs(results))}{unit}"
        if (other := results.peer_fact(entry.peer, "gpu")) != gpu:
            theirs += f" ({other})"
        gpus.add(gpu)
        rows.append([entry.what, f"{number(ours)}{unit}", theirs])
    if not rows:
        return "Not measured yet."
    return markdown(["", f"Reprise on {' and '.join(sorted(gpus))}", "best peer"], rows)


def _of_decode(row: Row, key: str) -> str:
    """Of the decode steps of a load in a report."""
    found = [step[key] for step in row["steps"] if step["step"] == "decode" and step.get(key)]
    return number(found[0]) if found else ""


def reports(results: Results) -> str:
    """What `reprise bench --report` wrote."""
    names = [f"reports/{path.stem}" for path in sorted((results.folder / "reports").glob("*.json"))]
    columns: list[tuple[str, Cell]] = [
        ("device", lambda result, row: str(result.facts["device"]["name"])),
        ("model", _text("model")),
        ("load", _text("name")),
        ("tokens/s", "tokens_per_second"),
        ("audio-s per s", "audio_seconds_per_second"),
        ("first token or sound, p50, ms", lambda result, row: number(1e3 * row["first"]["p50"])),
        ("p95, ms", lambda result, row: number(1e3 * row["first"]["p95"])),
        ("rows of a decode step", lambda result, row: _of_decode(row, "rows")),
        ("ms", lambda result, row: _of_decode(row, "ms")),
        ("roofline, ms", lambda result, row: _of_decode(row, "roofline")),
    ]
    return Table(names, columns)(results) if names else "None was sent yet."


TABLES: dict[str, Callable[[Results], str]] = {
    "reports": reports,
    "comparison": comparison,
    "commands": commands,
    "h200": h200,
    "speech-http": speech_http,
    "capacity": _capacity,
    "encoders": Table(
        _commands("encoder_"),
        [
            ("model", _model),
            ("input", _INPUT),
            ("patches", _text("patches")),
            ("padding", lambda result, row: percent(row["padding"])),
            *_TIMED,
        ],
        lambda result: [row for row in result.rows if "graph_ms" in row],
    ),
    "decode": Table(
        _commands("decode_"),
        [
            ("model", _model),
            ("rows", _text("rows")),
            *_TIMED,
            ("tokens/s", lambda result, row: number(1e3 * row["rows"] / row["replay_ms"])),
        ],
        _kind("decode"),
    ),
    "prefill": Table(_commands("decode_"), [("model", _model), ("tokens", _text("rows")), *_TIMED], _kind("prefill")),
    "lora": Table(
        ["lora"],
        [
            ("streams", _text("streams")),
            ("rows have", lambda result, row: _ADAPTERS.get(row["variant"], str(row["variant"]))),
            ("decode, ms", _between("decode_ms", "least_ms", "most_ms")),
            ("more than the graph without adapters", lambda result, row: percent(row["over_base"])),
        ],
        _all,
    ),
    "speech-steps": Table(
        ["speech_steps"],
        [
            ("streams", _text("streams")),
            ("eager step, ms", lambda result, row: number(row["decode_eager_ms"] + row["vae_eager_ms"])),
            ("decode, ms", "decode_ms"),
            ("codec, ms", "vae_ms"),
            ("step, ms", "step_ms"),
            ("first patch after a prefill, ms", "tail_ms"),
            ("roofline, ms", "floor_ms"),
            ("decode x roofline", lambda result, row: number(row["decode_ms"] / row["floor_ms"])),
            ("real-time factor", "rtf"),
            ("audio-s per s", "audio_s_per_s"),
        ],
        _all,
    ),
    "quantization-decode": Table(
        [f"quantization_decode_{model}" for model in ("qwen2_vl_2b", "qwen2_vl_7b")],
        [
            ("model", _model),
            ("step", _step),
            ("bfloat16, ms", lambda result, row: number(_ms(_plain(result, row)))),
            ("fp8, ms", lambda result, row: number(_ms(row))),
            ("of bfloat16", lambda result, row: f"{_ms(row) / _ms(_plain(result, row)):.2f}"),
        ],
        lambda result: [row for row in result.rows if row["quantization"] != "none"],
    ),
    "quantization-published": Table(
        _commands("quantization_published_"),
        [
            ("model", lambda result, row: NAMES[row["model"]]),
            ("step", _step),
            ("weights", lambda result, row: _PUBLISHED[row["quantization"]]),
            ("ms", "replay_ms"),
            ("x roofline", "over_floor"),
            ("of bfloat16", lambda result, row: f"{row['of_bfloat16']:.2f}"),
        ],
        lambda result: [row for row in result.rows if row["quantization"] != "none"],
    ),
    "quantization-quality": Table(
        ["quantization_quality"],
        [
            ("model", lambda result, row: "the embedded one" if row["model"] == "embedded" else row["model"]),
            ("weights", _text("variant")),
            ("KL a token, nats", lambda result, row: f"{row['kl_mean']:.5f}"),
            ("99th percentile", lambda result, row: f"{row['kl_p99']:.4f}"),
            ("same tokens", lambda result, row: f"{100 * row['same_tokens']:.2f} %"),
            ("same answers", lambda result, row: percent(row["same_answers"])),
            ("right answers", lambda result, row: percent(row["right_answers"])),
        ],
        lambda result: [r for r in result.rows if r["variant"] != "float32" or r["right_answers"] is not None],
    ),
    "speech-listeners": Table(
        ["speech_http_listeners"],
        [
            ("listeners", lambda result, row: f"{row['listeners']:.0f}"),
            ("requests/s", "rate"),
            ("requests", _text("requests")),
            ("time to first audio p50 (p25 to p75), ms", _between("first_p50_ms", "first_p25_ms", "first_p75_ms")),
            ("p95, ms", "first_p95_ms"),
            ("p99, ms", "first_p99_ms"),
            ("real-time factor p50", "rtf_p50"),
            ("p95", "rtf_p95"),
            ("audio-s per s", "audio_s_per_s"),
            ("underruns", _text("streams_with_underrun")),
            ("refused or failed", _lost),
            ("sustained", _sustained),
        ],
    ),
    "chat-latency": Table(
        [f"chat_http_latency_{model}" for model in ("qwen2_vl_2b", "qwen3_vl_4b")],
        [
            ("model", lambda result, row: NAMES[result.facts["model"]]),
            ("input", _INPUT),
            ("prompt tokens", "prompt_tokens"),
            ("TTFT, ms", _span("first", "first_p50_ms")),
            ("p99, ms", "first_p99_ms"),
        ],
    ),
    "chat-decode": Table(
        ["chat_http_decode_qwen2_vl_2b"],
        [
            ("streams", _text("streams")),
            ("tokens/s", "tokens_per_s"),
            ("ITL, ms", _between("gap_p50_ms", "gap_p10_ms", "gap_p90_ms")),
            ("TTFT p50, ms", "first_p50_ms"),
            ("p95, ms", "first_p95_ms"),
            ("engine's Python for a step, us", "step_host_us"),
        ],
    ),
    "chat-arrivals": Table(
        ["chat_http_arrivals_qwen2_vl_7b"],
        [
            ("prompts/s", "rate"),
            ("prompts", _text("requests")),
            ("TTFT, mean, ms", "first_mean_ms"),
            ("p50, ms", "first_p50_ms"),
            ("p99, ms", "first_p99_ms"),
            ("answered per s", "requests_per_s"),
            ("refused or failed", _lost),
            ("clients late by, p99, ms", "send_delay_p99_ms"),
            ("sustained", _sustained),
        ],
    ),
    "serving-closed": _serving("closed", ("at any time", "streams"), _RATE + _FIRST + _GAP),
    "serving-template": _serving("template", ("at any time", "streams"), _RATE + _FIRST + _GAP),
    "serving-conversations": _serving("conversations", ("at any time", "conversations"), _RATE + _LATER + _GAP),
    "serving-arrivals": _serving("arrivals", ("a second", "rate"), _RATE + _FIRST + _GAP),
    "serving-long": _serving("long", ("prompt tokens", "long_tokens"), _LONG),
    "beside": Table(
        ["beside_qwen2_vl_2b"],
        [
            ("load", _load),
            ("", lambda result, row: "beside the other" if row["beside"] else "alone"),
            ("rate", _rate),
            ("first token or sound, p50, ms", "first_p50_ms"),
            ("p95, ms", "first_p95_ms"),
            ("p99, ms", "first_p99_ms"),
            *_GAP,
            ("underruns", lambda result, row: str(row.get("streams_with_underrun", ""))),
            ("refused or failed", _lost),
        ],
        _beside_rows,
    ),
    "startup": Table(
        _commands("startup_"),
        [
            ("model", lambda result, row: NAMES[result.facts["model"]]),
            ("weights, GB", lambda result, row: number(result.facts["weight_bytes"] / 1e9)),
            ("kernel cache", lambda result, row: "full" if row["kernel_cache"] == "warm" else "empty"),
            ("ready, s", "ready_s"),
            ("loading, s", "load_s"),
            ("capturing, s", "capture_s"),
            ("captured when ready", lambda result, row: f"{row['captures_at_ready']} of {row['captures']}"),
            ("all captured, s", "captured_s"),
        ],
        _all,
    ),
    "overload": Table(
        ["overload_embedded", "overload_qwen2_vl_2b"],
        [
            ("model", lambda result, row: NAMES.get(result.facts["model"], "the embedded model")),
            ("processors", lambda result, row: str(result.facts["cpus"])),
            ("capacity, 1/s", "capacity_per_s"),
            ("offered, 1/s", "offered_per_s"),
            ("good answers, 1/s", "goodput_per_s"),
            ("of the capacity", lambda result, row: percent(row["goodput_share"])),
            ("refusal in the API process, p99, ms", "refusal_server_p99_ms"),
            ("at the client, p99, ms", "refusal_client_p99_ms"),
        ],
        _all,
    ),
    "gpus": Table(
        ["engines_per_gpu"],
        [
            ("load", _text("load")),
            ("round", lambda result, row: str(row["round"] + 1)),
            ("GPUs", _text("gpus")),
            ("open at once", _text("at_once")),
            ("rate", _rate),
            ("of one GPU's", _of_one("")),
            ("first token or sound, p50, ms", "first_p50_ms"),
            ("p95, ms", "first_p95_ms"),
            ("of one GPU's p95", _of_one("first_p95_ms")),
        ],
        _all,
    ),
}
