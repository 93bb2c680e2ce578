"""Every result: what it measures, the command that writes it, and the command that measures peers with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """run: a module of benchmarks and its arguments. named: the stem of the file in benchmarks/results where it is not
    these words, joined. peers: names of benchmarks.peers that do the same work. on_cpu: what it measures takes no
    GPU."""

    what: str
    run: str
    named: str = ""
    peers: str = ""
    on_cpu: bool = False

    @property
    def result(self) -> str:
        return self.named or self.run.replace(" ", "_")

    @property
    def command(self) -> str:
        return f"python -m benchmarks.{self.run}"

    @property
    def with_peers(self) -> str:
        """Runs `command`, and then the installed peers on the same machine."""
        return f"python -m benchmarks.peers {self.peers} --with {self.result}" if self.peers else ""


_QWEN3 = ("qwen3_vl_2b", "qwen3_vl_4b", "qwen3_vl_8b", "qwen3_vl_30b_a3b")
_QWEN3_5 = ("qwen3_5_4b", "qwen3_5_27b", "qwen3_5_35b_a3b")
_CHAT = ("qwen2_vl_2b", "qwen2_vl_7b", "qwen2_5_vl_3b", "qwen2_5_vl_7b", "minicpmv_4_5", "kimi_vl_a3b", *_QWEN3)


def _chat_peers(model: str) -> str:
    return "transformers vllm" if model == "qwen2_vl_2b" else ""


COMMANDS: tuple[Command, ...] = (
    *(
        Command(f"encoder of {name}", f"encoder {name}", peers=_chat_peers(name))
        for name in (*_CHAT, "minicpmv_4_6", "qwen3_asr_1_7b")
    ),
    *(
        Command(f"decode steps and prefills of {name}", f"decode {name}", peers=_chat_peers(name))
        for name in (*_CHAT, *_QWEN3_5)
        if name != "minicpmv_4_5"
    ),
    *(
        Command(f"the same of {name} with weights in e4m3 beside bfloat16", f"quantization decode {name}")
        for name in ("qwen2_vl_2b", "qwen2_vl_7b")
    ),
    Command(
        "steps in published forms, random codes",
        "quantization published",
        "quantization_published_qwen2_vl_7b_qwen3_vl_30b_a3b",
    ),
    *(
        Command(
            f"AWQ of {name} on a GPU limited to {card} GB",
            f"small_gpu {name} --card {card}",
            f"small_gpu_{name}_awq_{card}",
        )
        for name, card in (("qwen2_vl_7b", 12), ("qwen2_5_vl_3b", 8))
    ),
    Command("what quantised weights leave of the answers", "quantization quality", on_cpu=True),
    *(
        Command(f"steps and answers of {name} with drafts", f"drafts {name}{many}", f"drafts_{name}")
        for name, many in (("qwen3_5_4b", " --many 64"), ("qwen3_5_27b", ""))
    ),
    Command("speech steps by bucket, codec inside", "speech_steps"),
    Command("speech through HTTP, 1 to 64 streams", "speech_http closed", peers="voxcpm nano_vllm_voxcpm"),
    Command("the same as mp3", "speech_http mp3"),
    Command("speech, highest rate with p95 of time to first audio <= 150 ms and no underrun", "speech_http open"),
    Command(
        "live listeners at rising rates, each for 60 s of ramp and 300 s that are counted", "speech_http listeners"
    ),
    *(
        Command(f"TTFT at the client, {name}", f"chat_http latency {name}", peers=_chat_peers(name))
        for name in ("qwen2_vl_2b", "qwen3_vl_4b", "minicpmv_4_6")
    ),
    Command("tokens per second at the clients", "chat_http decode qwen2_vl_2b", peers=_chat_peers("qwen2_vl_2b")),
    Command("8 pictures a prompt, 36 prompts a second, and the highest rate", "chat_http arrivals qwen2_vl_7b"),
    *(
        Command(what, f"serving {kind} qwen2_vl_2b")
        for kind, what in (
            ("closed", "chat about new pictures behind a shared system prompt, 1 to 128 at any time"),
            ("template", "the same without a system message: with the default one of the model's template"),
            ("conversations", "the first as conversations of four turns about one picture"),
            ("arrivals", "the first as Poisson arrivals, each rate for 60 s"),
            ("long", "prompts of 8,000 and 30,000 tokens beside 32 decoding streams"),
        )
    ),
    Command("conversations of four turns about one picture, Qwen3.5-4B", "serving conversations qwen3_5_4b"),
    Command(
        "32 picture chats a second and 32 live streams of speech on one GPU, alone and beside each other",
        "beside qwen2_vl_2b",
    ),
    Command("chat and speech through HTTP on one GPU and on two of a host, alternately", "engines"),
    Command("the same with half the load on one GPU", "engines --per-gpu", "engines_per_gpu"),
    Command("recordings, live speech and spoken conversations through HTTP, and vision chat beside them", "hearing"),
    Command("of these, all but the conversations", "hearing recognise live beside", "hearing_live"),
    Command("of these, vision chat beside live speech", "hearing beside", "hearing_beside"),
    Command("steps of two commits, alternately on one GPU", "versions OLD NEW", "versions"),
    *(
        Command(f"the same of {models}", f"versions OLD NEW --models {models}", f"versions_{models.replace(' ', '_')}")
        for models in ("kimi_vl_a3b", "qwen2_vl_2b", "qwen2_vl_2b voxcpm2")
    ),
    Command("30,000 short requests and what they leave behind", "churn", "churn_cpu", on_cpu=True),
    Command(
        "first token and first sound right after readiness, and after settling",
        "beside --first-minutes",
        "first_minutes_qwen2_vl_2b",
    ),
    *(Command(f"start to ready of {model}", f"startup {model}") for model in ("qwen2_vl_2b", "voxcpm2")),
)

BY_RESULT = {command.result: command for command in COMMANDS}
