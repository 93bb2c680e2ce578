"""Recordings: CUDA graphs under a byte limit. Those of one stream never run together and share a memory pool.

Inputs and outputs of a recording lie outside the pool, so replaying one graph cannot overwrite what another returned.
On a CPU a recording is the same forward over the same static, padded buffers.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from models.protocol import Capacity, Capturable
from service.graphs.buffers import StaticBuffers

log = logging.getLogger(__name__)

_WARM_UPS = 2
"""Plain runs before a capture: libraries set themselves up in the first, and choose their kernels, which a capture may
not."""
_GRAPH_BYTES = 16 << 20
"""What a graph may take outside torch's allocator. On an H100 the steps of Qwen2-VL and VoxCPM2 take 0 to 8 MiB each
once the pool holds their largest. Memory that is gone beyond that was taken by another process."""
CAPTURE_ERRORS = (RuntimeError, NotImplementedError)
"""What a capture raises when it cannot be made: illegal calls while capturing, and torch.OutOfMemoryError."""


class CaptureError(Exception):
    """A recording could not be made. `refused`: for lack of bytes, not because it failed."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Recording(Protocol):
    outputs: Mapping[str, Tensor]
    """Static; valid until the next replay of the same capturable."""

    def replay(self) -> None: ...


class GraphRecording:
    """A CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Mapping[str, Tensor]) -> None:
        self.outputs = outputs
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class CallRecording:
    """The CPU's: the same forward on the same buffers, the outputs copied into static ones."""

    def __init__(self, call: Callable[[], dict[str, Tensor]], outputs: Mapping[str, Tensor]) -> None:
        self.outputs = outputs
        self._call = call

    def replay(self) -> None:
        for name, value in self._call().items():
            self.outputs[name].copy_(value)


class _SharedMemory:
    """The memory pool of one stream's recordings. num_bytes: of those that recordings made now can share."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.num_bytes = 0


class GraphPool:
    """Makes recordings and accounts their bytes: `graph_bytes` in memory pools, `static_bytes` outside them."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.graph_bytes = 0
        self.static_bytes = 0
        self._shared: dict[torch.cuda.Stream, _SharedMemory] = {}
        self._abandoned: list[torch.cuda.CUDAGraph] = []

    @property
    def num_bytes(self) -> int:
        return self.graph_bytes + self.static_bytes

    def allocate(self, num_bytes: int) -> StaticBuffers:
        """Static buffers; CaptureError when they do not fit under the limit or on the device."""
        self._reserve(num_bytes)
        try:
            return StaticBuffers(num_bytes, self.device)
        except torch.OutOfMemoryError as error:
            self.static_bytes -= num_bytes
            raise CaptureError(f"{num_bytes} bytes of static buffers: {error}", refused=True) from error

    def _reserve(self, num_bytes: int) -> None:
        """Accounts static buffers; CaptureError when they do not fit under the limit."""
        if self.num_bytes + num_bytes > self.limit_bytes:
            raise CaptureError(
                f"{num_bytes} bytes of static buffers do not fit: {self.num_bytes} of {self.limit_bytes} are used",
                refused=True,
            )
        self.static_bytes += num_bytes

    def record(self, capturable: Capturable, capacity: Capacity, buffers: Mapping[str, Tensor]) -> Recording:
        """Records forward over static buffers, which hold finite values, on the current stream, the one that replays
        it. Nothing may be in flight.

        Raises CaptureError when forward cannot be captured or the pool would outgrow its limit.
        """
        if self.device.type != "cuda":
            return self._record_call(capturable, capacity, buffers)
        try:
            return self._record_graph(capturable, capacity, buffers)
        except CAPTURE_ERRORS as error:
            # An illegal call ends the capture and leaves the device usable; a fault of the device itself shows in
            # the next synchronisation and ends the engine.
            gc.collect()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            raise CaptureError(f"{capturable.name} at {dict(capacity)}: {error}") from error

    def _abandon(self, stream: torch.cuda.Stream, graph: torch.cuda.CUDAGraph) -> None:
        """Goes on in a new memory pool: a capture that ends in an error leaves torch's allocators recording into it.

        The device's can be told to stop, the pinned host memory's cannot. It asks the graph what to record, and a graph
        that lives on answers for its own capture alone, which is over.
        """
        handle = self._shared.pop(stream).handle
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index or torch.cuda.current_device(), handle)
        self._abandoned.append(graph)

    def _record_call(self, capturable: Capturable, capacity: Capacity, buffers: Mapping[str, Tensor]) -> Recording:
        try:
            outputs = {name: value.clone() for name, value in capturable.forward(buffers, capacity).items()}
        except CAPTURE_ERRORS as error:
            raise CaptureError(f"{capturable.name} at {dict(capacity)}: {error}") from error
        self._reserve(_num_bytes(outputs))
        return CallRecording(lambda: capturable.forward(buffers, capacity), outputs)

    def _record_graph(self, capturable: Capturable, capacity: Capacity, buffers: Mapping[str, Tensor]) -> Recording:
        started = time.perf_counter()
        stream = torch.cuda.current_stream(self.device)
        shared = self._shared.setdefault(stream, _SharedMemory())
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        outputs: dict[str, Tensor] = {}
        for _ in range(_WARM_UPS):
            outputs = {name: torch.empty_like(v) for name, v in capturable.forward(buffers, capacity).items()}
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        if self.num_bytes + max(0, peak - shared.num_bytes) > self.limit_bytes:
            raise CaptureError(
                f"{capturable.name} at {dict(capacity)} works in {peak} bytes; {self.num_bytes} of "
                f"{self.limit_bytes} are used",
                refused=True,
            )
        self._reserve(_num_bytes(outputs))
        torch.cuda.empty_cache()
        reserved, free = torch.cuda.memory_reserved(self.device), torch.cuda.mem_get_info(self.device)[0]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=shared.handle, stream=stream, capture_error_mode="thread_local"):
                for name, value in capturable.forward(buffers, capacity).items():
                    outputs[name].copy_(value)
        except CAPTURE_ERRORS:
            self.static_bytes -= _num_bytes(outputs)
            self._abandon(stream, graph)
            raise
        torch.cuda.synchronize(self.device)
        pooled = torch.cuda.memory_reserved(self.device) - reserved
        outside = free - torch.cuda.mem_get_info(self.device)[0] - pooled
        taken = pooled + min(max(0, outside), _GRAPH_BYTES)
        self.graph_bytes += taken
        shared.num_bytes += taken
        log.info(
            "captured %s at %s: %.1f MiB more, %.2f s",
            capturable.name,
            dict(capacity),
            taken / 2**20,
            time.perf_counter() - started,
        )
        return GraphRecording(graph, outputs)


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
