"""Where figures on one H100 come from: the targets that were aimed at, and comparisons with the best peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.reading import Results

Figure = Callable[[Results], float]
Peer = Callable[[Results], float | str]


@dataclass(frozen=True)
class Target:
    """limit: ours should be at most (or, with `at_least`, at least) this. peer: a figure of benchmarks/results, or the
    text of a published one."""

    what: str
    unit: str
    limit: float | None
    ours: Figure
    peer: Peer | str = ""
    at_least: bool = False

    def met(self, value: float) -> bool | None:
        if self.limit is None:
            return None
        return value >= self.limit if self.at_least else value <= self.limit


def _speech(streams: int, key: str) -> Figure:
    return lambda results: float(results["speech_http_closed"].row(streams=streams)[key])


def _nano(metric: str, batch: int) -> Figure:
    return lambda results: results.peer_value("nano-vllm-voxcpm", metric, batch=batch)


def _encoder(model: str, label: str, key: str) -> Figure:
    return lambda results: float(results[f"encoder_{model}"].row(input=label)[key])


def _decode(model: str, rows: int, key: str) -> Figure:
    return lambda results: float(results[f"decode_{model}"].row(kind="decode", rows=rows)[key])


def _vllm_step(batch: int) -> Figure:
    """The better of its two starts."""
    modes = ("graphs", "graphs+mmgraph")
    return lambda results: min(
        float(results.peer("vllm", "decode_tps", batch=batch, mode=mode)["ms_per_step"]) for mode in modes
    )


def _arrivals(key: str) -> Figure:
    return lambda results: float(results["chat_http_arrivals_qwen2_vl_7b"].row(rate=36)[key])


def _highest_rate(name: str) -> Figure:
    return lambda results: max((float(row["rate"]) for row in results[name].rows if row["sustained"]), default=0.0)


def _start(model: str, cache: str) -> Figure:
    """The slowest of the starts."""

    def slowest(results: Results) -> float:
        return max(float(row["ready_s"]) for row in results[f"startup_{model}"].rows if row["kernel_cache"] == cache)

    return slowest


def _starts(engine: str) -> Peer:
    """Least and largest start of a peer."""

    def span(results: Results) -> float | str:
        times = results.peer_notes(engine, "start_s")
        return times[0] if len(times) == 1 else f"{min(times):.0f} to {max(times):.0f} s"

    return span


def _graph_gigabytes(name: str) -> Figure:
    return lambda results: results[name].facts["graph_bytes"] / 1e9


def _chat(result: str, key: str, **wanted: object) -> Figure:
    return lambda results: float(results[f"chat_http_{result}"].row(**wanted)[key])


def _vllm(metric: str, **wanted: object) -> Figure:
    return lambda results: results.peer_value("vllm", metric, mode="graphs+mmgraph", **wanted)


_PUBLISHED = "{} (published)".format


@dataclass(frozen=True)
class Comparison:
    """What the README shows. result: where ours is from. theirs: a figure of benchmarks/results, or the text of a
    published one, which names its GPU."""

    what: str
    unit: str
    result: str
    ours: Figure
    peer: str
    theirs: Figure | str


COMPARISONS: tuple[Comparison, ...] = (
    Comparison(
        "VoxCPM2, 1 stream: time to first audio",
        "ms",
        "speech_http_closed",
        _speech(1, "first_p50_ms"),
        "nano-vllm-voxcpm",
        _nano("ttfc_ms", 1),
    ),
    Comparison(
        "VoxCPM2, 64 streams: time to first audio",
        "ms",
        "speech_http_closed",
        _speech(64, "first_p50_ms"),
        "nano-vllm-voxcpm",
        _nano("ttfc_ms", 64),
    ),
    Comparison(
        "VoxCPM2, 64 streams: seconds of audio per second",
        "",
        "speech_http_closed",
        _speech(64, "audio_s_per_s"),
        "nano-vllm-voxcpm",
        _nano("xrt", 64),
    ),
    Comparison(
        "Qwen2-VL-2B: TTFT, JPEG of 448 x 448 and 128 text tokens",
        "ms",
        "chat_http_latency_qwen2_vl_2b",
        _chat("latency_qwen2_vl_2b", "first_p50_ms", input="448x448 JPEG"),
        "vllm",
        _vllm("ttft_e2e_ms"),
    ),
    Comparison(
        "Qwen2-VL-2B: TTFT, about 390 text tokens",
        "ms",
        "chat_http_latency_qwen2_vl_2b",
        _chat("latency_qwen2_vl_2b", "first_p50_ms", input="text"),
        "vllm",
        _vllm("ttft_text_same_length_ms"),
    ),
    *(
        Comparison(
            f"Qwen2-VL-2B: {streams} text stream{'s' * (streams > 1)}",
            "tokens/s",
            "chat_http_decode_qwen2_vl_2b",
            _chat("decode_qwen2_vl_2b", "tokens_per_s", streams=streams),
            "vllm",
            _vllm("decode_tps", batch=streams),
        )
        for streams in (1, 32)
    ),
    Comparison(
        "Qwen2-VL-2B: vision encoder alone, 448 x 448",
        "ms",
        "encoder_qwen2_vl_2b",
        _encoder("qwen2_vl_2b", "448x448", "graph_ms"),
        "vllm",
        _vllm("encoder_ms"),
    ),
    Comparison(
        "Qwen2-VL-7B, 36 prompts/s of 8 pictures of 224 x 224: mean TTFT",
        "ms",
        "chat_http_arrivals_qwen2_vl_7b",
        _arrivals("first_mean_ms"),
        "vllm",
        "vLLM: 4,768 ms (published, H100)",
    ),
)

TARGETS: tuple[Target, ...] = (
    Target(
        "VoxCPM2, 1 stream: real-time factor",
        "",
        0.035,
        _speech(1, "rtf_p50"),
        lambda results: results.peer_value("vllm-omni", "rtf", batch=1),
    ),
    Target(
        "VoxCPM2, 1 stream: time to first audio at the client",
        "ms",
        20,
        _speech(1, "first_p50_ms"),
        _nano("ttfc_ms", 1),
    ),
    *(
        target
        for streams, rate, first in ((8, 190, 30), (32, 430, 60), (64, 600, 100))
        for target in (
            Target(
                f"VoxCPM2, {streams} streams: seconds of audio per second",
                "",
                rate,
                _speech(streams, "audio_s_per_s"),
                _nano("xrt", streams),
                at_least=True,
            ),
            Target(
                f"VoxCPM2, {streams} streams: time to first audio, p95",
                "ms",
                first,
                _speech(streams, "first_p95_ms"),
                _nano("ttfc_ms", streams),
            ),
        )
    ),
    Target(
        "VoxCPM2, open loop, 5 s utterances: highest rate with p95 of time to first audio <= 150 ms and no underrun",
        "requests/s",
        60,
        _highest_rate("speech_http_open"),
        _PUBLISHED("vllm-omni, H100 PCIe: 1 at 194 ms"),
        at_least=True,
    ),
    Target("Qwen2-VL-2B encoder, 224 x 224", "ms", 1.7, _encoder("qwen2_vl_2b", "224x224", "graph_ms")),
    Target(
        "Qwen2-VL-2B encoder, 448 x 448",
        "ms",
        3.2,
        _encoder("qwen2_vl_2b", "448x448", "graph_ms"),
        lambda results: results.peer_value("vllm", "encoder_ms", mode="graphs+mmgraph"),
    ),
    Target(
        "Qwen2-VL-2B, TTFT, JPEG of 448 x 448 and 128 text tokens, at the client",
        "ms",
        12,
        lambda results: float(results["chat_http_latency_qwen2_vl_2b"].row(input="448x448 JPEG")["first_p50_ms"]),
        lambda results: results.peer_value("vllm", "ttft_e2e_ms", mode="graphs+mmgraph"),
    ),
    *(
        Target(
            f"Qwen2-VL-2B decode step, {rows} row{'s' * (rows > 1)}",
            "ms",
            limit,
            _decode("qwen2_vl_2b", rows, "graph_ms"),
            _vllm_step(rows) if rows < 128 else "",
        )
        for rows, limit in ((1, 1.5), (8, 1.6), (32, 2.0), (128, 3.2))
    ),
    Target(
        "Qwen2-VL-7B, 8 pictures of 224 x 224 a prompt, 36 prompts/s: mean TTFT",
        "ms",
        150,
        _arrivals("first_mean_ms"),
        _PUBLISHED("vLLM: 9,910 ms eager, 4,768 ms with graphs"),
    ),
    Target("the same, p99", "ms", 300, _arrivals("first_p99_ms")),
    Target(
        "the same, highest rate with mean <= 150 ms and p99 <= 300 ms",
        "prompts/s",
        None,
        _highest_rate("chat_http_arrivals_qwen2_vl_7b"),
    ),
    Target(
        "MiniCPM-V 4.5 encoder, 1920 x 1080", "x roofline", 1.6, _encoder("minicpmv_4_5", "1920x1080", "over_floor")
    ),
    Target("Kimi-VL-A3B encoder, 448 x 448", "x roofline", 1.8, _encoder("kimi_vl_a3b", "448x448", "over_floor")),
    Target("Kimi-VL-A3B decode step, 1 row", "x roofline", 1.7, _decode("kimi_vl_a3b", 1, "over_floor")),
    Target(
        "VoxCPM2, start to ready, weights on local disk, kernels cached",
        "s",
        40,
        _start("voxcpm2", "warm"),
        _starts("nano-vllm-voxcpm"),
    ),
    Target("Qwen2-VL-2B, the same", "s", 30, _start("qwen2_vl_2b", "warm"), _starts("vllm")),
    Target("VoxCPM2, start to ready with nothing compiled", "s", 90, _start("voxcpm2", "cold"), _starts("vllm-omni")),
    Target("Qwen2-VL-2B, the same with nothing compiled", "s", 90, _start("qwen2_vl_2b", "cold")),
    Target("memory of captured graphs, VoxCPM2 up to 64 streams", "GB", None, _graph_gigabytes("speech_http_closed")),
    Target("memory of captured graphs, Qwen2-VL-2B", "GB", None, _graph_gigabytes("chat_http_decode_qwen2_vl_2b")),
)
