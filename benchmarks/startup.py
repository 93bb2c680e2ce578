"""Start to ready, weights on local disk: with an empty kernel cache, then with a filled one.

    python -m benchmarks.startup [qwen2_vl_2b|voxcpm2] [--warm STARTS] [--tiny]

Full size in the published layout with random values, just written, so that the page cache holds them, and tokenizers
with as many entries as the published ones; --tiny takes the golden miniatures instead, to try the script.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.checkpoints.published import GOLDEN, SIZES, make
from benchmarks.checkpoints.tokenizers import PUBLISHED, grow_file
from benchmarks.checkpoints.weights import write_weights
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import Row, record
from benchmarks.servers.process import serve

MODELS = {"qwen2_vl_2b": PUBLISHED, "voxcpm2": 73_440}
"""Entries of the published tokenizers."""


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


def main(words: Sequence[str] | None = None) -> Path:
    parser = command_line("benchmarks.startup", __doc__)
    parser.add_argument("model", nargs="?", default=next(iter(MODELS)), choices=MODELS)
    parser.add_argument("--warm", type=int, default=2, metavar="STARTS", help="with a filled kernel cache (default 2)")
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
        starts = ["cold", *["warm"] * arguments.warm]
        rows = ({"kernel_cache": cache} | measure(flags, kernels) for cache in starts)
        return record(
            f"startup_{'tiny' if arguments.tiny else model}",
            ((row, {}) for row in rows),
            model=model,
            weight_bytes=num_bytes,
        )


if __name__ == "__main__":
    main()
