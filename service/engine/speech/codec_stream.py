"""Where the codec runs: on a GPU in a CUDA stream of its own, in parallel with the next step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from models.interfaces.capturable import Bucket

_PATIENT_ROWS = 32
"""Up to here the codec takes what the steps leave free of the GPU: steps of few rows leave much, and chat may run
beside them. Steps of more rows would hold up all of their own audio, so the codec goes first then."""
_BELOW_STEPS, _ABOVE_STEPS = 0, -2
"""Priorities; that of the engine's stream, on which steps run, is -1."""


class CodecStream:
    """Where one model's codec is launched: on a GPU, in a CUDA stream with a lower priority than the steps'. A second
    one, with a higher priority, only gives this to graphs that are captured on it. No other stream touches the codec's
    streaming state."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {
            priority: torch.cuda.Stream(device, priority=priority)
            for priority in (_BELOW_STEPS, _ABOVE_STEPS)
            if device.type == "cuda"
        }

    @property
    def beside(self) -> bool:
        """Whether the codec runs in parallel with the next step, not before it."""
        return bool(self._streams)

    @contextmanager
    def after_steps(self) -> Iterator[None]:
        """Launches inside go to the codec's CUDA stream, after everything launched before."""
        if not self._streams:
            yield
            return
        stream = self._streams[_BELOW_STEPS]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def capture_stream(self, bucket: Bucket) -> torch.cuda.Stream | None:
        """The stream whose priority a captured graph of the codec has."""
        return self._streams.get(_BELOW_STEPS if bucket["rows"] <= _PATIENT_ROWS else _ABOVE_STEPS)

    def keep(self, tensor: Tensor) -> None:
        """Keeps a tensor's memory until what the codec has been given to do is done."""
        if self._streams:
            tensor.record_stream(self._streams[_BELOW_STEPS])
