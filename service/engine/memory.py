"""Memory on the device, sized before the first request: weights, workspace, graphs, slot state, then pages.

On CUDA pages get what is left of the operator's share. On a CPU they are sized by positions. Over-commitment fails at
start and names the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from service.engine.config import ConfigurationError, EngineConfig
from service.engine.worker import MemoryNeeds, ModelWorker

log = logging.getLogger(__name__)

CPU_CACHE_TOKENS = 16384


class MemoryPlanError(ConfigurationError):
    """The hosted models do not fit; the message names the one that got too little."""


def size_pages(config: EngineConfig, workers: Sequence[ModelWorker], device: torch.device) -> dict[str, int]:
    """Pages per worker name."""
    needs = {worker.name: worker.measure() for worker in workers}
    tokens = config.kv_cache_tokens or (CPU_CACHE_TOKENS if device.type == "cpu" else None)
    if tokens is not None:
        wanted = {worker.name: min(worker.max_pages, 1 + -(-tokens // config.page_size)) for worker in workers}
    else:
        left = left_for_pages(config, needs, device)
        wanted = split_pages(config, workers, left)
    for worker in workers:
        if wanted[worker.name] < worker.min_pages:
            raise MemoryPlanError(
                f"model {worker.name!r} gets {wanted[worker.name]} pages of {worker.page_bytes} bytes and needs at "
                f"least {worker.min_pages}: raise the memory share or kv_share, or host fewer models"
            )
    if device.type == "cuda" and tokens is not None:
        total = sum(wanted[worker.name] * worker.page_bytes for worker in workers)
        left = left_for_pages(config, needs, device)
        if total > left:
            largest = max(workers, key=lambda worker: wanted[worker.name] * worker.page_bytes)
            raise MemoryPlanError(
                f"{tokens} cache positions per model take {total} bytes of {left}, most for model {largest.name!r}"
            )
    return wanted


def left_for_pages(config: EngineConfig, needs: dict[str, MemoryNeeds], device: torch.device) -> int:
    """Bytes of the operator's share that weights (already loaded), workspace, graphs and state leave.

    Workspace and graph pool are the largest of any worker's: one runs at a time. The whole limit of graph memory is
    kept free, since captures go on while the server is idle.
    """
    torch.cuda.empty_cache()  # what the measured runs left there is counted as workspace
    free, total = torch.cuda.mem_get_info(device)
    graphs = max((need.graphs for need in needs.values()), default=0)
    if config.graphs and graphs > config.graph_memory_bytes:
        name = max(needs, key=lambda name: needs[name].graphs)
        raise MemoryPlanError(
            f"the largest recording of model {name!r} works in {graphs} bytes; graph memory is limited to "
            f"{config.graph_memory_bytes}"
        )
    reserved = config.graph_memory_bytes if config.graphs else 0
    workspace = max((need.workspace for need in needs.values()), default=0)
    state = sum(need.state for need in needs.values())
    budget = int(total * config.memory_share) - (total - free)
    log.info(
        "memory: %d bytes in use, %d workspace, %d graphs, %d slot state, %d left for pages",
        total - free, workspace, reserved, state, budget - workspace - reserved - state,
    )  # fmt: skip
    return max(0, budget - workspace - reserved - state)


def split_pages(config: EngineConfig, workers: Sequence[ModelWorker], left: int) -> dict[str, int]:
    """Pages from `left` bytes by the models' shares; what a model cannot use goes to the others."""
    shares = {model.name: model.kv_share for model in config.models}
    named = sum(share for share in shares.values() if share is not None)
    unnamed = [name for name, share in shares.items() if share is None]
    weights = {name: share if share is not None else (1 - named) / len(unnamed) for name, share in shares.items()}
    pages: dict[str, int] = {}
    open_workers = list(workers)
    while open_workers:
        total = sum(weights[worker.name] for worker in open_workers)
        quota = {worker.name: int(left * weights[worker.name] / total) // worker.page_bytes for worker in open_workers}
        capped = [worker for worker in open_workers if quota[worker.name] >= worker.max_pages]
        if not capped:
            return pages | quota
        for worker in capped:
            pages[worker.name] = worker.max_pages
            left -= worker.max_pages * worker.page_bytes
            open_workers.remove(worker)
    return pages


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that `run` allocates at its peak."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def device_name(device: torch.device) -> str:
    """ "NVIDIA H100 80GB HBM3" or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def device_memory(device: torch.device) -> dict[str, int]:
    """Bytes of the whole device by state: "tensors" (weights, pages, slots, live activations), "cached" (kept by the
    allocator, the graphs' pool included), "other" (context, kernels, other processes) and "free". Empty on a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    tensors, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return {"tensors": tensors, "cached": reserved - tensors, "other": total - free - reserved, "free": free}
