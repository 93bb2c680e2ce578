"""Picture chats and speech through HTTP on one GPU: each load alone, then both at the same time against one server.

    python -m benchmarks.beside [CHAT_MODEL] [--seconds 60] [--rate 32] [--streams 32] [--tiny]
    python -m benchmarks.beside --first-minutes [CHAT_MODEL] [--seconds 100] [--rate 0.5] [--tiny]

Full size and random weights; --tiny serves the embedded models instead, to try the script. Chats about a new JPEG in
new words arrive at random (Poisson); their system message is that of the model's template. Live streams of speech are a
closed loop of utterances of a fixed length. Both begin together; the first `lead` seconds are not counted.

--first-minutes: what clients wait for right after a server is ready, while it captures and makes voices, and once it
has settled. Chats and speech arrive at random, so rarely that the engine idles between them and goes on with what it
has to do in the background: how much later an answer begins than after settling is what that costs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.published import SIZES, make
from benchmarks.checkpoints.served import served_directory
from benchmarks.loads.rows import SOLVER_STEPS, VOICES, row_of
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import Row, record
from benchmarks.servers.process import Server, random_weights, serve
from service.cli.bench.run import Clients, run_together
from service.cli.bench.traffic import AnyLoad, ChatLoad, Record, SpeechLoad

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
            row = row_within(clients, records, begin, begin + scale.seconds)
            yield {"beside": len(together) > 1, **row}, server.facts()


def row_within(clients: Clients, records: Sequence[Record], begin: float, end: float) -> Row:
    """What the clients of a load saw of requests that they sent from `begin` to `end`, and the rate in that time."""
    load = clients.load
    if clients.until and len(records) == load.requests:
        raise RuntimeError(f"all {load.requests} requests were used up before the end")
    row = row_of(load, [one for one in records if begin <= one.start < end])
    if row["succeeded"]:
        rate, field = ("tokens_per_s", "tokens") if isinstance(load, ChatLoad) else ("audio_s_per_s", "audio")
        row[rate] = rate_within(records, field, begin, end)
    return {"load": kind_of(load), **row}


def kind_of(load: AnyLoad) -> str:
    return "chat" if isinstance(load, ChatLoad) else "speech"


def rate_within(records: Sequence[Record], field: str, begin: float, end: float) -> float:
    """A second's part of `field` (tokens or audio) from `begin` to `end`, as if each answer came evenly."""
    total = 0.0
    for one in records:
        inside = min(end, one.start + one.duration) - max(begin, one.start)
        if not one.error and inside > 0:
            total += getattr(one, field) * inside / one.duration
    return total / (end - begin)


def first_minutes(server: Server, scale: Scale) -> Iterator[tuple[Row, dict[str, Any]]]:
    """A row for each load, from readiness on and after settling, with the captures that were made meanwhile."""
    for seed, when in enumerate(("from readiness on", "settled"), 1):
        captures, began = server.captures(), time.time()
        common: dict[str, Any] = {"url": server.url, "rate": scale.rate, "seed": seed, "warmup": 0}
        common["requests"] = max(1, round(scale.rate * scale.seconds))
        side, words, tokens = scale.side, scale.words, scale.tokens
        loads: tuple[AnyLoad, ...] = (
            ChatLoad(model=scale.chat_model, width=side, height=side, text_words=words, output_tokens=tokens, **common),
            SpeechLoad(model=scale.speech_model, text_words=8, seconds=scale.utterance, **common),
        )
        found = run_together(*(Clients(load, 1) for load in loads))
        made = server.captures() - captures
        for load, records in zip(loads, found, strict=True):
            answered = sorted((one.first, one.start - began) for one in records if not one.error)
            if not answered:
                raise RuntimeError(f"no {kind_of(load)} was answered: {records[0].status} {records[0].message}")
            slowest = [{"first_ms": 1e3 * first, "at_s": at} for first, at in answered[-8:]]
            row: Row = {"when": when, "load": kind_of(load), "captures": made, **row_of(load, records)}
            yield row | {"slowest": slowest}, server.facts()
        if when != "settled":
            server.wait_until_idle()


def _served(scale: Scale, options: argparse.Namespace, flags: Sequence[str]) -> Iterator[tuple[Row, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        made = [] if options.tiny else [served_directory(scale.chat_model, parent), make(scale.speech_model, parent)]
        hosted = [*(random_weights(made) if made else []), "--voices-dir", str(parent / "voices")]
        with serve(*hosted, *flags) as server:
            if options.first_minutes:
                yield from first_minutes(server, scale)
            else:
                server.wait_until_idle()
                yield from measured(server, scale)


def main(words: Sequence[str] | None = None) -> Path:
    parser = command_line("benchmarks.beside", __doc__)
    chats = [name for name, (source, _, _) in SIZES.items() if source.startswith("qwen") and "asr" not in source]
    parser.add_argument("chat_model", nargs="?", default=FULL.chat_model, choices=chats)
    parser.add_argument("--first-minutes", action="store_true")
    parser.add_argument("--seconds", type=float, help="that are counted of each load")
    parser.add_argument("--rate", type=float, help="chats a second; --first-minutes: and as many utterances")
    parser.add_argument("--streams", type=int, help="live streams of speech")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(words)
    scale = TINY if options.tiny else replace(FULL, chat_model=options.chat_model)
    if options.first_minutes:
        scale = replace(scale, rate=0.5, seconds=100.0, words=32, tokens=16, utterance=1.28)
    given = {name: getattr(options, name) for name in ("seconds", "rate", "streams")}
    scale = replace(scale, **{name: value for name, value in given.items() if value is not None})
    flags = [] if options.first_minutes else [*SETTINGS, "--max-running", str(scale.max_running)]
    return record(
        f"{'first_minutes' if options.first_minutes else 'beside'}_{'tiny' if options.tiny else scale.chat_model}",
        _served(scale, options, flags),
        chat_model=scale.chat_model,
        speech_model=scale.speech_model,
        rate=scale.rate,
        streams=0 if options.first_minutes else scale.streams,
        seconds=scale.seconds,
        flags=flags,
    )


if __name__ == "__main__":
    main()
