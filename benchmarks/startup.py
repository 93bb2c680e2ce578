"""Start to ready, weights on local disk: with an empty kernel cache, then with a filled one. With --waking: how soon a
server that has fallen asleep answers.

    python -m benchmarks.startup [qwen2_vl_2b|voxcpm2] [--waking] [--warm STARTS] [--tiny]

Full size in the published layout with random values, just written, so that the page cache holds them, and tokenizers
with as many entries as the published ones; --tiny takes the golden miniatures instead, to try the script. The request
that wakes the server is sent SLEEP_AFTER seconds after its captures; its row says how much memory of the first GPU was
taken until then and before the server's start, by all processes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.checkpoints.published import GOLDEN, SIZES, make
from benchmarks.checkpoints.tokenizers import PUBLISHED, grow_file
from benchmarks.checkpoints.weights import write_weights
from benchmarks.measure.record import Row, record
from benchmarks.servers.process import Server, gpu_used_bytes, serve
from service.cli.bench.run import run_load
from service.cli.bench.traffic import AnyLoad, ChatLoad, SpeechLoad

MODELS = {"qwen2_vl_2b": PUBLISHED, "voxcpm2": 73_440}
"""Entries of the published tokenizers."""
SPEECH = "voxcpm2"
SLEEP_AFTER = 5
RELEASE_SECONDS = 60.0
"""How long the end of the engine's process is waited for, which comes after it is said to be asleep."""
SETTLED = 1.0
"""Seconds between two looks at the GPU's memory that must be alike."""


def measure(flags: list[str], kernels: Path) -> Row:
    """kernels: the directory of Triton's cache."""
    with serve(*flags, environment={"TRITON_CACHE_DIR": str(kernels)}) as server:
        at_ready, began = server.captures(), time.monotonic()
        last = server.wait_for_captures()
        return {
            "ready_s": server.ready_seconds,
            "captured_s": server.ready_seconds + last - began,
            "load_s": server.metric("reprise_model_load_duration_seconds_sum"),
            "capture_s": server.metric("reprise_graph_capture_duration_seconds_sum"),
            "phases_s": server.samples("reprise_start_phase_seconds", "phase"),
            "captures_at_ready": at_ready,
            "captures": server.captures(),
            "graph_bytes": server.metric("reprise_graph_bytes"),
            "gpu_memory_bytes": server.samples("reprise_gpu_memory_bytes", "state"),
        }


def first_request(server: Server, model: str, side: int) -> AnyLoad:
    if model == SPEECH:
        return SpeechLoad(url=server.url, model=server.models()[0], requests=1, seed=1, concurrency=1, warmup=0)
    return ChatLoad(
        url=server.url,
        model=server.models()[0],
        requests=1,
        seed=1,
        concurrency=1,
        warmup=0,
        width=side,
        height=side,
        text_words=32,
        output_tokens=8,
    )


def released(awake: int | None) -> tuple[int | None, float]:
    """The GPU's bytes in use once they are below `awake` and fall no more, and the seconds until then. After
    RELEASE_SECONDS whatever is in use: who reads it sees that it was not given back."""
    began, before = time.monotonic(), gpu_used_bytes()
    while time.monotonic() - began < RELEASE_SECONDS:
        looked = time.monotonic()
        time.sleep(SETTLED)
        now = gpu_used_bytes()
        if now is None or awake is None:
            return None, time.monotonic() - began
        if before is not None and now < awake / 2 and now >= before:
            return now, looked - began
        before = now
    return before, time.monotonic() - began


def wake(flags: list[str], kernels: Path, model: str, side: int) -> Row:
    """A request to a server that sleeps: until its first token or audio, and until all is captured again."""
    sleeping = [*flags, "--sleep-after", str(SLEEP_AFTER)]
    before_bytes = gpu_used_bytes()  # This process wrote the weights with the GPU, and keeps its context.
    with serve(*sleeping, environment={"TRITON_CACHE_DIR": str(kernels)}) as server:
        awake_bytes = gpu_used_bytes()
        while server.metric("reprise_engine_asleep") < 1:
            time.sleep(0.25)
        asleep_bytes, released_s = released(awake_bytes)
        began = time.monotonic()
        (answer,) = run_load(first_request(server, model, side))
        if answer.error:
            raise RuntimeError(f"the request that woke the server: {answer.status} {answer.message}")
        return {
            "gpu_used_bytes": {"before": before_bytes, "awake": awake_bytes, "asleep": asleep_bytes},
            "released_s": released_s,
            "first_s": answer.first,
            "captured_s": server.wait_for_captures() - began,
            "phases_s": server.samples("reprise_start_phase_seconds", "phase"),
            "waking_s": server.metric("reprise_engine_wake_duration_seconds_sum"),
        }


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("model", nargs="?", default=next(iter(MODELS)), choices=MODELS)
    parser.add_argument("--warm", type=int, default=2, metavar="STARTS", help="with a filled kernel cache (default 2)")
    parser.add_argument("--waking", action="store_true", help="after sleep in the place of starts")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(words)
    model: str = arguments.model
    with tempfile.TemporaryDirectory() as folder:
        directory = GOLDEN / SIZES[model][0] if arguments.tiny else make(model, Path(folder))
        num_bytes = 0
        if not arguments.tiny:
            grow_file(directory / "tokenizer.json", MODELS[model])
            num_bytes = write_weights(directory)
        kernels, flags = Path(folder) / "kernels", ["--model", str(directory)]
        rows: Iterable[Row]
        if arguments.waking:
            rows = (wake(flags, kernels, model, 56 if arguments.tiny else 448) for _ in range(arguments.warm))
        else:
            starts = ["cold", *["warm"] * arguments.warm]
            rows = ({"kernel_cache": cache} | measure(flags, kernels) for cache in starts)
        return record(
            f"{'waking' if arguments.waking else 'startup'}_{'tiny' if arguments.tiny else model}",
            ((row, {}) for row in rows),
            model=model,
            weight_bytes=num_bytes,
        )


if __name__ == "__main__":
    main()
