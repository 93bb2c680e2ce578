"""The targets for one H100, with the figure of benchmarks/results that each is judged by, and the best peer's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.report import figures
from benchmarks.report.figures import Figure, Peer
from benchmarks.report.formatting import NAMES, sides


@dataclass(frozen=True)
class StepOf:
    """A step whose multiple of the roofline is a target. size: rows or streams, tokens, or an encoder's input."""

    kind: Literal["decode", "encoder", "prefill"]
    model: str
    size: str


@dataclass(frozen=True)
class Target:
    """limit: ours should be at most (or, with `at_least`, at least) this; further: what was aimed at beyond it. peer: a
    figure of benchmarks/results, or the text of a published one. result: the file that ours comes from, where it may
    be of another device than an H100."""

    what: str
    unit: str
    limit: float | None
    ours: Figure
    peer: Peer | str = ""
    at_least: bool = False
    further: float | None = None
    result: str = ""
    step: StepOf | None = None

    def met(self, value: float) -> bool | None:
        return None if self.limit is None else self._holds(value, self.limit)

    def met_further(self, value: float) -> bool | None:
        return None if self.further is None else self._holds(value, self.further)

    def _holds(self, value: float, limit: float) -> bool:
        return value >= limit if self.at_least else value <= limit


_PUBLISHED = "{} (published)".format
_ROOFLINE = "x roofline"
_QWEN_2_5 = ("qwen2_5_vl_3b", "qwen2_5_vl_7b")
_QWEN3_DENSE = ("qwen3_vl_2b", "qwen3_vl_4b", "qwen3_vl_8b")
_QWEN3_MIXTURE = "qwen3_vl_30b_a3b"


def _speech() -> Iterator[Target]:
    yield Target(
        "VoxCPM2, 1 stream: real-time factor",
        "",
        0.035,
        figures.speech(1, "rtf_p50"),
        lambda results: results.peer_value("vllm-omni", "rtf", batch=1),
    )
    yield Target(
        "VoxCPM2, 1 stream: time to first audio at the client",
        "ms",
        7,
        figures.speech(1, "first_p50_ms"),
        figures.nano("ttfc_ms", 1),
    )
    for streams, rate, first in ((8, 250, 30), (32, 560, 60), (64, 720, 75)):
        yield Target(
            f"VoxCPM2, {streams} streams: seconds of audio per second",
            "",
            rate,
            figures.speech(streams, "audio_s_per_s"),
            figures.nano("xrt", streams),
            at_least=True,
        )
        yield Target(
            f"VoxCPM2, {streams} streams: time to first audio, p95",
            "ms",
            first,
            figures.speech(streams, "first_p95_ms"),
            figures.nano("ttfc_ms", streams),
        )
    yield Target(
        "VoxCPM2, 64 streams as mp3: seconds of audio per second",
        "",
        550,
        figures.mp3(64, "audio_s_per_s"),
        at_least=True,
    )
    yield Target("the same: time to first audio, p95", "ms", 120, figures.mp3(64, "first_p95_ms"))
    yield Target(
        "VoxCPM2, open loop, 5 s utterances: highest rate with p95 of time to first audio <= 150 ms and no underrun",
        "requests/s",
        60,
        figures.highest("speech_http_open"),
        _PUBLISHED("vllm-omni, H100 PCIe: 1 at 194 ms"),
        at_least=True,
    )
    yield Target(
        "VoxCPM2, live listeners, held for five minutes under the same conditions",
        "",
        640,
        figures.held_listeners,
        result="speech_http_listeners",
        at_least=True,
        further=700,
    )
    for streams, limit in ((1, 1.5), (8, 1.7), (16, 1.9), (32, 1.5), (64, 1.3)):
        what = f"VoxCPM2 decode step, {streams} stream{'s' * (streams > 1)}"
        ours, step = figures.speech_multiple(streams), StepOf("decode", "voxcpm2", str(streams))
        yield Target(what, _ROOFLINE, limit, ours, result="speech_steps", step=step)
    yield Target(
        "VoxCPM2 decode step, 64 streams with 11 adapters: more than without",
        "%",
        10,
        figures.lora(64, "11 adapters"),
    )


def _first_tokens() -> Iterator[Target]:
    inputs: tuple[tuple[str, float, float | None, str], ...] = (
        ("text", 4.5, None, "ttft_text_same_length_ms"),
        ("224x224 JPEG", 6.5, None, ""),
        ("448x448 JPEG", 9.5, None, "ttft_e2e_ms"),
        ("1024x1024 JPEG", 50, 40, ""),
    )
    for label, limit, further, metric in inputs:
        yield Target(
            f"Qwen2-VL-2B, TTFT at the client, {'about 390 text tokens' if label == 'text' else sides(label)}",
            "ms",
            limit,
            figures.chat("latency_qwen2_vl_2b", "first_p50_ms", input=label),
            figures.vllm(metric) if metric else "",
            further=further,
        )


def _serving() -> Iterator[Target]:
    closed = (
        (1, 645, 660, 10),
        (8, 3450, 4200, 30),
        (32, 8000, 10_000, 130),
        (64, 10_400, 13_000, 250),
        (128, 12_400, 15_000, 550),
    )

    def load(kind: str, key: str, **wanted: object) -> Figure:
        return figures.of_row(f"serving_{kind}_qwen2_vl_2b", key, **wanted)

    for streams, rate, further, first in closed:
        what = f"Qwen2-VL-2B, a picture and 128 words, {streams} at any time"
        ours = load("template", "tokens_per_s", streams=streams)
        yield Target(what, "tokens/s", rate, ours, at_least=True, further=further)
        yield Target("the same: TTFT p50", "ms", first, load("template", "first_p50_ms", streams=streams))
        if streams == 32:
            yield Target("the same: ITL p99", "ms", 12, load("template", "gap_p99_ms", streams=streams))
    for at_once, first in ((8, 20), (32, 60)):
        what = f"Qwen2-VL-2B, {at_once} conversations at once: TTFT p50 of later turns"
        yield Target(what, "ms", first, load("conversations", "later_p50_ms", conversations=at_once))
    what = "Qwen2-VL-2B, 24 arrivals a second: TTFT p50"
    yield Target(what, "ms", 13, load("arrivals", "first_p50_ms", rate=24.0))
    for tokens, first in ((8000, 250), (30_000, 1500)):
        what = f"Qwen2-VL-2B, prompts of {tokens:,} tokens beside 32 streams: TTFT p50"
        yield Target(what, "ms", first, load("long", "first_p50_ms", long_tokens=tokens))
        yield Target("the same: ITL p99 of the streams", "ms", 15, load("long", "gap_p99_ms", long_tokens=tokens))
        yield Target("the same: their longest ITL", "ms", 25, load("long", "gap_max_ms", long_tokens=tokens))
        kept = load("long", "rate_kept", long_tokens=tokens)
        yield Target("the same: share of their rate that is kept", "", 0.15, kept, at_least=True)
    beside = (
        ("chat TTFT, p95", "chat", "first_p95_ms", 120, "ms"),
        ("chat ITL, p99", "chat", "gap_p99_ms", 15, "ms"),
        ("time to first audio, p95", "speech", "first_p95_ms", 70, "ms"),
        ("streams with an underrun", "speech", "streams_with_underrun", 0, ""),
    )
    for label, of, key, limit, unit in beside:
        what = f"32 live streams beside 32 picture chats a second: {label}"
        yield Target(what, unit, limit, figures.of_row("beside_qwen2_vl_2b", key, load=of, beside=True))


def _eight_pictures() -> Iterator[Target]:
    yield Target(
        "Qwen2-VL-7B, 8 pictures of 224 x 224 a prompt, 36 prompts/s: mean TTFT",
        "ms",
        150,
        figures.arrivals("first_mean_ms"),
        _PUBLISHED("vLLM: 9,910 ms eager, 4,768 ms with graphs"),
    )
    yield Target("the same, p99", "ms", 300, figures.arrivals("first_p99_ms"))
    yield Target(
        "the same, highest rate with mean <= 150 ms and p99 <= 300 ms",
        "prompts/s",
        None,
        figures.highest("chat_http_arrivals_qwen2_vl_7b"),
    )


def _encoders() -> Iterator[Target]:
    def encoder(model: str, label: str, limit: float, further: float | None = None, peer: Peer | str = "") -> Target:
        result = f"encoder_{model}"
        ours = figures.multiple(result, input=label)
        what = f"{NAMES[model]} encoder, {sides(label)}"
        step = StepOf("encoder", model, label)
        return Target(what, _ROOFLINE, limit, ours, peer, further=further, result=result, step=step)

    vllm = figures.peers_multiple(figures.vllm("encoder_ms"), "encoder_qwen2_vl_2b", input="448x448")
    yield encoder("qwen2_vl_2b", "224x224", 2.6, 2.4)
    yield encoder("qwen2_vl_2b", "448x448", 1.7, 1.6, vllm)
    yield encoder("qwen2_vl_2b", "1024x1024", 1.75, 1.6)
    yield encoder("qwen2_vl_2b", "16 frames 448x448", 1.6, 1.5)
    for label, limit in (("448x448", 1.8), ("1920x1080", 1.5), ("64 frames 448x448", 1.5)):
        yield encoder("minicpmv_4_5", label, limit)
    for label, limit in (("448x448", 1.8), ("1024x1024", 1.7)):
        yield encoder("kimi_vl_a3b", label, limit)
    for model in (*_QWEN_2_5, *_QWEN3_DENSE, _QWEN3_MIXTURE):
        yield encoder(model, "448x448", 2.0)
        for label in ("640x480", "1024x1024", "1920x1080", "16 frames 448x448"):
            yield encoder(model, label, 1.9)
    padding = figures.most_padding((*_QWEN_2_5, *_QWEN3_DENSE, _QWEN3_MIXTURE))
    yield Target("Qwen2.5-VL and Qwen3-VL encoders: most padding", "%", 15, padding)


def _steps_of(model: str) -> str:
    """The result of decode steps and prefills of a later commit than that of the tables of docs/performance.md."""
    return f"decode_{model}_after"


def _language_models() -> Iterator[Target]:
    def step(model: str, kind: Literal["decode", "prefill"], rows: int, limit: float, peer: Peer | str = "") -> Target:
        unit = "row" if rows == 1 else "rows"
        what = f"decode step, {rows} {unit}" if kind == "decode" else f"prefill, {rows:,} tokens"
        result = _steps_of(model)
        ours = figures.multiple(result, kind=kind, rows=rows)
        of = StepOf(kind, model, str(rows))
        return Target(f"{NAMES[model]} {what}", _ROOFLINE, limit, ours, peer, result=result, step=of)

    for rows, limit in ((1, 1.3), (8, 1.4), (32, 1.45), (128, 1.45)):
        wanted = {"kind": "decode", "rows": rows}
        peer = figures.peers_multiple(figures.vllm_step(rows), _steps_of("qwen2_vl_2b"), **wanted) if rows < 128 else ""
        yield step("qwen2_vl_2b", "decode", rows, limit, peer)
    for rows in (1, 8, 32, 64, 128):
        yield step("kimi_vl_a3b", "decode", rows, 1.4)
    for model in (*_QWEN_2_5, *_QWEN3_DENSE, _QWEN3_MIXTURE):
        least, most = (1.8, 1.8) if model == _QWEN3_MIXTURE else (1.6, 1.75)
        yield step(model, "decode", 1, least)
        worst = figures.worst_multiple(_steps_of(model), (8, 32, 128))
        what = f"{NAMES[model]} decode step, the worst of 8, 32 and 128 rows"
        yield Target(what, _ROOFLINE, most, worst, result=_steps_of(model))
    for model in ("qwen2_vl_2b", "qwen2_vl_7b", "kimi_vl_a3b", *_QWEN_2_5, *_QWEN3_DENSE, _QWEN3_MIXTURE):
        for tokens in (384, 1024):
            yield step(model, "prefill", tokens, 1.5)
    yield Target("Kimi-VL-A3B prefill, 384 tokens", "ms", 11, figures.prefill_ms(_steps_of("kimi_vl_a3b"), 384))
    for model, milliseconds in (("qwen2_vl_2b", 1.05), ("qwen2_vl_7b", 3.3)):
        yield Target(f"{NAMES[model]} with fp8, decode step, 1 row", "ms", milliseconds, figures.fp8(model))
        what = f"{NAMES[model]} with fp8: the slowest of all decode steps and prefills"
        yield Target(what, "x bfloat16", 1, figures.fp8_most(model))


def _starts() -> Iterator[Target]:
    yield Target(
        "VoxCPM2, start to ready, weights on local disk, kernels cached",
        "s",
        40,
        figures.start("voxcpm2", "warm"),
        figures.starts("nano-vllm-voxcpm"),
    )
    yield Target("Qwen2-VL-2B, the same", "s", 30, figures.start("qwen2_vl_2b", "warm"), figures.starts("vllm"))
    yield Target(
        "VoxCPM2, start to ready with nothing compiled",
        "s",
        90,
        figures.start("voxcpm2", "cold"),
        figures.starts("vllm-omni"),
    )
    yield Target("Qwen2-VL-2B, the same with nothing compiled", "s", 90, figures.start("qwen2_vl_2b", "cold"))
    for what, result in (
        ("VoxCPM2 up to 64 streams", "speech_http_closed"),
        ("Qwen2-VL-2B", "chat_http_decode_qwen2_vl_2b"),
    ):
        yield Target(f"memory of captured graphs, {what}", "GB", None, figures.graph_gigabytes(result))


_GROUPS = (_speech, _first_tokens, _serving, _eight_pictures, _encoders, _language_models, _starts)
TARGETS: tuple[Target, ...] = tuple(target for group in _GROUPS for target in group())
