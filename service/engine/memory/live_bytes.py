"""The peak memory of a computation, from a run on the meta device, where nothing is computed."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Form(NamedTuple):
    """Form of a tensor that owns its storage and fills it from the start."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize if all(self.shape) else 0


_forms: dict[Hashable, _Form] = {}
"""Forms of results, by operation and the metadata of its arguments."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of meta tensors that are created inside this context, until nothing refers to their storage.

    live: bytes now. peak: the largest number so far. Earlier allocations do not count. Operations take their CPU path,
    which in some cases needs more memory than the GPU's kernels.

    An operation on the meta device runs in Python and takes nearly a millisecond. A model repeats the same few
    operations in many layers and steps, so the form of a result is remembered if it is a single new tensor that is not
    a view of an argument.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        key = (func, _metadata(args), _metadata(tuple(kwargs.items())))
        form = _forms.get(key)
        if form is not None:
            made = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")
            self._add(made.untyped_storage())
            return made
        # Unknown inputs were allocated before; marking them as known keeps views of them from counting as new memory.
        self._known.update(map(_key, _meta_tensors((args, kwargs))))
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_meta and _key(result) not in self._known:
            form = _Form(tuple(result.shape), result.stride(), result.dtype)
            if form.num_bytes == result.untyped_storage().nbytes() and not result.storage_offset():
                _forms[key] = form
        for tensor in _meta_tensors(result):
            if _key(tensor) not in self._known:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, key, num_bytes)

    def _remove(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes


def _metadata(value: Any) -> Hashable:
    """Everything that the form of a result can depend on. It includes types, since 1, 1.0 and True are equal."""
    if isinstance(value, Tensor):
        return (value.device, value.dtype, value.shape, value.stride(), value.storage_offset())
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_metadata, value))
    return (type(value), value)


def _meta_tensors(value: object) -> Iterator[Tensor]:
    """The tensors in what an operation takes or returns. torch's own walk over such trees takes longer than the
    operation."""
    if isinstance(value, Tensor):
        if value.is_meta:
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _meta_tensors(item)
    elif isinstance(value, Mapping):
        yield from _meta_tensors([*value.values()])


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
