"""Speech through HTTP at full size with random weights: closed loop at several streams, open loop at rising rates.

    python -m benchmarks.speech_http closed|open

Utterances have a fixed number of patches: the weights are random, so the stop head decides nothing of use.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import make
from benchmarks.record import table, write
from benchmarks.server import Server, random_weights, serve
from service.bench.run import run_load, summary
from service.bench.spec import SpeechLoad

MODEL = "voxcpm2"


def closed(server: Server) -> list[dict[str, Any]]:
    """Streams of 10.08 s utterances, each client sending the next as soon as one ends."""
    rows = []
    for streams in (1, 8, 16, 32, 64):
        load = SpeechLoad(
            url=server.url,
            model=MODEL,
            requests=max(4, 2 * streams),
            seed=streams,
            concurrency=streams,
            text_words=10,
            seconds=10.08,
        )
        rows.append({"streams": streams, **_row(load, processes=min(8, streams))})
        print(table(rows[-1:]), flush=True)
    return rows


def opened(server: Server) -> list[dict[str, Any]]:
    """Poisson arrivals of 5.12 s utterances for about 15 s each rate."""
    rows = []
    for rate in (5, 20, 40, 60, 80):
        load = SpeechLoad(
            url=server.url, model=MODEL, requests=15 * rate, seed=rate, rate=rate, text_words=6, seconds=5.12
        )
        rows.append({"rate": rate, **_row(load, processes=8)})
        print(table(rows[-1:]), flush=True)
    return rows


def _row(load: SpeechLoad, processes: int) -> dict[str, Any]:
    result = summary(load, run_load(load, processes=processes, preparation=1.5))
    row = {"succeeded": result["succeeded"], "refused": result["refused"], "failed": result["failed"]}
    if not result["succeeded"]:
        return row
    return row | {
        "first_p50_ms": 1e3 * result["first"]["p50"],
        "first_p95_ms": 1e3 * result["first"]["p95"],
        "rtf_p50": result["realtime_factor"]["p50"],
        "rtf_p95": result["realtime_factor"]["p95"],
        "audio_s_per_s": result["audio_seconds_per_second"],
        "streams_with_underrun": result["streams_with_underrun"],
        "underrun_s": result["underrun_seconds"],
        "requests_per_s": result["requests_per_second"],
    }


RUNS = {"closed": closed, "open": opened}


def main() -> None:
    kind = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        flags = [*random_weights([make(MODEL, Path(folder))]), "--max-in-flight", "2048", "--max-waiting", "1024"]
        flags += ["--max-running", "64" if kind == "closed" else "128"]
        with serve(*flags) as server:
            rows = RUNS[kind](server)
            facts = {"ready_seconds": server.ready_seconds, "graph_bytes": server.metric("reprise_graph_bytes")}
    write(f"speech_http_{kind}", rows, model=MODEL, flags=flags[2:], **facts)
    print(facts)
    print(table(rows))


if __name__ == "__main__":
    main()
