"""The tables of the documentation, made from benchmarks/results, and the name under which a page asks for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.bound_tables import bounds
from benchmarks.commands import COMMANDS
from benchmarks.formatting import UNMEASURED, device_mark, markdown, number
from benchmarks.operation_tables import beside, gpus, overload, ray_hop, waking
from benchmarks.reading import Missing, Results
from benchmarks.server_tables import (
    SERVING,
    api_process,
    caches,
    capacity,
    chat_arrivals,
    chat_decode,
    chat_latency,
    chat_pairs,
    comparison,
    host_path,
    shared_pixels,
    speech_http,
    speech_listeners,
    speech_open,
    startup,
)
from benchmarks.step_tables import (
    decode,
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
from benchmarks.targets import TARGETS, Target


def _met(target: Target, value: float) -> str:
    met = target.met(value)
    if met is None:
        return ""
    if not met:
        return "**no**"
    return "yes, the further one **no**" if target.met_further(value) is False else "yes"


def _precise(value: float, limit: float | None) -> str:
    """With a digit more where the limit is so near that rounding would hide on which side the value lies."""
    near = limit is not None and value != limit and number(value) == number(limit)
    return f"{value:.4g}" if near else number(value)


def _target_row(target: Target, results: Results) -> list[str]:
    unit = f" {target.unit}" if target.unit else ""

    def limit(value: float | None) -> str:
        return "" if value is None else f"{'>=' if target.at_least else '<='} {value:,g}{unit}"

    try:
        value = target.ours(results)
        mark = device_mark(results[target.result]) if target.result else ""
        ours, met = _precise(value, target.limit) + unit + mark, _met(target, value)
    except Missing:
        ours, met = UNMEASURED, ""
    return [target.what, _peer(target, results, unit), limit(target.limit), limit(target.further), ours, met]


def _peer(target: Target, results: Results, unit: str) -> str:
    """ "" where it is a multiple of a roofline that is not measured yet."""
    try:
        peer = target.peer(results) if callable(target.peer) else target.peer
    except Missing:
        return ""
    return peer if isinstance(peer, str) else number(peer) + unit


def targets(results: Results) -> str:
    head = ["", "today's best peer", "target", "further target", "ours", "met"]
    return markdown(head, [_target_row(target, results) for target in TARGETS])


def commands(results: Results) -> str:
    def state(name: str) -> list[str]:
        try:
            facts = results[name].facts
        except Missing:
            return ["not yet", ""]
        return [facts["time"][:10], facts["commit"][:7]]

    rows = []
    for c in COMMANDS:
        peers = f"`{c.with_peers}`" if c.peers else ""
        rows.append(
            [
                f"{c.what}, on a CPU" if c.on_cpu else c.what,
                f"`{c.command}`",
                peers,
                f"`{c.result}.json`",
                *state(c.result),
            ]
        )
    return markdown(["what", "command", "with the peers that are installed", "result", "measured", "commit"], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "targets": targets,
    "bounds": bounds,
    "encoders": encoders,
    "decode": decode,
    "prefill": prefill,
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
