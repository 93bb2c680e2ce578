"""Device buffers of one call, filled from a plan by one upload.

All buffers of a bucket lie in one block of device memory with a pinned block of the same layout on the host. The whole
host block is written, data and filler, and uploaded in one copy. Buffers that the plan gives as device tensors are
written on the device; buffers that it does not name hold their filler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.interfaces.capturable import BufferSpec, Plan

_ALIGNMENT = 256
"""Bytes, as cudaMalloc aligns: kernels load vectors from the start of a buffer."""
_NUMPY = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}

_TORCH = {dtype: name for name, dtype in _NUMPY.items()}


@dataclass(frozen=True)
class Field:
    """Where a buffer lies in its block."""

    spec: BufferSpec
    start: int
    stop: int

    def of(self, block: Tensor) -> Tensor:
        """The buffer as a view of its block, uint8 [bytes]."""
        return block[self.start : self.stop].view(self.spec.dtype).view(self.spec.shape)


@dataclass(frozen=True, eq=False)
class Layout:
    """Buffers of one bucket, one after the other in the order of their specs."""

    fields: Mapping[str, Field]
    num_bytes: int

    @classmethod
    def of(cls, specs: Mapping[str, BufferSpec]) -> Layout:
        fields, end = {}, 0
        for name, spec in specs.items():
            size = torch.Size(spec.shape).numel() * spec.dtype.itemsize
            fields[name] = Field(spec, end, end + size)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(fields, end)


class Upload:
    """A host block and a device block with the fields of one layout."""

    def __init__(self, layout: Layout, host: Tensor, device: Tensor) -> None:
        self._host = host
        self._device = device
        self._fields = layout.fields
        block = host.numpy()
        self._arrays = {
            name: block[field.start : field.stop].view(_NUMPY[field.spec.dtype]).reshape(field.spec.shape)
            for name, field in layout.fields.items()
            if field.spec.dtype in _NUMPY
        }
        self.buffers = {name: field.of(device) for name, field in layout.fields.items()}

    def fill(self, plan: Plan) -> dict[str, Tensor]:
        """Writes every buffer, its filler included, and returns the buffers by name.

        Raises ValueError for a name without a buffer, another dtype or more rows than the buffer has.
        """
        for name in (*plan.arrays, *plan.tensors):
            if name not in self._fields:
                raise ValueError(f"plan names {name!r}; the buffers are {sorted(self._fields)}")
        start = stop = 0
        for name, field in self._fields.items():
            fill = plan.fills.get(name, 0)
            if name in plan.tensors:
                _write_device(name, self.buffers[name], plan.tensors[name], fill)
            elif name in self._arrays:
                _write_host(name, self._arrays[name], plan.arrays.get(name), fill)
                # Behind a buffer that is written on the device, which a copy across it would overwrite.
                if field.start >= stop + _ALIGNMENT:
                    self._copy(start, stop)
                    start = field.start
                stop = field.stop
            elif name in plan.arrays:
                raise ValueError(f"buffer {name!r} is {field.spec.dtype}; give it as device tensors")
            else:
                self.buffers[name].fill_(fill)
        self._copy(start, stop)
        return self.buffers

    def _copy(self, start: int, stop: int) -> None:
        if stop > start:
            self._device[start:stop].copy_(self._host[start:stop], non_blocking=True)


def _write_host(name: str, target: np.ndarray, array: np.ndarray | None, fill: float) -> None:
    rows = 0
    if array is not None:
        rows = array.shape[0]
        if array.dtype != target.dtype:
            raise ValueError(f"buffer {name!r} is {target.dtype} and its array is {array.dtype}")
        if rows > target.shape[0] or array.shape[1:] != target.shape[1:]:
            raise ValueError(f"buffer {name!r} has shape {target.shape} and its array {array.shape}")
        target[:rows] = array
    target[rows:] = fill


def _write_device(name: str, target: Tensor, tensors: list[Tensor], fill: float) -> None:
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.shape[0]
        if end > target.shape[0] or tensor.shape[1:] != target.shape[1:]:
            raise ValueError(
                f"buffer {name!r} has shape {tuple(target.shape)}; row {start} on gets {tuple(tensor.shape)}"
            )
        target[start:end].copy_(tensor)
    target[end:].fill_(fill)


class StaticBuffers:
    """The device block that all buckets of one capturable share, with two pinned host blocks used alternately.

    Sharing is safe: a call writes its whole layout, and calls run one after the other on one stream.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)] if pinned else None
        self._uploads: dict[Layout, list[Upload]] = {}
        self._current = 0
        """Index of the host block that was used last."""

    @property
    def num_bytes(self) -> int:
        return self.device.numel()

    def fill(self, layout: Layout, plan: Plan) -> dict[str, Tensor]:
        """Upload.fill through the host block that was not used last; waits only if that one is still being copied."""
        self._current = 1 - self._current
        if self._copied is None or not layout.fields:
            return self._upload(layout).fill(plan)
        self._copied[self._current].synchronize()
        buffers = self._upload(layout).fill(plan)
        self._copied[self._current].record()
        return buffers

    def _upload(self, layout: Layout) -> Upload:
        uploads = self._uploads.get(layout)
        if uploads is None:
            uploads = self._uploads[layout] = [Upload(layout, block, self.device) for block in self._hosts]
        return uploads[self._current]


def exact_buffers(specs: Mapping[str, BufferSpec], plan: Plan, device: torch.device) -> dict[str, Tensor]:
    """New buffers of the specs' sizes, filled from the plan: the eager route."""
    layout = Layout.of(specs)
    # torch's allocators reuse a freed block only after the copies and kernels that use it have finished.
    host = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return Upload(layout, host, torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)).fill(plan)


def upload_arrays(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Device copies of host arrays, in one transfer."""
    starts, end = list[int](), 0
    for array in arrays.values():
        starts.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    block, sent = host.numpy(), torch.empty(end, dtype=torch.uint8, device=device)
    for start, array in zip(starts, arrays.values(), strict=True):
        np.copyto(block[start : start + array.nbytes].view(array.dtype).reshape(array.shape), array)
    sent.copy_(host, non_blocking=True)
    return {
        name: sent[start : start + array.nbytes].view(_TORCH[array.dtype]).view(array.shape)
        for start, (name, array) in zip(starts, arrays.items(), strict=True)
    }
