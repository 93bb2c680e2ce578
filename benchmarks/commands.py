"""Every result: what it measures, the command that writes it, and the command that measures peers beside it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """result: stem of the file in benchmarks/results. peers: names of benchmarks.peers that do the same work."""

    what: str
    result: str
    command: str
    peers: str = ""

    @property
    def with_peers(self) -> str:
        """Runs `command`, and then those peers that are installed, on the same machine."""
        return f"python -m benchmarks.peers {self.peers} --with {self.result}" if self.peers else ""


_CHAT = ("qwen2_vl_2b", "qwen2_vl_7b", "minicpmv_4_5", "kimi_vl_a3b")

COMMANDS: tuple[Command, ...] = (
    *(
        Command(
            f"encoder of {name}",
            f"encoder_{name}",
            f"python -m benchmarks.encoder {name}",
            "transformers vllm" if name == "qwen2_vl_2b" else "",
        )
        for name in _CHAT
    ),
    *(
        Command(
            f"decode steps and prefills of {name}",
            f"decode_{name}",
            f"python -m benchmarks.decode {name}",
            "transformers vllm" if name == "qwen2_vl_2b" else "",
        )
        for name in _CHAT
        if name != "minicpmv_4_5"
    ),
    Command(
        "time to first token of two pictures a prompt at 8 prompts a second, with graphs and without",
        "chat_http_pairs_kimi_vl_a3b",
        "python -m benchmarks.chat_http pairs kimi_vl_a3b",
    ),
    Command("speech steps by bucket, codec inside", "speech_steps", "python -m benchmarks.speech_steps"),
    Command(
        "what the codec's precisions leave of the signal", "codec_precision", "python -m benchmarks.codec_precision"
    ),
    Command(
        "speech through HTTP, 1 to 64 streams",
        "speech_http_closed",
        "python -m benchmarks.speech_http closed",
        "voxcpm nano_vllm_voxcpm",
    ),
    Command("the same as mp3: what its encoder allows", "speech_http_mp3", "python -m benchmarks.speech_http mp3"),
    Command(
        "speech, highest rate with p95 of first audio <= 150 ms and no underrun",
        "speech_http_open",
        "python -m benchmarks.speech_http open",
    ),
    Command(
        "time to first token at the client",
        "chat_http_latency_qwen2_vl_2b",
        "python -m benchmarks.chat_http latency qwen2_vl_2b",
        "transformers vllm",
    ),
    Command(
        "tokens per second at the clients",
        "chat_http_decode_qwen2_vl_2b",
        "python -m benchmarks.chat_http decode qwen2_vl_2b",
        "transformers vllm",
    ),
    Command(
        "8 pictures a prompt, 36 prompts a second, and the highest rate",
        "chat_http_arrivals_qwen2_vl_7b",
        "python -m benchmarks.chat_http arrivals qwen2_vl_7b",
    ),
    Command("the API process alone, on a CPU", "api_process", "python -m benchmarks.api_process"),
    *(
        Command(f"start to ready of {model}", f"startup_{model}", f"python -m benchmarks.startup {model}")
        for model in ("qwen2_vl_2b", "voxcpm2")
    ),
)

BY_RESULT = {command.result: command for command in COMMANDS}
