"""Results on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


class Arrival:
    """Copies tensors to pinned memory behind the work that was launched so far and knows when they are there.

    On a CPU the copies are made at once but count as arrived only after `wait`: whoever launches ahead reads them as
    late as on a GPU, which is how the tests meet that order of launches and reads without one.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._host: dict[str, Tensor] = {}
        self._event: torch.cuda.Event | None = None
        self._waited = False
        on_gpu = device.type == "cuda"
        for name, tensor in tensors.items():
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
            self._host[name] = host.copy_(tensor, non_blocking=True)
        if on_gpu:
            self._event = torch.cuda.Event()
            self._event.record()

    def ready(self) -> bool:
        return self._waited or (self._event is not None and self._event.query())

    def wait(self) -> None:
        """Blocks until everything launched before has run."""
        if self._event is not None:
            self._event.synchronize()
        self._waited = True

    def read(self) -> dict[str, np.ndarray]:
        """The results by name; only when ready."""
        assert self.ready()
        return {name: host.numpy() for name, host in self._host.items()}
