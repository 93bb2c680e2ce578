"""Peak memory of a computation, found without computing it: on the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts the storages of meta tensors that are made inside, until nothing refers to them.

    live: bytes now; peak: the most so far. Memory from before does not count. Operations take their CPU path, which
    for some holds more than the GPU's kernels.
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
        # Unknown inputs were allocated before; marking them as known keeps views of them from counting as new memory.
        self._known.update(_key(tensor) for tensor in tree_iter((args, kwargs)) if _is_meta(tensor))
        made = func(*args, **kwargs)
        for tensor in tree_iter(made):
            if _is_meta(tensor) and _key(tensor) not in self._known:
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, key, num_bytes)

    def _remove(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
