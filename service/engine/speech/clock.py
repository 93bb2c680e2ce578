"""How long launches take on the device."""

from __future__ import annotations

import time

import torch

Mark = torch.cuda.Event | float


class DeviceClock:
    """Marks moments in the order of launches: with events on a GPU, with wall time on a CPU, where a launch returns
    when it is done."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks that have both passed."""
        if isinstance(start, float):
            assert isinstance(end, float)
            return end - start
        assert not isinstance(end, float)
        return start.elapsed_time(end) / 1e3
