"""Asynchronous copies of results from the device to the host, and how long launches take there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Mark = torch.cuda.Event | float


def mark(device: torch.device) -> Mark:
    """A moment in the order of launches: an event on a GPU, wall time on a CPU, where a launch returns when it is
    done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Mark, end: Any) -> float:
    """Seconds between two marks of one device that have both passed."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


class Readback:
    """Copies tensors to pinned memory behind the work launched so far; `ready` once the copy's event has fired. On a
    CPU the copies are made at once but count as ready only after `wait`, so that tests without a GPU see the same order
    of launches and reads.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, begun: Mark | None = None) -> None:
        """begun: the mark before the launch, for `seconds`."""
        self._host: dict[str, Tensor] = {}
        self._event: torch.cuda.Event | None = None
        self._waited = False
        on_gpu = device.type == "cuda"
        for name, tensor in tensors.items():
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
            self._host[name] = host.copy_(tensor, non_blocking=True)
        if on_gpu:
            self._event = torch.cuda.Event(enable_timing=begun is not None)
            self._event.record()
        self._begun = begun

    def ready(self) -> bool:
        return self._waited or (self._event is not None and self._event.query())

    def wait(self) -> None:
        """Blocks until everything launched before has run."""
        if self._event is not None:
            self._event.synchronize()
        self._waited = True

    def seconds(self) -> float | None:
        """Seconds on a GPU from `begun` to the end of the launch, once it is ready; None on a CPU and without that."""
        return None if self._begun is None or self._event is None else seconds_between(self._begun, self._event)

    def read(self) -> dict[str, np.ndarray]:
        """The results by name; only when ready."""
        assert self.ready()
        return {name: host.numpy() for name, host in self._host.items()}
