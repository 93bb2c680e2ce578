"""Vision chat through HTTP at full size with random weights: time to first token, decode throughput, open loop.

python -m benchmarks.chat_http latency|decode|arrivals [MODEL]
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
from service.bench.spec import ChatLoad


def latency(server: Server, model: str) -> list[dict[str, Any]]:
    """One client, one request at a time: a JPEG and about 128 text tokens, every one new."""
    rows = []
    for width, height in ((224, 224), (448, 448), (1024, 1024)):
        load = ChatLoad(
            url=server.url,
            model=model,
            requests=30,
            seed=width,
            concurrency=1,
            warmup=4,
            width=width,
            height=height,
            text_characters=110,
            output_tokens=2,
        )
        rows.append({"input": f"{width}x{height} JPEG", **_row(load)})
    text = ChatLoad(
        url=server.url, model=model, requests=30, seed=7, concurrency=1, images=0, text_characters=360, output_tokens=2
    )
    rows.append({"input": "text", **_row(text)})
    return rows


def decode(server: Server, model: str) -> list[dict[str, Any]]:
    """Closed loop of text requests: gaps between tokens and tokens per second at the clients."""
    rows = []
    for streams in (1, 8, 32, 64, 128):
        load = ChatLoad(
            url=server.url,
            model=model,
            requests=2 * streams,
            seed=streams,
            concurrency=streams,
            images=0,
            text_characters=100,
            output_tokens=256,
        )
        rows.append({"streams": streams, **_row(load, processes=min(8, streams))})
    return rows


def arrivals(server: Server, model: str) -> list[dict[str, Any]]:
    """Eight 224 x 224 pictures, 32 text tokens in and one out, Poisson arrivals: 36 a second, then more."""
    rows = []
    for rate, requests in ((12, 240), (24, 480), (36, 1200), (44, 600)):
        load = ChatLoad(
            url=server.url,
            model=model,
            requests=requests,
            seed=rate,
            rate=rate,
            images=8,
            width=224,
            height=224,
            text_characters=20,
            output_tokens=1,
        )
        rows.append({"rate": rate, **_row(load, processes=8, preparation=12.0)})
        print(table(rows[-1:]), flush=True)
    return rows


def _row(load: ChatLoad, processes: int = 1, preparation: float = 3.0) -> dict[str, Any]:
    result = summary(load, run_load(load, processes=processes, preparation=preparation))
    row = {"succeeded": result["succeeded"], "refused": result["refused"], "failed": result["failed"]}
    if not result["succeeded"]:
        return row
    row |= {f"first_{name}_ms": 1e3 * result["first"][name] for name in ("mean", "p50", "p95", "p99")}
    if gap := result.get("gap"):
        row |= {"gap_p50_ms": 1e3 * gap["p50"], "gap_p95_ms": 1e3 * gap["p95"]}
    row |= {"tokens_per_s": result.get("tokens_per_second", 0.0), "requests_per_s": result["requests_per_second"]}
    return row | {"prompt_tokens": result["prompt_tokens_mean"], "cached_tokens": result["cached_tokens"]}


RUNS = {"latency": latency, "decode": decode, "arrivals": arrivals}
MAX_RUNNING = {"latency": "16", "decode": "128", "arrivals": "256"}


def main() -> None:
    kind, model = sys.argv[1], (sys.argv[2:] or ["qwen2_vl_2b"])[0]
    with tempfile.TemporaryDirectory() as folder:
        flags = [*random_weights([make(model, Path(folder))]), "--max-running", MAX_RUNNING[kind]]
        flags += ["--max-in-flight", "1024", "--max-waiting", "1024", "--media-threads", "8"]
        with serve(*flags) as server:
            rows = RUNS[kind](server, model)
            hits = server.metric("reprise_encoder_cache_hits_total")
            facts = {
                "ready_seconds": server.ready_seconds,
                "encoder_cache_hits": hits,
                "prefix_cache_hit_tokens": server.metric("reprise_prefix_cache_hit_tokens_total"),
                "graph_bytes": server.metric("reprise_graph_bytes"),
                "replayed_decode_steps": server.metric("reprise_steps_total", kind="decode", route="replay"),
                "eager_decode_steps": server.metric("reprise_steps_total", kind="decode", route="eager"),
                "mixed_steps": server.metric("reprise_steps_total", kind="mixed"),
            }
    write(f"chat_http_{kind}_{model}", rows, model=model, flags=flags[2:], **facts)
    print(facts)
    print(table(rows))


if __name__ == "__main__":
    main()
