"""Vision chat through HTTP with clients in their own processes: time to first token, decode, open loop.

    python -m benchmarks.chat_http latency|decode|arrivals [MODEL] [--seconds 60] [--tiny]

Full size and random weights; --tiny serves the embedded model instead, to try the script. Every picture and every
prompt is new, down to its first page, and the result counts the hits of the caches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.published import SIZES, make
from benchmarks.loads.highest_rate import highest
from benchmarks.loads.rows import row_of
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import Row, record
from benchmarks.servers.process import Server, random_weights, serve
from service.cli.bench.run import run_load
from service.cli.bench.traffic import ChatLoad

FIRST_TOKEN_MEAN, FIRST_TOKEN_P99 = 0.150, 0.300
"""Seconds of TTFT, mean and 99th percentile, up to which a rate counts as sustained."""
SEED_RATE = 36
SEED_PROMPTS = 1200


@dataclass(frozen=True)
class Scale:
    """repeats of each latency; streams and tokens of each for decode; rates for arrivals, at the seed's rate
    `seed_prompts` requests and at the others as many as arrive in `duration` s."""

    repeats: int
    squares: tuple[int, ...]
    streams: tuple[int, ...]
    tokens: int
    rates: tuple[float, ...]
    seed_prompts: int
    duration: float
    resolution: float
    processes: int


FULL = Scale(40, (224, 448, 1024), (1, 8, 32, 64, 128), 256, (12, SEED_RATE, 48, 60), SEED_PROMPTS, 60.0, 6.0, 8)
TINY = Scale(4, (56, 112), (1, 2), 8, (1, 2), 4, 2.0, 1.0, 1)


def latency(server: Server, model: str, scale: Scale) -> Iterator[Row]:
    """One client, one request at a time: a JPEG and about 128 text tokens; last as many text tokens as 448 x 448. Each
    row has the means of the server's own stages beside it, warm-up included."""
    inputs: dict[str, dict[str, Any]] = {
        f"{side}x{side} JPEG": {"seed": side, "warmup": 4, "width": side, "height": side, "text_characters": 110}
        for side in scale.squares
    }
    inputs["text"] = {"seed": 7, "images": 0, "text_characters": 360}
    for name, shape in inputs.items():
        load = ChatLoad(url=server.url, model=model, requests=scale.repeats, concurrency=1, output_tokens=2, **shape)
        before = _stages(server)
        yield {"input": name, **_row(load), **_means(before, _stages(server))}


STAGES = {
    "media_decode": "media_decode_duration",
    "preprocess": "preprocess_duration",
    "tokenize": "tokenize_duration",
    "queue": "queue_duration",
    "vision_encode": "vision_encode_duration",
    "prefill": "prefill_duration",
    "server_first": "time_to_first_token",
}
"""Columns, and the server's histograms whose means they are."""


def _stages(server: Server) -> dict[str, tuple[float, float]]:
    """Seconds and number of observations by column."""
    names = {column: f"reprise_{name}_seconds" for column, name in STAGES.items()}
    return {column: (server.metric(f"{name}_sum"), server.metric(f"{name}_count")) for column, name in names.items()}


def _means(before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]) -> dict[str, float | None]:
    """Mean in milliseconds between two readings; None if nothing was observed."""
    found: dict[str, float | None] = {}
    for column, (seconds, count) in after.items():
        first_seconds, first_count = before[column]
        more = count - first_count
        found[f"{column}_ms"] = 1e3 * (seconds - first_seconds) / more if more else None
    return found


def decode(server: Server, model: str, scale: Scale) -> Iterator[Row]:
    """Closed loop of text requests: gaps between tokens and tokens per second at the clients, and the time of the
    engine's Python for a decode step."""
    for streams in scale.streams:
        load = ChatLoad(
            url=server.url,
            model=model,
            requests=max(4, 2 * streams),
            seed=streams,
            concurrency=streams,
            images=0,
            text_characters=100,
            output_tokens=scale.tokens,
        )
        seconds, steps = _host_time(server)
        row = {"streams": streams, **_row(load, min(scale.processes, streams))}
        seconds_after, steps_after = _host_time(server)
        yield {**row, "step_host_us": 1e6 * (seconds_after - seconds) / (steps_after - steps)}


def _host_time(server: Server) -> tuple[float, float]:
    """Python's seconds in decode steps, and their number."""
    name = "reprise_step_host_duration_seconds"
    return server.metric(f"{name}_sum", kind="decode"), server.metric(f"{name}_count", kind="decode")


def arrivals(server: Server, model: str, scale: Scale) -> Iterator[Row]:
    """Eight 224 x 224 pictures, about 32 text tokens in and one out, Poisson arrivals."""

    def measure(rate: float) -> Row:
        load = ChatLoad(
            url=server.url,
            model=model,
            requests=scale.seed_prompts if rate == SEED_RATE else round(scale.duration * rate),
            seed=round(10 * rate),
            rate=rate,
            images=8,
            width=224,
            height=224,
            text_characters=20,
            output_tokens=1,
        )
        return {"rate": rate, **_row(load, scale.processes)}

    return highest(measure, _sustained, scale.rates, scale.resolution)


def _sustained(row: Row) -> bool:
    whole = not row["refused"] and not row["failed"]
    return whole and row["first_mean_ms"] <= 1e3 * FIRST_TOKEN_MEAN and row["first_p99_ms"] <= 1e3 * FIRST_TOKEN_P99


def _row(load: ChatLoad, processes: int = 1) -> Row:
    return row_of(load, run_load(load, processes=processes))


RUNS: dict[str, Callable[[Server, str, Scale], Iterator[Row]]] = {
    "latency": latency,
    "decode": decode,
    "arrivals": arrivals,
}
MAX_RUNNING = {"latency": "16", "decode": "128", "arrivals": "256"}
TINY_MODEL = "reprise/qwen2_vl"


def _measured(kind: str, model: str, scale: Scale, flags: Sequence[str]) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row, and the facts that its server reports at that time."""
    with serve(*flags) as server:
        server.wait_until_idle()
        for row in RUNS[kind](server, model, scale):
            yield row, server.facts()


def main(words: Sequence[str] | None = None) -> Path:
    parser = command_line("benchmarks.chat_http", __doc__)
    parser.add_argument("kind", choices=RUNS)
    parser.add_argument("model", nargs="?", default="qwen2_vl_2b", choices=[n for n in SIZES if n != "voxcpm2"])
    parser.add_argument("--seconds", type=float, help="arrivals: for which each rate is held")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(words)
    kind, scale = arguments.kind, TINY if arguments.tiny else FULL
    if arguments.seconds is not None:
        scale = replace(scale, duration=arguments.seconds)
    model = TINY_MODEL if arguments.tiny else arguments.model
    with tempfile.TemporaryDirectory() as folder:
        hosted = [] if arguments.tiny else random_weights([make(model, Path(folder))])
        settings = ["--max-in-flight", "1024", "--max-waiting", "1024"]
        settings += ["--max-running", "4" if arguments.tiny else MAX_RUNNING[kind]]
        flags = [*hosted, *settings]
        return record(
            f"chat_http_{kind}_{'tiny' if arguments.tiny else model}",
            _measured(kind, model, scale, flags),
            model=model,
            flags=settings,
        )


if __name__ == "__main__":
    main()
