"""Ids of texts that were tokenized lately: a conversation sends its earlier turns, an application its system prompt and
a chat template what it has between them with every request."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable

LONGEST = 1 << 18
"""Characters of a text that is kept: a longer one would leave too little room for others."""
CHARACTERS = 1 << 22
"""Characters of all texts that are kept, with OVERHEAD for each: 4 to 16 MB, and for ordinary text at most as much
again in ids."""
OVERHEAD = 256
"""Characters that a text counts beside its own: what a short one takes in fact."""


class RecentTexts:
    """Calls `encode` for texts that are not kept; those used longest ago make room. Thread-safe."""

    def __init__(self, encode: Callable[[str], list[int]], characters: int = CHARACTERS) -> None:
        """characters: of all texts that are kept, with OVERHEAD for each."""
        self._encode = encode
        self._most = characters
        self._characters = 0
        self._kept: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def ids(self, text: str) -> list[int]:
        """What `encode` returns for the text; the list is the caller's own."""
        if len(text) > LONGEST:
            return self._encode(text)
        with self._lock:
            if (kept := self._kept.get(text)) is not None:
                self._kept.move_to_end(text)
                return kept.tolist()
        ids = self._encode(text)  # Without the lock: other threads tokenize meanwhile.
        with self._lock:
            if text not in self._kept:
                self._kept[text] = array("i", ids)
                self._characters += len(text) + OVERHEAD
                while self._characters > self._most:
                    self._characters -= len(self._kept.popitem(last=False)[0]) + OVERHEAD
        return ids
