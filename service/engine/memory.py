"""Divides the device's memory before the first request: weights, workspace, graphs, slot state, then pages.

On a GPU, pages get what is left of the operator's share. On a CPU their number follows from a number of positions. If a
model gets too few, the start fails with an error that names it. The dry run (dry_run.py) uses the same code, with
models that have shapes but no memory.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from service.engine.core.pages import pages_for
from service.engine.core.worker import ModelWorker
from service.graphs import pool as allocator
from service.graphs.pool import GraphPool
from service.link.config import ConfigurationError, EngineConfig
from service.link.messages import ProcessUsage

log = logging.getLogger(__name__)

STAT = Path("/proc/self/stat")
_UTIME, _STIME, _THREADS, _START, _RSS = 11, 12, 17, 19, 21
"""Indexes of the fields 14, 15, 20, 22 and 24 of proc(5), counted after the name, which may hold spaces and
brackets."""


def process_usage(stat: Path = STAT) -> ProcessUsage | None:
    """Usage of this process, all threads together; None if there is no /proc."""
    if (fields := _fields(stat)) is None:
        return None
    seconds = (int(fields[_UTIME]) + int(fields[_STIME])) / os.sysconf("SC_CLK_TCK")
    return ProcessUsage(seconds, int(fields[_RSS]) * os.sysconf("SC_PAGE_SIZE"), int(fields[_THREADS]))


def process_age(stat: Path = STAT) -> float | None:
    """Seconds since this process was started, including what ran before Python's first line; None without /proc."""
    if (fields := _fields(stat)) is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_START]) / os.sysconf("SC_CLK_TCK")


def _fields(stat: Path) -> list[str] | None:
    try:
        text = stat.read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


class _Form(NamedTuple):
    """Form of a tensor that owns its storage and fills it from the start."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize if all(self.shape) else 0


_forms: dict[Hashable, _Form] = {}
"""Forms of results, by operation and the metadata of its arguments."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of meta tensors that are created inside this context, until nothing refers to their storage.

    live: bytes now. peak: the largest number so far. Earlier allocations do not count. Operations take their CPU path,
    which in some cases needs more memory than the GPU's kernels.

    An operation on the meta device runs in Python and takes nearly a millisecond. A model repeats the same few
    operations in many layers and steps, so the form of a result is remembered if it is a single new tensor that is not
    a view of an argument.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        key = (func, _metadata(args), _metadata(tuple(kwargs.items())))
        form = _forms.get(key)
        if form is not None:
            made = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")
            self._add(made.untyped_storage())
            return made
        # Unknown inputs were allocated before; marking them as known keeps views of them from counting as new memory.
        self._known.update(map(_key, _meta_tensors((args, kwargs))))
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_meta and _key(result) not in self._known:
            form = _Form(tuple(result.shape), result.stride(), result.dtype)
            if form.num_bytes == result.untyped_storage().nbytes() and not result.storage_offset():
                _forms[key] = form
        for tensor in _meta_tensors(result):
            if _key(tensor) not in self._known:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, key, num_bytes)

    def _remove(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes


def _metadata(value: Any) -> Hashable:
    """Everything that the form of a result can depend on. It includes types, since 1, 1.0 and True are equal."""
    if isinstance(value, Tensor):
        return (value.device, value.dtype, value.shape, value.stride(), value.storage_offset())
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_metadata, value))
    return (type(value), value)


def _meta_tensors(value: object) -> Iterator[Tensor]:
    """The tensors in what an operation takes or returns. torch's own walk over such trees takes longer than the
    operation."""
    if isinstance(value, Tensor):
        if value.is_meta:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _meta_tensors(item)
    elif isinstance(value, Mapping):
        yield from _meta_tensors([*value.values()])


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


CPU_CACHE_TOKENS = 16384
"""Positions of a model's KV cache on a CPU if the setting kv_cache_tokens names none."""
USABLE_TOKENS = 8192
"""Positions that hold any picture but the largest, or a few dozen short chats."""


class MemoryPlanError(ConfigurationError):
    """The hosted models do not fit; the message names the one that got too little."""


STATE_SHARE = 0.4
"""Share of the memory beside a model's weights that its recurrent states may take; pages need the rest."""
CPU_STATE_BYTES = 1 << 30
"""Bytes of recurrent states on a CPU."""


def state_bytes(config: EngineConfig, weights: int) -> int:
    """Bytes that the recurrent states of a model with so many bytes of weights may take."""
    if config.gpu_bytes is None:
        return CPU_STATE_BYTES
    left = config.memory_share * config.gpu_bytes - weights
    return max(0, int(STATE_SHARE * left)) // max(1, len(config.models))


@dataclass(frozen=True)
class Room:
    """Bytes of a device, and how many of them are in use once the models are loaded: weights, CUDA context, other
    processes."""

    total: int
    used: int


@dataclass(frozen=True)
class Reserved:
    """Bytes of a GPU that caches cannot use. Workspace and graphs are shared by all workers, which run one at a
    time."""

    budget: int
    """The operator's share of the device."""
    used: int
    """Room.used."""
    workspace: int
    """The largest MemoryRequirements.workspace."""
    graphs: int
    """Limit of captured graphs."""
    state: int
    """MemoryRequirements.state of all workers together."""

    @property
    def left(self) -> int:
        """Bytes for pages."""
        return max(0, self.budget - self.used - self.workspace - self.graphs - self.state)


def total_memory(device: torch.device) -> int | None:
    """Bytes of a GPU; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def device_room(device: torch.device) -> Room | None:
    """What the device has and what is in use now; None on a CPU. Empties torch's cache of freed memory."""
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()  # what the measured runs left in the allocator is counted as workspace
    free, total = torch.cuda.mem_get_info(device)
    return Room(total, total - free)


def plan_pages(
    config: EngineConfig,
    workers: Sequence[ModelWorker],
    room_of: Callable[[], Room | None],
    pool: GraphPool | None = None,
) -> dict[str, int]:
    """Number of pages by worker name.

    room_of: called once the workers have been measured. If it returns None, as on a CPU, the number of pages follows
        from a number of positions.
    pool: gets the limit that was reserved for graphs.

    Raises MemoryPlanError when a model gets too few.
    """
    reserved = reserve(config, workers, room_of)
    if reserved is not None:
        if pool is not None and config.graphs:
            pool.limit_bytes = reserved.graphs
        log.info(
            "memory: %d bytes in use, %d workspace, %d graphs, %d slot state, %d left for pages",
            reserved.used, reserved.workspace, reserved.graphs, reserved.state, reserved.left,
        )  # fmt: skip
    return share_pages(config, workers, reserved)


def share_pages(config: EngineConfig, workers: Sequence[ModelWorker], reserved: Reserved | None) -> dict[str, int]:
    """Number of pages by worker name, from what is left; MemoryPlanError when a model gets too few."""
    tokens = config.kv_cache_tokens or (CPU_CACHE_TOKENS if reserved is None else None)
    if tokens is not None:
        pages = {worker.name: _pages_for_tokens(config, worker, tokens) for worker in workers}
    else:
        assert reserved is not None
        pages = split_pages(workers, reserved.left)
    _check_min_pages(config, workers, pages)
    if reserved is not None and tokens is not None:
        _check_room(workers, pages, reserved.left, tokens)
    return pages


def _check_min_pages(config: EngineConfig, workers: Sequence[ModelWorker], pages: Mapping[str, int]) -> None:
    for worker in workers:
        if pages[worker.name] >= worker.min_pages:
            continue
        if config.kv_cache_tokens is not None:
            needed = (worker.min_pages - 1) * config.page_size
            raise MemoryPlanError(
                f"kv_cache_tokens: {config.kv_cache_tokens} positions are too few for model {worker.name!r}, which "
                f"needs at least {needed}"
            )
        raise MemoryPlanError(
            f"model {worker.name!r} gets {pages[worker.name]} pages of {worker.page_bytes} bytes and needs at "
            f"least {worker.min_pages}: raise memory_share, lower graph_memory or encoder_cache, host "
            "fewer models, or take quantization fp8, with which chat models need less"
        )


def _check_room(workers: Sequence[ModelWorker], pages: Mapping[str, int], left: int, tokens: int) -> None:
    num_bytes = {worker.name: pages[worker.name] * worker.page_bytes for worker in workers}
    if (total := sum(num_bytes.values())) > left:
        largest = max(num_bytes, key=lambda name: num_bytes[name])
        raise MemoryPlanError(
            f"kv_cache_tokens: {tokens} cache positions per model take {total} bytes and {left} are left, most for "
            f"model {largest!r}"
        )


def reserve(
    config: EngineConfig, workers: Sequence[ModelWorker], room_of: Callable[[], Room | None]
) -> Reserved | None:
    """Measures how much of the operator's share the workers need for weights, workspace, graphs and state.

    The workspace is the largest of any worker's, since one runs at a time. The whole limit of graph memory is kept
    free, since captures go on while the server is idle. None on a CPU, where there is no share to divide.

    Raises MemoryPlanError when the operator's limit of graph memory does not hold the largest graph, which needs what
    an eager run of its shapes takes. Without such a limit, shapes whose graphs find no room run eagerly.
    """
    required = {worker.name: worker.measure() for worker in workers}
    room = room_of()
    if room is None:
        return None
    largest = max((need.workspace for need in required.values()), default=0)
    if config.graphs and config.graph_memory is not None and largest > config.graph_memory:
        name = max(required, key=lambda name: required[name].workspace)
        raise MemoryPlanError(
            f"graph_memory: the largest captured graph of model {name!r} needs {largest} bytes, at most "
            f"{config.graph_memory} allowed"
        )
    found = Reserved(
        budget=int(room.total * config.memory_share),
        used=room.used,
        workspace=largest,
        graphs=0,
        state=sum(need.state for need in required.values()),
    )
    if not config.graphs:
        return found
    return replace(found, graphs=_graph_bytes(config, workers, found.left, largest))


def _graph_bytes(config: EngineConfig, workers: Sequence[ModelWorker], left: int, largest: int) -> int:
    """Limit of captured graphs: the operator's, otherwise half of the `left` bytes for graphs and pages. It is more if
    the `largest` graph needs more and the models keep pages for USABLE_TOKENS, and less if they need more than half
    for their fewest pages. Replays save time, but without pages nothing runs."""
    if config.graph_memory is not None:
        return config.graph_bytes

    def beside(tokens: int) -> int:
        """Bytes that pages for so many positions of each model leave."""
        pages = (max(worker.min_pages, _pages_for_tokens(config, worker, tokens)) for worker in workers)
        return max(0, left - sum(count * worker.page_bytes for count, worker in zip(pages, workers, strict=True)))

    if config.kv_cache_tokens is not None:
        return min(config.graph_bytes, beside(config.kv_cache_tokens))
    return min(config.graph_bytes, max(min(left // 2, beside(0)), min(largest, beside(USABLE_TOKENS))))


def _pages_for_tokens(config: EngineConfig, worker: ModelWorker, tokens: int) -> int:
    """Pages that hold `tokens` positions, and the scratch page."""
    return min(worker.max_pages, 1 + pages_for(tokens, config.page_size))


def split_pages(workers: Sequence[ModelWorker], left: int) -> dict[str, int]:
    """Divides `left` bytes into equal shares of pages; what a model cannot use goes to the others."""
    pages: dict[str, int] = {}
    open_workers = list(workers)
    while open_workers:
        quota = {worker.name: left // len(open_workers) // worker.page_bytes for worker in open_workers}
        capped = [worker for worker in open_workers if quota[worker.name] >= worker.max_pages]
        if not capped:
            return pages | quota
        for worker in capped:
            pages[worker.name] = worker.max_pages
            left -= worker.max_pages * worker.page_bytes
            open_workers.remove(worker)
    return pages


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that `run` takes at its peak; on the meta device, which has no memory, those that it would allocate."""
    if device.type != "meta":
        return allocator.peak_bytes(run, device)
    with LiveBytes() as counted:
        run()
    return counted.peak


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
