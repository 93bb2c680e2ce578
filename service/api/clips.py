"""Encoded reference clips, kept for the next request that brings the same one."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

CLIP_CACHE = 64
"""Clips of up to a minute, a third of a megabyte each."""


class ClipCache:
    """Patches of the clips that were encoded last, by what they were made from."""

    def __init__(self) -> None:
        self._patches: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def get(self, key: bytes) -> np.ndarray | None:
        if key in self._patches:
            self._patches.move_to_end(key)
        return self._patches.get(key)

    def put(self, key: bytes, patches: np.ndarray) -> None:
        self._patches[key] = patches
        if len(self._patches) > CLIP_CACHE:
            self._patches.popitem(last=False)
