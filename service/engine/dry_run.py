"""`reprise serve --dry-run`: how much memory of a GPU a start would use, computed without a GPU.

The models are built on the meta device, from config.json and the headers of the weights; their largest passes run on
tensors without data, and memory.py divides the memory as at a start. Weights, caches and slot state are exact.
Activations are those of the CPU path, which needs somewhat more memory than the GPU's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import torch

from service.engine.memory import LiveBytes, MemoryPlanError, Reserved, Room, reserve, share_pages
from service.engine.start import load_worker
from service.graphs.observations import Observations
from service.graphs.pool import GraphPool
from service.link.config import EngineConfig

CONTEXT_BYTES = 1 << 30
"""Bytes of CUDA's context, loaded kernels, the libraries' workspaces and what the allocator's blocks cannot use: 1.16
GB on an H100 with VoxCPM2."""
GIB = 1 << 30
USUAL_POSITIONS = 1024
"""Positions of a request for which `lines` prints how many fit. A picture of 448 x 448 takes 256; for speech this is
nearly three minutes."""


@dataclass(frozen=True)
class HostedSize:
    """What one model would get."""

    name: str
    weights: int
    """Bytes."""
    positions: int
    """Positions of its KV cache."""
    context: int
    """Maximum number of positions of a request."""
    running: int
    """Maximum number of requests that run together."""
    states: int
    """Bytes of recurrent states."""
    snapshots: int
    """Number of recurrent states besides those of so many requests."""

    def at_once(self, positions: int) -> int:
        """Number of requests of `positions` positions each that can run together."""
        return min(self.running, self.positions // min(positions, self.context))


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run."""

    total: int
    """Bytes of the GPU."""
    share: float
    """The setting `memory_share`."""
    memory: Reserved
    models: tuple[HostedSize, ...]
    refusal: str | None = None
    """Why a start would fail."""

    def lines(self) -> Iterator[str]:
        """The lines of the report."""
        memory = self.memory
        yield f"on each GPU of {self.total / GIB:.1f} GiB a start would use"
        yield _amount("of it, by --memory-share", f"{self.share:g}", memory.budget)
        for model in self.models:
            yield _amount("weights", model.name, model.weights)
        yield _amount("CUDA, about", "", CONTEXT_BYTES)
        yield _amount("activations, about", "", memory.workspace)
        yield _amount("captured graphs, at most", "--graph-memory", memory.graphs)
        yield _amount("slot state, caches, codec", "", memory.state)
        yield _amount("left for KV caches", "", memory.left)
        for model in self.models if self.refusal is None else ():
            yield (
                f"{model.name}: a KV cache of {model.positions} positions; at once {model.at_once(USUAL_POSITIONS)} "
                f"requests of {min(USUAL_POSITIONS, model.context)} positions, {model.at_once(model.context)} of the "
                f"longest, {model.context} (--max-running {model.running})"
            )
            if model.states:
                yield (
                    f"{model.name}: of the slot state {model.states / GIB:.2f} GiB are recurrent states, of "
                    f"{model.running} requests at once and at least {model.snapshots} prefixes"
                )


def dry_run(config: EngineConfig, total: int) -> DryRun:
    """Computes what a start would use of a GPU of `total` bytes. Needs no GPU and reads no weights.

    Raises CheckpointError, and MemoryPlanError if graph memory is too small for a model's largest pass.
    """
    meta, config = torch.device("meta"), msgspec.structs.replace(config, gpu_bytes=total)
    pool, workers, weights = GraphPool(meta, config.graph_bytes), [], []
    with torch.inference_mode():
        for model in config.models:
            with LiveBytes() as counted:
                workers.append(load_worker(config, model, meta, pool, Observations()))
            weights.append(counted.live)
        reserved = reserve(config, workers, lambda: Room(total, sum(weights) + CONTEXT_BYTES))
    assert reserved is not None
    refusal, pages = None, {worker.name: 1 for worker in workers}
    try:
        pages = share_pages(config, workers, reserved)
    except MemoryPlanError as error:
        refusal = str(error)
    hosted = []
    for worker, num_bytes in zip(workers, weights, strict=True):
        positions = (pages[worker.name] - 1) * config.page_size
        # A worker can use the pages of as many full contexts as run, and one scratch page.
        context = (worker.max_pages - 1) // worker.slots * config.page_size
        states, snapshots = worker.state_rows * worker.state_row_bytes, worker.state_rows - 1 - 2 * worker.slots
        hosted.append(HostedSize(worker.name, num_bytes, positions, context, worker.slots, states, snapshots))
    return DryRun(total, config.memory_share, reserved, tuple(hosted), refusal)


def _amount(what: str, of: str, num_bytes: int) -> str:
    return f"  {what:<28}{of:<24}{num_bytes / GIB:8.2f} GiB"
