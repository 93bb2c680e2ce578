"""Start to ready, weights on local disk: with an empty kernel cache, then with a filled one.

    python -m benchmarks.startup [qwen2_vl_2b|voxcpm2] [--warm STARTS] [--tiny]

Full size in the published layout with random values, just written, so that the page cache holds them; --tiny takes the
golden miniatures instead, to try the script.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.checkpoints import GOLDEN, SIZES, make
from benchmarks.record import Row, record
from benchmarks.server import serve
from benchmarks.weights import write_weights

MODELS = ("qwen2_vl_2b", "voxcpm2")


def measure(flags: list[str], kernels: Path) -> Row:
    """kernels: the directory of Triton's cache."""
    with serve(*flags, environment={"TRITON_CACHE_DIR": str(kernels)}) as server:
        at_ready, began = server.recordings(), time.monotonic()
        last = server.settle()
        return {
            "ready_s": server.ready_seconds,
            "recorded_s": server.ready_seconds + last - began,
            "load_s": server.metric("reprise_model_load_duration_seconds_sum"),
            "capture_s": server.metric("reprise_graph_capture_duration_seconds_sum"),
            "recordings_at_ready": at_ready,
            "recordings": server.recordings(),
            "graph_bytes": server.metric("reprise_graph_bytes"),
            "gpu_memory_bytes": server.samples("reprise_gpu_memory_bytes", "state"),
        }


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("model", nargs="?", default=MODELS[0], choices=MODELS)
    parser.add_argument("--warm", type=int, default=2, metavar="STARTS", help="with a filled kernel cache (default 2)")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(words)
    model: str = arguments.model
    with tempfile.TemporaryDirectory() as folder:
        directory = GOLDEN / SIZES[model][0] if arguments.tiny else make(model, Path(folder))
        num_bytes = 0 if arguments.tiny else write_weights(directory)
        kernels, flags = Path(folder) / "kernels", ["--model", str(directory)]
        starts = ["cold", *["warm"] * arguments.warm]
        return record(
            f"startup_{'tiny' if arguments.tiny else model}",
            (({"kernel_cache": cache} | measure(flags, kernels), {}) for cache in starts),
            model=model,
            weight_bytes=num_bytes,
        )


if __name__ == "__main__":
    main()
