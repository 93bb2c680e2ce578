"""What the README and the first table of docs/performance.md compare with the best peer."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.report.figures import Figure, arrivals, chat, nano, of_row, speech, vllm


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
        speech(1, "first_p50_ms"),
        "nano-vllm-voxcpm",
        nano("ttfc_ms", 1),
    ),
    Comparison(
        "VoxCPM2, 64 streams: time to first audio",
        "ms",
        "speech_http_closed",
        speech(64, "first_p50_ms"),
        "nano-vllm-voxcpm",
        nano("ttfc_ms", 64),
    ),
    Comparison(
        "VoxCPM2, 64 streams: seconds of audio per second",
        "",
        "speech_http_closed",
        speech(64, "audio_s_per_s"),
        "nano-vllm-voxcpm",
        nano("xrt", 64),
    ),
    Comparison(
        "Qwen2-VL-2B: TTFT, JPEG of 448 x 448 and 128 text tokens",
        "ms",
        "chat_http_latency_qwen2_vl_2b",
        chat("latency_qwen2_vl_2b", "first_p50_ms", input="448x448 JPEG"),
        "vllm",
        vllm("ttft_e2e_ms"),
    ),
    Comparison(
        "Qwen2-VL-2B: TTFT, about 390 text tokens",
        "ms",
        "chat_http_latency_qwen2_vl_2b",
        chat("latency_qwen2_vl_2b", "first_p50_ms", input="text"),
        "vllm",
        vllm("ttft_text_same_length_ms"),
    ),
    *(
        Comparison(
            f"Qwen2-VL-2B: {streams} text stream{'s' * (streams > 1)}",
            "tokens/s",
            "chat_http_decode_qwen2_vl_2b",
            chat("decode_qwen2_vl_2b", "tokens_per_s", streams=streams),
            "vllm",
            vllm("decode_tps", batch=streams),
        )
        for streams in (1, 32)
    ),
    Comparison(
        "Qwen2-VL-2B: vision encoder alone, 448 x 448",
        "ms",
        "encoder_qwen2_vl_2b",
        of_row("encoder_qwen2_vl_2b", "replay_ms", input="448x448"),
        "vllm",
        vllm("encoder_ms"),
    ),
    Comparison(
        "Qwen2-VL-7B, 36 prompts/s of 8 pictures of 224 x 224: mean TTFT",
        "ms",
        "chat_http_arrivals_qwen2_vl_7b",
        arrivals("first_mean_ms"),
        "vllm",
        "vLLM: 4,768 ms (published, H100)",
    ),
)
