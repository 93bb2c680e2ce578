"""The tables of the documentation, made from benchmarks/results, and the name under which a page asks for each."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.commands import COMMANDS
from benchmarks.formatting import UNMEASURED, markdown, number
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
    speech_open,
    startup,
)
from benchmarks.step_tables import (
    decode,
    encoders,
    memory,
    prefill,
    quantization_decode,
    quantization_quality,
    speech_steps,
)
from benchmarks.targets import TARGETS, Target


def _met(target: Target, value: float) -> str:
    met = target.met(value)
    return "" if met is None else "yes" if met else "**no**"


def _precise(value: float, limit: float | None) -> str:
    """With a digit more where the limit is so near that rounding would hide on which side the value lies."""
    near = limit is not None and value != limit and number(value) == number(limit)
    return f"{value:.4g}" if near else number(value)


def _target_row(target: Target, results: Results) -> list[str]:
    peer = target.peer(results) if callable(target.peer) else target.peer
    unit = f" {target.unit}" if target.unit else ""
    limit = "" if target.limit is None else f"{'>=' if target.at_least else '<='} {target.limit:g}{unit}"
    try:
        value = target.ours(results)
        ours, met = _precise(value, target.limit) + unit, _met(target, value)
    except Missing:
        ours, met = UNMEASURED, ""
    return [target.what, peer if isinstance(peer, str) else number(peer) + unit, limit, ours, met]


def targets(results: Results) -> str:
    return markdown(
        ["", "today's best peer", "target", "ours", "met"], [_target_row(target, results) for target in TARGETS]
    )


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
        rows.append([c.what, f"`{c.command}`", peers, f"`{c.result}.json`", *state(c.result)])
    return markdown(["what", "command", "with the peers that are installed", "result", "measured", "commit"], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "targets": targets,
    "encoders": encoders,
    "decode": decode,
    "prefill": prefill,
    "quantization-decode": quantization_decode,
    "quantization-quality": quantization_quality,
    "speech-steps": speech_steps,
    "speech-http": speech_http,
    "speech-open": speech_open,
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
