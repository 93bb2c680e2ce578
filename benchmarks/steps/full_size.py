"""Models at full size with random weights: their directories, captured graphs, and one result file for several."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints.published import make
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import Row, table, write
from models.checkpoints.checkpoint import Quantization
from models.checkpoints.registry import family_of, resolve
from models.interfaces.capturable import Bucket, Capturable
from service.engine.start import engine_stream
from service.graphs.observations import Observations
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner


def load(
    directory: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16, quantization: Quantization = "none"
) -> Any:
    """ChatModel or SpeechModel of a directory, with random weights."""
    options = {} if quantization == "none" else {"quantization": quantization}
    return resolve(family_of(directory).model)(directory, device, dtype, "random", **options)


def captured(
    name: str,
    kind: str,
    capturable: Capturable,
    buckets: Sequence[Bucket],
    pool: GraphPool,
    stream: torch.cuda.Stream | None = None,
) -> GraphRunner:
    """A runner that replays every one of `buckets`."""
    runner = GraphRunner(name, kind, capturable, buckets, pool, Observations(), capture_stream=lambda _: stream)
    while runner.capture_next(idle=False):
        pass
    missing = [bucket for bucket in buckets if bucket not in runner.captured]
    assert not missing, f"{kind} could not be captured for {missing}"
    return runner


def drawn(layers: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Caches or states, with random values."""
    for layer in layers:
        for values in layer.values():
            values.normal_()
    return layers


def named_models(
    command: str, description: str | None, known: Collection[str], default: Collection[str]
) -> Sequence[str]:
    """Models that the command line of `python -m COMMAND` names; `default` if it names none."""
    parser = command_line(command, description)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(known)}; default: {', '.join(default)}")
    models: list[str] = parser.parse_args().models
    if unknown := [name for name in models if name not in known]:
        parser.error(f"unknown model {unknown[0]!r}; known are {', '.join(known)}")
    return models or list(default)


@torch.inference_mode()
def measure_each(kind: str, names: Sequence[str], measure: Callable[[str, Path, torch.device], list[Row]]) -> list[Row]:
    """Rows of all models of `names` (benchmarks.checkpoints.published.SIZES), one after the other on the first GPU.
    measure: called with a model's name, directory and device. The result file KIND_NAMES is written after each model,
    so that a failing model does not lose the rows of others.
    """
    device = torch.device("cuda", 0)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, engine_stream(device):
        for name in names:
            rows += measure(name, make(name, Path(folder)), device)
            free()
            write(f"{kind}_{'_'.join(names)}", rows)
    return rows


def free() -> None:
    """Returns the memory of unused models and graphs to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def show(row: Row) -> Row:
    """Prints a row as soon as it is measured."""
    print(table([row]), flush=True)
    return row
