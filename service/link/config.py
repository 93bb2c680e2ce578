"""The engine's configuration, and its channel to the process that started it.

The engine itself is a function `serve(config, channel)` in service/engine/start.py: it loads, captures, steps until a
Stop command comes, and returns. It runs in a process of its own (process.py).
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from service.link.messages import Command, Outputs

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["published", "random"]
Quantization = Literal["none", "fp8"]
Device = Literal["auto", "cpu", "cuda"]
Drafts = Literal["off", "lookup", "mtp"]


class ConfigurationError(ValueError):
    """An engine cannot start with its configuration; the message names the setting or the model."""


class ModelConfig(msgspec.Struct, frozen=True):
    """One hosted model. `name` is its first served name: requests and metric labels use it."""

    name: str
    directory: str
    dtype: DType = "auto"
    """auto: bfloat16 on CUDA, float32 on a CPU."""
    load_format: LoadFormat = "published"
    quantization: Quantization = "none"
    """fp8: weights of the language layers in e4m3; only for chat models."""


SLOTS, SLOTS_OF_LARGE_GPUS = 64, 128
LARGE_GPU_BYTES = 40 * 10**9
GRAPH_BYTES = 4 << 30
ENCODER_CACHE_BYTES = 1 << 30


PAGE_SIZE = 16
"""Positions of a page (block) of the KV cache."""


class EngineConfig(msgspec.Struct, frozen=True):
    """Every setting of the engine process. service/settings/settings.py says what those do that operators set, and what
    None stands for."""

    models: tuple[ModelConfig, ...]
    device: Device = "auto"
    gpu: str = ""
    """The only GPU that the process sees, as CUDA_VISIBLE_DEVICES names it; empty: all that its parent sees."""
    index: int | None = None
    """Which of several engines this is, from 0; None if it is the only one."""
    sharers: int = 1
    """Number of engines that share the host's processors, this one included."""
    threads: int | None = None
    memory_share: float = 0.9
    page_size: int = PAGE_SIZE
    kv_cache_tokens: int | None = None
    max_running: int | None = None
    max_waiting: int = 256
    queue_timeout: float = 120.0
    """Seconds from when the engine has a request to its first step."""
    max_step_tokens: int = 2048
    itl_target: float | None = None
    graphs: bool = True
    restarted: bool = False
    """Whether an earlier engine of this server was ready. Then chat becomes ready with as few captures as possible and
    speech with few. The others, and the warm-up, wait until the engine idles; a first start makes them before
    readiness."""
    drafts: Drafts = "off"
    draft_tokens: int = 3
    graph_memory: int | None = None
    encoder_cache: int | None = None
    gpu_bytes: int | None = None
    """Bytes of the GPU, on which limits such as slots depend; the engine sets it at its start. None on a CPU."""
    encoder_buckets: tuple[int, ...] = ()
    """Patch budgets to capture; empty: the family's bucket list."""
    decode_buckets: tuple[int, ...] = ()
    """Batch sizes to capture; empty: a bucket list up to `slots`."""
    solver_steps: tuple[int, ...] = ()
    """Numbers of solver steps to capture, the first is the default; empty: the model's."""
    first_audio_target: float | None = None
    max_speech_load: float | None = None
    lora_voices: str = ""
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"

    @property
    def slots(self) -> int:
        """Request slots of a model: `max_running`, or what suits the size of the GPU."""
        if self.max_running is not None:
            return self.max_running
        return SLOTS_OF_LARGE_GPUS if (self.gpu_bytes or 0) >= LARGE_GPU_BYTES else SLOTS

    @property
    def graph_bytes(self) -> int:
        """Limit of captured graphs: on a small GPU an eighth of its memory, to leave room for weights and KV caches.
        The memory plan lowers it where these need more (service.engine.memory)."""
        return _limit(self.graph_memory, GRAPH_BYTES, self.gpu_bytes, 8)

    @property
    def encoder_cache_bytes(self) -> int:
        """Limit of cached encoder outputs: on a small GPU a 32nd of its memory."""
        return _limit(self.encoder_cache, ENCODER_CACHE_BYTES, self.gpu_bytes, 32)


def _limit(configured: int | None, default: int, gpu_bytes: int | None, parts: int) -> int:
    """The configured limit; otherwise the default, but at most 1 / `parts` of the GPU's memory."""
    if configured is not None:
        return configured
    return default if gpu_bytes is None else min(default, gpu_bytes // parts)


class Channel(Protocol):
    """The engine's end of the link. Used by one thread."""

    def receive(self, timeout: float | None) -> list[Command]:
        """All commands that have arrived; waits up to `timeout` seconds for the first (None: without limit, 0: not at
        all)."""
        ...

    def send(self, outputs: Outputs) -> None:
        """Never blocks. Arrays are sent without a copy: do not write to them afterwards."""
        ...
