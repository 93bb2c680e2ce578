"""What the README compares with the best peer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from benchmarks.report.figures import Figure, of_row, peer

_nano = partial(peer, "nano-vllm-voxcpm")
_vllm = partial(peer, "vllm", mode="graphs+mmgraph")
_SPEECH, _LATENCY, _DECODE = "speech_http_closed", "chat_http_latency_qwen2_vl_2b", "chat_http_decode_qwen2_vl_2b"


@dataclass(frozen=True)
class Comparison:
    """result: where ours is from. theirs: a figure of the peers' results."""

    what: str
    unit: str
    result: str
    ours: Figure
    peer: str
    theirs: Figure


def _compared(what: str, unit: str, result: str, key: str, peer: str, theirs: Figure, **wanted: object) -> Comparison:
    return Comparison(what, unit, result, of_row(result, key, **wanted), peer, theirs)


COMPARISONS: tuple[Comparison, ...] = (
    *(
        _compared(
            f"VoxCPM2, {streams} stream{'s' * (streams > 1)}: {what}",
            unit,
            _SPEECH,
            key,
            "nano-vllm-voxcpm",
            _nano(metric, batch=streams),
            streams=streams,
        )
        for streams, what, unit, key, metric in (
            (1, "time to first audio", "ms", "first_p50_ms", "ttfc_ms"),
            (64, "time to first audio", "ms", "first_p50_ms", "ttfc_ms"),
            (64, "seconds of audio per second", "", "audio_s_per_s", "xrt"),
        )
    ),
    *(
        _compared(f"Qwen2-VL-2B: TTFT, {what}", "ms", _LATENCY, "first_p50_ms", "vllm", _vllm(metric), input=load)
        for what, load, metric in (
            ("JPEG of 448 x 448 and 128 text tokens", "448x448 JPEG", "ttft_e2e_ms"),
            ("about 390 text tokens", "text", "ttft_text_same_length_ms"),
        )
    ),
    *(
        _compared(
            f"Qwen2-VL-2B: {streams} text stream{'s' * (streams > 1)}",
            "tokens/s",
            _DECODE,
            "tokens_per_s",
            "vllm",
            _vllm("decode_tps", batch=streams),
            streams=streams,
        )
        for streams in (1, 32)
    ),
    _compared(
        "Qwen2-VL-2B: vision encoder alone, 448 x 448",
        "ms",
        "encoder_qwen2_vl_2b",
        "replay_ms",
        "vllm",
        _vllm("encoder_ms"),
        input="448x448",
    ),
)
