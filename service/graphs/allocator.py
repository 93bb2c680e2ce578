"""torch's allocator of a GPU's memory: what a run takes of it, and giving back what it keeps.

The allocator takes segments from the device and divides them among tensors. Many small ones hold no large tensor. A
graph's memory pool has segments of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

_GENERAL_POOL = (0, 0)
"""Where tensors outside of captured graphs lie."""


class Segment(NamedTuple):
    """A piece of the device's memory that the allocator has taken."""

    kind: str
    """Segments for "small" tensors hold no "large" ones, nor the other way round."""
    num_bytes: int


@dataclass(frozen=True)
class PeakMemory:
    """What a run takes of a GPU's memory, beside what is live before it."""

    num_bytes: int
    segments: tuple[Segment, ...]

    def beyond(self, held: Iterable[Segment]) -> int:
        """Bytes of the further segments that the run takes of a memory pool that holds some, none of them in use."""
        free, more = list(held), 0
        for needed in sorted(self.segments, key=lambda segment: -segment.num_bytes):
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


def peak_memory(run: Callable[[], object], device: torch.device) -> PeakMemory:
    """As peak_bytes, with the segments that the run adds, which takes longer: all segments of the process are listed.
    What lies in gaps of segments that are live counts as one more segment."""
    release_cached(device)
    before = _segments(_GENERAL_POOL)
    num_bytes, added = peak_bytes(run, device), list[Segment]()
    for address, (kind, size) in _segments(_GENERAL_POOL).items():
        # With PyTorch's expandable_segments, one that was there has grown.
        if (more := size - (before[address].num_bytes if address in before else 0)) > 0:
            added.append(Segment(kind, more))
    if (rest := num_bytes - sum(segment.num_bytes for segment in added)) > 0:
        added.append(Segment("large", rest))
    return PeakMemory(num_bytes, tuple(added))


def segments_of(pool: tuple[int, int]) -> list[Segment]:
    """The segments of a graph's memory pool."""
    return list(_segments(pool).values())


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
