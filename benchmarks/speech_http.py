"""Speech through HTTP with clients in their own processes: closed loop with several streams, open loop at several
rates, and live listeners for minutes.

    python -m benchmarks.speech_http closed|mp3|open [--seconds 60] [--tiny]
    python -m benchmarks.speech_http listeners [--rates 110 125 137] [--ramp 60] [--seconds 300] [--max-running 256]

Full size and random weights; --tiny serves the embedded model instead, to try the script. Utterances have a fixed
number of patches, since the decisions of a random stop head are of no use. Every text is new, in one of the built-in
voices; the codec is part of every step.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.published import make
from benchmarks.loads.highest_rate import highest
from benchmarks.loads.rows import SOLVER_STEPS, VOICES, row_of
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import Row, record
from benchmarks.servers.process import Server, random_weights, serve
from service.cli.bench.run import run_load
from service.cli.bench.traffic import SpeechLoad

MODEL = "voxcpm2"
FIRST_AUDIO_P95 = 0.150
"""Seconds of time to first audio up to which a rate without an underrun counts as sustained."""


@dataclass(frozen=True)
class Scale:
    """Closed loop: `rounds` utterances of `long` s for each stream. Open loop: utterances of `short` s for `duration` s
    at each rate; the search between the last rate that held and the first that did not ends at `resolution`. Listeners:
    utterances of `short` s at each of listener_rates for `ramp` s and then for `counted` s."""

    model: str
    max_running: int
    streams: tuple[int, ...]
    rounds: int
    long: float
    rates: tuple[float, ...]
    short: float
    duration: float
    resolution: float
    listener_rates: tuple[float, ...]
    ramp: float
    counted: float
    processes: int


FULL = Scale(
    model=MODEL,
    max_running=64,
    streams=(1, 8, 16, 32, 64),
    rounds=16,
    long=10.08,
    rates=(40, 60, 80, 100, 120),
    short=5.12,
    duration=60.0,
    resolution=10.0,
    listener_rates=(520 / 5.12, 125, 137),
    ramp=60.0,
    counted=300.0,
    processes=8,
)
TINY = Scale(
    model="reprise/voxcpm2",
    max_running=4,
    streams=(1, 2),
    rounds=2,
    long=0.64,
    rates=(1, 2),
    short=0.64,
    duration=3.0,
    resolution=1.0,
    listener_rates=(2,),
    ramp=1.0,
    counted=2.0,
    processes=1,
)


def closed(server: Server, scale: Scale, response_format: str) -> Iterator[Row]:
    """Each client sends the next utterance as soon as one ends."""
    for streams in scale.streams:
        load = SpeechLoad(
            url=server.url,
            model=scale.model,
            requests=max(3, scale.rounds * streams),
            seed=streams,
            concurrency=streams,
            text_words=13,
            seconds=scale.long,
            response_format=response_format,
            solver_steps=SOLVER_STEPS,
            voices=VOICES,
        )
        records = run_load(load, processes=min(scale.processes, streams))
        yield {"streams": streams, **row_of(load, records)}


def arrivals(
    server: Server, scale: Scale, rates: Sequence[float], seconds: float, *, ramp: float = 0.0, resolution: float
) -> Iterator[Row]:
    """Poisson arrivals at rising rates up to the first one that is not sustained, then between it and the last one that
    was; requests of the ramp are not counted. A rate of utterances by the seconds of one are the listeners at any time.
    """

    def measure(rate: float) -> Row:
        load = SpeechLoad(
            url=server.url,
            model=scale.model,
            requests=round((ramp + seconds) * rate),
            seed=round(10 * rate),
            rate=rate,
            text_words=6,
            seconds=scale.short,
            solver_steps=SOLVER_STEPS,
            voices=VOICES,
        )
        records = run_load(load, processes=scale.processes)
        counted_from = min(record.start - record.delay for record in records) + ramp
        counted = [record for record in records if record.start - record.delay >= counted_from]
        return {"rate": rate, "listeners": rate * scale.short, **row_of(load, counted)}

    return highest(measure, _sustained, rates, resolution)


def _sustained(row: Row) -> bool:
    if not row["succeeded"] or row["refused"] or row["failed"]:
        return False
    return not row["streams_with_underrun"] and row["first_p95_ms"] <= 1e3 * FIRST_AUDIO_P95


RUNS: dict[str, Callable[[Server, Scale], Iterator[Row]]] = {
    "closed": lambda server, scale: closed(server, scale, "pcm"),
    "mp3": lambda server, scale: closed(server, scale, "mp3"),
    "open": lambda server, scale: arrivals(server, scale, scale.rates, scale.duration, resolution=scale.resolution),
    "listeners": lambda server, scale: arrivals(
        server, scale, scale.listener_rates, scale.counted, ramp=scale.ramp, resolution=math.inf
    ),
}


def _measured(kind: str, scale: Scale, flags: Sequence[str]) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row, and the facts that the server reports at that time."""
    with serve(*flags) as server:
        server.wait_until_idle()
        for row in RUNS[kind](server, scale):
            tokens, requests = (
                server.metric(f"reprise_request_input_tokens_{name}", model=scale.model) for name in ("sum", "count")
            )
            yield row, {**server.facts(), "text_tokens_mean": tokens / requests}


def main(words: Sequence[str] | None = None) -> Path:
    parser = command_line("benchmarks.speech_http", __doc__)
    parser.add_argument("kind", choices=RUNS)
    parser.add_argument("--rates", type=float, nargs="+", help="listeners: utterances a second, rising")
    parser.add_argument("--ramp", type=float, help="listeners: seconds of a rate before those that are counted")
    parser.add_argument("--seconds", type=float, help="open, listeners: counted for each rate")
    parser.add_argument("--max-running", type=int, help="of the server; by default 64, 128 for open, 256 for listeners")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(words)
    kind, scale = arguments.kind, TINY if arguments.tiny else FULL
    if arguments.rates is not None:
        scale = replace(scale, listener_rates=tuple(arguments.rates))
    if arguments.ramp is not None:
        scale = replace(scale, ramp=arguments.ramp)
    if arguments.seconds is not None:
        scale = replace(scale, duration=arguments.seconds, counted=arguments.seconds)
    max_running = arguments.max_running or scale.max_running * {"open": 2, "listeners": 4}.get(kind, 1)
    with tempfile.TemporaryDirectory() as folder:
        hosted = [] if arguments.tiny else random_weights([make(MODEL, Path(folder))])
        settings = ["--max-in-flight", "2048", "--max-waiting", "1024"]
        settings += ["--max-running", str(max_running)]
        held = {"ramp": scale.ramp, "seconds": scale.counted} if kind == "listeners" else {}
        return record(
            f"speech_http_{kind}{'_tiny' if arguments.tiny else ''}",
            _measured(kind, scale, [*hosted, *settings]),
            model=scale.model,
            solver_steps=SOLVER_STEPS,
            voices=list(VOICES),
            flags=settings,
            **held,
        )


if __name__ == "__main__":
    main()
