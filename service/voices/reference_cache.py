"""Reference audio of recent requests, encoded, in memory."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

CACHED_REFERENCES = 64
"""Encoded reference audio of up to a minute: a third of a megabyte each."""


class ReferenceCache:
    """Patches of the reference audio that was encoded last, by a digest of samples and model (LRU)."""

    def __init__(self) -> None:
        self._patches: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def get(self, key: bytes) -> np.ndarray | None:
        if key in self._patches:
            self._patches.move_to_end(key)
        return self._patches.get(key)

    def put(self, key: bytes, patches: np.ndarray) -> None:
        self._patches[key] = patches
        if len(self._patches) > CACHED_REFERENCES:
            self._patches.popitem(last=False)
