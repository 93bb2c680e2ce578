"""The parts of torch.cuda that measure memory and capture graphs, over a device that is only counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

GPU = torch.device("cuda", 0)
TOTAL = 1 << 40
PARTS = (
    *("synchronize", "empty_cache", "memory_allocated", "memory_reserved", "max_memory_allocated"),
    *("max_memory_reserved", "reset_peak_memory_stats", "memory_snapshot", "get_allocator_backend", "mem_get_info"),
    *("graph_pool_handle", "current_stream", "CUDAGraph", "graph"),
)


class FakeCuda:
    """An allocator that takes whole segments and gives them back in `empty_cache`; those of a memory pool stay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live = 0
        """Bytes of tensors that stay, in segments that `hold` takes."""
        self.outside = 0
        """Bytes of the device that a graph takes outside the allocator."""
        self.backend = "native"
        self._live_segments: list[int] = []
        self._cached: list[int] = []
        self._pools: dict[tuple[int, int], list[int]] = {}
        self._capturing: tuple[int, int] | None = None
        self._used_outside = 0
        self.reset_peak_memory_stats()
        for name in PARTS:
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def hold(self, allocated: int, segments: Sequence[int]) -> None:
        """Tensors that stay."""
        self.live += allocated
        self._live_segments += segments

    def grow(self, num_bytes: int) -> None:
        """The first segment of the tensors that stay grows, as with expandable_segments."""
        self._live_segments[0] += num_bytes
        self._most_reserved = max(self._most_reserved, self.memory_reserved())

    def run(self, allocated: int, segments: Sequence[int]) -> None:
        """Work that allocates so many bytes in segments of these sizes: those that are free and large enough, or new
        ones. What the segments cannot hold lies in gaps beside live tensors."""
        free = self._cached if self._capturing is None else self._pools[self._capturing]
        taken = []
        for size in sorted(segments, reverse=True):
            fitting = [segment for segment in free if segment >= size]
            if fitting:
                free.remove(min(fitting))
            taken.append(min(fitting, default=size))
        free += taken
        self._most_allocated = max(self._most_allocated, self.live + allocated)
        self._most_reserved = max(self._most_reserved, self.memory_reserved())

    def synchronize(self, device: object = None) -> None:
        pass

    def empty_cache(self) -> None:
        self._cached.clear()

    def memory_allocated(self, device: object = None) -> int:
        return self.live

    def memory_reserved(self, device: object = None) -> int:
        return sum(size for _, size in self._segments())

    def max_memory_allocated(self, device: object = None) -> int:
        return self._most_allocated

    def max_memory_reserved(self, device: object = None) -> int:
        return self._most_reserved

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self._most_allocated, self._most_reserved = self.memory_allocated(), self.memory_reserved()

    def _segments(self) -> Iterator[tuple[tuple[int, int], int]]:
        for size in (*self._live_segments, *self._cached):
            yield (0, 0), size
        for pool, sizes in self._pools.items():
            for size in sizes:
                yield pool, size

    def memory_snapshot(self) -> list[dict[str, object]]:
        assert self.backend == "native"
        return [
            {"address": address, "segment_pool_id": pool, "segment_type": "large", "total_size": size}
            for address, (pool, size) in enumerate(self._segments())
        ]

    def get_allocator_backend(self) -> str:
        return self.backend

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return TOTAL - self.memory_reserved() - self._used_outside, TOTAL

    def graph_pool_handle(self) -> tuple[int, int]:
        pool = (0, 1 + len(self._pools))
        self._pools[pool] = []
        return pool

    def current_stream(self, device: object = None) -> str:
        return "the engine's"

    class CUDAGraph:
        def replay(self) -> None:
            pass

    @contextmanager
    def graph(self, graph: object, *, pool: tuple[int, int], **options: object) -> Iterator[None]:
        self._capturing = pool
        try:
            yield
        finally:
            self._capturing = None
        self._used_outside += self.outside
