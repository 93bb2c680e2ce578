"""Asynchronous copies of results from the device to the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


class Readback:
    """Copies tensors to pinned memory behind the work launched so far; `ready` once the copy's event has fired. On a
    CPU the copies are made at once but count as ready only after `wait`, so that tests without a GPU see the same order
    of launches and reads.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], device: torch.device, begun: torch.cuda.Event | None = None
    ) -> None:
        """begun: the event that `mark` recorded before the launch, for `seconds`."""
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
        """Seconds on the device from the event `begun` to the end of the launch. Call it once ready; None without that
        event."""
        if self._begun is None or self._event is None:
            return None
        return self._begun.elapsed_time(self._event) / 1e3

    def read(self) -> dict[str, np.ndarray]:
        """The results by name; only when ready."""
        assert self.ready()
        return {name: host.numpy() for name, host in self._host.items()}


def mark(device: torch.device) -> torch.cuda.Event | None:
    """An event that fires where the work that is launched next starts on a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
