"""A quantised checkpoint of full size on a part of a GPU that stands for a smaller card: start, memory, and pictures.

    python -m benchmarks.small_gpu [MODEL] [--card 8] [--starts 2] [--tiny]

Weights are random numbers rounded to the codes of AWQ. This process takes the rest of the GPU's memory, so that a
server that wants more runs out of it, as on the card; the engine is told the card's size. Each start is a row: the
memory by `--dry-run` and as the engine divided it, seconds, and what clients saw who asked about pictures. `read_s`:
reading the file and copying it to the GPU; the rest of `load_s` unpacks and checks, and in the first start compiles
kernels. --tiny takes a miniature, on any machine.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.checkpoints.published import GOLDEN, make
from benchmarks.checkpoints.tokenizers import PUBLISHED, grow_file
from benchmarks.checkpoints.weights import write_weights
from benchmarks.loads.rows import row_of
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import Row, record
from benchmarks.servers.process import Server, serve
from benchmarks.servers.small_gpu import GPU_BYTES, PROGRAM
from models.checkpoints.weight_files import shard_paths, tensors
from service.cli.bench.run import run_load
from service.cli.bench.traffic import ChatLoad
from service.settings.settings import load_settings
from service.sizing import size

MODELS, FORM = ("qwen2_5_vl_3b", "qwen2_vl_2b", "qwen2_vl_7b"), "awq"
CARDS = {8: 7.8, 12: 11.7, 16: 15.7, 24: 23.6}
"""GiB that a card gives to programs, by the GB of its name."""
PARTS = ("used", "workspace", "graphs", "state", "left")
_DIVIDED = re.compile(r"memory: (\d+) bytes in use, (\d+) workspace, (\d+) graphs, (\d+) slot state, (\d+) left")


@contextmanager
def rest_taken(num_bytes: int) -> Iterator[None]:
    """Takes the first GPU's memory but for `num_bytes`; without a GPU nothing."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(0)[0] if torch.cuda.is_available() else num_bytes
    taken = torch.empty(free - num_bytes, dtype=torch.uint8, device="cuda:0") if free > num_bytes else None
    yield
    del taken
    torch.cuda.empty_cache()


def read_seconds(directory: Path) -> float:
    device, began = "cuda" if torch.cuda.is_available() else "cpu", time.monotonic()
    for path in shard_paths(directory):
        for tensor in tensors(path):
            tensor.read().to(device)
    return time.monotonic() - began


def divided(server: Server) -> dict[str, int]:
    """The memory as the engine divided it, by its log; empty on a CPU."""
    found = _DIVIDED.search(server.log.read_text())
    return {} if found is None else dict(zip(PARTS, map(int, found.groups()), strict=True))


def measure(directory: Path, num_bytes: int, kernels: Path, side: int) -> Row:
    """kernels: the directory of Triton's cache. side: of the pictures, in pixels."""
    environment = {GPU_BYTES: str(num_bytes), "TRITON_CACHE_DIR": str(kernels)}
    with rest_taken(num_bytes), serve("--model", str(directory), environment=environment, program=PROGRAM) as server:
        load = ChatLoad(
            url=server.url, model=server.models()[0], requests=32, seed=1, concurrency=8, width=side, height=side
        )
        asked = row_of(load, run_load(load))
        return {
            "ready_s": server.ready_seconds,
            "load_s": server.metric("reprise_model_load_duration_seconds_sum"),
            "phases_s": server.samples("reprise_start_phase_seconds", "phase"),
            "divided": divided(server),
            "pages": server.samples("reprise_kv_cache_pages", "state"),
            "gpu_memory_bytes": server.samples("reprise_gpu_memory_bytes", "state"),
            "out_of_memory": server.log.read_text().count("out of memory"),
            **asked,
        }


def main(words: Sequence[str] | None = None) -> Path:
    parser = command_line("benchmarks.small_gpu", __doc__)
    parser.add_argument("model", nargs="?", default=MODELS[0], choices=MODELS)
    parser.add_argument("--card", type=int, default=8, choices=CARDS, metavar="GB", help="8, 12, 16 or 24")
    parser.add_argument("--starts", type=int, default=2, help="the first one with an empty kernel cache (default 2)")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(words)
    num_bytes = round(CARDS[given.card] * 2**30)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.tiny:
            directory = GOLDEN / "quantised" / FORM
        else:
            directory = make(given.model, folder, FORM)
            grow_file(directory / "tokenizer.json", PUBLISHED)
            write_weights(directory)
        planned = size(load_settings({"model": [str(directory)]}), str(num_bytes)).memory
        facts = {
            "model": given.model,
            "form": FORM,
            "gpu_bytes": num_bytes,
            "weight_bytes": sum(path.stat().st_size for path in directory.glob("*.safetensors")),
            "dry_run": {part: getattr(planned, part) for part in PARTS},
            "read_s": read_seconds(directory),
        }
        side = 56 if given.tiny else 448
        rows = (measure(directory, num_bytes, folder / "kernels", side) for _ in range(given.starts))
        name = f"small_gpu_{'tiny' if given.tiny else given.model}_{FORM}_{given.card}"
        return record(name, ((row, {}) for row in rows), **facts)


if __name__ == "__main__":
    main()
