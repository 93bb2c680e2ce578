"""Captures CUDA graphs under a byte limit. Graphs of one stream never run concurrently, so they share a memory pool.

Inputs and outputs of a captured graph lie outside the pool, so replaying one graph cannot overwrite what another
returned. On a CPU a replay calls the same forward on the same static, padded buffers, and a capture only sets them
aside.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from models.interfaces.capturable import Bucket, Capturable
from service.graphs.buffers import StaticBuffers

log = logging.getLogger(__name__)

# torch's allocator of a GPU's memory: what a run takes of it, and giving back what it keeps.
#
# The allocator takes segments from the device and divides them among tensors. Many small ones hold no large tensor. A
# graph's memory pool has segments of its own.

_GENERAL_POOL = (0, 0)
"""Where tensors outside of captured graphs lie."""


class Segment(NamedTuple):
    """A piece of the device's memory that the allocator has taken."""

    kind: str
    """Segments for "small" tensors hold no "large" ones, nor the other way round."""
    num_bytes: int


def bytes_beyond(held: Iterable[Segment], segments: Iterable[Segment]) -> int:
    """Bytes of the further segments that a run, which takes these, takes of a memory pool that holds some, none of them
    in use."""
    free, more = list(held), 0
    for needed in sorted(segments, key=lambda segment: -segment.num_bytes):
        fitting = [one for one in free if one.kind == needed.kind and one.num_bytes >= needed.num_bytes]
        if not fitting:
            more += needed.num_bytes
            continue
        smallest = min(fitting)
        free.remove(smallest)
        free.append(Segment(needed.kind, smallest.num_bytes - needed.num_bytes))
    return more


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Runs something on a GPU, with nothing else in flight: the bytes that it takes at its peak, beside what is live
    before it.

    The segments that it adds hold more than it ever allocates. But the segments of what is live before may have gaps,
    which hold a part of it; where the segments are smaller than what was allocated, the latter counts.
    """
    release_cached(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    allocated = torch.cuda.max_memory_allocated(device) - allocated
    reserved = torch.cuda.max_memory_reserved(device) - reserved
    return max(allocated, reserved)


def peak_segments(run: Callable[[], object], device: torch.device) -> list[Segment]:
    """As peak_bytes, the segments that the run adds, which takes longer: all segments of the process are listed. What
    lies in gaps of segments that are live counts as one more segment."""
    release_cached(device)
    before = _segments(_GENERAL_POOL)
    num_bytes, added = peak_bytes(run, device), list[Segment]()
    for address, (kind, size) in _segments(_GENERAL_POOL).items():
        # With PyTorch's expandable_segments, one that was there has grown.
        if (more := size - (before[address].num_bytes if address in before else 0)) > 0:
            added.append(Segment(kind, more))
    if (rest := num_bytes - sum(segment.num_bytes for segment in added)) > 0:
        added.append(Segment("large", rest))
    return added


def _segments(pool: tuple[int, int]) -> dict[int, Segment]:
    """By address; a process uses one GPU. CUDA's own allocator (backend:cudaMallocAsync) tells none."""
    found = torch.cuda.memory_snapshot() if torch.cuda.get_allocator_backend() == "native" else []
    return {
        segment["address"]: Segment(segment["segment_type"], segment["total_size"])
        for segment in found
        if segment["segment_pool_id"] == pool
    }


def claim_workspace(device: torch.device) -> None:
    """Lets cuBLAS have its workspace for the current stream (32 MiB on Hopper), which it keeps. If it first asked for
    it during a large run, it would get a part of a large segment, which could never be given back to the device."""
    if device.type == "cuda":
        release_cached(device)
        factor = torch.zeros((16, 16), dtype=torch.bfloat16, device=device)
        torch.mm(factor, factor)


def release_cached(device: torch.device) -> None:
    """Waits for everything that was launched, and gives the device the segments back in which nothing is live. Those
    of captured graphs stay. A CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


TIMED_REPLAYS = 3
"""Of which the fastest counts."""
_LONG_REPLAY = 0.02
"""Seconds; a longer replay is timed once, since requests would wait for another, which would tell little more."""
_LOOK_EVERY = 0.005
"""Seconds of forward passes between two looks for requests."""
_MAX_BYTES_OUTSIDE = 16 << 20
"""Bytes that a graph is assumed to use at most outside torch's allocator. On an H100 the steps of Qwen2-VL and VoxCPM2
use 0 to 8 MiB each once the pool holds their largest. If free memory shrinks by more, another process took it."""
CAPTURE_ERRORS = (RuntimeError, NotImplementedError)
"""Raised by a failed capture: illegal calls while capturing, and torch.OutOfMemoryError."""


class CaptureError(Exception):
    """A graph could not be captured. `refused`: it did not fit into memory; otherwise the capture itself failed."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Interrupted(Exception):
    """A part of a capture was given up for a request; the capture can be made again."""


@dataclass(frozen=True, eq=False)
class Capture:
    """A forward that can be replayed."""

    replay: Callable[[], None]
    """Runs it again; on a GPU this is torch.cuda.CUDAGraph.replay itself."""
    outputs: Mapping[str, Tensor]
    """Static tensors by name, valid until the next replay of the same capturable; on a CPU empty before the first."""
    seconds: float | None = None
    """Of a replay alone on the GPU, measured at the capture on static buffers that hold fillers; None without a GPU."""


class GraphPool:
    """Captures graphs and accounts for their bytes: `graph_bytes` in memory pools, `static_bytes` outside them."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self.device = device
        self.limit_bytes = limit_bytes
        self.graph_bytes = 0
        self.static_bytes = 0
        self._pools: dict[torch.cuda.Stream, Any] = {}
        """Handle of the memory pool that the graphs of a stream share."""
        self._abandoned: list[torch.cuda.CUDAGraph] = []
        self.arrived: Callable[[], bool] | None = None
        """Whether a request has arrived for which a capture is given up; None: it is not."""

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
        """Accounts for static buffers; CaptureError when they do not fit under the limit."""
        if self.num_bytes + num_bytes > self.limit_bytes:
            raise CaptureError(
                f"{num_bytes} bytes of static buffers do not fit: {self.num_bytes} of {self.limit_bytes} are used",
                refused=True,
            )
        self.static_bytes += num_bytes

    def capture(
        self, capturable: Capturable, bucket: Bucket, fill: Callable[[], Mapping[str, Tensor]]
    ) -> Generator[None, None, Capture]:
        """Capture forward over static buffers, in parts: an eager run, the capture, timed replays.

        Run each part on the same stream, with nothing in flight; requests may be served between two of them. The graphs
        of a stream must be replayed one after the other, on it or on another.
        fill: fill the static buffers with finite values and return them; called at the start of each part.

        Raises CaptureError when forward cannot be captured or the pool would outgrow its limit, and Interrupted.
        """
        if self.device.type != "cuda":
            return self._capture_call(capturable, bucket, fill())
        try:
            return (yield from self._capture_graph(capturable, bucket, fill))
        except CAPTURE_ERRORS as error:
            # An illegal call ends the capture and leaves the device usable; a fault of the device itself shows in
            # the next synchronisation and ends the engine.
            gc.collect()
            release_cached(self.device)
            raise CaptureError(str(error)) from error

    @contextlib.contextmanager
    def _interruptible(self, *, recording: bool = False) -> Iterator[None]:
        """Raise Interrupted between two modules of a forward pass once a request has arrived. Outside of a recording,
        where it is illegal, wait for the GPU at each look, so that little is left that a request would wait for."""
        arrived, looked = self.arrived, time.monotonic()
        if arrived is None:
            yield
            return

        def look(*_: object) -> None:
            nonlocal looked
            if time.monotonic() - looked < _LOOK_EVERY:
                return
            if not recording:
                torch.cuda.synchronize(self.device)
            if arrived():
                raise Interrupted
            looked = time.monotonic()

        hook = register_module_forward_pre_hook(look)
        try:
            yield
        finally:
            hook.remove()

    def _abandon(self, stream: torch.cuda.Stream, graph: torch.cuda.CUDAGraph) -> None:
        """Drops the stream's memory pool after a failed capture; the next capture makes a new one.

        An error leaves torch's allocators allocating into the graph's pool. The device allocator can be told to stop.
        The allocator of pinned memory cannot: it asks the graph object whether it is still capturing. So the object is
        kept alive to answer that it is not.
        """
        handle = self._pools.pop(stream)
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index or torch.cuda.current_device(), handle)
        self._abandoned.append(graph)

    def _capture_call(self, capturable: Capturable, bucket: Bucket, buffers: Mapping[str, Tensor]) -> Capture:
        """A CPU records nothing, so nothing runs here. The first replay makes the outputs, whose bytes count from then
        on. An error in forward reaches the caller of the replay, as it would on the eager route."""
        outputs: dict[str, Tensor] = {}

        def replay() -> None:
            for name, value in capturable.forward(buffers, bucket).items():
                if name in outputs:
                    outputs[name].copy_(value)
                else:
                    outputs[name] = value.clone()
                    self.static_bytes += _num_bytes({name: value})

        return Capture(replay, outputs)

    def _capture_graph(
        self, capturable: Capturable, bucket: Bucket, fill: Callable[[], Mapping[str, Tensor]]
    ) -> Generator[None, None, Capture]:
        buffers, makers = fill(), dict[str, Callable[[], Tensor]]()

        def run() -> None:
            for name, value in capturable.forward(buffers, bucket).items():
                shape = torch.empty_like(value, device="meta")  # allocates nothing that would count as the run's
                makers[name] = partial(torch.empty_like, shape, device=value.device)

        # The eager run does what is illegal in a capture: it compiles and loads kernels of Triton, and cuBLAS and cuDNN
        # load theirs, plan and take workspaces. It also tells how much memory the graph may take.
        with self._interruptible():
            self._check_room(run)
        yield
        started = time.perf_counter()
        outputs = {name: make() for name, make in makers.items()}
        graph, taken = self._record(capturable, bucket, fill(), outputs)
        mib, seconds = taken / 2**20, time.perf_counter() - started
        log.info("captured %s at %s: %.1f MiB more, %.3f s", type(capturable).__name__, dict(bucket), mib, seconds)
        replay = math.inf
        for _ in range(TIMED_REPLAYS):
            yield
            fill()
            replay = min(replay, seconds_of(graph.replay, self.device))
            if replay > _LONG_REPLAY:
                break
        return Capture(graph.replay, outputs, replay)

    def _record(
        self, capturable: Capturable, bucket: Bucket, buffers: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, int]:
        """The graph, which writes to `outputs`, and the bytes that it takes."""
        stream = torch.cuda.current_stream(self.device)
        pool = self._pools.setdefault(stream, torch.cuda.graph_pool_handle())
        self._reserve(_num_bytes(outputs))
        torch.cuda.empty_cache()
        reserved, free = torch.cuda.memory_reserved(self.device), torch.cuda.mem_get_info(self.device)[0]
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _no_garbage_collection(),
                self._interruptible(recording=True),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                for name, value in capturable.forward(buffers, bucket).items():
                    outputs[name].copy_(value)
        except (Interrupted, *CAPTURE_ERRORS) as error:
            self.static_bytes -= _num_bytes(outputs)
            if isinstance(error, Interrupted):
                self.graph_bytes += torch.cuda.memory_reserved(self.device) - reserved  # the pool keeps it
            else:
                self._abandon(stream, graph)
            raise
        torch.cuda.synchronize(self.device)
        pooled = torch.cuda.memory_reserved(self.device) - reserved
        outside = free - torch.cuda.mem_get_info(self.device)[0] - pooled
        taken = pooled + min(max(0, outside), _MAX_BYTES_OUTSIDE)
        self.graph_bytes += taken
        return graph, taken

    def _check_room(self, run: Callable[[], object]) -> None:
        """Run forward eagerly; CaptureError when a graph of it may need more memory than the limit leaves."""
        more = peak_bytes(run, self.device)
        if self.num_bytes + more > self.limit_bytes:
            # Then it may still fit into what the pool holds for other graphs.
            pool = self._pools.get(torch.cuda.current_stream(self.device))
            more = bytes_beyond(_segments(pool).values() if pool else (), peak_segments(run, self.device))
        if self.num_bytes + more > self.limit_bytes:
            raise CaptureError(
                f"the graph takes up to {more} bytes, and {self.num_bytes} of the limit of {self.limit_bytes} are used",
                refused=True,
            )


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turns Python's garbage collector off: it might free other graphs or pinned memory, which is illegal in a
    capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run on a GPU, with nothing else in flight."""
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
