"""Is a forward capturable? Runs it under fake tensors, without data: whatever needs data on the host raises.

A dispatch mode alone does not see .tolist(), .numpy() or torch.tensor(...); a function mode alone does not see bool()
of an intermediate. So three watch: fake tensors (data-dependent values and shapes), a function mode (calls that read
or bring in host data, also from real tensors such as parameters) and a dispatch mode (index lists, boolean masks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from models.interfaces.capturable import Bucket, BufferSpec, Capturable
from models.layers import norms
from models.layers.kv_cache import PagedBatch, StateRows
from models.protocol import Decoder
from service.engine.chat.slot_state import allocate_layers

_HOST_READS = {
    *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "cpu", "nonzero")
}
_HOST_WRITES = {"tensor", "as_tensor", "asarray", "new_tensor"}
_FROM_MEMORY = ("from_numpy", "frombuffer")


class AuditError(Exception):
    """The forward cannot be captured; the message names the call."""


def audit(capturable: Capturable, bucket: Bucket) -> dict[str, BufferSpec]:
    """Shapes and dtypes of the outputs at `bucket`; AuditError when forward reads or brings in host data."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        buffers = {
            name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in capturable.buffer_specs(bucket).items()
        }
    try:
        with _no_tensors_from_memory(), _no_constants_of_a_cpu(), fake, _HostCalls(), _IndexedByData():
            outputs = capturable.forward(buffers, bucket)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise AuditError(f"{type(capturable).__name__}: {error.func} needs data on the host") from error
    return {name: BufferSpec(tuple(value.shape), value.dtype) for name, value in outputs.items()}


def audited_decode(decoder: Decoder, rows: int) -> BufferSpec:
    """Shape and dtype of a decode step's logits; fake tensors raise where the decoder reads a value on the host."""
    with _no_constants_of_a_cpu(), FakeTensorMode(allow_non_fake_inputs=True):
        states = allocate_layers(decoder.state_specs(), 4, torch.device("cpu"))
        read = torch.empty(rows, dtype=torch.int64)
        batch = PagedBatch(
            [spec.allocate(4, 16, torch.device("cpu"), torch.float32) for spec in decoder.cache_specs()],
            page_size=16,
            slot_mapping=torch.empty(rows, dtype=torch.int64),
            block_tables=torch.empty((rows, 3), dtype=torch.int32),
            seq_lens=torch.empty(rows, dtype=torch.int32),
            states=StateRows(states, torch.empty_like(read), read) if states else None,
        )
        hidden = decoder.embed(torch.empty(rows, dtype=torch.int64))
        positions = torch.empty((decoder.position_axes, rows), dtype=torch.int32)
        logits = decoder.logits(decoder.forward(hidden, positions, batch))
    return BufferSpec(tuple(logits.shape), logits.dtype)


def audited_verify(decoder: Decoder, rows: int, tokens: int) -> BufferSpec:
    """The same of a step with `tokens` tokens of each row, drafts among them, and of the drafter behind it."""
    with _no_constants_of_a_cpu(), FakeTensorMode(allow_non_fake_inputs=True):
        cpu, each = torch.device("cpu"), torch.empty(rows, dtype=torch.int64)
        states = allocate_layers(decoder.state_specs(), 4, cpu)
        inputs = allocate_layers(decoder.pending_specs(tokens), 4, cpu) if tokens > 1 else []
        batch = PagedBatch(
            [spec.allocate(4, 16, cpu, torch.float32) for spec in decoder.cache_specs()],
            page_size=16,
            slot_mapping=torch.empty(rows * tokens, dtype=torch.int64),
            cu_seqlens_q=torch.empty(rows + 1, dtype=torch.int32),
            prefill_tables=torch.empty((rows, 3), dtype=torch.int32),
            prefill_lens=torch.empty(rows, dtype=torch.int32),
            states=StateRows(states, each, each, inputs=inputs, slots=each, pending=each) if states else None,
        )
        embeddings = decoder.embed(torch.empty(rows * tokens, dtype=torch.int64))
        positions = torch.empty((decoder.position_axes, rows * tokens), dtype=torch.int32)
        hidden = decoder.forward(embeddings, positions, batch)
        if decoder.drafter is not None:
            hidden = decoder.drafter(hidden, embeddings, positions, batch)
        logits = decoder.logits(hidden)
    return BufferSpec(tuple(logits.shape), logits.dtype)


@contextmanager
def _no_constants_of_a_cpu() -> Iterator[None]:
    """The first call of a norm on a CPU makes constants that later ones find; a GPU's kernels have none. Here each call
    makes them, by a fill, and none is kept: a fake one would be found by real calls."""

    def filled(value: float, device: torch.device) -> Tensor:
        return torch.full((), value, dtype=torch.float32, device=device)

    with mock.patch.object(norms, "_scalar", filled):
        yield


class _HostCalls(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOST_READS:
            raise AuditError(f"{name} reads a tensor on the host")
        if name in _HOST_WRITES:
            raise AuditError(f"torch.{name} brings in host data")
        return func(*args, **(kwargs or {}))


class _IndexedByData(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.lift_fresh.default and args[0].dim():
            raise AuditError("a list becomes a tensor of host data")
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_, torch.ops.aten.index_put):
            masks = (index for index in args[1] if isinstance(index, Tensor))
            if any(index.dtype in (torch.bool, torch.uint8) for index in masks):
                raise AuditError(f"{func} takes a boolean mask, whose size is data")
        return func(*args, **(kwargs or {}))


@contextmanager
def _no_tensors_from_memory() -> Iterator[None]:
    """No mode sees these two, so they are replaced meanwhile."""
    originals = {name: getattr(torch, name) for name in _FROM_MEMORY}

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise AuditError("a tensor over host memory brings in host data")

    for name in _FROM_MEMORY:
        setattr(torch, name, refuse)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
