"""128 chats with pictures that begin at once, on a simulated GPU: the time until the last of them has its first token.

    python -m benchmarks.burst [--dilation 4] [--api-processes 1] [--rounds 3] [--name burst]

Real clients, API processes, pictures and tokenizer, and the real engine but for its GPU
(benchmarks.servers.simulated_gpu), whose launches take published times. So the result shows what the processors do, and
says nothing about a GPU. Times are divided by the dilation, processor seconds are not. New chats follow those that end,
as in `benchmarks.serving closed`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.checkpoints.served import TINY_MODEL, miniature_directory
from benchmarks.loads.raw_client import answers
from benchmarks.measure.record import Row, record
from benchmarks.servers.footprint import processor_seconds
from benchmarks.servers.process import Server, random_weights, serve
from benchmarks.servers.simulated_gpu import KV_CACHE_TOKENS
from service.cli.bench.spec import ChatLoad
from service.cli.bench.traffic import payload

STREAMS = 128
SIDE, TEXT_WORDS, SYSTEM_TOKENS, TOKENS = 448, 128, 500, 128
FOLLOWING = 2
"""Number of chats for each stream."""
SETTINGS = ("--max-in-flight", "1024", "--max-waiting", "1024", "--max-running", str(STREAMS), "--media-threads", "8")
PASSES = ("encoder", "mixed", "decode")


def bodies(count: int, seed: int, *, tokens: int = TOKENS) -> list[bytes]:
    load = ChatLoad(
        url="",
        model=TINY_MODEL,
        requests=count,
        seed=seed,
        width=SIDE,
        height=SIDE,
        text_words=TEXT_WORDS,
        system_tokens=SYSTEM_TOKENS,
        output_tokens=tokens,
    )
    rng = np.random.default_rng(seed)
    return [msgspec.json.encode(payload(load, rng)) for _ in range(count)]


def burst(server: Server, seed: int, dilation: float, streams: int = STREAMS) -> Row:
    """first: of the burst's chats, since its beginning; later: of the chats that follow, since each was sent."""
    sent = bodies(FOLLOWING * streams, seed)
    before, took = processor_seconds(server.pid), _launches(server)
    got = answers(server.url, sent, streams)
    after, now = processor_seconds(server.pid), _launches(server)
    began = got[0].began
    first = sorted((answer.began + answer.first - began) / dilation for answer in got[:streams])
    later = [answer.first / dilation for answer in got[streams:]]
    seconds = (max(answer.ended for answer in got) - began) / dilation
    return {
        "first_p50_ms": 1e3 * statistics.median(first),
        "first_last_ms": 1e3 * first[-1],
        "later_p50_ms": 1e3 * statistics.median(later),
        "later_max_ms": 1e3 * max(later),
        "requests_per_s": len(got) / seconds,
        **{f"{role}_cpu_s": after[role] - before.get(role, 0.0) for role in sorted(after)},
        **{f"{kind}_launches": now[kind] - took.get(kind, 0.0) for kind in PASSES if kind in now},
    }


def _launches(server: Server) -> dict[str, float]:
    """Seconds of the engine's steps so far, by kind."""
    return server.samples("reprise_step_duration_seconds_count", "kind")


def measured(dilation: float, processes: int, rounds: int, streams: int) -> Iterator[tuple[Row, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            *random_weights([miniature_directory(Path(folder))]),
            *SETTINGS,
            "--kv-cache-tokens",
            str(KV_CACHE_TOKENS),
        ]
        flags += ["--api-processes", str(processes), "--log-level", "warning"]
        program = ["benchmarks.servers.simulated_gpu"]
        with serve(*flags, environment={"REPRISE_DILATION": str(dilation)}, program=program) as server:
            answers(server.url, bodies(4, 1, tokens=2), 4)  # From now on the system prompt is cached.
            for index in range(rounds):
                yield {"streams": streams, "round": index, **burst(server, 100 + index, dilation, streams)}, {}


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.burst", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dilation", type=float, default=4.0, help="times the seconds of every launch")
    parser.add_argument("--api-processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--name", default="burst", help="of the result")
    chosen = parser.parse_args(words)
    facts = {"simulated": "NVIDIA H100", "dilation": chosen.dilation, "api_processes": chosen.api_processes}
    rows = measured(chosen.dilation, chosen.api_processes, chosen.rounds, chosen.streams)
    return record(chosen.name, rows, flags=list(SETTINGS), **facts)


if __name__ == "__main__":
    main()
