"""Every table of the documentation by the name under which a page asks for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.report.results import Results
from benchmarks.report.tables.commands import commands
from benchmarks.report.tables.host import api_process, host_path, shared_pixels
from benchmarks.report.tables.http import (
    caches,
    capacity,
    chat_arrivals,
    chat_decode,
    chat_latency,
    chat_pairs,
    speech_http,
    speech_listeners,
    speech_open,
)
from benchmarks.report.tables.operation import beside, gpus, overload, ray_hop, startup, waking
from benchmarks.report.tables.serving import SERVING
from benchmarks.report.tables.steps import (
    decode,
    decode_after,
    encoders,
    h200,
    lora,
    memory,
    prefill,
    quantization_decode,
    quantization_quality,
    sampler,
    speech_steps,
)
from benchmarks.report.tables.targets import bounds, comparison, targets

TABLES: dict[str, Callable[[Results], str]] = {
    "targets": targets,
    "bounds": bounds,
    "encoders": encoders,
    "decode": decode,
    "prefill": prefill,
    "decode-after": decode_after,
    "h200": h200,
    "quantization-decode": quantization_decode,
    "quantization-quality": quantization_quality,
    "speech-steps": speech_steps,
    "sampler": sampler,
    "lora": lora,
    "speech-http": speech_http,
    "speech-open": speech_open,
    "speech-listeners": speech_listeners,
    "speech-listeners-elsewhere": partial(speech_listeners, elsewhere=True),
    "chat-latency": chat_latency,
    "chat-decode": chat_decode,
    "chat-arrivals": chat_arrivals,
    "chat-pairs": chat_pairs,
    **SERVING,
    "api-process": api_process,
    "host-path": host_path,
    "shared-pixels": shared_pixels,
    "startup": startup,
    "waking": waking,
    "overload": overload,
    "beside": beside,
    "gpus": gpus,
    "ray-hop": ray_hop,
    "memory": memory,
    "caches": caches,
    "commands": commands,
    "capacity": capacity,
    "comparison": comparison,
}
