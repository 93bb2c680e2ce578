"""Picture chats and speech through HTTP on one GPU: each load alone, then both at the same time against one server.

    python -m benchmarks.beside [CHAT_MODEL] [SPEECH_MODEL] [--seconds 60] [--rate 32] [--streams 32] [--tiny]

Full size and random weights; --tiny serves the embedded models instead, to try the script. Chats about a new JPEG in
new words arrive at random (Poisson); their system message is that of the model's template. Live streams of speech are a
closed loop of utterances of a fixed length. Both begin together; the first `lead` seconds are not counted.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.published import SIZES, make
from benchmarks.checkpoints.served import served_directory
from benchmarks.loads.speech import SOLVER_STEPS, VOICES
from benchmarks.measure.record import Row, record
from benchmarks.servers.process import Server, random_weights, serve
from service.cli.bench.run import Clients, run_together, summary
from service.cli.bench.traffic import ChatLoad, Record, SpeechLoad

MOST_AUDIO = 1_000.0
"""Seconds of audio per second that no server reaches, so that the streams never use up their requests."""
SETTINGS = ("--max-in-flight", "2048", "--max-waiting", "1024")


@dataclass(frozen=True)
class Scale:
    """rate: chats a second. streams: utterances of `utterance` s that are open at any time. seconds: counted, after
    `lead`. chat_processes, speech_processes: of the clients."""

    chat_model: str
    speech_model: str
    rate: float
    streams: int
    lead: float
    seconds: float
    side: int
    words: int
    tokens: int
    utterance: float
    chat_processes: int
    speech_processes: int
    max_running: int


FULL = Scale("qwen2_vl_2b", "voxcpm2", 32.0, 32, 5.0, 60.0, 448, 128, 128, 10.08, 6, 4, 128)
TINY = Scale("reprise/qwen2_vl", "reprise/voxcpm2", 2.0, 2, 0.5, 3.0, 56, 8, 8, 0.64, 2, 2, 4)


def chat(server: Server, scale: Scale) -> Clients:
    load = ChatLoad(
        url=server.url,
        model=scale.chat_model,
        requests=round(scale.rate * (scale.lead + scale.seconds)),
        seed=1,
        rate=scale.rate,
        width=scale.side,
        height=scale.side,
        text_words=scale.words,
        system_message=False,
        output_tokens=scale.tokens,
    )
    return Clients(load, scale.chat_processes)


def speech(server: Server, scale: Scale) -> Clients:
    until = scale.lead + scale.seconds
    load = SpeechLoad(
        url=server.url,
        model=scale.speech_model,
        requests=round(until * MOST_AUDIO / scale.utterance),
        seed=2,
        concurrency=scale.streams,
        text_words=13,
        seconds=scale.utterance,
        solver_steps=SOLVER_STEPS,
        voices=VOICES,
    )
    return Clients(load, scale.speech_processes, until=until)


def measured(server: Server, scale: Scale) -> Iterator[tuple[Row, dict[str, Any]]]:
    """A row for each load and each time that it ran, and the facts that the server reports at that time."""
    loads = (chat(server, scale), speech(server, scale))
    for together in ((loads[0],), (loads[1],), loads):
        found = run_together(*together)
        begin = min(one.start for records in found for one in records) + scale.lead
        for clients, records in zip(together, found, strict=True):
            row = row_of(clients, records, begin, begin + scale.seconds)
            yield {"beside": len(together) > 1, **row}, server.facts()


def row_of(clients: Clients, records: Sequence[Record], begin: float, end: float) -> Row:
    """What the clients of a load saw of requests that they sent from `begin` to `end`, and the rate in that time."""
    load = clients.load
    if clients.until and len(records) == load.requests:
        raise RuntimeError(f"all {load.requests} requests were used up before the end")
    result = summary(load, [one for one in records if begin <= one.start < end])
    row: Row = {"load": "chat" if isinstance(load, ChatLoad) else "speech"}
    row |= {name: result[name] for name in ("requests", "succeeded", "refused", "failed")}
    if not result["succeeded"]:
        return row
    row |= {f"first_{name}_ms": 1e3 * result["first"][name] for name in ("p50", "p95", "p99")}
    if isinstance(load, ChatLoad):
        row |= {f"gap_{name}_ms": 1e3 * result["gap"][name] for name in ("p50", "p99", "max") if result["gap"]}
        row["tokens_per_s"] = rate_within(records, "tokens", begin, end)
        row["prompt_tokens"] = result["prompt_tokens_mean"]
        row["send_delay_p99_ms"] = 1e3 * result["delay"]["p99"]
        return row
    row |= {f"rtf_{name}": result["realtime_factor"][name] for name in ("p50", "p95")}
    row["audio_s_per_s"] = rate_within(records, "audio", begin, end)
    return row | {"streams_with_underrun": result["streams_with_underrun"], "underrun_s": result["underrun_seconds"]}


def rate_within(records: Sequence[Record], field: str, begin: float, end: float) -> float:
    """A second's part of `field` (tokens or audio) from `begin` to `end`, as if each answer came evenly."""
    total = 0.0
    for one in records:
        inside = min(end, one.start + one.duration) - max(begin, one.start)
        if not one.error and inside > 0:
            total += getattr(one, field) * inside / one.duration
    return total / (end - begin)


def _served(scale: Scale, tiny: bool, flags: Sequence[str]) -> Iterator[tuple[Row, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        made = [] if tiny else [served_directory(scale.chat_model, parent), make(scale.speech_model, parent)]
        with serve(*(random_weights(made) if made else []), *flags) as server:
            server.wait_until_idle()
            yield from measured(server, scale)


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.beside", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chats = [name for name, (source, _, _) in SIZES.items() if source.startswith("qwen") and "asr" not in source]
    parser.add_argument("chat_model", nargs="?", default=FULL.chat_model, choices=chats)
    parser.add_argument("speech_model", nargs="?", default=FULL.speech_model, choices=[FULL.speech_model])
    parser.add_argument("--seconds", type=float, help="that are counted of each load")
    parser.add_argument("--rate", type=float, help="chats a second")
    parser.add_argument("--streams", type=int, help="live streams of speech")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args(words)
    scale = TINY if chosen.tiny else replace(FULL, chat_model=chosen.chat_model, speech_model=chosen.speech_model)
    given = {name: getattr(chosen, name) for name in ("seconds", "rate", "streams")}
    scale = replace(scale, **{name: value for name, value in given.items() if value is not None})
    flags = [*SETTINGS, "--max-running", str(scale.max_running)]
    return record(
        f"beside_{'tiny' if chosen.tiny else scale.chat_model}",
        _served(scale, chosen.tiny, flags),
        chat_model=scale.chat_model,
        speech_model=scale.speech_model,
        rate=scale.rate,
        streams=scale.streams,
        seconds=scale.seconds,
        flags=flags,
    )


if __name__ == "__main__":
    main()
