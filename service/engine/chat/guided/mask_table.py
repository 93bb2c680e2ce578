"""The masks of a step's guided rows on their way from the mask servers to its sampling."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from service.engine.chat.slot_state import SlotState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _CopyStream:
    """Events around the copies of masks on a GPU. sent: after the last copy. read: on the engine's stream, after the
    last launch that reads the masks."""

    stream: torch.cuda.Stream
    sent: torch.cuda.Event
    read: torch.cuda.Event


class MaskTable:
    """What the sampling of a step with guided rows reads: masks on the host, where the mask server writes them, and on
    the device (SlotState.allowed), and which slot and which mask each row has (SlotState.sampled)."""

    def __init__(self, state: SlotState, masks: np.ndarray) -> None:
        """masks int32 [slots, words]: the host's."""
        self._allowed, self._sampled = state.allowed, state.sampled
        self._host = torch.from_numpy(masks)
        self._rows = torch.zeros(state.sampled.shape, dtype=torch.int64, pin_memory=state.allowed.is_cuda)
        self._copies: _CopyStream | None = None
        if state.allowed.is_cuda:
            stream = torch.cuda.Stream(state.allowed.device)
            self._copies = _CopyStream(stream, torch.cuda.Event(), torch.cuda.Event())
            self._copies.read.record()  # The tables are filled on the engine's stream, too.
            self._pin()

    def _pin(self) -> None:
        runtime, address = torch.cuda.cudart(), self._host.data_ptr()
        if problem := int(runtime.cudaHostRegister(address, self._host.nbytes, 0)):
            log.warning("masks are copied more slowly: their memory cannot be pinned (CUDA error %d)", problem)
            # CUDA keeps the error for the next launch, which fails: here it is one that changes nothing.
            with contextlib.suppress(torch.AcceleratorError):
                self._allowed[0].fill_(-1)
        else:
            weakref.finalize(self, runtime.cudaHostUnregister, address)

    def writable(self) -> None:
        """Waits until no copy reads the host's masks and rows any more."""
        if self._copies is not None:
            self._copies.sent.synchronize()

    @contextlib.contextmanager
    def sent(self, slots: np.ndarray, mask_rows: np.ndarray, count: int) -> Iterator[None]:
        """Copies the first `count` masks to rows 1 .. count on the device, and slots and mask rows int64 [rows], after
        the launches that still read the current ones and in parallel with what runs. Launches inside the context read
        the new ones."""
        rows = self._rows.numpy()
        rows[:, len(slots) :] = 0
        rows[0, : len(slots)], rows[1, : len(slots)] = slots, mask_rows
        target, source = self._allowed[1 : 1 + count], self._host[:count]
        if self._copies is None:
            target.copy_(source)
            self._sampled.copy_(self._rows)
            yield
            return
        with torch.cuda.stream(self._copies.stream):
            self._copies.stream.wait_event(self._copies.read)
            target.copy_(source, non_blocking=True)
            self._sampled.copy_(self._rows, non_blocking=True)
            self._copies.sent.record(self._copies.stream)
        torch.cuda.current_stream().wait_event(self._copies.sent)
        try:
            yield
        finally:
            self._copies.read.record()
